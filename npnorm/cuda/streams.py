"""CUDA streams, as whoever made them writes them down."""

from numbers import Integral
from typing import Any

LEGACY = 1
"""The legacy default stream, as the CUDA array interface and DLPack number it."""

FORMS = "the address of a stream, an object with `__cuda_stream__`, or a stream of CuPy, Numba or PyTorch"


def stream_address(stream: Any) -> int:
    """The address of a caller's stream; 0, the default stream, is the legacy one."""
    if isinstance(stream, bool):
        raise TypeError(f"`stream` must be {FORMS}; got {stream!r}")
    address = _address(stream)
    if address is None:
        raise TypeError(f"`stream` must be {FORMS}; got {type(stream).__name__}")
    if address < 0:
        raise ValueError(f"`stream` must be {FORMS}; got {address}")
    return address or LEGACY


def _address(stream: Any) -> int | None:
    if isinstance(stream, Integral):
        return int(stream)
    if hasattr(stream, "__cuda_stream__"):
        found = stream.__cuda_stream__()
        try:
            _, address = found
            return int(address)
        except (TypeError, ValueError):
            raise TypeError(
                f"`stream.__cuda_stream__()` must give a version and the address of a stream; got {found!r}"
            ) from None
    for name in ("cuda_stream", "ptr", "handle"):  # of PyTorch, CuPy, Numba
        address = getattr(stream, name, None)
        if address is not None:
            return int(getattr(address, "value", address) or 0)
    return None
