"""What the gradient of a row needs to know: the sums of g and of g·x̂, in a kernel of its own for very wide rows."""

import numpy as np
from numba import cuda

from .addresses import make_place, make_row_start
from .elements import TYPES, add_exactly, compensated, make_element, make_elements
from .extreme import make_places
from .rows import exchange_size, make_anyone, make_chunk_sums, make_reduce, two
from .table import SIZES
from .vectors import device

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
    """A function that finds the low part of the mean, mean(g) and mean(g·x̂) of an ordinary row, and of an extreme
    one in float64.

    gather(words, dy_words, weights, x_row, dy_row, weight, steps, own, shared, thread, group, active, cols,
    inverse, mean,
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


def make_sums(spec, careful=True):
    """The kernel that finds what the gradients of very wide rows need."""
    plan, chunk, threads, together = spec.plan, spec.chunk, spec.threads, spec.rows
    centered = plan.centered
    number = number_of(plan)
    gather = make_gather(spec, careful)
    find_place, row_start = make_place(spec.lead), make_row_start(spec.lead)
    element = make_element("float64", np.float64)
    statistic, put = element.get, element.put
    dy_count = make_elements(plan.other, chunk, spec.width, number).words
    weight_count = make_elements(plan.weight, chunk, spec.width, number).words
    shared_size = exchange_size(threads, together)
    x_size, dy_size = SIZES[plan.x], SIZES[plan.other]

    def sums_of_rows(
        dy, x, weight, mean, rstd, dresidual, dx, sums, dweight_partials, dbias_partials, rows, cols, lengths,
        dy_strides, x_strides, dresidual_strides, dx_strides, eps, weight_offset,
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
            place = find_place(row, lengths)
            x_row = row_start(x, place, x_strides, x_size)
            dy_row = row_start(dy, place, dy_strides, dy_size)
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
