"""The backward kernels on a simulated GPU, within the contract's bounds."""

import itertools

import ml_dtypes
import numpy as np
import pytest
from bounds import LARGEST, as_rows, assert_same_bits, check_backward, check_sum, dbias_bound, normalize
from machine import run
from support import Shape, backward, forward
from table import DTYPES, LAYER_NORM, random
from test_adversarial import KINDS, rows_of
from test_forward import chunk, dtypes, norms

from npnorm._plan import Plan
from npnorm.cuda import kernels, simulated, table

OPTIONS = {
    "plain": {},
    "weight": {"weight": True},
    "offset": {"weight": True, "weight_offset": 1.0},
    "dresidual": {"weight": True, "dresidual": True},
    "other formats": {"weight": True, "dresidual": True, "other": True},
    "dx alone": {"weight": True, "mask": (True, False, False)},
    "dweight alone": {"weight": True, "mask": (False, True, False)},
    "dbias alone": {"mask": (False, False, True)},
}


def inputs(dtype, cols, rows=5, weight=False, dresidual=False, other=False, **options):
    names = list(DTYPES)
    formats = [names[(names.index(dtype) + i) % len(names)] if other else dtype for i in (1, 2, 3)]
    x, dy = random((rows, cols), dtype, offset=3.0), random((rows, cols), formats[0], 1, offset=0.5)
    if weight:
        options["weight"] = random(cols, formats[1], 2, offset=0.5)
    if dresidual:
        options["dresidual"] = random((rows, cols), formats[2], 3)
    return dy, x, options


def check(norm, gradients, dy, x, eps=1e-5, weight=None, weight_offset=0.0, dresidual=None, **_):
    check_backward(norm, gradients, dy, x, weight, eps=eps, weight_offset=weight_offset, dresidual=dresidual)


@norms
@dtypes
@pytest.mark.parametrize("option", OPTIONS)
def test_options(norm, dtype, option):
    """Every option, 16-byte accesses of rows in registers with poison around them."""
    dy, x, options = inputs(dtype, 7 * chunk(dtype), **OPTIONS[option])
    gradients = backward(dy, x, centered=norm.centered, **options, shape=Shape(4, 2, layout="lead"))
    assert [g is not None for g in gradients] == list(options.get("mask", (True, True, True)))
    check(norm, gradients, dy, x, **options)


@norms
@dtypes
def test_very_wide_rows(norm, dtype):
    """Row sums first, then tiles of columns, or rows read twice; dx with the bits that rows in registers have."""
    for cols in (9 * chunk(dtype), 9 * chunk(dtype) + 1):
        width = 1 if cols % chunk(dtype) else None
        dy, x, options = inputs(dtype, cols, weight=True, dresidual=True)
        if dtype != "float16":
            x[2] = x[2] * 1e25  # an extreme row
        found = backward(dy, x, centered=norm.centered, **options, shape=Shape(4, 1, "looped", width, "lead"))
        check(norm, found, dy, x, **options)
        for mode in ("registers", "cached"):
            held = backward(dy, x, centered=norm.centered, **options, shape=Shape(4, 1, mode, width, "lead"))
            for one, other in zip(found, held, strict=True):
                assert_same_bits(one, other, mode)


@norms
@dtypes
def test_bits(norm, dtype):
    """The width of accesses and the layout change none, and dx of a row does not depend on the others."""
    dy, x, options = inputs(dtype, 8 * chunk(dtype), weight=True, dresidual=True)
    if dtype != "float16":
        x[3] = x[3] * 1e25
    options["centered"] = norm.centered
    first = backward(dy, x, **options, shape=Shape(4, 2))
    for width in (1, 2):
        again = backward(dy, x, **options, shape=Shape(4, 2, width=width, layout="lead"))
        for one, other in zip(first, again, strict=True):
            assert_same_bits(one, other, f"{width}")
    dresidual = options.pop("dresidual")
    for i in range(5):
        own = backward(dy[i : i + 1], x[i : i + 1], dresidual=dresidual[i : i + 1], **options, shape=Shape(4, 8))
        assert_same_bits(own.dx, first.dx[i : i + 1], f"row {i} alone")


@norms
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
def test_many_warps(norm, dtype):
    """Two warps a row, which meet in shared memory; one row a block and two."""
    for rows, cols in ((1, 70 * chunk(dtype)), (2, 64 * chunk(dtype))):
        dy, x, options = inputs(dtype, cols, rows=4, weight=True)
        x[1] = x[1] * 1e25
        gradients = backward(dy, x, centered=norm.centered, **options, shape=Shape(64, rows), partials=1)
        check(norm, gradients, dy, x, **options)


@norms
@dtypes
def test_tails(norm, dtype):
    for cols in range(1, 2 * chunk(dtype) + 2):
        dy, x, options = inputs(dtype, cols, rows=2, weight=True)
        gradients = backward(
            dy, x, centered=norm.centered, **options, shape=Shape(2, 2, width=1, layout="lead"), partials=1
        )
        check(norm, gradients, dy, x, **options)
        if cols == 1 and norm.centered:
            np.testing.assert_array_equal(gradients.dx, np.zeros_like(x))
            np.testing.assert_array_equal(gradients.dweight, np.zeros_like(x[0]))


@norms
@dtypes
def test_adversarial_rows(norm, dtype):
    """Each kind of row that breaks norms: alone for dweight and dbias, which small ones would not be seen in."""
    wide = "float64" if dtype == "float64" else "float32"
    for cols, eps, threads in ((1, 1e-5, 1), (13, 1e-5, 4), (5 * chunk(dtype), 1e-5, 8), (5 * chunk(dtype), 1e-300, 8)):
        x = np.concatenate([rows_of(kind, (1, cols), dtype) for kind in KINDS])
        keep = normalize(as_rows(x, -1), norm.centered, eps).rstd[:, 0] < LARGEST["float64"]
        x = x[keep]
        dy, weight = random(x.shape, wide, 3, offset=0.5), random(cols, wide, 1)
        shape = Shape(threads, 4, width=None if threads == 8 else 1)
        gradients = backward(dy, x, weight, centered=norm.centered, eps=eps, shape=shape)
        check(norm, gradients, dy, x, eps=eps, weight=weight)
    for kind in KINDS:
        x = rows_of(kind, (1, cols), dtype)
        dy = random(x.shape, wide, 3, offset=0.5)
        gradients = backward(dy, x, weight, centered=norm.centered, shape=Shape(8, 1), partials=1)
        check(norm, gradients, dy, x, weight=weight)


@dtypes
def test_constant_rows(dtype):
    """Large ones, of any number of columns: what is beyond a row would be infinite, had it a place in its sums."""
    largest = LARGEST[dtype] * 0.99
    for cols, mode in itertools.product((1, 5, 13), ("registers", "cached", "looped")):
        x = np.stack([np.full(cols, value) for value in (largest, -largest, largest / 100)]).astype(DTYPES[dtype])
        dy, weight = random(x.shape, dtype, 1), random(cols, dtype, 2)
        for eps in (1e-5, 1e-12):
            shape = Shape(2 if mode == "registers" else 4, 1, mode, width=1)
            gradients = backward(dy, x, weight, eps=eps, shape=shape)
            check(LAYER_NORM, gradients, dy, x, eps=eps, weight=weight)
            np.testing.assert_array_equal(gradients.dweight, np.zeros_like(x[0]))
            assert cols > 1 or not gradients.dx.any()


@norms
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_large_gradients(norm, dtype):
    """g beyond what float32 holds, and dx within."""
    x = random((3, 8 * chunk(dtype)), dtype, scale=1e25)
    dy, weight = random(x.shape, dtype, 1, scale=1e25), random(x.shape[1], dtype, 2, scale=1e16)
    gradients = backward(dy, x, weight, centered=norm.centered, mask=(True, False, False), shape=Shape(4, 2))
    check(norm, gradients, dy, x, weight=weight)


@norms
@dtypes
def test_given_statistics_have_the_same_bits(norm, dtype):
    dy, x, options = inputs(dtype, 5 * chunk(dtype), weight=True)
    _, _, mean, rstd = forward(x, centered=norm.centered, stats=True, shape=Shape(4, 8))
    shape = Shape(4, 2)
    given = backward(dy, x, centered=norm.centered, mean=mean, rstd=rstd, **options, shape=shape)
    for one, other in zip(backward(dy, x, centered=norm.centered, **options, shape=shape), given, strict=True):
        assert_same_bits(one, other)
    check(norm, given, dy, x, **options)


@dtypes
def test_not_a_number_stays_in_its_row(dtype):
    dy, x, options = inputs(dtype, 5 * chunk(dtype), weight=True)
    shape = Shape(4, 2)
    clean = backward(dy, x, **options, shape=shape)
    dy[1, 3], dy[3, 7] = np.nan, np.inf
    gradients = backward(dy, x, **options, shape=shape)
    assert np.isnan(gradients.dx[1]).all()
    assert np.isnan(gradients.dbias[3])
    assert np.isinf(gradients.dbias[7])
    rest = np.delete(np.arange(x.shape[1]), [3, 7])
    assert_same_bits(gradients.dbias[rest], clean.dbias[rest])
    close = gradients.dweight[rest].astype(float), clean.dweight[rest].astype(float)
    np.testing.assert_allclose(*close, rtol=2 * float(ml_dtypes.finfo(dtype).eps))
    assert_same_bits(gradients.dx[[0, 2, 4]], clean.dx[[0, 2, 4]])


@norms
def test_rstd_beyond_float64(norm):
    """Rows of the smallest numbers with eps = 0, whose mean has one digit of three; a constant one is NaN."""
    dy, x, options = inputs("float64", 10, weight=True)
    x[[0, 2]] = 5e-324 * np.array([3, -1, 2, 1, 5, 7, -2, 0, 4, 4])
    x[2] *= 1e10
    scale = np.where(np.abs(x) < 1e-300, 2.0**1000, 1.0)
    for rows in ([0, 1], [1, 2], [2, 3]):
        with np.errstate(over="ignore"):
            exact = norm.reference("backward")(dy[rows], (x * scale)[rows], **options, eps=0.0)
            exact = exact._replace(dx=exact.dx * scale[rows])
        for mode, together in (("registers", 1), ("registers", 2), ("cached", 1), ("looped", 1)):
            shape = Shape(4, together, mode)
            found = backward(dy[rows], x[rows], centered=norm.centered, eps=0.0, **options, shape=shape)
            for one, other in zip(found, exact, strict=True):
                np.testing.assert_allclose(one, other, rtol=1e-13, atol=1e-14, err_msg=mode)
    x[0] = 5e-324 if norm.centered else 0.0
    found = backward(dy, x, centered=norm.centered, eps=0.0, **options, shape=Shape(4, 2))
    assert np.isnan(found.dx[0]).all()
    assert np.isfinite(found.dx[[1, 3, 4]]).all()


@norms
@dtypes
def test_an_infinity_in_x(norm, dtype):
    """NaN where the reference has it, and elsewhere its numbers: rstd of the row is 0 in RMSNorm."""
    dy, x, options = inputs(dtype, 3 * chunk(dtype), rows=3, weight=True)
    x[1, 2] = np.inf
    with np.errstate(invalid="ignore"):
        exact = norm.reference("backward")(dy, x, **options, eps=1e-5)
    for mode in ("registers", "looped"):
        found = backward(dy, x, centered=norm.centered, **options, shape=Shape(4, 1, mode))
        for one, other in zip(found, exact, strict=True):
            close = one.astype(np.float64), other.astype(np.float64)
            np.testing.assert_allclose(*close, rtol=8 * float(ml_dtypes.finfo(dtype).eps), atol=1e-3)


@pytest.mark.parametrize("gradient", DTYPES)
def test_total(gradient):
    """Partial sums in order and compensated, rounded once; an absent gradient is left out."""
    compute = np.float64 if gradient == "float64" else np.float32
    plan = Plan(True, True, gradient == "float64", False, "float32", None, None, None, None, None, None)
    cols, partials = 35, 37
    launch = table.total_launch(plan, gradient, cols)
    values = random((partials, cols), "float64", 1).astype(compute)
    values[3] *= 1e4
    values[30] *= -1e4
    simulated.MEMORY.clear()
    out = np.full(cols, np.nan, DTYPES[gradient])
    pointers = (*5 * (0,), simulated.held(values), 0, simulated.held(out))
    run(kernels.make_kernel(launch.spec)[0], launch, (*pointers, partials, 0, cols, (0,), (0,), (0,)))
    check_sum(out, as_rows(values, -1), dbias_bound(as_rows(values, -1)), "dbias")


@pytest.mark.parametrize("exact", ["float32", "float64"])
def test_many_rows_lose_nothing(exact):
    """dweight and dbias of one block, of large terms that cancel: a plain float32 sum is 10 times beyond the bound."""
    rows, cols = 60, 8
    x, dy = random((rows, cols), exact, offset=0.5), random((rows, cols), exact, 1) + 7
    dy = dy.astype(DTYPES[exact])
    gradients = backward(dy, x, centered=False, shape=Shape(2 if exact == "float32" else 4, 1), partials=1)
    u = np.finfo(exact).eps
    exact_sum = dy.astype(np.longdouble).sum(axis=0)
    assert np.abs(gradients.dbias - exact_sum).max() <= u * np.abs(exact_sum).max()
