"""What no thread may do while another forks."""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

_lock = threading.RLock()


@contextmanager
def importing_or_compiling() -> Iterator[None]:
    """Held while Numba is imported or compiles. No process forks then: its child would wait for ever."""
    _hold_at_forks()
    with _lock:
        yield


@cache
def _hold_at_forks() -> None:
    """Registered at the first use, for what it needs would be a tenth of what importing npnorm takes."""
    import logging  # noqa: F401  its own lock at a fork must be taken after ours: a compilation logs

    if hasattr(os, "register_at_fork"):
        os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release)
