"""From a checked call to kernels: rows, blocks of rows, threads, results."""

import math

import numpy as np

from .._threads import get_num_threads
from . import pool
from .layout import BUFFER, Rows, row_view
from .specialize import kernel

SPLIT = 2**18
"""Elements from which a second thread pays: it costs 20 to 50 µs, and that many elements take 100."""

JOB = 2**16
"""Elements of the smallest piece of work that a thread takes."""

MOST_BLOCKS = 32
"""Blocks of rows whose sums for dweight and dbias are kept apart, so that threads can work on them."""

MOST_SUMS = 2**15
"""The columns of those blocks together, at 16 bytes each."""

_NOTHING = np.empty(0)


def forward(call):
    """y, residual_out, mean and rstd of a checked call; the statistics are None unless they were asked for."""
    plan, x = call.plan, call.x
    y = np.empty(x.shape, _native(x.dtype)) if call.out is None else call.out
    total = call.residual_out
    if plan.other and total is None:
        total = np.empty(x.shape, _native(x.dtype))
    rows, cols = _extent(x, call.axes)
    mean = rstd = _NOTHING
    if call.return_stats:
        mean, rstd = np.full(rows, np.nan), np.full(rows, np.nan)
    if rows and cols:
        dtype = np.float64 if plan.double else np.float32
        weight = _scale(call, dtype, cols)
        bias = _vector(call.bias, dtype, cols)

        def work(arrays, first, start, stop):
            source, residual, total, y = arrays
            options = (mean[first:], rstd[first:], call.return_stats, call.eps)
            while True:
                start = kernel(plan)(
                    source, residual, weight, bias, total, y, *options, start, stop
                )
                if start == stop:
                    return
                if plan.other:  # this row has been added
                    alone = kernel(plan._replace(other=None), True)
                    start = alone(total, None, weight, bias, None, y, *options, start, start + 1)
                else:
                    start = kernel(plan, True)(
                        source, None, weight, bias, None, y, *options, start, stop
                    )

        ranges = _row_ranges(rows, cols)
        _over_rows(work, (x, call.residual), (total, y), call.axes, rows, cols, ranges)
    if not call.return_stats:
        return y, total, None, None
    kept = x.shape[: x.ndim - call.axes] + (1,) * call.axes
    return y, total, mean.reshape(kept), rstd.reshape(kept)


def backward(call):
    """dx, dweight and dbias of a checked call, None where they are masked out."""
    plan, x = call.plan, call.x
    rows, cols = _extent(x, call.axes)
    dx, dweight, dbias = call.out
    shape = x.shape[x.ndim - call.axes :]
    parameter = _native((x if call.weight is None else call.weight).dtype)
    if call.mask[0] and dx is None:
        dx = np.empty(x.shape, _native(x.dtype))
    if call.mask[1] and dweight is None:
        dweight = np.empty(shape, parameter)
    if call.mask[2] and dbias is None:
        dbias = np.empty(shape, parameter)
    sums = []
    if rows and cols and any(call.mask):
        weight = _scale(call, np.float64 if plan.double else np.float32, cols)
        mean, rstd = _statistics(call, rows)
        blocks = _row_blocks(rows, cols)
        width = 2 * cols if plan.double else cols
        sums = [
            [np.zeros(width) if wanted else None for wanted in (plan.dweight, plan.bias)]
            for _ in blocks
        ]

        def work(arrays, first, start, stop, block):
            dy, x, dresidual, dx = arrays
            options = (mean[first:], rstd[first:], dx, *sums[block], call.eps)
            extreme = False
            while start < stop:
                run = kernel(plan, extreme)
                start = run(dy, x, weight, dresidual, *options, start, stop)
                extreme = not extreme

        _over_rows(work, (call.dy, x, call.dresidual), (dx,), call.axes, rows, cols, blocks)
    for i, gradient in enumerate((dweight, dbias)):
        if gradient is not None:
            _write_total(gradient, [of_block[i] for of_block in sums], cols)
    return dx, dweight, dbias


def _native(dtype):
    return dtype if dtype.isnative else dtype.newbyteorder("=")


def _extent(x, axes):
    """The numbers of rows and columns."""
    cols = x.shape[-1] if axes == 1 else math.prod(x.shape[-axes:])
    return x.size // cols if cols else math.prod(x.shape[:-axes]), cols


def _scale(call, dtype, cols):
    """weight + weight_offset, added in the compute dtype."""
    weight = _vector(call.weight, dtype, cols)
    return weight + dtype(call.weight_offset) if call.weight_offset else weight


def _vector(array, dtype, cols):
    """A contiguous vector of the compute dtype: the array itself if it is one."""
    if array is None:
        return None
    if array.dtype == dtype and array.ndim == 1 and array.flags.c_contiguous and array.flags.aligned:
        return array
    return np.require(array, dtype, ["C", "A"]).reshape(cols)


def _statistics(call, rows):
    """mean and rstd as float64 vectors; RMSNorm's mean is not looked at."""
    if call.rstd is None:
        return _NOTHING, _NOTHING
    rstd = np.require(call.rstd, np.float64, ["C", "A"]).reshape(rows)
    if call.mean is None:
        return rstd, rstd
    return np.require(call.mean, np.float64, ["C", "A"]).reshape(rows), rstd


def _row_ranges(rows, cols):
    """(start, stop) of the pieces that threads take; how rows are cut does not touch their bits."""
    elements = rows * cols
    if elements < SPLIT:
        return [(0, rows)]
    threads = get_num_threads()
    count = 1 if threads == 1 else min(rows, 4 * threads, elements // JOB)
    return [(rows * i // count, rows * (i + 1) // count) for i in range(count)]


def _row_blocks(rows, cols):
    """(start, stop, number) of the blocks that sum dweight and dbias; the shape alone decides."""
    count = max(1, min(MOST_BLOCKS, rows * cols // (2 * JOB), MOST_SUMS // cols))
    size = -(-rows // count)
    return [(start, min(start + size, rows), i) for i, start in enumerate(range(0, rows, size))]


def _write_total(gradient, sums, cols):
    """Add the sums of all blocks in order and round once. Sums of float64 carry their errors behind them."""
    total = np.zeros(cols)
    error = np.zeros(cols)
    with np.errstate(all="ignore"):  # as IEEE says, without a warning
        for block in sums:
            value = block[:cols]
            added = total + value
            error += (total - (added - (added - total))) + (value - (added - total))
            total = added
            if block.size > cols:
                error += block[cols:]
        finite = np.isfinite(total)
        np.add(total, error, out=total, where=finite)
        np.copyto(gradient, total.reshape(gradient.shape), casting="same_kind")


def _over_rows(work, inputs, outputs, axes, rows, cols, jobs):
    """Call work(arrays, first, start, stop, ...) for every job (start, stop, ...), on as many threads as pay.

    The arrays are 3-d, and their rows start to stop are rows first + start to first + stop of the
    call.
    """
    arrays = (*inputs, *outputs)
    views = [None if a is None else row_view(a, axes, rows, cols) for a in arrays]
    if all(a is None or v is not None for a, v in zip(arrays, views, strict=True)):

        def job(start, stop, *rest):
            work(views, 0, start, stop, *rest)

    else:
        job = _staged(work, arrays, views, len(inputs), axes, cols)
    pool.run(job, jobs, 1 if len(jobs) == 1 else get_num_threads())


def _staged(work, arrays, views, inputs, axes, cols):
    """A job that takes arrays without a view as rows through buffers."""
    # A view whose rows run along two axes cannot be cut into ranges of rows.
    sources = [
        None if a is None else Rows(a, v if v is not None and len(v) == 1 else None, axes)
        for a, v in zip(arrays, views, strict=True)
    ]
    step = max(2, BUFFER // cols // 2 * 2)

    def job(start, stop, *rest):
        for first in range(start, stop, step):
            last = min(first + step, stop)
            tiles = [
                s and (s.read(first, last) if i < inputs else s.buffer(first, last))
                for i, s in enumerate(sources)
            ]
            work(tiles, first, 0, last - first, *rest)
            for s, tile in zip(sources[inputs:], tiles[inputs:], strict=True):
                if s is not None:
                    s.write(first, last, tile)

    return job
