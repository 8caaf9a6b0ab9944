"""What is done to one row: its statistics, and the normalized row.

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

from .arrays import part
from .elements import load, load_both, multiply_add, rounded, scaled, shifted, store
from .lanes import lane_count, lane_sum, lanes
from .options import STRICT
from .writing import fetch, write_row

LEAF = 4096
"""Columns that are summed at once. Leaves are added in order, so threads can share a row without changing a bit."""

LEAF_DOUBLE = 256
"""The same for float64, whose sums have no wider type: 16 lanes make 16 additions each, 2 u."""

LIMIT, LIMIT_DOUBLE = 2.0**100, 2.0**480
"""Rows whose rstd lies between 1/limit and limit are ordinary: nothing overflows or vanishes."""

FAR = 2.0**16
"""Mean square over variance from which a row is far from zero. Below, plain float64 sums of a leaf put rstd off by
0.03 u of float32 at worst."""


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
def add_deviation(sums, x, j, scale, shift):
    """The sums of d and d², d = x·scale - shift, with element j, or as many as they have lanes."""
    return with_deviation(sums, load(x, j, sums[0]), scale, shift)


@njit(**STRICT)
def with_deviation(sums, d, scale, shift):
    """The sums of d and d², d = value·scale - shift, with a value, or one for each lane."""
    total, squares = sums
    if scale is not None:
        d = d * scale
    if shift is not None:
        d = d - shift
    return total + d, multiply_add(d, d, squares)


@njit(**STRICT)
def add_deviations(sums, sums_2, x, j, scale, shift):
    """`add_deviation` to two sums of lanes, with the next elements in the order that is the cheapest."""
    one, other = load_both(x, j, sums[0])
    return with_deviation(sums, one, scale, shift), with_deviation(sums_2, other, scale, shift)


@njit(**STRICT)
def leaf_sums(x, scale, shift, centered, following):
    """The sums of d and d², d = x·scale - shift; the former means nothing for rows that are not centered.

    Meanwhile half as many elements of `following` are fetched.
    """
    zero, count = lanes(0.0, x), lane_count(x)
    a = b = c = d = e = f = g = h = (zero, zero)
    step = 8 * count if centered is None else 4 * count  # additions to one sum wait for each other
    whole = x.size - x.size % step
    for j in range(0, whole, step):
        fetch(following, j // 2, step // 2)
        a, b = add_deviations(a, b, x, j, scale, shift)
        c, d = add_deviations(c, d, x, j + 2 * count, scale, shift)
        if centered is None:
            e, f = add_deviations(e, f, x, j + 4 * count, scale, shift)
            g, h = add_deviations(g, h, x, j + 6 * count, scale, shift)
    even = x.size - x.size % count
    for j in range(whole, even, count):
        a, b = b, add_deviation(a, x, j, scale, shift)
    rest = (0.0, 0.0)
    for j in range(even, x.size):
        rest = add_deviation(rest, x, j, scale, shift)
    total = lane_sum((a[0] + b[0]) + (c[0] + d[0])) + rest[0]
    squares = (a[1] + b[1]) + (c[1] + d[1])
    if centered is None:
        squares = squares + ((e[1] + f[1]) + (g[1] + h[1]))
    return total, lane_sum(squares) + rest[1]


@njit(**STRICT)
def row_sums(x, scale, shift, centered, double, following):
    """`leaf_sums` over a row. Meanwhile the first half of `following` is fetched."""
    leaf = LEAF if double is None else LEAF_DOUBLE
    total = total_error = squares = squares_error = 0.0
    for start in range(0, x.size, leaf):
        size = min(leaf, x.size - start)
        t, s = leaf_sums(part(x, start, size), scale, shift, centered, part(following, start // 2, size // 2))
        if start == 0:  # most rows are one leaf: 10 ns less for each
            total, squares = t, s
        else:
            total, total_error = add_exactly(total, total_error, t)
            squares, squares_error = add_exactly(squares, squares_error, s)
    return compensated(total, total_error), compensated(squares, squares_error)


@njit(**STRICT)
def put_leaf_sums(x, sums, start, stop, centered):
    """The sums of leaves start to stop of a row, two each."""
    for leaf in range(start, stop):
        x_leaf = part(x, LEAF * leaf, min(LEAF, x.size - LEAF * leaf))
        sums[2 * leaf], sums[2 * leaf + 1] = leaf_sums(x_leaf, None, None, centered, None)


@njit(**STRICT)
def add_leaf_sums(sums):
    """`row_sums` from those of its leaves, with the same bits."""
    total, squares = sums[0], sums[1]
    total_error = squares_error = 0.0
    for i in range(2, sums.size, 2):
        total, total_error = add_exactly(total, total_error, sums[i])
        squares, squares_error = add_exactly(squares, squares_error, sums[i + 1])
    return compensated(total, total_error), compensated(squares, squares_error)


# Statistics


@njit(**STRICT)
def statistics(x, eps, centered, double, following):
    """mean, what float64 lost of it, and rstd = 1/sqrt(var + eps).

    Sums as they are serve nearly every row. A row far from zero is added up again, shifted by its first
    element: then the sum of squares has a condition of at most D, enough for float32, whatever the data.
    float64 takes a second pass around the mean of the first. Half of the row `following` is fetched meanwhile.
    """
    if centered is None or double is None:
        total, squares = row_sums(x, None, None, centered, double, following)
        if centered is None or not is_far(total, squares, x.size):
            mean, rstd = mean_and_rstd(0.0, total, squares, x.size, eps, centered)
            return mean, 0.0, rstd
    shift = load(x, 0, 0.0)
    total, squares = row_sums(x, None, shift, True, double, None)
    mean, rstd = mean_and_rstd(shift, total, squares, x.size, eps, centered)
    low = 0.0
    if double is not None:
        total, squares = row_sums(x, None, mean, True, double, None)
        low = total / x.size
        _, rstd = mean_and_rstd(mean, total, squares, x.size, eps, centered)
    return mean, low, rstd


@njit(**STRICT)
def is_far(total, squares, size):
    """Whether the mean square of a row is so far above its variance that plain sums do not show the latter."""
    return squares > FAR * (squares - total * (total * (1.0 / size)))


@njit(**STRICT)
def mean_and_rstd(shift, total, squares, size, eps, centered):
    """Statistics of a row of which the sums, shifted by `shift`, are known."""
    inverse = 1.0 / size  # once for all rows: of three divisions a row of 64 numbers waited 3 of its 21 ns
    if centered is None:
        return 0.0, 1.0 / math.sqrt(squares * inverse + eps)
    mean = total * inverse
    variance = (squares - total * mean) * inverse
    return shift + mean, 1.0 / math.sqrt(variance + eps)


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
        _, squares = row_sums(x, scale, None, None, True, None)
    else:
        high = load(x, 0, 0.0) * scale
        total, _ = row_sums(x, scale, high, True, True, None)
        high = high + total / x.size
        total, squares = row_sums(x, scale, high, True, True, None)
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
def unscaled(scale, high, rstd):
    """mean and rstd of an extreme float64 row, as returned: the gradient sees by rstd that it is one."""
    rstd = rstd * scale
    if is_ordinary(rstd, True):  # rounding at the very limit
        rstd = LIMIT_DOUBLE if rstd > 1.0 else 1.0 / LIMIT_DOUBLE
    return high / scale, rstd


@njit(**STRICT)
def exact_statistics(x, eps, centered):
    """mean and rstd of a row that is not float64, to the last digits of float64, as they are returned."""
    mean, _, rstd = statistics(x, eps, centered, True, None)
    return mean, rstd


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


# Elements of a row


@njit(**STRICT)
def centred(x, j, scale, high, low, rstd):
    """x[j]·scale - mean in the dtype of rstd; the mean is high + low, or high alone."""
    value = load(x, j, rstd)
    if scale is not None:
        value = value * scale
    if high is not None:
        value = value - high
    if low is not None:
        value = value - low
    return value


@njit(**STRICT)
def normalized(x, j, scale, high, low, rstd):
    """x̂[j] in the dtype of rstd."""
    return centred(x, j, scale, high, low, rstd) * rstd


@njit(**STRICT)
def output(inputs, j, parameters, rstd):
    """x̂[j]·weight[j] + bias[j]; x̂ is rounded to the format of `rounding` first, unless that is None."""
    x, weight, bias = inputs
    scale, high, low, rounding = parameters
    value = rounded(normalized(x, j, scale, high, low, rstd), rounding)
    return shifted(scaled(value, weight, j), bias, j)


@njit(**STRICT)
def write_normalized(x, weight, bias, y, scale, high, low, rstd, rounding, x_next, y_next, edge, held):
    """y = `output`; returns how many elements are held now. With an edge, the second half of x_next is fetched.

    4096 x 4096 of float32 took 1.8 times a copy with ordinary stores, 1.4 past the cache if all of the next row was
    fetched here, and takes 0.95 with half of it fetched during the sums: memory is never idle.
    """
    inputs, parameters = (x, weight, bias), (scale, high, low, rounding)
    second_half = part(x_next, x.size // 2, x.size - x.size // 2)
    return write_row(output, inputs, parameters, rstd, y, second_half, 2, y_next, edge, held)


@njit(**STRICT)
def write_sum(x, residual, out, zero):
    """out = x + residual, added in the dtype of `zero` and rounded once."""
    for j in range(x.size):
        store(out, j, shifted(load(x, j, zero), residual, j), 0)
