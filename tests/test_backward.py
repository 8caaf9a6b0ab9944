"""Gradients, against exact ones, within the contract's bounds. test_gradients.py differentiates."""

import itertools

import numpy as np
import pytest
from bounds import (
    EPSILON,
    SMALLEST,
    as_rows,
    assert_same_bits,
    assert_within,
    check_backward,
    dx_and_bound,
    normalize,
)
from table import DTYPES, FEW_MIXED, HALVES, MIXED, NORMS, ROWS, WIDE, WIDTHS, random
from zoo import poisoned

from npnorm._results import NormGradients

pytestmark = pytest.mark.parametrize("norm", NORMS, ids=lambda norm: norm.name)


def inputs(shape, dtype="float32", weight_dtype=None, seed=0, count=1):
    dy, x = random(shape, dtype, seed), random(shape, dtype, seed + 1, offset=0.5)
    return dy, x, random(shape[-count:], weight_dtype or dtype, seed + 2, offset=1.0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_weight", [False, True])
def test_every_shape(norm, dtype, has_weight):
    for cols in WIDTHS:
        for rows in ROWS:
            dy, x, weight = inputs((rows, cols), dtype)
            weight = weight if has_weight else None
            gradients = norm.backward(dy, x, weight)
            assert isinstance(gradients, NormGradients)
            assert gradients.dx.dtype == x.dtype
            assert (gradients.dweight is not None) == has_weight
            assert (gradients.dbias is not None) == has_weight
            check_backward(norm, gradients, dy, x, weight)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cols", WIDE)
def test_wide(norm, dtype, cols):
    dy, x, weight = inputs((3, cols), dtype)
    check_backward(norm, norm.backward(dy, x, weight), dy, x, weight)


def test_every_small_width(norm):
    for cols in range(1, 130):
        dy, x, weight = inputs((3, cols))
        check_backward(norm, norm.backward(dy, x, weight), dy, x, weight)


@pytest.mark.parametrize("dtype", DTYPES)
def test_many_rows(norm, dtype):
    """Sums over rows, dy of one sign: an accumulator of the output's dtype would lose them."""
    for rows in (31, 32, 33, 64, 65, 1000, 10007):
        dy, x, weight = inputs((rows, 13), dtype)
        dy = np.abs(dy)
        x = np.abs(x)
        check_backward(norm, norm.backward(dy, x, weight), dy, x, weight)


@pytest.mark.parametrize(("dtype", "other"), MIXED)
def test_weight_of_another_dtype(norm, dtype, other):
    """dweight and dbias have the weight's dtype."""
    dy, x, weight = inputs((33, 129), dtype, other)
    gradients = norm.backward(dy, x, weight)
    assert [g.dtype for g in gradients] == [x.dtype, weight.dtype, weight.dtype]
    check_backward(norm, gradients, dy, x, weight)


@pytest.mark.parametrize(("dtype", "other"), FEW_MIXED)
def test_dy_of_another_dtype(norm, dtype, other):
    _, x, weight = inputs((33, 129), dtype)
    dy = random(x.shape, other, seed=5)
    gradients = norm.backward(dy, x, weight)
    assert [g.dtype for g in gradients] == [x.dtype, weight.dtype, weight.dtype]
    check_backward(norm, gradients, dy, x, weight)


@pytest.mark.parametrize(("dtype", "other"), FEW_MIXED)
def test_out_of_another_dtype(norm, dtype, other):
    dy, x, weight = inputs((33, 129), dtype)
    out = [poisoned(shape, DTYPES[other]) for shape in (x.shape, 129, 129)]
    gradients = norm.backward(dy, x, weight, out=tuple(out))
    for given, returned in zip(out, gradients, strict=True):
        assert returned is given
    check_backward(norm, gradients, dy, x, weight)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_every_mask(norm, dtype):
    """What is asked for has the same bits whatever else is asked for; the rest is None."""
    dy, x, weight = inputs((33, 129), dtype)
    every = norm.backward(dy, x, weight, output_mask=(True, True, True))
    assert_same_bits(norm.backward(dy, x, weight).dweight, every.dweight)
    for mask in itertools.product([False, True], repeat=3):
        for kind in (tuple, list, np.array):
            gradients = norm.backward(dy, x, weight, output_mask=kind(mask))
            for wanted, got, expected in zip(mask, gradients, every, strict=True):
                if wanted:
                    assert_same_bits(got, expected)
                else:
                    assert got is None


@pytest.mark.parametrize("dtype", DTYPES)
def test_mask_without_a_weight(norm, dtype):
    """Parameter gradients asked for without a weight have x's dtype."""
    dy, x, _ = inputs((33, 129), dtype)
    gradients = norm.backward(dy, x, output_mask=(True, True, True))
    assert [g.dtype for g in gradients] == [x.dtype] * 3
    check_backward(norm, gradients, dy, x)
    assert_same_bits(norm.backward(dy, x).dx, gradients.dx)
    ones = norm.backward(dy, x, np.ones(129, x.dtype), output_mask=(False, True, True))
    assert_same_bits(gradients.dweight, ones.dweight)
    assert_same_bits(gradients.dbias, ones.dbias)


@pytest.mark.parametrize("dtype", DTYPES)
def test_weight_offset(norm, dtype):
    """The offset changes dx and leaves dweight alone."""
    dy, x, weight = inputs((33, 129), dtype)
    plain = norm.backward(dy, x, weight)
    for offset in (1.0, -0.3):
        gradients = norm.backward(dy, x, weight, weight_offset=offset)
        check_backward(norm, gradients, dy, x, weight, weight_offset=offset)
        assert not np.array_equal(gradients.dx, plain.dx)
        assert_same_bits(gradients.dweight, plain.dweight)
        assert_same_bits(gradients.dbias, plain.dbias)


@pytest.mark.parametrize("dtype", DTYPES)
def test_dresidual(norm, dtype):
    dy, x, weight = inputs((33, 769), dtype)
    dresidual = random(x.shape, dtype, seed=8)
    gradients = norm.backward(dy, x, weight, dresidual=dresidual)
    check_backward(norm, gradients, dy, x, weight, dresidual=dresidual)
    plain = norm.backward(dy, x, weight)
    assert_same_bits(gradients.dweight, plain.dweight)
    without_weight = norm.backward(dy, x, dresidual=dresidual)
    check_backward(norm, without_weight, dy, x, dresidual=dresidual)
    zero = norm.backward(dy, x, weight, dresidual=np.zeros_like(x))
    np.testing.assert_array_equal(zero.dx, plain.dx)


def test_dresidual_with_dx_masked_out(norm):
    """It says nothing about the parameters, and does no harm; contiguous or not."""
    dy, x, weight = inputs((33, 129))
    expected = norm.backward(dy, x, weight)
    for dresidual in (random(x.shape, seed=8), random((33, 258), "float64", seed=8)[:, ::2]):
        gradients = norm.backward(
            dy, x, weight, dresidual=dresidual, output_mask=(False, True, True)
        )
        assert gradients.dx is None
        np.testing.assert_allclose(gradients.dweight, expected.dweight, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(gradients.dbias, expected.dbias, rtol=1e-5, atol=1e-5)
        nothing = norm.backward(dy, x, dresidual=dresidual, output_mask=(False, False, False))
        assert nothing == (None, None, None)


@pytest.mark.parametrize("dtype", HALVES)
def test_half_dbias_is_rounded_once(norm, dtype):
    """The sum lies above a tie by less than float32 sees: through float32 it would be rounded down."""
    u = EPSILON[dtype]
    dy = np.array([[1 + u / 2], [2.0**-40]], np.float32)
    gradients = norm.backward(dy, np.ones_like(dy), np.ones(1, DTYPES[dtype]))
    assert gradients.dbias.astype(float)[0] == 1 + u


@pytest.mark.parametrize("dtype", HALVES)
def test_half_dx_is_rounded_once(norm, dtype):
    """dx and dresidual meet in float32 or wider: half a unit of their sum, and float32's bound."""
    dy, x, weight = inputs((33, 769), dtype)
    dresidual = random(x.shape, dtype, seed=8)
    got = as_rows(norm.backward(dy, x, weight, dresidual=dresidual).dx, -1)
    exact = normalize(as_rows(x, -1), norm.centered, norm.eps)
    dx, bound = dx_and_bound("float32", norm.centered, as_rows(dy, -1) * as_rows(weight, -1), exact)
    total = dx + as_rows(dresidual, -1)
    half_unit = (np.abs(total) + bound) * EPSILON[dtype] / 2 + SMALLEST[dtype]
    assert_within(got, total, bound + half_unit, dtype, "dx")


@pytest.mark.parametrize(("dtype", "other"), FEW_MIXED)
def test_dresidual_of_another_dtype(norm, dtype, other):
    dy, x, weight = inputs((33, 129), dtype)
    dresidual = random(x.shape, other, seed=8)
    gradients = norm.backward(dy, x, weight, dresidual=dresidual)
    assert gradients.dx.dtype == x.dtype
    check_backward(norm, gradients, dy, x, weight, dresidual=dresidual)


@pytest.mark.parametrize("dtype", DTYPES)
def test_eps(norm, dtype):
    dy, x, weight = inputs((33, 129), dtype)
    x = (x * 0.01).astype(x.dtype)
    check_backward(norm, norm.backward(dy, x, weight), dy, x, weight)
    for eps in (0.0, 1e-12, 1e-3, 1, 7.5):
        gradients = norm.backward(dy, x, weight, eps=eps)
        check_backward(norm, gradients, dy, x, weight, eps=eps)


def test_eps_none(norm):
    if norm.centered:
        pytest.skip("eps=None is RMSNorm's alone")
    for dtype in DTYPES:
        dy, x, weight = inputs((33, 129), dtype)
        x = (x * 0.001).astype(x.dtype)
        eps = 2.0**-52 if dtype == "float64" else 2.0**-23
        check_backward(norm, norm.backward(dy, x, weight, eps=None), dy, x, weight, eps=eps)


@pytest.mark.parametrize("dtype", DTYPES)
def test_statistics_are_used(norm, dtype):
    """Given statistics are what the gradients are made with, eps then means nothing."""
    dy, x, weight = inputs((33, 129), dtype)
    saved = norm.saved(norm.forward(x, weight, return_stats=True))
    expected = norm.backward(dy, x, weight)
    for eps in (1.0, norm.eps):
        gradients = norm.backward(dy, x, weight, **saved, eps=eps)
        for got, want in zip(gradients, expected, strict=True):
            assert_same_bits(got, want)
    doubled = norm.backward(dy, x, weight, **{**saved, "rstd": 2 * saved["rstd"]})
    np.testing.assert_allclose(
        doubled.dweight.astype(np.float64), 2 * expected.dweight.astype(np.float64), rtol=0.02
    )


@pytest.mark.parametrize("dtype", ["float16", "float32", ">f8"])
def test_statistics_of_another_dtype(norm, dtype):
    """Any float dtype is taken and becomes float64, contiguous or not."""
    dy, x, weight = inputs((33, 129))
    saved = norm.saved(norm.forward(x, weight, return_stats=True))
    rounded = {name: value.astype(dtype) for name, value in saved.items()}
    expected = norm.backward(
        dy, x, weight, **{name: value.astype(np.float64) for name, value in rounded.items()}
    )
    strided = {name: np.repeat(value, 2, axis=0)[::2] for name, value in rounded.items()}
    for given in (rounded, strided):
        for got, want in zip(norm.backward(dy, x, weight, **given), expected, strict=True):
            assert_same_bits(got, want)


@pytest.mark.parametrize("shape", [(7,), (3, 7), (2, 3, 7), (2, 1, 3, 1, 7), (1, 1, 1, 7)])
def test_any_number_of_axes(norm, shape):
    dy, x, weight = inputs(shape)
    check_backward(norm, norm.backward(dy, x, weight), dy, x, weight)


@pytest.mark.parametrize(
    ("axis", "count"), [(3, 1), ((-2, -1), 2), ((-1, 2), 2), ((3, -3, 2), 3), ((0, 1, 2, 3), 4)]
)
def test_axis(norm, axis, count):
    dy, x, weight = inputs((2, 3, 5, 7), count=count)
    gradients = norm.backward(dy, x, weight, axis=axis)
    assert gradients.dweight.shape == gradients.dbias.shape == x.shape[-count:]
    check_backward(norm, gradients, dy, x, weight, axis=tuple(range(-count, 0)))
    saved = norm.saved(norm.forward(x, weight, axis=axis, return_stats=True))
    again = norm.backward(dy, x, weight, axis=axis, **saved)
    for got, want in zip(again, gradients, strict=True):
        assert_same_bits(got, want)


def test_add_has_this_backward(norm):
    """x + residual -> y, residual_out: both gradients meet in one pass, for x and for residual."""
    x, residual = random((3, 13), "float64"), random((3, 13), "float64", 1)
    weight = random(13, "float64", 2)
    dy, dresidual = random((3, 13), "float64", 3), random((3, 13), "float64", 4)

    def loss(x):
        y, total = norm.add(x, residual, weight)
        return (dy * y).sum() + (dresidual * total).sum()

    dx = norm.backward(dy, norm.add(x, residual, weight).residual_out, weight, dresidual=dresidual).dx
    step = 1e-6
    for index in np.ndindex(x.shape):
        shift = np.zeros_like(x)
        shift[index] = step
        numeric = (loss(x + shift) - loss(x - shift)) / (2 * step)
        assert numeric == pytest.approx(dx[index], rel=1e-6, abs=1e-7)


@pytest.mark.parametrize("where", ["weight", "dy", "dresidual", "out"])
def test_given_statistics_are_used_in_float64_computations(norm, where):
    """Not only with arguments of one dtype: their eps, for one, is known to them alone."""
    dy, x, weight = inputs((5, 33))
    saved = norm.saved(norm.forward(x, weight, eps=1.0, return_stats=True))
    expected = norm.backward(dy, x, weight, **saved)
    options = dict(saved)
    if where == "weight":
        weight = weight.astype(np.float64)
    elif where == "dy":
        dy = dy.astype(np.float64)
    elif where == "dresidual":
        options["dresidual"] = np.zeros(x.shape)
    else:
        options["out"] = (None, np.empty(33), None)
    gradients = norm.backward(dy, x, weight, **options)
    np.testing.assert_allclose(gradients.dx, expected.dx, rtol=1e-5, atol=1e-5)
    again = norm.backward(dy, x, weight, eps=1.0, **{**options, **dict.fromkeys(saved)})
    assert_same_bits(again.dx, gradients.dx)
    assert_same_bits(again.dweight, gradients.dweight)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_each_statistic_is_used_without_the_other(norm, dtype):
    dy, x, weight = inputs((5, 33), dtype)
    saved = norm.saved(norm.forward(x, weight, return_stats=True))
    expected = norm.backward(dy, x, weight, **saved)
    for name, value in saved.items():
        assert_same_bits(norm.backward(dy, x, weight, **{name: value}).dx, expected.dx)
    own = {"rstd": 2 * saved["rstd"]}  # the caller's
    reference = norm.reference("backward")(dy, x, weight, **own).dx
    np.testing.assert_allclose(norm.backward(dy, x, weight, **own).dx, reference, rtol=1e-4, atol=1e-4)


def test_products_beyond_float32(norm):
    """g, or g·x̂, may leave the range of float32 where dx does not."""
    x = np.array([[1, -3, 2, 5], [1, 2, -3, 4]], np.float32)
    large = np.array([[3, -3, 2, 1], [1, 3, 3, -3]], np.float32) * np.float32(1e38)
    tiny = np.array([[1, 2, 3, -1], [4, 1, -2, 2]], np.float32) * np.float32(1e-25)
    for dy, rows, weight in (
        (large, x * np.float32(1e3), None),
        (tiny, x * np.float32(1e-20), np.full(4, 1e-20, np.float32)),
    ):
        got = norm.backward(dy, rows, weight, eps=0.0).dx
        wide = None if weight is None else weight.astype(np.float64)
        exact = norm.reference("backward")(dy.astype(np.float64), rows.astype(np.float64), wide, eps=0.0).dx
        np.testing.assert_allclose(got, exact, rtol=1e-5, atol=1e-5 * np.abs(exact).max())


def test_no_eps_is_that_of_x_in_both_directions(norm):
    """Whatever dtype the weight has."""
    if norm.centered:
        pytest.skip("only RMSNorm takes None")
    x, dy = np.float32([[1e-4, 2e-4, -3e-4]]), np.float32([[1, 0, 0]])
    expected = norm.backward(dy, x, np.ones(3, np.float32), eps=None).dx
    for weight in (None, np.ones(3)):
        _, rstd = norm.forward(x, weight, eps=None, return_stats=True)
        for kept in (None, rstd):
            dx = norm.backward(dy, x, weight, rstd=kept, eps=None).dx
            np.testing.assert_allclose(dx, expected, rtol=1e-5)
