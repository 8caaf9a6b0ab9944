"""The CUDA driver, through cuda.core and its bindings, which are imported at the first call."""

import os
import threading
from functools import cache, lru_cache
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

from .._locks import importing_or_compiling
from . import cache as kernels
from .table import LEAST, Launch

STATIC = 48 * 1024
"""Bytes of dynamic shared memory that a kernel may have without asking for more."""

NEEDED = ("numba_cuda", "cuda.core", "cuda.bindings")

NEEDS = "arrays on a CUDA device need npnorm's extra cu13 or cu12, and NVIDIA's driver"

EXTRA = "pip install 'npnorm[cu13]', or 'npnorm[cu12]' for a driver of CUDA 12"

_owner: int | None = None
"""The process that has initialised CUDA."""


def missing() -> list[str]:
    """The modules of the extra that are not installed."""
    return [name for name in NEEDED if not _is_installed(name)]


def _is_installed(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:  # a parent is not
        return False


def is_available() -> bool:
    """Whether device arrays can be used: there are the extra, a driver and a device of compute capability 8.0 or newer.

    Examples
    --------
    >>> import npnorm.cuda
    >>> npnorm.cuda.is_available() in (True, False)
    True
    """
    try:
        return any(capability >= LEAST for _, capability in devices())
    except (ImportError, RuntimeError):
        return False


def _cuda() -> SimpleNamespace:
    """cuda.core and the driver's bindings, initialised."""
    if _owner is not None and _owner != os.getpid():
        raise RuntimeError(
            "a process that was forked after CUDA was initialised cannot use CUDA: start it with "
            "multiprocessing.get_context('spawn'), or call npnorm on device arrays only in the child"
        )
    return _initialised()


@cache
def _initialised() -> SimpleNamespace:
    global _owner
    absent = missing()
    if absent:
        raise ImportError(f"{NEEDS}; not installed: {', '.join(absent)}. Write {EXTRA}")
    with importing_or_compiling():
        import cuda.core as core
        from cuda.bindings import driver
    try:
        (error,) = driver.cuInit(0)
    except Exception as failure:  # the bindings find no library of the driver
        raise RuntimeError(f"{NEEDS}; the extra is installed, the driver cannot be loaded: {failure}") from None
    if error != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(
            f"{NEEDS}; CUDA cannot be initialised: {error.name}, see `nvidia-smi`. For a driver that is older than the "
            f"extra, write {EXTRA}"
        )
    _owner = os.getpid()
    return SimpleNamespace(core=core, driver=driver)


def _done(result: tuple[Any, ...]) -> Any:
    """The values of a call of the driver, once it is seen to have succeeded."""
    error, *values = result
    if error.value:
        raise RuntimeError(f"the CUDA driver failed: {error.name}")
    return values[0] if len(values) == 1 else values


def device_of(pointer: int) -> int:
    """The number of the device whose memory an address is in."""
    driver = _cuda().driver
    attribute = driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
    error, number = driver.cuPointerGetAttribute(attribute, pointer)
    if error.name == "CUDA_ERROR_INVALID_VALUE":
        raise ValueError(f"`x` must be in the memory of a CUDA device; got {pointer:#x}, an address that is on none")
    return int(_done((error, number)))


class on:  # noqa: N801 - a context manager; as a class, for a generator takes 2 µs
    """Make a device the current one for a while; None is the current one, or the first."""

    __slots__ = ("device", "is_pushed")

    def __init__(self, device: int | None) -> None:
        self.device = device

    def __enter__(self) -> None:
        driver = _cuda().driver
        before = int(_done(driver.cuCtxGetCurrent()))
        self.is_pushed = not before
        if self.device is not None or not before:
            primary = _primary(self.device or 0)
            self.is_pushed = before != int(primary)
            if self.is_pushed:
                _done(driver.cuCtxPushCurrent(primary))

    def __exit__(self, *_: object) -> None:
        if self.is_pushed:
            _done(_cuda().driver.cuCtxPopCurrent())


@cache
def _primary(device: int) -> Any:
    """The context that all libraries share, kept for good."""
    driver = _cuda().driver
    return _done(driver.cuDevicePrimaryCtxRetain(_done(driver.cuDeviceGet(device))))


def current() -> int:
    """The number of the current device."""
    return int(_done(_cuda().driver.cuCtxGetDevice()))


def order(first: int, second: int) -> None:
    """Let a stream wait, on the device, for all that another has been given so far."""
    driver = _cuda().driver
    event = _done(driver.cuEventCreate(driver.CUevent_flags.CU_EVENT_DISABLE_TIMING))
    try:
        _done(driver.cuEventRecord(event, first))
        _done(driver.cuStreamWaitEvent(second, event, 0))
    finally:
        _done(driver.cuEventDestroy(event))  # it lives on until it has happened


def allocate(size: int, stream: int) -> Any:
    """A buffer on the current device, which is freed in the stream's order: its `handle` is the address."""
    device = current()
    try:
        return _memory(device).allocate(size, stream=_stream(device, stream))
    except Exception as failure:  # cuda.core has one class for all errors of the driver
        if "CUDA_ERROR_OUT_OF_MEMORY" not in str(failure):
            raise
        raise MemoryError(
            f"CUDA device {device} has no {size} bytes left for results and scratch memory: free some, or give `out` "
            "and, backward, `workspace`"
        ) from failure


@cache
def _memory(device: int) -> Any:
    """The device's own pool of memory."""
    return _cuda().core.DeviceMemoryResource(device)


def fill(pointer: int, byte: int, size: int, stream: int) -> None:
    """Set bytes."""
    _done(_cuda().driver.cuMemsetD8Async(pointer, byte, size, stream))


def launch(what: Launch, arguments: tuple[int | float, ...], stream: int) -> None:
    """Launch a kernel on the current device: integers and addresses become int64, floats float64."""
    cuda = _cuda()
    device = int(_done(cuda.driver.cuCtxGetDevice()))
    kernel, config = _prepared(device, what)
    cuda.core.launch(_stream(device, stream), config, kernel, *arguments)


@lru_cache(maxsize=256)
def _stream(device: int, address: int) -> Any:
    """cuda.core's stream, which takes 5 µs to make. It may remember its device, and addresses are used again."""
    core = _cuda().core
    return core.LEGACY_DEFAULT_STREAM if address == 1 else core.Stream.from_handle(address)


_launches: dict[tuple[int, Launch], Any] = {}
"""The kernel and the configuration of each launch, by device."""

MOST_LAUNCHES = 4096
"""Launches remembered: a program that has more of them has ever new shapes."""

_kernels: dict[tuple[int, Any], Any] = {}
_shared: dict[tuple[int, Any], int] = {}
_loading = threading.Lock()


def _prepared(device: int, what: Launch) -> Any:
    found = _launches.get((device, what))
    if found is None:
        config = _cuda().core.LaunchConfig(grid=what.grid, block=what.block, shmem_size=what.shared_bytes)
        found = _kernel(device, what), config
        if len(_launches) >= MOST_LAUNCHES:
            _launches.clear()
        _launches[device, what] = found
    return found


def _kernel(device: int, what: Launch) -> Any:
    """The loaded kernel of a launch, with leave to use as much shared memory as any launch of it so far."""
    key = device, what.spec
    with _loading:
        kernel = _kernels.get(key)
        if kernel is None:
            cubin = kernels.cubin(what.spec, capability(device))
            kernel = _cuda().core.ObjectCode.from_cubin(cubin.code).get_kernel(cubin.name)
            _kernels[key] = kernel
        if what.shared_bytes > _shared.get(key, STATIC):
            driver = _cuda().driver
            attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            number = _done(driver.cuDeviceGet(device))
            _done(driver.cuKernelSetAttribute(attribute, what.shared_bytes, kernel.handle, number))
            _shared[key] = what.shared_bytes
    return kernel


@cache
def capability(device: int) -> tuple[int, int]:
    """The compute capability of a device."""
    driver = _cuda().driver
    number = _done(driver.cuDeviceGet(device))
    major, minor = (
        _done(driver.cuDeviceGetAttribute(attribute, number))
        for attribute in (
            driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR,
            driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
        )
    )
    return int(major), int(minor)


def devices() -> list[tuple[str, tuple[int, int]]]:
    """Name and compute capability of every device."""
    driver = _cuda().driver
    count = _done(driver.cuDeviceGetCount())
    names = [_done(driver.cuDeviceGetName(128, _done(driver.cuDeviceGet(number)))) for number in range(count)]
    return [
        (name.split(b"\0")[0].decode(), capability(number)) for number, name in enumerate(names)
    ]
