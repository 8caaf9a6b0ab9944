"""CUDA streams, as whoever made them writes them down."""

import operator
from numbers import Integral
from typing import Any

LEGACY = 1
"""The legacy default stream, as the CUDA array interface and DLPack number it."""

FORMS = "the address of a stream, an object with `__cuda_stream__`, or a stream of CuPy, Numba or PyTorch"

ATTRIBUTES = ("cuda_stream", "ptr", "handle")
"""Where PyTorch, CuPy and Numba have the address of a stream."""


def stream_address(stream: Any) -> int:
    """The address of a caller's stream; 0, the default stream, is the legacy one."""
    if isinstance(stream, type):
        raise TypeError(f"`stream` must be {FORMS}; got the class {stream.__name__}: pass a stream that it makes")
    if isinstance(stream, Integral):
        return _checked(stream, f"`stream` must be {FORMS}", repr(stream))
    if hasattr(stream, "__cuda_stream__"):
        return _of_protocol(stream)
    for name in ATTRIBUTES:
        found = getattr(stream, name, None)
        if found is not None:
            address = getattr(found, "value", found)  # of ctypes, where None is 0
            return _checked(
                0 if address is None else address,
                f"`stream.{name}` must be the address of a stream",
                f"{found!r} of a {type(stream).__name__}",
            )
    raise TypeError(f"`stream` must be {FORMS}; got {type(stream).__name__}")


def _of_protocol(stream: Any) -> int:
    if not callable(stream.__cuda_stream__):
        raise TypeError(
            "`stream.__cuda_stream__` must be a method that gives a version and the address of a stream; got a "
            f"{type(stream.__cuda_stream__).__name__} of a {type(stream).__name__}"
        )
    found = stream.__cuda_stream__()
    rule = "`stream.__cuda_stream__()` must give a version and the address of a stream"
    try:
        _, address = found
    except (TypeError, ValueError):
        raise TypeError(f"{rule}; got {found!r}") from None
    return _checked(address, rule, repr(found))


def _checked(address: Any, rule: str, what: str) -> int:
    number = integer(address)
    if number is None:
        raise TypeError(f"{rule}; got {what}")
    if not 0 <= number < 2**64:
        raise ValueError(f"{rule}, from 0 to 2**64 - 1; got {what}")
    return number or LEGACY


def integer(value: Any) -> int | None:
    """A number that is whole by its type, the driver's bindings' own among them; None of all else."""
    if type(value) is int:
        return value
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)
    except TypeError:
        pass
    if hasattr(type(value), "__int__") and not hasattr(type(value), "__float__"):  # as the bindings' CUstream is
        return int(value)
    return None
