"""The backend of Dask arrays: lazy results, each chunk given to the CPU backend by the worker that has it."""

from .launch import backward, forward
from .plan import plan_backward, plan_forward

__all__ = ["backward", "forward", "plan_backward", "plan_forward"]
