"""How many threads npnorm may use."""

import operator
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from ._checks import shown
from .cpu.machine import usable_cpus

_chosen: int | None = None


class _Here(threading.local):
    alone = False


_here = _Here()


def set_num_threads(n: int) -> None:
    """Set how many threads one call may use.

    Parameters
    ----------
    n : int
        At least 1. The number of threads never changes a bit of a result.

    Raises
    ------
    TypeError
        If `n` is not an integer.
    ValueError
        If `n` is less than 1.

    Examples
    --------
    >>> import npnorm
    >>> before = npnorm.get_num_threads()
    >>> npnorm.set_num_threads(1)
    >>> npnorm.get_num_threads()
    1
    >>> npnorm.set_num_threads(before)
    """
    global _chosen
    _chosen = _checked("`n`", n)


def get_num_threads() -> int:
    """How many threads one call may use.

    Returns
    -------
    int
        1 in a task of a Dask array, for Dask has its own threads; else what `set_num_threads` was
        given last; else the environment variable NPNORM_NUM_THREADS; else the CPUs that this
        process may use by its affinity and its container's quota.

    Raises
    ------
    ValueError
        If NPNORM_NUM_THREADS is not an integer of at least 1.
    """
    global _chosen
    if _here.alone:
        return 1
    if _chosen is None:
        value = os.environ.get("NPNORM_NUM_THREADS", "").strip()
        if not value:
            return usable_cpus()  # which may change at any time
        _chosen = _checked("NPNORM_NUM_THREADS", int(value) if value.isdecimal() else value)
    return _chosen


@contextmanager
def alone() -> Iterator[None]:
    """Within it, calls from this thread use no other; what other threads do stays as it is."""
    before = _here.alone
    _here.alone = True
    try:
        yield
    finally:
        _here.alone = before


def _checked(name: str, value: object) -> int:
    message = f"{name} must be an integer of at least 1, the number of threads; got {shown(value)}"
    if isinstance(value, str):
        raise ValueError(message)
    try:
        count = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(message) from None
    if isinstance(value, bool):
        raise TypeError(message)
    if count < 1:
        raise ValueError(message)
    return count
