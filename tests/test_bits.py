"""What must not change a single bit: the batch, the layout, the threads, what else is asked for."""

import numpy as np
import pytest
from bounds import SMALLEST, assert_same_bits
from table import DTYPES, HALVES, MIXED, NORMS, PARAMETERS, parameters, random
from zoo import LAYOUTS, LEADS, assert_only_written, byte_swapped, every_other_column, poisoned

import npnorm
from npnorm.cpu import launch, quick

pytestmark = pytest.mark.parametrize("norm", NORMS, ids=lambda norm: norm.name)

# Few wide rows, many narrow ones, both, and one row that several threads share.
SHAPES = ((100, 7), (33, 129), (33, 769), (5, 4097), (3, 70001))
LARGE = ((40000, 33), (1500, 769), (6, 70001), (1, 1000003))
# What makes ordinary rows extreme; none of float16 is.
EXTREME = {"float16": 1.0, "bfloat16": 1e33, "float32": 1e33, "float64": 1e200}
NATIVE_HALF_FREE = [name for name in DTYPES if name != "bfloat16"]


def everything(norm, dy, x, weight, bias, **options):
    """Every number the library gives for these inputs, by name."""
    result = norm.forward(x, weight, bias, return_stats=True, **options)
    gradients = norm.backward(dy, x, weight, output_mask=(True, True, True), **options)
    return result._asdict() | gradients._asdict()


def assert_all_same(actual, expected, *names):
    for name in names or expected:
        assert_same_bits(actual[name], expected[name], name)


def inputs(shape, dtype):
    given = parameters(shape[-1], "weight and bias", dtype)
    x = random(shape, dtype, seed=1, offset=2.0)
    return random(shape, dtype), x, given["weight"], given["bias"]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_row_does_not_know_its_batch(norm, dtype, shape):
    dy, x, weight, bias = inputs(shape, dtype)
    batch = everything(norm, dy, x, weight, bias)
    rows = len(x)
    parts = [slice(0, 1), slice(rows - 1, rows), slice(1, 3), slice(rows // 2, rows), slice(None, None, -1)]
    for part in parts:
        alone = everything(norm, dy[part], x[part], weight, bias)
        for name in ("y", "mean", "rstd", "dx"):
            if name in batch:
                assert_same_bits(alone[name], batch[name][part], name)
    assert_same_bits(norm.forward(x[-1], weight, bias), batch["y"][-1])
    assert_same_bits(norm.backward(dy[-1], x[-1], weight).dx, batch["dx"][-1])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_does_not_know_its_neighbours(norm, dtype):
    """Rows that overflow, vanish or are NaN may be done another way; those beside them may not."""
    for cols in (7, 129, 4097):
        dy, x, weight, bias = inputs((64, cols), dtype)
        wild = x.astype(np.float64)
        size = 1e300 if dtype == "float64" else float(SMALLEST[dtype]) ** -0.8
        for start, factor in ((1, size), (4, 1 / size), (6, 0.0), (9, np.nan), (10, np.inf)):
            wild[start::11] *= factor
        wild[32:] = wild[31::-1]  # after another row and before another row, in pairs of both kinds
        with np.errstate(over="ignore"):
            wild = wild.astype(x.dtype)
        batch = everything(norm, dy, wild, weight, bias)
        for i in range(len(wild)):
            alone = everything(norm, dy[i : i + 1], wild[i : i + 1], weight, bias)
            for name in ("y", "mean", "rstd", "dx"):
                if name in batch:
                    assert_same_bits(alone[name][0], batch[name][i], f"{name} of row {i}")


def test_a_row_does_not_know_its_place(norm):
    """The same row everywhere: every alignment of its address, every place in a block."""
    for dtype in DTYPES:
        for cols in (5, 129, 4097):
            dy, x, weight, bias = inputs((1, cols), dtype)
            many = everything(
                norm, np.repeat(dy, 67, axis=0), np.repeat(x, 67, axis=0), weight, bias
            )
            alone = everything(norm, dy, x, weight, bias)
            for name in ("y", "mean", "rstd", "dx"):
                if name in alone:
                    assert_same_bits(many[name], np.repeat(alone[name], 67, axis=0), name)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", LARGE, ids=str)
def test_thread_counts(norm, dtype, shape, threads):
    dy, x, weight, bias = inputs(shape, dtype)
    threads(1)
    expected = everything(norm, dy, x, weight, bias)
    for count in (2, 3, 8):
        threads(count)
        assert_all_same(everything(norm, dy, x, weight, bias), expected)
    assert_all_same(everything(norm, dy, x, weight, bias), expected)


def test_larger_than_any_cache(norm):
    """Big outputs may be written another way: 150 MB against the same rows in small batches."""
    x = random((64, 4097), seed=3, offset=2.0)
    given = parameters(4097, "weight and bias")
    expected = norm.forward(x, **given)
    big = np.broadcast_to(x, (144, 64, 4097))
    y = norm.forward(big, **given)
    for block in y:
        assert_same_bits(block, expected)
    # Rows that start at every alignment, and neighbours that must stay.
    base = np.full((144 * 64, 4099), np.float32(np.nan))
    out = base[:, 1:-1].reshape(144, 64, 4097)
    assert np.shares_memory(out, base)
    norm.forward(big, **given, out=out)
    for block in out:
        assert_same_bits(np.array(block), expected)
    assert np.isnan(base[:, [0, -1]]).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_writing_past_the_cache(norm, dtype, monkeypatch, threads):
    """As above for every dtype, with the size from which it is done put down to nothing."""
    launch = pytest.importorskip("npnorm.cpu.launch")
    if np.isinf(launch.STREAMED):
        pytest.skip("not done on this machine")
    itemsize = DTYPES[dtype].itemsize
    for cols in (1024 // itemsize, 1024 // itemsize + 1, 9001):
        x, residual = random((35, cols), dtype, 1, offset=2.0), random((35, cols), dtype, 2)
        # Rows of extreme size, and others, are done by a kernel that does not stream.
        x[4:6] *= x.dtype.type(EXTREME[dtype])
        x[20], x[34, 7] = 0.0, np.nan
        given = parameters(cols, "weight and bias", dtype)
        monkeypatch.setattr(launch, "STREAMED", np.inf)
        expected = norm.forward(x, **given, return_stats=True)
        added = norm.add(x, residual, **given)
        monkeypatch.setattr(launch, "STREAMED", 0)
        for count in (1, 3):
            threads(count)
            result = norm.forward(x, **given, return_stats=True)
            assert_all_same(result._asdict(), expected._asdict())
            assert_all_same(norm.add(x, residual, **given)._asdict(), added._asdict())
        # Rows that start and end anywhere in a line of the cache, and neighbours that stay.
        for width in (cols + 2, cols + 5, cols + 64):
            base = poisoned((35, width), x.dtype)
            out = base[:, 1 : cols + 1]
            norm.forward(x, **given, out=out)
            assert_same_bits(out, expected.y)
            assert np.isnan(base[:, 0]).all() and np.isnan(base[:, cols + 1 :]).all()
        # Rows that follow each other, five at a time.
        base = poisoned((7, 6, cols), x.dtype)
        norm.forward(x.reshape(7, 5, cols), **given, out=base[:, :5])
        assert_same_bits(base[:, :5].reshape(35, cols), expected.y)
        assert np.isnan(base[:, 5]).all()
        for own in (x.copy(), x.copy()[::-1][::-1], x.copy()[:]):
            norm.forward(own[...], **given, out=own)
            assert_same_bits(np.array(own), expected.y)
        over = residual.copy()
        assert_same_bits(norm.add(x, over, **given, out=over).y, added.y)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout_of_x_and_dy(norm, dtype, layout):
    for shape in [(33, 129), (3, 7), (1, 4097), (5, 1), (0, 7), (7, 0), (2, 70001)]:
        dy, x, weight, bias = inputs(shape, dtype)
        dy, x = LAYOUTS[layout](dy), LAYOUTS[layout](x)
        before = [np.array(a) for a in (dy, x)]
        result = everything(norm, dy, x, weight, bias)
        assert_all_same(result, everything(norm, *before, weight, bias))
        assert type(result["y"]) is type(result["dx"]) is np.ndarray
        for array, copy in zip((dy, x), before, strict=True):
            assert_same_bits(np.asarray(array), copy, "an input was modified")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lead", LEADS)
def test_lead_axes_that_do_not_merge(norm, dtype, lead):
    x = LEADS[lead](lambda shape: random(shape, dtype, seed=1, offset=2.0))
    dy = LEADS[lead](lambda shape: random(shape, dtype))
    given = parameters(x.shape[-1], "weight and bias", dtype)
    result = everything(norm, dy, x, **given)
    assert_all_same(result, everything(norm, np.array(dy), np.array(x), **given))
    # And the same through two normalized axes, which may not merge either.
    given = parameters(x.shape[-2:], "weight and bias", dtype)
    result = everything(norm, dy, x, **given, axis=(-2, -1))
    assert_all_same(result, everything(norm, np.array(dy), np.array(x), **given, axis=(-2, -1)))
    # One of the two contiguous, the other not.
    given = parameters(x.shape[-1], "weight and bias", dtype)
    result = everything(norm, np.array(dy), x, **given)
    assert_all_same(result, everything(norm, np.array(dy), np.array(x), **given))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout_of_parameters(norm, dtype, layout):
    """weight, bias as one column or row of a larger array, dresidual, residual, the statistics."""
    dy, x, _, _ = inputs((7, 33), dtype)
    matrix = LAYOUTS[layout](random((33, 5), dtype, seed=4))
    weight, bias = matrix[:, 1], LAYOUTS[layout](random((3, 33), dtype, seed=5))[2]
    result = everything(norm, dy, x, weight, bias)
    assert_all_same(result, everything(norm, dy, x, np.array(weight), np.array(bias)))

    other = LAYOUTS[layout](random(x.shape, dtype, seed=6))
    added = norm.add(x, other, weight, bias)
    copied = norm.add(x, np.array(other), np.array(weight), np.array(bias))
    assert_all_same(added._asdict(), copied._asdict())
    assert_same_bits(
        norm.backward(dy, x, weight, dresidual=other).dx,
        norm.backward(dy, x, np.array(weight), dresidual=np.array(other)).dx,
    )


@pytest.mark.parametrize("dtype", NATIVE_HALF_FREE)
def test_byte_order(norm, dtype):
    """Any byte order in, native order out."""
    dy, x, weight, bias = inputs((33, 129), dtype)
    expected = everything(norm, dy, x, weight, bias)
    swapped = [byte_swapped(a) for a in (dy, x, weight, bias)]
    result = everything(norm, *swapped)
    assert_all_same(result, expected)
    assert all(value.dtype.isnative for value in result.values())
    assert_all_same(everything(norm, dy, swapped[1], weight, bias), expected)
    assert_all_same(everything(norm, swapped[0][:, ::-1][:, ::-1], x, swapped[2], bias), expected)
    added = norm.add(swapped[1], swapped[0], weight)
    assert_all_same(added._asdict(), norm.add(x, dy, weight)._asdict())


@pytest.mark.parametrize(
    ("dtype", "which"),
    [(dtype, "weight and bias") for dtype in DTYPES] + [("float32", which) for which in PARAMETERS][:3],
)
def test_statistics_are_free(norm, dtype, which):
    """Returned or not, given or recomputed: the same bits."""
    for shape in [(33, 129), (3, 40000)]:
        dy, x, _, _ = inputs(shape, dtype)
        given = parameters(shape[1], which, dtype)
        result = norm.forward(x, **given, return_stats=True)
        assert_same_bits(norm.forward(x, **given), result.y)
        saved = norm.saved(result)
        mask = (True, True, True)
        recomputed = norm.backward(dy, x, given["weight"], output_mask=mask)
        for names in [saved, *([name] for name in saved)]:
            gradients = norm.backward(
                dy, x, given["weight"], output_mask=mask, **{name: saved[name] for name in names}
            )
            assert_all_same(gradients._asdict(), recomputed._asdict())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", ["contiguous", "every_other_column", "reversed_both", "fortran"])
def test_in_place(norm, dtype, layout):
    """`out is x`, and dx over dy, over x, over dresidual."""
    for shape in [(33, 129), (33, 7), (2, 70001)]:
        dy, x, weight, bias = inputs(shape, dtype)
        expected = everything(norm, dy, x, weight, bias)
        own = LAYOUTS[layout](x)
        assert norm.forward(own, weight, bias, out=own) is own
        assert_same_bits(np.array(own), expected["y"])

        own = LAYOUTS[layout](x)
        result = norm.forward(own, weight, bias, out=own, return_stats=True)
        assert_same_bits(result.rstd, expected["rstd"])
        assert_same_bits(np.array(own), expected["y"])

        for over in ("dy", "x"):
            arrays = {"dy": LAYOUTS[layout](dy), "x": LAYOUTS[layout](x)}
            gradients = norm.backward(
                **arrays, weight=weight, out=(arrays[over], None, None)
            )
            assert gradients.dx is arrays[over]
            assert_same_bits(np.array(gradients.dx), expected["dx"])
            assert_same_bits(gradients.dweight, expected["dweight"])
            assert_same_bits(gradients.dbias, expected["dbias"])

        dresidual = random(shape, dtype, seed=9)
        both = norm.backward(dy, x, weight, dresidual=dresidual).dx
        own = LAYOUTS[layout](dresidual)
        norm.backward(dy, x, weight, dresidual=own, out=(own, None, None))
        assert_same_bits(np.array(own), both)


@pytest.mark.parametrize("dtype", DTYPES)
def test_add_in_place(norm, dtype):
    """residual_out over x or over the residual, y over the other."""
    x, residual = random((33, 129), dtype), random((33, 129), dtype, 1)
    weight = random(129, dtype, 2)
    expected = norm.add(x, residual, weight)
    for over in range(2):
        arrays = [x.copy(), residual.copy()]
        result = norm.add(*arrays, weight, residual_out=arrays[over])
        assert result.residual_out is arrays[over]
        assert_all_same(result._asdict(), expected._asdict())
        arrays = [x.copy(), residual.copy()]
        result = norm.add(*arrays, weight, residual_out=arrays[over], out=arrays[1 - over])
        assert result.y is arrays[1 - over]
        assert_all_same(result._asdict(), expected._asdict())


def test_threads_leave_extreme_rows_to_a_second_round(norm, threads):
    """In place: a residual that has been added is not added again."""
    x, residual = random((600, 513)), random((600, 513), seed=1)
    for array in x, residual:
        array[[0, 7, 8, 400, 599]] *= np.float32(1e30)
    threads(1)
    expected = norm.add(x, residual)
    for count in (2, 5):
        threads(count)
        y = x.copy()
        assert_all_same(norm.add(y, residual, residual_out=y)._asdict(), expected._asdict())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "layout",
    ["every_other_column", "every_other_row", "reversed_both", "reversed_every_third", "offset_view",
     "misaligned", "misaligned_rows", "fortran"],
)
def test_layout_of_out(norm, dtype, layout):
    """Outputs of every layout, and what lies between their elements stays as it was."""
    for shape in [(33, 129), (5, 7), (3, 1), (2, 4097)]:
        dy, x, weight, bias = inputs(shape, dtype)
        expected = everything(norm, dy, x, weight, bias)

        def make(array):
            view = LAYOUTS[layout](poisoned(array.shape, array.dtype))
            return view

        out = make(x)
        assert norm.forward(x, weight, bias, out=out) is out
        assert_same_bits(np.array(out), expected["y"])
        outs = (make(x), make(np.stack([weight] * 3))[1], make(np.stack([bias] * 3))[1])
        gradients = norm.backward(dy, x, weight, out=outs)
        for name, value in gradients._asdict().items():
            assert_same_bits(np.array(value), expected[name], name)
        for view in (out, outs[0]):
            if isinstance(view.base, np.ndarray) and view.base.dtype == view.dtype:
                assert_only_written(view.base, view)

        total, y = make(x), make(x)
        added = norm.add(x, dy, weight, bias, out=y, residual_out=total)
        assert_all_same(
            {name: np.array(value) for name, value in added._asdict().items()},
            norm.add(x, dy, weight, bias)._asdict(),
        )


@pytest.mark.parametrize("dtype", DTYPES)
def test_swapped_out(norm, dtype):
    """An `out` of foreign byte order is either filled right or refused."""
    if dtype == "bfloat16":
        pytest.skip("bfloat16 has one byte order")
    _, x, weight, bias = inputs((33, 129), dtype)
    out = byte_swapped(poisoned(x.shape, x.dtype))
    try:
        norm.forward(x, weight, bias, out=out)
    except ValueError as error:
        assert "`out`" in str(error)
        assert np.isnan(out).all()
    else:
        assert_same_bits(out.astype(x.dtype), norm.forward(x, weight, bias))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("which", PARAMETERS)
def test_add_equals_the_unfused_calls(norm, dtype, which):
    for shape in [(33, 129), (33, 7), (3, 40000)]:
        x, residual = random(shape, dtype), random(shape, dtype, seed=1, scale=3.0)
        given = parameters(shape[1], which, dtype)
        fused = norm.add(x, residual, **given, return_stats=True)
        total = x + residual
        assert total.dtype == x.dtype
        assert_same_bits(fused.residual_out, total)
        unfused = norm.forward(total, **given, return_stats=True)
        for name, value in unfused._asdict().items():
            assert_same_bits(getattr(fused, name), value, name)
        assert_all_same(
            norm.add(x, residual, **given)._asdict(), {"y": unfused.y, "residual_out": total}
        )


@pytest.mark.parametrize("dtype", DTYPES)
def test_add_with_every_option(norm, dtype):
    x, residual = random((4, 3, 33), dtype), random((4, 3, 33), dtype, seed=1)
    total = x + residual
    for options in [
        {"axis": (-1, 1)},
        {"eps": 0.5},
        {"weight_offset": 1.0},
        {"round_before_weight": True},
        {"out": np.empty(x.shape, np.float32)},
    ]:
        shape = (3, 33) if "axis" in options else 33
        given = parameters(shape, "weight and bias", dtype)
        fused = norm.add(x, residual, **given, **options)
        y = np.array(fused.y)
        assert_same_bits(y, norm.forward(total, **given, **options))
        assert_same_bits(fused.residual_out, total)


@pytest.mark.parametrize(("dtype", "other"), MIXED)
def test_residual_of_another_dtype(norm, dtype, other):
    """The sum is rounded once, to x's dtype."""
    x, residual = random((33, 129), dtype), random((33, 129), other, seed=1)
    exact = x.astype(np.float64) + residual.astype(np.float64)
    fused = norm.add(x, residual)
    total = npnorm.reference.rows.rounded(exact, x.dtype)
    assert_same_bits(fused.residual_out, total)
    assert_same_bits(fused.y, norm.forward(total))


@pytest.mark.parametrize("dtype", HALVES)
def test_half_sums_are_rounded_to_nearest_even(norm, dtype):
    """Every pair of a few hundred halves, ties and overflow and subnormals among them."""
    codes = np.random.default_rng(0).integers(0, 2**16, 400).astype(np.uint16)
    values = codes.view(DTYPES[dtype])
    values = values[np.isfinite(values)]
    x, residual = (np.array(a) for a in np.broadcast_arrays(values[:, None], values))
    with np.errstate(over="ignore"):
        assert_same_bits(norm.add(x, residual).residual_out, x + residual)


@pytest.mark.parametrize("dtype", DTYPES)
def test_runs(norm, dtype):
    """Sums over many rows do not depend on the run, nor on what ran before."""
    dy, x, weight, bias = inputs((10007, 33), dtype)
    expected = everything(norm, dy, x, weight, bias)
    for _ in range(5):
        everything(norm, dy[:333] * 0, x[:333], weight, bias)
        assert_all_same(everything(norm, dy, x, weight, bias), expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_options_do_not_disturb_each_other(norm, dtype):
    """A strided innermost axis with every pair of options, against the contiguous copy."""
    dy, x, weight, bias = inputs((9, 129), dtype)
    narrow = every_other_column(x)
    for options in [{}, {"weight_offset": 1.0}, {"round_before_weight": True}, {"eps": 1.0}]:
        for stats in (False, True):
            a = norm.forward(narrow, weight, bias, return_stats=stats, **options)
            b = norm.forward(x, weight, bias, return_stats=stats, **options)
            assert_same_bits(a.y if stats else a, b.y if stats else b)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("which", ["plain", "weight and bias"])
def test_threads_that_share_a_row(norm, dtype, which, threads):
    """A very wide row, cut at the same columns however many threads there are; an extreme one and a far one, too."""
    cols = 2**18 + 4097
    x = random((3, cols), dtype, 1, offset=3.0)
    x[2] += DTYPES[dtype].type(1000)
    x[1] *= x.dtype.type(EXTREME[dtype])
    given = parameters(cols, which, dtype)
    for row in x:
        for options in ({}, {"round_before_weight": True}):
            threads(1)
            expected = norm.forward(row, **given, **options)
            for count in (2, 3, 7):
                threads(count)
                assert_same_bits(norm.forward(row, **given, **options), expected)
            wide = np.empty(cols + 2, x.dtype)[1:-1]
            wide[...] = row
            assert_same_bits(norm.forward(wide, **given, **options, out=wide), expected)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("rounding", [False, True])
def test_many_short_rows(norm, dtype, rounding, threads):
    """They are done four at a time, unless one of the four is extreme or far from zero: the same bits."""
    for cols in (1, 7, 64, 129, 256):
        rows = 2**18 // cols + 6
        x = random((rows, cols), dtype, 1)
        x[5:7] = (x[5:7].astype(np.float64) * SMALLEST[dtype]).astype(x.dtype)
        x[13:300:7] = (x[13:300:7] / 64 + 1000).astype(x.dtype)
        x[33] = 2.0
        if dtype == "float32":
            x[70:72] *= np.float32(1e36)
        x[40, 0], x[rows - 1, cols - 1] = np.nan, np.inf
        given = parameters(cols, "weight and bias", dtype) if cols > 7 else {}
        options = {**given, "round_before_weight": rounding}
        few = [norm.forward(x[i : i + 999], **options) for i in range(0, rows, 999)]
        expected = np.concatenate(few)
        for count in (1, 3):
            threads(count)
            assert_same_bits(norm.forward(x, **options), expected)
        base = poisoned((rows, cols + 3), x.dtype)
        base[:, 1 : cols + 1] = x
        own = base[:, 1 : cols + 1]
        norm.forward(own, **options, out=own)
        assert_same_bits(np.array(own), expected)
        assert np.isnan(base[:, 0]).all() and np.isnan(base[:, cols + 1 :]).all()


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
def test_gradients_past_the_cache(norm, dtype, monkeypatch, threads):
    """Long rows of large arrays are fetched ahead and written past the cache, one by one or in pairs: the same bits."""
    launch = pytest.importorskip("npnorm.cpu.launch")
    line = 2048 // DTYPES[dtype].itemsize
    for rows, cols in ((35, 512), (50, line), (700, line + 1), (36, 4099)):
        dy, x = random((rows, cols), dtype, 1), random((rows, cols), dtype, 2, offset=2.0)
        weight, dresidual = random(cols, dtype, 3), random((rows, cols), dtype, 4)
        x[7:9] *= x.dtype.type(EXTREME[dtype])
        x[20], dy[34, 7] = 0.0, np.nan
        dy[11:13] = (dy[11:13].astype(np.float64) * 1e-33).astype(x.dtype)
        monkeypatch.setattr(launch, "STREAMED", np.inf)
        expected = norm.backward(dy, x, weight, dresidual=dresidual)
        monkeypatch.setattr(launch, "STREAMED", 0)
        for count in (1, 3):
            threads(count)
            assert_all_same(
                norm.backward(dy, x, weight, dresidual=dresidual)._asdict(), expected._asdict()
            )
            dx = dy.copy()
            norm.backward(dx, x, weight, dresidual=dresidual, out=(dx, None, None))
            assert_same_bits(dx, expected.dx)
            # Rows that start and end anywhere in a line of the cache, neighbours that stay; and dx alone.
            base = poisoned((rows, cols + 5), x.dtype)
            dx = base[:, 1 : cols + 1]
            for mask in ((True, True, True), (True, False, False)):
                norm.backward(dy, x, weight, dresidual=dresidual, output_mask=mask, out=(dx, None, None))
                assert_same_bits(dx, expected.dx)
                assert np.isnan(base[:, 0]).all() and np.isnan(base[:, cols + 1 :]).all()
            if rows % 2 == 0:
                shape, base = (2, rows // 2, cols), poisoned((2, rows // 2 + 1, cols), x.dtype)
                given = (a.reshape(shape) for a in (dy, x))
                out = (base[:, :-1], None, None)
                norm.backward(*given, weight, dresidual=dresidual.reshape(shape), out=out)
                assert_same_bits(base[:, :-1].reshape(rows, cols), expected.dx)
                assert np.isnan(base[:, -1]).all()


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_wide_gradients(norm, dtype, threads):
    """By rows or by ranges of columns, whatever suits the threads; dx alone by rows in any case."""
    for cols in (16384, 16385, 20001, 32769):
        dy, x = random((17, cols), dtype, 1), random((17, cols), dtype, 2, offset=2.0)
        weight = random(cols, dtype, 3)
        threads(1)
        expected = norm.backward(dy, x, weight)
        for count in (1, 2, 5):
            threads(count)
            assert_all_same(norm.backward(dy, x, weight)._asdict(), expected._asdict())
            alone = norm.backward(dy, x, weight, output_mask=(True, False, False)).dx
            assert_same_bits(alone, expected.dx)
            strided = np.concatenate([x, x], axis=1)[:, ::2][:, :cols]  # has no view as rows
            strided[...] = x
            assert_all_same(norm.backward(dy, strided, weight)._asdict(), expected._asdict())


@pytest.mark.parametrize("dtype", DTYPES)
def test_threads_that_share_the_gradients_of_a_row(norm, dtype, monkeypatch, threads):
    """Leaves of a row on several threads, with known statistics; rows of extreme size, NaN and huge dy among them."""
    cols = 2**17 + 4097
    dy, x = random((5, cols), dtype, 1), random((5, cols), dtype, 2, offset=2.0)
    weight = random(cols, dtype, 3)
    x[1] *= x.dtype.type(EXTREME[dtype])
    dy[4] *= x.dtype.type(EXTREME[dtype])
    x[3, 70000] = np.nan
    statistics = norm.forward(x, weight, return_stats=True)._asdict()
    del statistics["y"]
    for some in (slice(0, 1), slice(1, 2), slice(0, 2), slice(None)):
        given = {name: kept[some] for name, kept in statistics.items()}
        with monkeypatch.context() as patch, np.errstate(all="ignore"):
            patch.setattr(launch, "WIDE", 2**30)  # by rows
            patch.setattr(quick, "WIDE", 2**30)
            threads(1)
            expected = norm.backward(dy[some], x[some], weight)._asdict()
        for count in (1, 2, 3, 7):
            threads(count)
            assert_all_same(norm.backward(dy[some], x[some], weight, **given)._asdict(), expected)
            assert_all_same(norm.backward(dy[some], x[some], weight)._asdict(), expected)


@pytest.mark.parametrize("dtypes", [("float64", "float32"), ("float16", "float32"), ("float32", "float16")])
def test_wide_gradients_of_two_dtypes(norm, dtypes, monkeypatch, threads):
    threads(2)
    dy, x, weight = random((2, 40000), "float32", 1), random((2, 40000), "float32", 2), random(40000, "float32", 3)
    actual, expected = ((None, *(np.empty(40000, dtype) for dtype in dtypes)) for _ in range(2))
    dx = norm.backward(dy, x, weight, out=actual).dx
    monkeypatch.setattr(launch, "WIDE", 2**30)  # by rows
    monkeypatch.setattr(quick, "WIDE", 2**30)
    assert_same_bits(dx, norm.backward(dy, x, weight, out=expected).dx)
    for got, wanted in zip(actual[1:], expected[1:], strict=True):
        assert_same_bits(got, wanted)
