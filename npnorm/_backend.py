"""The backends, which do what a plan says: one for NumPy arrays, one for arrays on a CUDA device."""

import sys
from types import ModuleType
from typing import Any

import numpy as np

from ._checks import is_dask
from ._locks import importing_or_compiling
from ._results import Checked

loaded: ModuleType | None = None
"""The backend of NumPy arrays, once it has been imported."""

device_calls: Any = None
"""The module that knows the calls on a CUDA device so far, once there has been one."""


def backend(x: Checked) -> ModuleType:
    """The backend of a checked x."""
    if type(x) is np.ndarray:
        return host_backend()
    from .cuda import launch

    calls_on_devices()
    return launch


def calls_on_devices() -> Any:
    """The module that knows the calls on a CUDA device so far, imported at the first of them."""
    global device_calls
    if device_calls is None:
        from .cuda import quick

        device_calls = quick
    return device_calls


def host_backend() -> ModuleType:
    """The backend of NumPy arrays, imported at the first right call: it brings Numba."""
    global loaded
    if loaded is None:
        with importing_or_compiling():
            from .cpu import entry

            loaded = entry
    return loaded


def lazy_backend(arrays: tuple[Any, ...]) -> ModuleType | None:
    """The backend of Dask arrays, with its own plan, if there is one among the arguments of a call."""
    if "dask.array" not in sys.modules or not any(map(is_dask, arrays)):
        return None
    from . import dask

    return dask
