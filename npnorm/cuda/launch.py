"""From a checked call to launches and back: allocates results, orders streams, and never waits for the device."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from .._checks import format_of
from .._plan import Backward, Forward, Plan
from . import driver, table
from .arrays import DeviceArray
from .layout import Axis, lead_axes, parts_of, width
from .results import empty, handed_over
from .staging import Staging
from .streams import LEGACY, stream_address

DOUBLE = np.dtype(np.float64)
BYTE = np.dtype(np.uint8)
NAN = 0xFF
"""The byte that fills a float64 with NaN."""


def forward(call: Forward) -> tuple[Any, Any, Any, Any]:
    """y, residual_out, mean and rstd of a checked call, None where they are not asked for."""
    x, plan = call.x, call.plan
    y, total = call.out, call.residual_out
    given = (x, call.residual, call.weight, call.bias, y, total)
    with _on_stream(call, given) as stream:
        if y is None:
            y = empty(x, x.shape, _native(x.dtype), stream)
        if plan.other and total is None:
            total = empty(x, x.shape, _native(x.dtype), stream)
        kept = x.shape[: x.ndim - call.axes] + (1,) * call.axes
        mean = empty(x, kept, DOUBLE, stream) if plan.mean else None
        rstd = empty(x, kept, DOUBLE, stream) if plan.rstd else None
        if x.size:
            _forward(call, y, total, mean, rstd, stream)
        else:
            for statistic in (mean, rstd):
                _fill(statistic, NAN, stream)
    return handed_over(y), handed_over(total), handed_over(mean), handed_over(rstd)


def _forward(
    call: Forward, y: DeviceArray, total: DeviceArray | None, mean: DeviceArray | None, rstd: DeviceArray | None,
    stream: int,
) -> None:  # fmt: skip
    """One launch, or several if the rows of the arrays do not lie along two common axes."""
    axes, staging = call.axes, Staging()
    weight, bias = staging.vector(call.weight), staging.vector(call.bias)
    arrays = [
        staging.rows(call.x, axes),
        staging.rows(call.residual, axes),
        staging.rows(total, axes, written=True),
        staging.rows(y, axes, written=True),
    ]
    lead = lead_axes(arrays, axes)
    staging.begin(call.x, stream)
    plan, rows, cols = _extent(call)
    access = width(call.x, cols, arrays, lead, (weight, bias))
    first = 0
    for offsets, (outer, inner) in parts_of(lead, len(arrays), 2):
        x_at, residual_at, total_at, y_at = map(_at, arrays, offsets)
        count = outer[0] * inner[0]
        arguments = (
            *(x_at, residual_at, _at(weight), _at(bias), total_at, y_at),
            *(_at(mean, 8 * first), _at(rstd, 8 * first), count, cols, inner[0]),
            *_steps(arrays, outer, inner),
            *(call.eps, call.weight_offset),
        )
        what = table.forward_launch(plan, count, cols, access, bool(call.weight_offset))
        driver.launch(what, arguments, stream)
        first += count
    staging.end(stream)


def backward(call: Backward) -> tuple[Any, Any, Any]:
    """dx, dweight and dbias of a checked call, None where they are masked out."""
    x = call.x
    shape = x.shape[x.ndim - call.axes :]
    dtypes = [_native(array.dtype) for array in (x, *2 * (x if call.weight is None else call.weight,))]
    given = (call.dy, x, call.weight, call.mean, call.rstd, call.dresidual, call.workspace, *call.out)
    with _on_stream(call, given) as stream:
        outputs = [
            empty(x, size, dtype, stream) if wanted and out is None else out
            for size, dtype, wanted, out in zip((x.shape, shape, shape), dtypes, call.mask, call.out, strict=True)
        ]
        if any(call.mask) and x.size:
            Gradients(call, outputs).launch(stream)
        elif any(call.mask):
            _clear(call, outputs[1:], stream)
    dx, dweight, dbias = map(handed_over, outputs)
    return dx, dweight, dbias


class Gradients:
    """What a backward call with rows and columns launches, and the scratch memory that it needs."""

    def __init__(self, call: Backward, outputs: Sequence[DeviceArray | None]) -> None:
        self.call, self.staging = call, Staging()
        plan, self.rows, self.cols = _extent(call)
        dx, dweight, dbias = outputs
        formats = [
            (format_of(out.dtype) if out else plan.weight or plan.x) if wanted else None
            for out, wanted in zip(outputs[1:], call.mask[1:], strict=True)
        ]
        self.plan = plan._replace(dweight=formats[0], dbias=formats[1])
        staging, axes = self.staging, call.axes
        self.parts = table.workspace(self.plan, self.rows, self.cols)
        self.memory = staging.room((self.parts.size,), BYTE)
        self.weight = staging.vector(call.weight)
        self.mean, self.rstd = staging.vector(call.mean, DOUBLE), staging.vector(call.rstd, DOUBLE)
        self.dweight, self.dbias = (staging.vector(array, written=True) for array in (dweight, dbias))
        self.arrays = [
            staging.rows(call.dy, axes),
            staging.rows(call.x, axes),
            staging.rows(call.dresidual, axes),
            staging.rows(dx, axes, written=True),
        ]
        self.lead = lead_axes(self.arrays, axes)
        # Several launches would add rows up in another order: copies keep the bits.
        while len(self.lead) > 2:
            present = [(i, array) for i, array in enumerate(self.arrays) if array is not None]
            worst, array = max(present, key=lambda item: len(lead_axes([item[1]], axes)))
            self.arrays[worst] = staging.stand_in(array, written=worst == 3)
            self.lead = lead_axes(self.arrays, axes)

    def launch(self, stream: int) -> None:
        """Statistics that are not given, then gradients by rows, then sums over rows."""
        call, plan, parts = self.call, self.plan, self.parts
        offset = bool(call.weight_offset)
        self.staging.begin(call.x, stream, call.workspace)
        access = width(call.x, self.cols, self.arrays, self.lead, (self.weight,))
        ((_, (outer, inner)),) = parts_of(self.lead, 4, 2)
        extent = self.rows, self.cols, inner[0]
        steps = list(_steps(self.arrays, outer, inner))
        dy, x, dresidual, dx = map(_at, self.arrays)
        mean, rstd = self._part(parts.mean), self._part(parts.rstd)
        if parts.rstd is not None:
            arguments = (x, *5 * (0,), mean, rstd, *extent, *steps[2:4], *6 * (0,), call.eps, 0.0)
            what = table.forward_launch(table.statistics_plan(plan), self.rows, self.cols, access)
            driver.launch(what, arguments, stream)
        sums, dweights, dbiases = map(self._part, (parts.sums, parts.dweight, parts.dbias))
        arguments = (
            *(dy, x, _at(self.weight), _at(self.mean) or mean, _at(self.rstd) or rstd, dresidual, dx),
            *(sums, dweights, dbiases, *extent, *steps, call.eps, call.weight_offset),
        )
        for what in table.backward_launches(plan, self.rows, self.cols, access, offset):
            driver.launch(what, arguments, stream)
        self._add_up(dweights, dbiases, stream)
        self.staging.end(stream)

    def _add_up(self, dweights: int, dbiases: int, stream: int) -> None:
        """The sums over rows, in one launch if both have one format."""
        plan, cols = self.plan, self.cols
        partials = table.partials(plan, self.rows, cols)
        for name in dict.fromkeys(name for name in (plan.dweight, plan.dbias) if name):
            dweight = _at(self.dweight) if plan.dweight == name else 0
            dbias = _at(self.dbias) if plan.dbias == name else 0
            what = table.total_launch(plan, name, partials, cols)
            driver.launch(what, (dweights, dbiases, dweight, dbias, partials, cols), stream)

    def _part(self, offset: int | None) -> int:
        """The address of a part of the workspace."""
        return 0 if offset is None else self.memory.pointer + offset


def _clear(call: Backward, gradients: Sequence[DeviceArray | None], stream: int) -> None:
    """Zero gradients, where there is nothing to add up."""
    staging = Staging()
    cleared = [staging.vector(gradient, written=True) for gradient in gradients]
    staging.begin(call.x, stream)
    for gradient in cleared:
        _fill(gradient, 0, stream)
    staging.end(stream)


def _fill(array: DeviceArray | None, byte: int, stream: int) -> None:
    if array is not None and array.size:
        driver.fill(array.pointer, byte, array.nbytes, stream)


@contextmanager
def _on_stream(call: Forward | Backward, arrays: Sequence[DeviceArray | None]) -> Iterator[int]:
    """The stream of a call, on x's device.

    It waits for what the arrays' own streams have been given, and these then wait for it: outputs are to be
    read on them, and a library may use an input's memory anew as soon as the array is let go of.
    """
    x = call.x
    stream = stream_address(call.stream) if call.stream is not None else x.stream or LEGACY
    others = dict.fromkeys(
        array.stream for array in arrays if array is not None and array.stream not in (None, stream)
    )
    if x.device is None and x.pointer:
        x.device = driver.device_of(x.pointer)
    with driver.on(x.device):
        for other in others:
            driver.order(other, stream)
        yield stream
        for other in others:
            driver.order(stream, other)


def _extent(call: Forward | Backward) -> tuple[Plan, int, int]:
    """The plan as kernels have it, which add an offset to the weight themselves; the numbers of rows and columns."""
    plan, x = call.plan, call.x
    if call.weight is not None:
        plan = plan._replace(weight=format_of(call.weight.dtype))
    cols = int(np.prod(x.shape[x.ndim - call.axes :], dtype=object))
    return plan, x.size // cols, cols


def _native(dtype: np.dtype) -> np.dtype:
    return dtype if dtype.isnative else dtype.newbyteorder("=")


def _at(array: DeviceArray | None, offset: int = 0) -> int:
    """An address for a kernel: 0 where there is no array."""
    return 0 if array is None else array.pointer + offset


def _steps(arrays: Sequence[DeviceArray | None], outer: Axis, inner: Axis) -> Iterator[int]:
    """The strides of every array in elements: 0 where there is no array."""
    for array, *strides in zip(arrays, outer[1], inner[1], strict=True):
        for stride in strides:
            yield 0 if array is None else stride // array.itemsize
