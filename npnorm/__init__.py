"""LayerNorm and RMSNorm for NumPy arrays: exact, as fast as a copy, forward and backward."""

import sys

from . import reference
from ._api import (
    add_layer_norm,
    add_rms_norm,
    layer_norm,
    layer_norm_backward,
    layer_norm_jvp,
    rms_norm,
    rms_norm_backward,
    rms_norm_jvp,
)
from ._layers import LayerNorm, RMSNorm
from ._numba import register_numba
from ._threads import get_num_threads, set_num_threads

__version__ = "0.1.0"

__all__ = [
    "LayerNorm",
    "RMSNorm",
    "add_layer_norm",
    "add_rms_norm",
    "get_num_threads",
    "layer_norm",
    "layer_norm_backward",
    "layer_norm_jvp",
    "reference",
    "register_numba",
    "rms_norm",
    "rms_norm_backward",
    "rms_norm_jvp",
    "set_num_threads",
]

if sys.modules.get("numba"):
    register_numba()
del sys
