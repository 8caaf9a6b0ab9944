"""From a checked call to kernels and back: allocates results, and never checks."""

import numpy as np

from .layout import as_elements
from .machine import streaming_size
from .specialize import kernel, total_kernel
from .work import (
    JOB,
    extent,
    native,
    over_copies,
    over_views,
    parameter,
    row_ranges,
    row_views,
    scale,
    spread,
    vector,
)

MOST_BLOCKS = 32
"""Blocks of rows whose sums for dweight and dbias are kept apart, so that threads can share the rows."""

WIDE = 2**15
"""Columns from which gradients are applied range by range. Below, the sums of all blocks, at 16 bytes
a column, take half a megabyte at most."""

RANGE = 2**14
"""Columns of such a range: 256 KB of sums, in the second cache."""

STREAMED = streaming_size()
"""Bytes of an output from which its long rows are written past the cache."""

LONG_ROW = 8192
"""Bytes of a long row. Shorter ones overlap with their neighbours by themselves: 16384 x 1024 of float32
took 0.9 to 1.4 times a copy with ordinary stores and 1.5 without, 4096 x 4096 took 2.0 and 1.3."""

_NOTHING = np.empty(0)


def forward(call):
    """y, residual_out, mean and rstd of a checked call; the last two None unless asked for."""
    plan, x, residual, weight, bias, y, total, axes, eps, _, return_stats = call
    if y is None:
        y = np.empty(x.shape, native(x.dtype))
    if plan.other and total is None:
        total = np.empty(x.shape, native(x.dtype))
    rows, cols = extent(x, axes)
    mean = rstd = _NOTHING
    if return_stats:
        mean, rstd = np.full(rows, np.nan), np.full(rows, np.nan)
    if rows and cols:
        weight, bias = scale(call), parameter(bias)
        jobs = row_ranges(rows, cols)
        views = row_views((x, residual, total, y), axes, rows, cols)
        stream = (
            y.nbytes >= STREAMED
            and cols * y.itemsize >= LONG_ROW
            and x is not y
            and views is not None
        )
        ordinary = kernel(plan, False, "stream" if stream else "")

        def work(arrays, first, start, stop):
            source, residual, total, y = arrays
            kept = (mean[first:], rstd[first:]) if first else (mean, rstd)
            options = (*kept, return_stats, eps)
            while True:
                start = ordinary(source, residual, weight, bias, total, y, *options, start, stop)
                if start == stop:
                    return
                # An extreme row. With a residual, it has been added already.
                run = kernel(plan._replace(other=None), True)
                if plan.other:
                    start = run(total, None, weight, bias, None, y, *options, start, start + 1)
                else:
                    start = run(source, None, weight, bias, None, y, *options, start, stop)
                if start == stop:
                    return

        if views is not None:
            over_views(work, views, jobs)
        else:
            over_copies(work, (x, residual), (total, y), axes, rows, cols, jobs)
    if not return_stats:
        return y, total, None, None
    kept = x.shape[: x.ndim - axes] + (1,) * axes
    return y, total, mean.reshape(kept), rstd.reshape(kept)


def backward(call):
    """dx, dweight and dbias of a checked call, None where they are masked out."""
    x, axes = call.x, call.axes
    shape = x.shape[x.ndim - axes :]
    dtype = native((x if call.weight is None else call.weight).dtype)
    dx, dweight, dbias = call.out
    if call.mask[0] and dx is None:
        dx = np.empty(x.shape, native(x.dtype))
    if call.mask[1] and dweight is None:
        dweight = np.empty(shape, dtype)
    if call.mask[2] and dbias is None:
        dbias = np.empty(shape, dtype)
    rows, cols = extent(x, axes)
    if not (rows and cols):
        for gradient in (dweight, dbias):
            if gradient is not None:
                gradient.fill(0)
    elif any(call.mask):
        arrays = (call.dy, x, call.dresidual, dx)
        views = row_views(arrays, axes, rows, cols)
        way = _by_rows if views is None or cols <= WIDE else _by_columns
        way(call, arrays, views, (dweight, dbias), rows, cols)
    return dx, dweight, dbias


def _by_rows(call, arrays, views, gradients, rows, cols):
    """Gradients in one pass; dweight and dbias as sums of blocks of rows, which the shape decides."""
    plan, weight, (mean, rstd) = call.plan, scale(call), _statistics(call)
    count = max(1, min(MOST_BLOCKS, rows * cols // (2 * JOB), WIDE // cols))
    size = -(-rows // count)
    blocks = [(s, min(s + size, rows), i) for i, s in enumerate(range(0, rows, size))]
    sums = _sums(plan, len(blocks), cols)

    def work(tiles, first, start, stop, block):
        dy, x, dresidual, dx = tiles
        kept = (mean[first:], rstd[first:]) if first else (mean, rstd)
        own = [None if s is None else s[block] for s in sums]
        options = (*kept, np.empty((2, 6)), dx, *own, call.eps)
        _run(plan, "", (dy, x, weight, dresidual, *options), start, stop)

    if views is not None:
        over_views(work, views, blocks)
    else:
        over_copies(work, arrays[:3], arrays[3:], call.axes, rows, cols, blocks)
    for gradient, of_blocks in zip(gradients, sums, strict=True):
        if gradient is not None:
            flat = _flat(gradient)
            total_kernel(plan, flat.dtype)(of_blocks, flat)
            _put_flat(gradient, flat)


def _by_columns(call, arrays, views, gradients, rows, cols):
    """The same bits for very wide rows: first what rows need, then ranges of columns, all rows of each."""
    plan, weight, (mean, rstd) = call.plan, scale(call), _statistics(call)
    dy, x, dresidual, dx = views
    parameters = np.empty((rows, 6))
    gather = plan._replace(out=None, dweight=False, dbias=False, dresidual=None)

    def gather_rows(start, stop):
        options = (mean, rstd, parameters, None, None, None, call.eps)
        _run(gather, "gather", (dy, x, weight, None, *options), start, stop)

    spread(gather_rows, row_ranges(rows, cols))
    apply = plan._replace(option=False)
    flats = [None if g is None else _flat(g) for g in gradients]

    def apply_range(start, stop):
        def cut(array):
            return None if array is None else array[..., start:stop]

        sums = _sums(plan, 1, stop - start)
        own = [None if s is None else s[0] for s in sums]
        options = (mean, rstd, parameters, cut(dx), *own, call.eps)
        tiles = (cut(dy), cut(x), cut(weight), cut(dresidual))
        _run(apply, "apply", (*tiles, *options), 0, rows)
        for flat, total in zip(flats, sums, strict=True):
            if flat is not None:
                total_kernel(plan, flat.dtype)(total, flat[start:stop])

    spread(apply_range, [(s, min(s + RANGE, cols)) for s in range(0, cols, RANGE)])
    for gradient, flat in zip(gradients, flats, strict=True):
        if gradient is not None:
            _put_flat(gradient, flat)


def _statistics(call):
    """mean and rstd as vectors; RMSNorm's mean is not looked at."""
    rstd = _NOTHING if call.rstd is None else vector(call.rstd, np.float64)
    return (rstd if call.mean is None else vector(call.mean, np.float64)), rstd


def _run(plan, phase, arguments, start, stop):
    """Run a backward kernel over rows, extreme ones with its specialization for them."""
    extreme = False
    while start < stop:
        start = kernel(plan, extreme, phase)(*arguments, start, stop)
        extreme = not extreme


def _sums(plan, blocks, cols):
    """Zeros to add the terms of dweight and dbias to; for float64 with room for what additions lose."""
    shape = (blocks, 2 * cols if plan.double else cols)
    return [np.zeros(shape) if wanted else None for wanted in (plan.dweight, plan.dbias)]


def _flat(gradient):
    """A contiguous vector of elements for kernels: the array's own, or new."""
    flags = gradient.flags
    if not (flags.c_contiguous and flags.aligned and gradient.dtype.isnative):
        gradient = np.empty(gradient.shape, native(gradient.dtype))
    return as_elements(gradient.reshape(-1))


def _put_flat(gradient, flat):
    if not np.may_share_memory(gradient, flat):
        gradient[...] = flat.view(native(gradient.dtype)).reshape(gradient.shape)
