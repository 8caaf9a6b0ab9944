"""The backward kernel: one body for every format, option and width of row."""

import numpy as np
from numba import cuda

from .addresses import make_place, make_row_start
from .elements import HALVES, TYPES, add_closely, add_exactly, compensated, known_sum, make_element, make_elements
from .rows import exponent_of, power_of_two
from .sums import Row, make_all_elements, make_gather, make_scaling, make_terms, number_of
from .table import SIZES, exchange_size
from .vectors import device, fma, prefetch

try:
    from numba.cuda.types import float64, uint32
except ImportError:
    from numba.core.types import float64, uint32


def make_apply(spec):
    """A function that writes dx of a row, dresidual added, and adds to the sums of dweight and dbias."""
    plan, chunk, threads, registers = spec.plan, spec.chunk, spec.threads, spec.mode == "registers"
    centered, weighted = plan.centered, plan.weight is not None
    written, added = plan.out is not None, plan.dresidual is not None
    sum_weight, sum_bias = plan.dweight is not None, plan.dbias is not None
    exact_weight, exact_bias = plan.dweight not in HALVES, plan.dbias not in HALVES
    number = number_of(plan)
    kind, one = TYPES[number], number(1.0)
    dy_elements, x_elements, dresidual_elements, dx_elements, weight_elements = make_all_elements(spec, number)
    load_x, load_dy, dy_of, dy_count, load_weight = (
        x_elements.load, dy_elements.load, dy_elements.number, dy_elements.words, weight_elements.load
    )  # fmt: skip
    dresidual_of, load_dresidual = dresidual_elements.number, dresidual_elements.load
    dresidual_count, write_dx = dresidual_elements.words, dx_elements.write
    normalize, multiply = make_terms(spec)

    @device
    def add(sums, errors, at, value, exact):
        if exact:
            sums[at], errors[at] = add_closely(sums[at], errors[at], value)
        else:
            sums[at] = sums[at] + value

    @device
    def apply(
        words, dy_words, weights, dweights, dweight_errors, dbiases, dbias_errors, x_row, dy_row, weight,
        dresidual_row, dx_row, steps, first, limit, row, mean_g, mean_gx, back,
    ):  # fmt: skip
        """dx = (g - mean(g) - x̂·mean(g·x̂))·rstd + dresidual; dweight += dy·x̂, dbias += dy. Chunk k is columns
        first + k·threads·chunk and on. rstd is row.factor·back, back a power of two that is 1 for ordinary rows."""
        normals = cuda.local.array(chunk, kind)
        numbers = cuda.local.array(chunk, kind)
        others = cuda.local.array(dresidual_count, uint32)
        for k in range(steps):
            j = first + k * threads * chunk
            if j < limit:
                at, dy_at = 0, 0
                if registers:
                    at, dy_at = 4 * k, dy_count * k
                else:
                    load_x(words, 0, x_row, j, limit)
                    load_dy(dy_words, 0, dy_row, j, limit)
                normalize(words, at, normals, row)
                if written:
                    if weighted:
                        load_weight(weights, 0, weight, j, limit)
                    if added:
                        load_dresidual(others, 0, dresidual_row, j, limit)
                    multiply(dy_words, dy_at, weights, numbers, row)
                    for i in range(chunk):
                        g = numbers[i]
                        if centered:
                            g = g - mean_g
                        numbers[i] = fma(-normals[i], mean_gx, g) * row.factor
                    if back != one:
                        for i in range(chunk):
                            numbers[i] = numbers[i] * back
                    if added:
                        for i in range(chunk):
                            numbers[i] = numbers[i] + dresidual_of(others, 0, i)
                    write_dx(dx_row, j, limit, numbers)
                for i in range(chunk):
                    d = dy_of(dy_words, dy_at, i)
                    if sum_weight:
                        add(dweights, dweight_errors, k * chunk + i, d * normals[i], exact_weight)
                    if sum_bias:
                        add(dbiases, dbias_errors, k * chunk + i, d, exact_bias)

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
    finished = compensated if plan.double else known_sum  # what float32 did not hold is added up again: see `total`

    @device
    def deliver(sums, errors, partial, thread, group, cols, first):
        exchange = cuda.shared.array(0, kind)
        numbers = cuda.local.array(chunk, kind)
        own = np.uint32(thread)  # without a sign: see `rows.make_reduce`
        for turn in range(rows):
            if group == turn:
                for k in range(vectors):
                    for i in range(chunk):
                        at = k * chunk + i
                        place = own + np.uint32(at * threads)
                        error_place = own + np.uint32(size + at * threads)
                        total, error = sums[at], errors[at]
                        if turn > 0:
                            total, error = add_exactly(exchange[place], error + exchange[error_place], total)
                        if turn < rows - 1:
                            exchange[place] = total
                            exchange[error_place] = error
                        numbers[i] = finished(total, error)
                    j = first + k * threads * chunk
                    if turn == rows - 1 and j < cols:
                        write(partial, j, cols, numbers)
            if together:
                cuda.syncthreads()

    return deliver


def make_backward(spec):
    """The backward kernel of rows in registers or in the cache, or of very wide rows of which the sums are known (mode
    "looped")."""
    plan, chunk, threads, together, vectors = spec.plan, spec.chunk, spec.threads, spec.rows, spec.vectors
    looped, registers = spec.mode == "looped", spec.mode == "registers"
    weighted, added, written = (given is not None for given in (plan.weight, plan.dresidual, plan.out))
    sum_weight, sum_bias, centered = plan.dweight is not None, plan.dbias is not None, plan.centered
    number = number_of(plan)
    kind, zero, one = TYPES[number], number(0.0), number(1.0)
    dy_elements, x_elements, _, _, weight_elements = make_all_elements(spec, number)
    load_x, load_dy = x_elements.load, dy_elements.load
    dy_words_each, weight_words_each = dy_elements.words, weight_elements.words
    held = vectors if registers else 1
    word_count, dy_count, weight_count = 4 * held, dy_words_each * held, weight_words_each
    sums_count = vectors * chunk
    weight_sums, bias_sums = sums_count if sum_weight else 1, sums_count if sum_bias else 1
    shared_size = 1 if looped else exchange_size(threads, together)
    number_size = 8 if plan.double else 4
    gather = None if looped else make_gather(spec)
    scaling, apply, deliver = make_scaling(plan), make_apply(spec), make_deliver(spec)
    statistic = make_element("float64", np.float64).get
    find_place, row_start = make_place(spec.lead), make_row_start(spec.lead)
    dy_unit, x_unit, dresidual_unit, dx_unit = spec.units(plan.other, plan.x, plan.dresidual, plan.out)
    x_size, dy_size = SIZES[plan.x], SIZES[plan.other]
    if looped:

        @device
        def complete(
            words, dy_words, weights, x_row, dy_row, weight, shared, thread, group, active, limit, count, inverse,
            row, at,
        ):  # fmt: skip
            low, shrink, factor = number(statistic(at, 0)), number(statistic(at, 3)), number(statistic(at, 4))
            known = Row(row.scale, row.high, low, factor, shrink, row.offset)
            return known, number(statistic(at, 1)), number(statistic(at, 2))

    else:

        @device
        def complete(
            words, dy_words, weights, x_row, dy_row, weight, shared, thread, group, active, limit, count, inverse,
            row, at,
        ):  # fmt: skip
            return gather(
                words, dy_words, weights, x_row, dy_row, weight, vectors, shared, thread, group, active, limit,
                count, inverse, row,
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
            x_row = row_start(x, place, x_strides, x_unit)
            dy_row = row_start(dy, place, dy_strides, dy_unit)
            if registers:
                for k in range(vectors):
                    j = first + k * threads * chunk
                    if j < limit:
                        load_x(words, 4 * k, x_row, j, limit)
                        load_dy(dy_words, dy_words_each * k, dy_row, j, limit)
            following = row + blocks * together
            if following < rows:  # on its way while this row is worked on
                next_place = find_place(following, lengths)
                x_next = row_start(x, next_place, x_strides, x_unit)
                dy_next = row_start(dy, next_place, dy_strides, dy_unit)
                for k in range(vectors):
                    j = first + k * threads * chunk
                    if j < cols:
                        prefetch(x_next + j * x_size)
                        prefetch(dy_next + j * dy_size)
            high, r = 0.0, statistic(rstd, row)
            if centered:
                high = statistic(mean, row)
            known, back = scaling(high, r, weight_offset)
            known, mean_g, mean_gx = complete(
                words, dy_words, weights, x_row, dy_row, weight, shared, thread, group, active, limit, count, inverse,
                known, sums + row * 40,
            )  # fmt: skip
            dresidual_row, dx_row = x_row, x_row  # not before: addresses take registers, too
            if added:
                dresidual_row = row_start(dresidual, place, dresidual_strides, dresidual_unit)
            if written:
                dx_row = row_start(dx, place, dx_strides, dx_unit)
            if known.shrink != one:
                back = number(np.float64(back) * power_of_two(-2 * exponent_of(np.float64(known.shrink))))
            apply(
                words, dy_words, weights, dweights, dweight_errors, dbiases, dbias_errors, x_row, dy_row,
                weight, dresidual_row, dx_row, vectors, first, limit, known, mean_g, mean_gx, back,
            )  # fmt: skip
            base += blocks * together
        if sum_weight:
            partial = dweight_partials + block * cols * number_size
            deliver(dweights, dweight_errors, partial, thread, group, cols, first)
        if sum_bias:
            partial = dbias_partials + block * cols * number_size
            deliver(dbiases, dbias_errors, partial, thread, group, cols, first)

    return backward
