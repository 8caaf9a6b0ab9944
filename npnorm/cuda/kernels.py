"""The kernel of a spec, and the types of its arguments."""

from .backward import make_backward
from .forward import make_forward
from .sums import make_sums
from .table import Spec
from .total import make_total

try:
    from numba.cuda.types import UniTuple, float64, int64
except ImportError:
    from numba.core.types import UniTuple, float64, int64

POINTERS = {"forward": 8, "sums": 10, "backward": 10, "total": 8}
"""Addresses that kernels take."""

LAID = 4
"""Arrays of which the kernels over rows take strides."""

MAKERS = {"forward": make_forward, "sums": make_sums, "backward": make_backward, "total": make_total}


def make_kernel(spec: Spec, **options):
    """The kernel as a Python function, and its signature."""
    return MAKERS[spec.kind](spec, **options), signature(spec)


def signature(spec: Spec):
    """The types of a kernel's arguments. A tuple takes as many parameters as it has items."""
    along_axes, pointers = UniTuple(int64, spec.lead), (int64,) * POINTERS[spec.kind]
    if spec.kind == "total":
        partials_rows_and_cols, lengths_and_strides = (int64,) * 3, (along_axes,) * 3
        return pointers + partials_rows_and_cols + lengths_and_strides
    lengths_and_strides = (along_axes,) * (1 + LAID)
    rows_and_cols, eps_and_offset = (int64,) * 2, (float64,) * 2
    return pointers + rows_and_cols + lengths_and_strides + eps_and_offset
