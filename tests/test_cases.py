"""Faults that users of such kernels reported in public, one test each, with the right value.

Each was found in some library of this field; test_bits, test_adversarial and test_edges go through
the whole kind. Values by hand wherever the row is short.
"""

import numpy as np
import pytest
from bounds import assert_same_bits, check_backward, check_forward
from table import DTYPES, HALVES, LAYER_NORM, NORMS, RMS_NORM, parameters, random

import npnorm

both = pytest.mark.parametrize("norm", NORMS, ids=lambda norm: norm.name)
halves = pytest.mark.parametrize("half", HALVES)

ROOT = np.sqrt(1.5)  # the LayerNorm of [1, 2, 3] is [-ROOT, 0, ROOT], with eps = 0


# Layout and shapes


def test_transposed_x_is_honoured_in_both_passes():
    x = np.array([[1.0, 10.0], [2.0, 20.0], [3.0, 30.0]], np.float32).T
    assert not x.flags.c_contiguous
    expected = [[-ROOT, 0, ROOT], [-ROOT, 0, ROOT]]
    np.testing.assert_allclose(npnorm.layer_norm(x, eps=0.0), expected, rtol=1e-6, atol=1e-7)


def test_every_other_column():
    x = np.array([[1.0, 9e9, 2.0, -9e9, 3.0, 9e9]], np.float32)[..., ::2]
    np.testing.assert_allclose(npnorm.layer_norm(x, eps=0.0), [[-ROOT, 0, ROOT]], rtol=1e-6, atol=1e-7)


def test_reversed_rows_and_columns():
    x = np.array([[1.0, 2.0, 6.0], [3.0, 3.0, -3.0]], np.float32)
    y = npnorm.rms_norm(x, eps=0.0)
    np.testing.assert_allclose(y[1], [1, 1, -1], rtol=1e-6)
    assert_same_bits(npnorm.rms_norm(x[::-1], eps=0.0), y[::-1].copy())
    np.testing.assert_allclose(
        npnorm.layer_norm(x[::-1, ::-1], eps=0.0),
        np.array([[-2, 1, 1], [3, -1, -2]]) / np.sqrt([[2], [14 / 3]]),
        rtol=1e-6,
    )


def test_broadcast_x():
    x = np.broadcast_to(np.array([1.0, 2.0, 3.0], np.float32), (4, 3))
    y = npnorm.layer_norm(x, eps=0.0)
    np.testing.assert_allclose(y, np.tile([-ROOT, 0, ROOT], (4, 1)), rtol=1e-6, atol=1e-7)


@both
def test_broadcast_dy_is_the_gradient_of_a_sum(norm):
    """Through LayerNorm the gradient of y.sum() is 0; dweight is the sum of the normalized rows."""
    x = random((5, 7))
    dy = np.broadcast_to(np.float32(1), x.shape)
    gradients = norm.backward(dy, x, np.ones(7, np.float32))
    check_backward(norm, gradients, np.ones_like(x), x, np.ones(7, np.float32))
    np.testing.assert_allclose(gradients.dbias, np.full(7, 5.0))
    if norm.centered:
        assert np.abs(gradients.dx).max() < 1e-6


def test_fortran_order():
    x = np.asfortranarray([[1.0, 2.0, 3.0], [3.0, 2.0, 1.0]], np.float32)
    y = npnorm.layer_norm(x, eps=0.0)
    np.testing.assert_allclose(y, [[-ROOT, 0, ROOT], [ROOT, 0, -ROOT]], rtol=1e-6, atol=1e-7)


@both
def test_query_and_key_of_a_joint_array(norm):
    joint = random((2, 5, 3, 4, 8), offset=1.0)
    given = parameters(8, "weight and bias")
    for part in range(2):
        view = joint[:, :, part].transpose(0, 2, 1, 3)
        assert view.ndim == 4 and not view.flags.c_contiguous
        assert_same_bits(norm.forward(view, **given), norm.forward(view.copy(), **given))
        check_forward(norm, norm.forward(view, **given), view, **given)


def test_view_with_an_offset():
    base = np.full((5, 9), 1e9, np.float32)
    base[2:4, 3:6] = [1, 2, 3]
    y = npnorm.layer_norm(base[2:4, 3:6], eps=0.0)
    np.testing.assert_allclose(y, [[-ROOT, 0, ROOT]] * 2, rtol=1e-6, atol=1e-7)


def test_strided_weight_and_bias():
    x = np.array([[1.0, 2.0, 3.0]], np.float32)
    weight = np.array([2.0, -7, 3, -7, 4, -7], np.float32)[::2]
    bias = np.array([30.0, 20, 10], np.float32)[::-1]
    y = npnorm.layer_norm(x, weight, bias, eps=0.0)
    np.testing.assert_allclose(y, [[10 - 2 * ROOT, 20, 30 + 4 * ROOT]], rtol=1e-6)
    column = np.array([[2.0, 0], [3, 0], [4, 0]], np.float32)[:, 0]
    np.testing.assert_allclose(
        npnorm.layer_norm(x, column, eps=0.0), [[-2 * ROOT, 0, 4 * ROOT]], rtol=1e-6, atol=1e-7
    )


@both
@pytest.mark.parametrize("shape", [(1, 8), (4,), (16,), (), (8, 1)])
def test_a_weight_of_another_shape_is_refused(norm, shape):
    """Nothing is broadcast, and nothing is read out of bounds."""
    for name in ("weight", "bias"):
        with pytest.raises(ValueError, match=rf"`{name}` must have shape \(8,\)"):
            norm.forward(random((3, 8)), **{name: np.ones(shape, np.float32)})


@both
def test_backward_of_three_axes(norm):
    """dweight sums over both lead axes; each (b, s) row of dx is its own."""
    dy, x, weight = random((2, 3, 8)), random((2, 3, 8), seed=1), random(8, seed=2)
    gradients = norm.backward(dy, x, weight)
    check_backward(norm, gradients, dy, x, weight)
    flat = norm.backward(dy.reshape(6, 8), x.reshape(6, 8), weight)
    assert_same_bits(gradients.dx, flat.dx.reshape(x.shape))
    assert_same_bits(gradients.dweight, flat.dweight)


@both
def test_the_order_of_axes_does_not_matter(norm):
    x, weight = random((2, 3, 5)), random((3, 5), seed=1)
    expected = norm.forward(x, weight, axis=(-2, -1))
    for axis in [(-1, -2), (1, 2), (2, 1), (-1, 1), (2, -2)]:
        assert_same_bits(norm.forward(x, weight, axis=axis), expected)


@both
@pytest.mark.parametrize("axis", [(-1, -1), (-1, 2), (1, 2, -1)])
def test_repeated_axes_are_refused(norm, axis):
    with pytest.raises(ValueError, match="`axis`"):
        norm.forward(random((2, 3, 5)), axis=axis)


@both
@pytest.mark.parametrize("cols", [7, 13, 769])
def test_the_tail_of_an_odd_row_stays_in_its_row(norm, cols):
    out = np.full((4, cols), np.float32(np.nan))
    x = random((4, cols))
    norm.forward(x[1:2], out=out[1:2])
    assert np.isnan(out[[0, 2, 3]]).all()
    assert_same_bits(out[1:2], norm.forward(x)[1:2])
    dx = np.full((4, cols), np.float32(np.nan))
    norm.backward(x[1:2], x[1:2], out=(dx[1:2], None, None))
    assert np.isnan(dx[[0, 2, 3]]).all() and np.isfinite(dx[1]).all()


@both
def test_an_empty_batch(norm):
    """Empty y and dx, zero dweight and dbias, and dtypes checked all the same."""
    x, weight = np.zeros((0, 5), np.float32), np.ones(5, np.float32)
    assert norm.forward(x, weight).shape == (0, 5)
    dx, dweight, dbias = norm.backward(x, x, weight)
    assert dx.shape == (0, 5)
    assert dweight.tolist() == dbias.tolist() == [0.0] * 5
    with pytest.raises(TypeError, match="`x`.*int64"):
        norm.forward(np.zeros((0, 5), np.int64))


def test_one_column_is_exactly_bias():
    """Contracted multiply-adds leave a residue here."""
    x = np.array([[0.1], [1e6], [-3.7]], np.float32)
    weight, bias = np.array([0.3], np.float32), np.array([0.7], np.float32)
    assert npnorm.layer_norm(x, weight, bias).tolist() == [[bias[0]]] * 3
    dx, dweight, dbias = npnorm.layer_norm_backward(np.full_like(x, 0.1), x, weight)
    assert dx.tolist() == [[0.0]] * 3
    assert dweight.tolist() == [0.0]
    np.testing.assert_allclose(dbias, [0.3], rtol=1e-6)


def test_large_offset_in_one_column():
    """x = 1e6, D = 1, weight 2, bias 3 -> y = 3, dx = dweight = 0."""
    for dtype in ("float32", "float64", *(name for name in HALVES if name == "bfloat16")):
        x = np.array([[1e6]]).astype(DTYPES[dtype])
        weight, bias = (np.array([v]).astype(DTYPES[dtype]) for v in (2, 3))
        assert npnorm.layer_norm(x, weight, bias)[0, 0] == 3
        gradients = npnorm.layer_norm_backward(np.ones_like(x), x, weight)
        assert gradients.dx[0, 0] == gradients.dweight[0] == 0
        assert gradients.dbias[0] == 1


@both
def test_more_rows_than_a_16_bit_dimension(norm):
    rows = 2**16 + 3
    x = random((rows, 3))
    y = norm.forward(x)
    assert_same_bits(norm.forward(x[-5:]), y[-5:])
    dy = np.broadcast_to(np.float32(1), x.shape)
    assert norm.backward(dy, x, np.ones(3, np.float32)).dbias.tolist() == [rows] * 3


@both
def test_offsets_beyond_31_bits(norm):
    """2^31 elements, of a broadcast so that it fits: the last rows are where they should be."""
    rows, cols = 3 * 2**16, 2**14
    line = random((cols,), "float16")
    x = np.broadcast_to(line, (rows, cols))  # 6 GB, were it in memory
    wide = np.lib.stride_tricks.as_strided(x, (3, cols), (0, x.strides[1]))
    gradients = norm.backward(wide, wide, output_mask=(True, False, False))
    assert_same_bits(gradients.dx[2:], norm.backward(line[None], line[None]).dx)
    # Strides of more than 2^31 bytes, in memory that is never touched.
    sparse = np.empty((2, 2**30 + 8), np.float32)
    sparse[:, :8] = random((2, 8))
    sparse[:, -8:] = random((2, 8), seed=1)
    for view in (sparse[:, :8], sparse[:, -8:]):
        assert view.strides[0] > 2**31
        assert_same_bits(norm.forward(view), norm.forward(view.copy()))
    column = sparse[:, :: 2**30]
    assert column.shape == (2, 2) and column.strides[1] == 2**32
    column[...] = [[1.0, 3.0], [5.0, 5.0]]
    assert_same_bits(norm.forward(column), norm.forward(column.copy()))


# Numbers


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_variance_is_no_difference_of_squares(dtype):
    x = np.array([[40000, 40001, 40002, 40003]], dtype)
    y = npnorm.layer_norm(x, eps=1e-5)
    np.testing.assert_allclose(y, [[-1.34163542, -0.44721181, 0.44721181, 1.34163542]], rtol=3e-7)


@both
def test_a_row_of_fourteens(norm):
    """x·scale + (bias - mean·scale) leaves a residue; a centred constant is exactly 0."""
    for dtype in DTYPES:
        for cols in (3, 7, 10, 129, 768):
            x = np.full((2, cols), 14.0).astype(DTYPES[dtype])
            y = norm.forward(x, eps=0.5)
            if norm.centered:
                assert (y == 0).all()
            else:
                np.testing.assert_allclose(y.astype(float), 14 / np.sqrt(196.5), rtol=8e-3)


@halves
def test_squares_that_overflow_in_half(half):
    x = np.array([[256, 256]]).astype(DTYPES[half])
    assert npnorm.rms_norm(x, eps=0.0).astype(float).tolist() == [[1, 1]]
    x = np.array([[256, -256]]).astype(DTYPES[half])
    assert npnorm.layer_norm(x, eps=0.0).astype(float).tolist() == [[1, -1]]


@both
def test_eps_is_inside_the_root(norm):
    """x = ±1, eps = 3: 1/sqrt(1 + 3) = 0.5, while 1/(1 + 3) or 1/(1 + sqrt 3) would not be."""
    for dtype in DTYPES:
        x = np.array([[1, -1, 1, -1]]).astype(DTYPES[dtype])
        assert norm.forward(x, eps=3.0).astype(float).tolist() == [[0.5, -0.5, 0.5, -0.5]]


@both
@halves
def test_eps_does_not_underflow_in_half(norm, half):
    """1e-12 is 0 in float16: a row of zeros would be NaN."""
    zeros = np.zeros((2, 8), DTYPES[half])
    assert (norm.forward(zeros, eps=1e-12) == 0).all()
    assert (norm.forward(zeros, eps=1e-40) == 0).all()
    assert npnorm.rms_norm(zeros, eps=1e-12, return_stats=True).rstd[0, 0] == pytest.approx(1e6)


@both
def test_eps_is_scaled_along_with_a_rescaled_row(norm):
    """x = ±1e-160, eps = 3e-320: x / sqrt(1e-320 + 3e-320) = ±0.5."""
    x = np.array([[1e-160, -1e-160]])
    square = 1e-320
    np.testing.assert_allclose(norm.forward(x, eps=3 * square), [[0.5, -0.5]], rtol=1e-3)
    x = np.array([[1e200, -1e200]])
    np.testing.assert_allclose(norm.forward(x, eps=1e-5), [[1.0, -1.0]], rtol=1e-15)
    x = np.array([[1e-200, -1e-200]])
    np.testing.assert_allclose(norm.forward(x, eps=0.0), [[1.0, -1.0]], rtol=1e-15)
    np.testing.assert_allclose(norm.forward(x, eps=1e-4), [[1e-198, -1e-198]], rtol=1e-15)


@pytest.mark.skipif("bfloat16" not in DTYPES, reason="ml_dtypes is not installed")
@both
def test_one_plus_weight_is_added_in_the_compute_dtype(norm):
    """15.8125 + 1 = 16.8125 has nine bits: bfloat16 would make it 16.75 or 16.875."""
    bfloat16 = DTYPES["bfloat16"]
    x = np.array([[1, -1]], np.float32)
    weight = np.array([15.8125, 15.8125]).astype(bfloat16)
    y = norm.forward(x, weight, eps=0.0, weight_offset=1.0)
    np.testing.assert_allclose(y, [[16.8125, -16.8125]], rtol=1e-6)
    dx = norm.backward(np.array([[1, 0]], np.float32), x, weight, eps=3.0, weight_offset=1.0).dx
    # rstd = 1/2, x̂ = ±1/2, g = [w, 0]: LN rstd (w/2 - w/8), RMS rstd (w - w/8) for the first.
    first = 16.8125 * 0.5 * (3 / 8 if norm.centered else 7 / 8)
    assert dx[0, 0] == pytest.approx(first, rel=1e-6)


@both
@halves
def test_statistics_of_half_rows_are_float64(norm, half):
    x = random((3, 33), half, offset=2.0)
    result = norm.forward(x, return_stats=True)
    wide = norm.forward(x.astype(np.float64), return_stats=True)
    for name in ("mean", "rstd") if norm.centered else ("rstd",):
        assert getattr(result, name).dtype == np.float64
        np.testing.assert_allclose(getattr(result, name), getattr(wide, name), rtol=1e-13)


def test_rstd_is_not_rounded_before_the_product():
    """1/sqrt(3) times 3 in float16, twice rounded, is 1.731 or 1.733; the right half is 1.7324."""
    x = np.array([[3.0, 0, 0]], np.float16)
    y = npnorm.rms_norm(x, eps=0.0)
    assert y[0, 0] == np.float16(np.sqrt(3))
    rng = np.random.default_rng(0)
    x = rng.standard_normal((200, 5)).astype(np.float16)
    exact = x.astype(float) / np.sqrt((x.astype(float) ** 2).mean(axis=1, keepdims=True))
    # Rounding rstd first would move about every third value to a neighbour.
    assert np.mean(npnorm.rms_norm(x, eps=0.0) == exact.astype(np.float16)) > 0.99


@both
@halves
def test_fused_add_takes_its_statistics_from_the_rounded_sum(norm, half):
    """256 + 0.0625 is 256 in both halves, so the row is [256, 256] and not [256.06, 256.06]."""
    x = np.array([[256, 256, -256, -256]]).astype(DTYPES[half])
    residual = np.array([[0.0625, 0.0625, 0.0625, 0.0625]]).astype(DTYPES[half])
    result = norm.add(x, residual, eps=0.0, return_stats=True)
    assert result.residual_out.astype(float).tolist() == [[256, 256, -256, -256]]
    assert result.y.astype(float).tolist() == [[1, 1, -1, -1]]
    assert result.rstd[0, 0] == 1 / 256
    if norm.centered:
        assert result.mean[0, 0] == 0


@both
@halves
def test_parameter_gradients_are_summed_in_float64(norm, half):
    """6016 times 0.0625 is 376; added one by one in half precision, the sum stands still before."""
    rows = 6016
    x = np.tile(np.array([[1, -1]]).astype(DTYPES[half]), (rows, 1))
    dy = np.full_like(x, 0.0625)
    gradients = norm.backward(dy, x, np.ones(2, x.dtype), eps=0.0)
    assert gradients.dbias.astype(float).tolist() == [376, 376]
    assert np.abs(gradients.dweight.astype(float)).tolist() == gradients.dbias.astype(float).tolist()


@both
def test_partial_sums_are_neither_dirty_nor_stale(norm):
    """Gradients after a call with huge dy, of the same shape and of others."""
    dy, x, weight = random((300, 33)), random((300, 33), seed=1), random(33, seed=2)
    expected = norm.backward(dy, x, weight)
    for rows in (300, 299, 1, 1000):
        big = np.full((rows, 33), 1e30, np.float32)
        norm.backward(big, random((rows, 33), seed=3), weight)
        again = norm.backward(dy, x, weight)
        for got, want in zip(again, expected, strict=True):
            assert_same_bits(got, want)
    out = (None, np.full(33, 1e30, np.float32), np.full(33, np.float32(np.nan)))
    again = norm.backward(dy, x, weight, out=out)
    assert_same_bits(again.dweight, expected.dweight)
    assert_same_bits(again.dbias, expected.dbias)


def test_dx_written_over_dy():
    """RMSNorm with x = dy = [1, 0, 0, 0], eps = 1e-4: dx = 8e-4 / 1.0004^1.5 = 7.9952e-4."""
    for dtype in ("float32", "float64"):
        x = np.array([[1.0, 0, 0, 0]], dtype)
        dy = x.copy()
        npnorm.rms_norm_backward(dy, x, eps=1e-4, out=(dy, None, None))
        # 1 - 1/1.0004 loses three digits in float32.
        rtol = 1e-3 if dtype == "float32" else 1e-12
        np.testing.assert_allclose(dy, [[8e-4 / 1.0004**1.5, 0, 0, 0]], rtol=rtol, atol=0)


def test_a_random_dy_tells_dx_from_nothing():
    """A check with loss = y.sum() passes with any dx, for the true dx is 0. Here it is not."""
    x = np.array([[-2.0, 0.0, 2.0]])
    dx = npnorm.layer_norm_backward(np.array([[0.0, 3.0, 0.0]]), x, eps=4 / 3).dx
    np.testing.assert_allclose(dx, [[-0.5, 1.0, -0.5]], rtol=1e-14)


# Options


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_combination_of_weight_and_bias(dtype):
    x = np.array([[3, -3]]).astype(DTYPES[dtype])
    weight = np.array([2, 4]).astype(DTYPES[dtype])
    bias = np.array([10, 20]).astype(DTYPES[dtype])
    for norm in NORMS:

        def values(*given, norm=norm):
            return norm.forward(x, *given, eps=0.0).astype(float).tolist()

        assert values() == [[1, -1]]
        assert values(weight) == [[2, -4]]
        assert values(None, bias) == [[11, 19]]
        assert values(weight, bias) == [[12, 16]]


@both
def test_gradients_have_the_shape_and_dtype_of_the_weight(norm):
    x = random((2, 3, 5), "float16")
    weight = random((3, 5), "float32", seed=1)
    gradients = norm.backward(x, x, weight, axis=(1, 2))
    for gradient in (gradients.dweight, gradients.dbias):
        assert gradient.shape == (3, 5)
        assert gradient.dtype == np.float32


@both
@halves
def test_a_float32_weight_beside_half_rows(norm, half):
    """Not read as halves, and not promoting the output."""
    x = np.array([[3, -3]]).astype(DTYPES[half])
    y = norm.forward(x, np.array([2, 4], np.float32), np.array([10, 20], np.float32), eps=0.0)
    assert y.dtype == x.dtype
    assert y.astype(float).tolist() == [[12, 16]]


@both
def test_a_weight_of_zero(norm):
    """x̂ rebuilt from y by dividing by the weight would be NaN."""
    dy, x, weight = random((4, 8)), random((4, 8), seed=1), random(8, seed=2)
    weight[[0, 3, 7]] = 0
    gradients = norm.backward(dy, x, weight)
    assert all(np.isfinite(g).all() for g in gradients)
    check_backward(norm, gradients, dy, x, weight)
    nothing = norm.backward(dy, x, np.zeros(8, np.float32))
    assert (nothing.dx == 0).all()
    assert (nothing.dweight != 0).all()


# Determinism


@both
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_result_does_not_depend_on_the_batch(norm, dtype):
    """Compared with other batch sizes, not with the same call again."""
    x = random((1000, 129), dtype)
    one = norm.forward(x[:1])
    for rows in (2, 3, 8, 31, 64, 500, 1000):
        assert_same_bits(norm.forward(x[:rows])[:1], one)


@both
def test_parameter_gradients_do_not_depend_on_the_thread_count(norm, threads):
    dy, x, weight = random((3000, 129)), random((3000, 129), seed=1), random(129, seed=2)
    results = []
    for count in (1, 2, 3, 5, 8):
        threads(count)
        results.append(norm.backward(dy, x, weight))
    for result in results[1:]:
        assert_same_bits(result.dweight, results[0].dweight)
        assert_same_bits(result.dbias, results[0].dbias)


# Numba: test_robustness has the cache, threads, fork and CPUs without F16C


@both
def test_no_layout_is_a_type_error(norm):
    x = random((3, 8))
    frozen = x.copy()
    frozen.flags.writeable = False
    for view in (frozen, np.asfortranarray(x), x.astype(">f4"), x[:, ::-1]):
        assert_same_bits(norm.forward(view), norm.forward(np.array(view, np.float32)))


def test_defaults_are_the_documented_ones():
    """LayerNorm 1e-5 and RMSNorm 1e-6, told apart by a row of that size."""
    x = np.array([[1e-3, -1e-3]])
    assert LAYER_NORM.forward(x)[0, 0] == pytest.approx(1e-3 / np.sqrt(1e-6 + 1e-5))
    assert RMS_NORM.forward(x)[0, 0] == pytest.approx(1e-3 / np.sqrt(1e-6 + 1e-6))
