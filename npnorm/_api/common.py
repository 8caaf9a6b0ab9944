"""What the public functions share: types, the lane of simple calls, outputs that were given."""

from collections.abc import Sequence
from types import ModuleType
from typing import Any, SupportsIndex

import numpy as np
from numpy.typing import ArrayLike

from .. import _backend, _plan
from .._backend import backend, lazy_backend
from .._results import Array

OptionalArray = ArrayLike | None
Axis = SupportsIndex | Sequence[SupportsIndex]
Mask = tuple[bool, bool, bool]
GradientsOut = tuple[Array | None, Array | None, Array | None]


def planned_forward(*arguments: Any, stream: Any) -> tuple[Any, _plan.Forward]:
    """The backend for the arrays of a forward call, and that call, checked."""
    lazy = lazy_backend(arguments)
    if lazy:
        return lazy, lazy.plan_forward(*arguments, stream=stream)
    if type(arguments[1]) is not np.ndarray and (stream is not None or _backend.device_calls):
        found: tuple[Any, _plan.Forward] = _backend.calls_on_devices().planned_forward(arguments, stream)
        return found
    call = _plan.plan_forward(*arguments, stream=stream)
    return backend(call.x), call


def planned_backward(*arguments: Any, stream: Any, workspace: Any) -> tuple[Any, _plan.Backward]:
    """The same for a backward call."""
    lazy = lazy_backend(arguments)
    if lazy:
        return lazy, lazy.plan_backward(*arguments, stream=stream, workspace=workspace)
    if type(arguments[1]) is not np.ndarray and (stream is not None or _backend.device_calls):
        found: tuple[Any, _plan.Backward] = _backend.calls_on_devices().planned_backward(arguments, stream, workspace)
        return found
    call = _plan.plan_backward(*arguments, stream=stream, workspace=workspace)
    return backend(call.x), call


def planned_jvp(*arguments: Any) -> tuple[ModuleType, _plan.Derivative]:
    """The same for a directional derivative."""
    lazy = lazy_backend(arguments)
    if lazy:
        return lazy, lazy.plan_jvp(*arguments)
    call = _plan.plan_jvp(*arguments)
    return backend(call.x), call


def given_or_new(out: tuple[Array | None, ...] | None, results: tuple[Array | None, ...]) -> tuple[Array | None, ...]:
    """The outputs a caller gave, as those very objects, and the results where none were given."""
    if out is None:
        return results
    return tuple(
        result if given is None else given for given, result in zip(out, results, strict=True)
    )


def is_simple(axis: Any, weight_offset: Any, round_before_weight: Any, return_stats: Any) -> bool:
    """Whether the options of a forward call are the usual ones, exactly."""
    return (
        return_stats is False
        and round_before_weight is False
        and type(axis) is int
        and axis == -1
        and type(weight_offset) is float
        and weight_offset == 0.0
    )
