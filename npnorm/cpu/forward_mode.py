"""Directional derivatives, put together from what the forward and the backward kernel find in float64.

The matrix between dx and the derivative of the normalized row is symmetric, so the gradient's kernel, without a
weight and with dx for dy, computes it. What is added to it needs no kernel.
"""

import numpy as np

from .layout import Rows
from .runs import run_backward, run_forward
from .work import extent, native, row_ranges, spread

TILE = 3 * 2**12
"""Elements of a tile, unless a row has more. A thread has two tiles in float64, 192 KB, and copies of up to three where
arrays are not contiguous. 4096 x 768 took 5.1 ns an element in tiles of 2^13, 4.0 in 2^14 and 4.3 in 2^15."""


def jvp(call):
    """dy of a checked call."""
    x, dy = call.x, call.out
    if dy is None:
        dy = np.empty(x.shape, native(x.dtype))
    rows, cols = extent(x, call.axes)
    if rows and cols:
        parameters = _scale(call), _vector(call.dweight), _vector(call.dbias)
        sources = [None if a is None else Rows(a, call.axes, rows, cols) for a in (x, call.dx)]
        target = Rows(dy, call.axes, rows, cols)
        step = max(1, TILE // cols)

        def job(start, stop):
            for first in range(start, stop, step):
                last = min(first + step, stop)
                tiles = [source and source.read(first, last) for source in sources]
                result = target.buffer(first, last)
                with np.errstate(all="ignore"):  # as IEEE says, without a warning
                    values = _derivative(call, *tiles, *parameters, last - first, cols)
                    # Rounded to bfloat16 by way of float32, which costs 2^-17 of a unit.
                    result[...] = values.reshape(result.shape)
                    target.write(first, last, result)

        spread(job, row_ranges(rows, cols))
    return dy


def _derivative(call, x, dx, scale, dweight, dbias, rows, cols):
    """dy of the rows of one tile, in float64."""
    dy = np.zeros((rows, cols))
    if dx is not None:
        none = (None,) * 5  # weight, dresidual, statistics and parameters
        arguments = (dx, x, *none, dy, None, None, call.eps, cols)
        run_backward(call.projected, "", arguments, 0, rows)
        if scale is not None:
            dy *= scale
    if dweight is not None:
        normalized = np.empty((rows, cols))
        arguments = (x, None, None, None, None, normalized, None, None, call.eps, cols)
        run_forward(call.normalized, "", arguments, 0, rows)
        normalized *= dweight
        dy += normalized
    if dbias is not None:
        dy += dbias
    return dy


def _scale(call):
    """What multiplies the normalized rows, as a vector of float64; None without a weight."""
    if call.weight is None or not call.weight_offset:
        return _vector(call.weight)
    compute = np.float64 if call.double else np.float32
    with np.errstate(all="ignore"):
        return _vector(call.weight.astype(compute) + compute(call.weight_offset))


def _vector(parameter):
    return None if parameter is None else parameter.astype(np.float64, order="C").reshape(-1)
