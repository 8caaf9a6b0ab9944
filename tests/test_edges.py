"""Empty arrays, NaN and infinity, odd but legal inputs, inputs that stay as they were."""

import warnings

import numpy as np
import pytest
from bounds import assert_same_bits, check_forward
from table import DTYPES, HALVES, LAYER_NORM, NORMS, PARAMETERS, parameters, random
from zoo import poisoned

pytestmark = pytest.mark.parametrize("norm", NORMS, ids=lambda norm: norm.name)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("which", PARAMETERS)
@pytest.mark.parametrize("shape", [(0, 5), (0, 1), (2, 0, 5), (0, 0, 5), (0, 4097)], ids=str)
def test_no_rows(norm, dtype, which, shape):
    x = np.zeros(shape, DTYPES[dtype])
    given = parameters(shape[-1], which, dtype)
    result = norm.forward(x, **given, return_stats=True)
    assert_same_bits(result.y, x)
    assert result.rstd.shape == (*shape[:-1], 1)
    dx, dweight, dbias = norm.backward(x, x, given["weight"], output_mask=(True, True, True))
    assert_same_bits(dx, x)
    assert_same_bits(dweight, np.zeros(shape[-1], x.dtype))
    assert_same_bits(dbias, np.zeros(shape[-1], x.dtype))
    added = norm.add(x, x, **given)
    assert_same_bits(added.residual_out, x)


def test_no_rows_fill_the_outputs_given(norm):
    """Zero dweight and dbias are written, not only returned."""
    x = np.zeros((0, 5), np.float32)
    out = (np.empty_like(x), poisoned(5, np.float32), poisoned(5, np.float32))
    gradients = norm.backward(x, x, np.ones(5, np.float32), out=out)
    for given, returned in zip(out, gradients, strict=True):
        assert returned is given
    assert out[1].tolist() == out[2].tolist() == [0.0] * 5


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(3, 0), (0,), (2, 3, 0), (0, 0)], ids=str)
def test_no_columns(norm, dtype, shape):
    """Empty y, NaN statistics, empty dweight, and no warning."""
    x = np.zeros(shape, DTYPES[dtype])
    given = parameters(0, "weight and bias", dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = norm.forward(x, **given, return_stats=True)
        gradients = norm.backward(x, x, given["weight"], **norm.saved(result))
        recomputed = norm.backward(x, x, given["weight"])
        added = norm.add(x, x, **given, return_stats=True)
    assert_same_bits(result.y, x)
    for name in norm.saved(result):
        for one in (result, added):
            assert getattr(one, name).shape == (*shape[:-1], 1)
            assert np.isnan(getattr(one, name)).all()
    for one in (gradients, recomputed):
        assert_same_bits(one.dx, x)
        assert one.dweight.shape == one.dbias.shape == (0,)
        assert one.dweight.dtype == x.dtype
    assert_same_bits(added.residual_out, x)


def test_no_columns_in_one_of_two_axes(norm):
    x = np.zeros((2, 0, 3), np.float32)
    weight = np.zeros((0, 3), np.float32)
    result = norm.forward(x, weight, axis=(-2, -1), return_stats=True)
    assert result.y.shape == x.shape
    assert result.rstd.shape == (2, 1, 1) and np.isnan(result.rstd).all()
    assert norm.backward(x, x, weight, axis=(-2, -1)).dweight.shape == (0, 3)
    # Over the last axis there are no rows.
    assert norm.forward(x, return_stats=True).rstd.shape == (2, 0, 1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_non_finite_numbers_stay_in_their_row(norm, dtype, poison):
    for cols in (7, 129, 4097):
        for place in (0, 3, cols - 1):
            x = random((9, cols), dtype)
            given = parameters(cols, "weight and bias", dtype)
            clean = norm.forward(x, **given, return_stats=True)
            spoiled = x.copy()
            spoiled[4, place] = poison
            result = norm.forward(spoiled, **given, return_stats=True)
            others = np.arange(9) != 4
            for name in result._fields:
                assert_same_bits(getattr(result, name)[others], getattr(clean, name)[others], name)
            assert np.isnan(result.y[4, place])
            assert norm.centered is bool(np.isnan(result.y[4]).all()) or np.isnan(poison)
            if np.isnan(poison) or norm.centered:
                # Infinity minus an infinite mean.
                assert np.isnan(result.y[4]).all()
                assert np.isnan(result.rstd[4, 0])
            else:
                # x / inf = 0, so the rest of the row is bias, and inf / inf is NaN.
                assert result.rstd[4, 0] == 0
                rest = np.arange(cols) != place
                np.testing.assert_array_equal(result.y[4, rest], given["bias"][rest])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_non_finite_gradients_stay_in_their_row_and_columns(norm, dtype, poison):
    for cols in (7, 129):
        dy, x = random((70, cols), dtype), random((70, cols), dtype, seed=1)
        weight = random(cols, dtype, seed=2)
        clean = norm.backward(dy, x, weight)
        others = np.arange(70) != 40

        # In dy: its row of dx, and one column of dweight and dbias.
        spoiled = dy.copy()
        spoiled[40, 3] = poison
        result = norm.backward(spoiled, x, weight)
        assert_same_bits(result.dx[others], clean.dx[others])
        assert not np.isfinite(result.dx[40]).any()
        rest = np.arange(cols) != 3
        for name in ("dweight", "dbias"):
            assert_same_bits(getattr(result, name)[rest], getattr(clean, name)[rest])
            assert not np.isfinite(getattr(result, name)[3])
        if np.isinf(poison):
            assert result.dbias[3] == poison

        # In x: its row of dx, and dweight; dbias does not see x.
        spoiled = x.copy()
        spoiled[40, 3] = poison
        result = norm.backward(dy, spoiled, weight)
        assert_same_bits(result.dx[others], clean.dx[others])
        assert np.isnan(result.dx[40, 3])
        assert np.isnan(result.dweight[3])
        assert_same_bits(result.dbias, clean.dbias)

        # In dresidual: one element of dx.
        dresidual = random(x.shape, dtype, seed=3)
        clean = norm.backward(dy, x, weight, dresidual=dresidual)
        dresidual[40, 3] = poison
        result = norm.backward(dy, x, weight, dresidual=dresidual)
        same = np.ones(x.shape, bool)
        same[40, 3] = False
        assert_same_bits(result.dx[same], clean.dx[same])
        assert not np.isfinite(result.dx[40, 3])


@pytest.mark.parametrize("dtype", DTYPES)
def test_non_finite_parameters_stay_in_their_column(norm, dtype):
    x = random((9, 129), dtype)
    given = parameters(129, "weight and bias", dtype)
    clean = norm.forward(x, **given)
    rest = np.arange(129) != 5
    for name in ("weight", "bias"):
        for poison in (np.nan, np.inf):
            spoiled = given[name].copy()
            spoiled[5] = poison
            y = norm.forward(x, **{**given, name: spoiled})
            assert_same_bits(y[:, rest], clean[:, rest])
            assert not np.isfinite(y[:, 5]).any()


@pytest.mark.parametrize("half", HALVES)
def test_half_overflow_is_infinity(norm, half):
    """A y beyond the largest half is infinite, as any rounding makes it."""
    x = np.array([[1, -1]]).astype(DTYPES[half])
    largest = 65504.0 if half == "float16" else 3.3895e38
    weight = np.array([largest, largest]).astype(DTYPES[half])
    y = norm.forward(x, weight, bias=weight, eps=0.0)
    assert np.isposinf(y[0, 0].astype(float)) and y[0, 1] == 0


@pytest.mark.parametrize("half", HALVES)
def test_conversions(norm, half):
    if norm.centered:
        check_conversions(half)


def check_conversions(half):
    """All 65,536 codes in and out; ties, overflow and a million other numbers out. NumPy's are right."""
    dtype = DTYPES[half]
    codes = np.arange(2**16, dtype=np.uint16).view(dtype)
    with np.errstate(invalid="ignore"):  # signalling NaNs
        numbers = codes.astype(np.float64)
    total = LAYER_NORM.add(codes[None], np.zeros_like(codes)[None]).residual_out[0]
    np.testing.assert_array_equal(total.astype(np.float64), numbers)

    exact = np.random.default_rng(0).integers(0, 2**32, 2**20, dtype=np.uint32).view(np.float32)
    with np.errstate(invalid="ignore"):
        ties = (numbers[:-1] + numbers[1:]) / 2
    edges = [0, -0.0, np.inf, -np.inf, np.nan, 65504, 65519.996, 65520, 2.0**-25, 2.0**-24, 1e-45]
    for values in (exact, ties.astype(np.float32), np.float32(edges)):
        with np.errstate(all="ignore"):
            expected = values.astype(dtype)
        # The norm of a constant row is its bias, converted once.
        got = LAYER_NORM.forward(np.zeros((1, values.size), dtype), bias=values)[0]
        np.testing.assert_array_equal(got.astype(np.float64), expected.astype(np.float64))


@pytest.mark.parametrize("dtype", DTYPES)
def test_inputs_are_never_modified(norm, dtype):
    x, residual = random((33, 129), dtype), random((33, 129), dtype, seed=1)
    dy, dresidual = random((33, 129), dtype, seed=2), random((33, 129), dtype, seed=3)
    given = parameters(129, "weight and bias", dtype)
    arrays = [x, residual, dy, dresidual, *given.values()]
    copies = [array.copy() for array in arrays]
    result = norm.forward(x, **given, weight_offset=1.0, return_stats=True)
    saved = norm.saved(result)
    kept = {name: value.copy() for name, value in saved.items()}
    norm.add(x, residual, **given, round_before_weight=True)
    norm.backward(dy, x, given["weight"], **saved, dresidual=dresidual, weight_offset=1.0)
    norm.backward(dy, x, given["weight"])
    for array, copy in zip(arrays, copies, strict=True):
        assert_same_bits(array, copy)
    for name, value in saved.items():
        assert_same_bits(value, kept[name])


def test_read_only_inputs(norm):
    arrays = [random((9, 33)), random((9, 33), seed=1), random(33, seed=2), random(33, seed=3)]
    x, dy, weight, bias = arrays
    expected = norm.forward(x, weight, bias), *norm.backward(dy, x, weight)
    added = norm.add(x, dy, weight)
    for array in arrays:
        array.flags.writeable = False
    got = norm.forward(x, weight, bias), *norm.backward(dy, x, weight)
    for one, other in zip(got, expected, strict=True):
        assert_same_bits(one, other)
    assert_same_bits(norm.add(x, dy, weight).y, added.y)
    # Results are the caller's own: writable, contiguous, no view of an input.
    for array in (*got, added.residual_out):
        assert array.flags.writeable and array.flags.c_contiguous and array.flags.owndata


def test_results_are_fresh(norm):
    """No buffer is handed out twice."""
    x, weight = random((9, 33)), random(33, seed=1)
    first = norm.forward(x, weight, return_stats=True), norm.backward(x, x, weight)
    copies = [[array.copy() for array in one] for one in first]
    second = norm.forward(x + 1, weight, return_stats=True), norm.backward(x, x + 1, weight)
    for one, two, copy in zip(first, second, copies, strict=True):
        for a, b, c in zip(one, two, copy, strict=True):
            assert not np.shares_memory(a, b)
            assert_same_bits(a, c)


def test_array_subclasses(norm):
    """np.matrix and others are read as plain arrays, masked arrays are refused (test_errors)."""
    x = random((3, 8))
    assert type(norm.forward(x.view(np.matrix))) is np.ndarray
    record = np.zeros((3, 8), [("a", "f4"), ("b", "f8")])
    record["a"] = x
    assert_same_bits(norm.forward(record["a"]), norm.forward(x))


def test_weights_of_one_element_and_of_all(norm):
    x = random((4, 5))
    all_axes = norm.forward(x, random((4, 5), seed=1), axis=(0, 1))
    check_forward(norm, all_axes, x, random((4, 5), seed=1), axis=(-2, -1))
    check_forward(norm, norm.forward(x[:, :1], np.ones(1, np.float32)), x[:, :1], np.ones(1))


def test_the_same_array_in_every_role(norm):
    x = random((5, 33))
    row = x[0]
    assert_same_bits(norm.forward(x, row, row), norm.forward(x, row.copy(), row.copy()))
    assert_same_bits(norm.add(x, x).residual_out, x + x)
    same = norm.backward(x, x, row, dresidual=x)
    apart = norm.backward(x.copy(), x, row.copy(), dresidual=x.copy())
    for one, other in zip(same, apart, strict=True):
        assert_same_bits(one, other)


def test_an_output_whose_rows_overlap_each_other(norm):
    windows = np.lib.stride_tricks.as_strided(np.zeros(4, np.float32), (2, 3), (4, 4))
    with pytest.raises(ValueError, match="`out` must not repeat its own elements"):
        norm.forward(random((2, 3)), out=windows)


def test_slices_and_transposes_do_not_overlap_themselves(norm):
    base = np.zeros((6, 4, 5), np.float32)
    for out in (base[::-2, ::-1, ::3], base.T, base.transpose(1, 0, 2)[:, :1, ::2], base[:1, :, :1]):
        x = random(out.shape)
        assert norm.forward(x, out=out) is out
        assert_same_bits(out, norm.forward(x))


def test_the_mask_does_not_touch_dx(norm):
    dy, x, weight = random((3, 16), seed=1), random((3, 16)), random(16, "float64")
    every = norm.backward(dy, x, weight)
    assert_same_bits(norm.backward(dy, x, weight, output_mask=(True, False, False)).dx, every.dx)


def test_an_offset_beyond_the_dtype_gives_no_warning(norm):
    x = random((2, 3))
    y = norm.forward(x, np.ones(3, np.float32), weight_offset=1e39)  # infinite in float32
    assert np.isinf(y).all()


def test_eps_far_above_a_tiny_row(norm):
    x = np.array([[1e-170, 3e-170]])
    result = norm.forward(x, eps=1e300, return_stats=True)
    assert result.rstd[0, 0] == 1e-150
    check_forward(norm, result.y, x, eps=1e300)


@pytest.mark.filterwarnings("ignore:the matrix subclass")
def test_outputs_of_a_subclass(norm):
    """np.matrix has always two axes, whatever one asks of it: the result is put where it was to go."""
    x, weight = random((4, 6), seed=1), random(6, seed=2)
    out, total = (np.asmatrix(np.empty((4, 6), np.float32)) for _ in range(2))
    assert norm.forward(x, weight, out=out) is out
    assert_same_bits(np.asarray(out), norm.forward(x, weight))
    result = norm.add(x, x, weight, out=out, residual_out=total)
    assert result.y is out and result.residual_out is total
    assert_same_bits(np.asarray(total), x + x)
    dx = norm.backward(x, x, weight, out=(out, None, None)).dx
    assert dx is out
    assert_same_bits(np.asarray(dx), norm.backward(x, x, weight).dx)


def test_the_residual_sum_is_rounded_once(norm):
    """A wider residual: through float32 these would be rounded to even, downwards."""
    for x, residual in (
        (np.float16([1, 1]), np.float32([2.0**-11 + 2.0**-30, 0])),
        (np.float16([1, 1]), np.float64([2.0**-11 + 2.0**-30, 0])),
    ):
        total = norm.add(x, residual).residual_out
        assert_same_bits(total, norm.reference("add")(x, residual).residual_out)
        assert total[0] > 1
