"""The backend of Dask arrays: lazy results, each chunk given to the CPU backend by the worker that has it."""

from .launch import backward, forward, jvp
from .plan import plan_backward, plan_forward, plan_jvp

__all__ = ["backward", "forward", "jvp", "plan_backward", "plan_forward", "plan_jvp"]
