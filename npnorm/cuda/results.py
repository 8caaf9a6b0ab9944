"""New arrays on a device, made by the library that made x."""

import sys
from typing import Any

import numpy as np

from . import driver
from .arrays import DeviceArray, trusted


def empty(like: DeviceArray, shape: tuple[int, ...], dtype: np.dtype, stream: int) -> DeviceArray:
    """A new array on the device of another, in its library: `owner` is that library's array."""
    if like.library == "torch":
        return _of_torch(like, shape, dtype)
    if like.library == "cupy":
        return _of_cupy(like, shape, dtype)
    array = _own(like, shape, dtype, stream)
    if like.library == "numba":
        numba = sys.modules["numba.cuda"]
        interface = array.__cuda_array_interface__
        # An array that names a stream makes Numba wait for it at each launch.
        interface["stream"] = None if like.stream is None and stream == 1 else stream
        array.owner = numba.from_cuda_array_interface(interface, owner=array.owner, sync=False)
        array.library = "numba"
    return array


def handed_over(array: DeviceArray | None) -> Any:
    """What the caller gets: the library's array, or the view itself where there is no library."""
    return array if array is None or array.library is None else array.owner


def scratch(like: DeviceArray, size: int, stream: int) -> DeviceArray:
    """Memory for the time of a call."""
    shape, dtype = (size,), np.dtype(np.uint8)
    if like.library in ("torch", "cupy"):
        return empty(like, shape, dtype, stream)
    return _own(like, shape, dtype, stream)


def _own(like: DeviceArray, shape: tuple[int, ...], dtype: np.dtype, stream: int) -> DeviceArray:
    array = trusted(0, shape, None, dtype, False, stream, like.device)
    if array.size:
        array.owner = driver.allocate(array.nbytes, stream)
        array.pointer = int(array.owner.handle)
    return array


def _of_torch(like: DeviceArray, shape: tuple[int, ...], dtype: np.dtype) -> DeviceArray:
    torch = sys.modules["torch"]
    tensor = torch.empty(shape, dtype=getattr(torch, dtype.name), device=like.owner.device)
    return trusted(tensor.data_ptr(), shape, None, dtype, False, like.stream, like.device, tensor, "torch")


def _of_cupy(like: DeviceArray, shape: tuple[int, ...], dtype: np.dtype) -> DeviceArray:
    # The caller has made the device current, which is what CuPy goes by.
    array = sys.modules["cupy"].empty(shape, dtype)
    return trusted(array.data.ptr, shape, None, dtype, False, like.stream, like.device, array, "cupy")
