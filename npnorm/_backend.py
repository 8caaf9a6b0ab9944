"""Which backend an array belongs to."""

from types import ModuleType

from ._threads import importing_or_compiling

_launch: ModuleType | None = None


def backend() -> ModuleType:
    """The backend of NumPy arrays, imported at the first call: it brings Numba."""
    global _launch
    if _launch is None:
        with importing_or_compiling:
            from .cpu import launch

            _launch = launch
    return _launch
