"""From a checked call to kernels and back: allocates results, and never checks."""

import numpy as np

from .._checks import format_of
from .._threads import get_num_threads
from .arrays import LINE
from .gradients import PARAMETERS
from .machine import streaming_size
from .rows import LEAF
from .runs import run, run_shared
from .specialize import apply_plan, gather_plan, is_simple, kernel, means_kernel, total_kernel
from .work import (
    SPLIT,
    WIDE,
    extent,
    from_row,
    native,
    new_like,
    over_copies,
    parameter,
    row_blocks,
    row_ranges,
    row_views,
    scale,
    spread,
    statistic,
)

BLOCK, FEW = 2**14, 16
"""Columns of a block in which all rows of a very wide array get their gradients: 256 KB of sums, in the second cache.
An eighth of it for rows that are few: sums are most of what is touched then, and of one row of 10^6 the gradients take
1.45 ms instead of 1.7."""

GAP = 128
"""Numbers between the sums of two blocks: a processor reads ahead, and takes lines from one that writes to them. Of
512 x 768 on two threads, the second took 70 µs for its half, and 88 without."""

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
and 1.3 for 4096 x 1536. They pay from half of `STREAMED` on, since there are three arrays: with sums, 2048 x 768 took
2.3 to 2.8 and 2.4 to 4.1, 3000 x 768 took 3.5 and 2.2 to 3.3."""


def forward(call):
    """y, residual_out, mean and rstd of a checked call, None where they are not asked for."""
    plan, x, residual, weight, bias, y, total, axes, eps, *_ = call
    if y is None:
        y = new_like(x)
    if plan.other and total is None:
        total = new_like(x)
    rows, cols = extent(x, axes)
    mean = np.full(rows, np.nan) if plan.mean else None
    rstd = np.full(rows, np.nan) if plan.rstd else None
    if rows and cols:
        weight, bias = scale(call, plan.double), parameter(bias)
        views = row_views((x, residual, total, y), axes, cols)
        if views is not None:
            x_view, residual, total_view, y_view = views
            arguments = (x_view, residual, weight, bias, total_view, y_view, mean, rstd, eps, cols)
            forward_rows(plan, arguments, rows, x is y)
        else:

            def work(tiles, first, start, stop):
                x, residual, total, y = tiles
                kept = (from_row(mean, first), from_row(rstd, first))
                run(plan, "", (x, residual, weight, bias, total, y, *kept, eps, cols), start, stop)

            over_copies(work, (x, residual), (total, y), axes, rows, cols, row_ranges(rows, cols))
    return y, total, _kept(mean, x, axes), _kept(rstd, x, axes)


def forward_rows(plan, arguments, rows, in_place):
    """The forward kernel over all rows of a call; `arguments` are the kernel's."""
    y, cols = arguments[5], arguments[-1]
    if _is_wide(plan, rows, cols):
        _by_leaves(plan, arguments, rows)
        return
    jobs = [(*arguments, start, stop) for start, stop in row_ranges(rows, cols)]
    run_shared(plan, _phase(plan, y, rows, cols, in_place), jobs)


def _phase(plan, y, rows, cols, in_place):
    """The phase of the kernel for a forward call."""
    row = cols * y.itemsize
    if row >= LONG_ROW and rows * row >= STREAMED and not in_place:
        return "stream"
    return "short" if cols <= SHORT and rows * cols >= SPLIT and is_simple(plan) else ""


def _by_leaves(plan, arguments, rows):
    """Rows one after another, each shared by the threads: first its sums, then its elements."""
    x, _, weight, bias, _, y, _, _, eps, cols = arguments
    gather, apply = (kernel(plan, False, phase) for phase in ("gather", "apply"))
    leaves = -(-cols // LEAF)
    shared = (x, weight, bias, y, np.empty(2 * leaves), eps, cols)
    ranges = row_ranges(leaves, LEAF)
    for i in range(rows):
        jobs = [(*shared, i, start, stop) for start, stop in ranges]
        spread(gather, jobs)
        if not all(ordinary for _, ordinary in spread(apply, jobs)):
            run(plan, "", arguments, i, i + 1)


def _is_wide(plan, rows, cols):
    """Whether threads had better share each row."""
    return is_simple(plan) and cols >= SPLIT and rows <= get_num_threads() // 2


def _kept(statistic, x, axes):
    """Statistics in the shape that broadcasts against x."""
    if statistic is None:
        return None
    return statistic.reshape(x.shape[: x.ndim - axes] + (1,) * axes)


def backward(call):
    """dx, dweight and dbias of a checked call, None where they are masked out."""
    plan, x, axes, eps = call.plan, call.x, call.axes, call.eps
    shape = x.shape[x.ndim - axes :]
    dtype = native((x if call.weight is None else call.weight).dtype)
    dx, dweight, dbias = call.out
    if call.mask[0] and dx is None:
        dx = new_like(x)
    if call.mask[1] and dweight is None:
        dweight = np.empty(shape, dtype)
    if call.mask[2] and dbias is None:
        dbias = np.empty(shape, dtype)
    gradients = (dweight, dbias)
    rows, cols = extent(x, axes)
    if not (rows and cols):
        for gradient in gradients:
            if gradient is not None:
                gradient.fill(0)
    elif any(call.mask):
        weight, mean, rstd = scale(call, plan.double), statistic(call.mean), statistic(call.rstd)
        inputs = (call.dy, x, call.dresidual)
        views = row_views((*inputs, dx), axes, cols)
        if views is not None:
            dy, x, dresidual, dx_view = views
            backward_rows(plan, (dy, x, weight, dresidual, mean, rstd), dx_view, gradients, eps, rows, cols)
        else:
            blocks = _blocks(plan, rows, cols)
            sums = _sums(plan, len(blocks), cols)

            def work(tiles, first, start, stop, *sums):
                dy, x, dresidual, dx = tiles
                kept = (from_row(mean, first), from_row(rstd, first))
                run(plan, "", (dy, x, weight, dresidual, *kept, dx, *sums, eps, cols), start, stop)

            jobs = [(*block, *own) for block, own in zip(blocks, zip(*sums, strict=True), strict=True)]
            over_copies(work, inputs, (dx,), axes, rows, cols, jobs)
            _put_sums(plan, sums, gradients)
    return dx, dweight, dbias


def backward_rows(plan, inputs, dx, gradients, eps, rows, cols):
    """Gradients of all rows of a call, dweight and dbias as sums of blocks, which the shape decides. `inputs` are the
    kernel's."""
    summed = plan.dweight or plan.dbias
    # Above half of WIDE there is one block of rows, which threads cannot share.
    if summed and (cols > WIDE or (cols > WIDE // 2 and get_num_threads() > 1)):
        _by_columns(plan, inputs, dx, gradients, eps, rows, cols)
        return
    blocks = _blocks(plan, rows, cols)
    sums = _sums(plan, len(blocks), cols)
    jobs = [
        (*inputs, dx, *own, eps, cols, *block)
        for block, own in zip(blocks, zip(*sums, strict=True), strict=True)
    ]
    run_shared(plan, "stream" if _is_streamed(inputs, dx, summed, rows, cols) else "", jobs)
    _put_sums(plan, sums, gradients)


def _is_streamed(inputs, dx, summed, rows, cols):
    """Whether dx is better written past the cache: it and what is read are too large, and share no memory."""
    if dx is None:
        return False
    dy, x, *_ = inputs
    row = cols * x.itemsize
    if row < (LONG_GRADIENT if summed else LONG_GRADIENT_ALONE) or 2 * rows * row < STREAMED:
        return False
    return not (np.may_share_memory(dx, dy) or np.may_share_memory(dx, x))


def _by_columns(plan, inputs, dx, gradients, eps, rows, cols):
    """The same bits for very wide rows: first what rows need, then blocks of columns, all rows of each."""
    dy, x, weight, dresidual, *_ = inputs
    parameters = _gathered(plan, inputs, eps, rows, cols)
    flats = [None if gradient is None else _flat(gradient) for gradient in gradients]
    width = (BLOCK if rows > FEW else BLOCK // 8) // (2 if plan.double else 1)
    apply = apply_plan(plan, *(None if flat is None else format_of(flat.dtype) for flat in flats))

    def apply_blocks(start, stop):
        sums = (None if flat is None else np.empty(2 * width if plan.double else width) for flat in flats)
        arguments = (dy, x, weight, dresidual, parameters, *sums, dx, *flats, cols, width, rows)
        run(apply, "apply", arguments, start * rows, stop * rows)

    spread(apply_blocks, row_ranges(-(-cols // width), width * rows))
    for gradient, flat in zip(gradients, flats, strict=True):
        if gradient is not None:
            _put_flat(gradient, flat)


def _gathered(plan, inputs, eps, rows, cols):
    """The parameters of very wide rows: float32 ones with known statistics are shared by leaves, others are not."""
    dy, x, weight, _, mean, rstd = inputs
    parameters = np.empty((rows, PARAMETERS))
    leaves = 1 if plan.double else -(-cols // LEAF)
    sums = np.empty(2 * rows * leaves)
    if plan.rstd and (plan.mean or not plan.centered):
        places = row_ranges(rows * leaves, LEAF)
    else:
        places = tuple((start * leaves, stop * leaves) for start, stop in row_ranges(rows, cols))
    arguments = (dy, x, weight, mean, rstd, parameters, sums, eps, cols, leaves)
    run_shared(gather_plan(plan), "gather", [(*arguments, *each) for each in places])
    if not plan.double:
        means_kernel()(parameters, sums, cols, leaves, rows)
    return parameters


def _blocks(plan, rows, cols):
    """(start, stop) of blocks of rows: those whose sums are kept apart, or any, if there are no sums."""
    if not (plan.dweight or plan.dbias):
        return row_ranges(rows, cols)
    return row_blocks(rows, cols, plan.double)


def _sums(plan, blocks, cols):
    """Zeros for each block to add its terms of dweight and dbias to; for float64 with room for what additions lose.

    They begin with a line of the cache: of 4096 x 768, gradients took 7 to 11 % less than with any others.
    """
    wanted = (plan.dweight, plan.dbias)
    arrays, stride = 2 - wanted.count(None), (2 * cols if plan.double else cols) + GAP
    size = arrays * blocks * stride
    zeros = np.zeros(size + LINE // 8)
    start = -zeros.__array_interface__["data"][0] % LINE // 8
    sums = iter(zeros[start : start + size].reshape(arrays, blocks, stride))
    return [next(sums) if each else (None,) * blocks for each in wanted]


def _put_sums(plan, sums, gradients):
    """dweight and dbias, those that are wanted, from the sums of their blocks."""
    for gradient, of_blocks in zip(gradients, sums, strict=True):
        if gradient is not None:
            flat = _flat(gradient)
            _add_up(plan, of_blocks, flat)
            _put_flat(gradient, flat)


def _add_up(plan, sums, gradient):
    """The sums of blocks as a contiguous gradient."""
    run = total_kernel(plan.double, format_of(gradient.dtype))
    run(sums, gradient, *sums.shape, gradient.size)


def _flat(gradient):
    """A contiguous array for kernels: the gradient itself, or new."""
    flags = gradient.flags
    if flags.c_contiguous and flags.aligned and gradient.dtype.isnative:
        return gradient
    return np.empty(gradient.shape, native(gradient.dtype))


def _put_flat(gradient, flat):
    if flat is not gradient and not np.may_share_memory(gradient, flat):
        gradient[...] = flat.reshape(gradient.shape)
