"""The gradient through one row, and the terms of dweight and dbias.

What a gradient needs to know of a row are its parameters, in an array of 7. For an ordinary row SCALE is
0 and the others are exact in the compute dtype; they are used in float64 for an extreme one.

All sums are float64. Those over a row run on `Lanes`, so whatever else a kernel does leaves their bits alone.
"""

import math

from numba import njit

from .arrays import part
from .elements import load, multiply_add, scaled, shifted, store, stored
from .lanes import lane_count, lane_sum, lanes
from .options import STRICT
from .rows import (
    LEAF,
    LEAF_DOUBLE,
    LIMIT,
    add_exactly,
    centred,
    compensated,
    extreme_statistics,
    in_compute_dtype,
    is_ordinary,
    mean_pair,
    normalized,
    row_sums,
    statistics,
)
from .writing import fetch, release, write_row

PARAMETERS = 7
SCALE, HIGH, LOW, RSTD, MEAN_G, MEAN_GX, MODERATE = range(PARAMETERS)

GRADIENT_LEAF_DOUBLE = LEAF_DOUBLE // 2
"""Columns of float64 whose terms are summed at once: there are half as many lanes."""

TRUSTED = 2.0**-40
"""How far a mean that is given may be from the row's for rounding to be the reason."""


# Parameters of a row


@njit(**STRICT)
def known_statistics(x, mean, rstd, i, eps, centered, double):
    """mean, what float64 lost of it, and rstd of row i: as they are given, or with the same bits."""
    m = 0.0
    low = 0.0
    if rstd is None:
        m, low, r = statistics(x, eps, centered, True, None)
    else:
        r = rstd[i]
        if centered is not None and mean is None:
            m, low, _ = statistics(x, eps, centered, True, None)
    if mean is not None:
        m = mean[i]
        low = 0.0
        if double is not None:
            total, _ = row_sums(x, None, m, True, True, None)
            low = total / x.size
            # A mean that is not the row's, whatever it is for, is left as it is.
            if not abs(low) <= TRUSTED * (abs(m) + 1.0 / r):
                low = 0.0
    if double is None:
        low = 0.0
    return m, low, r


@njit(**STRICT)
def put_statistics(found, x, mean, rstd, i, eps, centered, double, extreme):
    """SCALE, HIGH, LOW and RSTD of row i. `extreme` gives those of an extreme row; without it, its SCALE is NaN."""
    m, low, r = known_statistics(x, mean, rstd, i, eps, centered, double)
    found[SCALE] = math.nan
    if is_ordinary(r, double):
        high, low = mean_pair(m, low, centered, double)
        found[SCALE] = 0.0
        found[RSTD] = in_compute_dtype(r, double)
        if centered is not None:
            found[HIGH] = high
            found[LOW] = low
    elif extreme is not None:
        found[SCALE], found[HIGH], found[LOW], found[RSTD] = extreme_statistics(x, eps, centered)


@njit(**STRICT)
def widest(double, extreme):
    """`double` for ordinary rows; all is float64 for extreme ones."""
    return double if extreme is None else True


@njit(**STRICT)
def scale_of(found, extreme):
    """The power of two of an extreme row; None in a kernel for ordinary ones."""
    return None if extreme is None else found[SCALE]


@njit(**STRICT)
def statistics_of(found, centered, double, extreme):
    """scale, high, low and rstd in float64. The mean of a row that is not float64 is one number: high + low."""
    scale, rstd = scale_of(found, extreme), found[RSTD]
    if centered is None:
        return scale, None, None, rstd
    if double is None and extreme is None:
        return scale, found[HIGH] + found[LOW], None, rstd
    return scale, found[HIGH], found[LOW], rstd


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


# Sums over a row, and over rows


@njit(**STRICT)
def terms(dy, x, j, scale, high, low, rstd, double):
    """dy, and dy·x̂, in the dtype of rstd. But for float64, dy·(x - mean) is far from overflow and underflow: there the
    factor rstd is left out."""
    d, deviation = load(dy, j, rstd), centred(x, j, scale, high, low, rstd)
    if double is not None:
        deviation = deviation * rstd
    return d, d * deviation


@njit(**STRICT)
def add_scaled(total, value, weight, j):
    """total + value·weight."""
    if weight is None:
        return total + value
    return multiply_add(value, load(weight, j, value), total)


@njit(**STRICT)
def add_terms(
    sums, dy, x, dy_2, x_2, weight, dweight, dweight_errors, dbias, dbias_errors, j, statistics, statistics_2, double
):  # fmt: skip
    """The sums of g and g·x̂ of a row or two with element j, or as many as rstd has lanes; dweight += dy·x̂,
    dbias += dy."""
    total, product, total_2, product_2 = sums
    scale, high, low, rstd = statistics
    d, p = terms(dy, x, j, scale, high, low, rstd, double)
    if x_2 is None:
        if dweight is not None:
            add_products(dweight, dweight_errors, j, p, rstd, None, None, double)
        if dbias is not None:
            add_values(dbias, dbias_errors, j, d, None, 3, 4)
    else:
        scale, high, low, rstd_2 = statistics_2
        d_2, p_2 = terms(dy_2, x_2, j, scale, high, low, rstd_2, double)
        if dweight is not None:
            add_products(dweight, dweight_errors, j, p, rstd, p_2, rstd_2, double)
        if dbias is not None:
            add_values(dbias, dbias_errors, j, d, d_2, 3, 4)
        total_2, product_2 = add_scaled(total_2, d_2, weight, j), add_scaled(product_2, p_2, weight, j)
    return add_scaled(total, d, weight, j), add_scaled(product, p, weight, j), total_2, product_2


@njit(**STRICT)
def add_products(dweight, errors, j, p, rstd, p_2, rstd_2, double):
    """dweight += p·rstd, then p_2·rstd_2; rstd is left out where p has it."""
    if double is not None:
        return add_values(dweight, errors, j, p, None, 1, 2)
    total = multiply_add(p, rstd, stored(dweight, j, p, 1))
    if p_2 is not None:
        total = multiply_add(p_2, rstd_2, total)
    store(dweight, j, total, 1)


@njit(**STRICT)
def add_values(sums, errors, j, value, value_2, output, error_output):
    """sums[j] += value, then value_2; for float64, errors[j] += what that lost."""
    total = stored(sums, j, value, output)
    if errors is not None:
        total, error = add_exactly(total, stored(errors, j, value, error_output), value)
        store(errors, j, error, error_output)
    else:
        total = total + value
        if value_2 is not None:
            total = total + value_2
    store(sums, j, total, output)


@njit(**STRICT)
def with_lanes(statistics, x):
    """The same, with rstd in all lanes for elements of x: it says how many elements a step takes."""
    scale, high, low, rstd = statistics
    return scale, high, low, lanes(rstd, x)


@njit(**STRICT)
def add_leaf(
    dy, x, dy_2, x_2, weight, dweight, dweight_errors, dbias, dbias_errors, statistics, statistics_2, double,
    following, following_2,
):  # fmt: skip
    """The sums of g and g·x̂ (as `terms` has it) of a row, and of the second if there is one; dweight += dy·x̂ and
    dbias += dy. Meanwhile `following` and `following_2` are fetched."""
    many, many_2 = with_lanes(statistics, x), with_lanes(statistics_2, x)
    zero, count = lanes(0.0, x), lane_count(x)
    first = second = (zero, zero, zero, zero)
    rest = (0.0, 0.0, 0.0, 0.0)
    whole = x.size - x.size % (2 * count)
    for j in range(0, whole, 2 * count):
        fetch(following, j, 2 * count)
        fetch(following_2, j, 2 * count)
        first = add_terms(
            first, dy, x, dy_2, x_2, weight, dweight, dweight_errors, dbias, dbias_errors, j, many, many_2, double
        )  # fmt: skip
        second = add_terms(
            second, dy, x, dy_2, x_2, weight, dweight, dweight_errors, dbias, dbias_errors, j + count, many, many_2,
            double,
        )  # fmt: skip
    even = x.size - x.size % count
    for j in range(whole, even, count):
        first = add_terms(
            first, dy, x, dy_2, x_2, weight, dweight, dweight_errors, dbias, dbias_errors, j, many, many_2, double
        )  # fmt: skip
    for j in range(even, x.size):
        rest = add_terms(
            rest, dy, x, dy_2, x_2, weight, dweight, dweight_errors, dbias, dbias_errors, j, statistics, statistics_2,
            double,
        )  # fmt: skip
    return (
        lane_sum(first[0] + second[0]) + rest[0],
        lane_sum(first[1] + second[1]) + rest[1],
        lane_sum(first[2] + second[2]) + rest[2],
        lane_sum(first[3] + second[3]) + rest[3],
    )


@njit(**STRICT)
def put_means(
    found, dy, x, found_2, dy_2, x_2, weight, dweight, dbias, centered, double, extreme, following, following_2
):  # fmt: skip
    """mean(g) and mean(g·x̂) of a row, and of the second if there is one; dweight += dy·x̂ and dbias += dy. Meanwhile
    `following` and `following_2` are fetched."""
    cols = x.size
    leaf = LEAF if widest(double, extreme) is None else GRADIENT_LEAF_DOUBLE
    own = statistics_of(found, centered, double, extreme)
    own_2 = own if found_2 is None else statistics_of(found_2, centered, double, extreme)
    total = total_error = product = product_error = 0.0
    total_2 = total_2_error = product_2 = product_2_error = 0.0
    for start in range(0, cols, leaf):
        size = min(leaf, cols - start)
        t, p, t_2, p_2 = add_leaf(
            part(dy, start, size), part(x, start, size), part(dy_2, start, size), part(x_2, start, size),
            part(weight, start, size), part(dweight, start, size), errors_of(dweight, cols, start, size, double),
            part(dbias, start, size), errors_of(dbias, cols, start, size, double), own, own_2,
            widest(double, extreme), part(following, start, size), part(following_2, start, size),
        )  # fmt: skip
        total, total_error = add_exactly(total, total_error, t)
        product, product_error = add_exactly(product, product_error, p)
        if x_2 is not None:
            total_2, total_2_error = add_exactly(total_2, total_2_error, t_2)
            product_2, product_2_error = add_exactly(product_2, product_2_error, p_2)
    put_mean(found, compensated(total, total_error), compensated(product, product_error), cols, double, extreme)
    if x_2 is not None:
        product_2 = compensated(product_2, product_2_error)
        put_mean(found_2, compensated(total_2, total_2_error), product_2, cols, double, extreme)


@njit(**STRICT)
def put_mean(found, total, product, size, double, extreme):
    """MEAN_G, MEAN_GX, and whether float32 will do for the gradient: g and g·x̂ are far from overflow and underflow."""
    if widest(double, extreme) is None:
        product = product * found[RSTD]
    found[MEAN_G] = total / size
    found[MEAN_GX] = product / size
    largest = abs(total) + abs(product)
    moderate = largest == 0.0 or 1.0 / LIMIT < largest < LIMIT
    found[MODERATE] = 1.0 if moderate else 0.0


@njit(**STRICT)
def errors_of(sums, cols, start, size, double):
    """The part of float64 sums that collects what additions lose; None for others."""
    return None if double is None else part(sums, cols + start, size)


# The gradient


@njit(**STRICT)
def gradient(g, normal, scale, rstd, mean_g, mean_gx):
    """(g - mean(g) - x̂·mean(g·x̂))·rstd, times the scale that rstd lacks."""
    if mean_g is not None:
        g = g - mean_g
    g = multiply_add(-normal, mean_gx, g) * rstd
    return g if scale is None else g * scale


@njit(**STRICT)
def gradient_at(inputs, j, parameters, rstd):
    """dx[j], dresidual added, in the dtype of rstd; as many elements as that has lanes."""
    dy, x, weight, dresidual = inputs
    scale, high, low, mean_g, mean_gx = parameters
    normal = normalized(x, j, scale, high, low, rstd)
    g = gradient(scaled(load(dy, j, rstd), weight, j), normal, scale, rstd, mean_g, mean_gx)
    return shifted(g, dresidual, j)


@njit(**STRICT)
def write_gradient(found, dy, x, weight, dresidual, dx, centered, double, extreme, x_next, dx_next, edge, held):
    """dx of one row; in float64, and not past the cache, if it is extreme, or dy is. Returns how many elements are held
    now. With an edge, x_next is fetched."""
    inputs = (dy, x, weight, dresidual)
    if extreme is None and (double is not None or found[MODERATE] == 1.0):
        high, low, rstd, mean_g, mean_gx = parameters_of(found, centered, double)
        parameters = (None, high, low, mean_g, mean_gx)
        held = write_row(gradient_at, inputs, parameters, rstd, dx, x_next, 1, dx_next, edge, held)
    else:
        if edge is not None:
            release(edge, held, dx)
        high, low, rstd, mean_g, mean_gx = parameters_of(found, centered, True)
        parameters = (scale_of(found, extreme), high, low, mean_g, mean_gx)
        held = write_row(gradient_at, inputs, parameters, rstd, dx, None, 1, None, None, 0)
    return held
