"""Forward values, against exact ones, within the contract's bounds."""

import numpy as np
import pytest
from bounds import assert_same_bits, check_forward, check_statistics
from table import DTYPES, FEW_MIXED, HALVES, MIXED, NORMS, PARAMETERS, ROWS, WIDE, WIDTHS, parameters, random
from zoo import poisoned

import npnorm

pytestmark = pytest.mark.parametrize("norm", NORMS, ids=lambda norm: norm.name)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("which", PARAMETERS)
def test_every_shape(norm, dtype, which):
    for cols in WIDTHS:
        for rows in ROWS:
            x = random((rows, cols), dtype)
            given = parameters(cols, which, dtype)
            y = norm.forward(x, **given)
            assert y.dtype == x.dtype
            check_forward(norm, y, x, **given)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cols", WIDE)
def test_wide(norm, dtype, cols):
    x = random((3, cols), dtype, offset=3.0)
    given = parameters(cols, "weight and bias", dtype)
    check_forward(norm, norm.forward(x, **given), x, **given)


@pytest.mark.parametrize("cols", [1000003, 2**20])
def test_a_million_columns(norm, cols):
    x = random((2, cols), "float32", offset=100.0)
    check_forward(norm, norm.forward(x), x)


def test_every_small_width(norm):
    """Every remainder of every vector length."""
    for cols in range(1, 130):
        x = random((3, cols))
        given = parameters(cols, "weight and bias")
        check_forward(norm, norm.forward(x, **given), x, **given)


@pytest.mark.parametrize("dtype", DTYPES)
def test_statistics(norm, dtype):
    for shape in [(33, 7), (33, 769), (2, 40000), (5,), (3, 4, 5)]:
        x = random(shape, dtype, offset=2.0)
        result = norm.forward(x, return_stats=True)
        assert result._fields == (("y", "mean", "rstd") if norm.centered else ("y", "rstd"))
        check_forward(norm, result.y, x)
        check_statistics(norm, result, x)


@pytest.mark.parametrize(("dtype", "other"), MIXED)
def test_parameters_of_another_dtype(norm, dtype, other):
    x = random((33, 129), dtype)
    for which in ("weight", "bias", "weight and bias"):
        given = parameters(129, which, other)
        y = norm.forward(x, **given)
        assert y.dtype == x.dtype
        check_forward(norm, y, x, **given)


@pytest.mark.parametrize(("dtype", "other"), FEW_MIXED)
def test_weight_and_bias_of_different_dtypes(norm, dtype, other):
    x = random((33, 129), dtype)
    given = parameters(129, "weight and bias", other, bias_dtype=dtype)
    check_forward(norm, norm.forward(x, **given), x, **given)


@pytest.mark.parametrize(("dtype", "other"), FEW_MIXED)
def test_out_of_another_dtype(norm, dtype, other):
    x = random((33, 769), dtype)
    given = parameters(769, "weight and bias", dtype)
    out = poisoned(x.shape, DTYPES[other])
    y = norm.forward(x, **given, out=out)
    assert y is out
    check_forward(norm, y, x, **given)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("which", ["weight", "weight and bias"])
def test_weight_offset(norm, dtype, which):
    x = random((33, 129), dtype)
    given = parameters(129, which, dtype)
    for offset in (1.0, 1, -0.3, np.float32(0.1)):
        y = norm.forward(x, **given, weight_offset=offset)
        check_forward(norm, y, x, **given, weight_offset=offset)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("which", PARAMETERS)
def test_round_before_weight(norm, dtype, which):
    x = random((33, 769), dtype)
    given = parameters(769, which, dtype)
    y = norm.forward(x, **given, round_before_weight=True)
    check_forward(norm, y, x, **given, round_before=True)

    # Without parameters there is one rounding anyway.
    normalized = norm.forward(x)
    if which == "plain":
        assert_same_bits(y, normalized)
    if dtype in HALVES:
        # Both are short enough for an exact product in float32.
        wide = normalized.astype(np.float32)
        if given["weight"] is not None:
            wide = wide * given["weight"].astype(np.float32)
        if given["bias"] is not None:
            wide = wide + given["bias"].astype(np.float32)
        assert_same_bits(y, wide.astype(x.dtype))


@pytest.mark.parametrize(("dtype", "other"), FEW_MIXED)
def test_round_before_weight_rounds_to_the_dtype_of_x(norm, dtype, other):
    x = random((33, 129), dtype)
    given = parameters(129, "weight and bias", "float32")
    out = poisoned(x.shape, DTYPES[other])
    y = norm.forward(x, **given, round_before_weight=True, out=out)
    check_forward(norm, y, x, **given, round_before=True)


@pytest.mark.parametrize("dtype", DTYPES)
def test_eps(norm, dtype):
    """eps is added to the variance, inside the root, and its default is the documented one."""
    x = random((33, 129), dtype, scale=0.01)
    check_forward(norm, norm.forward(x), x)
    for eps in (0.0, 0, 1e-12, 1e-3, 1, 2.5, np.float32(1e-4), np.float64(7.0), 1e30):
        check_forward(norm, norm.forward(x, eps=eps), x, eps=float(eps))


def test_eps_none(norm):
    if norm.centered:
        pytest.skip("eps=None is RMSNorm's alone")
    for dtype in DTYPES:
        x = random((33, 129), dtype, scale=1e-3)
        eps = np.finfo(np.float64 if dtype == "float64" else np.float32).eps
        check_forward(norm, norm.forward(x, eps=None), x, eps=float(eps))
        out = np.empty(x.shape)  # eps is still that of x
        check_forward(norm, norm.forward(x, eps=None, out=out), x, eps=float(eps))


@pytest.mark.parametrize("shape", [(7,), (3, 7), (2, 3, 7), (2, 1, 3, 1, 7), (1, 1, 1, 7), (2,) * 9])
def test_any_number_of_axes(norm, shape):
    x = random(shape)
    given = parameters(shape[-1], "weight and bias")
    y = norm.forward(x, **given)
    check_forward(norm, y, x, **given)


@pytest.mark.parametrize(
    ("axis", "count"),
    [
        (-1, 1),
        (3, 1),
        ((-1,), 1),
        ((3,), 1),
        ((-2, -1), 2),
        ((-1, -2), 2),
        ((2, 3), 2),
        ((3, 2), 2),
        ((-1, 2), 2),
        ((3, -2), 2),
        ((1, 2, 3), 3),
        ((3, -3, 2), 3),
        ((0, 1, 2, 3), 4),
        ((-1, 0, -2, 1), 4),
        ([-1, -2], 2),
        (np.int64(-1), 1),
    ],
)
def test_axis(norm, axis, count):
    """The order and the sign of the axes do not matter; the parameters have their shape."""
    x = random((2, 3, 5, 7))
    trailing = tuple(range(-count, 0))
    given = parameters(x.shape[-count:], "weight and bias")
    result = norm.forward(x, **given, axis=axis, return_stats=True)
    check_forward(norm, result.y, x, **given, axis=trailing)
    check_statistics(norm, result, x, axis=trailing)
    assert result.rstd.shape == x.shape[:-count] + (1,) * count
    flat = norm.forward(
        x.reshape(-1, int(np.prod(x.shape[-count:]))),
        **{name: value.reshape(-1) for name, value in given.items()},
    )
    assert_same_bits(result.y, flat.reshape(x.shape))


def test_whatever_asarray_takes(norm):
    expected = norm.forward(np.array([[1.0, 2.0, 4.0]]), np.array([1.0, 2.0, 3.0]))
    assert_same_bits(norm.forward([[1.0, 2.0, 4.0]], (1.0, 2.0, 3.0)), expected)

    class Interface:
        def __init__(self, array):
            self.__array_interface__ = array.__array_interface__
            self.array = array

    class Method:
        def __array__(self, dtype=None, copy=None):
            return np.array([[1.0, 2.0, 4.0]], dtype=dtype)

    held = Interface(np.array([[1.0, 2.0, 4.0]]))
    assert_same_bits(norm.forward(held, [1.0, 2.0, 3.0]), expected)
    assert_same_bits(norm.forward(Method(), [1.0, 2.0, 3.0]), expected)
    assert_same_bits(norm.forward(memoryview(held.array), [1.0, 2.0, 3.0]), expected)
    assert type(norm.forward(expected.view(np.matrix))) is np.ndarray


def test_add(norm):
    """The norm of the sum: values; test_bits compares it with the unfused calls."""
    for dtype in DTYPES:
        x, residual = random((33, 129), dtype), random((33, 129), dtype, seed=1)
        given = parameters(129, "weight and bias", dtype)
        result = norm.add(x, residual, **given)
        assert result._fields == ("y", "residual_out")
        total = (x.astype(np.float64) + residual.astype(np.float64)).astype(x.dtype)
        assert_same_bits(result.residual_out, total)
        check_forward(norm, result.y, total, **given)
        with_stats = norm.add(x, residual, **given, return_stats=True)
        names = ("mean", "rstd") if norm.centered else ("rstd",)
        assert with_stats._fields == ("y", "residual_out", *names)
        check_statistics(norm, with_stats, total)


def test_signatures(norm):
    """The public functions, the reference's and the contract's are called alike, but for what devices need."""
    import inspect

    eps = norm.eps
    tail = "weight_offset=0.0, round_before_weight=False, out=None"
    for where in (npnorm, npnorm.reference):
        for name, expected in {
            norm.name: f"x, weight=None, bias=None, *, axis=-1, eps={eps}, {tail}, return_stats=False",
            f"add_{norm.name}": f"x, residual, weight=None, bias=None, *, axis=-1, eps={eps}, {tail}, "
            "residual_out=None, return_stats=False",
            f"{norm.name}_backward": "dy, x, weight=None, *, "
            + ("mean=None, " if norm.centered else "")
            + f"rstd=None, axis=-1, eps={eps}, weight_offset=0.0, dresidual=None, "
            "output_mask=None, out=None",
        }.items():
            signature = inspect.signature(getattr(where, name))
            bare = [p.replace(annotation=inspect.Parameter.empty) for p in signature.parameters.values()]
            if where is npnorm:
                last = ["stream", "workspace"] if "backward" in name else ["stream"]
                assert [p.name for p in bare[-len(last) :]] == last, name
                bare = bare[: -len(last)]
            assert str(inspect.Signature(bare)) == f"({expected})", name
