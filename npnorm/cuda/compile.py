"""From a spec to a cubin, without a GPU."""

import re
from typing import Any, NamedTuple

from cuda.bindings import nvjitlink
from numba import cuda

from .kernels import make_kernel
from .table import LEAST, Spec

OPTIONS = ("-lto", "-O3", "-fma=0", "-verbose")
"""No product and sum is fused but where a kernel says so: else the bits would depend on the compiler's mood."""


class Compiled(NamedTuple):
    """A kernel for one compute capability, and what it takes."""

    cubin: bytes
    name: str
    """The kernel's symbol."""
    registers: int
    spills: int
    """Bytes of registers that are stored to memory, and loaded again."""
    stack: int
    """Bytes of local memory."""
    shared: int
    """Bytes of static shared memory."""
    log: str


def compile_spec(spec: Spec, capability: tuple[int, int]) -> Compiled:
    """Compile a kernel of the launch table."""
    function, signature = make_kernel(spec)
    return compile_kernel(function, signature, capability, spec.block, spec.resident)


def compile_kernel(
    function: Any, signature: tuple[Any, ...], capability: tuple[int, int], threads: int, resident: int = 1
) -> Compiled:
    """Compile a kernel for blocks of `threads`, of which `resident` shall fit on a multiprocessor."""
    return assemble(lower(function, signature, threads, resident), capability)


def lower(function: Any, signature: tuple[Any, ...], threads: int, resident: int = 1) -> bytes:
    """Code that `link` turns into that of any GPU; this takes most of the time."""
    code, _ = cuda.compile(
        function, signature, device=False, abi="numba", cc=LEAST, output="ltoir", launch_bounds=(threads, resident)
    )
    return bytes(code)


def assemble(code: bytes, capability: tuple[int, int]) -> Compiled:
    """The kernel that `lower` gave the code of, for one compute capability."""
    cubin, log = link(code, capability)
    found = re.search(rb"\x00\.text\.(\w+)\x00", cubin)
    if found is None:
        raise RuntimeError(f"the cubin has no kernel: {log}")
    return Compiled(
        cubin,
        found[1].decode(),
        _figure(r"Used (\d+) registers", log),
        _figure(r"(\d+) bytes spill stores", log) + _figure(r"(\d+) bytes spill loads", log),
        _figure(r"(\d+) bytes stack frame", log),
        _figure(r"(\d+) bytes smem", log),
        log,
    )


def link(code: bytes, capability: tuple[int, int], ptx: bool = False) -> tuple[bytes, str]:
    """A cubin, or PTX to read, and the compiler's log."""
    # Not by cuda.core's linker, which has no right spelling of -fma=0.
    options = ["-arch=sm_{}{}".format(*capability), *OPTIONS, *(["-ptx"] if ptx else [])]
    handle = 0
    try:
        handle = nvjitlink.create(len(options), options)
        nvjitlink.add_data(handle, nvjitlink.InputType.LTOIR, code, len(code), "npnorm")
        nvjitlink.complete(handle)
        size, get = (
            (nvjitlink.get_linked_ptx_size, nvjitlink.get_linked_ptx)
            if ptx
            else (nvjitlink.get_linked_cubin_size, nvjitlink.get_linked_cubin)
        )
        linked = bytearray(size(handle))
        get(handle, linked)
        log = bytearray(nvjitlink.get_info_log_size(handle))
        nvjitlink.get_info_log(handle, log)
        return bytes(linked), log.decode(errors="replace")
    except nvjitlink.nvJitLinkError as error:  # the device may be newer than the linker
        raise RuntimeError(
            "nvJitLink {}.{} makes no code for compute capability {}.{}: {}. Install a newer one, with pip install "
            "--upgrade nvidia-nvjitlink, or nvidia-nvjitlink-cu12".format(*nvjitlink.version(), *capability, error)
        ) from error
    finally:
        if handle:
            nvjitlink.destroy(handle)


def _figure(pattern: str, log: str) -> int:
    found = re.search(pattern, log)
    return int(found[1]) if found else 0
