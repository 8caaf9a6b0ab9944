"""What is done to one row: its statistics, the normalized row, and the gradient through it.

Options are types, not values: a helper that is given None for `weight`, `scale` or `centered` is
compiled without it. The float64 arithmetic of rows of extreme size uses the same helpers as the
ordinary one, with float64 scalars.

Parameters of a row, as `normalized` takes them: x̂ = ((x·scale - high) - low)·rstd, where high +
low is the mean, as a pair since one float32 mean costs 10^6 u on data far from zero, and scale is
None or, for extreme rows, a power of two.
"""

import math

import numpy as np
from numba import njit

from .elements import (
    LINE,
    load,
    part,
    prefetch,
    rounded,
    scaled,
    shifted,
    stack_like,
    store,
    stored,
    stream_line,
    to_line,
)

# `fastmath` must be said: left out, it is inherited from whichever caller is compiled first.
STRICT = {"nogil": True, "forceinline": True, "error_model": "numpy", "fastmath": False}
# Reductions alone may be reordered, and only their own additions: what they add up comes from
# STRICT helpers.
REDUCTION = {**STRICT, "fastmath": {"reassoc", "nsz", "contract"}}

LEAF = 4096
"""Columns that are summed at once. Leaves are added in order, so threads can share a row without changing a bit."""

LEAF_DOUBLE = 512
"""The same for float64, whose sums have no wider type: 32 lanes make 16 additions each, 2 u."""

CHUNK = 512
"""Columns that are written to a buffer in the first cache before they are streamed to memory."""

LIMIT, LIMIT_DOUBLE = 2.0**100, 2.0**480
"""Rows whose rstd lies between 1/limit and limit are ordinary: nothing overflows or vanishes."""


# Sums


@njit(**STRICT)
def add_exactly(total, error, value):
    """total + value, and error plus what that addition lost (Knuth's two-sum)."""
    result = total + value
    part_of_value = result - total
    lost = (total - (result - part_of_value)) + (value - part_of_value)
    return result, error + lost


@njit(**STRICT)
def compensated(total, error):
    """total + error; an infinite total leaves a NaN as its error."""
    return total + error if error == error else total


@njit(**STRICT)
def deviation(x, j, scale, shift):
    """x[j]·scale - shift in float64."""
    value = load(x, j, 0.0)
    if scale is not None:
        value = value * scale
    if shift is not None:
        value = value - shift
    return value


@njit(**REDUCTION)
def leaf_sums(x, scale, shift):
    """The sums of d and d², d = x·scale - shift."""
    total = 0.0
    squares = 0.0
    for j in range(x.size):
        d = deviation(x, j, scale, shift)
        total += d
        squares += d * d
    return total, squares


@njit(**STRICT)
def row_sums(x, scale, shift, double):
    """`leaf_sums` over a row."""
    leaf = LEAF if double is None else LEAF_DOUBLE
    total = total_error = squares = squares_error = 0.0
    for start in range(0, x.size, leaf):
        t, s = leaf_sums(part(x, start, min(leaf, x.size - start)), scale, shift)
        if start == 0:  # most rows are one leaf: 10 ns less for each
            total, squares = t, s
        else:
            total, total_error = add_exactly(total, total_error, t)
            squares, squares_error = add_exactly(squares, squares_error, s)
    return compensated(total, total_error), compensated(squares, squares_error)


# Statistics


@njit(**STRICT)
def statistics(x, eps, centered, double):
    """mean, what float64 lost of it, and rstd = 1/sqrt(var + eps).

    Shifted by the first element the sums of squares have a condition of at most D: enough for
    float32, whatever the data. float64 takes a second pass around the mean of the first.
    """
    if centered is None:
        _, squares = row_sums(x, None, None, double)
        return 0.0, 0.0, 1.0 / math.sqrt(squares / x.size + eps)
    shift = load(x, 0, 0.0)
    total, squares = row_sums(x, None, shift, double)
    mean = shift + total / x.size
    low = 0.0
    if double is not None:
        total, squares = row_sums(x, None, mean, double)
        low = total / x.size
    variance = (squares - total * (total / x.size)) / x.size
    return mean, low, 1.0 / math.sqrt(variance + eps)


@njit(**STRICT)
def is_constant(x, centered):
    """Whether no element of a centered row differs from the first: such a row needs no scale."""
    if centered is None:
        return False
    different = 0
    for j in range(x.size):
        different += load(x, j, 0.0) != load(x, 0, 0.0)
    return different == 0


@njit(**STRICT)
def extreme_statistics(x, eps, centered):
    """scale, high, low and rstd of any row: float64, scaled so that no square overflows or vanishes."""
    largest = math.sqrt(eps)
    for j in range(x.size):
        largest = max(largest, abs(load(x, j, 0.0)))
    scale = 1.0
    if 0.0 < largest < math.inf and not is_constant(x, centered):
        scale = math.ldexp(1.0, max(-1000, min(1000, -math.frexp(largest)[1])))
    high = 0.0
    low = 0.0
    if centered is None:
        _, squares = row_sums(x, scale, None, True)
    else:
        high = load(x, 0, 0.0) * scale
        total, _ = row_sums(x, scale, high, True)
        high = high + total / x.size
        total, squares = row_sums(x, scale, high, True)
        low = total / x.size
        squares = squares - total * low
    # eps·scale² may overflow where its root does not.
    rstd = 1.0 / math.hypot(math.sqrt(squares / x.size), math.sqrt(eps) * scale)
    return scale, high, low, rstd


@njit(**STRICT)
def is_ordinary(rstd, double):
    """Whether x̂ and all that leads to it stays far from overflow and underflow. False for NaN."""
    limit = LIMIT if double is None else LIMIT_DOUBLE
    return 1.0 / limit < rstd < limit


@njit(**STRICT)
def unscaled(scale, high, rstd, double):
    """mean and rstd of an extreme row, as returned: the gradient sees by rstd that it is one."""
    rstd = rstd * scale
    limit = LIMIT if double is None else LIMIT_DOUBLE
    if is_ordinary(rstd, double):  # rounding at the very limit
        rstd = limit if rstd > 1.0 else 1.0 / limit
    return high / scale, rstd


@njit(**STRICT)
def known_statistics(x, mean, rstd, i, eps, centered, double, recompute):
    """`statistics`, or those that are given for row i, with the same bits."""
    if recompute is not None:
        return statistics(x, eps, centered, double)
    if centered is None or double is None:
        return mean[i], 0.0, rstd[i]
    total, squares = row_sums(x, None, mean[i], double)
    # The squares are looked at so that this loop is compiled as it is in `statistics`.
    return mean[i], total / x.size if squares == squares else math.nan, rstd[i]


@njit(**STRICT)
def in_compute_dtype(value, double):
    if double is None:
        return np.float32(value)
    return value


@njit(**STRICT)
def mean_pair(mean, low, centered, double):
    """The mean as high + low in the compute dtype; a pair of None when rows are not centered."""
    if centered is None:
        return None, None
    high = in_compute_dtype(mean, double)
    return high, in_compute_dtype((mean - np.float64(high)) + low, double)


# Parameters of a row, in an array of 6: SCALE is 0 for an ordinary row.
SCALE, HIGH, LOW, RSTD, MEAN_G, MEAN_GX = range(6)


@njit(**STRICT)
def put_ordinary_parameters(found, dy, x, weight, mean, low, rstd, centered, double):
    """The parameters of an ordinary row, in float64 but exact in the compute dtype."""
    high, low = mean_pair(mean, low, centered, double)
    r = in_compute_dtype(rstd, double)
    total, product = gradient_sums(dy, x, weight, None, high, low, r, double)
    found[SCALE] = 0.0
    found[RSTD] = r
    found[MEAN_GX] = product / x.size
    if centered is not None:
        found[HIGH] = high
        found[LOW] = low
        found[MEAN_G] = total / x.size


@njit(**STRICT)
def put_extreme_parameters(found, dy, x, weight, eps, centered):
    """The parameters of an extreme row, all used in float64."""
    scale, high, low, rstd = extreme_statistics(x, eps, centered)
    total, product = gradient_sums(dy, x, weight, scale, high, low, rstd, True)
    found[SCALE] = scale
    found[HIGH] = high
    found[LOW] = low
    found[RSTD] = rstd
    found[MEAN_G] = total / x.size
    found[MEAN_GX] = product / x.size


@njit(**STRICT)
def parameters_of(found, centered, double):
    """high, low, rstd, mean(g) and mean(g·x̂) in the compute dtype; None for what RMSNorm has not."""
    r = in_compute_dtype(found[RSTD], double)
    mean_gx = in_compute_dtype(found[MEAN_GX], double)
    if centered is None:
        return None, None, r, None, mean_gx
    return (
        in_compute_dtype(found[HIGH], double),
        in_compute_dtype(found[LOW], double),
        r,
        in_compute_dtype(found[MEAN_G], double),
        mean_gx,
    )


# Elements of a row


@njit(**STRICT)
def normalized(x, j, scale, high, low, rstd):
    """x̂[j] in the dtype of rstd."""
    value = load(x, j, rstd)
    if scale is not None:
        value = value * scale
    if high is not None:
        value = (value - high) - low
    return value * rstd


@njit(**STRICT)
def write_normalized(x, weight, bias, y, scale, high, low, rstd, rounding):
    """y = x̂·weight + bias; x̂ is rounded to the format of `rounding` first, unless that is None."""
    for j in range(x.size):
        value = rounded(normalized(x, j, scale, high, low, rstd), rounding)
        store(y, j, shifted(scaled(value, weight, j), bias, j), 0)


@njit(**STRICT)
def fetch(x):
    """Ask for a vector that is about to be read."""
    for j in range(0, x.size, LINE // x.itemsize):
        prefetch(x, j)


@njit(**STRICT)
def stream_normalized(x, weight, bias, y, scale, high, low, rstd, rounding, following):
    """`write_normalized` with stores that go past the cache, while the row `following` is fetched.

    Ordinary stores read a line of y from memory before they write it. 4096 x 4096 of float32 took 1.95
    times a copy with those, 1.57 with these, and 1.31 with the next row on its way.
    """
    head = min(to_line(y), x.size)
    write_normalized(
        part(x, 0, head), part(weight, 0, head), part(bias, 0, head), part(y, 0, head),
        scale, high, low, rstd, rounding,
    )  # fmt: skip
    buffer = stack_like(y, CHUNK)
    step = LINE // y.itemsize
    for start in range(head, x.size, CHUNK):
        size = min(CHUNK, x.size - start)
        target = part(y, start, size)
        fetch(part(following, start, size))
        write_normalized(
            part(x, start, size), part(weight, start, size), part(bias, start, size), buffer,
            scale, high, low, rstd, rounding,
        )  # fmt: skip
        lines = size // step * step
        for j in range(0, lines, step):
            stream_line(buffer, target, j)
        for j in range(lines, size):
            target[j] = buffer[j]


@njit(**STRICT)
def write_sum(x, residual, out, zero):
    """out = x + residual, added in the dtype of `zero` and rounded once."""
    for j in range(x.size):
        store(out, j, shifted(load(x, j, zero), residual, j), 0)


@njit(**REDUCTION)
def gradient_leaf_sums(dy, x, weight, scale, high, low, rstd):
    """The sums of g and g·x̂, g = dy·weight."""
    total = 0.0
    product = 0.0
    for j in range(x.size):
        g = scaled(load(dy, j, rstd), weight, j)
        total += np.float64(g)
        product += np.float64(g * normalized(x, j, scale, high, low, rstd))
    return total, product


@njit(**STRICT)
def gradient_sums(dy, x, weight, scale, high, low, rstd, double):
    """`gradient_leaf_sums` over a row, in the order of `row_sums`."""
    leaf = LEAF if double is None else LEAF_DOUBLE
    total = total_error = product = product_error = 0.0
    for start in range(0, x.size, leaf):
        size = min(leaf, x.size - start)
        t, p = gradient_leaf_sums(
            part(dy, start, size), part(x, start, size), part(weight, start, size),
            scale, high, low, rstd,
        )  # fmt: skip
        if start == 0:
            total, product = t, p
        else:
            total, total_error = add_exactly(total, total_error, t)
            product, product_error = add_exactly(product, product_error, p)
    return compensated(total, total_error), compensated(product, product_error)


@njit(**STRICT)
def accumulate(sums, j, value, double, output, error_output):
    """sums[j] += value. For float64, sums[j + size/2] collects what that lost."""
    if double is None:
        store(sums, j, stored(sums, j, output) + np.float64(value), output)
    else:
        errors = part(sums, sums.size // 2, sums.size // 2)
        total, error = add_exactly(stored(sums, j, output), stored(errors, j, error_output), value)
        store(sums, j, total, output)
        store(errors, j, error, error_output)


@njit(**STRICT)
def accumulate_two(sums, j, value, value_2, output):
    """sums[j] += value; sums[j] += value_2."""
    total = stored(sums, j, output) + np.float64(value)
    store(sums, j, total + np.float64(value_2), output)


@njit(**STRICT)
def gradient(g, normal, scale, rstd, mean_g, mean_gx):
    """(g - mean(g) - x̂·mean(g·x̂))·rstd, times the scale that rstd lacks."""
    if mean_g is not None:
        g = g - mean_g
    g = (g - normal * mean_gx) * rstd
    return g if scale is None else g * scale


@njit(**STRICT)
def write_gradients(dy, x, weight, dresidual, dx, dweight, dbias, scale, parameters, double):
    """dx of one row, dresidual added; dweight += dy·x̂ and dbias += dy."""
    high, low, rstd, mean_g, mean_gx = parameters
    for j in range(x.size):
        d = load(dy, j, rstd)
        normal = normalized(x, j, scale, high, low, rstd)
        if dweight is not None:
            accumulate(dweight, j, d * normal, double, 1, 2)
        if dbias is not None:
            accumulate(dbias, j, d, double, 3, 4)
        if dx is not None:
            g = gradient(scaled(d, weight, j), normal, scale, rstd, mean_g, mean_gx)
            store(dx, j, shifted(g, dresidual, j), 0)


@njit(**STRICT)
def write_two_gradients(
    dy, x, weight, dresidual, dx, dweight, dbias, parameters,
    dy_2, x_2, dresidual_2, dx_2, parameters_2,
):  # fmt: skip
    """`write_gradients` of two float32 rows, with the same bits and half the traffic with the sums."""
    high, low, rstd, mean_g, mean_gx = parameters
    high_2, low_2, rstd_2, mean_g_2, mean_gx_2 = parameters_2
    for j in range(x.size):
        d = load(dy, j, rstd)
        d_2 = load(dy_2, j, rstd)
        normal = normalized(x, j, None, high, low, rstd)
        normal_2 = normalized(x_2, j, None, high_2, low_2, rstd_2)
        if dweight is not None:
            accumulate_two(dweight, j, d * normal, d_2 * normal_2, 1)
        if dbias is not None:
            accumulate_two(dbias, j, d, d_2, 3)
        if dx is not None:
            g = gradient(scaled(d, weight, j), normal, None, rstd, mean_g, mean_gx)
            g_2 = gradient(scaled(d_2, weight, j), normal_2, None, rstd_2, mean_g_2, mean_gx_2)
            store(dx, j, shifted(g, dresidual, j), 0)
            store(dx_2, j, shifted(g_2, dresidual_2, j), 5)
