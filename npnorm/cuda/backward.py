"""The backward kernels: one body that finds what a row's gradient needs, one that uses it, and one that adds up partial sums."""

import numpy as np
from numba import cuda

from .elements import (
    HALVES,
    TYPES,
    add_closely,
    add_exactly,
    compensated,
    make_element,
    make_elements,
    row_start,
)
from .extreme import make_places
from .rows import exchange_size, make_anyone, make_chunk_sums, make_reduce, two
from .table import COLUMNS, SIZES, SLICES
from .vectors import device, fma

try:
    from numba.cuda.types import float64, uint32
except ImportError:
    from numba.core.types import float64, uint32

LIMIT, LIMIT_DOUBLE = 2.0**60, 2.0**480
"""Rows whose rstd lies between 1/limit and limit, with sums of g and g·x̂ below the limit, are ordinary."""

TRUSTED = 2.0**-40
"""How far a mean that is given may be from the row's for rounding to be the reason."""


@device
def is_ordinary(rstd, mean_g, mean_gx, limit):
    """Whether nothing of a row comes near the limits of its dtype. False for NaN."""
    return 1.0 / limit < rstd and rstd < limit and abs(mean_g) < limit and abs(mean_gx) < limit


@device
def shrinking(rstd):
    """A scale with which no difference of two of a row's largest numbers overflows, nor the smallest vanish."""
    return 0.25 if rstd < 1.0 else 1.0


def limit_of(plan):
    return LIMIT_DOUBLE if plan.double else LIMIT


def number_of(plan):
    """The dtype of the arithmetic on elements."""
    return np.float64 if plan.double else np.float32


def make_gather(spec, careful=True):
    """A function that finds the low part of the mean, mean(g) and mean(g·x̂) of an ordinary row, and of an extreme one in float64.

    gather(words, dy_words, weights, x_row, dy_row, weight, steps, own, shared, thread, group, active, cols, inverse, mean,
    rstd, weight_offset) -> low, mean_g, mean_gx, whether the row is ordinary.
    """
    plan, chunk, threads, rows = spec.plan, spec.chunk, spec.threads, spec.rows
    centered, double, offset, weighted = plan.centered, plan.double, spec.offset, plan.weight is not None
    whole, registers = spec.width == chunk, spec.mode == "registers"
    number = number_of(plan)
    kind, zero, limit_here = TYPES[number], number(0.0), limit_of(plan)
    x_elements, dy_elements, weight_elements = (
        make_elements(form, chunk, spec.width, number) for form in (plan.x, plan.other, plan.weight)
    )
    load_x, load_dy, load_weight = x_elements.load, dy_elements.load, weight_elements.load
    x_of, dy_of, weight_of = x_elements.number, dy_elements.number, weight_elements.number
    dy_count = dy_elements.words
    get_x, get_dy, get_weight = (make_element(form, np.float64).get for form in (plan.x, plan.other, plan.weight))
    add_elements, add_products = make_chunk_sums(chunk, number, True)
    reduce_two = make_reduce(threads, rows, two)
    anyone = make_anyone(threads, rows)
    place = make_places(spec)

    @device
    def find_low(words, x_row, steps, shared, thread, group, limit, count, inverse, mean, rstd):
        """What rounding the given mean to float64 has lost; 0 if the mean is not the row's."""
        total, error = zero, zero
        for k in range(steps):
            j = (k * threads + thread) * chunk
            if j < limit:
                at = 4 * k if registers else 0
                if not registers:
                    load_x(words, 0, x_row, j, limit)
                for i in range(chunk):
                    if whole or j + i < limit:
                        total, error = add_exactly(total, error, x_of(words, at, i) - number(mean))
        low, _ = reduce_two(np.float64(total) + np.float64(error), 0.0, shared, thread, group, count, inverse, 0.0)
        low = low * inverse
        return low if abs(low) <= TRUSTED * (abs(mean) + 1.0 / rstd) else 0.0

    @device
    def ordinary_sums(
        words, dy_words, weights, x_row, dy_row, weight, steps, shared, thread, group, limit, count, inverse,
        high, low, rstd, weight_offset,
    ):  # fmt: skip
        first, second, factor = number(high), number(low), number(rstd)
        more = number(weight_offset)
        values = cuda.local.array(chunk, kind)
        normals = cuda.local.array(chunk, kind)
        total, error, product, product_error = zero, zero, zero, zero
        for k in range(steps):
            j = (k * threads + thread) * chunk
            if j < limit:
                at, dy_at = 0, 0
                if registers:
                    at, dy_at = 4 * k, dy_count * k
                else:
                    load_x(words, 0, x_row, j, limit)
                    load_dy(dy_words, 0, dy_row, j, limit)
                if weighted:
                    load_weight(weights, 0, weight, j, limit)
                for i in range(chunk):
                    g = dy_of(dy_words, dy_at, i)
                    if weighted:
                        w = weight_of(weights, 0, i)
                        if offset:
                            w = w + more
                        g = g * w
                    d = x_of(words, at, i)
                    if centered:
                        d = (d - first) - second
                    values[i] = g
                    normals[i] = d * factor
                if centered:
                    total, error = add_elements(total, error, values)
                product, product_error = add_products(product, product_error, values, normals)
        a, b = reduce_two(
            np.float64(total) + np.float64(error), np.float64(product) + np.float64(product_error),
            shared, thread, group, count, inverse, 0.0,
        )  # fmt: skip
        return a * inverse, b * inverse

    @device
    def extreme_sums(
        x_row, dy_row, weight, own, shared, thread, group, limit, count, inverse, high, low, rstd, weight_offset
    ):
        total, error, product, product_error = 0.0, 0.0, 0.0, 0.0
        shrink = shrinking(rstd)
        for i in range(own):
            j = place(i, thread)
            if j < limit:
                g = get_dy(dy_row, j)
                if weighted:
                    w = get_weight(weight, j)
                    if offset:
                        w = np.float64(number(w) + number(weight_offset))
                    g = g * w
                total, error = add_exactly(total, error, g)
                normal = ((get_x(x_row, j) * shrink - high * shrink) - low * shrink) * (rstd / shrink)
                product, product_error = add_exactly(product, product_error, g * normal)
        a, b = reduce_two(
            compensated(total, error), compensated(product, product_error), shared, thread, group, count, inverse, 0.0
        )
        if not centered:
            a = 0.0
        return a * inverse, b * inverse

    @device
    def gather(
        words, dy_words, weights, x_row, dy_row, weight, steps, own, shared, thread, group, active, limit, count,
        inverse, mean, rstd, weight_offset,
    ):  # fmt: skip
        low = 0.0
        if centered:
            if double:
                low = find_low(words, x_row, steps, shared, thread, group, limit, count, inverse, mean, rstd)
            else:
                low = mean - np.float64(np.float32(mean))
        mean_g, mean_gx = ordinary_sums(
            words, dy_words, weights, x_row, dy_row, weight, steps, shared, thread, group, limit, count, inverse,
            mean, low, rstd, weight_offset,
        )  # fmt: skip
        ordinary = is_ordinary(rstd, mean_g, mean_gx, limit_here)
        extreme = active and not ordinary
        if careful and anyone(extreme):
            rest = low if double else 0.0
            far_g, far_gx = extreme_sums(
                x_row, dy_row, weight, own, shared, thread, group, limit, count, inverse, mean, rest, rstd,
                weight_offset,
            )  # fmt: skip
            if extreme:
                low, mean_g, mean_gx = rest, far_g, far_gx
            if registers:  # anew, so that they need no registers meanwhile
                for k in range(steps):
                    j = (k * threads + thread) * chunk
                    if j < limit:
                        load_x(words, 4 * k, x_row, j, limit)
                        load_dy(dy_words, dy_count * k, dy_row, j, limit)
        return low, mean_g, mean_gx, ordinary

    return gather


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
        """dx = (g - mean(g) - x̂·mean(g·x̂))·rstd + dresidual; dweight += dy·x̂, dbias += dy. Chunk k is columns first + k·threads·chunk and on."""
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
    kind, zero, limit_here = TYPES[number], number(0.0), limit_of(plan)
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
        dy, x, weight, mean, rstd, dresidual, dx, sums, dweight_partials, dbias_partials, rows, cols, inner,
        dy_outer, dy_inner, x_outer, x_inner, dresidual_outer, dresidual_inner, dx_outer, dx_inner,
        eps, weight_offset,
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
            x_row = row_start(x, row, inner, x_outer, x_inner, x_size)
            dy_row = row_start(dy, row, inner, dy_outer, dy_inner, dy_size)
            dresidual_row, dx_row = x_row, x_row
            if added:
                dresidual_row = row_start(dresidual, row, inner, dresidual_outer, dresidual_inner, dresidual_size)
            if written:
                dx_row = row_start(dx, row, inner, dx_outer, dx_inner, dx_size)
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
                    far_words, far_dy_words, far_weights, dweights, dweight_errors, dbiases, dbias_errors, x_row, dy_row,
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


def make_sums(spec, careful=True):
    """The kernel that finds what the gradients of very wide rows need."""
    plan, chunk, threads, together = spec.plan, spec.chunk, spec.threads, spec.rows
    centered = plan.centered
    number = number_of(plan)
    gather = make_gather(spec, careful)
    element = make_element("float64", np.float64)
    statistic, put = element.get, element.put
    dy_count = make_elements(plan.other, chunk, spec.width, number).words
    weight_count = make_elements(plan.weight, chunk, spec.width, number).words
    shared_size = exchange_size(threads, together)
    x_size, dy_size = SIZES[plan.x], SIZES[plan.other]

    def sums_of_rows(
        dy, x, weight, mean, rstd, dresidual, dx, sums, dweight_partials, dbias_partials, rows, cols, inner,
        dy_outer, dy_inner, x_outer, x_inner, dresidual_outer, dresidual_inner, dx_outer, dx_inner,
        eps, weight_offset,
    ):  # fmt: skip
        """The low part of the mean, mean(g), mean(g·x̂), and 1 if the row is ordinary, for each row."""
        words = cuda.local.array(4, uint32)
        dy_words = cuda.local.array(dy_count, uint32)
        weights = cuda.local.array(weight_count, uint32)
        shared = cuda.shared.array(shared_size, float64)
        thread = np.int64(cuda.threadIdx.x)
        count = np.float64(cols)
        inverse = 1.0 / count
        chunks = (cols + chunk - 1) // chunk
        steps = (chunks - thread + threads - 1) // threads
        row = np.int64(cuda.blockIdx.x)
        while row < rows:
            x_row = row_start(x, row, inner, x_outer, x_inner, x_size)
            dy_row = row_start(dy, row, inner, dy_outer, dy_inner, dy_size)
            high, r = 0.0, statistic(rstd, row)
            if centered:
                high = statistic(mean, row)
            low, mean_g, mean_gx, ordinary = gather(
                words, dy_words, weights, x_row, dy_row, weight, steps, steps * chunk, shared, thread, 0, True, cols,
                count, inverse, high, r, weight_offset,
            )  # fmt: skip
            if thread == 0:
                put(sums, 4 * row, low)
                put(sums, 4 * row + 1, mean_g)
                put(sums, 4 * row + 2, mean_gx)
                put(sums, 4 * row + 3, 1.0 if ordinary else 0.0)
            row += np.int64(cuda.gridDim.x)

    return sums_of_rows


def make_total(spec):
    """The kernel that adds up partial sums."""
    plan = spec.plan
    double = plan.double
    number = np.float64 if double else np.float32
    kind, zero = TYPES[number], number(0.0)
    get = make_element("float64" if double else "float32", number).get
    put = make_element(plan.out, number).put
    size = COLUMNS * SLICES

    def total(dweight_partials, dbias_partials, dweight, dbias, partials, cols):
        """gradient = Σ partials in order, compensated and rounded once."""
        totals, errors = cuda.shared.array(size, kind), cuda.shared.array(size, kind)
        partial, gradient = dweight_partials, dweight
        if cuda.blockIdx.y == 1:
            partial, gradient = dbias_partials, dbias
        thread = np.int64(cuda.threadIdx.x)
        part, column = thread // COLUMNS, thread % COLUMNS
        j = np.int64(cuda.blockIdx.x) * COLUMNS + column
        here = gradient != 0 and j < cols
        value, error = zero, zero
        if here:
            for i in range(part, partials, SLICES):
                value, error = add_exactly(value, error, get(partial, i * cols + j))
        totals[thread] = value
        errors[thread] = error
        cuda.syncthreads()
        if here and part == 0:
            for i in range(1, SLICES):
                place = i * COLUMNS + column
                value, error = add_exactly(value, error + errors[place], totals[place])
            put(gradient, j, compensated(value, error))

    return total
