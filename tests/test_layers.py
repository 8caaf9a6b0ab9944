"""The classes: construction, assigned checkpoints, calls, gradients, repr."""

import copy
import pickle

import numpy as np
import pytest
from bounds import assert_same_bits
from table import DTYPES, NORMS, random
from zoo import poisoned

import npnorm

pytestmark = pytest.mark.parametrize("norm", NORMS, ids=lambda norm: norm.name)


def test_construction(norm):
    layer = norm.layer(8)
    assert layer.normalized_shape == (8,)
    assert layer.eps == norm.eps
    assert layer.elementwise_affine is True
    assert_same_bits(layer.weight, np.ones(8, np.float32))
    if norm.centered:
        assert_same_bits(layer.bias, np.zeros(8, np.float32))
    else:
        assert layer.bias is None
    assert_same_bits(norm.layer(8, bias=True).bias, np.zeros(8, np.float32))
    assert norm.layer(8, bias=False).bias is None
    bare = norm.layer(8, elementwise_affine=False)
    assert bare.weight is None and bare.bias is None
    assert norm.layer(8, elementwise_affine=False, bias=True).bias is None


@pytest.mark.parametrize("dtype", DTYPES)
def test_dtype(norm, dtype):
    layer = norm.layer((3, 4), bias=True, dtype=DTYPES[dtype])
    assert layer.weight.shape == layer.bias.shape == (3, 4)
    assert layer.weight.dtype == layer.bias.dtype == DTYPES[dtype]


@pytest.mark.parametrize("shape", [8, np.int64(8), (8,), [8], (2, 3, 4)], ids=str)
def test_normalized_shape(norm, shape):
    layer = norm.layer(shape)
    expected = (8,) if np.ndim(shape) == 0 else tuple(shape)
    assert layer.normalized_shape == expected
    assert all(type(length) is int for length in layer.normalized_shape)


def test_wrong_construction(norm):
    for shape in (1.5, "8", None, (1.5,), ("a",)):
        with pytest.raises(TypeError, match="`normalized_shape`"):
            norm.layer(shape)
    for shape in (-1, (), (3, -1)):
        with pytest.raises(ValueError, match="`normalized_shape`"):
            norm.layer(shape)
    for dtype in (int, bool, complex, "U3", object):
        with pytest.raises(TypeError, match="`dtype`"):
            norm.layer(8, dtype=dtype)


def test_call(norm):
    layer = norm.layer(33, bias=True)
    layer.weight, layer.bias = random(33, seed=1), random(33, seed=2)
    x = random((2, 3, 33))
    expected = norm.forward(x, layer.weight, layer.bias)
    assert_same_bits(layer(x), expected)
    out = poisoned(x.shape, np.float32)
    assert layer(x, out=out) is out
    assert_same_bits(out, expected)
    result = layer(x, return_stats=True)
    with_stats = norm.forward(x, layer.weight, layer.bias, return_stats=True)
    assert result._fields == with_stats._fields
    for one, other in zip(result, with_stats, strict=True):
        assert_same_bits(one, other)
    bare = norm.layer(33, elementwise_affine=False)
    assert_same_bits(bare(x), norm.forward(x))


def test_eps(norm):
    x = random((3, 8), scale=0.01)
    for eps in (0.0, 1e-2, 3):
        assert_same_bits(norm.layer(8, eps=eps)(x), norm.forward(x, np.ones(8, np.float32), eps=eps))
    with pytest.raises(ValueError, match="`eps`"):
        norm.layer(8, eps=-1.0)(x)
    if norm.centered:
        with pytest.raises(TypeError, match="`eps`"):
            norm.layer(8, eps=None)(x)
    else:
        assert_same_bits(norm.layer(8, eps=None)(x), norm.forward(x, np.ones(8, np.float32), eps=None))


def test_several_axes(norm):
    layer = norm.layer((3, 5), bias=True)
    layer.weight, layer.bias = random((3, 5), seed=1), random((3, 5), seed=2)
    x = random((2, 3, 5))
    assert_same_bits(layer(x), norm.forward(x, layer.weight, layer.bias, axis=(-2, -1)))
    assert_same_bits(layer(x[0]), layer(x)[0])


def test_wrong_calls(norm):
    layer = norm.layer((3, 5))
    for shape in [(5,), (3,), (5, 3), (2, 3, 4), (2, 5)]:
        with pytest.raises(ValueError, match=r"`x`.*\(3, 5\).*`normalized_shape`"):
            layer(np.zeros(shape, np.float32))
        with pytest.raises(ValueError, match=r"`x`.*\(3, 5\).*`normalized_shape`"):
            layer.backward(np.zeros(shape, np.float32), np.zeros(shape, np.float32))
    with pytest.raises(TypeError, match="`x`.*int64"):
        layer(np.zeros((2, 3, 5), np.int64))
    with pytest.raises(ValueError, match="`dy`"):
        layer.backward(np.zeros((3, 5), np.float32), np.zeros((2, 3, 5), np.float32))


@pytest.mark.parametrize("dtype", DTYPES)
def test_assigned_checkpoints(norm, dtype):
    """Any supported dtype and layout, read-only or mapped; checked when the layer is called."""
    layer = norm.layer(8, bias=True)
    x = random((3, 8))
    weight, bias = random(16, dtype, 1)[::2], random(8, dtype, 2)[::-1]
    weight.flags.writeable = False
    layer.weight, layer.bias = weight, bias
    assert layer.weight is weight and layer.bias is bias
    assert_same_bits(layer(x), norm.forward(x, weight, bias))
    gradients = layer.backward(x, x)
    assert gradients.dweight.dtype == DTYPES[dtype]
    layer.weight = None
    assert_same_bits(layer(x), norm.forward(x, None, bias))
    layer.weight, layer.bias = weight, None
    assert_same_bits(layer(x), norm.forward(x, weight))


def test_wrong_checkpoints(norm):
    layer = norm.layer(8)
    x = random((3, 8))
    for name in ("weight", "bias"):
        setattr(layer, name, np.ones(7, np.float32))
        with pytest.raises(ValueError, match=rf"`{name}` must have shape \(8,\)"):
            layer(x)
        setattr(layer, name, np.ones(8, np.int64))
        with pytest.raises(TypeError, match=f"`{name}`.*int64"):
            layer(x)
        setattr(layer, name, None)
        assert np.isfinite(layer(x)).all()


def test_reset_parameters(norm):
    layer = norm.layer(8, bias=True, dtype=np.float64)
    weight, bias = random(8, "float64", 1), random(8, "float64", 2)
    layer.weight, layer.bias = weight, bias
    kept = weight.copy()
    layer.reset_parameters()
    assert_same_bits(layer.weight, np.ones(8))
    assert_same_bits(layer.bias, np.zeros(8))
    assert_same_bits(weight, kept)  # the checkpoint's own array
    bare = norm.layer(8, elementwise_affine=False)
    bare.reset_parameters()
    assert bare.weight is None and bare.bias is None


@pytest.mark.parametrize("bias", [False, True])
def test_backward(norm, bias):
    layer = norm.layer(33, bias=bias)
    layer.weight = random(33, seed=1)
    dy, x = random((2, 3, 33), seed=2), random((2, 3, 33), seed=3)
    expected = norm.backward(dy, x, layer.weight)
    gradients = layer.backward(dy, x)
    assert_same_bits(gradients.dx, expected.dx)
    assert_same_bits(gradients.dweight, expected.dweight)
    if bias:
        assert_same_bits(gradients.dbias, expected.dbias)
    saved = norm.saved(layer(x, return_stats=True))
    for one, other in zip(layer.backward(dy, x, **saved), gradients, strict=True):
        assert (one is None and other is None) or assert_same_bits(one, other) is None

    dresidual = random(x.shape, seed=4)
    assert_same_bits(
        layer.backward(dy, x, dresidual=dresidual).dx,
        norm.backward(dy, x, layer.weight, dresidual=dresidual).dx,
    )
    only = layer.backward(dy, x, output_mask=(False, True, False))
    assert only.dx is None and only.dbias is None
    assert_same_bits(only.dweight, expected.dweight)
    out = poisoned(x.shape, np.float32)
    assert layer.backward(dy, x, out=(out, None, None)).dx is out
    assert_same_bits(out, expected.dx)


def test_backward_without_parameters(norm):
    layer = norm.layer(33, elementwise_affine=False)
    dy, x = random((3, 33)), random((3, 33), seed=1)
    gradients = layer.backward(dy, x)
    assert gradients.dweight is None and gradients.dbias is None
    assert_same_bits(gradients.dx, norm.backward(dy, x).dx)


def test_backward_with_eps(norm):
    layer = norm.layer(8, eps=0.5)
    dy, x = random((3, 8)), random((3, 8), seed=1)
    assert_same_bits(layer.backward(dy, x).dx, norm.backward(dy, x, layer.weight, eps=0.5).dx)


def test_repr(norm):
    """The configuration, in words that build the layer again."""
    for layer in [
        norm.layer(8),
        norm.layer((3, 5), eps=1e-3, bias=True),
        norm.layer(8, bias=False),
        norm.layer(8, elementwise_affine=False),
        norm.layer(8, dtype=np.float64),
    ]:
        text = repr(layer)
        assert text.startswith(f"{norm.layer_name}(")
        for piece in (str(layer.normalized_shape), f"eps={layer.eps}", "elementwise_affine="):
            assert piece in text
        namespace = {"float32": np.float32, "float64": np.float64, **vars(npnorm)}
        again = eval(text, namespace)
        assert repr(again) == text
        assert (again.bias is None) == (layer.bias is None)


def test_copies_and_pickles(norm):
    layer = norm.layer(8)
    layer.weight = random(8, seed=1)
    x = random((3, 8))
    for again in (copy.copy(layer), copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert repr(again) == repr(layer)
        assert_same_bits(again(x), layer(x))


def test_results_pickle(norm):
    x = random((3, 8))
    result = norm.forward(x, return_stats=True)
    again = pickle.loads(pickle.dumps(result))
    assert type(again) is type(result)
    assert_same_bits(again.y, result.y)


def test_reset_after_something_else_was_assigned(norm):
    """A list, say, which a call takes for an array of float64."""
    layer = norm.layer(6)
    layer.weight = [1.0] * 6
    layer.reset_parameters()
    assert layer.weight.dtype == np.float32


def test_inputs_without_axes(norm):
    layer = norm.layer(6)
    with pytest.raises(np.exceptions.AxisError):
        layer(np.float32(1))
    with pytest.raises(TypeError, match="`x` must have dtype"):
        layer(None)
