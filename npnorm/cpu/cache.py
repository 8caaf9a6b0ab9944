"""Compiled kernels on disk, without a way to fail.

Numba's own cache raises at import when no folder can be written, raises at every call when a file
is damaged, and does not see edits in other files. Here a kernel is one file, named by a hash of all
that it depends on and sealed by a hash of its content; whatever is wrong with it, the kernel is
compiled in memory instead.
"""

import hashlib
import pickle
from collections import Counter
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any

import llvmlite
import numba
from numba.core.caching import _Cache
from numba.core.compiler import CompileResult
from numba.core.runtime import rtsys  # type: ignore[attr-defined]
from numba.core.serialize import dumps

from .. import _files
from .._files import hash_of, is_writable, warn

__all__ = ["KernelCache", "files", "folders", "hash_of", "is_writable", "outcomes"]

outcomes: Counter[str] = Counter()
"""How many kernels this process has "loaded" and "saved". The rest it keeps in memory."""


def folders() -> list[Path]:
    """The folders to look in, the first that can be written being the one to write to."""
    return _files.folders(Path(__file__).parent)


def files(folder: Path) -> dict[str, int]:
    """The kernels in a folder, by name, and their bytes."""
    return _files.files(folder, ".nbc")


class KernelCache(_Cache):
    """The cache of one kernel, as a Numba dispatcher uses it. `key` is a string that names the kernel's options."""

    def __init__(self, key: str) -> None:
        self._key = key

    @property
    def cache_path(self) -> str:
        return str(folders()[0])

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        try:
            kernel = self._loaded(sig, target_context)
        except Exception as error:  # a damaged file, or another Numba than this was written for
            warn(f"one cannot be loaded ({error!r}) and is compiled anew")
            kernel = None
        if kernel is None:
            target_context.refresh()
        return kernel

    def save_overload(self, sig: Any, data: Any) -> None:
        try:
            self._save(sig, data)
        except Exception as error:
            warn(f"one cannot be saved ({error}) and is compiled in every process")

    def _loaded(self, sig: Any, target_context: Any) -> Any:
        content = _files.read(self._file_name(sig, target_context), folders())
        if content is None:
            return None
        # Loaded code needs the runtime alone; target_context.refresh() would cost 0.5 s (it
        # fills type registries).
        rtsys.initialize(target_context)
        loaded = CompileResult._rebuild(target_context, *pickle.loads(content))
        outcomes["loaded"] += 1
        return loaded

    def _save(self, sig: Any, data: Any) -> None:
        _files.write(self._file_name(sig, data.target_context), dumps(data._reduce()), folders())
        outcomes["saved"] += 1

    def enable(self) -> None:
        pass

    def disable(self) -> None:
        pass

    def flush(self) -> None:
        pass

    def _file_name(self, sig: Any, target_context: Any) -> str:
        parts = (
            self._key,
            str(sig),
            target_context.codegen().magic_tuple(),
            # The first suffix names Python's version and build: free-threaded objects are larger.
            (EXTENSION_SUFFIXES[0], numba.__version__, llvmlite.__version__),
            [getattr(numba.config, name, None) for name in SETTINGS],
            _sources(),
        )
        return f"npnorm-{hashlib.sha256(repr(parts).encode()).hexdigest()[:32]}.nbc"


SETTINGS = ("OPT", "BOUNDSCHECK", "LOOP_VECTORIZE", "SLP_VECTORIZE", "ENABLE_AVX", "DEBUGINFO_DEFAULT")
"""Numba's settings, from NUMBA_* variables, that change the code of a kernel."""


@cache
def _sources() -> str:
    return hash_of(Path(__file__).parent)
