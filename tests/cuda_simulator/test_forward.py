"""The forward kernel on a simulated GPU, within the contract's bounds."""

import itertools

import numpy as np
import pytest
from bounds import SMALLEST, assert_same_bits, check_forward, check_statistics
from support import Shape, forward
from table import DTYPES, LAYER_NORM, NORMS, random
from test_adversarial import KINDS, rows_of

from npnorm._results import LayerNormResult, RMSNormResult

norms = pytest.mark.parametrize("norm", NORMS, ids=lambda norm: norm.name)
dtypes = pytest.mark.parametrize("dtype", DTYPES)
OPTIONS = {
    "plain": {},
    "weight": {"weight": True},
    "bias": {"bias": True},
    "both": {"weight": True, "bias": True},
    "offset": {"weight": True, "bias": True, "weight_offset": 1.0},
    "rounding": {"weight": True, "bias": True, "rounding": True},
    "residual": {"weight": True, "residual": True},
    "other formats": {"weight": True, "bias": True, "residual": True, "other": True},
}


def chunk(dtype):
    return 16 // DTYPES[dtype].itemsize


def inputs(dtype, cols, rows=3, weight=False, bias=False, residual=False, other=False, offset=3.0, **options):
    names = list(DTYPES)
    formats = [names[(names.index(dtype) + i) % len(names)] if other else dtype for i in (1, 2, 3)]
    x = random((rows, cols), dtype, offset=offset)
    if weight:
        options["weight"] = random(cols, formats[0], 1, offset=0.5)
    if bias:
        options["bias"] = random(cols, formats[1], 2)
    if residual:
        options["residual"] = random((rows, cols), formats[2], 3)
    return x, options


@norms
@dtypes
@pytest.mark.parametrize("option", OPTIONS)
def test_options(norm, dtype, option):
    """Every option, 16-byte accesses of rows in registers with poison around them; rows near zero and far from it."""
    for cols, layout, offset in ((11 * chunk(dtype), "lead", 1000.0), (chunk(dtype), "plain", 3.0)):
        x, options = inputs(dtype, cols, offset=offset, **OPTIONS[option])
        y, total, mean, rstd = forward(
            x, centered=norm.centered, stats=True, **options, shape=Shape(threads=4, layout=layout)
        )
        residual = options.get("residual")
        if residual is not None:
            x = norm.reference("add")(x, residual).residual_out
            assert_same_bits(total, x, "residual_out")
        check_forward(
            norm, y, x, options.get("weight"), options.get("bias"), eps=1e-5,
            weight_offset=options.get("weight_offset", 0.0), round_before=options.get("rounding", False),
        )  # fmt: skip
        mean, rstd = mean if mean is None else mean[:, None], rstd[:, None]
        result = LayerNormResult(y, mean, rstd) if norm.centered else RMSNormResult(y, rstd)
        check_statistics(norm, result, x, eps=1e-5)


@norms
@dtypes
def test_bits_depend_on_the_row_alone(norm, dtype):
    """Not on width, tails of it, mode, rows a block, blocks, layout, place in memory, statistics."""
    for cols in (9 * chunk(dtype), 9 * chunk(dtype) + 1):
        x, options = inputs(dtype, cols, rows=4, weight=True, bias=True)
        x[1] = x[1] * 1e-20 if dtype != "float16" else x[1] * 0  # an extreme row among ordinary ones
        whole = cols % chunk(dtype) == 0
        options = {**options, "centered": norm.centered, "eps": 1e-300}
        first = forward(x, **options, shape=Shape(threads=4, width=None if whole else 1))[0]
        check_forward(norm, first, x, options["weight"], options["bias"], eps=1e-300)
        widths = [w for w in (1, 2, 4, 8) if cols % w == 0 and w <= chunk(dtype)]
        for mode, width in itertools.product(("registers", "shared", "looped"), (widths[0], widths[-1])):
            rows = 1 if mode == "shared" else 2
            shape = Shape(4, rows, mode, width, "lead", blocks=1)
            assert_same_bits(forward(x, **options, stats=True, shape=shape)[0], first, f"{mode} {width}")
        # Threads without a row, which would read what others have written.
        y = forward(x[:3], **options, in_place=True, shape=Shape(4, 8, width=widths[-1]))[0]
        assert_same_bits(y, first[:3], "in place")
        for width in widths:
            shape = Shape(4, 1, width=width)
            for i in range(4):
                row = np.array(x[i : i + 1])
                y = forward(row, **options, in_place=True, shape=shape)[0]
                assert_same_bits(y, first[i : i + 1], f"alone {width}")


@norms
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
@pytest.mark.parametrize("mode", ["registers", "shared", "looped"])
def test_many_warps(norm, dtype, mode):
    """Two warps a row, which meet in shared memory."""
    cols = 64 * chunk(dtype) + chunk(dtype) * 5
    x, options = inputs(dtype, cols, rows=3, weight=True, bias=True)
    x[2] = x[2] * (1e25 if dtype != "float64" else 1e200)
    shape = Shape(64, 1, mode, layout="lead", blocks=2)
    y, _, _, rstd = forward(x, centered=norm.centered, stats=True, **options, shape=shape)
    check_forward(norm, y, x, options["weight"], options["bias"], eps=1e-5)
    alone = forward(x, centered=norm.centered, stats=True, written=False, shape=Shape(64, 1, width=1))[3]
    assert_same_bits(alone, rstd, "statistics alone")


@norms
@dtypes
def test_tails(norm, dtype):
    """Every number of columns around a chunk, one element at a time, misaligned."""
    for cols in range(1, 2 * chunk(dtype) + 2):
        x, options = inputs(dtype, cols, rows=2, weight=True, bias=True)
        shape = Shape(2, 2, "registers" if cols % 2 else "looped", 1, "lead")
        y = forward(x, centered=norm.centered, **options, shape=shape)[0]
        check_forward(norm, y, x, options["weight"], options["bias"], eps=1e-5)
        if cols == 1 and norm.centered:
            assert_same_bits(y, np.stack([options["bias"]] * 2))


@norms
@dtypes
def test_adversarial_rows(norm, dtype):
    """Each kind of row that breaks norms, all in one call."""
    for cols, width in ((7 * chunk(dtype), None), (33, 1)):
        x = np.concatenate([rows_of(kind, (1, cols), dtype) for kind in KINDS])
        wide = "float64" if dtype == "float64" else "float32"
        weight, bias = random(cols, wide, 1), random(cols, wide, 2)
        for eps in (1e-5, 1e-300):
            shape = Shape(8 if width else 4, 4 if width else 2, width=width, blocks=7)
            y = forward(x, weight, bias, centered=norm.centered, eps=eps, shape=shape)[0]
            check_forward(norm, y, x, weight, bias, eps=eps)


@dtypes
def test_large_numbers_cancel(dtype):
    """What their sum loses must not show in small numbers beside them."""
    x = rows_of("large numbers that cancel each other", (4, 8 * chunk(dtype)), dtype)
    check_forward(LAYER_NORM, forward(x, centered=True, shape=Shape(4))[0], x, eps=1e-5)


@norms
@dtypes
def test_wide_output(norm, dtype):
    """An output of more digits than x, and of fewer."""
    for out in ("float32", "float64", "float16"):
        x, options = inputs(dtype, 6 * chunk(dtype), weight=True, bias=True)
        y = forward(x, centered=norm.centered, out=DTYPES[out], **options, shape=Shape(4))[0]
        check_forward(norm, y, x, options["weight"], options["bias"], eps=1e-5)


@dtypes
def test_constant_rows_are_exactly_bias(dtype):
    largest = float(np.finfo(np.float32).max) if dtype == "bfloat16" else None
    for cols in (chunk(dtype), 3 * chunk(dtype) + 1):
        bias = random(cols, dtype, 2)
        constants = [14.0, 1 / 3, -1e4, 6e4, SMALLEST[dtype], 0.0, -0.0, 1e38 if dtype != "float16" else 3.0]
        x = np.stack([np.full(cols, constant) for constant in constants]).astype(DTYPES[dtype])
        assert largest is None or largest > 0
        for eps in (1e-5, 1e-300):
            width = None if cols == chunk(dtype) else 1
            y, _, mean, rstd = forward(
                x, random(cols, dtype, 1), bias, eps=eps, stats=True, shape=Shape(2, 4, width=width)
            )
            assert_same_bits(y, np.stack([bias] * len(x)), f"{cols} {eps}")
            np.testing.assert_array_equal(mean, x[:, 0].astype(np.float64))
            np.testing.assert_allclose(rstd, eps**-0.5, rtol=1e-15)


@norms
@dtypes
def test_not_a_number_stays_in_its_row(norm, dtype):
    cols = 5 * chunk(dtype)
    x, _ = inputs(dtype, cols, rows=4)
    clean = forward(x, centered=norm.centered, shape=Shape(4, 8))[0]
    x[1, 3], x[2, 4] = np.nan, np.inf
    y = forward(x, centered=norm.centered, shape=Shape(4, 8))[0]
    assert np.isnan(y[1]).all()
    assert np.isnan(y[2, 4])
    assert_same_bits(y[[0, 3]], clean[[0, 3]])


@norms
@dtypes
def test_an_infinity_meets_the_rest_of_its_row(norm, dtype):
    """RMSNorm makes 0 of all that is finite beside it, LayerNorm NaN; rstd says the same."""
    for infinities in ([2], [0, 5]):
        x, _ = inputs(dtype, 3 * chunk(dtype), rows=3, offset=-1.0)
        x[1, infinities] = np.inf
        for mode in ("registers", "shared", "looped"):
            y, _, _, rstd = forward(x, centered=norm.centered, stats=True, shape=Shape(2, 1, mode))
            with np.errstate(invalid="ignore"):
                exact = norm.reference()(x, eps=1e-5)
            np.testing.assert_array_equal(y[1].astype(np.float64), exact[1].astype(np.float64), mode)
            assert np.isnan(rstd[1]) if norm.centered else rstd[1] == 0.0


def test_no_rows():
    y = forward(np.empty((0, 8), np.float32), stats=True)[0]
    assert y.shape == (0, 8)
