"""The backends, which do what a plan says."""

from types import ModuleType
from typing import Any

from ._checks import is_dask
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


def lazy_backend(arrays: tuple[Any, ...]) -> ModuleType | None:
    """The backend of Dask arrays, with its own plan, if there is one among the arguments of a call."""
    if not any(map(is_dask, arrays)):
        return None
    from . import dask

    return dask
