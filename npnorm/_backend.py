"""Which backend an array belongs to."""

from types import ModuleType


def backend() -> ModuleType:
    """The backend of NumPy arrays, imported at the first call: it brings Numba."""
    from .cpu import launch

    return launch
