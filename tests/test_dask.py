"""Dask arrays: the same bits as NumPy's in one piece, without a computation before it is asked for."""

import subprocess
import sys
import threading

import numpy as np
import pytest
from bounds import assert_same_bits, check_backward
from table import DTYPES, LAYER_NORM, NORMS, RMS_NORM, parameters, random

import npnorm

dask = pytest.importorskip("dask")
da = pytest.importorskip("dask.array")

SHAPE = (6, 5, 24)
WHOLE_ROWS = [(2, 3, 24), (6, 5, 24), (1, 1, 24), ((1, 3, 2), (4, 1), 24)]
CUT_ROWS = [(2, 5, 7), (6, 5, (1, 22, 1))]

of_norms = pytest.mark.parametrize("norm", NORMS, ids=lambda norm: norm.name)


@pytest.fixture(autouse=True)
def synchronous():
    with dask.config.set(scheduler="synchronous"):
        yield


@pytest.fixture
def nothing_computes():
    """Whatever is computed fails."""

    def refuse(*arguments, **options):
        raise AssertionError("a graph was computed")

    return lambda: dask.config.set(scheduler=refuse)


def lazy(array, chunks):
    return da.from_array(array, chunks)


def assert_same(results, expected):
    """Lazy results with the bits of NumPy's, and what Dask was told of them is true."""
    if not isinstance(results, tuple):
        results, expected = (results,), (expected,)
    assert type(results) is type(expected)
    for result, wanted in zip(results, expected, strict=True):
        if wanted is None:
            assert result is None
            continue
        assert isinstance(result, da.Array)
        assert (result.dtype, result.shape) == (wanted.dtype, wanted.shape)
        assert result._meta.dtype == wanted.dtype and result._meta.ndim == wanted.ndim
        chunks = result.to_delayed()
        places = np.ndindex(chunks.shape)
        for place, chunk in zip(places, dask.compute(*chunks.ravel()), strict=True):
            assert type(chunk) is np.ndarray
            assert chunk.shape == tuple(sizes[i] for sizes, i in zip(result.chunks, place, strict=True))
    for result, wanted in zip(dask.compute(*results), expected, strict=True):
        if wanted is not None:
            assert_same_bits(result, wanted)


@of_norms
@pytest.mark.parametrize("chunks", WHOLE_ROWS + CUT_ROWS, ids=str)
@pytest.mark.parametrize("axis", [-1, (2, -2)], ids=str)
def test_forward_has_the_bits_of_one_piece(norm, chunks, axis, nothing_computes):
    x, residual = random(SHAPE), random(SHAPE, seed=1)
    affine = parameters(SHAPE[-1:] if axis == -1 else SHAPE[-2:], "weight and bias")
    options = {**affine, "axis": axis, "weight_offset": 1.0, "return_stats": True}
    with nothing_computes():
        result = norm.forward(lazy(x, chunks), **options)
        fused = norm.add(lazy(x, chunks), lazy(residual, (3, 5, 8)), **options)
    assert_same(result, norm.forward(x, **options))
    assert_same(fused, norm.add(x, residual, **options))


@pytest.mark.parametrize(
    ("norm", "dtype", "which"),
    [(LAYER_NORM, ">f4", "weight and bias"), (RMS_NORM, "float16", "weight"), (LAYER_NORM, "float64", "bias")]
    + [(RMS_NORM, "bfloat16", "plain")] * ("bfloat16" in DTYPES),
    ids=str,
)
def test_dtypes_and_parameters(norm, dtype, which):
    x, options = random((7, 33), dtype), parameters(33, which, "float64")
    given = {name: None if vector is None else lazy(vector, 8) for name, vector in options.items()}
    given["round_before_weight"] = options["round_before_weight"] = True
    assert_same(norm.forward(lazy(x, (2, 9)), **given), norm.forward(x, **options))


@of_norms
@pytest.mark.parametrize("shape", [(0, 5), (3, 0), (0, 0), (9,), (1, 1), (2, 1, 2, 9)], ids=str)
def test_shapes(norm, shape):
    x, dy, options = random(shape), random(shape, seed=1), parameters(shape[-1:], "weight and bias")
    options["return_stats"] = True
    assert_same(norm.forward(lazy(x, 2), **options), norm.forward(x, **options))
    results = norm.backward(lazy(dy, 3), lazy(x, 2), options["weight"])
    expected = norm.backward(dy, x, options["weight"])
    assert_same((results.dx,), (expected.dx,))
    for name in "dweight", "dbias":
        result, wanted = getattr(results, name), getattr(expected, name)
        assert (result.shape, result.dtype) == (wanted.shape, wanted.dtype)
        np.testing.assert_allclose(result.compute(), wanted, rtol=1e-6)


@of_norms
@pytest.mark.parametrize("chunks", [(2, 3, 24), (6, 1, 5)], ids=str)
@pytest.mark.parametrize("axis", [-1, (-2, -1)], ids=str)
def test_backward(norm, chunks, axis, nothing_computes):
    x, dy, dresidual = (random(SHAPE, seed=seed) for seed in range(3))
    affine = parameters(SHAPE[-1:] if axis == -1 else SHAPE[-2:], "weight and bias")
    saved = norm.saved(norm.forward(x, **affine, axis=axis, return_stats=True))
    options = {"axis": axis, "weight_offset": 0.5}
    with nothing_computes():
        X = lazy(x, chunks)
        lazily_saved = norm.saved(norm.forward(X, **affine, axis=axis, return_stats=True))
        assert lazily_saved.keys() == saved.keys()
        calls = [
            norm.backward(lazy(dy, 4), X, affine["weight"], **given, dresidual=added, **options)
            for given in ({}, lazily_saved, saved)
            for added in (dresidual, lazy(dresidual, (6, 5, 24)))
        ]
    expected = norm.backward(dy, x, affine["weight"], dresidual=dresidual, **options)
    results = [type(expected)(*dask.compute(*gradients)) for gradients in calls]
    check_backward(norm, results[0], dy, x, affine["weight"], dresidual=dresidual, **options)
    for gradients in results:
        assert_same_bits(gradients.dx, expected.dx)
        for name in "dweight", "dbias":
            assert_same_bits(getattr(gradients, name), getattr(results[0], name))


@pytest.mark.parametrize(
    ("norm", "dtype", "weight_dtype"),
    [(LAYER_NORM, "float32", "float32"), (LAYER_NORM, ">f4", "float64"), (RMS_NORM, "float64", None)]
    + [(LAYER_NORM, "bfloat16", None)] * ("bfloat16" in DTYPES),
    ids=str,
)
def test_gradients_of_other_dtypes(norm, dtype, weight_dtype):
    """One chunk has the bits of NumPy's: rounded once, bfloat16 too, and dx does not know of sums in float64."""
    x, dy = random((40, 33), dtype), random((40, 33), dtype, seed=1)
    weight = None if weight_dtype is None else random(33, weight_dtype)
    mask = (True, True, True)
    expected = norm.backward(dy, x, weight, output_mask=mask)
    assert_same(norm.backward(lazy(dy, -1), lazy(x, -1), weight, output_mask=mask), expected)
    gradients = dask.compute(*norm.backward(lazy(dy, 1), lazy(x, 1), weight, output_mask=mask))
    assert_same_bits(gradients[0], expected.dx)
    check_backward(norm, type(expected)(*gradients), dy, x, weight)


@of_norms
@pytest.mark.parametrize("chunks", [(2, 3, 24), (6, 1, 5)], ids=str)
def test_directional_derivatives(norm, chunks, nothing_computes):
    jvp = getattr(npnorm, f"{norm.name}_jvp")
    x, dx, weight, dweight = random(SHAPE), random(SHAPE, "float16", 1), random(24), random(24, seed=2)
    options = {"weight_offset": 1.0, "dweight": dweight, "dbias": weight}
    with nothing_computes():
        result = jvp(lazy(x, chunks), weight, dx=lazy(dx, (3, 5, 8)), **options)
        of_rows = jvp(lazy(x, chunks), dx=dx)
    assert_same(result, jvp(x, weight, dx=dx, **options))
    assert_same(of_rows, jvp(x, dx=dx))


def test_output_mask():
    x, dy, weight = random((7, 33)), random((7, 33), seed=1), random(33)
    X, DY = lazy(x, (3, 33)), lazy(dy, (3, 33))
    assert npnorm.layer_norm_backward(DY, X).dweight is None
    expected = npnorm.layer_norm_backward(DY, X, weight)
    for mask in (False, True, False), (False, False, False):
        gradients = npnorm.layer_norm_backward(DY, X, weight, output_mask=mask, dresidual=X)
        for gradient, wanted, full in zip(gradients, mask, expected, strict=True):
            assert (gradient is not None) == wanted
            if wanted:
                assert_same_bits(gradient.compute(), full.compute())


def test_parts_are_added_without_loss():
    """Every level of a plain tree of eights would lose seven halves of a unit, of which the bound allows 8."""
    dy = np.zeros((512, 1))
    dy[0] = 1
    for step in 1, 8, 64:
        dy[step : 8 * step : step] = 2.0**-53
    mask = (True, True, True)
    gradients = npnorm.rms_norm_backward(lazy(dy, (1, 1)), np.ones((512, 1)), output_mask=mask)
    assert gradients.dbias.compute() == 1 + 21 * 2.0**-53


@pytest.mark.skipif("bfloat16" not in DTYPES, reason="needs ml_dtypes")
def test_gradients_are_rounded_once():
    """By way of float32 the sum would lie halfway between two numbers of bfloat16, and go to the even one, 1."""
    dy = np.array([[1], [2.0**-8], [2.0**-40]]).astype(DTYPES["bfloat16"])
    options = {"output_mask": (True, True, True)}
    dbias = npnorm.layer_norm_backward(lazy(dy, (1, 1)), np.ones_like(dy), **options).dbias
    assert float(dbias.compute()[0]) == 1 + 2.0**-7


def test_infinite_gradients_stay_in_their_columns():
    dy = random((9, 4))
    dy[4] = [np.inf, -np.inf, np.nan, 0]
    dy[7, 0] = -np.inf
    dbias = npnorm.rms_norm_backward(lazy(dy, (2, 4)), random((9, 4), seed=1), random(4)).dbias
    with np.errstate(invalid="ignore"):
        np.testing.assert_allclose(dbias.compute(), dy.sum(axis=0), rtol=1e-5)


def test_gradients_are_the_same_for_every_scheduler_and_configuration():
    x, dy, weight = random((300, 5, 40)), random((300, 5, 40), seed=1), random(40)

    def gradients(**configuration):
        with dask.config.set(configuration):
            lazily = npnorm.layer_norm_backward(lazy(dy, (7, 2, 40)), lazy(x, (7, 2, 40)), weight)
            names.add(lazily.dweight.name)
            return dask.compute(*lazily)

    names = set()
    expected = gradients()
    for configuration in (
        {"scheduler": "threads", "num_workers": 1},
        {"scheduler": "threads", "num_workers": 5},
        {"split_every": 2},
        {"array.chunk-size": "1kiB"},
    ):
        for result, wanted in zip(gradients(**configuration), expected, strict=True):
            assert_same_bits(result, wanted)
    assert len(names) == 1  # the name of a graph follows from the whole tree


@of_norms
def test_unknown_chunk_sizes(norm, nothing_computes):
    x, affine = random(SHAPE), parameters(24, "weight and bias")
    keep = x[:, 0, 0] > 0
    X = lazy(x, (2, 2, 10))
    with nothing_computes():
        X = X[lazy(keep, 2)]
        assert np.isnan(X.shape[0])
        result = norm.add(X, X, **affine, return_stats=True)
        gradients = norm.backward(X, X, affine["weight"], **norm.saved(result), dresidual=X)
    x = x[keep]
    expected = norm.add(x, x, **affine, return_stats=True)
    for one, other in zip(dask.compute(*result), expected, strict=True):
        assert_same_bits(one, other)
    expected = norm.backward(x, x, affine["weight"], **norm.saved(expected), dresidual=x)
    computed = type(expected)(*dask.compute(*gradients))
    assert_same_bits(computed.dx, expected.dx)
    np.testing.assert_allclose(computed.dweight, expected.dweight, rtol=1e-6)


def test_one_dask_array_makes_the_call_lazy():
    x, weight, bias = random((40, 33)), random(33), random(33)
    expected = npnorm.layer_norm(x, weight, bias)
    assert_same(npnorm.layer_norm(x, weight, lazy(bias, 5)), expected)
    assert_same(npnorm.layer_norm(list(x), lazy(weight, 5), bias), expected)
    expected = npnorm.add_layer_norm(x, x, weight, bias, return_stats=True)
    assert_same(npnorm.add_layer_norm(x, lazy(x, (7, 33)), weight, bias, return_stats=True), expected)
    gradients = npnorm.layer_norm_backward(lazy(x, (7, 33)), x, weight)
    assert gradients.dx.chunks == ((7,) * 5 + (5,), (33,))
    assert_same_bits(gradients.dx.compute(), npnorm.layer_norm_backward(x, x, weight).dx)


def test_a_weight_is_taken_as_it_is_at_the_call():
    x, weight, bias = random((4, 8)), random(8), random(8)
    expected = npnorm.layer_norm(x, weight, bias)
    y = npnorm.layer_norm(lazy(x, 2), weight, bias)
    weight[:], bias[:] = 7, 7
    assert_same_bits(y.compute(), expected)


@of_norms
def test_layers(norm, nothing_computes):
    x, dy = random((6, 5, 8)), random((6, 5, 8), seed=1)
    layer = norm.layer((5, 8), bias=True)
    layer.weight = random((5, 8))
    with nothing_computes():
        result = layer(lazy(x, (2, 5, 8)), return_stats=True)
        gradients = layer.backward(lazy(dy, 3), lazy(x, (2, 5, 8)), **norm.saved(result), dresidual=dy)
    expected = layer(x, return_stats=True)
    assert_same(result, expected)
    assert_same_bits(gradients.dx.compute(), layer.backward(dy, x, **norm.saved(expected), dresidual=dy).dx)
    with nothing_computes():
        layer.weight = lazy(layer.weight, 2)
        assert "dtype=float32" in repr(layer)
        result = layer(lazy(x, (2, 5, 8)), return_stats=True)
    assert_same(result, expected)


def test_chunks_of_whole_rows_are_no_larger_than_they_were():
    for shape, chunks in [((100, 1000), (100, 10)), ((30, 30, 1000), (30, 5, 50)), ((3, 1000), (3, 10))]:
        x = da.ones(shape, chunks=chunks)
        y = npnorm.rms_norm(x)
        assert y.numblocks[-1] == 1
        limit = max(np.prod(chunks), shape[-1])
        assert np.prod(y.chunksize) <= limit
    assert npnorm.rms_norm(da.ones((100, 1000), chunks=(7, 1000))).chunks == ((7,) * 14 + (2,), (1000,))


@of_norms
@pytest.mark.parametrize(
    ("error", "message", "change"),
    [
        (ValueError, "`out` must be None for Dask arrays.*got ndarray", {"out": np.empty((6, 8))}),
        (ValueError, r"`weight` must have shape \(8,\).*got \(7,\)", {"weight": np.ones(7)}),
        (ValueError, r"`bias` must have shape \(8,\).*got \(9,\)", {"bias": da.ones(9)}),
        (ValueError, "`eps` must be a finite real number", {"eps": -1.0}),
        (ValueError, "`axis` must name the trailing axes", {"axis": 0}),
        (np.exceptions.AxisError, "out of bounds", {"axis": 2}),
        (TypeError, r"`x`.*got int64: write x.astype\(np.float32\)", {"x": da.ones((6, 8), dtype=int)}),
        (TypeError, "`weight` must have dtype.*got bool", {"weight": da.ones(8, dtype=bool)}),
        (TypeError, "`x`.*got chunks of numpy.ma.*filled", {"x": da.ma.masked_equal(da.ones((6, 8)), 2)}),
    ],
    ids=lambda value: None if isinstance(value, type) else "-".join(value) if isinstance(value, dict) else "",
)
def test_errors_come_before_a_computation(norm, error, message, change, nothing_computes):
    arguments = {"x": da.ones((6, 8), chunks=(2, 8)), "weight": np.ones(8), "bias": None, **change}
    with nothing_computes(), pytest.raises(error, match=message):
        norm.forward(**arguments)


@of_norms
def test_errors_of_several_arrays(norm, nothing_computes):
    X = da.ones((6, 8), chunks=(2, 8))
    unknown = X[X[:, 0] > 0]
    x = np.ones((6, 8))
    wrong = [
        (lambda: norm.backward(X, X[:4]), r"`dy` must have shape \(4, 8\)"),
        (lambda: norm.add(X, X[:4]), r"`residual` must have shape \(6, 8\)"),
        (lambda: norm.backward(X, X, rstd=X), r"`rstd` must have shape \(6, 1\)"),
        (lambda: norm.backward(X, X, out=(x, None, None)), "`out` must be None for Dask arrays"),
        (lambda: norm.add(X, X, residual_out=x), "`residual_out` must be None"),
        (lambda: norm.forward(unknown.T), "`x` must be of known lengths on the normalized axes"),
        (lambda: norm.forward(X, unknown[:, 0]), "`weight` must be of known lengths"),
        (lambda: norm.backward(x, unknown), "`dy` must be a Dask array in the same chunks.*got ndarray"),
        (lambda: norm.backward(unknown, x), "`x` must be a Dask array in the same chunks.*got ndarray"),
        (lambda: norm.backward(X, unknown), "`dy` must be .* in the same chunks.*got chunks"),
        (lambda: norm.backward(da.concatenate([unknown, unknown]), unknown), "`dy` must be .* in the same chunks"),
        (lambda: norm.layer(7)(X), r"`x` must end in the axes \(7,\)"),
    ]
    for call, message in wrong:
        with nothing_computes(), pytest.raises(ValueError, match=message):
            call()
    with pytest.raises(TypeError, match=r"`out\[0\]` must be a NumPy array; got Array"):
        norm.backward(x, x, out=(X, None, None))
    expected = "`residual` must have shape"  # the lengths differ, which only the task can see
    with pytest.raises(ValueError, match=expected):
        norm.add(unknown, X[X[:, 0] > 1]).y.compute()


def test_tasks_keep_to_their_thread(threads, monkeypatch):
    from npnorm.cpu import pool

    threads(4)
    x, weight = np.ones((600, 1024), np.float32), np.ones(1024, np.float32)
    seen = []
    started = pool._Pool.grow
    monkeypatch.setattr(pool._Pool, "grow", lambda self, count: seen.append(count) or started(self, count))
    npnorm.layer_norm(x, weight, weight)
    npnorm.layer_norm_backward(x, x, weight)
    assert len(seen) == 2  # large enough for threads
    X = lazy(x, -1)
    for scheduler in "synchronous", "threads":
        with dask.config.set(scheduler=scheduler):
            npnorm.layer_norm(X, weight, weight).compute()
            dask.compute(*npnorm.layer_norm_backward(X, X, weight))
    assert len(seen) == 2
    assert npnorm.get_num_threads() == 4


def test_one_thread_alone_leaves_the_others_as_they_are(threads):
    from npnorm._threads import alone

    threads(3)
    there = []
    with alone():
        with alone():
            pass
        assert npnorm.get_num_threads() == 1
        other = threading.Thread(target=lambda: there.append(npnorm.get_num_threads()))
        other.start()
        other.join()
    with pytest.raises(KeyError), alone():
        raise KeyError
    assert npnorm.get_num_threads() == 3 and there == [3]


def example():
    """Lazy results, and what they must be."""
    x, dy, weight, bias = random((64, 40)), random((64, 40), seed=1), random(40), random(40)
    X, options = lazy(x, (9, 13)), {"dresidual": dy}
    y, mean, rstd = npnorm.layer_norm(X, weight, bias, return_stats=True)
    gradients = npnorm.layer_norm_backward(lazy(dy, 20), X, weight, mean=mean, rstd=rstd, **options)
    expected = npnorm.layer_norm(x, weight, bias, return_stats=True)
    dx = npnorm.layer_norm_backward(dy, x, weight, **options).dx
    dweight = gradients.dweight.compute(scheduler="synchronous")
    return (y, mean, rstd, gradients.dx, gradients.dweight), (*expected, dx, dweight)


def check(results, expected):
    for result, wanted in zip(results, expected, strict=True):
        assert_same_bits(result, wanted)


def test_threaded_scheduler():
    lazily, expected = example()
    check(dask.compute(*lazily, scheduler="threads"), expected)


def test_process_scheduler():
    lazily, expected = example()
    check(dask.compute(*lazily, scheduler="processes", num_workers=1), expected)


@pytest.mark.parametrize("processes", [False, True], ids=["threads", "processes"])
def test_distributed_scheduler(processes):
    distributed = pytest.importorskip("distributed")
    lazily, expected = example()
    options = {"n_workers": 1, "threads_per_worker": 2, "dashboard_address": ":0"}
    with (
        dask.config.set(scheduler=None),
        distributed.LocalCluster(processes=processes, **options) as cluster,
        distributed.Client(cluster) as client,
    ):
        results = client.gather(client.compute(list(lazily)))
    check(results, expected)


MEMORY = """
import sys
import dask, dask.array as da, numpy as np, zarr, npnorm

dask.config.set(scheduler="threads", num_workers=2)
options = {"shape": (100_000, 1000), "chunks": (2000, 1000), "dtype": "float32", "compressors": None}
x, y = (zarr.create_array(f"{sys.argv[1]}/{name}", **options) for name in "xy")
some = np.random.default_rng(0).standard_normal((2000, 1000), np.float32)
for start in range(0, 100_000, 2000):
    x[start : start + 2000] = some
weight = np.ones(1000, np.float32)

def norm(x, y):
    result = npnorm.layer_norm(x, weight, weight)
    gradients = npnorm.layer_norm_backward(x, x, weight, output_mask=(False, True, False))
    dask.compute(da.store(result, y, compute=False, lock=False), gradients.dweight)

def peak():
    # Not ru_maxrss, in which the memory of the process that started this one counts.
    with open("/proc/self/status") as status:
        (line,) = (line for line in status if line.startswith("VmHWM"))
    return int(line.split()[1]) // 1024

lazy = da.from_zarr(x)
norm(lazy[:10], np.empty((10, 1000), np.float32))  # compiles
before = peak()
norm(lazy, y)
print(peak() - before)
np.testing.assert_array_equal(y[-3:], npnorm.layer_norm(some[-3:], weight, weight))
norm(da.from_array(lazy.compute(), lazy.chunks), y)
print(peak() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the peak is read from /proc")
def test_peak_memory_of_an_array_on_disk(tmp_path):
    """400 MB are normed, and their gradients added up, in less than 150 MB; loading them would be noticed."""
    pytest.importorskip("zarr")
    command = [sys.executable, "-c", MEMORY, str(tmp_path)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    streamed, loaded = map(int, run.stdout.split())
    assert streamed < 150
    assert loaded > 380


@pytest.mark.parametrize("dask_option", ["parallelized", "allowed"])
def test_xarray(dask_option):
    xarray = pytest.importorskip("xarray")
    x, weight = random((6, 5, 8)), random(8)
    array = xarray.DataArray(x, dims=("time", "place", "channel")).chunk(time=2)
    y = xarray.apply_ufunc(
        npnorm.layer_norm,
        array,
        kwargs={"weight": weight, "bias": weight},
        input_core_dims=[["channel"]],
        output_core_dims=[["channel"]],
        dask=dask_option,
        output_dtypes=[x.dtype],
    )
    assert isinstance(y.data, da.Array)
    assert_same_bits(y.values, npnorm.layer_norm(x, weight, weight))


def test_dask_is_not_imported():
    code = """
import sys
import numpy as np
import npnorm
x = np.ones((2, 3), np.float32)
npnorm.layer_norm(x, x, x, axis=(0, 1))
npnorm.LayerNorm(3)(x)
assert not [name for name in sys.modules if name.split(".")[0] in ("dask", "distributed")]
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_graphs_of_equal_calls_are_equal():
    """So that Dask computes what they share once."""
    x, weight = random((6, 8)), random(8)
    one, other = (npnorm.layer_norm(lazy(x, 2), weight) for _ in range(2))
    assert one.name == other.name
    assert one.name != npnorm.layer_norm(lazy(x, 2), 2 * weight).name
    assert one.name != npnorm.layer_norm(lazy(x, 2), weight, eps=1e-3).name
    assert LAYER_NORM.backward(lazy(x, 2), lazy(x, 2)).dx.name != one.name
