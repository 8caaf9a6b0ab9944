"""Compiled CUDA kernels, kept on disk without a way to fail."""

import hashlib
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

from .. import _files
from .._locks import importing_or_compiling
from .copies import Copy
from .table import LEAST

PACKAGES = (
    *("numba", "numba-cuda", "llvmlite", "nvidia-nvvm", "nvidia-nvjitlink"),
    *("nvidia-cuda-nvcc-cu12", "nvidia-nvjitlink-cu12"),
)
"""What makes a kernel's code, by the names of its distributions: reading them imports nothing."""


class Cubin(NamedTuple):
    """The machine code of one kernel, and the kernel's name in it."""

    name: str
    code: bytes


def folders() -> list[Path]:
    """The folders to look in, the first that can be written being the one to write to."""
    return _files.folders(Path(__file__).parent)


def files(folder: Path) -> dict[str, int]:
    """The kernels in a folder, by name, and their bytes."""
    return _files.files(folder, ".cubin")


def cubin(spec: Any, capability: tuple[int, int]) -> Cubin:
    """The kernel of a spec for devices of a compute capability, from disk or compiled here and now."""
    if capability < LEAST:
        raise RuntimeError(
            "npnorm's CUDA kernels need a device of compute capability {}.{} or newer; got one of {}.{}: copy its "
            "arrays to the host, or take another device".format(*LEAST, *capability)
        )
    file = file_name(spec, capability)
    content = _files.read(file, folders())
    if content is not None:
        name, code = content.split(b"\0", 1)
        return Cubin(name.decode(), code)
    with importing_or_compiling():
        compiled = _compile(spec, capability)
    try:
        _files.write(file, compiled.name.encode() + b"\0" + compiled.code, folders())
    except OSError as error:
        _files.warn(f"one cannot be saved ({error}) and is compiled in every process")
    return compiled


def file_name(spec: Any, capability: tuple[int, int]) -> str:
    """A name for all that the code depends on."""
    parts = (repr(spec), capability, versions(), _sources())
    return f"npnorm-{hashlib.sha256(repr(parts).encode()).hexdigest()[:32]}.cubin"


@cache
def versions() -> tuple[str | None, ...]:
    """The versions of the compilers that are installed."""
    return tuple(map(_version, PACKAGES))


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


@cache
def _sources() -> str:
    """The options of the compiler stand in the sources too."""
    return _files.hash_of(Path(__file__).parent)


def _compile(spec: Any, capability: tuple[int, int]) -> Cubin:
    if isinstance(spec, Copy):
        from .copying import compile_copy

        compiled = compile_copy(spec, capability)
    else:
        from .compile import compile_spec

        compiled = compile_spec(spec, capability)
    return Cubin(compiled.name, compiled.cubin)
