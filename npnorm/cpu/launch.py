"""From a checked call to kernels and back: allocates results, and never checks."""

import numpy as np

from .specialize import kernel
from .work import (
    JOB,
    Arrays,
    extent,
    native,
    parameter,
    row_ranges,
    scale,
    spread,
    vector,
)

MOST_BLOCKS = 32
"""Blocks of rows whose sums for dweight and dbias are kept apart, so that threads can share the rows."""

WIDE = 2**15
"""Columns from which gradients are applied range by range. Below, the sums of all blocks, at 16 bytes
a column, take half a megabyte at most."""

RANGE = 4096
"""Columns of such a range: 64 KB of sums."""

_NOTHING = np.empty(0)


def forward(call):
    """y, residual_out, mean and rstd of a checked call; the last two None unless asked for."""
    plan, x = call.plan, call.x
    y = np.empty(x.shape, native(x.dtype)) if call.out is None else call.out
    total = call.residual_out
    if plan.other and total is None:
        total = np.empty(x.shape, native(x.dtype))
    rows, cols = extent(x, call.axes)
    mean = rstd = _NOTHING
    if call.return_stats:
        mean, rstd = np.full(rows, np.nan), np.full(rows, np.nan)
    if rows and cols:
        weight, bias = scale(call), parameter(call.bias)

        def work(arrays, first, start, stop):
            source, residual, total, y = arrays
            options = (mean[first:], rstd[first:], call.return_stats, call.eps)
            while True:
                run = kernel(plan)
                start = run(source, residual, weight, bias, total, y, *options, start, stop)
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

        arrays = Arrays((x, call.residual), (total, y), call.axes, rows, cols)
        arrays.over_rows(work, row_ranges(rows, cols))
    if not call.return_stats:
        return y, total, None, None
    kept = x.shape[: x.ndim - call.axes] + (1,) * call.axes
    return y, total, mean.reshape(kept), rstd.reshape(kept)


def backward(call):
    """dx, dweight and dbias of a checked call, None where they are masked out."""
    x = call.x
    shape = x.shape[x.ndim - call.axes :]
    dtype = native((x if call.weight is None else call.weight).dtype)
    dx, dweight, dbias = call.out
    if call.mask[0] and dx is None:
        dx = np.empty(x.shape, native(x.dtype))
    if call.mask[1] and dweight is None:
        dweight = np.empty(shape, dtype)
    if call.mask[2] and dbias is None:
        dbias = np.empty(shape, dtype)
    rows, cols = extent(x, call.axes)
    if not (rows and cols):
        for gradient in (dweight, dbias):
            if gradient is not None:
                gradient.fill(0)
    elif any(call.mask):
        arrays = Arrays((call.dy, x, call.dresidual), (dx,), call.axes, rows, cols)
        weight = scale(call)
        # RMSNorm's mean is not looked at.
        rstd = _NOTHING if call.rstd is None else vector(call.rstd, np.float64)
        mean = rstd if call.mean is None else vector(call.mean, np.float64)
        way = _by_columns if cols > WIDE and arrays.are_views else _by_rows
        way(call, arrays, weight, mean, rstd, dweight, dbias, rows, cols)
    return dx, dweight, dbias


def _by_rows(call, arrays, weight, mean, rstd, dweight, dbias, rows, cols):
    """Gradients in one pass; dweight and dbias as sums of blocks of rows, which the shape alone decides."""
    plan = call.plan
    count = max(1, min(MOST_BLOCKS, rows * cols // (2 * JOB), WIDE // cols))
    size = -(-rows // count)
    blocks = [(s, min(s + size, rows), i) for i, s in enumerate(range(0, rows, size))]
    sums = [_sums(plan, cols) for _ in blocks]

    def work(tiles, first, start, stop, block):
        dy, x, dresidual, dx = tiles
        room = np.empty((2, 6))
        options = (mean[first:], rstd[first:], room, dx, *sums[block], call.eps)
        _run(plan, "", (dy, x, weight, dresidual, *options), start, stop)

    arrays.over_rows(work, blocks)
    for gradient, of_blocks in zip((dweight, dbias), zip(*sums, strict=True), strict=True):
        if gradient is not None:
            _put_total(gradient, of_blocks, cols)


def _by_columns(call, arrays, weight, mean, rstd, dweight, dbias, rows, cols):
    """The same bits for very wide rows: first what rows need, then ranges of columns, all rows of each."""
    plan, (dy, x, dresidual, dx) = call.plan, arrays.views
    parameters = np.empty((rows, 6))
    gather = plan._replace(out=None, dweight=False, dbias=False, dresidual=None)

    def gather_rows(start, stop):
        options = (mean, rstd, parameters, None, None, None, call.eps)
        _run(gather, "gather", (dy, x, weight, None, *options), start, stop)

    spread(gather_rows, row_ranges(rows, cols))
    apply = plan._replace(option=False)
    gradients = [None if g is None else _flat(g) for g in (dweight, dbias)]

    def apply_range(start, stop):
        def cut(array):
            return None if array is None else array[..., start:stop]

        sums = _sums(plan, stop - start)
        options = (mean, rstd, parameters, cut(dx), *sums, call.eps)
        tiles = (cut(dy), cut(x), cut(weight), cut(dresidual))
        _run(apply, "apply", (*tiles, *options), 0, rows)
        for gradient, total in zip(gradients, sums, strict=True):
            if gradient is not None:
                _put_total(gradient[start:stop], [total], stop - start)

    spread(apply_range, [(s, min(s + RANGE, cols)) for s in range(0, cols, RANGE)])
    for gradient, flat in zip((dweight, dbias), gradients, strict=True):
        if flat is not None and not np.may_share_memory(gradient, flat):
            gradient[...] = flat.reshape(gradient.shape)


def _run(plan, phase, arguments, start, stop):
    """Run a backward kernel over rows, extreme ones with its specialization for them."""
    extreme = False
    while start < stop:
        start = kernel(plan, extreme, phase)(*arguments, start, stop)
        extreme = not extreme


def _sums(plan, cols):
    """Zeros to add the terms of dweight and dbias to; for float64 with room for what additions lose."""
    width = 2 * cols if plan.double else cols
    return [np.zeros(width) if wanted else None for wanted in (plan.dweight, plan.dbias)]


def _flat(gradient):
    """A contiguous array as a vector, or a new vector."""
    if gradient.flags.c_contiguous:
        return gradient.reshape(-1)
    return np.empty(gradient.size, native(gradient.dtype))


def _put_total(gradient, blocks, cols):
    """Add the sums of all blocks in order and round once."""
    total = blocks[0][:cols]
    error = blocks[0][cols:]  # empty unless sums are of float64
    with np.errstate(all="ignore"):  # as IEEE says, without a warning
        for block in blocks[1:]:
            value = block[:cols]
            added = total + value
            if error.size:
                part = added - total
                error += (total - (added - part)) + (value - part) + block[cols:]
            total = added
        if error.size:
            total = np.where(np.isfinite(total), total + error, total)
        if gradient.dtype.name == "bfloat16":
            total = _round_to_odd(total)
        np.copyto(gradient, total.reshape(gradient.shape), casting="same_kind")


def _round_to_odd(values):
    """float64 as float32, such that the cast to bfloat16, which goes that way, rounds once."""
    nearest = values.astype(np.float32)
    bits = nearest.view(np.uint32)
    bits -= np.abs(nearest) > np.abs(values)
    bits |= nearest != values
    return nearest
