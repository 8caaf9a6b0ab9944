"""Rows made to break a norm, within the same bounds: "for every finite input"."""

import numpy as np
import pytest
from bounds import (
    HAS_LONGDOUBLE,
    LARGEST,
    SMALLEST,
    as_rows,
    assert_same_bits,
    check_backward,
    check_forward,
    check_jvp,
    normalize,
)
from table import DTYPES, NORMS, random

pytestmark = pytest.mark.parametrize("norm", NORMS, ids=lambda norm: norm.name)

COLUMNS = (1, 2, 7, 33, 769, 4097)
ROWS = 4


def outlier(place, size):
    def make(noise, largest, smallest):
        noise[:, place] = size * np.sqrt(noise.shape[1])
        return noise

    return make


def sparse(noise, largest, smallest):
    row = np.zeros_like(noise)
    row[:, 0] = 1.0
    return row


def nearly_constant(noise, largest, smallest):
    row = np.full_like(noise, 1.0)
    row[:, -1] = 1.0 + 2.0**-7
    return row


# Functions of (noise, largest, smallest): normal noise, the dtype's largest and smallest numbers.
def cancelling(noise, largest, smallest):
    """Large numbers that cancel each other, beside small ones, whose digits the mean must not disturb."""
    values = np.sign(noise) * (1 + np.abs(np.tanh(noise))) * 2.0**-12
    large = values[..., ::4][..., : noise.shape[-1] // 4]
    large[...] = 200 + 50 * np.tanh(noise[..., : large.shape[-1]])
    values[..., 2::4][..., : large.shape[-1]] = -large[..., ::-1]
    return values


KINDS = {
    "large numbers that cancel each other": cancelling,
    "noise": lambda noise, largest, smallest: noise,
    "offset 1e1": lambda noise, largest, smallest: noise + 1e1,
    "offset 1e2": lambda noise, largest, smallest: noise + 1e2,
    "offset 250": lambda noise, largest, smallest: noise + 250,  # a row is far from zero from 256
    "offset -1e3": lambda noise, largest, smallest: noise - 1e3,
    "offset 1e4": lambda noise, largest, smallest: noise + 1e4,
    "offset 1e5": lambda noise, largest, smallest: noise + 1e5,
    "offset -1e6": lambda noise, largest, smallest: noise - 1e6,
    "offset 1e15": lambda noise, largest, smallest: noise + 1e15,
    "scale 1e-38": lambda noise, largest, smallest: noise * 1e-38,
    "scale 1e-30": lambda noise, largest, smallest: noise * 1e-30,
    "scale 1e-19": lambda noise, largest, smallest: noise * 1e-19,
    "scale 1e-5": lambda noise, largest, smallest: noise * 1e-5,
    "scale 1e19": lambda noise, largest, smallest: noise * 1e19,
    "scale 1e30": lambda noise, largest, smallest: noise * 1e30,
    "scale 1e37, far from zero": lambda noise, largest, smallest: (noise + 10) * 1e37,
    "tiny, far from zero": lambda noise, largest, smallest: (noise + 1e3) * 1e-38,
    "scale 1e200": lambda noise, largest, smallest: noise * 1e200,
    "scale 1e-200": lambda noise, largest, smallest: noise * 1e-200,
    "scale 1e307": lambda noise, largest, smallest: noise * 1e307,
    "scale 1e-307": lambda noise, largest, smallest: noise * 1e-307,
    "tinier, far from zero": lambda noise, largest, smallest: (noise + 1e3) * 1e-300,
    "subnormal": lambda noise, largest, smallest: np.round(noise * 20) * smallest,
    "plus and minus the largest": lambda noise, largest, smallest: np.sign(noise) * largest,
    "the largest and a few of its opposites": lambda noise, largest, smallest: np.where(
        noise > 1.5, -largest, largest
    ),
    "half the largest": lambda noise, largest, smallest: (1 + 0.1 * np.tanh(noise)) * (largest / 2),
    "first element out": outlier(0, 1e3),
    "last element out": outlier(-1, 1e3),
    "first element far out": outlier(0, 1e7),
    "last element far out": outlier(-1, -1e7),
    "one above zeros": sparse,
    "one unit in a constant": nearly_constant,
    "every magnitude": lambda noise, largest, smallest: 10.0 ** (9 * noise) * np.sign(noise[::-1]),
    "ramp": lambda noise, largest, smallest: np.arange(noise.size).reshape(noise.shape) + 4e4,
    "constant": lambda noise, largest, smallest: np.full_like(noise, 14.0),
    "constant third": lambda noise, largest, smallest: np.full_like(noise, 1 / 3),
    "constant at the largest": lambda noise, largest, smallest: np.full_like(noise, -largest),
    "constant at the smallest": lambda noise, largest, smallest: np.full_like(noise, smallest),
    "zeros": lambda noise, largest, smallest: np.zeros_like(noise),
    "negative zeros": lambda noise, largest, smallest: -np.zeros_like(noise),
}


def rows_of(kind, shape, dtype):
    """Rows of this kind, held to what the dtype can hold."""
    values = KINDS[kind](random(shape, "float64", seed=7), LARGEST[dtype], SMALLEST[dtype])
    x = np.clip(values, -LARGEST[dtype], LARGEST[dtype]).astype(DTYPES[dtype])
    assert np.isfinite(x).all()
    return x


def check(norm, x, eps, scale=1.0):
    cols = x.shape[1]
    dtype = "float32" if x.dtype.name != "float64" else "float64"
    weight, bias = random(cols, dtype, 1, scale=scale), random(cols, dtype, 2)
    weight[::5] = 0.0
    y = norm.forward(x, weight, bias, eps=eps)
    check_forward(norm, y, x, weight, bias, eps=eps)
    check_forward(norm, norm.forward(x, eps=eps), x, eps=eps)
    dy = random(x.shape, dtype, 3, offset=0.5)
    if normalize(as_rows(x, -1), norm.centered, eps).rstd.max() > LARGEST["float64"]:
        return  # float64 subnormals and eps = 0: rstd, a float64, is infinite, and so is dx
    check_backward(norm, norm.backward(dy, x, weight, eps=eps), dy, x, weight, eps=eps)
    if eps in (norm.eps, 0.0):
        tangents = {"dx": dy, "dweight": bias, "dbias": weight}
        check_jvp(norm, norm.jvp(x, weight, **tangents, eps=eps), x, weight, **tangents, eps=eps)


needs_longdouble = pytest.mark.skipif(not HAS_LONGDOUBLE, reason="no oracle wider than float64")


@needs_longdouble
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_bounds(norm, dtype, kind):
    for cols in COLUMNS:
        x = rows_of(kind, (ROWS, cols), dtype)
        for eps in (norm.eps, 0.0, 1e-12, 1e-300):
            check(norm, x, eps)


@needs_longdouble
@pytest.mark.parametrize("dtype", DTYPES)
def test_wide_rows(norm, dtype):
    cols = 100000 if dtype == "float32" else 40000
    for kind in KINDS:
        check(norm, rows_of(kind, (1, cols), dtype), norm.eps)


@needs_longdouble
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("scale", [1e-30, 1e-10, 1e10, 1e30])
def test_extreme_weights(norm, dtype, scale):
    """rstd times weight may overflow where their product with x does not."""
    for kind in ("noise", "scale 1e-19", "scale 1e-30", "scale 1e19", "scale 1e30", "offset 1e4"):
        for eps in (norm.eps, 0.0):
            check(norm, rows_of(kind, (ROWS, 129), dtype), eps, scale)


@needs_longdouble
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_extreme_gradients(norm, dtype):
    """Rows of dy that float32 cannot multiply or divide beside some that it can: in pairs, alone, the last one odd."""
    powers = np.array([[0], [37], [-38], [30], [-30], [0], [20]]) * (1 if dtype == "float32" else 7)
    for cols in (7, 129, 769):
        x, weight = random((7, cols), dtype, 1, offset=1.0), random(cols, dtype, 2)
        dy = (random((7, cols), "float64", 3, offset=0.5) * 10.0**powers).astype(dtype)
        for scale in (1.0, 1e10, 1e-10):
            w = (weight * scale).astype(dtype)
            names = ("mean", "rstd") if norm.centered else ("rstd",)
            given = dict(zip(names, norm.forward(x, return_stats=True)[1:], strict=True))
            got = norm.backward(dy, x, w, **given)
            check_backward(norm, got, dy, x, w)
            alone = [norm.backward(d, one, w).dx for d, one in zip(dy, x, strict=True)]
            assert_same_bits(got.dx, np.stack(alone))
            assert_same_bits(norm.backward(dy, x, w, output_mask=(True, False, False)).dx, got.dx)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("eps", [1e-5, 1e-12, 1e-300])
def test_constant_rows_are_exactly_bias(norm, dtype, eps):
    """Whatever the constant, the width, the scale; RMSNorm has this for zeros."""
    constants = [14.0, 1 / 3, -1e4, 6e4, SMALLEST[dtype], LARGEST[dtype], 0.0, -0.0]
    for cols in (1, 2, 3, 7, 100, 129, 769, 4097, 40001):
        weight, bias = random(cols, dtype, 1), random(cols, dtype, 2)
        for constant in constants if norm.centered else (0.0, -0.0):
            x = np.full((2, cols), constant).astype(DTYPES[dtype])
            y = norm.forward(x, weight, bias, eps=eps)
            assert_same_bits(y, np.stack([bias, bias]), f"{constant} {cols}")
            np.testing.assert_array_equal(norm.forward(x, eps=eps), np.zeros_like(x))
            gradients = norm.backward(random(x.shape, dtype, 3), x, weight, eps=eps)
            np.testing.assert_array_equal(gradients.dweight, np.zeros_like(weight))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("eps", [1e-5, 1e-12, 1e-300])
def test_one_column(norm, dtype, eps):
    """LayerNorm of one number: y = bias, dx = 0, dweight = 0, exactly."""
    if not norm.centered:
        pytest.skip("LayerNorm's alone")
    x = random((33, 1), dtype, scale=1e3)
    dy, weight, bias = random((33, 1), dtype, 1), random(1, dtype, 2), random(1, dtype, 3)
    y = norm.forward(x, weight, bias, eps=eps)
    assert_same_bits(y, np.repeat(bias[None], 33, axis=0))
    gradients = norm.backward(dy, x, weight, eps=eps)
    np.testing.assert_array_equal(gradients.dx, np.zeros_like(x))
    np.testing.assert_array_equal(gradients.dweight, np.zeros_like(weight))


@pytest.mark.parametrize("dtype", DTYPES)
def test_constant_rows_without_eps_are_nan(norm, dtype):
    """0/0, as IEEE 754 says; the rows beside them are not touched."""
    for cols in (1, 7, 129):
        x = np.zeros((3, cols), DTYPES[dtype])
        x[1] = random(cols, dtype) if cols > 1 or not norm.centered else 0
        y = norm.forward(x, eps=0.0)
        assert np.isnan(y[[0, 2]]).all()
        if cols > 1:
            check_forward(norm, y[1:2], x[1:2], eps=0.0)


@pytest.mark.parametrize("power", [-60, -20, 1, 60])
def test_scaling_by_a_power_of_two_changes_no_bit(norm, power):
    """With eps = 0 a norm ignores the scale of its rows."""
    x = random((4, 769), offset=1.0)
    scaled = x * np.float32(2.0**power)
    assert_same_bits(norm.forward(scaled, eps=0.0), norm.forward(x, eps=0.0))
