"""Building blocks for your own ``@cuda.jit`` kernels: the parts that npnorm's kernels are made of.

A norm rarely stands alone: what follows it (a gate, a rotation, a cast) often reads what it has just written.
`make_norm` gives
you device functions with which a kernel of your own reads a row once, normalizes it in registers, does its part, and
writes once. They are compiled into your kernel, so nothing is called at run time.

One row is shared by ``threads`` threads: a power of two up to 32, or a multiple of 32. A row is cut into chunks of
16 bytes; chunk ``k`` of a thread begins at column ``(k * threads + thread) * chunk``, where ``thread`` numbers the
threads of a row.
``vectors`` chunks a thread are held in registers, so a row has up to ``threads * vectors * chunk`` columns. Rows
begin at
multiples of 16 bytes, and ``chunk`` divides the number of columns.

>>> from npnorm.cuda.device import make_norm                             # doctest: +SKIP
>>> norm = make_norm("bfloat16", threads=256, vectors=2, centered=False) # doctest: +SKIP

Formats are ``"float16"``, ``"bfloat16"``, ``"float32"`` and ``"float64"``. Addresses are 64-bit integers, such as
``array.__cuda_array_interface__["data"][0]``, which is how arrays of bfloat16, unknown to Numba, get in. Numbers are
float32, or float64 for that format.
"""

from typing import Any, NamedTuple

import numpy as np

from .._plan import Plan
from .elements import make_elements
from .rows import make_reduce, one, two
from .statistics import make_statistics
from .table import CHUNK, MOST_THREADS, SIZES, WARP, Spec, exchange_size
from .vectors import device

__all__ = ["Norm", "Vectors", "make_norm", "make_sum", "make_vectors"]


class Vectors(NamedTuple):
    """Device functions that move 16 bytes at a time between memory and numbers."""

    chunk: int
    """Elements of a chunk."""
    words: int
    """32-bit words of a chunk: the size of a local array of uint32 that holds one."""
    load: Any
    """``load(words, at, row, j, cols)``: words[at:] = the chunk at column j of the row at address ``row``."""
    number: Any
    """``number(words, at, i)``: element i of a chunk."""
    store: Any
    """``store(row, j, cols, numbers)``: the chunk at column j = the local array ``numbers``, each rounded once."""


class Norm(NamedTuple):
    """Device functions of a norm; all threads of a block call `statistics` together."""

    vectors: Vectors
    """Those of x."""
    words: int
    """The size of a local array of uint32 that holds a thread's part of a row."""
    shared: int
    """The size of a shared array of float64 for sums over threads."""
    read: Any
    """``read(words, row, thread, cols)``: a thread's part of a row."""
    statistics: Any
    """``statistics(words, shared, thread, group, cols, eps) -> high, low, rstd``, float64: the mean as a pair, 0
    without one.

    Right for rows whose variance plus eps lies within 2^-90 and 2^90 (2^-900 and 2^900 in float64). `group` numbers the
    rows of a block. Threads without a row pass cols = 0.
    """
    normalized: Any
    """``normalized(number, high, low, rstd)``: ((number - high) - low)·rstd, for the three rounded to the number's
    dtype."""


def make_vectors(format, chunk=None, number=np.float32):
    """Device functions that move elements of a format.

    Parameters
    ----------
    format : str
        The format in memory.
    chunk : int, optional
        Elements that a thread takes at once, a power of two; 16 bytes of them if left out. Give the `chunk` of x
        for arrays of other
        formats that go along with it.
    number : type
        ``np.float32`` or ``np.float64``: what elements become.

    Returns
    -------
    Vectors

    Raises
    ------
    ValueError
        For another format, or a chunk that is no power of two or less than 4 bytes.
    """
    if format not in SIZES:
        raise ValueError(f"`format` must be one of {', '.join(SIZES)}; got {format!r}")
    chunk = CHUNK // SIZES[format] if chunk is None else chunk
    if chunk < 1 or chunk & (chunk - 1) or chunk * SIZES[format] < 4:
        raise ValueError(f"`chunk` must be a power of two, of 4 bytes or more; got {chunk} elements of {format}")
    made = make_elements(format, chunk, chunk, number)
    return Vectors(chunk, made.words, made.load, made.number, made.write)


def make_sum(threads, rows=1, values=1):
    """A function that adds up one or two float64 over the threads of a row, in a fixed order.

    Parameters
    ----------
    threads : int
        Threads a row: a power of two up to 32, or a multiple of 32.
    rows : int
        Rows a block has at once.
    values : int
        1 or 2.

    Returns
    -------
    function, int
        ``add(a, b, shared, thread, group) -> a, b`` gives the sums to all threads (b is left alone for one value).
        All threads of a
        block call it together. ``shared`` is a shared array of float64, of the size that comes second.

    Raises
    ------
    ValueError
        For other numbers of threads or values, or blocks of more than 1024 threads.
    """
    _check_threads(threads, rows)
    if values not in (1, 2):
        raise ValueError(f"`values` must be 1 or 2; got {values!r}")
    reduce = make_reduce(threads, rows, one if values == 1 else two)

    @device
    def add(a, b, shared, thread, group):
        return reduce(a, b, shared, thread, group, 1.0, 1.0, 0.0)

    return add, exchange_size(threads, rows)


def make_norm(format, threads, vectors, centered=True, rows=1):
    """Device functions of LayerNorm (`centered`) or RMSNorm for rows that `threads` threads hold in registers.

    Parameters
    ----------
    format : str
        The format of x.
    threads : int
        Threads a row: a power of two up to 32, or a multiple of 32 up to 1024.
    vectors : int
        Chunks of 16 bytes that a thread holds; with 4 or fewer nothing spills.
    centered : bool
        Whether the mean is subtracted.
    rows : int
        Rows a block has at once.

    Returns
    -------
    Norm

    Raises
    ------
    ValueError
        For another format or number of threads, or blocks of more than 1024 threads.

    Notes
    -----
    Statistics as npnorm's own kernels have them: sums of float32 numbers are compensated, the variance is found in
    a second pass around
    the mean, and the mean is a pair.
    """
    _check_threads(threads, rows)
    double = format == "float64"
    number = np.float64 if double else np.float32
    own = make_vectors(format, None, number)
    plan = Plan(False, centered, double, False, format, None, None, None, format, None, None)
    spec = Spec("forward", plan, False, own.chunk, threads, rows, vectors, "registers")
    made = make_statistics(spec, number)
    mean_of, rstd_of = made.mean, made.rstd
    load, chunk = own.load, own.chunk

    @device
    def read(words, row, thread, cols):
        for k in range(vectors):
            j = (k * threads + thread) * chunk
            if j < cols:
                load(words, 4 * k, row, j, cols)

    @device
    def statistics(words, shared, thread, group, cols, eps):
        count = np.float64(max(cols, 1))
        inverse = 1.0 / count
        high, low = mean_of(words, 0, vectors, shared, thread, group, cols, count, inverse, 1.0)
        rstd, _ = rstd_of(words, 0, vectors, shared, thread, group, cols, count, inverse, 1.0, eps, high, low)
        return high, low, rstd

    @device
    def normalized(value, high, low, rstd):
        return ((value - high) - low) * rstd

    return Norm(own, 4 * vectors, exchange_size(threads, rows), read, statistics, normalized)


def _check_threads(threads, rows):
    if threads < 1 or threads > MOST_THREADS or (threads & (threads - 1) if threads <= WARP else threads % WARP):
        raise ValueError(f"`threads` must be a power of two up to 32, or a multiple of 32 up to 1024; got {threads!r}")
    if rows < 1 or threads * rows > MOST_THREADS:
        raise ValueError(f"`rows` must be 1 or more, in blocks of up to 1024 threads; got {rows} of {threads} threads")
