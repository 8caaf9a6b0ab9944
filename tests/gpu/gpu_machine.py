"""A GPU as the check needs it: memory, copies, events, streams, through the driver's bindings alone.

Two stand-ins have the same methods. `Simulated` computes on host memory with npnorm.reference (tests/device.py), to try
the check out. `Planned` computes nothing: it collects the kernels that a check would launch.
"""

import itertools
import statistics
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
for folder in (ROOT, ROOT / "tests", ROOT / "tests" / "gpu"):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

import device  # noqa: E402

from npnorm.cuda import driver, quick  # noqa: E402

LEGACY = 1
"""The legacy default stream, which is PyTorch's and CuPy's default too."""

WORDS = 1024
"""Words of 16 bytes that a block of the copy kernel moves: 4 for each of its 256 threads."""

COPY = """
.version 7.0
.target sm_80
.address_size 64
.visible .entry copy_words(.param .u64 source, .param .u64 target)
{
    .reg .b32 %r<20>;
    .reg .b64 %d<4>;
    mov.u32 %r0, %ctaid.x;
    mov.u32 %r1, %tid.x;
    shl.b32 %r2, %r0, 10;
    add.u32 %r3, %r2, %r1;
    mul.wide.u32 %d0, %r3, 16;
    ld.param.u64 %d1, [source];
    ld.param.u64 %d2, [target];
    cvta.to.global.u64 %d1, %d1;
    cvta.to.global.u64 %d2, %d2;
    add.u64 %d1, %d1, %d0;
    add.u64 %d2, %d2, %d0;
    ld.global.v4.u32 {%r4, %r5, %r6, %r7}, [%d1];
    ld.global.v4.u32 {%r8, %r9, %r10, %r11}, [%d1 + 4096];
    ld.global.v4.u32 {%r12, %r13, %r14, %r15}, [%d1 + 8192];
    ld.global.v4.u32 {%r16, %r17, %r18, %r19}, [%d1 + 12288];
    st.global.v4.u32 [%d2], {%r4, %r5, %r6, %r7};
    st.global.v4.u32 [%d2 + 4096], {%r8, %r9, %r10, %r11};
    st.global.v4.u32 [%d2 + 8192], {%r12, %r13, %r14, %r15};
    st.global.v4.u32 [%d2 + 12288], {%r16, %r17, %r18, %r19};
    ret;
}
"""


class Gpu:
    """The first GPU of this machine."""

    real = True
    judged = True
    """Whether results can be looked at."""
    elements = 2**26
    """Elements of an array that is timed: twice what an H200's cache holds, in half precision."""
    far = 2**30
    """Elements between two rows, to have some beyond 2**31."""
    every = 1
    """Of the widths that are timed, how many are taken."""
    delay_bytes = 2**29

    def __init__(self):
        cuda = driver._cuda()
        self.bindings, self.core = cuda.driver, cuda.core
        self._do(self.bindings.cuCtxSetCurrent(driver._primary(0)))
        try:
            self.copier = self.core.ObjectCode.from_ptx(COPY.encode()).get_kernel("copy_words")
        except Exception as error:
            print(f"   the copy kernel cannot be loaded, the driver's copy takes its place: {error}")
            self.copier = None
        self.delays = None

    @staticmethod
    def _do(result):
        return driver._done(result)

    def about(self):
        """What the driver says of the device."""
        names = self.bindings.CUdevice_attribute
        number = self._do(self.bindings.cuDeviceGet(0))
        ask = {
            "multiprocessors": names.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT,
            "l2_bytes": names.CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE,
            "memory_clock_khz": names.CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE,
            "bus_bits": names.CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH,
        }
        found = {}
        for key, attribute in ask.items():
            error, value = self.bindings.cuDeviceGetAttribute(attribute, number)
            found[key] = None if error.value else int(value)
        free, total = self._do(self.bindings.cuMemGetInfo())
        name, capability = driver.devices()[0]
        return {
            "device": name, "capability": "{}.{}".format(*capability), **found,
            "copy_kernel": self.copier is not None,
            "driver": int(self._do(self.bindings.cuDriverGetVersion())),
            "memory_gib": round(int(total) / 2**30, 1), "free_gib": round(int(free) / 2**30, 1),
        }  # fmt: skip

    # Memory.

    def allocate(self, size):
        return int(self._do(self.bindings.cuMemAlloc(max(1, size))))

    def free(self, pointer):
        self._do(self.bindings.cuMemFree(pointer))

    def upload(self, pointer, array):
        array = np.ascontiguousarray(array)
        self._do(self.bindings.cuMemcpyHtoD(pointer, array.ctypes.data, array.nbytes))

    def download(self, pointer, size):
        array = np.empty(size, np.uint8)
        self._do(self.bindings.cuMemcpyDtoH(array.ctypes.data, pointer, size))
        return array

    def fill(self, pointer, byte, size, stream=LEGACY):
        self._do(self.bindings.cuMemsetD8Async(pointer, byte, size, stream))

    def copy(self, target, source, size, stream=LEGACY):
        self._do(self.bindings.cuMemcpyDtoDAsync(target, source, size, stream))

    def copy_by_kernel(self, target, source, size):
        if self.copier is None:
            return self.copy(target, source, size)
        blocks, rest = divmod(size, 16 * WORDS)
        assert not rest
        config = self.core.LaunchConfig(grid=(blocks, 1, 1), block=(256, 1, 1))
        self.core.launch(driver._stream(0, LEGACY), config, self.copier, int(source), int(target))

    # Time.

    def synchronize(self):
        self._do(self.bindings.cuCtxSynchronize())

    def event(self):
        return self._do(self.bindings.cuEventCreate(0))

    def record(self, event, stream=LEGACY):
        self._do(self.bindings.cuEventRecord(event, stream))

    def has_happened(self, event):
        (error,) = self.bindings.cuEventQuery(event)
        return error.value == 0

    def milliseconds(self, first, second):
        return float(self._do(self.bindings.cuEventElapsedTime(first, second)))

    def delay(self, seconds, stream=LEGACY):
        """Keep the device busy for at least so long, if it copies 6 TB/s at most."""
        if self.delays is None:
            self.delays = self.allocate(self.delay_bytes), self.allocate(self.delay_bytes)
        for _ in range(1 + int(seconds * 6e12 / (2 * self.delay_bytes))):
            self.copy(*self.delays, self.delay_bytes, stream)

    # Streams and graphs.

    def stream(self):
        flag = self.bindings.CUstream_flags.CU_STREAM_NON_BLOCKING
        return int(self._do(self.bindings.cuStreamCreate(flag)))

    def capture(self, stream, call):
        """What a call gives a stream, as a graph: a function that launches it."""
        mode = self.bindings.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        self._do(self.bindings.cuStreamBeginCapture(stream, mode))
        try:
            call()
        finally:
            graph = self._do(self.bindings.cuStreamEndCapture(stream))
        executable = self._do(self.bindings.cuGraphInstantiate(graph, 0))
        return lambda: self._do(self.bindings.cuGraphLaunch(executable, stream))


class Simulated:
    """Host memory that poses as a device's; npnorm.reference does what kernels would."""

    real = False
    judged = True
    elements = 2**15
    far = 2**13
    every = 6

    def __init__(self):
        self.recording = device.Driver()
        quick._known.clear()
        for name in device.FUNCTIONS:
            setattr(driver, name, getattr(self.recording, name))
        self.blocks = {}

    def about(self):
        return {"device": type(self).__name__, "capability": "9.0", "l2_bytes": 0}

    def allocate(self, size):
        room = np.full(size + 256, 0x5A, np.uint8)
        start = -device.address(room) % 256
        held = self.recording.memory.hold(room[start : start + size])
        self.blocks[device.address(held)] = held
        return device.address(held)

    def free(self, pointer):
        held = self.blocks.pop(pointer)
        self.recording.memory.arrays = [array for array in self.recording.memory.arrays if array is not held]

    def _bytes(self, pointer, size):
        return self.recording.memory.view(pointer, (size,), (1,), np.dtype(np.uint8))

    def upload(self, pointer, array):
        array = np.ascontiguousarray(array)
        self._bytes(pointer, array.nbytes)[...] = array.reshape(-1).view(np.uint8)

    def download(self, pointer, size):
        return self._bytes(pointer, size).copy()

    def fill(self, pointer, byte, size, stream=LEGACY):
        self._bytes(pointer, size)[...] = byte

    def copy(self, target, source, size, stream=LEGACY):
        self._bytes(target, size)[...] = self._bytes(source, size)

    def copy_by_kernel(self, target, source, size):
        self.copy(target, source, size)

    def synchronize(self):
        self.recording.events.clear()

    def event(self):
        return SimpleNamespace(time=0.0)

    def record(self, event, stream=LEGACY):
        event.time = time.perf_counter()

    def has_happened(self, event):
        return False

    def milliseconds(self, first, second):
        return 1e3 * (second.time - first.time)

    def delay(self, seconds, stream=LEGACY):
        pass

    def stream(self):
        return 4096

    def capture(self, stream, call):
        call()
        assert not any(event[0] in ("allocate", "order") for event in self.recording.events)
        return call


class Planned(Simulated):
    """Addresses with nothing there: every launch is noted, none is carried out."""

    judged = False
    elements, far, every = Gpu.elements, Gpu.far, Gpu.every

    def __init__(self):
        super().__init__()
        self.specs = {}
        self.addresses = itertools.count(2**40, 2**36)  # as aligned as the driver's, and far from each other
        driver.launch = self._launch
        driver.allocate = lambda size, stream: SimpleNamespace(handle=self.allocate(size))
        driver.fill = self.fill

    def _launch(self, what, arguments, stream):
        self.specs[what.spec] = None

    def allocate(self, size):
        return next(self.addresses)

    def free(self, pointer):
        pass

    def upload(self, pointer, array):
        pass

    def download(self, pointer, size):
        return np.zeros(size, np.uint8)

    def fill(self, pointer, byte, size, stream=LEGACY):
        pass

    def copy(self, target, source, size, stream=LEGACY):
        pass

    def capture(self, stream, call):
        return call


def seconds(machine, calls, batches=5):
    """Device time of a call: the median over batches, and how far they are apart, as a part of it.

    Calls take turns, so that none finds its arrays in the cache. The device is kept busy until a whole batch stands in
    its queue: what the host takes for a launch does not count.
    """
    for call in calls:
        call()
    machine.synchronize()
    if not machine.judged:
        return float("nan"), float("nan")
    count = len(calls) * max(1, 12 // len(calls))
    start = time.perf_counter()
    for call in calls:
        call()
    host = (time.perf_counter() - start) / len(calls) * count
    machine.synchronize()
    found = []
    first, last = machine.event(), machine.event()
    for _ in range(batches if machine.real else 1):
        machine.delay(min(0.05, 1.5 * host + 2e-4))
        machine.record(first)
        for i in range(count):
            calls[i % len(calls)]()
        machine.record(last)
        machine.synchronize()
        found.append(machine.milliseconds(first, last) / count / 1e3)
    found.sort()
    middle = statistics.median(found)
    return middle, (found[-1] - found[0]) / middle if middle else 0.0


def host_seconds(machine, call, count=200, batches=7):
    """Host time of a call that does little on the device: the median of batches."""
    for _ in range(20):
        call()
    machine.synchronize()
    if not machine.real:
        count = batches = 1
    found = []
    for _ in range(batches):
        start = time.perf_counter()
        for _ in range(count):
            call()
        found.append((time.perf_counter() - start) / count)
        machine.synchronize()
    return statistics.median(found)
