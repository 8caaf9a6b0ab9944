"""Directional derivatives: bounds, finite differences, the transpose of the gradients, layouts, edges, errors."""

import itertools
import tracemalloc

import numpy as np
import pytest
import zoo
from bounds import HAS_LONGDOUBLE, LONG, assert_same_bits, check_jvp, normalize
from table import DTYPES, NORMS, parameters, random

import npnorm
from npnorm.cpu.forward_mode import TILE

pytestmark = pytest.mark.parametrize("norm", NORMS, ids=lambda norm: norm.name)

TANGENTS = ("dx", "dweight", "dbias")
GIVEN = [names for count in (1, 2, 3) for names in itertools.combinations(TANGENTS, count)]
# dx of float32 or float64, as test_adversarial has it: kernels are compiled for each pair of dtypes.
PAIRS = [(name, "float64" if name == "float64" else "float32") for name in DTYPES]


def tangents(shape, dtype="float64", names=TANGENTS, axes=1):
    shapes = {"dx": shape, "dweight": shape[-axes:], "dbias": shape[-axes:]}
    return {name: random(shapes[name], dtype, 20 + i) for i, name in enumerate(names)}


@pytest.mark.parametrize("dtypes", PAIRS, ids="-".join)
def test_bounds(norm, dtypes):
    for cols, which in [(1, "weight"), (7, "plain"), (129, "weight"), (4097, "weight")]:
        x = random((5, cols), dtypes[0], offset=3.0)
        weight = parameters(cols, which, dtypes[1])["weight"]
        for names in GIVEN:
            given = tangents(x.shape, dtypes[1], names)
            for function in (norm.jvp, norm.reference("jvp")):
                dy = function(x, weight, **given)
                assert dy.dtype == x.dtype
                check_jvp(norm, dy, x, weight, **given)
            if weight is not None:
                dy = norm.jvp(x, weight, **given, weight_offset=1.0, eps=1e-3)
                check_jvp(norm, dy, x, weight, **given, weight_offset=1.0, eps=1e-3)


def test_output_dtypes(norm):
    x, weight = random((4, 129)), random(129, seed=1)
    for dtype in (np.float16, np.float64):
        out = np.empty(x.shape, dtype)
        assert norm.jvp(x, weight, **tangents(x.shape, "float32"), out=out) is out
        check_jvp(norm, out, x, weight, **tangents(x.shape, "float32"))


@pytest.mark.skipif(not HAS_LONGDOUBLE, reason="differences need more digits than float64 has")
@pytest.mark.parametrize("names", GIVEN, ids="-".join)
def test_finite_differences_of_long_doubles(norm, names):
    """Central differences of the oracle's forward, which knows nothing of derivatives."""
    x, weight, bias = (random((3, 13), "float64", 0, 2.0, 5.0), *random((2, 13), "float64", 1))
    given = tangents(x.shape, names=names)
    step = LONG(1e-6)

    def moved(by):
        dx, dweight, dbias = (by * given[name].astype(LONG) if name in given else 0 for name in TANGENTS)
        return normalize(x.astype(LONG) + dx, norm.centered, norm.eps).normalized * (weight + dweight) + bias + dbias

    numeric = (moved(step) - moved(-step)) / (2 * step)
    np.testing.assert_allclose(norm.jvp(x, weight, **given), numeric.astype(np.float64), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("where", ["npnorm", "reference"])
@pytest.mark.parametrize("options", [{}, {"weight_offset": 1.0}, {"axis": (-2, -1)}, {"eps": 0.5}], ids=str)
def test_finite_differences_of_the_forward(norm, where, options):
    axes = len(options.get("axis", (-1,)))
    x, shape = random((4, 3, 13), "float64", scale=2.0), (3, 13)[-axes:]
    weight, bias, step = random(shape, "float64", 1), random(shape, "float64", 2), 1e-6
    given = tangents(x.shape, axes=axes)
    forward, jvp = (norm.forward, norm.jvp) if where == "npnorm" else (norm.reference(), norm.reference("jvp"))

    def moved(by):
        dx, dweight, dbias = (by * given[name] for name in TANGENTS)
        return forward(x + dx, weight + dweight, bias + dbias, **options)

    numeric = (moved(step) - moved(-step)) / (2 * step)
    np.testing.assert_allclose(jvp(x, weight, **given, **options), numeric, rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("names", GIVEN, ids="-".join)
def test_transpose_of_the_gradients(norm, names):
    """<cotangent, jvp(tangents)> = <gradients(cotangent), tangents>, each tangent alone and together."""
    x, weight = random((33, 129), "float64", offset=2.0), random(129, "float64", 1)
    cotangent, given = random(x.shape, "float64", 2), tangents(x.shape, names=names)
    dy = norm.jvp(x, weight, **given, weight_offset=0.5)
    gradients = norm.backward(cotangent, x, weight, weight_offset=0.5)
    pairs = [(cotangent, dy), *((getattr(gradients, name), given[name]) for name in names)]
    products = [a * b for a, b in pairs]
    size = sum(np.abs(product).sum() for product in products)
    left, *right = [product.sum() for product in products]
    assert abs(left - sum(right)) <= 8 * np.finfo(np.float64).eps * size
    assert abs(left) > 1e-4 * size


def test_no_change_along_what_a_norm_ignores(norm):
    """With eps = 0, a stretch of the row changes nothing; nor, when the norm centres, does a shift."""
    x = random((5, 129), "float64", offset=2.0)
    for direction in (3 * x, *([np.full_like(x, 7.0)] if norm.centered else [])):
        assert np.abs(norm.jvp(x, dx=direction, eps=0.0)).max() < 1e-13 * np.abs(direction).max()


def without_projection(norm, x, weight, given):
    rstd = norm.forward(x, return_stats=True).rstd
    return given["dx"] * rstd * weight + norm.forward(x) * given["dweight"] + given["dbias"]


def without_dweight(norm, x, weight, given):
    return norm.jvp(x, weight, dx=given["dx"], dbias=given["dbias"])


def with_offset_on_dweight(norm, x, weight, given):
    return norm.jvp(x, weight, **given | {"dweight": given["dweight"] + 1})


@pytest.mark.parametrize("wrong", [without_projection, without_dweight, with_offset_on_dweight])
def test_wrong_derivatives_are_noticed(norm, wrong):
    x, weight = random((9, 129), "float64"), random(129, "float64", 1)
    given = tangents(x.shape)
    with pytest.raises(AssertionError, match="dy"):
        check_jvp(norm, wrong(norm, x, weight, given), x, weight, **given)


@pytest.mark.parametrize("layout", [*zoo.LAYOUTS, "byte_swapped"])
def test_layouts(norm, layout):
    """The same bits as from plain copies, inputs left as they are."""
    change = getattr(zoo, layout)
    x, dx = change(random((9, 33))), change(random((9, 33), seed=1))
    weight, dweight, dbias = (change(random((1, 33), seed=i))[0] for i in (2, 3, 4))
    before = [np.array(a) for a in (x, weight, dx, dweight, dbias)]
    expected = norm.jvp(*(np.array(a, a.dtype.newbyteorder("=")) for a in (x, weight)),
                        **dict(zip(TANGENTS, before[2:], strict=True)))  # fmt: skip
    dy = norm.jvp(x, weight, dx=dx, dweight=dweight, dbias=dbias)
    assert type(dy) is np.ndarray
    assert_same_bits(dy, expected, layout)
    for array, kept in zip((x, weight, dx, dweight, dbias), before, strict=True):
        assert_same_bits(np.array(array), kept)
    if layout in ("every_other_column", "reversed_both", "fortran", "misaligned", "offset_view"):
        out = change(np.zeros((9, 33), np.float32))
        assert norm.jvp(x, weight, dx=dx, dweight=dweight, dbias=dbias, out=out) is out
        assert_same_bits(np.array(out), expected, f"out {layout}")


@pytest.mark.parametrize("lead", zoo.LEADS)
def test_lead_axes(norm, lead):
    x, dx = (zoo.LEADS[lead](lambda shape, i=i: random(shape, seed=i)) for i in (0, 1))
    given = {"dweight": random(x.shape[-1], seed=2)}
    expected = norm.jvp(np.array(x), dx=np.array(dx), **given)
    assert_same_bits(norm.jvp(x, dx=dx, **given), expected)


def test_out_beside_its_view(norm):
    base = zoo.poisoned((8, 80), np.float32)
    out = base[1:6, 3:36]
    norm.jvp(random((5, 33)), dx=random((5, 33), seed=1), out=out)
    zoo.assert_only_written(base, out)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_bits_of_a_row(norm, threads, dtype):
    """Whatever stands beside it, in whatever tile, on however many threads, in place or not."""
    cols = 96
    rows = 6 * TILE // cols
    x, weight = random((rows, cols), dtype), random(cols, seed=1)
    given = tangents(x.shape, "float32")
    threads(1)
    whole = norm.jvp(x, weight, **given)
    for i in (0, TILE // cols - 1, TILE // cols, rows - 1):
        alone = norm.jvp(x[i], weight, **given | {"dx": given["dx"][i]})
        assert_same_bits(alone, whole[i])
    threads(4)
    large = np.concatenate([x] * 4)
    many = norm.jvp(large, weight, **given | {"dx": np.concatenate([given["dx"]] * 4)})
    assert large.size > 2**18
    assert_same_bits(many, np.concatenate([whole] * 4))
    into = x.copy()
    assert norm.jvp(into, weight, **given, out=into) is into
    assert_same_bits(into, whole)
    dx = given["dx"].copy()
    expected = norm.jvp(x, weight, **given, out=np.empty_like(dx))
    norm.jvp(x, weight, **given | {"dx": dx}, out=dx)
    assert_same_bits(dx, expected)


def test_what_is_left_out_is_zero(norm):
    x, weight = random((4, 33)), random(33, seed=1)
    given = tangents(x.shape, "float32")
    for names in GIVEN:
        zeros = {name: value if name in names else np.zeros_like(value) for name, value in given.items()}
        some = {name: given[name] for name in names}
        np.testing.assert_array_equal(norm.jvp(x, weight, **some), norm.jvp(x, weight, **zeros))
    np.testing.assert_array_equal(norm.jvp(x, dbias=given["dbias"]), np.broadcast_to(given["dbias"], x.shape))


def test_no_rows_and_no_columns(norm):
    for shape, axis in [((0, 5), -1), ((3, 0), -1), ((2, 0, 3), -1), ((2, 0), (0, 1)), ((0, 0), -1)]:
        x = np.zeros(shape, np.float16)
        columns = shape[-1:] if axis == -1 else shape
        for names in GIVEN:
            given = {name: np.zeros(shape if name == "dx" else columns) for name in names}
            dy = norm.jvp(x, **given, axis=axis)
            assert dy.shape == shape and dy.dtype == np.float16
            assert norm.reference("jvp")(x, **given, axis=axis).shape == shape
    with pytest.raises(ValueError, match="`dx` must have shape"):
        norm.jvp(np.zeros((0, 5)), dx=np.zeros((0, 4)))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_single_columns_and_constant_rows(norm, dtype):
    for shape in [(4, 1), (4, 7)]:
        x, weight = np.full(shape, 14.1, dtype), random(shape[1], dtype, 1)
        given = tangents(shape, dtype)
        dy = norm.jvp(x, weight, **given)
        check_jvp(norm, dy, x, weight, **given)
        if norm.centered:  # the normalized row is 0, whatever its weight
            still = norm.jvp(x, weight, dweight=given["dweight"])
            assert_same_bits(still, np.zeros(shape, dtype))
    single = random((4, 1), dtype)
    if norm.centered:
        dy = norm.jvp(single, np.ones(1, dtype), **tangents((4, 1), dtype))
        assert_same_bits(dy, np.broadcast_to(tangents((4, 1), dtype)["dbias"], (4, 1)))
    if dtype == "float32":  # 0/0
        dx = np.ones((1, 3), np.float32)
        assert np.isnan(norm.jvp(np.zeros_like(dx), dx=dx, eps=0.0)).all()


def test_what_is_not_finite_stays_where_it_is(norm):
    x, weight = random((5, 33)), random(33, seed=1)
    given = tangents(x.shape, "float32")
    clean = norm.jvp(x, weight, **given)
    for bad in (np.nan, np.inf, -np.inf):
        for name in ("x", "dx"):
            spoilt = {"x": x.copy(), "dx": given["dx"].copy()}
            spoilt[name][2, 5] = bad
            dy = norm.jvp(spoilt["x"], weight, **given | {"dx": spoilt["dx"]})
            assert not np.isfinite(dy[2]).any()
            assert_same_bits(np.delete(dy, 2, 0), np.delete(clean, 2, 0))
        for name in ("dweight", "dbias"):
            spoilt = given[name].copy()
            spoilt[7] = bad
            dy = norm.jvp(x, weight, **given | {name: spoilt})
            assert not np.isfinite(dy[:, 7]).any()
            assert_same_bits(np.delete(dy, 7, 1), np.delete(clean, 7, 1))


def test_overflow_is_infinite_without_a_warning(norm):
    x, dx = random((3, 33), "float16"), np.full((3, 33), 6e4, np.float32)
    dx[:, ::2] *= -1
    dy = norm.jvp(x, np.full(33, 1e3, np.float16), dx=dx)
    assert np.isinf(dy).any()
    check_jvp(norm, dy, x, np.full(33, 1e3, np.float16), dx=dx)


def test_sequences_and_scalars(norm):
    """What np.asarray takes; a numpy scalar as eps; dy of a row."""
    dy = norm.jvp([1.0, 2.0, 4.0], [1.0, 1.0, 2.0], dx=[1.0, 0.0, 0.0], dbias=[0.5, 0.0, 0.0], eps=np.float32(0.5))
    expected = norm.jvp(np.array([1.0, 2.0, 4.0]), np.array([1.0, 1.0, 2.0]), dx=np.array([1.0, 0.0, 0.0]),
                        dbias=np.array([0.5, 0.0, 0.0]), eps=0.5)  # fmt: skip
    assert_same_bits(dy, expected)


def test_eps_none(norm):
    x, dx = random((3, 33), scale=1e-3), random((3, 33), seed=1)
    if norm.centered:
        with pytest.raises(TypeError, match="`eps`"):
            norm.jvp(x, dx=dx, eps=None)
    else:
        assert_same_bits(norm.jvp(x, dx=dx, eps=None), norm.jvp(x, dx=dx, eps=float(np.finfo(np.float32).eps)))


X = np.zeros((3, 8), np.float32)
ROW = np.zeros(8, np.float32)
LARGE = np.zeros((5, 8), np.float32)
OVERLAPPING = {"x": LARGE[:3], "dx": X, "out": LARGE[1:4]}
ERRORS = {
    "no tangent": (ValueError, {"dx": None}, ["`dx`, `dweight` and `dbias`", "None", "give"]),
    "x of ints": (TypeError, {"x": X.astype(int)}, ["`x`", "int64", "astype"]),
    "dx of ints": (TypeError, {"dx": X.astype(int)}, ["`dx`", "int64", "astype"]),
    "complex dweight": (TypeError, {"dweight": ROW + 1j}, ["`dweight`", "complex64"]),
    "masked dbias": (TypeError, {"dbias": np.ma.masked_array(ROW)}, ["`dbias`", "masked", "filled"]),
    "dx of one row": (ValueError, {"dx": ROW}, ["`dx` must have shape (3, 8), the shape of `x`; got (8,)"]),
    "dweight of rows": (ValueError, {"dweight": X}, ["`dweight` must have shape (8,)", "got (3, 8)"]),
    "short dbias": (ValueError, {"dbias": ROW[1:]}, ["`dbias` must have shape (8,)", "got (7,)"]),
    "short weight": (ValueError, {"weight": ROW[1:]}, ["`weight` must have shape (8,)", "got (7,)"]),
    "0-d x": (np.exceptions.AxisError, {"x": np.float32(1)}, ["`axis` of `x`"]),
    "axis out of range": (np.exceptions.AxisError, {"axis": 2}, ["`axis` of `x`"]),
    "leading axis": (ValueError, {"axis": 0}, ["`axis`", "moveaxis"]),
    "negative eps": (ValueError, {"eps": -1.0}, ["`eps`", "-1.0"]),
    "offset without weight": (ValueError, {"weight_offset": 1.0}, ["`weight_offset`", "None"]),
    "small out": (ValueError, {"out": X[1:].copy()}, ["`out` must have shape (3, 8)", "got (2, 8)"]),
    "out of ints": (ValueError, {"out": X.astype(int)}, ["`out`", "int64"]),
    "list as out": (TypeError, {"out": X.tolist()}, ["`out`", "list"]),
    "read-only out": (ValueError, {"out": zoo.read_only(X)}, ["`out`", "read-only", "copy"]),
    "out over a part of x": (ValueError, OVERLAPPING, ["`out` must not overlap `x` in part"]),
    "out over a part of dx": (ValueError, {"dx": LARGE[:3], "out": LARGE[1:4]}, ["`out`", "`dx` in part"]),
    "out over dweight": (ValueError, {"dweight": LARGE[0], "out": LARGE[:3]}, ["`out`", "`dweight`"]),
}


@pytest.mark.parametrize("case", ERRORS)
def test_errors(norm, case):
    error, change, pieces = ERRORS[case]
    arguments = {"x": X, "dx": X.copy(), "dbias": ROW.copy(), "out": None} | change
    if case == "no tangent":
        del arguments["dbias"]
    with pytest.raises(error) as caught:
        norm.jvp(arguments.pop("x"), arguments.pop("weight", None), **arguments)
    for piece in pieces:
        assert piece in str(caught.value), str(caught.value)
    assert not LARGE.any() and not X.any()


@pytest.mark.parametrize("layout", ["contiguous", "fortran", "every_other_column", "byte_swapped"])
@pytest.mark.parametrize("count", [1, 2])
def test_extra_memory(norm, threads, layout, count):
    threads(count)
    x = getattr(zoo, layout)(np.ones((1024, 4096), np.float32))
    row = np.ones(4096, np.float32)
    for out in (None, np.empty(x.shape, np.float32)):
        norm.jvp(x[:5], row, dx=x[:5], dweight=row, dbias=row)  # compiles
        tracemalloc.start()
        try:
            dy = norm.jvp(x, row, dx=x, dweight=row, dbias=row, out=out)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert peak - (dy.nbytes if out is None else 0) <= 2**20


def test_is_public(norm):
    assert f"{norm.name}_jvp" in npnorm.__all__
    assert f"{norm.name}_jvp" in npnorm.reference.__all__
