"""The gradient through one row, and the terms of dweight and dbias.

What a gradient needs to know of a row are its parameters, in an array of 6. For an ordinary row SCALE is
0 and the others are exact in the compute dtype; they are used in float64 for an extreme one.
"""

import math

import numpy as np
from numba import njit

from .arrays import part, row
from .elements import load, scaled, shifted, store, stored
from .rows import (
    LEAF,
    LEAF_DOUBLE,
    LIMIT,
    LIMIT_DOUBLE,
    REDUCTION,
    STRICT,
    add_exactly,
    centred,
    compensated,
    extreme_statistics,
    in_compute_dtype,
    is_ordinary,
    mean_pair,
    multiply_add,
    normalized,
    row_sums,
    statistics,
)

PARAMETERS = 6
SCALE, HIGH, LOW, RSTD, MEAN_G, MEAN_GX = range(PARAMETERS)

TRUSTED = 2.0**-40
"""How far a mean that is given may be from the row's for rounding to be the reason."""


# Parameters of a row


@njit(**STRICT)
def known_statistics(x, mean, rstd, i, eps, centered, double):
    """mean, what float64 lost of it, and rstd of row i: as they are given, or with the same bits."""
    m = 0.0
    low = 0.0
    if rstd is None:
        m, low, r = statistics(x, eps, centered, True)
    else:
        r = rstd[i]
        if centered is not None and mean is None:
            m, low, _ = statistics(x, eps, centered, True)
    if mean is not None:
        m = mean[i]
        low = 0.0
        if double is not None:
            total, squares = row_sums(x, None, m, True, True)
            # The squares are looked at so that this loop is compiled as it is in `statistics`.
            low = total / x.size if squares == squares else math.nan
            # A mean that is not the row's, whatever it is for, is left as it is.
            if not abs(low) <= TRUSTED * (abs(m) + 1.0 / r):
                low = 0.0
    if double is None:
        low = 0.0
    return m, low, r


@njit(**REDUCTION)
def gradient_leaf_sums(dy, x, weight, scale, high, low, rstd):
    """The sums of g and g·x̂/rstd, g = dy·weight."""
    total = 0.0
    product = 0.0
    for j in range(x.size):
        g = np.float64(scaled(load(dy, j, rstd), weight, j))
        total += g
        product += g * np.float64(centred(x, j, scale, high, low, rstd))
    return total, product


@njit(**STRICT)
def gradient_sums(dy, x, weight, scale, high, low, rstd, double):
    """The sums of g and g·x̂ over a row, in the order of `row_sums`."""
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
    product = compensated(product, product_error) * np.float64(rstd)
    return compensated(total, total_error), product


@njit(**STRICT)
def is_moderate(total, product, double):
    """Whether g and g·x̂, by their sums, stay far from overflow and underflow. False for NaN."""
    limit = LIMIT if double is None else LIMIT_DOUBLE
    size = abs(total) + abs(product)
    return size == 0.0 or 1.0 / limit < size < limit


@njit(**REDUCTION)
def is_finite(dy, weight):
    """Whether all g are finite, as far as float64 can tell. A row that is not finite is as ordinary as any."""
    sizes = 0.0
    for j in range(dy.size):
        sizes += abs(scaled(load(dy, j, 0.0), weight, j)) * 2.0**-400
    return sizes < math.inf


@njit(**STRICT)
def put_ordinary_parameters(found, dy, x, weight, mean, low, rstd, centered, double):
    """The parameters of an ordinary row, in float64 but exact in the compute dtype.

    Nothing is found, and the row is extreme, if g or g·x̂ comes near the limits of float32.
    """
    high, low = mean_pair(mean, low, centered, double)
    r = in_compute_dtype(rstd, double)
    total, product = gradient_sums(dy, x, weight, None, high, low, r, double)
    if centered is None:
        total = 0.0
    if not is_moderate(total, product, double) and is_finite(dy, weight):
        return
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


@njit(**STRICT)
def put_parameters(found, dy, x, weight, mean, rstd, i, eps, centered, double, extreme):
    """The parameters of row i. `extreme` gives those of an extreme row; without it, its SCALE is NaN."""
    m, low, r = known_statistics(x, mean, rstd, i, eps, centered, double)
    found[SCALE] = math.nan
    if is_ordinary(r, double):
        put_ordinary_parameters(found, dy, x, weight, m, low, r, centered, double)
    if extreme is not None and found[SCALE] != 0.0:
        put_extreme_parameters(found, dy, x, weight, eps, centered)


@njit(**STRICT)
def widest(double, extreme):
    """`double` for ordinary rows; all is float64 for extreme ones."""
    return double if extreme is None else True


@njit(**STRICT)
def scale_of(found, extreme):
    """The power of two of an extreme row; None in a kernel for ordinary ones."""
    return None if extreme is None else found[SCALE]


# What is done with them


@njit(**STRICT)
def gradient(g, normal, scale, rstd, mean_g, mean_gx):
    """(g - mean(g) - x̂·mean(g·x̂))·rstd, times the scale that rstd lacks."""
    if mean_g is not None:
        g = g - mean_g
    g = multiply_add(-normal, mean_gx, g) * rstd
    return g if scale is None else g * scale


@njit(**STRICT)
def accumulate(sums, errors, j, value, output, error_output):
    """sums[j] += value; for float64, errors[j] += what that lost."""
    if errors is None:
        store(sums, j, stored(sums, j, output) + np.float64(value), output)
    else:
        total, error = add_exactly(stored(sums, j, output), stored(errors, j, error_output), value)
        store(sums, j, total, output)
        store(errors, j, error, error_output)


@njit(**STRICT)
def accumulate_two(sums, j, value, value_2, output):
    """sums[j] += value; sums[j] += value_2."""
    total = stored(sums, j, output) + np.float64(value)
    store(sums, j, total + np.float64(value_2), output)


@njit(**STRICT)
def write_gradients(
    dy, x, weight, dresidual, dx, dweight, dweight_errors, dbias, dbias_errors, scale, parameters
):  # fmt: skip
    """dx of one row, dresidual added; dweight += dy·x̂ and dbias += dy. What is None is left out."""
    high, low, rstd, mean_g, mean_gx = parameters
    for j in range(x.size):
        d = load(dy, j, rstd)
        normal = normalized(x, j, scale, high, low, rstd)
        if dweight is not None:
            accumulate(dweight, dweight_errors, j, d * normal, 1, 2)
        if dbias is not None:
            accumulate(dbias, dbias_errors, j, d, 3, 4)
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


@njit(**STRICT)
def errors_of(sums, cols, start, size, double):
    """The part of float64 sums that collects what additions lose; None for others."""
    return None if double is None else part(sums, cols + start, size)


@njit(**STRICT)
def apply_rows(
    dy_rows, x_rows, weights, dresidual_rows, dx_rows, dweights, dbiases, found, base, first, stop,
    cols, start, size, centered, double, extreme,
):  # fmt: skip
    """`write_gradients` of rows first to stop, `size` columns from `start`; float32 rows two at a time."""
    weight = part(weights, start, size)
    dweight, dbias = part(dweights, start, size), part(dbiases, start, size)
    i = first
    while i < stop:
        dy, x = part(row(dy_rows, i), start, size), part(row(x_rows, i), start, size)
        dresidual, dx = part(row(dresidual_rows, i), start, size), part(row(dx_rows, i), start, size)
        own = part(found, PARAMETERS * (i - base), PARAMETERS)
        if extreme is None and double is None and i + 1 < stop:
            write_two_gradients(
                dy, x, weight, dresidual, dx, dweight, dbias, parameters_of(own, centered, None),
                part(row(dy_rows, i + 1), start, size), part(row(x_rows, i + 1), start, size),
                part(row(dresidual_rows, i + 1), start, size),
                part(row(dx_rows, i + 1), start, size),
                parameters_of(part(own, PARAMETERS, PARAMETERS), centered, None),
            )  # fmt: skip
            i += 2
        else:
            write_gradients(
                dy, x, weight, dresidual, dx, dweight, errors_of(dweights, cols, start, size, double),
                dbias, errors_of(dbiases, cols, start, size, double), scale_of(own, extreme),
                parameters_of(own, centered, widest(double, extreme)),
            )  # fmt: skip
            i += 1
