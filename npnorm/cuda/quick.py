"""Calls like one that was seen before: neither checked nor planned again, for both take longer than a small kernel.

What checks and plan find follows from a call's options and from the layouts of its arrays: shape, strides, dtype, where
in 16 bytes the address lies, whether it may be written to, and the device. Of the addresses themselves it matters only
which arrays share memory. So a call is like another if options and layouts are equal, if the same arrays begin at one
address, and if outputs lie apart from all others. Whatever is not, errors too, takes the long way.
"""

from collections.abc import Sequence
from types import NoneType
from typing import Any

import numpy as np

from .. import _backend
from .._plan import Backward, Forward, plan_backward, plan_forward
from .._results import Checked
from . import launch
from .arrays import DeviceArray, device_array
from .layout import ACCESS, reach
from .streams import LEGACY, stream_address

MOST_KNOWN = 4096
"""Calls remembered: a program that makes more of them has ever new shapes."""

NUMBERS = {bool, int, float, NoneType}
"""The types of options, and of the items of tuples, by which a call is remembered. Others may change their value."""

Views = Sequence[DeviceArray | None]
"""The arrays of a call, those that are written to last: y and residual_out, or the workspace and, if outputs are given,
dx, dweight and dbias."""


class Known:
    """What is known of all calls that are like each other: a backend for them."""

    __slots__ = ("launches", "mask", "numbers", "plan", "reaches", "writes")

    def __init__(self, call: Forward | Backward, views: Views, written: int) -> None:
        # Nothing of the first call's arrays is kept, or their memory would not be let go of.
        self.plan = call.plan
        self.numbers = call.axes, call.eps, call.weight_offset
        self.mask = call.mask if isinstance(call, Backward) else (False, False, False)
        self.reaches = [
            (*reach(view), number >= len(views) - written) for number, view in enumerate(views) if view is not None
        ]
        """Of each array where it begins and ends, from its address, and whether it is written to."""
        self.writes = any(written for *_, written in self.reaches)
        self.launches: dict[Any, Any] = {}
        """What `launch` has found to launch, if kernels take the arrays as they are, by where outputs lie."""

    def forward(self, call: Forward) -> tuple[Any, Any, Any, Any]:
        return launch.forward(call, self)

    def backward(self, call: Backward) -> tuple[Any, Any, Any]:
        return launch.backward(call, self)

    def are_apart(self, views: Views) -> bool:
        """Whether what is written to shares no memory with other arrays, but for those that lie in the same place."""
        if not self.writes:
            return True
        spans: dict[tuple[int, int, int], bool] = {}
        for view, (first, last, written) in zip(filter(None, views), self.reaches, strict=True):
            span = view.pointer + first, view.pointer + last, view.pointer
            spans[span] = written  # outputs come last
        end_of_read = end_of_written = 0
        for (start, stop, _), written in sorted(spans.items()):
            if start < end_of_written or (written and start < end_of_read):
                return False
            if written:
                end_of_written = stop
            elif stop > end_of_read:
                end_of_read = stop
        return True


_known: dict[Any, Known] = {}


def planned_forward(arguments: tuple[Any, ...], stream: Any) -> tuple[Any, Forward]:
    """The backend for a forward call, and that call, checked now or before."""
    centered, x, residual, weight, bias, axis, eps, offset, rounding, out, residual_out, *rest = arguments
    views = _views((x, residual, weight, bias, out, residual_out), stream)
    if views is None:
        return _checked(plan_forward(*arguments, stream=stream))
    key = _key((False, centered, axis, eps, offset, rounding, *rest), views)
    known = _known.get(key)
    x, residual, weight, bias, out, residual_out = views
    if known is not None and known.are_apart(views):
        return known, Forward(known.plan, x, residual, weight, bias, out, residual_out, *known.numbers, stream)
    call = plan_forward(
        centered, x, residual, weight, bias, axis, eps, offset, rounding, out, residual_out, *rest, stream=stream
    )
    return known or _remembered(key, call, views, written=2), call


def planned_backward(arguments: tuple[Any, ...], stream: Any, workspace: Any) -> tuple[Any, Backward]:
    """The same for a backward call."""
    centered, dy, x, weight, mean, rstd, axis, eps, offset, dresidual, mask, out = arguments
    views = None
    if out is None or (type(out) is tuple and len(out) == 3):
        views = _views((dy, x, weight, mean, rstd, dresidual, workspace, *(out or ())), stream)
    if views is None:
        return _checked(plan_backward(*arguments, stream=stream, workspace=workspace))
    key = _key((True, centered, axis, eps, offset, mask, out is None), views)
    known = _known.get(key)
    dy, x, weight, mean, rstd, dresidual, workspace, *outputs = views
    if known is not None and known.are_apart(views):
        added = dresidual if known.mask[0] else None
        given = tuple(outputs) or (None, None, None)
        return known, Backward(
            known.plan, dy, x, weight, mean, rstd, added, known.mask, given, *known.numbers, stream, workspace
        )
    out = tuple(outputs) or None
    call = plan_backward(
        centered, dy, x, weight, mean, rstd, axis, eps, offset, dresidual, mask, out, stream=stream, workspace=workspace
    )
    return known or _remembered(key, call, views, written=1 + len(outputs)), call


def _checked(call: Any) -> tuple[Any, Any]:
    return _backend.backend(call.x), call


def _views(arrays: tuple[Any, ...], stream: Any) -> list[Checked] | None:
    """The arrays of a call on a device, those with DLPack alone made ready on the stream that is given; None if one of
    them is not there, or something is wrong with it."""
    views = []
    streams: dict[int, int] = {}
    ready = LEGACY
    for array in arrays:
        if array is not None and type(array) is not DeviceArray:
            if isinstance(array, np.ndarray):
                return None
            try:
                if stream is not None:
                    ready = stream_address(stream)
                array = device_array("", array, streams, ready)
            except Exception:  # the checks will say what it is, in their order
                return None
            if array is None:
                return None
        elif array is not None and not array.pointer and array.size:
            return None
        views.append(array)
    return views


def _key(options: tuple[Any, ...], views: Views) -> tuple[Any, ...] | None:
    """What a call's checks and plan follow from; None for options of odd types."""
    numbers = [number for option in options for number in (option if type(option) is tuple else (option,))]
    types = tuple(map(type, numbers))  # for 1, 1.0 and True are equal
    if not NUMBERS.issuperset(types):
        return None
    layouts = [
        view and (view.shape, view.strides, view.dtype, view.pointer % ACCESS, view.readonly, view.device)
        for view in views
    ]
    pointers = [view.pointer for view in views if view is not None]
    together = () if len(set(pointers)) == len(pointers) else tuple(map(pointers.index, pointers))
    return options, types, together, *layouts


def _remembered(key: Any, call: Any, views: Views, written: int) -> Known:
    known = Known(call, views, written)
    if key is not None:
        if len(_known) >= MOST_KNOWN:
            _known.clear()
        _known[key] = known
    return known
