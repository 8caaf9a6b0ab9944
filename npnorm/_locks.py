"""What no thread may do while another forks."""

import logging  # noqa: F401  its own lock at a fork must be taken after ours: a compilation logs
import os
import threading

importing_or_compiling = threading.RLock()
"""Held while Numba is imported or compiles. No process may fork then: its child would wait for ever."""

if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=importing_or_compiling.acquire,
        after_in_parent=importing_or_compiling.release,
        after_in_child=importing_or_compiling.release,
    )
