"""The backend, which does what a plan says."""

from types import ModuleType

from ._locks import importing_or_compiling

_launch: ModuleType | None = None


def backend() -> ModuleType:
    """The backend of NumPy arrays, imported at the first call: it brings Numba."""
    return _launch or _imported()


def _imported() -> ModuleType:
    global _launch
    with importing_or_compiling:
        from .cpu import launch

        _launch = launch
    return launch
