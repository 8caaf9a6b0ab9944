"""Compiled kernels on disk, each a file sealed by a hash of its name and content."""

import hashlib
import os
import sys
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path

SEAL = 32  # bytes of the hash in front of the content


def folders(beside: Path) -> list[Path]:
    """The folders to look in, the first that can be written being the one to write to; `beside` holds the sources."""
    chosen = os.environ.get("NPNORM_CACHE_DIR")
    if chosen:
        return [Path(chosen).expanduser()]
    if sys.platform == "win32":
        user = os.environ.get("LOCALAPPDATA") or Path.home()
    else:
        user = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return [beside / "__pycache__", Path(user) / "npnorm"]


def files(folder: Path, suffix: str) -> dict[str, int]:
    """The kernels in a folder, by name, and their bytes."""
    try:
        return {file.name: file.stat().st_size for file in folder.glob(f"npnorm-*{suffix}")}
    except OSError:
        return {}


def is_writable(folder: Path) -> bool:
    """Whether kernels can be written to a folder, which need not be there yet. Nothing is written to find out."""
    folder = next(place for place in (folder, *folder.parents) if os.path.exists(place))
    return folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)


def hash_of(folder: Path) -> str:
    """A hash of every source file in a folder: kernels are made of most files in theirs."""
    found = hashlib.sha256()
    for path in sorted(folder.glob("*.py")):
        found.update(path.read_bytes())
    return found.hexdigest()


def read(name: str, places: Sequence[Path]) -> bytes | None:
    """The content of a whole file; None if there is none, with a warning if it is damaged."""
    for folder in places:
        try:
            sealed = (folder / name).read_bytes()
        except OSError:
            continue
        content = sealed[SEAL:]
        if _seal(name, content) == sealed[:SEAL]:
            return content
        warn(f"the file {name} in {folder} is damaged and is compiled anew")
    return None


def write(name: str, content: bytes, places: Sequence[Path]) -> None:
    """Write a file to the first folder that takes it, or raise OSError."""
    failure = OSError("there is no folder for it")
    for folder in places:
        try:
            _write(folder, name, _seal(name, content) + content)
            return
        except OSError as error:
            failure = error
    raise failure


def _seal(name: str, content: bytes) -> bytes:
    """The hash of a file's name and content: a whole file in another's place is damage too."""
    return hashlib.sha256(name.encode() + content).digest()


def _write(folder: Path, name: str, content: bytes) -> None:
    """Write a file at once, so that no reader ever sees half of it."""
    folder.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=folder, prefix="npnorm-", suffix=f".tmp{Path(name).suffix}")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.chmod(temporary, 0o644)  # mkstemp's 0600 would hide it from a container's other users
        os.replace(temporary, folder / name)
    except BaseException:
        os.unlink(temporary)
        raise


def warn(what: str) -> None:
    """Warn once in a process."""
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
