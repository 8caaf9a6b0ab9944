"""Streams, outputs, workspaces and the library of the result; no GPU is needed, see device.py."""

from types import SimpleNamespace

import device
import numpy as np
import pytest
from bounds import assert_same_bits
from device import CURRENT, Capsule, Interface
from table import NORMS, random

import npnorm.cuda
from npnorm import _backend
from npnorm.cuda import DeviceArray, workspace_bytes

pytestmark = pytest.mark.parametrize("norm", NORMS, ids=lambda norm: norm.name)


@pytest.fixture
def gpu(monkeypatch):
    return device.install(monkeypatch)


@pytest.fixture
def lent(gpu):
    """Host arrays as device arrays, on a stream."""

    def lend(array, stream=None):
        return Interface(gpu.memory.hold(array), stream)

    return lend


def streams(gpu):
    """The streams of all that was asked of the driver."""
    found = {event[-1] for event in gpu.events if event[0] in ("launch", "fill", "allocate")}
    assert len(found) == 1
    return found.pop()


def orders(gpu):
    return [event[1:] for event in gpu.events if event[0] == "order"]


# Streams.


def test_the_stream_of_x(norm, gpu, lent):
    for stream, right in ((None, 1), (1, 1), (2, 2), (4096, 4096)):
        gpu.events.clear()
        result = norm.forward(lent(random((3, 8)), stream))
        assert streams(gpu) == right and not orders(gpu)
        assert result.stream == right == result.__cuda_array_interface__["stream"]
    gpu.events.clear()
    norm.forward(Capsule(gpu.memory.hold(random((3, 8)))))
    assert streams(gpu) == 1 and not orders(gpu)


@pytest.mark.parametrize(
    "stream",
    [
        7, np.int64(7), SimpleNamespace(__cuda_stream__=lambda: (0, 7)), SimpleNamespace(cuda_stream=7),
        SimpleNamespace(ptr=7), SimpleNamespace(handle=7), SimpleNamespace(handle=SimpleNamespace(value=7)),
    ],
    ids=["int", "numpy", "protocol", "torch", "cupy", "numba", "ctypes"],
)  # fmt: skip
def test_a_given_stream(norm, gpu, lent, stream):
    x, dy, weight = lent(random((3, 8))), lent(random((3, 8), seed=1)), lent(random(8))
    for call in (
        lambda: norm.forward(x, weight, stream=stream, return_stats=True),
        lambda: norm.add(x, dy, weight, stream=stream),
        lambda: norm.backward(dy, x, weight, stream=stream),
        lambda: norm.forward(lent(np.empty((3, 0), np.float32)), stream=stream, return_stats=True),
        lambda: norm.backward(*2 * (lent(np.empty((0, 8), np.float32)),), weight, stream=stream),
    ):
        gpu.events.clear()
        call()
        assert streams(gpu) == 7 and not orders(gpu)


def test_dlpack_on_a_given_stream(norm, gpu, monkeypatch):
    """Arrays are asked to be ready on it, in the first call too, and no other stream is spoken of: so it can be
    captured."""
    monkeypatch.setattr(_backend, "device_calls", None)
    arrays = random((3, 8)), random((3, 8), seed=1), random(8), random((3, 8))
    x, dy, weight, y = (Capsule(gpu.memory.hold(array)) for array in arrays)
    for stream, right in ((7, 7), (SimpleNamespace(ptr=7), 7), (0, 1), (None, 1)):
        gpu.events.clear()
        norm.forward(x, weight, out=y, stream=stream)
        result = norm.backward(dy, x, weight, stream=stream)
        assert streams(gpu) == right == result.dx.stream and not orders(gpu)
        assert x.streams[-2:] == [right] * 2 and dy.streams[-1] == weight.streams[-1] == y.streams[-1] == right


def test_the_default_stream(norm, gpu, lent):
    for stream in (0, SimpleNamespace(cuda_stream=0), SimpleNamespace(handle=SimpleNamespace(value=None))):
        gpu.events.clear()
        norm.forward(lent(random((3, 8))), stream=stream)
        assert streams(gpu) == 1


def test_what_is_no_stream(norm, gpu, lent):
    x = lent(random((3, 8)))
    for stream in (True, np.bool_(1), "1", 1.0, object(), SimpleNamespace, SimpleNamespace(ptr=None), -1, 2**64):
        error = ValueError if type(stream) is int else TypeError
        with pytest.raises(error, match="`stream` must be the address of a stream, .*; got "):
            norm.forward(x, stream=stream)
    for found in (7, (7,), (0, None), (0, 7.0), (0, "7"), (0, -1), (0, 2**70)):
        error = ValueError if found in ((0, -1), (0, 2**70)) else TypeError
        with pytest.raises(error, match=r"`stream.__cuda_stream__\(\)` must give a version and the address.*; got "):
            norm.forward(x, stream=SimpleNamespace(__cuda_stream__=lambda found=found: found))
    with pytest.raises(TypeError, match="`stream.__cuda_stream__` must be a method .* got a tuple of a Simple"):
        norm.forward(x, stream=SimpleNamespace(__cuda_stream__=(0, 7)))
    for name in ("cuda_stream", "ptr", "handle"):
        for found in ("abc", "", 5.7, np.float32(0), True, (1, 2), -3, 2**70, SimpleNamespace(value="7")):
            error = ValueError if type(found) is int else TypeError
            with pytest.raises(error, match=f"`stream.{name}` must be the address of a stream.*; got .* of a Simple"):
                norm.forward(x, stream=SimpleNamespace(**{name: found}))
    assert not gpu.launches()


def test_streams_are_ordered(norm, gpu, lent):
    """Before the work for each other stream of an array, once; after it in the other direction."""
    x, residual, weight = lent(random((3, 8)), 5), lent(random((3, 8), seed=1), 6), lent(random(8), 6)
    y, total = lent(np.empty((3, 8), np.float32), 8), lent(np.empty((3, 8), np.float32), 5)
    norm.add(x, residual, weight, out=y, residual_out=total)
    names = [event[0] if event[0] != "order" else event for event in gpu.events if event[0] not in ("on", "device_of")]
    assert names == [("order", 6, 5), ("order", 8, 5), "launch", ("order", 5, 6), ("order", 5, 8)]
    gpu.events.clear()
    norm.backward(lent(random((3, 8)), 5), x, weight, stream=9)
    assert orders(gpu) == [(5, 9), (6, 9), (9, 5), (9, 6)]
    launched = [i for i, event in enumerate(gpu.events) if event[0] == "launch"]
    ordered = [i for i, event in enumerate(gpu.events) if event[0] == "order"]
    assert ordered[1] < min(launched) and max(launched) < ordered[2]


def test_the_device_of_x(norm, gpu, lent):
    """It is current while arrays are made and kernels launched, and what was current is so again."""
    x = Capsule(gpu.memory.hold(random((3, 8))), (2, 1))
    assert norm.forward(x).device == 1
    assert ("on", 1) in gpu.events and gpu.device == 0 and "device_of" not in gpu.names()
    gpu.events.clear()
    norm.forward(lent(random((3, 8))))
    assert gpu.names()[:2] == ["device_of", "on"]
    gpu.events.clear()
    norm.forward(lent(np.empty((0, 8), np.float32)))
    assert gpu.events == [("on", None)] or "device_of" in gpu.names()


# Outputs and workspaces: nothing is allocated.


def test_nothing_is_allocated(norm, gpu, lent):
    x, dy, weight = (lent(random(shape, seed=seed)) for seed, shape in enumerate(((64, 40), (64, 40), (40,))))
    y, total = (lent(np.empty((64, 40), np.float32)) for _ in range(2))
    assert norm.forward(x, weight, out=y) is y
    assert norm.add(x, dy, weight, out=y, residual_out=total) == (y, total)
    out = lent(np.empty((64, 40), np.float32)), lent(np.empty(40, np.float32)), lent(np.empty(40, np.float32))
    size = workspace_bytes(norm.backward, dy, x, weight, out=out)
    assert size > 0
    room = aligned(size)
    assert norm.backward(dy, x, weight, out=out, workspace=lent(room)) == out
    assert set(gpu.names()) <= {"on", "launch", "device_of"}
    for got, right in zip(out, norm.reference("backward")(dy.array, x.array, weight.array), strict=True):
        assert_same_bits(got.array, right)


def aligned(size, offset=0):
    """Bytes at a multiple of 256, and an offset."""
    room = np.zeros(size + 512, np.uint8)
    start = -device.address(room) % 256 + offset
    return room[start : start + size]


def test_workspaces(norm, gpu, lent):
    x, dy, weight = random((64, 40)), random((64, 40), seed=1), random(40)
    arrays = [lent(array) for array in (dy, x, weight)]
    size = workspace_bytes(norm.backward, *arrays)
    assert size == workspace_bytes(norm.backward, dy, x, weight), "host arrays tell the same"
    for dtype in ("uint8", "float32", "int64"):
        gpu.events.clear()
        room = aligned(-(-size // 8) * 8).view(dtype)
        norm.backward(*arrays, workspace=lent(room, 5))
        # A workspace's own stream waits, too.
        assert orders(gpu) == [(5, 1), (1, 5)]
        assert sum(event[0] == "allocate" for event in gpu.events) == 3
    with pytest.raises(ValueError, match=rf"`workspace` must have at least {size} bytes .* got {size - 1}"):
        norm.backward(*arrays, workspace=lent(aligned(size - 1)))
    for room in (aligned(size, 8), aligned(2 * size)[::2], read_only(size)):
        with pytest.raises(ValueError, match="`workspace` must be a contiguous, writable array"):
            norm.backward(*arrays, workspace=lent(room))
    for room in ([0] * size, np.zeros(size, np.uint8), 5):
        with pytest.raises(TypeError, match="`workspace` must be a contiguous, writable array on the CUDA device"):
            norm.backward(*arrays, workspace=room)


def read_only(size):
    room = aligned(size)
    room.flags.writeable = False
    return room


def test_workspace_of_odd_layouts(norm, gpu, lent):
    """It has room for the copies that stand in for arrays, and the result is the same with it."""
    x, dy, weight = random((64, 80))[:, ::2], np.asfortranarray(random((64, 40), seed=1)), random(80)[::2]
    arrays = [lent(array) for array in (dy, x, weight)]
    size = workspace_bytes(norm.backward, *arrays)
    assert size > workspace_bytes(norm.backward, *(np.array(a, order="C") for a in (dy, x, weight))) + dy.nbytes
    room = aligned(size)
    out = (lent(np.empty((40, 64), np.float32).T), lent(np.empty(40, np.float32)), lent(np.empty(40, np.float32)))
    size = workspace_bytes(norm.backward, *arrays, out=out)
    room = aligned(size)
    norm.backward(*arrays, out=out, workspace=lent(room))
    assert "allocate" not in gpu.names()
    for got, right in zip(out, norm.reference("backward")(dy, x, weight), strict=True):
        assert_same_bits(np.array(got.array), right)


def test_workspace_bytes(norm):
    x = np.empty((64, 40), np.float32)
    statistics = {"rstd": np.empty((64, 1))} | ({"mean": np.empty((64, 1))} if norm.centered else {})
    assert workspace_bytes(norm.backward, x, x, **statistics) == 0
    assert workspace_bytes(norm.backward, x, x, x[0], **statistics) > 0
    assert workspace_bytes(norm.backward, x[:0], x[:0], x[0]) == 0
    assert workspace_bytes(norm.backward, x, x, x[0], output_mask=(False, False, False)) == 0
    with pytest.raises(TypeError, match="`function` must be npnorm.layer_norm_backward or"):
        workspace_bytes(norm.forward, x)
    with pytest.raises(ValueError, match="`dy` must have shape"):
        workspace_bytes(norm.backward, x[:1], x)


# The library of the result.


def test_own_results(norm, gpu, lent):
    result = norm.forward(lent(random((3, 8)), 5), return_stats=True)
    assert all(type(array) is DeviceArray for array in result)
    assert result.y.owner is not None and result.y.device == 0
    assert norm.forward(result.y).shape == (3, 8), "what comes out goes in"
    assert norm.forward(lent(np.empty((0, 8), np.float32))).pointer == 0


def test_cupy(norm, gpu, monkeypatch):
    cupy = device.install_cupy(monkeypatch, gpu)
    x, dy, weight = (random(shape, seed=seed) for seed, shape in enumerate(((64, 40), (64, 40), (40,))))
    arrays = [cupy.ndarray(gpu.memory.hold(array)) for array in (dy, x, weight)]
    gpu.cupy_device = 1
    result = norm.forward(*arrays[1:], return_stats=True)
    assert all(type(array) is cupy.ndarray for array in result)
    assert_same_bits(result.y.array, norm.reference()(x, weight))
    assert streams(gpu) == CURRENT and not orders(gpu)
    assert {event[-1] for event in gpu.events if event[0] == "cupy.empty"} == {1}, "made on x's device"
    gradients = norm.backward(*arrays, stream=7)
    for got, right in zip(gradients, norm.reference("backward")(dy, x, weight), strict=True):
        assert_same_bits(got.array, right)
    # CuPy's memory is used again in the order of its stream, which therefore waits.
    assert orders(gpu) == [(CURRENT, 7), (7, CURRENT)]
    assert "allocate" not in gpu.names(), "scratch memory is CuPy's too"


def test_torch(norm, gpu, monkeypatch):
    torch = device.install_torch(monkeypatch, gpu)
    x, dy, weight = (random(shape, "bfloat16", seed) for seed, shape in enumerate(((64, 40), (64, 40), (40,))))
    tensors = [torch.Tensor(gpu.memory.hold(array), 1) for array in (dy, x, weight)]
    result = norm.forward(*tensors[1:], return_stats=True)
    assert all(type(array) is torch.Tensor and array.device.index == 1 for array in result)
    assert str(result.y.dtype) == "torch.bfloat16" and str(result.rstd.dtype) == "torch.float64"
    assert_same_bits(result.y.array, norm.reference()(x, weight))
    assert streams(gpu) == CURRENT and not orders(gpu)
    gpu.torch_stream = 0
    gradients = norm.backward(*tensors)
    assert gpu.launches()[-1][2] == 1
    for got, right in zip(gradients, norm.reference("backward")(dy, x, weight), strict=True):
        assert_same_bits(got.array, right)
    norm.backward(*tensors, stream=SimpleNamespace(cuda_stream=7))
    assert orders(gpu) == [(1, 7), (7, 1)]
    assert "allocate" not in gpu.names(), "scratch memory is PyTorch's too"
    out = torch.Tensor(gpu.memory.hold(np.empty((64, 40), np.float32)), 1)
    assert norm.forward(*tensors[1:], out=out) is out
    host = torch.Tensor(np.empty((64, 40), np.float32), None, "cpu")
    with pytest.raises(TypeError, match="`out`"):
        norm.forward(*tensors[1:], out=host)


@pytest.mark.parametrize("stream, given, named", [(None, None, None), (5, None, 5), (None, 7, 7), (5, 7, 7)])
def test_numba(norm, gpu, monkeypatch, stream, given, named):
    """Only an array that must name a stream does: Numba waits for it at each launch."""
    numba = device.install_numba(monkeypatch, gpu)
    x, weight = random((3, 8)), random(8)
    arrays = [numba.array(gpu.memory.hold(array), stream) for array in (x, weight)]
    result = norm.forward(*arrays, stream=given)
    assert type(result) is numba.kind
    assert result.__cuda_array_interface__["stream"] == named
    assert_same_bits(np.array(result.array), norm.reference()(x, weight))
    assert result.owner.room.nbytes >= x.nbytes, "it keeps its memory"
    assert type(norm.forward(numba.array(np.empty((0, 8), np.float32)))) is numba.kind


def test_mixed_libraries(norm, gpu, lent, monkeypatch):
    """x alone decides the library."""
    cupy = device.install_cupy(monkeypatch, gpu)
    x, weight = random((3, 8)), random(8)
    weight_of_cupy = cupy.ndarray(gpu.memory.hold(weight))
    assert type(norm.forward(lent(x), weight_of_cupy)) is DeviceArray
    assert orders(gpu) == [(CURRENT, 1), (1, CURRENT)]


def test_names(norm):
    assert set(npnorm.cuda.__all__) == {"DeviceArray", "is_available", "workspace_bytes"}
