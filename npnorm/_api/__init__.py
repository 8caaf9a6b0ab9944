"""The public functions: plan, backend, result."""

from .backward import layer_norm_backward, rms_norm_backward
from .forward import layer_norm, rms_norm
from .forward_mode import layer_norm_jvp, rms_norm_jvp
from .fused import add_layer_norm, add_rms_norm

__all__ = [
    "add_layer_norm",
    "add_rms_norm",
    "layer_norm",
    "layer_norm_backward",
    "layer_norm_jvp",
    "rms_norm",
    "rms_norm_backward",
    "rms_norm_jvp",
]
