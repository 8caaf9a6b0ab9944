"""The kernel of a spec, and the types of its arguments."""

from .backward import make_backward
from .forward import make_forward
from .sums import make_sums
from .table import Spec
from .total import make_total

try:
    from numba.cuda.types import float64, int64
except ImportError:
    from numba.core.types import float64, int64

SIGNATURES = {
    "forward": (int64,) * 19 + (float64,) * 2,
    "sums": (int64,) * 21 + (float64,) * 2,
    "backward": (int64,) * 21 + (float64,) * 2,
    "total": (int64,) * 6,
}
"""Addresses and integers, then eps and weight_offset."""

MAKERS = {"forward": make_forward, "sums": make_sums, "backward": make_backward, "total": make_total}


def make_kernel(spec: Spec, **options):
    """The kernel as a Python function, and its signature."""
    return MAKERS[spec.kind](spec, **options), SIGNATURES[spec.kind]
