"""From a checked call to kernels and back: allocates results, and never checks."""

import numpy as np

from .._checks import format_of
from .._threads import get_num_threads
from .gradients import PARAMETERS
from .layout import column_range
from .machine import streaming_size
from .rows import LEAF
from .runs import run_backward, run_forward
from .specialize import kernel, total_kernel
from .work import (
    JOB,
    SPLIT,
    WIDE,
    block_count,
    cut,
    extent,
    from_row,
    native,
    over_copies,
    over_views,
    parameter,
    pieces,
    row_ranges,
    row_views,
    scale,
    spread,
    statistic,
)

RANGE = 2**14
"""Columns of a range in which all rows of a very wide array get their gradients: 256 KB of sums, in the
second cache."""

STREAMED = streaming_size()
"""Bytes of an output from which its long rows are written past the cache, and the rows after them fetched."""

LONG_ROW = 1024
"""Bytes of a long row. Of float32, 65536 x 256 took 0.9 to 1.2 times a copy with ordinary stores and 0.8 with others,
131072 x 128 took 1.0 and 1.1."""

SHORT = 256
"""Columns up to which rows are done four at a time: 65536 x 64 took 22 ns a row one by one and 17 by fours. From 384
columns on there is no gain, and from memory a loss."""

LONG_GRADIENT, LONG_GRADIENT_ALONE = 2048, 6144
"""Bytes of a long row of dx, with sums for dweight or dbias and without. Of float32, 16384 x 512 took 5.5 times a copy
with ordinary stores and 2.2 with others, 16384 x 384 took 2.9 and 3.4; dx alone took 1.4 and 1.6 for 8192 x 1024, 1.7
and 1.3 for 4096 x 1536."""


def forward(call):
    """y, residual_out, mean and rstd of a checked call, None where they are not asked for."""
    plan, x, residual, weight, bias, y, total, axes, eps, *_ = call
    if y is None:
        y = np.empty(x.shape, native(x.dtype))
    if plan.other and total is None:
        total = np.empty(x.shape, native(x.dtype))
    rows, cols = extent(x, axes)
    mean = np.full(rows, np.nan) if plan.mean else None
    rstd = np.full(rows, np.nan) if plan.rstd else None
    if rows and cols:
        weight, bias = scale(call, plan.double), parameter(bias)
        jobs = row_ranges(rows, cols)
        views = row_views((x, residual, total, y), axes, rows, cols)
        phase = _phase(call, y, cols, views)

        def work(arrays, first, start, stop):
            kept = (from_row(mean, first), from_row(rstd, first))
            x, residual, total, y = arrays
            options = (x, residual, weight, bias, total, y, *kept, eps, cols)
            run_forward(plan, phase, options, start, stop)

        if views is None:
            over_copies(work, (x, residual), (total, y), axes, rows, cols, jobs)
        elif _is_wide(plan, rows, cols):
            _by_leaves(call, work, views, (weight, bias), rows, cols)
        else:
            over_views(work, views, jobs)
    return y, total, _kept(mean, x, axes), _kept(rstd, x, axes)


def _by_leaves(call, work, views, parameters, rows, cols):
    """Rows one after another, each shared by the threads: first its sums, then its elements."""
    gather, apply = (kernel(call.plan, False, phase) for phase in ("gather", "apply"))
    leaves = -(-cols // LEAF)
    ranges = cut(leaves, pieces(cols))
    arguments = (views[0], *parameters, views[3], np.empty(2 * leaves), call.eps, cols)
    for i in range(rows):
        ordinary: list[bool] = []

        def gather_leaves(start, stop, i=i):
            gather(*arguments, i, start, stop)

        def apply_leaves(start, stop, i=i, ordinary=ordinary):
            ordinary.append(apply(*arguments, i, start, stop))

        spread(gather_leaves, ranges)
        spread(apply_leaves, ranges)
        if not all(ordinary):
            work(views, 0, i, i + 1)


def _phase(call, y, cols, views):
    """The phase of the kernel for a forward call."""
    if views is not None and y.nbytes >= STREAMED and cols * y.itemsize >= LONG_ROW and call.x is not y:
        return "stream"
    return "short" if cols <= SHORT and y.size >= SPLIT and _is_simple(call.plan) else ""


def _is_wide(plan, rows, cols):
    """Whether threads had better share each row."""
    return _is_simple(plan) and cols >= SPLIT and rows <= get_num_threads() // 2


def _is_simple(plan):
    """Whether there are special kernels for short and wide rows: not for options that few have."""
    return not (plan.double or plan.other or plan.rstd)


def _kept(statistic, x, axes):
    """Statistics in the shape that broadcasts against x."""
    if statistic is None:
        return None
    return statistic.reshape(x.shape[: x.ndim - axes] + (1,) * axes)


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
        gradients = (dweight, dbias)
        # Above half of WIDE there is one block of rows, which threads cannot share.
        wide = cols > WIDE or (cols > WIDE // 2 and get_num_threads() > 1)
        if wide and views is not None and any(call.mask[1:]):
            _by_columns(call, views, gradients, rows, cols)
        else:
            _by_rows(call, arrays, views, gradients, rows, cols)
    return dx, dweight, dbias


def _by_rows(call, arrays, views, gradients, rows, cols):
    """Gradients in one pass; dweight and dbias as sums of blocks of rows, which the shape decides."""
    plan, weight = call.plan, scale(call, call.plan.double)
    mean, rstd = statistic(call.mean), statistic(call.rstd)
    blocks = [(*block, i) for i, block in enumerate(_blocks(plan, rows, cols))]
    sums = _sums(plan, len(blocks), cols)
    phase = "stream" if views is not None and _is_streamed(call, rows, cols) else ""

    def work(tiles, first, start, stop, block):
        dy, x, dresidual, dx = tiles
        own = [None if s is None else s[block] for s in sums]
        options = (from_row(mean, first), from_row(rstd, first), None, dx, *own, call.eps, cols)
        run_backward(plan, phase, (dy, x, weight, dresidual, *options), start, stop)

    if views is not None:
        over_views(work, views, blocks)
    else:
        over_copies(work, arrays[:3], arrays[3:], call.axes, rows, cols, blocks)
    for gradient, of_blocks in zip(gradients, sums, strict=True):
        if gradient is not None:
            flat = _flat(gradient)
            _add_up(plan, of_blocks, flat)
            _put_flat(gradient, flat)


def _by_columns(call, views, gradients, rows, cols):
    """The same bits for very wide rows: first what rows need, then ranges of columns, all rows of each."""
    plan, weight = call.plan, scale(call, call.plan.double)
    dy, x = views[:2]
    parameters = np.empty((rows, PARAMETERS))
    given = (statistic(call.mean), statistic(call.rstd), parameters, None, None, None)
    gather = plan._replace(out=None, dweight=None, dbias=None, dresidual=None)

    def gather_rows(start, stop):
        run_backward(gather, "gather", (dy, x, weight, None, *given, call.eps, cols), start, stop)

    spread(gather_rows, row_ranges(rows, cols))
    apply = plan._replace(mean=None, rstd=None)
    flats = [None if g is None else _flat(g).reshape(-1) for g in gradients]

    def apply_range(start, stop):
        dy, x, dresidual, dx = (column_range(view, rows, cols, start, stop) for view in views)
        part = None if weight is None else weight.reshape(-1)[start:stop]
        sums = _sums(plan, 1, stop - start)
        options = (None, None, parameters, dx, *sums, call.eps, stop - start)
        run_backward(apply, "apply", (dy, x, part, dresidual, *options), 0, rows)
        for flat, total in zip(flats, sums, strict=True):
            if flat is not None:
                _add_up(plan, total, flat[start:stop])

    size = max(RANGE, min(4 * RANGE, JOB // rows))
    count = -(-cols // (size // 2 if plan.double else size))
    spread(apply_range, cut(cols, count))
    for gradient, flat in zip(gradients, flats, strict=True):
        if gradient is not None:
            _put_flat(gradient, flat)


def _is_streamed(call, rows, cols):
    """Whether dx is better written past the cache: it and what is read are too large, and share no memory."""
    if not call.mask[0]:
        return False
    long_row = LONG_GRADIENT if any(call.mask[1:]) else LONG_GRADIENT_ALONE
    row = cols * call.x.itemsize
    if row < long_row or 3 * rows * row < 2 * STREAMED:
        return False
    dx = call.out[0]
    return dx is None or not (np.may_share_memory(dx, call.dy) or np.may_share_memory(dx, call.x))


def _blocks(plan, rows, cols):
    """(start, stop) of blocks of rows: those whose sums are kept apart, or any, if there are no sums."""
    if not (plan.dweight or plan.dbias):
        return row_ranges(rows, cols)
    return cut(rows, block_count(rows, cols, plan.double))


def _sums(plan, blocks, cols):
    """Zeros to add the terms of dweight and dbias to; for float64 with room for what additions lose."""
    shape = (blocks, 2 * cols if plan.double else cols)
    return [np.zeros(shape) if wanted else None for wanted in (plan.dweight, plan.dbias)]


def _add_up(plan, sums, gradient):
    """The sums of blocks as a contiguous gradient."""
    run = total_kernel(plan.double, format_of(gradient.dtype))
    run(sums, gradient, len(sums), gradient.size)


def _flat(gradient):
    """A contiguous array for kernels: the gradient itself, or new."""
    flags = gradient.flags
    if flags.c_contiguous and flags.aligned and gradient.dtype.isnative:
        return gradient
    return np.empty(gradient.shape, native(gradient.dtype))


def _put_flat(gradient, flat):
    if not np.may_share_memory(gradient, flat):
        gradient[...] = flat.reshape(gradient.shape)
