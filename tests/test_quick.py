"""Small calls that were seen before take a short way: the same bits and errors as the long one."""

import itertools

import numpy as np
import pytest
from bounds import assert_same_bits
from table import DTYPES, NORMS, random

import npnorm
from npnorm.cpu import quick

pytestmark = pytest.mark.parametrize("norm", NORMS, ids=lambda norm: norm.name)


@pytest.fixture
def long_way(monkeypatch):
    """Calls in here take the long way."""

    def call(function, *arguments, **options):
        with monkeypatch.context() as patch:
            patch.setattr(quick, "_forward", {})
            patch.setattr(quick, "_backward", {})
            return function(*arguments, **options)

    return call


@pytest.fixture
def short_way(monkeypatch):
    """Calls in here take the short way, or fail."""

    def call(function, *arguments, **options):
        with monkeypatch.context() as patch:
            for name in ("forward.planned_forward", "fused.planned_forward", "backward.planned_backward"):
                patch.setattr(f"npnorm._api.{name}", None)
            return function(*arguments, **options)

    return call


def arrays(dtype, shape=(5, 33), huge_row=None):
    x, dy = random(shape, dtype, 1), random(shape, dtype, 2)
    if huge_row is not None:
        x[huge_row] *= DTYPES[dtype].type(1e-36 if dtype == "float32" else 1e-200)
    return x, dy, random(shape[-1:], dtype, 3), random(shape[-1:], dtype, 4)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(33,), (5, 33), (2, 3, 33), (3, 200, 500), (3, 100001)])
def test_forward(norm, dtype, shape, long_way, short_way):
    x, _, weight, bias = arrays(dtype, shape)
    for parameters in ((), (weight,), (weight, bias), (None, bias)):
        expected = long_way(norm.forward, x, *parameters)
        norm.forward(x, *parameters)
        assert_same_bits(short_way(norm.forward, x, *parameters), expected)
        out = np.empty_like(x)
        assert short_way(norm.forward, x, *parameters, out=out) is out
        assert_same_bits(out, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(5, 33), (3, 200, 500)])
def test_backward(norm, dtype, shape, long_way, short_way):
    x, dy, weight, _ = arrays(dtype, shape)
    statistics = norm.forward(x, weight, return_stats=True)[1:]
    saved = dict(zip(("mean", "rstd") if norm.centered else ("rstd",), statistics, strict=True))
    for kept, mask in itertools.product(({}, saved), (None, (True, True, False), (False, True, True))):
        options = {**kept, "output_mask": mask}
        expected = long_way(norm.backward, dy, x, weight, **options)
        norm.backward(dy, x, weight, **options)
        got = short_way(norm.backward, dy, x, weight, **options)
        out = tuple(None if g is None else np.empty_like(g) for g in expected)
        given = short_way(norm.backward, dy, x, weight, **options, out=out)
        for want, one, other, array in zip(expected, got, given, out, strict=True):
            assert other is array
            if want is None:
                assert one is None
            else:
                assert_same_bits(one, want)
                assert_same_bits(other, want)


@pytest.mark.parametrize("shape", [(3, 100001), (2, 33001)])
def test_wide_backward(norm, shape, long_way, short_way):
    x, dy, weight, _ = arrays("float32", shape)
    expected = long_way(norm.backward, dy, x, weight)
    norm.backward(dy, x, weight)
    for got, want in zip(short_way(norm.backward, dy, x, weight), expected, strict=True):
        assert_same_bits(got, want)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("row", [0, 3, 4])
def test_an_extreme_row_in_place(norm, dtype, row):
    """The rows before it are not normalized twice."""
    x, dy, weight, bias = arrays(dtype, huge_row=row)
    norm.forward(*arrays(dtype)[:1], weight, bias)
    norm.backward(*arrays(dtype)[1::-1], weight)
    expected = np.stack([norm.forward(one, weight, bias) for one in x.copy()])
    gradients = np.stack([norm.backward(d, one, weight).dx for d, one in zip(dy, x, strict=True)])
    y, dx = x.copy(), dy.copy()
    norm.forward(y, weight, bias, out=y)
    norm.backward(dx, x, weight, out=(dx, None, None), output_mask=(True, False, False))
    assert_same_bits(y, expected)
    assert_same_bits(dx, gradients)
    dx, dweight, dbias = dy.copy(), np.empty_like(weight), np.empty_like(weight)
    norm.backward(dx, x, weight, out=(dx, dweight, dbias))
    assert_same_bits(dx, gradients)
    assert_same_bits(dweight, norm.backward(dy, x, weight).dweight)


def test_what_is_not_plain_takes_the_long_way(norm):
    """With its errors, and its right answers."""
    x, dy, weight, bias = arrays("float32", (33,))
    y = norm.forward(x, weight, bias)
    norm.backward(dy, x, weight)
    assert_same_bits(norm.forward(x[::-1], weight, bias), norm.forward(x[::-1].copy(), weight, bias))
    swapped = x.astype(">f4")
    assert_same_bits(norm.forward(swapped, weight, bias), y)
    with pytest.raises(ValueError, match="`weight`"):
        norm.forward(x, weight[1:], bias)
    for out in (weight, bias):  # of x's shape, since x has one axis
        with pytest.raises(ValueError, match="`out` must not overlap"):
            norm.forward(x, weight, bias, out=out)
    both = np.empty(40, np.float32)
    with pytest.raises(ValueError, match="`out` must not overlap `x` in part"):
        norm.forward(both[:33], weight, bias, out=both[7:])
    frozen = np.empty_like(x)
    frozen.flags.writeable = False
    with pytest.raises(ValueError, match="`out` must be writable"):
        norm.forward(x, weight, bias, out=frozen)
    for eps in (-1.0, np.inf, np.nan):
        with pytest.raises(ValueError, match="`eps`"):
            norm.forward(x, weight, bias, eps=eps)
    for wrong in ({"axis": True}, {"axis": -1.0}, {"weight_offset": False}):
        with pytest.raises(TypeError):
            norm.forward(x, weight, bias, **wrong)
    with pytest.raises(TypeError, match="three bools"):
        norm.backward(dy, x, weight, output_mask=(1, 1, 1))
    with pytest.raises(ValueError, match=r"`out\[1\]` must not overlap `weight`"):
        norm.backward(dy, x, weight, out=(None, weight, None))


def test_float64_for_an_argument_that_kernels_do_not_see(norm):
    """dresidual, where dx is masked out: it decides what is computed in, of that call alone."""
    x, dy, weight, _ = arrays("float32")
    mask = (False, True, True)
    expected = norm.backward(dy, x, weight).dweight
    norm.backward(dy, x, weight, output_mask=mask, dresidual=np.zeros(x.shape))
    assert_same_bits(norm.backward(dy, x, weight, output_mask=mask).dweight, expected)


def test_add(norm, long_way, short_way):
    x, residual, weight, bias = arrays("float32")
    expected = long_way(norm.add, x, residual, weight, bias)
    norm.add(x, residual, weight, bias)
    for got, want in zip(short_way(norm.add, x, residual, weight, bias), expected, strict=True):
        assert_same_bits(got, want)


def test_a_layer_takes_it(norm, short_way):
    x = arrays("float32")[0]
    layer = (npnorm.LayerNorm if norm.centered else npnorm.RMSNorm)(33)
    assert_same_bits(layer(x), short_way(layer, x))
