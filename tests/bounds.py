"""Checks against the contract's bounds, which npnorm/_bounds.py has, with the exact values."""

import math

import numpy as np

from npnorm._bounds import (  # noqa: F401  tests import them from here
    EPSILON,
    HAS_LONGDOUBLE,
    LARGEST,
    LONG,
    SMALLEST,
    dbias_bound,
    dweight_bound,
    dx_and_bound,
    forward_bound,
    jvp_and_bound,
    normalize,
)


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


@np.errstate(all="ignore")
def check_jvp(
    norm, dy, x, weight=None, *, dx=None, dweight=None, dbias=None, axis=-1, eps=None, weight_offset=0.0
):
    """Assert that a directional derivative is right within its bound."""
    x = np.asarray(x)
    assert dy.shape == x.shape
    name = dy.dtype.name
    inputs = [np.asarray(a).dtype for a in (x, weight, dx, dweight, dbias) if a is not None]
    exact = normalize(as_rows(x, axis), norm.centered, norm.eps if eps is None else eps)
    wide = np.dtype(np.float64)
    expected, bound = jvp_and_bound(
        name,
        norm.centered,
        np.zeros_like(exact.normalized) if dx is None else as_rows(dx, axis),
        as_scale(weight, weight_offset, compute_dtype(dy.dtype, *inputs)),
        as_vector(dweight, wide, 0),
        as_vector(dbias, wide, 0),
        exact,
    )
    assert_within(as_rows(dy, axis), expected, bound, name, "dy")


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
