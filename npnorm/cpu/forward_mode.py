"""Directional derivatives, put together from what the forward and the backward kernel find in float64.

The matrix between dx and the derivative of the normalized row is symmetric, so the gradient's kernel, without a
weight and with dx for dy, computes it. What is added to it needs no kernel.
"""


import numpy as np

from .._plan import Derivative
from .._results import Array
from .layout import Rows
from .runs import run
from .work import extent, new_like, row_ranges, scale, spread

TILE = 3 * 2**12
"""Elements of a tile, unless a row has more. A thread has two tiles in float64, 192 KB, and copies of up to three where
arrays are not contiguous. 4096 x 768 took 5.1 ns an element in tiles of 2^13, 4.0 in 2^14 and 4.3 in 2^15."""


def jvp(call: Derivative) -> Array:
    """dy of a checked call."""
    x, dy = call.x, call.out
    if dy is None:
        dy = new_like(x)
    rows, cols = extent(x, call.axes)
    if rows and cols:
        parameters = _vector(scale(call, call.double)), _vector(call.dweight), _vector(call.dbias)
        source, target = Rows(x, call.axes, rows, cols), Rows(dy, call.axes, rows, cols)
        tangent = None if call.dx is None else Rows(call.dx, call.axes, rows, cols)
        step = max(1, TILE // cols)

        def job(start: int, stop: int) -> None:
            for first in range(start, stop, step):
                last = min(first + step, stop)
                tiles = source.read(first, last), None if tangent is None else tangent.read(first, last)
                result = target.buffer(first, last)
                with np.errstate(all="ignore"):  # as IEEE says, without a warning
                    values = _derivative(call, *tiles, *parameters, last - first, cols)
                    # Rounded to bfloat16 by way of float32, which costs 2^-17 of a unit.
                    result[...] = values.reshape(result.shape)
                    target.write(first, last, result)

        spread(job, row_ranges(rows, cols))
    return dy


def _derivative(
    call: Derivative, x: Array, dx: Array | None, scale: Array | None, dweight: Array | None,
    dbias: Array | None, rows: int, cols: int,
) -> Array:  # fmt: skip
    """dy of the rows of one tile, in float64."""
    dy = np.zeros((rows, cols))
    if dx is not None:
        # No weight, dresidual and statistics before dx, no sums after it.
        arguments = (dx, x, *(None,) * 4, dy, None, None, call.eps, cols)
        run(call.projected, "", arguments, 0, rows)
        if scale is not None:
            dy *= scale
    if dweight is not None:
        normalized = np.empty((rows, cols))
        # No residual, weight, bias and sum before y, no statistics after it.
        found = (x, *(None,) * 4, normalized, None, None, call.eps, cols)
        run(call.normalized, "", found, 0, rows)
        normalized *= dweight
        dy += normalized
    if dbias is not None:
        dy += dbias
    return dy


def _vector(parameter: Array | None) -> Array | None:
    """As a vector of float64."""
    return None if parameter is None else parameter.astype(np.float64, order="C").reshape(-1)
