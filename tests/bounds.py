"""The contract's bounds on the error of every number, as the documentation states them.

With u the machine epsilon of the output's dtype, s its smallest subnormal, and * the exact value:

    |y - y*|   <= 3u (|x̂* w| + |b|) + u² |mean* rstd* w| + (1 + |rstd* w|) s     0.51u for halves
    |dx - dx*| <= 4u rstd (|g| + mean|g| + |x̂| mean|g x̂|)
    |dweight - dweight*| <= Σ |dy| (3u |x̂| + u² |mean rstd|)
    |dbias - dbias*| <= u Σ|dy|

float64, whose sums have no wider type to run in: 8u ((|x̂*| + 1) |w| + |b|) for y, and for the
gradients four times the above with |x̂| + 1 for |x̂|.

Two things any implementation needs are added to the gradients: (1 + rstd) s, as in the forward, for
nothing can be nearer than the subnormal numbers lie, and u |dresidual| for the one addition.

The exact values are computed here, apart from the package's own reference, in NumPy's longdouble.
"""

import math
from typing import NamedTuple

import numpy as np

LONG = np.longdouble
# 64 bits and a wide exponent on x86-64; plain float64 on some platforms, too little to judge float64.
HAS_LONGDOUBLE = np.finfo(LONG).nmant > np.finfo(np.float64).nmant

EPSILON = {
    "float16": 2.0**-10,
    "bfloat16": 2.0**-7,
    "float32": 2.0**-23,
    "float64": 2.0**-52,
}
SMALLEST = {
    "float16": 2.0**-24,
    "bfloat16": 2.0**-133,
    "float32": 2.0**-149,
    "float64": 2.0**-1074,
}
LARGEST = {
    "float16": 65504.0,
    "bfloat16": (2 - 2.0**-7) * 2.0**127,
    "float32": (2 - 2.0**-23) * 2.0**127,
    "float64": (2 - 2.0**-52) * 2.0**1023,
}


class Exact(NamedTuple):
    """The exact statistics of each row, as columns, and the normalized rows."""

    normalized: np.ndarray
    mean: np.ndarray
    rstd: np.ndarray


def trailing(axis):
    return 1 if isinstance(axis, int) else len(axis)


def as_rows(array, axis):
    """Rows by columns, in long double; bfloat16 knows the way only through float64."""
    array = np.asarray(array)
    count = trailing(axis)
    shape = math.prod(array.shape[:-count]), math.prod(array.shape[-count:])
    return array.astype(np.float64).reshape(shape).astype(LONG)


def compute_dtype(*dtypes):
    wide = any(np.dtype(dtype).name == "float64" for dtype in dtypes)
    return np.dtype(np.float64 if wide else np.float32)


def as_vector(parameter, compute, default):
    """A weight or bias in the compute dtype, then in long double."""
    if parameter is None:
        return LONG(default)
    return np.asarray(parameter).astype(compute).reshape(-1).astype(LONG)


def as_scale(weight, weight_offset, compute):
    if weight is None:
        return LONG(1)
    vector = np.asarray(weight).astype(compute).reshape(-1)
    return (vector + compute.type(weight_offset)).astype(LONG)


@np.errstate(all="ignore")
def normalize(rows, centered, eps):
    """Two passes over long doubles, the mean mended by a third."""
    if rows.shape[1] == 0:
        nothing = np.full((len(rows), 1), np.nan, LONG)
        return Exact(rows, nothing, nothing)
    deviations, mean = rows, np.zeros((len(rows), 1), LONG)
    if centered:
        mean = rows[:, :1] + (rows - rows[:, :1]).mean(axis=1, keepdims=True)
        deviations = rows - mean
        deviations = deviations - deviations.mean(axis=1, keepdims=True)
    rstd = 1 / np.sqrt((deviations * deviations).mean(axis=1, keepdims=True) + LONG(eps))
    return Exact(deviations * rstd, mean, rstd)


@np.errstate(all="ignore")
def check_forward(
    norm, y, x, weight=None, bias=None, *, axis=-1, eps=None, weight_offset=0.0, round_before=False
):
    """Assert that `y` is the norm of `x` within the contract's bound; eps=None is the default."""
    x = np.asarray(x)
    assert y.shape == x.shape
    compute = compute_dtype(x.dtype, y.dtype)
    exact = normalize(as_rows(x, axis), norm.centered, norm.eps if eps is None else eps)
    scale, shift = as_scale(weight, weight_offset, compute), as_vector(bias, compute, 0)
    product = exact.normalized * scale
    bound = forward_bound(y.dtype.name, exact, product, scale, shift)
    if round_before:
        bound = bound * (1 + LONG(EPSILON[x.dtype.name]))
        bound = bound + forward_bound(x.dtype.name, exact, product, scale, LONG(0))
    assert_within(as_rows(y, axis), product + shift, bound, y.dtype.name, "y")


def forward_bound(name, exact, product, scale, shift):
    u, s = LONG(EPSILON[name]), LONG(SMALLEST[name])
    if name == "float64":
        return 8 * u * ((np.abs(exact.normalized) + 1) * np.abs(scale) + np.abs(shift))
    factor = LONG(3) if name == "float32" else LONG("0.51")
    return (
        factor * u * (np.abs(product) + np.abs(shift))
        + u**2 * np.abs(exact.mean * exact.rstd * scale)
        + (1 + np.abs(exact.rstd * scale)) * s
    )


@np.errstate(all="ignore")
def check_backward(
    norm, gradients, dy, x, weight=None, *, axis=-1, eps=None, weight_offset=0.0, dresidual=None
):
    """Assert that the gradients that are not None are right within the contract's bounds."""
    x, dy = np.asarray(x), np.asarray(dy)
    outputs = [array.dtype for array in gradients if array is not None]
    added = [] if dresidual is None else [np.asarray(dresidual).dtype]
    compute = compute_dtype(x.dtype, dy.dtype, *added, *outputs)
    exact = normalize(as_rows(x, axis), norm.centered, norm.eps if eps is None else eps)
    dy = as_rows(dy, axis)
    g = dy * as_scale(weight, weight_offset, compute)
    columns_shape = x.shape[-trailing(axis) :]

    if gradients.dx is not None:
        assert gradients.dx.shape == x.shape
        name = gradients.dx.dtype.name
        dx, bound = dx_and_bound(name, norm.centered, g, exact)
        if dresidual is not None:
            added = as_rows(dresidual, axis)
            dx, bound = dx + added, bound + LONG(EPSILON[name]) * np.abs(added)
        assert_within(as_rows(gradients.dx, axis), dx, bound, name, "dx")
    if gradients.dweight is not None:
        assert gradients.dweight.shape == columns_shape
        check_sum(gradients.dweight, dy * exact.normalized, dweight_bound(dy, exact), "dweight")
    if gradients.dbias is not None:
        assert gradients.dbias.shape == columns_shape
        check_sum(gradients.dbias, dy, dbias_bound(dy), "dbias")


def dx_and_bound(name, centered, g, exact):
    def mean(rows):
        return rows.mean(axis=1, keepdims=True) if rows.shape[1] else np.nan

    normalized, rstd = exact.normalized, exact.rstd
    dx = g - normalized * mean(g * normalized)
    if centered:
        dx = dx - mean(g)
    size, factor = np.abs(normalized), 4
    if name == "float64":
        size, factor = size + 1, 16
    size = np.abs(g) + mean(np.abs(g)) + size * mean(np.abs(g) * size)
    bound = factor * LONG(EPSILON[name]) * rstd * size + (1 + rstd) * LONG(SMALLEST[name])
    return dx * rstd, bound


def dweight_bound(dy, exact):
    def bound(name):
        u, size, factor = LONG(EPSILON[name]), np.abs(exact.normalized), 1
        if name == "float64":
            size, factor = size + 1, 4
        subnormal = (1 + exact.rstd) * SMALLEST["float64" if name == "float64" else "float32"]
        lost_of_mean = u**2 * np.abs(exact.mean * exact.rstd)
        return np.abs(dy) * (factor * (3 * u * size + lost_of_mean) + subnormal)

    return bound


def dbias_bound(dy):
    def bound(name):
        return (4 if name == "float64" else 1) * LONG(EPSILON[name]) * np.abs(dy)

    return bound


def check_sum(actual, terms, bound_of, what):
    name = actual.dtype.name
    bound = bound_of(name).sum(axis=0) + LONG(SMALLEST[name])
    actual = actual.astype(np.float64).reshape(-1).astype(LONG)
    assert_within(actual, terms.sum(axis=0), bound, name, what)


def check_statistics(norm, result, x, *, axis=-1, eps=None):
    """Assert dtype and shape of the statistics, and that they are good to float64."""
    x = np.asarray(x)
    count = trailing(axis)
    rows = as_rows(x, axis)
    exact = normalize(rows, norm.centered, norm.eps if eps is None else eps)
    for name in result._fields:
        if name not in ("mean", "rstd"):
            continue
        actual, expected = getattr(result, name), getattr(exact, name)
        assert actual.dtype == np.float64
        assert actual.shape == x.shape[:-count] + (1,) * count
        # One shifted pass has a condition of at most D, so 2**-52 D; float64 has a second pass.
        slack = LONG(2.0**-48) if x.dtype.name == "float64" else LONG(2.0**-52) * (8 + rows.shape[1])
        bound = slack * np.abs(expected)
        if name == "mean":
            bound = LONG(2.0**-52) * np.abs(expected) + slack / exact.rstd
        assert_within(actual.reshape(-1, 1).astype(LONG), expected, bound, "float64", name)


@np.errstate(all="ignore")
def assert_within(actual, exact, bound, name, what):
    """|actual - exact| <= bound everywhere; NaN for NaN; infinity only where rounding leads there."""
    error = np.abs(actual - exact)
    good = error <= bound
    good |= np.isnan(actual) & np.isnan(exact)
    # Half a unit above the largest number, rounding leads to infinity.
    overflows = np.abs(exact) + bound >= LARGEST[name] * (1 + LONG(EPSILON[name]) / 4)
    good |= np.isinf(actual) & (np.sign(actual) == np.sign(exact)) & overflows
    if good.all():
        return
    ratio = np.where(good, 0, np.where(np.isfinite(error), error / bound, np.inf))
    worst = np.unravel_index(np.argmax(ratio), ratio.shape)
    raise AssertionError(
        f"{what} ({name}): {np.count_nonzero(~good)} of {good.size} out of bounds; the worst at "
        f"{tuple(map(int, worst))} is {actual[worst]!r}, not {exact[worst]!r}: an error of "
        f"{float(ratio[worst]):.4g} times the bound"
    )


def assert_same_bits(actual, expected, what=""):
    """Same dtype, shape and bits; every NaN counts as the same."""
    assert actual.dtype == expected.dtype, (what, actual.dtype, expected.dtype)
    assert actual.shape == expected.shape, (what, actual.shape, expected.shape)
    code = np.dtype(f"u{actual.dtype.itemsize}")
    different = np.array(actual, order="C").view(code) != np.array(expected, order="C").view(code)
    different &= ~(np.isnan(actual) & np.isnan(expected))
    if different.any():
        where = tuple(map(int, np.argwhere(different)[0]))
        raise AssertionError(
            f"{what}: {np.count_nonzero(different)} of {different.size} differ; the first at "
            f"{where} is {actual[where]!r}, not {expected[where]!r}"
        )
