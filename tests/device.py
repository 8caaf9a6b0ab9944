"""Stand-ins for a GPU: host memory that poses as a device's, and a driver that does on the host what it is told.

A launch is carried out by npnorm.reference on the memory at the addresses that it names. So a wrong address, stride,
offset, flag or order gives a wrong result, and an address outside every array that the test has made is an error.
"""

import math
import sys
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
from table import DTYPES

from npnorm import _backend
from npnorm.cuda import driver, quick, table
from npnorm.reference import rows as reference

CURRENT = 64
"""The stream that the stand-ins of libraries work on."""


class Interface:
    """An array with the CUDA array interface alone."""

    def __init__(self, array, stream=None, version=3, readonly=None):
        self.array = array
        interface = {
            "shape": array.shape,
            "typestr": array.dtype.str,
            "data": (address(array), readonly if readonly is not None else not array.flags.writeable),
            "strides": None if array.flags.c_contiguous else array.strides,
            "version": version,
        }
        if version == 3:
            interface["stream"] = stream
        self.__cuda_array_interface__ = interface


class Capsule:
    """An array with DLPack alone; NumPy makes the capsule, which says that the memory is the host's."""

    def __init__(self, array, device=(2, 0), versioned=True):
        self.array, self.device, self.versioned = array, device, versioned
        self.streams = []

    def __dlpack_device__(self):
        return self.device

    def __dlpack__(self, *, stream=None, **options):
        self.streams.append(stream)
        if options and not self.versioned:
            raise TypeError("no such keyword")
        return self.array.__dlpack__(**options)


def address(array):
    return array.__array_interface__["data"][0]


def bounds(array):
    """The first and the last address of an array's elements."""
    reach = [(length - 1) * stride for length, stride in zip(array.shape, array.strides, strict=True)]
    first = address(array) + sum(r for r in reach if r < 0)
    return first, address(array) + sum(r for r in reach if r > 0) + array.itemsize


class Memory:
    """The arrays that a test has put on the device, whose addresses alone may be touched."""

    def __init__(self):
        self.arrays = []

    def hold(self, array):
        self.arrays.append(array)
        return array

    def view(self, pointer, shape, strides, dtype, written=False):
        """The elements at an address, with strides in bytes."""
        interface = {
            "shape": tuple(shape), "strides": tuple(strides), "typestr": dtype.str,
            "data": (pointer, False), "version": 3,
        }  # fmt: skip
        view = np.asarray(SimpleNamespace(__array_interface__=interface)).view(dtype)
        first, last = bounds(view)
        for array in self.arrays:
            start, stop = bounds(array)
            if start <= first and last <= stop:
                assert array.flags.writeable or not written, "a read-only array is written to"
                return view
        raise AssertionError(f"a kernel would touch {first:#x} to {last:#x}, which is no array's")


class Driver:
    """What npnorm asks of the driver: recorded, and done at once."""

    def __init__(self):
        self.memory = Memory()
        self.events = []
        self.device = 0
        self.sums = {}

    def names(self):
        return [event[0] for event in self.events]

    def launches(self, kind=None):
        """(Launch, arguments, stream) of all launches, or those of a kind."""
        found = [event[1:] for event in self.events if event[0] == "launch"]
        return [event for event in found if kind in (None, event[0].spec.kind)]

    # The functions of npnorm.cuda.driver.

    def device_of(self, pointer):
        self.events.append(("device_of", pointer))
        return 0

    def current(self):
        return self.device

    @contextmanager
    def on(self, device):
        before = self.device
        self.device = device or 0
        self.events.append(("on", device))
        yield
        self.device = before

    def order(self, first, second):
        self.events.append(("order", first, second))

    def allocate(self, size, stream):
        self.events.append(("allocate", size, stream))
        room = np.full(size + 256, 0xA5, np.uint8)
        start = -address(room) % 256
        self.memory.hold(room[start : start + size])
        return SimpleNamespace(handle=address(room) + start, room=room)

    def fill(self, pointer, byte, size, stream):
        self.events.append(("fill", pointer, byte, size, stream))
        self.memory.view(pointer, (size,), (1,), np.dtype(np.uint8), True)[...] = byte

    def launch(self, launch, arguments, stream):
        self.events.append(("launch", launch, arguments, stream))
        assert all(type(argument) in (int, float) for argument in arguments)
        getattr(self, f"_{launch.spec.kind}")(launch.spec, *arguments)

    # The kernels.

    def _laid(self, spec, rows, cols, rest):
        """The shape of the rows, lead axes first; the strides of four arrays along these; eps and offset."""
        lead, (*steps, eps, offset) = spec.lead, rest
        lengths, *strides = (tuple(steps[i : i + lead]) for i in range(0, 5 * lead, lead))
        assert len(steps) == 5 * lead and math.prod(lengths) == rows > 0 and cols > 0
        assert lead == 1 or any(length > 1 for length in lengths[: lead // 2]), "a smaller kernel would do"
        return (*lengths, cols), strides, eps, offset

    def _rows(self, pointer, format_, shape, strides, access, written=False):
        """The elements of an array's rows."""
        dtype = self._dtype(format_, access == table.SWAPPED)
        assert access != table.WHOLE or pointer % dtype.itemsize == 0
        unit = dtype.itemsize if access == table.WHOLE else 1
        strides = [*(stride * unit for stride in strides), dtype.itemsize]
        return self.memory.view(pointer, shape, strides, dtype, written)

    def _read(self, pointer, format_, shape, strides, access):
        """The rows in float64; None of None."""
        if format_ is None:
            assert pointer == 0 and not any(strides) and access == table.WHOLE
            return None
        return self._rows(pointer, format_, shape, strides, access).reshape(-1, shape[-1]).astype(np.float64)

    def _write(self, values, pointer, format_, shape, strides, access):
        if format_ is None:
            assert pointer == 0 and access == table.WHOLE
            return
        view = self._rows(pointer, format_, shape, strides, access, written=True)
        view[...] = reference.rounded(values, view.dtype).reshape(view.shape)

    def _vector(self, pointer, format_, size, written=False):
        if format_ is None:
            assert pointer == 0
            return None
        dtype = DTYPES[format_]
        assert pointer % dtype.itemsize == 0
        return self.memory.view(pointer, (size,), (dtype.itemsize,), dtype, written)

    def _scale(self, spec, pointer, cols, offset):
        assert spec.offset == bool(offset)
        weight = self._vector(pointer, spec.plan.weight, cols)
        return reference.scale_of(weight, offset, np.dtype(np.float64 if spec.plan.double else np.float32))

    def _check_access(self, spec, cols, arrays, strides, vectors):
        """Whether accesses of the spec's width are aligned in every row, and no wider ones would be."""

        def fits(width):
            if cols % width or width * DTYPES[spec.plan.x].itemsize > 16:
                return False
            if {*spec.access} != {table.WHOLE}:
                return width == 1
            for (format_, pointer), pair in zip((*arrays, *vectors), (*strides, *len(vectors) * ((),)), strict=True):
                if format_ is not None:
                    itemsize = DTYPES[format_].itemsize
                    step = min(16, width * itemsize)
                    if pointer % step or any(itemsize * stride % step for stride in pair):
                        return False
            return True

        assert fits(spec.width)
        # Statistics for a backward call come with the width of the rest.
        assert not fits(2 * spec.width) or (spec.kind == "forward" and spec.plan.out is None)

    def _forward(self, spec, x, residual, weight, bias, total, y, mean, rstd, rows, cols, *rest):
        plan = spec.plan
        shape, strides, eps, offset = self._laid(spec, rows, cols, rest)
        assert not plan.backward
        ours = ((plan.x, x), (plan.other, residual), (plan.other and plan.x, total), (plan.out, y))
        self._check_access(spec, cols, ours, strides, ((plan.weight, weight), (plan.bias, bias)))
        values = self._read(x, plan.x, shape, strides[0], spec.access[0])
        added = self._read(residual, plan.other, shape, strides[1], spec.access[1])
        with np.errstate(all="ignore"):
            if added is not None:
                values = reference.rounded(values + added, DTYPES[plan.x])
                self._write(values, total, plan.x, shape, strides[2], spec.access[2])
                values = values.astype(np.float64)
            shift = self._vector(bias, plan.bias, cols)
            compute = np.dtype(np.float64 if plan.double else np.float32)
            out, row_mean, row_rstd = reference.forward_rows(
                values,
                self._scale(spec, weight, cols, offset),
                0.0 if shift is None else reference.as_vector(shift, compute),
                np.float64(eps),
                plan.centered,
                DTYPES[plan.x] if plan.rounding else None,
            )
            self._write(out, y, plan.out, shape, strides[3], spec.access[3])
        for format_, pointer, values in ((plan.mean, mean, row_mean), (plan.rstd, rstd, row_rstd)):
            kept = self._vector(pointer, format_, rows, True)
            if kept is not None:
                kept[...] = values.reshape(-1)

    def _sums(self, spec, *arguments):
        """The first of two launches over very wide rows."""
        assert spec.plan.out is spec.plan.dweight is spec.plan.dbias is None
        self.first_half = arguments

    def _backward(self, spec, *arguments):
        plan = spec.plan
        dy, x, weight, mean, rstd, dresidual, dx, sums, dweights, dbiases, rows, cols, *rest = arguments
        shape, strides, eps, offset = self._laid(spec, rows, cols, rest)
        assert plan.backward
        if spec.mode == "looped":
            assert self.first_half == arguments and sums
        ours = ((plan.other, dy), (plan.x, x), (plan.dresidual, dresidual), (plan.out, dx))
        self._check_access(spec, cols, ours, strides, ((plan.weight, weight),))
        added = self._read(dresidual, plan.dresidual, shape, strides[2], spec.access[2])
        with np.errstate(all="ignore"):
            gradients = reference.backward_rows(
                self._read(dy, plan.other, shape, strides[0], spec.access[0]),
                self._read(x, plan.x, shape, strides[1], spec.access[1]),
                self._scale(spec, weight, cols, offset),
                self._vector(mean, "float64", rows).reshape(-1, 1) if plan.centered else None,
                self._vector(rstd, "float64", rows).reshape(-1, 1),
                0.0 if added is None else added,
                np.float64(eps),
                plan.centered,
            )
            self._write(gradients[0], dx, plan.out, shape, strides[3], spec.access[3])
        for pointer, format_, total in (
            (dweights, plan.dweight, gradients[1]), (dbiases, plan.dbias, gradients[2])
        ):  # fmt: skip
            assert bool(pointer) is bool(format_)
            if pointer:
                # Every partial sum is written, so that whatever else lies there is lost.
                size = table.partials(plan, rows, cols) * cols * (8 if plan.double else 4)
                self.memory.view(pointer, (size,), (1,), np.dtype(np.uint8), True)[...] = 0xEE
                self.sums[pointer] = total

    def _total(self, spec, dy, x, mean, rstd, dweights, dbiases, dweight, dbias, partials, rows, cols, *rest):
        shape, strides, *_ = self._laid(spec, rows, cols, (*rest, *2 * spec.lead * (0,), 0.0, 0.0))
        if spec.plan.other is not None:
            self._read(dy, spec.plan.other, shape, strides[0], spec.access[0])
        self._read(x, spec.plan.x, shape, strides[1], spec.access[1])
        self._vector(mean, "float64" if spec.plan.centered else None, rows)
        self._vector(rstd, "float64", rows)
        for source, pointer in ((dweights, dweight), (dbiases, dbias)):
            if pointer:
                gradient = self._vector(pointer, spec.plan.out, cols, True)
                with np.errstate(all="ignore"):
                    gradient[...] = reference.rounded(self.sums[source], gradient.dtype)

    def _copy(self, spec, source, target, *numbers):
        lengths, source_steps, target_steps = numbers[:4], numbers[4:8], numbers[8:]
        for pointer, steps, format_ in ((source, source_steps, spec.source), (target, target_steps, spec.target)):
            odd = any(number % DTYPES[format_].itemsize for number in (pointer, *steps))
            assert not (spec.aligned and odd)
        values = self.memory.view(source, lengths, source_steps, self._dtype(spec.source, spec.source_swapped))
        view = self.memory.view(target, lengths, target_steps, self._dtype(spec.target, spec.target_swapped), True)
        view[...] = values

    def _dtype(self, format_, swapped):
        return DTYPES[format_].newbyteorder() if swapped else DTYPES[format_]


FUNCTIONS = ("device_of", "current", "on", "order", "allocate", "fill", "launch")


def install(monkeypatch):
    """A recording driver in the place of npnorm's."""
    recording = Driver()
    monkeypatch.setattr(quick, "_known", {})
    monkeypatch.setattr(_backend, "device_calls", quick)
    for name in FUNCTIONS:
        monkeypatch.setattr(driver, name, getattr(recording, name))
    return recording


# Libraries.


def install_cupy(monkeypatch, recording):
    """A module that stands in for CuPy."""
    class ndarray:  # noqa: N801
        def __init__(self, array):
            self.array = array
            self.data = SimpleNamespace(ptr=address(array))

        @property
        def __cuda_array_interface__(self):
            return Interface(self.array, CURRENT).__cuda_array_interface__

        def __dlpack_device__(self):
            return 2, recording.cupy_device

    def empty(shape, dtype):
        recording.events.append(("cupy.empty", tuple(np.atleast_1d(shape)), np.dtype(dtype), recording.device))
        room = np.empty(shape, dtype)
        recording.memory.hold(room)
        return ndarray(room)

    recording.cupy_device = 0
    module = SimpleNamespace(ndarray=ndarray, empty=empty)
    monkeypatch.setitem(sys.modules, "cupy", module)
    return module


def install_numba(monkeypatch, recording):
    """Modules that stand in for those of Numba that have to do with device arrays."""
    class DeviceNDArray:
        def __init__(self, interface, owner):
            self.__cuda_array_interface__ = interface
            self.owner = owner
            self.array = None

    def from_cuda_array_interface(interface, owner, sync=True):
        assert sync is False, "this waits for the device"
        recording.events.append(("numba", interface["shape"], interface["stream"]))
        result = DeviceNDArray(interface, owner)
        dtype = np.dtype(interface["typestr"])
        if interface["shape"] and 0 not in interface["shape"]:
            result.array = recording.memory.view(
                interface["data"][0], interface["shape"],
                np.empty(interface["shape"], dtype).strides, dtype,
            )  # fmt: skip
        else:
            result.array = np.empty(interface["shape"], dtype)
        return result

    module = SimpleNamespace(from_cuda_array_interface=from_cuda_array_interface)
    arrays = SimpleNamespace(DeviceNDArrayBase=DeviceNDArray)
    monkeypatch.setitem(sys.modules, "numba.cuda", module)
    monkeypatch.setitem(sys.modules, "numba.cuda.cudadrv.devicearray", arrays)
    return SimpleNamespace(
        array=lambda array, stream=None: from_numba(DeviceNDArray, array, stream), kind=DeviceNDArray
    )


def from_numba(kind, array, stream):
    result = kind(Interface(array, stream).__cuda_array_interface__, array)
    result.array = array
    return result


def install_torch(monkeypatch, recording):
    """A module that stands in for PyTorch; its tensors have no interface, as real ones name no stream in it."""
    strided = "torch.strided"
    class Dtype:
        def __init__(self, name):
            self.name = name

        def __str__(self):
            return f"torch.{self.name}"

    dtypes = {name: Dtype(name) for name in (*DTYPES, "uint8", "int64", "float8_e4m3fn")}

    class Tensor:
        def __init__(self, array, device=0, kind="cuda", dtype=None):
            self.array = array
            self.device = SimpleNamespace(type=kind, index=device)
            self.dtype = dtypes[dtype or array.dtype.name]
            self.requires_grad = False
            self.layout = strided
            self.negative = False

        @property
        def shape(self):
            return self.array.shape

        @property
        def is_cuda(self):
            return self.device.type == "cuda"

        def get_device(self):
            return self.device.index

        def stride(self):
            return tuple(stride // self.array.itemsize for stride in self.array.strides)

        def data_ptr(self):
            return address(self.array)

        def is_neg(self):
            return self.negative

        def is_conj(self):
            return False

        def __dlpack_device__(self):
            return (2 if self.device.type == "cuda" else 1), self.device.index

    def empty(shape, dtype, device):
        recording.events.append(("torch.empty", tuple(shape), str(dtype), device.index))
        room = np.empty(shape, DTYPES.get(dtype.name, np.uint8))
        recording.memory.hold(room)
        return Tensor(room, device.index)

    module = SimpleNamespace(
        Tensor=Tensor, empty=empty, strided=strided, version=SimpleNamespace(hip=None), **dtypes,
        cuda=SimpleNamespace(current_stream=lambda device: SimpleNamespace(cuda_stream=recording.torch_stream)),
    )  # fmt: skip
    recording.torch_stream = CURRENT
    monkeypatch.setitem(sys.modules, "torch", module)
    return module

