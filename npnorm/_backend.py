"""The backends, which do what a plan says: one for NumPy arrays, one for arrays on a CUDA device."""

from types import ModuleType

import numpy as np

from ._locks import importing_or_compiling
from ._results import Array

loaded: ModuleType | None = None
"""The backend of NumPy arrays, once it has been imported."""


def backend(x: Array) -> ModuleType:
    """The backend of a checked x, imported at the first right call: it brings Numba."""
    global loaded
    if type(x) is not np.ndarray:
        from .cuda import launch as device

        return device
    if loaded is None:
        with importing_or_compiling:
            from .cpu import launch

            loaded = launch
    return loaded
