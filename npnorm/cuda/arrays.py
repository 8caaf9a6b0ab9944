"""Arrays on a CUDA device, whoever made them: their addresses, shapes and strides, and nothing of their content."""

import math
import sys
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from . import dlpack
from .streams import LEGACY, integer

INTERFACE = 3
"""The version of the CUDA array interface that results have: the first with a stream."""

BFLOAT16 = ("<V2", "|V2")
"""How the interface writes the element type that it does not know."""


INTEGERS = {int}

MOST_ELEMENTS = 2**59
"""Of 8 bytes each, and twice that, they can still be counted in 64 bits with a sign."""

MOST_AXES = 64
"""NumPy's."""


class DeviceArray:
    """An array in the memory of a CUDA device.

    The functions of npnorm return one for an `x` of a library that they do not know, and for CuPy, Numba and PyTorch
    arrays of that library. It holds no data of its own and computes nothing: hand it to any library that takes
    `__cuda_array_interface__` (``cupy.asarray``, ``numba.cuda.as_cuda_array``, ``torch.as_tensor``) or `__dlpack__`.

    Attributes
    ----------
    shape : tuple of int
    strides : tuple of int
        In bytes.
    dtype : numpy.dtype
    pointer : int
        The address of the first element.
    readonly : bool
    stream : int or None
        The stream on which the elements are ready: 1 is the legacy default stream, None says nothing.
    device : int or None
        The device's number, where it is known.
    """

    __slots__ = (
        *("pointer", "shape", "strides", "dtype", "readonly", "stream", "device", "owner", "library"),
        "__weakref__",
    )

    def __init__(
        self,
        pointer: int,
        shape: Sequence[int],
        strides: Sequence[int] | None,
        dtype: Any,
        readonly: bool = False,
        stream: int | None = None,
        device: int | None = None,
        owner: Any = None,
        library: str | None = None,
    ) -> None:
        if not isinstance(dtype, np.dtype):
            dtype = np.dtype(dtype) if isinstance(dtype, type) else _dtype_of("DeviceArray", dtype)
        shape = _shape("DeviceArray", shape)
        if strides is not None:
            strides = _strides("DeviceArray", strides, len(shape))
        self._set(pointer, shape, strides, dtype, readonly, stream, device, owner, library)

    def _set(
        self, pointer: int, shape: tuple[int, ...], strides: tuple[int, ...] | None, dtype: np.dtype, readonly: bool,
        stream: int | None, device: int | None, owner: Any, library: str | None,
    ) -> None:  # fmt: skip
        self.pointer = pointer
        self.shape = shape
        self.strides = contiguous_strides(shape, dtype.itemsize) if strides is None else strides
        self.dtype = dtype
        self.readonly = readonly
        self.stream = stream
        self.device = device
        self.owner = owner
        self.library = library

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def itemsize(self) -> int:
        return self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.itemsize

    @property
    def flags(self) -> "DeviceArray":
        """Itself, so that `array.flags.writeable` is written as for NumPy's arrays."""
        return self

    @property
    def writeable(self) -> bool:
        return not self.readonly

    @property
    def c_contiguous(self) -> bool:
        expected = self.dtype.itemsize
        for length, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if length != 1:
                if stride != expected and self.size:
                    return False
                expected *= length
        return True

    def addresses(self) -> np.ndarray:
        """A NumPy array at the same addresses, to compare places in memory. Reading it would crash."""
        if not self.size:
            return np.empty(self.shape, self.dtype)
        return np.asarray(_Addresses(self))

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "shape": self.shape,
            "typestr": self.dtype.str,
            "data": (self.pointer, self.readonly),
            "strides": None if self.c_contiguous else self.strides,
            "stream": self.stream,
            "version": INTERFACE,
        }

    def __dlpack_device__(self) -> tuple[int, int]:
        return dlpack.CUDA, self.device or 0

    def __dlpack__(
        self,
        *,
        stream: int | None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any:
        if copy or dl_device not in (None, self.__dlpack_device__()):
            raise BufferError("a DeviceArray is exported as it is: neither copied nor moved")
        if self.stream is not None and stream != -1:
            from . import driver

            with driver.on(self.device):
                driver.order(self.stream, stream or LEGACY)
        return dlpack.write(
            self, self.pointer, self.shape, self.strides, self.dtype, self.__dlpack_device__(),
            self.readonly, max_version is not None and max_version >= (1, 0),
        )  # fmt: skip

    def __repr__(self) -> str:
        return (
            f"DeviceArray(shape={self.shape}, dtype={self.dtype.name}, device={self.device}, "
            f"pointer={self.pointer:#x})"
        )


def trusted(
    pointer: int, shape: tuple[int, ...], strides: tuple[int, ...] | None, dtype: np.dtype, readonly: bool,
    stream: int | None, device: int | None, owner: Any = None, library: str | None = None,
) -> DeviceArray:  # fmt: skip
    """A `DeviceArray` of what is known to fit: to see whether it does takes longer than all else."""
    array = DeviceArray.__new__(DeviceArray)
    array._set(pointer, shape, strides, dtype, readonly, stream, device, owner, library)
    return array


class _Addresses:
    def __init__(self, array: DeviceArray) -> None:
        self.__array_interface__ = {
            "shape": array.shape,
            "typestr": array.dtype.str,
            "data": (array.pointer, array.readonly),
            "strides": array.strides,
            "version": 3,
        }


def _integers(values: Any) -> tuple[int, ...] | None:
    """Whole numbers as a tuple; None if they are not."""
    if type(values) is tuple and INTEGERS.issuperset(map(type, values)):
        return values
    try:
        numbers = [integer(value) for value in values]
    except TypeError:
        return None
    found = tuple(number for number in numbers if number is not None)
    return found if len(found) == len(numbers) else None


def _shape(what: str, shape: Any) -> tuple[int, ...]:
    found = _integers(shape)
    if found is None or (found and min(found) < 0):
        error = TypeError if found is None else ValueError
        raise error(f"`{what}` must have a shape of integers that are at least 0; got {shape!r}")
    if len(found) > MOST_AXES or math.prod(filter(None, found)) > MOST_ELEMENTS:
        raise ValueError(
            f"`{what}` must have at most {MOST_AXES} axes and 2**59 elements, not counting axes of length 0; got shape "
            f"{found}"
        )
    return found


def _strides(what: str, strides: Any, ndim: int) -> tuple[int, ...]:
    found = _integers(strides)
    if found is None or len(found) != ndim:
        raise TypeError(f"`{what}` must have strides of {ndim} integers, in bytes, one for each axis; got {strides!r}")
    if any(abs(stride) >= 2**62 for stride in found):
        raise ValueError(f"`{what}` must have strides of less than 2**62 bytes; got {strides!r}")
    return found


@lru_cache(maxsize=1024)
def contiguous_strides(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """The strides in bytes of a C-contiguous array."""
    strides = []
    for length in reversed(shape):
        strides.append(itemsize)
        itemsize *= length
    return tuple(reversed(strides))


def device_array(
    name: str, value: Any, streams: dict[int, int] | None = None, ready: int = LEGACY
) -> DeviceArray | None:
    """An array on a CUDA device as a view; None of what is in host memory.

    PyTorch is asked for its current stream, which takes a microsecond, if `streams` does not have the device's. An
    array with DLPack alone names no stream, but makes itself ready on one: `ready`.
    """
    torch = sys.modules.get("torch")
    array: DeviceArray | None
    if type(value) is DeviceArray:
        array = value
    elif torch is not None and isinstance(value, torch.Tensor):
        array = _of_torch(name, value, torch, {} if streams is None else streams)
    else:
        interface = getattr(value, "__cuda_array_interface__", None)
        kind, number = _place(name, value)
        if interface is not None:
            array = _of_interface(name, value, interface, number)
        elif kind in (dlpack.CUDA, dlpack.CUDA_MANAGED):
            array = _of_dlpack(name, value, number, ready)
        else:
            return None
    if array is not None and not array.pointer and array.size:
        raise ValueError(f"`{name}` must be at an address, since it has elements; got shape {array.shape} at address 0")
    return array


def _place(name: str, value: Any) -> tuple[int | None, int | None]:
    """The type and the number of the device, as DLPack has them; None where an object does not say."""
    if not hasattr(value, "__dlpack_device__"):
        return None, None
    kind, number = value.__dlpack_device__()
    kind = int(kind)
    if kind not in (dlpack.CPU, dlpack.CUDA, dlpack.CUDA_HOST, dlpack.CUDA_MANAGED):
        raise TypeError(
            f"`{name}` must be in host memory or on a CUDA device; got a {type(value).__name__} on a device of "
            f"DLPack's type {kind}: copy it to the host"
        )
    return kind, number


def _of_torch(name: str, tensor: Any, torch: Any, streams: dict[int, int]) -> DeviceArray | None:
    """A tensor by its own attributes, which is quicker than a capsule; its stream is torch's current one."""
    if not tensor.is_cuda:
        return None
    if torch.version.hip is not None:
        raise TypeError(f"`{name}` must be on an NVIDIA device; got a tensor of PyTorch for ROCm: copy it to the host")
    if tensor.requires_grad:
        raise TypeError(
            f"`{name}` must not require a gradient, since none would be recorded; got a tensor that does: write "
            f"{name}.detach()"
        )
    if tensor.layout is not torch.strided or tensor.is_neg() or tensor.is_conj():
        raise TypeError(
            f"`{name}` must be a plain strided tensor; got layout {tensor.layout}"
            f"{', with a sign that is not yet applied' if tensor.is_neg() else ''}: write {name}.to_dense() or "
            f"{name}.resolve_neg()"
        )
    dtype = _dtype_of(name, tensor.dtype)
    number, size = tensor.get_device(), dtype.itemsize
    stream = streams.get(number)
    if stream is None:
        stream = streams[number] = torch.cuda.current_stream(number).cuda_stream or LEGACY
    strides = _in_bytes(tensor.stride(), size)
    return trusted(
        tensor.data_ptr(), tuple(tensor.shape), strides, dtype, False, stream, number, tensor, "torch"
    )


@lru_cache(maxsize=1024)
def _in_bytes(strides: tuple[int, ...], size: int) -> tuple[int, ...]:
    return tuple(size * stride for stride in strides)


def _of_interface(name: str, value: Any, interface: dict[str, Any], number: int | None) -> DeviceArray:
    try:
        kind, (pointer, readonly), shape = str(interface["typestr"]), interface["data"], interface["shape"]
        strides, stream, mask = map(interface.get, ("strides", "stream", "mask"))
    except (AttributeError, KeyError, TypeError, ValueError):
        raise TypeError(
            f"`{name}` must have a `__cuda_array_interface__` with shape, typestr, data and, unless it is contiguous, "
            f"strides; got {interface!r}"
        ) from None
    if mask is not None:
        raise TypeError(f"`{name}` must not be masked, since its mask would be ignored; got {type(value).__name__}")
    shape = _shape(name, shape)
    if strides is not None:
        strides = _strides(name, strides, len(shape))
    address = 0 if pointer is None else _address(name, "its data at an address", pointer)
    if stream is not None:
        stream = _address(name, "None or the address of a stream as its stream", stream) or LEGACY
    return trusted(
        address,
        shape,
        strides,
        _dtype_of(name, kind),
        bool(readonly),
        stream,
        number,
        value,
        _library(value),
    )


def _address(name: str, what: str, value: Any) -> int:
    """A number in an array's interface that the driver will follow."""
    found = integer(value)
    if found is not None and 0 <= found < 2**63:
        return found
    error = TypeError if found is None else ValueError
    raise error(f"`{name}` must have {what}, in its `__cuda_array_interface__`; got {value!r}")


def _of_dlpack(name: str, value: Any, number: int | None, stream: int) -> DeviceArray:
    """A tensor by its capsule, made ready on a stream."""
    found = dlpack.read(value, stream)
    if found.lanes == 1 and found.code in dlpack.KINDS:
        dtype = _dtype_of(name, f"{dlpack.KINDS[found.code]}{found.bits // 8}")
    else:
        plain = found.lanes == 1 and found.bits == 16 and found.code == dlpack.BFLOAT
        dtype = _dtype_of(name, "bfloat16" if plain else f"DLPack's type {found.code} of {found.bits} bits")
    return trusted(
        found.pointer, _shape(name, found.shape), found.strides, dtype, found.readonly, stream, number,
        (value, found.owner), _library(value),
    )  # fmt: skip


_dtypes: dict[Any, np.dtype] = {}
"""NumPy's dtypes, by what libraries have for them."""


def _dtype_of(name: str, kind: Any) -> np.dtype:
    """The dtype that a library means by an object or a text, bfloat16 among them."""
    dtype = _dtypes.get(kind)
    if dtype is not None:
        return dtype
    text = "bfloat16" if kind in BFLOAT16 else str(kind).removeprefix("torch.")
    try:
        if text == "bfloat16":
            import ml_dtypes

            dtype = np.dtype(ml_dtypes.bfloat16)
        else:
            dtype = np.dtype(text)
    except ImportError:
        raise TypeError(f"`{name}` is bfloat16, whose dtype ml_dtypes defines: pip install ml_dtypes") from None
    except TypeError:
        raise TypeError(
            f"`{name}` must have dtype float16, bfloat16, float32 or float64; got {text}: cast it to one of them"
        ) from None
    return _dtypes.setdefault(kind, dtype)


def _library(value: Any) -> str | None:
    """The library whose array this is, if results can be made in it."""
    for library, module, name in (
        ("cupy", "cupy", "ndarray"),
        ("numba", "numba.cuda.cudadrv.devicearray", "DeviceNDArrayBase"),
    ):
        kind = getattr(sys.modules.get(module), name, None)
        if kind is not None and isinstance(value, kind):
            return library
    return None
