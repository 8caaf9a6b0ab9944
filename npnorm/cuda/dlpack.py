"""DLPack's capsules, read and made through ctypes: no library for them is needed."""

import ctypes
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

CPU, CUDA, CUDA_HOST, CUDA_MANAGED = 1, 2, 3, 13
"""Types of device, as DLPack numbers them."""

READ_ONLY = 1  # the flag of a versioned tensor

KINDS = {0: "i", 1: "u", 2: "f", 5: "c", 6: "b"}
BFLOAT = 4
"""Codes of element types."""


class _Device(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int32), ("number", ctypes.c_int32)]


class _DataType(ctypes.Structure):
    _fields_ = [("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16)]


class _Tensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device", _Device),
        ("ndim", ctypes.c_int32),
        ("dtype", _DataType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


class _Managed(ctypes.Structure):
    _fields_ = [
        ("tensor", _Tensor),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    ]


class _Versioned(ctypes.Structure):
    _fields_ = [
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _Tensor),
    ]


def _function(name: str, result: Any, *arguments: Any) -> Callable[..., Any]:
    """A function of Python's C interface; a prototype of our own, since others may set theirs on the shared one."""
    return ctypes.PYFUNCTYPE(result, *arguments)((name, ctypes.pythonapi))


_is_valid = _function("PyCapsule_IsValid", ctypes.c_int, ctypes.py_object, ctypes.c_char_p)
_pointer = _function("PyCapsule_GetPointer", ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)
_new = _function("PyCapsule_New", ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
# The same for a capsule that is being destroyed, of which no new reference may be made.
_is_valid_at = _function("PyCapsule_IsValid", ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p)
_pointer_at = _function("PyCapsule_GetPointer", ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)


class Found(NamedTuple):
    """What a capsule says of its tensor; strides are in bytes."""

    pointer: int
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    code: int
    bits: int
    lanes: int
    readonly: bool
    owner: Any


def read(value: Any, stream: int) -> Found:
    """The tensor of an object with `__dlpack__`, ready for use on a stream.

    The capsule is not marked as used: it keeps the tensor alive, and its own destructor lets go of it.
    """
    try:
        capsule = value.__dlpack__(stream=stream, max_version=(1, 0))
    except TypeError:  # from before DLPack 1.0
        capsule = value.__dlpack__(stream=stream)
    readonly = False
    if _is_valid(capsule, b"dltensor_versioned"):
        versioned = _Versioned.from_address(_pointer(capsule, b"dltensor_versioned"))
        readonly, tensor = bool(versioned.flags & READ_ONLY), versioned.tensor
    else:
        tensor = _Managed.from_address(_pointer(capsule, b"dltensor")).tensor
    ndim, kind = tensor.ndim, tensor.dtype
    step = kind.bits * kind.lanes // 8
    return Found(
        (tensor.data or 0) + tensor.byte_offset,
        tuple(tensor.shape[:ndim]),
        tuple(step * stride for stride in tensor.strides[:ndim]) if tensor.strides else None,
        kind.code,
        kind.bits,
        kind.lanes,
        readonly,
        capsule,
    )


_alive: dict[int, Any] = {}
"""What exported tensors need for as long as their new owners keep them, by address."""


@ctypes.CFUNCTYPE(None, ctypes.c_void_p)
def _delete(address: int) -> None:
    _alive.pop(address, None)


@ctypes.PYFUNCTYPE(None, ctypes.c_void_p)
def _destroy(capsule: int) -> None:
    """Let go of a tensor that nobody took out of its capsule."""
    for name in (b"dltensor", b"dltensor_versioned"):
        if _is_valid_at(capsule, name):
            _delete(_pointer_at(capsule, name))


for _callback in (_delete, _destroy):  # other libraries may call them to the very end
    _function("Py_IncRef", None, ctypes.py_object)(_callback)


def write(
    owner: Any, pointer: int, shape: tuple[int, ...], strides: tuple[int, ...], dtype: np.dtype,
    device: tuple[int, int], readonly: bool, versioned: bool,
) -> Any:  # fmt: skip
    """A capsule for an array, which `owner` keeps alive."""
    managed = _Versioned() if versioned else _Managed()
    tensor = managed.tensor
    sizes = (ctypes.c_int64 * len(shape))(*shape)
    steps = (ctypes.c_int64 * len(shape))(*(stride // dtype.itemsize for stride in strides))
    tensor.data, tensor.device, tensor.ndim = pointer, _Device(*device), len(shape)
    code = next((code for code, kind in KINDS.items() if kind == dtype.kind), BFLOAT)
    tensor.dtype = _DataType(code, 8 * dtype.itemsize, 1)
    tensor.shape = ctypes.cast(sizes, ctypes.POINTER(ctypes.c_int64))
    tensor.strides = ctypes.cast(steps, ctypes.POINTER(ctypes.c_int64))
    managed.deleter = ctypes.cast(_delete, ctypes.c_void_p)
    name = b"dltensor"
    if versioned:
        managed.major, managed.minor, managed.flags = 1, 0, READ_ONLY * readonly
        name = b"dltensor_versioned"
    address = ctypes.addressof(managed)
    _alive[address] = managed, sizes, steps, name, owner
    return _new(address, name, ctypes.cast(_destroy, ctypes.c_void_p))
