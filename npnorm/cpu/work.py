"""Rows of a call as work: how it is cut, spread over threads, and brought to kernels in whatever layout."""

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np

from .._plan import Backward, Derivative, Forward
from .._results import Array
from .._threads import get_num_threads
from . import pool
from .layout import BUFFER, Rows, row_view

SPLIT = 2**18
"""Elements from which a second thread pays: it costs 20 to 50 µs, and that many elements take 100."""

WIDE = 2**15
"""Columns above which gradients are applied range by range. Up to it, the sums of all blocks, at 16
bytes a column, take half a megabyte at most."""

JOB = 2**16
"""Elements of the smallest piece of work that a thread takes."""

AHEAD = 3 * 2**14
"""How many elements more the caller's piece has, 6 to 10 µs of work. It begins 3 µs before the others, and should
end when they have ended: whoever ends in the same microsecond as another waits for the GIL, and so sleeps. RMSNorm
of 512 x 768 took 40 or 50 µs in equal pieces, by chance, and takes 38."""

MUCH = 2**21
"""Elements from which work is cut into more pieces than there are threads."""

MAPPED = 2**25
"""Bytes from which a new array has no pages: the allocator asks the system for each, and keeps none for later."""

PAGE = 4096

MOST_BLOCKS = 32
"""Blocks of rows whose sums for dweight and dbias are kept apart, so that threads can share the rows."""


Ranges: TypeAlias = tuple[tuple[int, int], ...]


def native(dtype: np.dtype[Any]) -> np.dtype[Any]:
    return dtype if dtype.isnative else dtype.newbyteorder("=")


def extent(x: Array, axes: int) -> tuple[int, int]:
    """The numbers of rows and columns of x, whose last `axes` axes are normalized."""
    cols = x.shape[-1] if axes == 1 else math.prod(x.shape[-axes:])
    return x.size // cols if cols else math.prod(x.shape[:-axes]), cols


def scale(call: Forward | Backward | Derivative, double: bool) -> Array | None:
    """The weight as kernels take it, an offset added in the compute dtype; None without one."""
    if call.weight is None or not call.weight_offset:
        return parameter(call.weight)
    dtype: Any = np.float64 if double else np.float32
    with np.errstate(all="ignore"):  # as IEEE says, without a warning
        return parameter(call.weight.astype(dtype) + dtype(call.weight_offset))


def parameter(array: Array | None) -> Array | None:
    """A weight or bias as kernels take it: a copy only where its layout needs one."""
    return None if array is None else _contiguous(array, native(array.dtype))


def statistic(array: Array | None) -> Array | None:
    """mean or rstd as kernels take it."""
    return None if array is None else _contiguous(array, np.dtype(np.float64))


def _contiguous(array: Array, dtype: np.dtype[Any]) -> Array:
    flags = array.flags
    if array.dtype == dtype and flags.c_contiguous and flags.aligned:
        return array
    return np.require(array, dtype, ["C", "A"])


def from_row(statistic: Array | None, first: int) -> Array | None:
    """A vector of statistics from row `first` on; None of None."""
    if statistic is None or first == 0:
        return statistic
    return statistic.reshape(-1)[first:]


def row_ranges(rows: int, cols: int) -> Ranges:
    """(start, stop) of the pieces that threads take: one each, or more if it is much, since none is as fast as another.

    Between pieces threads wait for the GIL, and one that sleeps while it waits costs 15 to 50 µs.
    """
    return _row_ranges(rows, cols, get_num_threads())


@lru_cache
def _row_ranges(rows: int, cols: int, threads: int) -> Ranges:
    elements = rows * cols
    if elements < SPLIT or threads == 1:
        return ((0, rows),)
    return cut(rows, min(rows, elements // JOB, threads if elements < MUCH else 4 * threads), AHEAD // cols)


def block_count(rows: int, cols: int, double: bool) -> int:
    """Into how many blocks rows are cut whose sums for dweight and dbias are kept apart; Numba compiles this too."""
    most = WIDE // (2 * cols if double else cols)
    count = 1
    while 4 * JOB * count <= rows * cols:  # a power of two, since numbers of threads are
        count *= 2
    return max(1, min(MOST_BLOCKS, count, most))


@lru_cache(maxsize=1024)
def row_blocks(rows: int, cols: int, double: bool) -> Ranges:
    """(start, stop) of the blocks of rows whose sums for dweight and dbias are kept apart."""
    return cut(rows, block_count(rows, cols, double))


def cut(length: int, count: int, more: int = 0) -> Ranges:
    """(start, stop) of at most `count` pieces of a length, all but the last equal; the first has so many more."""
    size = -(-(length - more) // count) if count > 1 else length
    starts = (0, *range(more + size, length, size))
    return tuple(zip(starts, (*starts[1:], length), strict=True))


def spread(function: Callable[..., Any], jobs: Sequence[tuple[Any, ...]]) -> list[tuple[Any, Any]]:
    """Call function(*job) for every job on the threads there are: (job, result) of each, in any order."""
    return pool.run(function, jobs, get_num_threads())


def touch(*arrays: Array | None) -> None:
    """Have the system make the pages of new arrays, if they are large, before a kernel writes to them.

    A page is cleared when it is made, and so is in the cache then; to write past the cache what is in it takes long.
    LayerNorm of 4096 x 4096 float32 into a new array took a Xeon 16.4 ms, and takes 12.6; 7 of them make pages.
    """
    for array in arrays:
        if array is not None and array.nbytes >= MAPPED:
            pages = array.reshape(-1).view(np.uint8)[::PAGE]
            spread(pages.__setitem__, [(slice(*each), 0) for each in row_ranges(pages.size, PAGE)])


def new_like(x: Array) -> Array:
    """A new array like x for a kernel to write, in native byte order."""
    array = np.empty(x.shape, native(x.dtype))
    touch(array)
    return array


def row_views(arrays: Sequence[Array | None], axes: int, cols: int) -> list[Array | None] | None:
    """Each array that is not None as kernels take it; None if one of them has no such view."""
    views: list[Array | None] = []
    for array in arrays:
        view = None if array is None else row_view(array, axes, cols)
        if view is None and array is not None:
            return None
        views.append(view)
    return views


def over_copies(
    work: Callable[..., Any], inputs: Sequence[Array | None], outputs: Sequence[Array | None], axes: int,
    rows: int, cols: int, jobs: Sequence[tuple[Any, ...]],
) -> None:  # fmt: skip
    """Call work(tiles, first, start, stop, ...) for every job, on arrays that have no views as rows.

    The tiles are copies of a few rows, as far as need be; their rows start to stop are rows
    first + start to first + stop of the call.
    """
    arrays = [a if a is None else Rows(a, axes, rows, cols) for a in (*inputs, *outputs)]
    sources, targets = arrays[: len(inputs)], arrays[len(inputs) :]
    itemsize = max(a.itemsize for a in (*inputs, *outputs) if a is not None)
    step = max(1, BUFFER // (cols * itemsize))

    def job(start: int, stop: int, *rest: Any) -> None:
        for first in range(start, stop, step):
            last = min(first + step, stop)
            read = [None if s is None else s.read(first, last) for s in sources]
            written = [None if t is None else t.buffer(first, last) for t in targets]
            work((*read, *written), first, 0, last - first, *rest)
            for target, rows in zip(targets, written, strict=True):
                if target is not None and rows is not None:
                    target.write(first, last, rows)

    spread(job, jobs)
