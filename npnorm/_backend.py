"""The backend, which does what a plan says."""

from types import ModuleType

from ._locks import importing_or_compiling

loaded: ModuleType | None = None
"""The backend of NumPy arrays, once it has been imported."""


def backend() -> ModuleType:
    """The backend of NumPy arrays, imported at the first right call: it brings Numba."""
    global loaded
    if loaded is None:
        with importing_or_compiling:
            from .cpu import launch

            loaded = launch
    return loaded
