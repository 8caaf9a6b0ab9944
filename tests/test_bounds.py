"""The tests' own tools: wrong norms, of the kinds that were reported in public, do not pass."""

import numpy as np
import pytest
from bounds import (
    LARGEST,
    LONG,
    assert_same_bits,
    assert_within,
    check_backward,
    check_forward,
    check_statistics,
)
from table import LAYER_NORM, NORMS, RMS_NORM, random
from zoo import LAYOUTS, assert_only_written, byte_swapped, poisoned

from npnorm import reference
from npnorm._results import NormGradients

EPS = 1e-5


def shape():
    return random((9, 129), offset=30.0), random(129, seed=1), random(129, seed=2)


def statistics(x):
    wide = x.astype(np.float64)
    return wide.mean(axis=1, keepdims=True), wide.var(axis=1, keepdims=True)


def one_float32_mean(x, weight, bias):
    mean, variance = statistics(x)
    return (x - mean.astype(np.float32)) / np.sqrt(variance + EPS).astype(np.float32) * weight + bias


def scale_and_shift(x, weight, bias):
    mean, variance = (a.astype(np.float32) for a in statistics(x))
    scale = weight / np.sqrt(variance + np.float32(EPS))
    return x * scale + (bias - mean * scale)


def difference_of_squares(x, weight, bias):
    mean = x.mean(axis=1, keepdims=True)
    variance = (x * x).mean(axis=1, keepdims=True) - mean * mean
    return (x - mean) / np.sqrt(variance + np.float32(EPS)) * weight + bias


def eps_outside_the_root(x, weight, bias):
    mean, variance = statistics(x)
    return (x - mean) / (np.sqrt(variance) + EPS) * weight + bias


def unbiased_variance(x, weight, bias):
    mean, variance = statistics(x)
    return (x - mean) / np.sqrt(variance * 129 / 128 + EPS) * weight + bias


def another_eps(x, weight, bias):
    return reference.layer_norm(x, weight, bias, eps=2e-5)


def no_weight(x, weight, bias):
    return reference.layer_norm(x, None, bias)


def no_bias(x, weight, bias):
    return reference.layer_norm(x, weight)


def weight_reversed(x, weight, bias):
    return reference.layer_norm(x, weight[::-1], bias)


def tail_dropped(x, weight, bias):
    y = reference.layer_norm(x, weight, bias)
    y[:, 128:] = x[:, 128:]
    return y


def tail_spilled(x, weight, bias):
    y = reference.layer_norm(x, weight, bias)
    y[1:, 0] = 0.0
    return y


def last_row_dropped(x, weight, bias):
    y = reference.layer_norm(x, weight, bias)
    y[-1] = 0.0
    return y


def rounded_to_half(x, weight, bias):
    return reference.layer_norm(x, weight, bias).astype(np.float16)


def rstd_in_half(x, weight, bias):
    mean, variance = statistics(x)
    return (x - mean) * (1 / np.sqrt(variance + EPS)).astype(np.float16) * weight + bias


def stride_dropped(x, weight, bias):
    """Reads the memory under every other column as if it were contiguous."""
    base = np.repeat(x, 2, axis=1)
    return reference.layer_norm(base.reshape(-1)[: x.size].reshape(x.shape), weight, bias)


FORWARD = [
    one_float32_mean, scale_and_shift, difference_of_squares, eps_outside_the_root,
    unbiased_variance, another_eps, no_weight, no_bias, weight_reversed, tail_dropped, tail_spilled,
    last_row_dropped, rounded_to_half, rstd_in_half, stride_dropped,
]  # fmt: skip


@pytest.mark.parametrize("wrong", FORWARD, ids=lambda wrong: wrong.__name__)
def test_wrong_forwards_are_noticed(wrong):
    x, weight, bias = shape()
    if wrong in (eps_outside_the_root, another_eps):
        x = x * np.float32(0.01)
    check_forward(LAYER_NORM, reference.layer_norm(x, weight, bias), x, weight, bias)
    y = wrong(x, weight, bias).astype(np.float32)
    with pytest.raises(AssertionError, match="out of bounds"):
        check_forward(LAYER_NORM, y, x, weight, bias)


def test_a_weight_offset_added_in_bfloat16_is_noticed():
    ml_dtypes = pytest.importorskip("ml_dtypes")
    x = random((9, 129))
    weight = random(129, seed=1, scale=20.0).astype(ml_dtypes.bfloat16)
    narrow = (weight + weight.dtype.type(1)).astype(np.float32)
    y = reference.rms_norm(x, weight, weight_offset=1.0)
    check_forward(RMS_NORM, y, x, weight, weight_offset=1.0)
    with pytest.raises(AssertionError):
        check_forward(RMS_NORM, reference.rms_norm(x, narrow), x, weight, weight_offset=1.0)


def test_a_residual_left_unrounded_is_noticed():
    """Statistics of the exact sum, output of the rounded one."""
    x, residual = random((9, 129), "float16"), random((9, 129), "float16", 1, scale=1e-3)
    exact = x.astype(np.float32) + residual.astype(np.float32)
    total = exact.astype(np.float16)
    fused = reference.add_rms_norm(x, residual)
    assert_same_bits(fused.residual_out, total)
    assert_same_bits(fused.y, reference.rms_norm(total))
    with pytest.raises(AssertionError):
        assert_same_bits(reference.rms_norm(exact).astype(np.float16), fused.y)


def test_less_than_one_unit_is_noticed_in_half():
    """0.51 u: a result that is the second nearest half does not pass."""
    x = random((9, 129), "float16")
    y = reference.rms_norm(x)
    check_forward(RMS_NORM, y, x)
    y[4, 60] = np.nextafter(y[4, 60], np.float16(9))
    with pytest.raises(AssertionError, match=r"1 of 1161 out of bounds; the worst at \(4, 60\)"):
        check_forward(RMS_NORM, y, x)


def without_mean_of_g(dy, x, weight):
    g = dy * weight
    normalized = reference.layer_norm(x)
    rstd = reference.layer_norm(x, return_stats=True).rstd
    return rstd * (g - normalized * (g * normalized).mean(axis=1, keepdims=True))


def without_projection(dy, x, weight):
    g = dy * weight
    rstd = reference.layer_norm(x, return_stats=True).rstd
    return rstd * (g - g.mean(axis=1, keepdims=True))


@pytest.mark.parametrize("wrong", [without_mean_of_g, without_projection])
def test_wrong_dx_is_noticed(wrong):
    dy, (x, weight, _) = random((9, 129), seed=5), shape()
    right = reference.layer_norm_backward(dy, x, weight)
    check_backward(LAYER_NORM, right, dy, x, weight)
    with pytest.raises(AssertionError, match="dx"):
        check_backward(LAYER_NORM, right._replace(dx=wrong(dy, x, weight)), dy, x, weight)


@pytest.mark.parametrize("norm", NORMS, ids=lambda norm: norm.name)
def test_wrong_parameter_gradients_are_noticed(norm):
    dy, (x, weight, _) = random((9, 129), seed=5), shape()
    right = norm.reference("backward")(dy, x, weight)
    last = norm.reference("backward")(dy[-1:], x[-1:], weight)
    for what, wrong in {
        "dweight": right._replace(dweight=right.dbias),
        "dbias": right._replace(dbias=right.dweight),
        "dweight ": right._replace(dweight=right.dweight - last.dweight),
        "dbias ": right._replace(dbias=right.dbias + last.dbias),
        "dx": NormGradients(right.dx[::-1], None, None),
    }.items():
        with pytest.raises(AssertionError, match=what.strip()):
            check_backward(norm, wrong, dy, x, weight)


def test_sums_in_half_precision_are_noticed():
    dy, x = np.abs(random((3000, 5), "float16")), random((3000, 5), "float16", 1)
    right = reference.rms_norm_backward(dy, x, np.ones(5, np.float16))
    check_backward(RMS_NORM, right, dy, x, np.ones(5, np.float16))
    total = np.zeros(5, np.float16)
    for row in dy:
        total += row
    with pytest.raises(AssertionError, match="dbias"):
        check_backward(RMS_NORM, right._replace(dbias=total), dy, x, np.ones(5, np.float16))


def test_wrong_statistics_are_noticed():
    x = random((9, 129), offset=3.0)
    right = reference.layer_norm(x, return_stats=True)
    check_statistics(LAYER_NORM, right, x)
    for wrong in (
        right._replace(mean=right.mean.astype(np.float32)),
        right._replace(mean=right.mean.astype(np.float32).astype(np.float64)),
        right._replace(rstd=right.rstd.astype(np.float32).astype(np.float64)),
        right._replace(rstd=right.rstd[:, 0]),
        right._replace(rstd=1 / right.rstd),
    ):
        with pytest.raises(AssertionError):
            check_statistics(LAYER_NORM, wrong, x)


def test_within():
    def within(actual, exact, bound=0.5, name="float16"):
        actual, exact = np.array([actual], LONG), np.array([exact], LONG)
        assert_within(actual, exact, LONG(bound), name, "y")

    largest = LARGEST["float16"]
    within(1.0, 1.5)
    within(np.nan, np.nan)
    within(np.inf, 1e6)
    within(-np.inf, -largest - 16)
    within(largest, largest + 15, bound=16)
    within(np.inf, np.inf)
    for actual, exact in [
        (1.0, 1.6), (np.nan, 1.0), (1.0, np.nan), (np.inf, 1.0), (-np.inf, 1e6), (np.inf, largest),
        (largest, 1e6), (np.inf, np.nan), (np.nan, np.inf), (0.0, np.inf), (np.inf, -np.inf),
    ]:  # fmt: skip
        with pytest.raises(AssertionError):
            within(actual, exact)


def test_same_bits():
    one = np.array([1.0, np.nan, -0.0])
    assert_same_bits(one, one.copy())
    assert_same_bits(one, np.array([1.0, -np.nan, -0.0]))
    for other in (
        np.array([1.0, np.nan, 0.0]),
        np.array([1.0, 1.0, -0.0]),
        np.array([np.nextafter(1, 2), np.nan, -0.0]),
        one.astype(np.float32),
        one[:2],
        one[None],
        byte_swapped(one),
    ):
        with pytest.raises(AssertionError):
            assert_same_bits(other, one)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_zoo(layout):
    """Every layout keeps shape and dtype, and the values unless it broadcasts or overlaps."""
    for shape in [(5, 7), (0, 7), (5, 0), (1, 1), (3, 1)]:
        for dtype in ("float32", "float16", "float64"):
            array = random(shape, dtype)
            view = LAYOUTS[layout](array)
            assert view.shape == shape and view.dtype == array.dtype
            if not layout.startswith(("broadcast", "overlapping")):
                assert_same_bits(np.array(view), array)
            if layout != "contiguous" and layout != "read_only" and shape == (5, 7):
                plain = view.flags.c_contiguous and view.flags.aligned
                assert not plain or layout in ("memory_mapped", "subclassed")


def test_writing_beside_a_view_is_noticed():
    base = poisoned((4, 9), np.float32)
    view = base[1:3, 1::2]
    view[...] = 1.0
    assert_only_written(base, view)
    base[1, 2] = 0.0
    with pytest.raises(AssertionError):
        assert_only_written(base, view)
    view = poisoned((3, 3), np.float32)[::-1, ::-1]
    with pytest.raises(AssertionError):
        assert_only_written(view.base, view)
