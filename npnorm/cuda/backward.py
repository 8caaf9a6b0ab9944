"""The backward kernel: one body for every format, option and width of row."""

import numpy as np
from numba import cuda

from .addresses import make_place, make_row_start
from .elements import HALVES, TYPES, add_closely, add_exactly, compensated, make_element, make_elements
from .rows import exchange_size
from .sums import make_gather, number_of, shrinking
from .table import SIZES
from .vectors import device, fma

try:
    from numba.cuda.types import float64, uint32
except ImportError:
    from numba.core.types import float64, uint32


def make_apply(spec, wide, extreme):
    """A function that writes dx of a row, dresidual added, and adds to the sums of dweight and dbias.

    Gradients are in the dtype `wide`. For `extreme` rows the chunks are read again, and
    the weight for every row, from the first cache: registers are scarce.
    """
    plan, chunk, threads = spec.plan, spec.chunk, spec.threads
    centered, offset, weighted = plan.centered, spec.offset, plan.weight is not None
    written, added = plan.out is not None, plan.dresidual is not None
    sum_weight, sum_bias = plan.dweight is not None, plan.dbias is not None
    exact_weight, exact_bias = plan.dweight not in HALVES, plan.dbias not in HALVES
    number = number_of(plan)
    kind = TYPES[number]
    x_elements, dy_elements, weight_elements, dresidual_elements, dx_elements = (
        make_elements(form, chunk, spec.width, number)
        for form in (plan.x, plan.other, plan.weight, plan.dresidual, plan.out)
    )
    x_of, dy_of, weight_of = x_elements.number, dy_elements.number, weight_elements.number
    load_x, load_dy, load_weight = x_elements.load, dy_elements.load, weight_elements.load
    dresidual_of, load_dresidual = dresidual_elements.number, dresidual_elements.load
    dy_count, dresidual_count = dy_elements.words, dresidual_elements.words
    write_dx = dx_elements.write

    @device
    def add(sums, errors, at, value, exact):
        if exact:
            sums[at], errors[at] = add_closely(sums[at], errors[at], value)
        else:
            sums[at] = sums[at] + value

    @device
    def apply(
        words, dy_words, weights, dweights, dweight_errors, dbiases, dbias_errors, x_row, dy_row, weight,
        dresidual_row, dx_row, steps, first, limit, high, low, rstd, mean_g, mean_gx, weight_offset,
    ):  # fmt: skip
        """dx = (g - mean(g) - x̂·mean(g·x̂))·rstd + dresidual; dweight += dy·x̂, dbias += dy. Chunk k is columns
        first + k·threads·chunk and on."""
        m, rest, r, m_g, m_gx = wide(high), wide(low), wide(rstd), wide(mean_g), wide(mean_gx)
        shrink, factor = r, r
        if extreme:
            shrink = shrinking(rstd)
            m, rest, factor = m * shrink, rest * shrink, r / shrink
        more = number(weight_offset)
        numbers = cuda.local.array(chunk, kind)
        others = cuda.local.array(dresidual_count, uint32)
        for k in range(steps):
            j = first + k * threads * chunk
            if j < limit:
                at, dy_at = 4 * k, dy_count * k
                if extreme:
                    at, dy_at = 0, 0
                    load_x(words, 0, x_row, j, limit)
                    load_dy(dy_words, 0, dy_row, j, limit)
                if weighted and written:
                    load_weight(weights, 0, weight, j, limit)
                if added:
                    load_dresidual(others, 0, dresidual_row, j, limit)
                for i in range(chunk):
                    d = dy_of(dy_words, dy_at, i)
                    normal = wide(x_of(words, at, i))
                    g = wide(d)
                    if extreme:
                        normal = normal * shrink
                    if centered:
                        normal = (normal - m) - rest
                    normal = normal * factor
                    if written:
                        if weighted:
                            w = weight_of(weights, 0, i)
                            if offset:
                                w = w + more
                            g = g * wide(w)
                        if centered:
                            g = g - m_g
                        numbers[i] = number(fma(-normal, m_gx, g) * r)
                        if added:
                            numbers[i] = numbers[i] + dresidual_of(others, 0, i)
                    if sum_weight:
                        add(dweights, dweight_errors, k * chunk + i, number(wide(d) * normal), exact_weight)
                    if sum_bias:
                        add(dbiases, dbias_errors, k * chunk + i, d, exact_bias)
                if written:
                    write_dx(dx_row, j, limit, numbers)

    return apply


def make_deliver(spec):
    """A function that adds up the sums of the rows of a block, in order, and stores them as the block's partial sum.

    deliver(sums, errors, exchange, partial, thread, group, cols, first, exact)
    """
    plan, chunk, threads, rows = spec.plan, spec.chunk, spec.threads, spec.rows
    vectors = spec.vectors
    number = number_of(plan)
    kind = TYPES[number]
    size = threads * vectors * chunk
    write = make_elements("float64" if plan.double else "float32", chunk, spec.width, number).write
    together = rows > 1

    @device
    def deliver(sums, errors, partial, thread, group, cols, first):
        exchange = cuda.shared.array(0, kind)
        numbers = cuda.local.array(chunk, kind)
        for turn in range(rows):
            if group == turn:
                for k in range(vectors):
                    for i in range(chunk):
                        at = k * chunk + i
                        place = at * threads + thread
                        total, error = sums[at], errors[at]
                        if turn > 0:
                            total, error = add_exactly(exchange[place], error + exchange[size + place], total)
                        if turn < rows - 1:
                            exchange[place] = total
                            exchange[size + place] = error
                        numbers[i] = compensated(total, error)
                    j = first + k * threads * chunk
                    if turn == rows - 1 and j < cols:
                        write(partial, j, cols, numbers)
            if together:
                cuda.syncthreads()

    return deliver


def make_backward(spec, careful=True):
    """The backward kernel of rows in registers, or of very wide rows of which the sums are known (mode "looped")."""
    plan, chunk, threads, together, vectors = spec.plan, spec.chunk, spec.threads, spec.rows, spec.vectors
    looped = spec.mode == "looped"
    weighted, added, written = (given is not None for given in (plan.weight, plan.dresidual, plan.out))
    sum_weight, sum_bias, centered = plan.dweight is not None, plan.dbias is not None, plan.centered
    number = number_of(plan)
    kind, zero = TYPES[number], number(0.0)
    x_elements, dy_elements, weight_elements = (
        make_elements(form, chunk, spec.width, number) for form in (plan.x, plan.other, plan.weight)
    )
    load_x, load_dy = x_elements.load, dy_elements.load
    dy_words_each, weight_words_each = dy_elements.words, weight_elements.words
    word_count, dy_count, weight_count = 4 * vectors, dy_words_each * vectors, weight_words_each
    sums_count = vectors * chunk
    weight_sums, bias_sums = sums_count if sum_weight else 1, sums_count if sum_bias else 1
    shared_size = 1 if looped else exchange_size(threads, together)
    number_size = 8 if plan.double else 4
    gather = None if looped else make_gather(spec, careful)
    apply, apply_extreme = make_apply(spec, number, False), make_apply(spec, np.float64, True)
    deliver = make_deliver(spec)
    find_place, row_start = make_place(spec.lead), make_row_start(spec.lead)
    statistic = make_element("float64", np.float64).get
    x_size, dy_size, dresidual_size, dx_size = (
        SIZES[form or "float32"] for form in (plan.x, plan.other, plan.dresidual, plan.out)
    )
    if looped:

        @device
        def known(
            words, dy_words, weights, x_row, dy_row, weight, own, shared, thread, group, active, limit, count, inverse,
            mean, rstd, sums, row, weight_offset,
        ):  # fmt: skip
            low, mean_g = statistic(sums, 4 * row), statistic(sums, 4 * row + 1)
            return low, mean_g, statistic(sums, 4 * row + 2), statistic(sums, 4 * row + 3) == 1.0

    else:

        @device
        def known(
            words, dy_words, weights, x_row, dy_row, weight, own, shared, thread, group, active, limit, count, inverse,
            mean, rstd, sums, row, weight_offset,
        ):  # fmt: skip
            return gather(
                words, dy_words, weights, x_row, dy_row, weight, vectors, own, shared, thread, group, active, limit,
                count, inverse, mean, rstd, weight_offset,
            )  # fmt: skip

    def backward(
        dy, x, weight, mean, rstd, dresidual, dx, sums, dweight_partials, dbias_partials, rows, cols, lengths,
        dy_strides, x_strides, dresidual_strides, dx_strides, eps, weight_offset,
    ):  # fmt: skip
        """dx = (g - mean(g) - x̂·mean(g·x̂))·rstd + dresidual, g = dy·weight; partial sums of dy·x̂ and dy over rows."""
        words = cuda.local.array(word_count, uint32)
        dy_words = cuda.local.array(dy_count, uint32)
        weights = cuda.local.array(weight_count, uint32)
        dweights, dweight_errors = cuda.local.array(weight_sums, kind), cuda.local.array(weight_sums, kind)
        dbiases, dbias_errors = cuda.local.array(bias_sums, kind), cuda.local.array(bias_sums, kind)
        shared = cuda.shared.array(shared_size, float64)
        for i in range(weight_sums):
            dweights[i] = zero
            dweight_errors[i] = zero
        for i in range(bias_sums):
            dbiases[i] = zero
            dbias_errors[i] = zero
        thread, group = np.int64(cuda.threadIdx.x), 0
        if together > 1:
            group = thread // threads
            thread = thread % threads
        count = np.float64(cols)
        inverse = 1.0 / count
        chunks = (cols + chunk - 1) // chunk
        own = (chunks - thread + threads - 1) // threads * chunk
        first = thread * chunk
        block, blocks = np.int64(cuda.blockIdx.x), np.int64(cuda.gridDim.x)
        if looped:
            first = (block * threads + thread) * chunk
            block, blocks = np.int64(cuda.blockIdx.y), np.int64(cuda.gridDim.y)
        base = block * together
        while base < rows:
            row = base + group
            active = row < rows
            row = min(row, rows - 1)
            limit = cols if active else 0
            place = find_place(row, lengths)
            x_row = row_start(x, place, x_strides, x_size)
            dy_row = row_start(dy, place, dy_strides, dy_size)
            dresidual_row, dx_row = x_row, x_row
            if added:
                dresidual_row = row_start(dresidual, place, dresidual_strides, dresidual_size)
            if written:
                dx_row = row_start(dx, place, dx_strides, dx_size)
            for k in range(vectors):
                j = first + k * threads * chunk
                if j < limit:
                    load_x(words, 4 * k, x_row, j, limit)
                    load_dy(dy_words, dy_words_each * k, dy_row, j, limit)
            high, r = 0.0, statistic(rstd, row)
            if centered:
                high = statistic(mean, row)
            low, mean_g, mean_gx, ordinary = known(
                words, dy_words, weights, x_row, dy_row, weight, own, shared, thread, group, active, limit, count,
                inverse, high, r, sums, row, weight_offset,
            )  # fmt: skip
            if ordinary or not careful:
                apply(
                    words, dy_words, weights, dweights, dweight_errors, dbiases, dbias_errors, x_row, dy_row, weight,
                    dresidual_row, dx_row, vectors, first, limit, high, low, r, mean_g, mean_gx, weight_offset,
                )  # fmt: skip
            else:
                far_words = cuda.local.array(4, uint32)
                far_dy_words = cuda.local.array(dy_words_each, uint32)
                far_weights = cuda.local.array(weight_words_each, uint32)
                apply_extreme(
                    far_words, far_dy_words, far_weights, dweights, dweight_errors, dbiases, dbias_errors, x_row,
                    dy_row,
                    weight, dresidual_row, dx_row, vectors, first, limit, high, low, r, mean_g, mean_gx, weight_offset,
                )  # fmt: skip
            base += blocks * together
        if sum_weight:
            partial = dweight_partials + block * cols * number_size
            deliver(dweights, dweight_errors, partial, thread, group, cols, first)
        if sum_bias:
            partial = dbias_partials + block * cols * number_size
            deliver(dbiases, dbias_errors, partial, thread, group, cols, first)

    return backward
