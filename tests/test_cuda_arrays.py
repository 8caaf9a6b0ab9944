"""What is a device array, and what errors say about those that cannot be used; no GPU is needed, see device.py."""

import gc
import re

import device
import numpy as np
import pytest
from bounds import assert_same_bits
from device import CURRENT, Capsule, Interface, address
from table import DTYPES, random
from zoo import byte_swapped, poisoned

import npnorm
from npnorm.cuda import DeviceArray, arrays, dlpack
from npnorm.cuda.arrays import device_array

FUNCTIONS = {
    "layer_norm": ("x", "weight", "bias"),
    "rms_norm": ("x", "weight", "bias"),
    "add_layer_norm": ("x", "residual", "weight", "bias"),
    "add_rms_norm": ("x", "residual", "weight", "bias"),
    "layer_norm_backward": ("dy", "x", "weight", "mean", "rstd", "dresidual"),
    "rms_norm_backward": ("dy", "x", "weight", "rstd", "dresidual"),
}


@pytest.fixture
def gpu(monkeypatch):
    return device.install(monkeypatch)


def put(gpu, array):
    return Interface(gpu.memory.hold(array))


def valid(name, seed=0):
    """Arrays for a function, on the host."""
    arrays = {}
    for i, argument in enumerate(FUNCTIONS[name]):
        shape = (8,) if argument in ("weight", "bias") else (3, 1) if argument in ("mean", "rstd") else (3, 8)
        arrays[argument] = random(shape, "float64" if shape == (3, 1) else "float32", seed + i)
    return arrays


def outputs(name):
    """Outputs for a function, by keyword, full of NaN."""
    if name.endswith("backward"):
        return {"out": tuple(poisoned(shape, np.float32) for shape in ((3, 8), (8,), (8,)))}
    out = {"out": poisoned((3, 8), np.float32)}
    return out | ({"residual_out": poisoned((3, 8), np.float32)} if name.startswith("add") else {})


# What is taken.


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("version", [2, 3])
def test_cuda_array_interface(dtype, version):
    array = random((4, 6), dtype)[::-1, ::2]
    found = device_array("x", Interface(array, stream=7, version=version))
    assert (found.pointer, found.shape, found.strides) == (address(array), array.shape, array.strides)
    assert found.dtype == array.dtype and not found.readonly and not found.c_contiguous
    assert found.stream == (7 if version == 3 else None)
    array.flags.writeable = False
    assert device_array("x", Interface(array)).readonly


def test_bfloat16_by_any_name():
    array = random((3,), "float32").view(np.uint16)[:2].view("V2")
    for typestr in ("<V2", "|V2"):
        interface = Interface(array)
        interface.__cuda_array_interface__["typestr"] = typestr
        assert device_array("x", interface).dtype.name == "bfloat16"


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("versioned", [False, True])
def test_dlpack(dtype, versioned):
    array = random((4, 6), dtype)[:, 1:4]
    value = Capsule(array, (2, 3), versioned)
    found = device_array("x", value)
    assert (found.pointer, found.shape, found.strides) == (address(array), array.shape, array.strides)
    assert found.dtype == array.dtype and found.device == 3 and not found.readonly
    # NumPy exports without regard to a stream; ours is told.
    assert value.streams[-1] == found.stream == 1
    if versioned:
        array.flags.writeable = False
        assert device_array("x", value).readonly


def test_dlpack_with_an_offset_or_an_odd_type():
    array = random((4, 6))
    capsule = dlpack.write(array, address(array), (4, 5), array.strides, array.dtype, (2, 0), False, False)
    dlpack._Managed.from_address(dlpack._pointer(capsule, b"dltensor")).tensor.byte_offset = 4

    class Exporter:
        def __dlpack_device__(self):
            return 2, 0

        def __dlpack__(self, *, stream):
            return capsule

    assert device_array("x", Exporter()).pointer == address(array[:, 1:])
    dlpack._Managed.from_address(dlpack._pointer(capsule, b"dltensor")).tensor.dtype.bits = 8
    with pytest.raises(TypeError, match="`x` must have dtype float16, bfloat16, float32 or float64; got f1"):
        device_array("x", Exporter())


def test_dlpack_keeps_memory_alive():
    base = random((4, 6))
    before = base.copy()
    found = device_array("x", Capsule(base))
    place = address(base)
    del base
    gc.collect()
    assert found.pointer == place
    assert_same_bits(np.asarray(found.addresses()), before)
    owner = found.owner
    del found, owner
    gc.collect()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("versioned", [False, True])
def test_dlpack_of_results(dtype, versioned):
    """A capsule of ours is read as it was written, by ourselves and by NumPy."""
    array = random((4, 6), dtype)[:, ::2]
    ours = DeviceArray(address(array), array.shape, array.strides, array.dtype, device=2, owner=array)
    assert ours.__dlpack_device__() == (2, 2)

    class Exporter:
        def __dlpack_device__(self):
            return 2, 2

        def __dlpack__(self, *, stream, **options):
            return ours.__dlpack__(stream=stream, **(options if versioned else {}))

    found = device_array("x", Exporter())
    assert (found.pointer, found.shape, found.strides) == (address(array), array.shape, array.strides)
    assert found.dtype == array.dtype
    gc.collect()  # capsules of other tests, which live until a collection
    before = len(dlpack._alive)
    del found
    gc.collect()
    assert len(dlpack._alive) == before - 1, "an unused capsule lets go of its array"


def test_dlpack_is_numpys():
    """With the host's device type in it, NumPy takes our capsule, and lets go of the array in the end."""
    array = random((4, 6))[:, ::2]

    class Exporter:
        def __init__(self, readonly):
            self.readonly = readonly

        def __dlpack_device__(self):
            return 1, 0

        def __dlpack__(self, *, stream=None, max_version=None, **_):
            return dlpack.write(
                array, address(array), array.shape, array.strides, array.dtype, (1, 0), self.readonly,
                max_version is not None,
            )  # fmt: skip

    gc.collect()
    alive = len(dlpack._alive)
    taken = np.from_dlpack(Exporter(False))
    assert_same_bits(np.array(taken), np.array(array))
    assert taken.strides == array.strides and address(taken) == address(array)
    assert not np.from_dlpack(Exporter(True)).flags.writeable
    assert len(dlpack._alive) == alive + 1
    del taken
    gc.collect()
    assert len(dlpack._alive) == alive


def test_exports_follow_the_stream(gpu):
    array = gpu.memory.hold(random((2, 3)))
    ours = DeviceArray(address(array), (2, 3), None, array.dtype, stream=5, owner=array)
    assert ours.__cuda_array_interface__["stream"] == 5
    ours.__dlpack__(stream=9)
    ours.__dlpack__(stream=None)
    ours.__dlpack__(stream=-1)
    assert [event for event in gpu.events if event[0] == "order"] == [("order", 5, 9), ("order", 5, 1)]
    with pytest.raises(BufferError):
        ours.__dlpack__(copy=True)
    with pytest.raises(BufferError):
        ours.__dlpack__(dl_device=(1, 0))


def test_what_a_device_array_tells():
    array = random((2, 3))
    ours = DeviceArray(4096, (2, 3), None, array.dtype, device=1)
    assert (ours.ndim, ours.size, ours.itemsize, ours.nbytes) == (2, 6, 4, 24)
    assert ours.c_contiguous and ours.flags.writeable
    assert repr(ours) == "DeviceArray(shape=(2, 3), dtype=float32, device=1, pointer=0x1000)"
    for shape, strides, right in (
        ((2, 3), (12, 4), True), ((2, 3), (16, 4), False), ((1, 3), (400, 4), True), ((3, 1), (4, 400), True),
        ((0, 3), (1, 1), True), ((), (), True), ((2, 3), (-12, 4), False),
    ):  # fmt: skip
        assert DeviceArray(4096, shape, strides, array.dtype).c_contiguous is right


# What stays on the host.


def test_host_arrays_stay_there(gpu):
    """DLPack of host memory, pinned or not, and NumPy's own with an interface are NumPy's business."""
    array = random((3, 8))
    for kind in (1, 3):
        assert device_array("x", Capsule(array, (kind, 0))) is None

    class Mapped(np.ndarray):
        __cuda_array_interface__ = {"shape": (3, 8), "typestr": "<f4", "data": (1, False), "version": 3}

    assert_same_bits(npnorm.layer_norm(array.view(Mapped)), npnorm.layer_norm(array))
    assert not gpu.events


def test_other_devices():
    with pytest.raises(TypeError, match="`x` must be in host memory or on a CUDA device; got a Capsule on a device of"):
        npnorm.layer_norm(Capsule(random((3, 8)), (8, 0)))


# What is refused.


@pytest.mark.parametrize("function", FUNCTIONS)
def test_mixed_sides(gpu, function):
    """One array on the other side: a TypeError that names both, and nothing is written or launched."""
    call = getattr(npnorm, function)
    host, out = valid(function), outputs(function)
    on_device = {name: put(gpu, array) for name, array in host.items()}
    for name in host:
        for arguments in ({**host, name: on_device[name]}, {**on_device, name: host[name]}):
            with pytest.raises(TypeError, match="must be on the same side") as caught:
                call(**arguments)
            assert len(re.findall(r"`\w+` in host memory and `\w+` on a CUDA device", str(caught.value))) == 1
            assert f"`{name}`" in str(caught.value)
    with pytest.raises(TypeError, match=r"`out(\[0\])?` in host memory|`x` and `out"):
        call(**on_device, **out)
    outs = {
        name: tuple(put(gpu, array) for array in value) if isinstance(value, tuple) else put(gpu, value)
        for name, value in out.items()
    }
    with pytest.raises(TypeError, match="same side"):
        call(**host, **outs)
    for array in [array for value in out.values() for array in (value if isinstance(value, tuple) else [value])]:
        assert np.isnan(array).all()
    assert not gpu.launches()
    for thing in ([1.0] * 8, 1.0):
        if "weight" in host and np.ndim(thing):
            with pytest.raises(TypeError, match="`weight` in host memory"):
                call(**{**on_device, "weight": thing})


@pytest.mark.parametrize("function", FUNCTIONS)
def test_host_calls_have_no_stream(function):
    call = getattr(npnorm, function)
    arguments = {name: array for name, array in valid(function).items() if name in ("x", "residual", "dy", "weight")}
    call(**arguments)  # the quick lane knows it now
    with pytest.raises(ValueError, match="`stream` must be None for arrays in host memory; got 0"):
        call(**arguments, stream=0)
    if "backward" in function:
        with pytest.raises(ValueError, match="`workspace` must be None for arrays in host memory"):
            call(**arguments, workspace=np.empty(8))
    call(**arguments, stream=None)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_the_plan_is_the_hosts(gpu, function):
    """The same spoilt arguments give the same error and the same message on both sides."""
    call, host = getattr(npnorm, function), valid(function)
    spoilt = {}
    for name, array in host.items():
        spoilt[name] = [array[..., :-1]] if name == "x" else [array[..., :-1], np.stack([array, array])]
    changes = [{name: value} for name, values in spoilt.items() for value in values]
    changes += [{"axis": 5}, {"axis": 0}, {"eps": -1.0}, {"eps": "a"}, {"weight_offset": np.nan}, {"axis": ()}]
    if "backward" in function:
        changes += [
            {"out": (poisoned((3, 7), np.float32), None, None)}, {"output_mask": (True, True)},
            {"out": (None, read_only((8,)), None)}, {"out": (None, None, np.zeros(8, np.int32))},
            {"out": (None, np.broadcast_to(np.zeros(1, np.float32), 8), None)},
        ]  # fmt: skip
    else:
        changes += [
            {"out": poisoned((3, 7), np.float32)}, {"out": read_only((3, 8))},
            {"out": np.lib.stride_tricks.as_strided(np.zeros(10, np.float32), (3, 8), (4, 4))},
        ]  # fmt: skip
    for change in changes:
        messages = []
        for side in (lambda value: value, lambda value: put(gpu, value)):
            moved = {name: side(array) for name, array in host.items()}
            for name, value in change.items():
                if isinstance(value, tuple) and any(isinstance(v, np.ndarray) for v in value):
                    moved[name] = tuple(v if v is None else side(v) for v in value)
                else:
                    moved[name] = side(value) if isinstance(value, np.ndarray) else value
            try:
                call(**moved)
            except (TypeError, ValueError) as error:  # AxisError is a ValueError
                messages.append((type(error), str(error)))
        assert len(messages) == 2, (change, messages)
        assert messages[0] == messages[1]


def read_only(shape):
    array = poisoned(shape, np.float32)
    array.flags.writeable = False
    return array


@pytest.mark.parametrize("function", FUNCTIONS)
def test_overlaps(gpu, function):
    """An output that overlaps an input in part is refused by its addresses; one that is an input is not."""
    call = getattr(npnorm, function)
    host = valid(function)
    base = gpu.memory.hold(random((4, 8)))
    x, part = Interface(base[:3]), Interface(base[1:])
    arguments = {name: put(gpu, array) for name, array in host.items()} | {"x": x}
    backward = "backward" in function
    with pytest.raises(ValueError, match="must not overlap `x` in part"):
        call(**arguments, out=(part, None, None) if backward else part)
    same = Interface(base[:3])
    call(**arguments, out=(same, None, None) if backward else same)
    if backward:
        weight = arguments["weight"]
        with pytest.raises(ValueError, match=r"`out\[1\]` must not overlap `weight`"):
            call(**arguments, out=(None, weight, None))
        room = gpu.memory.hold(np.zeros(100_000, np.uint8))
        gradient = Interface(room[:32].view(np.float32))
        with pytest.raises(ValueError, match=r"`workspace` must not overlap `out\[1\]`"):
            call(**arguments, out=(None, gradient, None), workspace=Interface(room))


def test_devices_differ(gpu):
    x, weight = Capsule(random((3, 8)), (2, 0)), Capsule(random(8), (2, 1))
    with pytest.raises(ValueError, match="`weight` must be on the CUDA device of `x`, 0; got device 1"):
        npnorm.layer_norm(x, weight)


@pytest.mark.parametrize("dtype", ["int32", "bool", "complex64", "uint8", "int64"])
def test_dtypes(dtype):
    array = np.zeros((3, 8), dtype)
    for value in (Interface(array), Capsule(array)):
        with pytest.raises(TypeError, match=f"`x` must have dtype float16, .* got {dtype}: "):
            npnorm.layer_norm(value)


@pytest.mark.parametrize(
    "change", [{"typestr": None}, {"data": None}, {"data": (1,)}, {"shape": None}, None], ids=str
)
def test_incomplete_interfaces(gpu, change):
    """None stands for what is not there."""
    value = put(gpu, random((3, 8)))
    changed = {**value.__cuda_array_interface__, **(change or {})}
    complete = {key: item for key, item in changed.items() if item is not None}
    value.__cuda_array_interface__ = {} if change is None else complete
    with pytest.raises(TypeError, match="`weight` must have a `__cuda_array_interface__` with shape, typestr"):
        npnorm.layer_norm(put(gpu, random((3, 8))), value)


SHAPE = "must have a shape of integers that are at least 0; got "
MANY = "must have at most 64 axes and 2**59 elements, not counting axes of length 0; got shape ("
FAR = "must have strides of less than 2**62 bytes; got "
STRIDES = "must have strides of 2 integers, in bytes, one for each axis; got "
STREAM = "must have None or the address of a stream as its stream, in its `__cuda_array_interface__`; got "
DATA = "must have its data at an address, in its `__cuda_array_interface__`; got "


@pytest.mark.parametrize(
    "change, error, message",
    [
        ({"shape": "38"}, TypeError, SHAPE), ({"shape": (3.5, 8)}, TypeError, SHAPE),
        ({"shape": (3, True)}, TypeError, SHAPE), ({"shape": 24}, TypeError, SHAPE),
        ({"shape": (-1, 8)}, ValueError, SHAPE), ({"strides": (32.0, 4)}, TypeError, STRIDES),
        ({"strides": (4,)}, TypeError, STRIDES), ({"strides": (32, 4, 4)}, TypeError, STRIDES),
        ({"strides": "32"}, TypeError, STRIDES), ({"stream": "s"}, TypeError, STREAM),
        ({"stream": 3.5}, TypeError, STREAM), ({"stream": -1}, ValueError, STREAM),
        ({"stream": 2**64}, ValueError, STREAM), ({"data": (5.5, False)}, TypeError, DATA),
        ({"data": ("5", False)}, TypeError, DATA), ({"data": (-16, False)}, ValueError, DATA),
        ({"shape": (2**62, 2**62)}, ValueError, MANY), ({"shape": (2**61, 0)}, ValueError, MANY),
        ({"shape": 66 * (1,), "strides": None}, ValueError, MANY), ({"strides": (2**70, 4)}, ValueError, FAR),
        ({"data": (2**63, False)}, ValueError, DATA),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)  # fmt: skip
def test_odd_interfaces(gpu, change, error, message):
    """Numbers that would be taken for others, or followed by the driver to nowhere."""
    x, value = put(gpu, random((3, 8))), put(gpu, random((3, 8)))
    npnorm.add_layer_norm(x, value)  # the quick lane knows it now
    gpu.events.clear()
    value.__cuda_array_interface__ = {**value.__cuda_array_interface__, **change}
    for _ in range(2):
        with pytest.raises(error, match=re.escape(f"`residual` {message}")):
            npnorm.add_layer_norm(x, value)
    assert not gpu.launches()


def test_interfaces_of_lists(gpu):
    value = put(gpu, random((3, 8)))
    value.__cuda_array_interface__ |= {"shape": [np.int64(3), 8], "strides": [32, 4], "stream": 0}
    found = device_array("x", value)
    assert (found.shape, found.strides, found.stream) == ((3, 8), (32, 4), 1)
    assert set(map(type, found.shape)) == {int}


@pytest.mark.parametrize("function", FUNCTIONS)
def test_address_0(gpu, function):
    """Arrays with elements, but no memory: the first call and one like it, and all outputs."""
    call, host = getattr(npnorm, function), valid(function)
    aligned = {name: put(gpu, np.array(array)) for name, array in host.items()}
    names = [*host, *(["out[0]", "out[1]", "workspace"] if "backward" in function else ["out"])]
    for name in names:
        shape = (8,) if name in ("weight", "bias", "out[1]") else host[name].shape if name in host else (3, 8)
        dtype = np.dtype(np.uint8) if name == "workspace" else host[name].dtype if name in host else np.dtype("f4")
        nowhere = DeviceArray(0, shape, None, dtype)
        interface = put(gpu, np.zeros(shape, dtype))
        interface.__cuda_array_interface__["data"] = (0, False)
        room = gpu.memory.hold(np.zeros(200_000, np.uint8))
        size = (190_000,) if name == "workspace" else shape
        somewhere = DeviceArray(address(room) - address(room) % 16 + 16, size, None, dtype)
        for each in (nowhere, interface, somewhere, nowhere, interface):
            given = {name: each}
            if name.startswith("out["):
                given = {"out": tuple(each if name == f"out[{i}]" else None for i in range(3))}
            if each is somewhere:
                call(**{**aligned, **given})
                gpu.events.clear()
                continue
            with pytest.raises(ValueError, match=re.escape(f"`{name}` must be at an address, since it has elements;")):
                call(**{**aligned, **given})
            assert not gpu.launches()


def test_device_arrays_of_odd_parts():
    """Lists and names of dtypes are taken, what is no shape is not."""
    for dtype in (np.dtype(np.float32), np.float32, "float32", "<f4"):
        ours = DeviceArray(4096, [4, np.int64(8)], [np.int64(64), 4], dtype)
        assert (ours.shape, ours.strides, ours.dtype) == ((4, 8), (64, 4), np.dtype(np.float32))
    assert DeviceArray(4096, [4, 8], None, "bfloat16").strides == (16, 2)
    for shape in ("48", (4.0, 8), 8, None, (-1, 8)):
        error = ValueError if shape == (-1, 8) else TypeError
        with pytest.raises(error, match="`DeviceArray` must have a shape of integers that are at least 0; got "):
            DeviceArray(4096, shape, None, np.dtype(np.float32))
    for strides in ((4,), (32.0, 4), 4):
        with pytest.raises(TypeError, match="`DeviceArray` must have strides of 2 integers, in bytes"):
            DeviceArray(4096, (4, 8), strides, np.dtype(np.float32))
    for dtype in ("float33", None, 4):
        with pytest.raises(TypeError, match="`DeviceArray` must have dtype float16, .* got"):
            DeviceArray(4096, (4, 8), None, dtype)


def test_masked():
    value = Interface(random((3, 8)))
    value.__cuda_array_interface__["mask"] = value
    with pytest.raises(TypeError, match="`x` must not be masked"):
        npnorm.layer_norm(value)


def test_outputs_that_are_no_arrays(gpu):
    x = put(gpu, random((3, 8)))
    with pytest.raises(TypeError, match="`out` must be a NumPy array"):
        npnorm.layer_norm(x, out=[1.0])


def test_torch_tensors(gpu, monkeypatch):
    torch = device.install_torch(monkeypatch, gpu)
    array = gpu.memory.hold(random((3, 8), "bfloat16")[:, ::2])
    found = device_array("x", torch.Tensor(array, 1))
    assert (found.pointer, found.shape, found.strides) == (address(array), array.shape, array.strides)
    assert found.dtype == array.dtype and (found.device, found.stream, found.library) == (1, CURRENT, "torch")
    gpu.torch_stream = 0
    assert device_array("x", torch.Tensor(array)).stream == 1
    assert device_array("x", torch.Tensor(array, None, "cpu")) is None

    def spoilt(**changes):
        tensor = torch.Tensor(array)
        for name, value in changes.items():
            setattr(tensor, name, value)
        return tensor

    for tensor, message in (
        (spoilt(requires_grad=True), r"`x` must not require a gradient.*write x\.detach\(\)"),
        (spoilt(negative=True), r"x\.resolve_neg\(\)"),
        (spoilt(layout="torch.sparse_csr"), r"strided tensor; got layout torch\.sparse_csr"),
        (torch.Tensor(array, dtype="float8_e4m3fn"), r"`x` must have dtype .* got float8_e4m3fn"),
        (torch.Tensor(array, dtype="int64"), r"`x` must have dtype .* got int64"),
    ):
        with pytest.raises(TypeError, match=message):
            npnorm.layer_norm(tensor)
    torch.version.hip = "6.0"
    with pytest.raises(TypeError, match="NVIDIA"):
        npnorm.layer_norm(torch.Tensor(array))


def test_bfloat16_without_ml_dtypes(monkeypatch):
    import sys

    monkeypatch.setattr(arrays, "_dtypes", {})
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    value = Interface(np.zeros((3, 8), np.uint16).view("V2"))
    with pytest.raises(TypeError, match="`x` is bfloat16, .* pip install ml_dtypes"):
        npnorm.layer_norm(value)


def test_byte_order():
    found = device_array("x", Interface(byte_swapped(random((3, 8)))))
    assert not found.dtype.isnative and found.dtype == np.dtype(">f4")
