"""Calls on arrays of any layout, from the public functions to the kernels' own source: only the driver stands in."""

import itertools
import math

import device
import numpy as np
import pytest
import support
from bounds import assert_same_bits, check_backward
from device import Interface
from table import NORMS, random
from zoo import byte_swapped

from npnorm._results import NormGradients
from npnorm.cuda import driver, simulated, table, total
from npnorm.cuda.addresses import make_place, make_row_start

norms = pytest.mark.parametrize("norm", NORMS, ids=lambda norm: norm.name)


@pytest.fixture
def gpu(monkeypatch):
    """A driver whose launches run on the simulated GPU, in small blocks."""
    recording = device.install(monkeypatch)
    monkeypatch.setattr(table, "FORWARD_BLOCK", 8)
    monkeypatch.setattr(table, "BACKWARD_BLOCK", 8)
    simulated.MEMORY.clear()
    hold = recording.memory.hold

    def held(array):
        simulated.held(array if array.base is None else array.base)
        return hold(array)

    def launch(what, arguments, stream):
        recording.events.append(("launch", what, arguments, stream))
        support.launch(what, arguments)

    monkeypatch.setattr(recording.memory, "hold", held)
    monkeypatch.setattr(driver, "launch", launch)
    return recording


def permuted(*order):
    """Axes that lie in memory in another order."""
    return lambda array: np.array(array.transpose(order), order="C").transpose(np.argsort(order))


def sliced(array):
    """Every second index of each lead axis, in reverse, among poison."""
    *lead, cols = array.shape
    base = np.full((*(2 * length for length in lead), cols + 8), np.nan, array.dtype)
    view = base[(*len(lead) * (slice(None, None, -2),), slice(4, -4))]
    view[...] = array
    return view


def broadcast(array):
    """One block for every index of the first lead axis and of the third."""
    return np.broadcast_to(np.array(array[:1, :, :1]), array.shape)


MIXES = {
    "permuted": (4 * [permuted(2, 0, 1, 3)], (2, 3, 4), 2),
    "reversed order": (4 * [permuted(2, 1, 0, 3)], (2, 3, 4), 4),
    "sliced": (4 * [sliced], (2, 3, 4), 4),
    "sliced twice": (4 * [lambda array: sliced(array)], (3, 7), 2),
    "broadcast": ([broadcast, broadcast, np.array, np.array], (2, 3, 4), 4),
    "two and two": ([permuted(1, 0, 2), np.array, sliced, permuted(1, 0, 2)], (3, 7), 2),
    "each its own": ([permuted(0, 2, 1, 3), broadcast, sliced, permuted(1, 2, 0, 3)], (2, 3, 4), 4),
    "six axes": (4 * [permuted(4, 2, 0, 5, 3, 1, 6)], (2, 1, 2, 2, 3, 2), 8),
    "six axes and one": ([*3 * [np.array], permuted(4, 2, 0, 3, 1, 5, 6)], (2, 1, 2, 2, 3, 2), 8),
}
"""For two inputs and two more arrays, how they are laid; the lead axes; and for how many a kernel is compiled."""

mixes = pytest.mark.parametrize("mix", MIXES)


def arrays_of(mix, dtype):
    """Four arrays, laid as a mix says, and copies of them."""
    layouts, lead, _ = MIXES[mix]
    arrays = [random((*lead, 8), dtype, seed, offset=3.0) for seed in range(4)]
    arrays = [layout(array) for layout, array in zip(layouts, arrays, strict=True)]
    return arrays, [np.array(array, order="C") for array in arrays]


def bytes_apart(array):
    """Rows that begin in the middle of an element, and another number of bytes after each other."""
    rows, cols = array.shape
    size, step = array.itemsize, cols * array.itemsize + 3
    memory = np.full(rows * step + size, 0xA5, np.uint8)
    view = np.ndarray(array.shape, array.dtype, memory, size // 2, (step, size))
    view[...] = array
    return view


def both(array):
    return bytes_apart(byte_swapped(array))


ODD = {
    "byte-swapped": 4 * [byte_swapped],
    "bytes apart": 4 * [bytes_apart],
    "each its own": [byte_swapped, np.array, both, bytes_apart],
    "each another": [bytes_apart, both, byte_swapped, np.array],
}

odd = pytest.mark.parametrize(
    "mix, dtype",
    [
        *itertools.product(ODD, ("float16", "float32")), ("bytes apart", "bfloat16"),
        ("byte-swapped", "float64"), ("each its own", "float64"),
    ],
)  # fmt: skip


def check_odd(gpu, outputs, expected):
    """Outputs have the expected bits, and nothing around them is written; one launch of each kernel, and no copy."""
    for output, right in zip(outputs, expected, strict=True):
        assert_same_bits(np.array(output, right.dtype), right)
        if output.base is not None:
            memory = output.base.copy()
            np.ndarray(output.shape, output.dtype, memory, output.itemsize // 2, output.strides)[...] = 0
            assert (memory == 0xA5).sum() == memory.size - output.nbytes
    kinds = [launch.spec.kind for launch, *_ in gpu.launches()]
    assert len(kinds) == len(set(kinds)) and "copy" not in kinds


def put(gpu, *arrays):
    return [Interface(gpu.memory.hold(array)) for array in arrays]


def content(gpu, *results):
    return [np.array(gpu.memory.view(r.pointer, r.shape, r.strides, r.dtype)) for r in results]


def check(gpu, mix, kinds, outputs, expected):
    """Outputs have the expected bits; nothing was copied, and each kernel launched once."""
    for output, right in zip(outputs, expected, strict=True):
        assert_same_bits(np.array(output), right)
    assert [launch.spec.kind for launch, *_ in gpu.launches()] == kinds
    assert {launch.spec.lead for launch, *_ in gpu.launches() if launch.spec.kind != "total"} == {MIXES[mix][2]}


@pytest.mark.parametrize("lead", [1, 2, 4])
def test_far_rows(lead):
    """Rows, strides and offsets of more than 32 bits, as arrays of more than 2^31 elements have them."""
    base, size = np.int64(2**47), 2
    lengths = tuple(map(np.int64, (2**33, 5, 3, 2**20)[:lead]))
    strides = tuple(map(np.int64, (2**24 - 1, 2**32 + 3, -(2**31), 2**9)[:lead]))
    for place in ((2**32 + 1, 4, 2, 2**20 - 1)[:lead], (2**31, 0, 1, 2**16 + 1)[:lead]):
        row = sum(index * math.prod(map(int, lengths[axis + 1 :])) for axis, index in enumerate(place))
        assert make_place(lead)(np.int64(row), lengths) == place
        start = int(base) + sum(index * int(stride) * size for index, stride in zip(place, strides, strict=True))
        assert make_row_start(lead)(base, tuple(map(np.int64, place)), strides, size) == start


@norms
@mixes
def test_forward(norm, gpu, mix):
    """x, the residual, y and the sum, each in a layout of its own."""
    (x, residual, y, total), (plain_x, plain_residual, *_) = arrays_of(mix, "float32")
    options = {"eps": 1e-3, "return_stats": True}
    expected = content(gpu, *norm.add(*put(gpu, plain_x, plain_residual), **options))
    gpu.events.clear()
    out, residual_out = put(gpu, y, total)
    _, _, *statistics = norm.add(*put(gpu, x, residual), out=out, residual_out=residual_out, **options)
    check(gpu, mix, ["forward"], [y, total, *content(gpu, *statistics)], expected)


@norms
@pytest.mark.parametrize("mix, wide", [*((mix, False) for mix in MIXES), ("each its own", True)])
def test_backward(norm, gpu, monkeypatch, mix, wide):
    """dy, x, dresidual and dx, with statistics that are computed on the way; very wide rows take two launches."""
    if wide:
        monkeypatch.setattr(table, "_backward_shape", lambda plan, cols: (2, 1, "looped"))
    (dy, x, dresidual, dx), (plain_dy, plain_x, plain_dresidual, _) = arrays_of(mix, "bfloat16")
    mask = (True, mix == "each its own", False)
    plain = dict(zip(("dy", "x", "dresidual"), put(gpu, plain_dy, plain_x, plain_dresidual), strict=True))
    wanted = norm.backward(**plain, output_mask=mask)
    expected = content(gpu, *(gradient for gradient in wanted if gradient is not None))
    gpu.events.clear()
    laid = dict(zip(("dy", "x", "dresidual"), put(gpu, dy, x, dresidual), strict=True))
    (out,) = put(gpu, dx)
    _, dweight, _ = norm.backward(**laid, output_mask=mask, out=(out, None, None))
    outputs = [dx] if dweight is None else [dx, *content(gpu, dweight)]
    kinds = ["forward", *wide * ["sums"], "backward", *mask[1] * ["total"]]
    check(gpu, mix, kinds, outputs, expected)


@norms
@pytest.mark.parametrize(
    "lay, lay_x, x, dy, parameter",
    [
        (np.array, np.array, *3 * ("float32",)), (sliced, np.array, *3 * ("bfloat16",)),
        (bytes_apart, byte_swapped, "float16", "bfloat16", "float64"), (both, bytes_apart, *3 * ("float32",)),
    ],
)  # fmt: skip
def test_sums_beyond_float32(norm, gpu, monkeypatch, lay, lay_x, x, dy, parameter):
    """Terms, and sums of some of the rows, beyond float32, and dweight and dbias within; other columns keep their
    bits."""
    for module in (table, total):
        monkeypatch.setattr(module, "SLICES", 2)
        monkeypatch.setattr(module, "COLUMNS", 8)
    shape = (3, 4, 19) if lay is sliced else (12, 19)
    x, dy, weight = random(shape, x), random(shape, dy, 1, scale=1e-3), random(19, parameter, 2)
    mask = False, True, True
    mild = content(gpu, *norm.backward(*put(gpu, dy, x, weight), output_mask=mask)[1:])
    rows = dy.reshape(12, 19)
    rows[:11, 3] = [3e38, 3e38, 3e38, -3e38, -3e38, -3e38, 2.0, 3.0, 3e38, 3e38, -3e38]
    rows[1:, [6, 18]] = rows[:11, 3:4]
    rows[9, 7] = np.nan
    rows[:, 8] = 3e38
    rows[7, 9], rows[8, 10] = np.inf, -np.inf
    gradients = norm.backward(*put(gpu, lay(dy), lay_x(x), weight), output_mask=mask)
    dweight, dbias = content(gpu, *gradients[1:])
    check_backward(norm, NormGradients(None, dweight, dbias), dy, x, weight)
    assert np.isfinite(dbias[[3, 6, 18]]).all()
    assert np.isinf(dbias[8]) == (parameter != "float64")
    kept = np.delete(np.arange(19), [3, 6, 7, 8, 9, 10, 18])
    for gradient, before in zip((dweight, dbias), mild, strict=True):
        assert_same_bits(gradient[kept], before[kept])


def test_errors_beyond_float32(gpu, monkeypatch):
    """A sum that float32 holds at last, on the way to which an addition overflowed in finding what it lost."""
    monkeypatch.setattr(table, "ROWS_A_PARTIAL", 64)
    monkeypatch.setattr(table, "BACKWARD_BLOCK", 1)
    largest, ulp = float(np.finfo(np.float32).max), 2.0**104
    x, dy = random((60, 4)), np.zeros((60, 4), np.float32)
    dy[:, 3] = ulp * 0.225
    dy[0, 3], dy[-7:, 3] = largest / 2, [-largest / 2, -1.5 * ulp, largest, -largest, 2.5 * ulp, -largest, largest]
    gradients = NORMS[0].backward(*put(gpu, dy, x), output_mask=(False, False, True))
    (dbias,) = content(gpu, gradients[2])
    check_backward(NORMS[0], NormGradients(None, None, dbias), dy, x)


@norms
def test_sums_beyond_float32_in_place(norm, gpu):
    """dx over dy or x: such a column is not finite, rather than wrong."""
    for place in range(2):
        inputs = [random((12, 8), seed=seed) for seed in (1, 0)]
        inputs[0][:, 3] = np.repeat([3e38, -3e38], 6)
        given = put(gpu, *inputs)
        gradients = norm.backward(*given, output_mask=(True, True, True), out=(given[place], None, None))
        for gradient in content(gpu, *gradients[1:]):
            assert not np.isfinite(gradient[3])
            assert np.isfinite(np.delete(gradient, 3)).all()


def odd_forward(norm, gpu, mix, dtype):
    x, residual, y, total = (random((3, 20), dtype, seed, offset=3.0) for seed in range(4))
    weight, bias = (random(20, dtype, seed) for seed in (4, 5))
    parameters = put(gpu, weight, bias)[: 2 if norm.centered else 1]
    options = {"eps": 1e-3, "return_stats": True}
    expected = content(gpu, *norm.add(*put(gpu, x, residual), *parameters, **options)[:2])
    gpu.events.clear()
    x, residual, total, y = (lay(array) for lay, array in zip(ODD[mix], (x, residual, total, y), strict=True))
    out, residual_out = put(gpu, y, total)
    norm.add(*put(gpu, x, residual), *parameters, out=out, residual_out=residual_out, **options)
    check_odd(gpu, [y, total], expected)
    assert not any(event[0] == "allocate" and event[1] > 8 * 3 for event in gpu.events)


@norms
@odd
def test_odd_forward(norm, gpu, mix, dtype):
    """Rows at any address and in any byte order have the bits of ordinary ones, and are taken as they are."""
    odd_forward(norm, gpu, mix, dtype)


@pytest.mark.parametrize("shared", [table.SHARED, 0])
def test_odd_forward_of_wide_rows(gpu, monkeypatch, shared):
    """Rows that stay in shared memory, or are read again."""
    monkeypatch.setattr(table, "forward_threads", lambda chunks: 1)
    monkeypatch.setattr(table, "SHARED", shared)
    monkeypatch.setattr(table, "FORWARD_BLOCK", 1)
    odd_forward(NORMS[0], gpu, "each another", "float32")
    (mode,) = {launch.spec.mode for launch, *_ in gpu.launches()}
    assert mode == ("shared" if shared else "looped")


def odd_backward(norm, gpu, mix, dtype):
    mask = True, mix == "each its own", False
    dy, x, dresidual, dx = (random((3, 20), dtype, seed, offset=3.0) for seed in range(4))
    (weight,) = put(gpu, random(20, dtype, 4))
    plain = dict(zip(("dy", "x", "dresidual"), put(gpu, dy, x, dresidual), strict=True))
    expected = norm.backward(**plain, weight=weight, output_mask=mask)
    expected = content(gpu, *(gradient for gradient in expected if gradient is not None))
    gpu.events.clear()
    dy, x, dresidual, dx = (lay(array) for lay, array in zip(ODD[mix], (dy, x, dresidual, dx), strict=True))
    laid = dict(zip(("dy", "x", "dresidual"), put(gpu, dy, x, dresidual), strict=True))
    (out,) = put(gpu, dx)
    _, dweight, _ = norm.backward(**laid, weight=weight, output_mask=mask, out=(out, None, None))
    check_odd(gpu, [dx, *content(gpu, *mask[1] * [dweight])], expected)


@norms
@odd
def test_odd_backward(norm, gpu, mix, dtype):
    odd_backward(norm, gpu, mix, dtype)


@pytest.mark.parametrize("mode, vectors", [("looped", 1), ("cached", 3)])
def test_odd_backward_of_wide_rows(gpu, monkeypatch, mode, vectors):
    """Rows that are read again, by the same kernel or by a second one."""
    monkeypatch.setattr(table, "_backward_shape", lambda plan, cols: (2, vectors, mode))
    odd_backward(NORMS[0], gpu, "each its own", "float32")
