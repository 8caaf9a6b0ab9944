"""From a checked call to launches and back: allocates results, orders streams, and never waits for the device."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

from .._checks import format_of
from .._plan import Backward, Forward, Plan
from . import driver, table
from .arrays import DeviceArray
from .layout import ACCESS, lead_axes, steps_of, width
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
    axes, staging, weight, bias = call.axes, None, call.weight, call.bias
    arrays = [call.x, call.residual, total, y]
    key = _key(call, (*arrays, weight, bias))
    known = _known.get(key)
    if known is None:
        staging = Staging()
        weight, bias = staging.vector(weight), staging.vector(bias)
        arrays = [staging.rows(array, axes, written=i > 1) for i, array in enumerate(arrays)]
        known = _forward_launch(call, arrays, (weight, bias))
        if not staging.size:
            _remember(key, known)
        staging.begin(call.x, stream)
    what, numbers = known
    x_at, residual_at, total_at, y_at = map(_at, arrays)
    arguments = (
        *(x_at, residual_at, _at(weight), _at(bias), total_at, y_at),
        *(_at(mean), _at(rstd), *numbers, call.eps, call.weight_offset),
    )
    driver.launch(what, arguments, stream)
    if staging is not None:
        staging.end(stream)


def _forward_launch(
    call: Forward, arrays: Sequence[DeviceArray | None], vectors: Sequence[DeviceArray | None]
) -> tuple[table.Launch, tuple[int, ...]]:
    """What is launched, and the arguments that shapes decide."""
    plan, rows, cols = _extent(call)
    lead = lead_axes(arrays, call.axes)
    access = width(call.x, cols, arrays, lead, vectors)
    count, steps = steps_of(lead, arrays)
    what = table.forward_launch(plan, rows, cols, access, bool(call.weight_offset), count)
    return what, (rows, cols, *steps)


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
        self.call, axes = call, call.axes
        dx, self.dweight, self.dbias = outputs
        self.weight, self.mean, self.rstd = call.weight, call.mean, call.rstd
        self.arrays = [call.dy, call.x, call.dresidual, dx]
        self.staging = staging = Staging()
        key = _key(call, (*self.arrays, self.weight, self.mean, self.rstd, self.dweight, self.dbias))
        known = _known.get(key)
        if known is not None:
            self.launches = known
            self.memory = staging.room((known.parts.size,), BYTE)
            return
        plan, rows, cols = _extent(call)
        formats = [
            (format_of(out.dtype) if out else plan.weight or plan.x) if wanted else None
            for out, wanted in zip(outputs[1:], call.mask[1:], strict=True)
        ]
        plan = plan._replace(dweight=formats[0], dbias=formats[1])
        parts = table.workspace(plan, rows, cols)
        self.memory = staging.room((parts.size,), BYTE)
        size = staging.size
        self.weight = staging.vector(self.weight)
        self.mean, self.rstd = staging.vector(self.mean, DOUBLE), staging.vector(self.rstd, DOUBLE)
        self.dweight, self.dbias = (staging.vector(array, written=True) for array in (self.dweight, self.dbias))
        self.arrays = [staging.rows(array, axes, written=i == 3) for i, array in enumerate(self.arrays)]
        lead = lead_axes(self.arrays, axes)
        access = width(call.x, cols, self.arrays, lead, (self.weight,))
        count, steps = steps_of(lead, self.arrays)
        statistics = None
        if parts.rstd is not None:
            statistics = table.forward_launch(table.statistics_plan(plan), rows, cols, access, False, count)
        partials = table.partials(plan, rows, cols)
        self.launches = BackwardLaunches(
            parts,
            statistics,
            table.backward_launches(plan, rows, cols, access, bool(call.weight_offset), count),
            [
                (table.total_launch(plan, name, partials, cols), plan.dweight == name, plan.dbias == name)
                for name in dict.fromkeys(name for name in formats if name)
            ],
            count,
            (rows, cols),
            steps,
            partials,
        )
        if staging.size == size:
            _remember(key, self.launches)

    def launch(self, stream: int) -> None:
        """Statistics that are not given, then gradients by rows, then sums over rows."""
        call = self.call
        parts, statistics, launches, totals, lead, extent, steps, partials = self.launches
        self.staging.begin(call.x, stream, call.workspace)
        dy, x, dresidual, dx = map(_at, self.arrays)
        mean, rstd, sums, dweights, dbiases = (
            0 if offset is None else self.memory.pointer + offset for offset in parts[:5]
        )
        if statistics is not None:
            lengths, x_strides = steps[:lead], steps[2 * lead : 3 * lead]
            arguments = (
                *(x, *5 * (0,), mean, rstd, *extent, *lengths, *x_strides, *3 * lead * (0,)),
                *(call.eps, 0.0),
            )
            driver.launch(statistics, arguments, stream)
        arguments = (
            *(dy, x, _at(self.weight), _at(self.mean) or mean, _at(self.rstd) or rstd, dresidual, dx),
            *(sums, dweights, dbiases, *extent, *steps, call.eps, call.weight_offset),
        )
        for what in launches:
            driver.launch(what, arguments, stream)
        for what, of_dweight, of_dbias in totals:
            dweight = _at(self.dweight) if of_dweight else 0
            dbias = _at(self.dbias) if of_dbias else 0
            driver.launch(what, (dweights, dbiases, dweight, dbias, partials, extent[1]), stream)
        self.staging.end(stream)


class BackwardLaunches(NamedTuple):
    """What of a backward call follows from shapes, strides and formats."""

    parts: table.Workspace
    statistics: table.Launch | None
    launches: tuple[table.Launch, ...]
    totals: list[tuple[table.Launch, bool, bool]]
    """Each launch that adds up sums, and whether it does so for dweight and for dbias."""
    lead: int
    extent: tuple[int, int]
    """rows and cols."""
    steps: tuple[int, ...]
    """The lengths of the lead axes, then strides along them of dy, x, dresidual and dx."""
    partials: int


_known: dict[Any, Any] = {}
"""Launches of calls whose arrays are taken as they are, by all that they follow from: to find them takes 20 µs."""

MOST_KNOWN = 4096


def _key(call: Forward | Backward, arrays: Sequence[DeviceArray | None]) -> tuple[Any, ...]:
    """What the launches of a call follow from. Of an address no more counts than where it lies in 16 bytes."""
    return (
        call.plan,
        call.axes,
        call.weight_offset == 0,
        *[array and (array.shape, array.strides, array.dtype, array.pointer % ACCESS) for array in arrays],
    )


def _remember(key: tuple[Any, ...], launches: Any) -> None:
    if len(_known) >= MOST_KNOWN:
        _known.clear()
    _known[key] = launches


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
    cols = math.prod(x.shape[x.ndim - call.axes :])
    return plan, x.size // cols, cols


def _native(dtype: np.dtype) -> np.dtype:
    return dtype if dtype.isnative else dtype.newbyteorder("=")


def _at(array: DeviceArray | None) -> int:
    """An address for a kernel: 0 where there is no array."""
    return 0 if array is None else array.pointer
