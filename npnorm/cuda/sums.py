"""What the gradient of a row needs to know: the sums of g and of g·x̂, in a kernel of its own for very wide rows."""

from typing import NamedTuple

import numpy as np
from numba import cuda

from .addresses import make_place, make_row_start
from .elements import TYPES, add_exactly, make_element, make_elements
from .rows import (
    LARGEST_FACTOR,
    LARGEST_FACTOR_DOUBLE,
    exponent_of,
    finite_factor,
    make_anyone,
    make_chunk_sums,
    make_moderate,
    make_reduce,
    power_of_two,
    two,
)
from .table import WHOLE, exchange_size
from .vectors import device, fma, reciprocal_root

try:
    from numba.cuda.types import float64, uint32
except ImportError:
    from numba.core.types import float64, uint32

LIMIT, LIMIT_DOUBLE = 2.0**60, 2.0**480
"""Rows whose rstd lies between 1/limit and limit are ordinary. The others, of extreme size, are scaled."""

LARGEST_MEAN, LARGEST_MEAN_DOUBLE = 2.0**100, 2.0**900
"""Rows whose mean(g) and mean(g·x̂) are smaller are ordinary. Those of the others are found again, with g scaled."""

FARTHEST = 100
"""The largest exponent of a scaled mean, and of the rstd that goes with it unless the row is constant."""

TRUSTED = 2.0**-40
"""How far a mean that is given may be from the row's for rounding to be the reason."""


class Row(NamedTuple):
    """What turns x of a row into x̂ = ((x·scale - high) - low)·factor, and dy into g = (dy·shrink)·(weight·shrink), in
    the dtype of the arithmetic. Both scales are powers of two, and 1 for ordinary rows."""

    scale: float
    high: float
    low: float
    factor: float
    shrink: float
    offset: float
    """What is added to the weight."""


def number_of(plan):
    """The dtype of the arithmetic on elements."""
    return np.float64 if plan.double else np.float32


def make_all_elements(spec, number):
    """`Elements` of dy, x, dresidual, dx and the weight."""
    plan = spec.plan
    forms = plan.other, plan.x, plan.dresidual, plan.out, plan.weight
    return [
        make_elements(form, spec.chunk, spec.width, number, access)
        for form, access in zip(forms, (*spec.access, WHOLE), strict=True)
    ]


def make_scaling(plan):
    """A function scaling(mean, rstd, weight_offset) -> the `Row` before its gradient is looked at, and back: rstd is
    row.factor·back.

    row.scale and back are powers of two, 1 for ordinary rows, and else the same but for constant rows.
    """
    number = number_of(plan)
    limit, largest = (LIMIT_DOUBLE, LARGEST_FACTOR_DOUBLE) if plan.double else (LIMIT, LARGEST_FACTOR)
    moderate = make_moderate(number)

    @device
    def scaling(mean, rstd, weight_offset):
        scale, factor, back = 1.0, rstd, 1.0
        if not (1.0 / limit < rstd and rstd < limit):
            exponent = exponent_of(rstd)
            small = moderate(min(exponent, FARTHEST - exponent_of(mean)))
            large = moderate(max(small, exponent - FARTHEST))
            scale, back = power_of_two(small), power_of_two(large)
            factor = finite_factor(rstd * power_of_two(-large), rstd < np.inf, largest)
        # At once in the dtype of the arithmetic: float64 would take twice the registers all along.
        high = number(mean * scale)
        low = number(mean * scale - np.float64(high))
        return Row(number(scale), high, low, number(factor), number(1.0), number(weight_offset)), number(back)

    return scaling


def make_terms(spec):
    """Functions for a chunk: normalize(words, at, normals, row), normals = x̂, and multiply(dy_words, at, weights,
    gradients, row), gradients = g."""
    plan, chunk = spec.plan, spec.chunk
    centered, offset, weighted = plan.centered, spec.offset, plan.weight is not None
    number = number_of(plan)
    dy_elements, x_elements, _, _, weight_elements = make_all_elements(spec, number)
    scaled, dy_scaled, weight_of = x_elements.scaled, dy_elements.scaled, weight_elements.number

    @device
    def normalize(words, at, normals, row):
        scaled(words, at, normals, row.scale)
        for i in range(chunk):
            d = normals[i]
            if centered:
                d = (d - row.high) - row.low
            normals[i] = d * row.factor

    @device
    def multiply(dy_words, at, weights, gradients, row):
        dy_scaled(dy_words, at, gradients, row.shrink)
        for i in range(chunk):
            factor = row.shrink  # not under the branch in `scaled`: both ways at once would take registers
            if weighted:
                w = weight_of(weights, 0, i)
                if offset:
                    w = w + row.offset
                factor = w * row.shrink
            gradients[i] = gradients[i] * factor

    return normalize, multiply


def make_gather(spec):
    """A function that finds what the gradient of a row needs besides the row.

    gather(words, dy_words, weights, x_row, dy_row, weight, steps, shared, thread, group, active, limit, count, inverse,
    row) -> the row with `low`, `factor` and `shrink`, mean(g) and mean(g·x̂).
    """
    plan, chunk, threads, rows = spec.plan, spec.chunk, spec.threads, spec.rows
    centered, double, weighted = plan.centered, plan.double, plan.weight is not None
    whole, registers = spec.width == chunk, spec.mode == "registers"
    number = number_of(plan)
    kind, zero, one = TYPES[number], number(0.0), number(1.0)
    largest_mean = number(LARGEST_MEAN_DOUBLE if double else LARGEST_MEAN)
    dy_elements, x_elements, _, _, weight_elements = make_all_elements(spec, number)
    load_x, load_dy, load_weight = x_elements.load, dy_elements.load, weight_elements.load
    scaled, dy_count = x_elements.scaled, dy_elements.words
    normalize, multiply = make_terms(spec)
    add_elements, add_products = make_chunk_sums(chunk, number, True)
    reduce_two = make_reduce(threads, rows, two)
    anyone = make_anyone(threads, rows)
    moderate = make_moderate(number)

    @device
    def find_values(words, values, x_row, k, j, limit, row):
        """values = chunk k of the row, which begins at column j, scaled."""
        if registers:
            scaled(words, 4 * k, values, row.scale)
        else:
            load_x(words, 0, x_row, j, limit)
            scaled(words, 0, values, row.scale)

    @device
    def add_deviations(words, x_row, steps, thread, limit, row):
        """Of a thread's part of the row, the sum of its deviations from the given mean, what that lost, and of their
        squares."""
        values = cuda.local.array(chunk, kind)
        total, error, squares = zero, zero, zero
        for k in range(steps):
            j = (k * threads + thread) * chunk
            if j < limit:
                find_values(words, values, x_row, k, j, limit, row)
                for i in range(chunk):
                    if whole or j + i < limit:
                        d = values[i] - row.high
                        total, error = add_exactly(total, error, d)
                        squares = fma(d, d, squares)
        return total, error, squares

    @device
    def find_low(words, x_row, steps, shared, thread, group, limit, count, inverse, row):
        """What rounding the given mean to float64 has lost; 0 if the mean is not the row's."""
        total, error, _ = add_deviations(words, x_row, steps, thread, limit, row)
        low, _ = reduce_two(np.float64(total) + np.float64(error), 0.0, shared, thread, group, count, inverse, 0.0)
        low = low * inverse
        return low if abs(low) <= TRUSTED * (abs(row.high) + 1.0 / row.factor) else 0.0

    @device
    def find_beyond(words, x_row, steps, shared, thread, group, limit, count, inverse, row):
        """`low` and rstd of x·scale, where that of x is beyond float64: of numbers so small that the mean given has few
        digits. All differ from it by multiples of the smallest number, so their squares lose next to nothing."""
        total, _, squares = add_deviations(words, x_row, steps, thread, limit, row)
        a, b = reduce_two(np.float64(total), np.float64(squares), shared, thread, group, count, inverse, 0.0)
        low = a * inverse if centered else 0.0
        return low, reciprocal_root((b - a * low) * inverse)

    @device
    def find_means(
        words, dy_words, weights, x_row, dy_row, weight, steps, shared, thread, group, limit, count, inverse, row
    ):
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
                normalize(words, at, normals, row)
                for i in range(chunk):
                    if not whole and j + i >= limit:
                        normals[i] = zero  # beyond the row 0 - mean, which may be infinite times rstd, meets g = 0
                multiply(dy_words, dy_at, weights, values, row)
                if centered:
                    total, error = add_elements(total, error, values)
                product, product_error = add_products(product, product_error, values, normals)
        a, b = reduce_two(
            np.float64(total) + np.float64(error), np.float64(product) + np.float64(product_error),
            shared, thread, group, count, inverse, 0.0,
        )  # fmt: skip
        return number(a * inverse), number(b * inverse)

    @device
    def gather(
        words, dy_words, weights, x_row, dy_row, weight, steps, shared, thread, group, active, limit, count, inverse,
        row,
    ):  # fmt: skip
        low, factor, shrink = row.low, row.factor, one
        if centered and double:
            low = find_low(words, x_row, steps, shared, thread, group, limit, count, inverse, row)
        if double:
            beyond = factor == np.inf
            if anyone(beyond):
                own_low, own = find_beyond(words, x_row, steps, shared, thread, group, limit, count, inverse, row)
                if beyond:
                    low, factor = own_low, own
        mean_g, mean_gx, again = zero, zero, True
        while again:
            row = Row(row.scale, row.high, low, factor, shrink, row.offset)
            mean_g, mean_gx = find_means(
                words, dy_words, weights, x_row, dy_row, weight, steps, shared, thread, group, limit, count, inverse,
                row,
            )  # fmt: skip
            ordinary = abs(mean_g) < largest_mean and abs(mean_gx) < largest_mean
            extreme = active and not ordinary and shrink == one
            again = anyone(extreme)
            if extreme:  # g·rstd, which dx can hold, is a guide to what g may be
                exponent = moderate(exponent_of(np.float64(row.factor)) + exponent_of(np.float64(row.scale)))
                shrink = number(power_of_two((min(0, exponent) - 8) >> 1))
        return row, mean_g, mean_gx

    return gather


def make_sums(spec):
    """The kernel that finds what the gradients of very wide rows need."""
    plan, chunk, threads, together = spec.plan, spec.chunk, spec.threads, spec.rows
    centered = plan.centered
    number = number_of(plan)
    gather, scaling = make_gather(spec), make_scaling(plan)
    element = make_element("float64", np.float64)
    statistic, put = element.get, element.put
    dy_elements, _, _, _, weight_elements = make_all_elements(spec, number)
    dy_count, weight_count = dy_elements.words, weight_elements.words
    shared_size = exchange_size(threads, together)
    find_place, row_start = make_place(spec.lead), make_row_start(spec.lead)
    dy_unit, x_unit, _, _ = spec.units(plan.other, plan.x, None, None)

    def sums_of_rows(
        dy, x, weight, mean, rstd, dresidual, dx, sums, dweight_partials, dbias_partials, rows, cols, lengths,
        dy_strides, x_strides, dresidual_strides, dx_strides, eps, weight_offset,
    ):  # fmt: skip
        """`low`, mean(g), mean(g·x̂), `shrink` and `factor` of each row."""
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
            place = find_place(row, lengths)
            x_row = row_start(x, place, x_strides, x_unit)
            dy_row = row_start(dy, place, dy_strides, dy_unit)
            high, r = 0.0, statistic(rstd, row)
            if centered:
                high = statistic(mean, row)
            known, _ = scaling(high, r, weight_offset)
            known, mean_g, mean_gx = gather(
                words, dy_words, weights, x_row, dy_row, weight, steps, shared, thread, 0, True, cols, count, inverse,
                known,
            )  # fmt: skip
            if thread == 0:
                put(sums, 5 * row, np.float64(known.low))
                put(sums, 5 * row + 1, np.float64(mean_g))
                put(sums, 5 * row + 2, np.float64(mean_gx))
                put(sums, 5 * row + 3, np.float64(known.shrink))
                put(sums, 5 * row + 4, np.float64(known.factor))
            row += np.int64(cuda.gridDim.x)

    return sums_of_rows
