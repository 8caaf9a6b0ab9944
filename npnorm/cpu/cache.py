"""Compiled kernels on disk, without a way to fail.

Numba's own cache raises at import when no folder can be written, raises at every call when a file
is damaged, and does not see edits in other files. Here a kernel is one file, named by a hash of all
that it depends on and sealed by a hash of its content; whatever is wrong with it, the kernel is
compiled in memory instead.
"""

import hashlib
import os
import pickle
import sys
import tempfile
import warnings
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

SEAL = 32  # bytes of the hash in front of the content

outcomes: Counter[str] = Counter()
"""How many kernels this process has "loaded" and "saved". The rest it keeps in memory."""


def folders() -> list[Path]:
    """The folders to look in, the first that can be written being the one to write to."""
    chosen = os.environ.get("NPNORM_CACHE_DIR")
    if chosen:
        return [Path(chosen).expanduser()]
    if sys.platform == "win32":
        user = os.environ.get("LOCALAPPDATA") or Path.home()
    else:
        user = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return [Path(__file__).parent / "__pycache__", Path(user) / "npnorm"]


def files(folder: Path) -> dict[str, int]:
    """The kernels in a folder, by name, and their bytes."""
    try:
        return {file.name: file.stat().st_size for file in folder.glob("npnorm-*.nbc")}
    except OSError:
        return {}


def is_writable(folder: Path) -> bool:
    """Whether kernels can be written to a folder, which need not be there yet. Nothing is written to find out."""
    folder = next(place for place in (folder, *folder.parents) if os.path.exists(place))
    return folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)


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
            _warn(f"one cannot be loaded ({error!r}) and is compiled anew")
            kernel = None
        if kernel is None:
            target_context.refresh()
        return kernel

    def save_overload(self, sig: Any, data: Any) -> None:
        try:
            self._save(sig, data)
        except Exception as error:
            _warn(f"one cannot be saved ({error}) and is compiled in every process")

    def _loaded(self, sig: Any, target_context: Any) -> Any:
        name = self._file_name(sig, target_context)
        for folder in folders():
            try:
                sealed = (folder / name).read_bytes()
            except OSError:
                continue
            content = sealed[SEAL:]
            if _seal(name, content) != sealed[:SEAL]:
                _warn(f"the file {name} in {folder} is damaged and is compiled anew")
                continue
            # Loaded code needs the runtime alone; target_context.refresh() would cost 0.5 s (it
            # fills type registries).
            rtsys.initialize(target_context)
            loaded = CompileResult._rebuild(target_context, *pickle.loads(content))
            outcomes["loaded"] += 1
            return loaded
        return None

    def _save(self, sig: Any, data: Any) -> None:
        content = dumps(data._reduce())
        name = self._file_name(sig, data.target_context)
        failure = OSError("there is no folder for it")
        for folder in folders():
            try:
                _write(folder, name, _seal(name, content) + content)
                outcomes["saved"] += 1
                return
            except OSError as error:
                failure = error
        raise failure

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


def hash_of(folder: Path) -> str:
    """A hash of every source file in a folder: kernels are made of most files in this one."""
    found = hashlib.sha256()
    for path in sorted(folder.glob("*.py")):
        found.update(path.read_bytes())
    return found.hexdigest()


@cache
def _sources() -> str:
    return hash_of(Path(__file__).parent)


def _seal(name: str, content: bytes) -> bytes:
    """The hash of a file's name and content: a whole file in another's place is damage too."""
    return hashlib.sha256(name.encode() + content).digest()


def _write(folder: Path, name: str, content: bytes) -> None:
    """Write a file at once, so that no reader ever sees half of it."""
    folder.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=folder, prefix="npnorm-", suffix=".tmp.nbc")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.chmod(temporary, 0o644)  # mkstemp's 0600 would hide it from a container's other users
        os.replace(temporary, folder / name)
    except BaseException:
        os.unlink(temporary)
        raise


def _warn(what: str) -> None:
    global _warned
    if not _warned:
        _warned = True
        warnings.warn(
            f"npnorm's cache of compiled kernels: {what}. Set NPNORM_CACHE_DIR to a folder that can be "
            "written to have it elsewhere.",
            RuntimeWarning,
            stacklevel=2,
        )


_warned = False
