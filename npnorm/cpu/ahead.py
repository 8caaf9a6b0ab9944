"""Kernels ahead of time: what calls may ask for, before they are made."""

from collections.abc import Iterator

from .._plan import Backward, Forward
from .machine import streaming_size
from .specialize import MEANS, WAIT, Key, apply_plan, gather_plan, is_simple


def needed(call: Forward | Backward) -> list[Key]:
    """The keys of all kernels that calls with this one's plan may need, whatever their shapes and values.

    A key is what `specialize.build` takes. Keep this in step with launch.py, which asks for kernels when
    rows turn up that need them; a test compares the two.
    """
    keys = _backward(call) if isinstance(call, Backward) else _forward(call)
    return list(dict.fromkeys((*keys, WAIT)))


def _forward(call: Forward) -> Iterator[Key]:
    plan = call.plan
    yield plan, False, ""
    if streaming_size() < float("inf"):
        yield plan, False, "stream"
    yield plan._replace(other=None), True, ""  # the residual has been added before
    if is_simple(plan):
        yield plan, False, "short"
        yield plan, False, "gather"
        yield plan, False, "apply"


def _backward(call: Backward) -> Iterator[Key]:
    plan = call.plan
    if not any(call.mask):
        return
    gradient = plan.weight or plan.x
    apply = apply_plan(plan, plan.dweight and gradient, plan.dbias and gradient)
    for part, phase in ((plan, ""), (gather_plan(plan), "gather"), (apply, "apply")):
        yield part, False, phase
        yield part, True, phase
    if not plan.double:
        yield MEANS
    if plan.out and streaming_size() < float("inf"):
        yield plan, False, "stream"
    if plan.dweight or plan.dbias:
        yield "total", plan.double, gradient
