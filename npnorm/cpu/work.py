"""Rows of a call as work: how it is cut, spread over threads, and brought to kernels in whatever layout."""

import math

import numpy as np

from .._threads import get_num_threads
from . import pool
from .layout import BUFFER, Rows, as_elements, row_view

SPLIT = 2**18
"""Elements from which a second thread pays: it costs 20 to 50 µs, and that many elements take 100."""

JOB = 2**16
"""Elements of the smallest piece of work that a thread takes."""


def native(dtype):
    return dtype if dtype.isnative else dtype.newbyteorder("=")


def extent(x, axes):
    """The numbers of rows and columns of x, whose last `axes` axes are normalized."""
    cols = x.shape[-1] if axes == 1 else math.prod(x.shape[-axes:])
    return x.size // cols if cols else math.prod(x.shape[:-axes]), cols


def scale(call):
    """The weight as a vector for kernels, an offset added in the compute dtype; None without one."""
    if not call.weight_offset:
        return parameter(call.weight)
    dtype = np.float64 if call.plan.double else np.float32
    return parameter(call.weight.astype(dtype) + dtype(call.weight_offset))


def parameter(array):
    """A weight or bias as a contiguous vector for kernels: a copy only where that needs one."""
    return None if array is None else as_elements(vector(array, native(array.dtype)))


def vector(array, dtype):
    """The array as a contiguous vector of a dtype: itself, if it is one."""
    flags = array.flags
    if array.dtype == dtype and array.ndim == 1 and flags.c_contiguous and flags.aligned:
        return array
    return np.require(array, dtype, ["C", "A"]).reshape(-1)


def row_ranges(rows, cols):
    """(start, stop) of the pieces that threads take."""
    elements = rows * cols
    if elements < SPLIT:
        return [(0, rows)]
    threads = get_num_threads()
    count = 1 if threads == 1 else min(rows, 4 * threads, elements // JOB)
    size = -(-rows // count)
    return [(start, min(start + size, rows)) for start in range(0, rows, size)]


def spread(function, jobs):
    """Call function(*job) for every job on the threads there are."""
    pool.run(function, jobs, 1 if len(jobs) == 1 else get_num_threads())


class Arrays:
    """The arrays of a call as rows: `inputs` are read and `outputs` written; each may be None."""

    def __init__(self, inputs, outputs, axes, rows, cols):
        self.inputs = len(inputs)
        self.arrays = (*inputs, *outputs)
        self.axes = axes
        self.cols = cols
        self.views = [None if a is None else row_view(a, axes, rows, cols) for a in self.arrays]
        self.are_views = all(
            v is not None or a is None for a, v in zip(self.arrays, self.views, strict=True)
        )

    def over_rows(self, work, jobs):
        """Call work(arrays, first, start, stop, ...) for every job (start, stop, ...).

        The arrays are 3-d, and their rows start to stop are rows first + start to first + stop.
        """
        if self.are_views:

            def job(start, stop, *rest):
                work(self.views, 0, start, stop, *rest)

        else:
            job = self._staged(work)
        spread(job, jobs)

    def _staged(self, work):
        """A job that takes arrays without a view as rows through buffers."""
        # A view whose rows run along two axes cannot be cut into ranges of rows.
        sources = [
            None if a is None else Rows(a, v if v is not None and len(v) == 1 else None, self.axes)
            for a, v in zip(self.arrays, self.views, strict=True)
        ]
        inputs = self.inputs
        step = max(1, BUFFER // self.cols)

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
