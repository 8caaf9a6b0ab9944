"""From a checked call to launches and back: allocates results, orders streams, and never waits for the device."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from .._checks import format_of
from .._plan import Backward, Forward, Plan
from . import driver, table
from .arrays import DeviceArray
from .layout import ACCESS, accesses, lead_axes, steps_of, width
from .results import empty, handed_over
from .staging import Staging, memory_for
from .streams import LEGACY, stream_address

DOUBLE = np.dtype(np.float64)
BYTE = np.dtype(np.uint8)
NAN = 0xFF
"""The byte that fills a float64 with NaN."""

Arrays = Sequence[DeviceArray | None]


def forward(call: Forward, known: Any = None) -> tuple[Any, Any, Any, Any]:
    """y, residual_out, mean and rstd of a checked call, None where they are not asked for.

    `known` remembers the launches of calls like this one.
    """
    x, plan, y, total = call.x, call.plan, call.out, call.residual_out
    mean = rstd = None
    stream, others = _streams(call, (x, call.residual, call.weight, call.bias, y, total))
    with driver.on(x.device):
        _order(others, (stream,))
        if y is None:
            y = empty(x, x.shape, _native(x.dtype), stream)
        if total is None and plan.other:
            total = empty(x, x.shape, _native(x.dtype), stream)
        if plan.rstd:
            kept = x.shape[: x.ndim - call.axes] + (1,) * call.axes
            mean = empty(x, kept, DOUBLE, stream) if plan.mean else None
            rstd = empty(x, kept, DOUBLE, stream)
        if 0 not in x.shape:
            _forward(call, known, y, total, mean, rstd, stream)
        else:
            for statistic in (mean, rstd):
                _fill(statistic, NAN, stream)
        _order((stream,), others)
    return handed_over(y), handed_over(total), handed_over(mean), handed_over(rstd)


def _forward(
    call: Forward, known: Any, y: DeviceArray, total: DeviceArray | None, mean: DeviceArray | None,
    rstd: DeviceArray | None, stream: int,
) -> None:  # fmt: skip
    arrays: Arrays = (call.x, call.residual, total, y)
    weight, bias, staging = call.weight, call.bias, None
    place = _place((total, y))
    found = known.launches.get(place) if known else None
    if found is None:
        staging = Staging()
        weight, bias = staging.vector(weight), staging.vector(bias)
        arrays = [staging.rows(array, call.axes, written=i > 1) for i, array in enumerate(arrays)]
        found = _forward_launch(call, arrays, (weight, bias))
        if known and not staging.size:
            known.launches[place] = found
        staging.begin(call.x, stream)
    what, numbers = found
    x, residual, residual_out, out = map(_at, arrays)
    arguments = (
        *(x, residual, _at(weight), _at(bias), residual_out, out, _at(mean), _at(rstd)),
        *numbers,
        *(call.eps, call.weight_offset),
    )
    driver.launch(what, arguments, stream)
    if staging is not None:
        staging.end(stream)


def _forward_launch(call: Forward, arrays: Arrays, vectors: Arrays) -> tuple[table.Launch, tuple[int, ...]]:
    """What is launched, and the arguments that shapes decide."""
    plan, rows, cols = _extent(call)
    lead = lead_axes(arrays, call.axes)
    elements = width(call.x, cols, arrays, lead, vectors)
    count, steps = steps_of(lead, arrays)
    offset = bool(call.weight_offset)
    what = table.forward_launch(plan, rows, cols, elements, offset, count, accesses(arrays))
    return what, (rows, cols, *steps)


def backward(call: Backward, known: Any = None) -> tuple[Any, Any, Any]:
    """dx, dweight and dbias of a checked call, None where they are masked out."""
    x, mask = call.x, call.mask
    outputs: Arrays = call.out
    given = (call.dy, x, call.weight, call.mean, call.rstd, call.dresidual, call.workspace, *outputs)
    stream, others = _streams(call, given)
    with driver.on(x.device):
        _order(others, (stream,))
        if any(wanted and out is None for wanted, out in zip(mask, outputs, strict=True)):
            outputs = _allocated(call, stream)
        if any(mask) and 0 not in x.shape:
            _backward(call, known, outputs, stream)
        elif any(mask):
            _clear(call, outputs[1:], stream)
        _order((stream,), others)
    dx, dweight, dbias = map(handed_over, outputs)
    return dx, dweight, dbias


def _allocated(call: Backward, stream: int) -> Arrays:
    """The outputs of a call, new ones for those that are wanted and not given."""
    x = call.x
    parameter = x if call.weight is None else call.weight
    shapes = (x.shape, *2 * (x.shape[x.ndim - call.axes :],))
    return tuple(
        empty(x, shape, _native(array.dtype), stream) if wanted and out is None else out
        for shape, array, wanted, out in zip(shapes, (x, parameter, parameter), call.mask, call.out, strict=True)
    )


def _backward(call: Backward, known: Any, outputs: Arrays, stream: int) -> None:
    place = _place(outputs)
    found = known.launches.get(place) if known else None
    if found is None:
        gradients = Gradients(call, outputs)
        if known and gradients.takes_arrays_as_they_are:
            known.launches[place] = gradients.launches
        gradients.staging.begin(call.x, stream, call.workspace)
        gradients.launches.run(
            call, gradients.arrays, gradients.vectors, gradients.sums, gradients.memory.pointer, stream
        )
        gradients.staging.end(stream)
    else:
        dx, *sums = outputs
        memory = memory_for(call.x, found.parts.size, stream, call.workspace)
        arrays, vectors = (call.dy, call.x, call.dresidual, dx), (call.weight, call.mean, call.rstd)
        found.run(call, arrays, vectors, sums, _at(memory), stream)


class Gradients:
    """What a backward call with rows and columns launches, and the scratch memory that it needs."""

    def __init__(self, call: Backward, outputs: Arrays) -> None:
        self.staging = staging = Staging()
        dx, *sums = outputs
        plan, rows, cols = _extent(call)
        formats = [
            (format_of(out.dtype) if out else plan.weight or plan.x) if wanted else None
            for out, wanted in zip(sums, call.mask[1:], strict=True)
        ]
        plan = plan._replace(dweight=formats[0], dbias=formats[1])
        parts = table.workspace(plan, rows, cols)
        self.memory = staging.room((parts.size,), BYTE)
        size = staging.size
        self.vectors = [
            staging.vector(call.weight), staging.vector(call.mean, DOUBLE), staging.vector(call.rstd, DOUBLE)
        ]  # fmt: skip
        self.sums = [staging.vector(array, written=True) for array in sums]
        arrays = (call.dy, call.x, call.dresidual, dx)
        self.arrays = [staging.rows(array, call.axes, written=i == 3) for i, array in enumerate(arrays)]
        self.takes_arrays_as_they_are = staging.size == size
        lead = lead_axes(self.arrays, call.axes)
        elements, access = width(call.x, cols, self.arrays, lead, self.vectors[:1]), accesses(self.arrays)
        count, steps = steps_of(lead, self.arrays)
        statistics = None
        if parts.rstd is not None:
            of_x_alone = (access[1], *3 * (table.WHOLE,))
            launch = table.forward_launch(
                table.statistics_plan(plan), rows, cols, elements, False, count, of_x_alone
            )  # fmt: skip
            lengths, of_x = steps[:count], steps[2 * count : 3 * count]
            statistics = launch, (rows, cols, *lengths, *of_x, *3 * count * (0,))
        partials = table.partials(plan, rows, cols)
        in_place = dx is not None and dx.pointer in (call.dy.pointer, call.x.pointer)
        of_sums = plan._replace(other=None) if in_place else plan  # dx was written over what could be added up again
        self.launches = BackwardLaunches(
            parts,
            statistics,
            table.backward_launches(plan, rows, cols, elements, bool(call.weight_offset), count, access),
            (rows, cols, *steps),
            [
                (table.total_launch(of_sums, name, cols, count, access), plan.dweight == name, plan.dbias == name)
                for name in dict.fromkeys(name for name in formats if name)
            ],
            (partials, rows, cols, *steps[: 3 * count]),
        )


class BackwardLaunches(NamedTuple):
    """What of a backward call follows from shapes, strides and formats."""

    parts: table.Workspace
    statistics: tuple[table.Launch, tuple[int, ...]] | None
    """The launch that finds statistics which are not given, and its arguments that shapes decide; and so on."""
    gradients: tuple[table.Launch, ...]
    numbers: tuple[int, ...]
    totals: list[tuple[table.Launch, bool, bool]]
    """Each launch that adds up sums, and whether it does so for dweight and for dbias."""
    numbers_of_totals: tuple[int, ...]

    def run(self, call: Backward, arrays: Arrays, vectors: Arrays, sums: Arrays, memory: int, stream: int) -> None:
        """Statistics that are not given, then gradients by rows, then sums over rows.

        `arrays` are dy, x, dresidual and dx; `vectors` weight, mean and rstd; `sums` dweight and dbias.
        """
        dy, x, dresidual, dx = map(_at, arrays)
        weight, mean, rstd = map(_at, vectors)
        own_mean, own_rstd, row_sums, dweights, dbiases = [
            0 if offset is None else memory + offset for offset in self.parts[:5]
        ]
        if self.statistics is not None:
            what, numbers = self.statistics
            driver.launch(what, (x, *5 * (0,), own_mean, own_rstd, *numbers, call.eps, 0.0), stream)
        arguments = (
            *(dy, x, weight, mean or own_mean, rstd or own_rstd, dresidual, dx, row_sums, dweights, dbiases),
            *self.numbers,
            *(call.eps, call.weight_offset),
        )
        for what in self.gradients:
            driver.launch(what, arguments, stream)
        dweight, dbias = map(_at, sums)
        for what, of_dweight, of_dbias in self.totals:
            targets = dweight if of_dweight else 0, dbias if of_dbias else 0
            sources = dy, x, mean or own_mean, rstd or own_rstd, dweights, dbiases
            driver.launch(what, (*sources, *targets, *self.numbers_of_totals), stream)


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


def _streams(call: Forward | Backward, arrays: Arrays) -> tuple[int, list[int]]:
    """The stream of a call, and the others that its arrays name; x's device, which is asked for if x says none.

    The call waits for what the arrays' own streams have been given, and these then wait for it: outputs are to be
    read on them, and a library may use an input's memory anew as soon as the array is let go of.
    """
    x = call.x
    stream = stream_address(call.stream) if call.stream is not None else x.stream or LEGACY
    others: list[int] = []
    for array in arrays:
        if array is not None:
            other = array.stream
            if other is not None and other != stream and other not in others:
                others.append(other)
    if x.device is None and x.pointer:
        x.device = driver.device_of(x.pointer)
    return stream, others


def _order(first: Sequence[int], second: Sequence[int]) -> None:
    """Let streams wait for what others have been given."""
    for one in first:
        for other in second:
            driver.order(one, other)


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


def _place(outputs: Arrays) -> tuple[int | None, ...]:
    """Where in 16 bytes outputs lie: of new ones no layout has told it."""
    return tuple([None if output is None else output.pointer % ACCESS for output in outputs])
