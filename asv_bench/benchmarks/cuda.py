"""Arrays on a GPU: times by the device's events, in seconds and beside a copy. Skipped where there is no GPU.

asv starts a new process for each benchmark (`launch_method` in asv.conf.json): a fork could not use the GPU.
"""

from functools import cache, partial
from statistics import median
from time import perf_counter

import numpy as np

import npnorm

ELEMENTS = 2**26  # 128 MiB of bfloat16: twice the largest cache
SETS = 3  # of arrays, which take turns
CALLS = 12  # in a batch between two events
STREAM = 1  # the legacy default stream

COLUMNS = [256, 1024, 4096, 16384, 65536]
OPERATIONS = ["layer_norm", "rms_norm", "layer_norm_backward", "rms_norm_backward"]


class Gpu:
    """Memory and events, by the driver's bindings."""

    def __init__(self):
        try:
            from cuda.bindings import driver

            import npnorm.cuda as ours
        except ImportError:
            raise NotImplementedError("this needs npnorm's extra cu12 or cu13") from None
        if not ours.is_available():
            raise NotImplementedError("there is no GPU")
        self.driver, self.ours = driver, ours
        self.do("cuInit", 0)
        self.do("cuCtxSetCurrent", self.do("cuDevicePrimaryCtxRetain", self.do("cuDeviceGet", 0)))

    def do(self, name, *arguments):
        """The result of a function of the driver, which must succeed."""
        error, *values = getattr(self.driver, name)(*arguments)
        if error.value:
            raise RuntimeError(f"{name}: {error.name}")
        return values[0] if values else None

    def array(self, shape, dtype):
        """A device array of random numbers: a million, again and again."""
        dtype = np.dtype(dtype)
        size = int(np.prod(shape))
        block = np.random.default_rng(0).standard_normal(min(size, 2**20)).astype(dtype)
        pointer = int(self.do("cuMemAlloc", size * dtype.itemsize))
        self.do("cuMemcpyHtoD", pointer, block.ctypes.data, block.nbytes)
        done, end = block.nbytes, size * dtype.itemsize
        while done < end:
            count = min(done, end - done)
            self.do("cuMemcpyDtoDAsync", pointer + done, pointer, count, STREAM)
            done += count
        return self.ours.DeviceArray(pointer, shape, None, dtype, device=0)

    def copy(self, target, source):
        self.do("cuMemcpyDtoDAsync", target.pointer, source.pointer, source.nbytes, STREAM)

    def seconds(self, calls, busy):
        """Device time of a call; `busy` is a copy that keeps the device from starting before all calls are queued."""
        for call in calls:
            call()
        self.do("cuCtxSynchronize")
        begin = perf_counter()
        busy()
        self.do("cuCtxSynchronize")
        pause = perf_counter() - begin
        begin = perf_counter()
        for i in range(CALLS):
            calls[i % SETS]()
        host = perf_counter() - begin
        first, last = (self.do("cuEventCreate", 0) for _ in range(2))
        found = []
        for _ in range(7):
            for _ in range(2 + int(2 * host / pause)):
                busy()
            self.do("cuEventRecord", first, STREAM)
            for i in range(CALLS):
                calls[i % SETS]()
            self.do("cuEventRecord", last, STREAM)
            self.do("cuCtxSynchronize")
            found.append(self.do("cuEventElapsedTime", first, last) / 1e3 / CALLS)
        return median(found)


@cache
def gpu():
    return Gpu()


def backward(function, dy, x, weight, options, gpu):
    """A call with scratch memory of its own."""
    size = gpu.ours.workspace_bytes(function, dy, x, weight, **options)
    room = gpu.array((size,), np.uint8) if size else None
    return partial(function, dy, x, weight, **options, workspace=room)


def prepare(gpu, operation, dtype, cols):
    """Calls on several sets of arrays, copies of as many, and how many arrays of x's size a call moves."""
    function, centered = getattr(npnorm, operation), operation.startswith("layer")
    shape = ELEMENTS // cols, cols
    weight, bias = (gpu.array((cols,), dtype) for _ in range(2))
    calls, copies = [], []
    for _ in range(SETS):
        x, out = (gpu.array(shape, dtype) for _ in range(2))
        copies.append(partial(gpu.copy, out, x))
        if not operation.endswith("backward"):
            calls.append(partial(function, x, weight, *([bias] if centered else []), out=out))
            continue
        statistics = {name: gpu.array((shape[0], 1), "float64") for name in ("mean", "rstd")[not centered :]}
        gradients = out, gpu.array((cols,), dtype), gpu.array((cols,), dtype) if centered else None
        options = {**statistics, "output_mask": (True, True, centered), "out": gradients}
        calls.append(backward(function, gpu.array(shape, dtype), x, weight, options, gpu))
    return calls, copies, 3 if operation.endswith("backward") else 2


class Norms:
    params = [OPERATIONS, ["bfloat16", "float32"], COLUMNS]
    param_names = ["operation", "dtype", "columns"]
    timeout = 120

    def setup(self, operation, dtype, columns):
        self.gpu = gpu()
        if dtype == "bfloat16":
            import ml_dtypes  # noqa: F401  (makes NumPy know the name; the extras bring it)
        self.calls, self.copies, self.arrays = prepare(self.gpu, operation, dtype, columns)

    def track_seconds(self, operation, dtype, columns):
        return self.gpu.seconds(self.calls, self.copies[0])

    track_seconds.unit = "seconds"

    def track_fraction(self, operation, dtype, columns):
        """The copy's time for as many bytes over the call's: 1 is as fast as a copy."""
        copy = self.gpu.seconds(self.copies, self.copies[0]) * self.arrays / 2
        return round(copy / self.gpu.seconds(self.calls, self.copies[0]), 3)

    track_fraction.unit = "of a copy's speed"


class Launch:
    """What a small call takes on the host; asv's own times, of many calls that the device keeps up with."""

    params = [OPERATIONS]
    param_names = ["operation"]
    rounds = 1
    number = 100
    repeat = (5, 30, 0.5)
    warmup_time = 0.05
    timeout = 120

    def setup(self, operation):
        self.gpu = gpu()
        function = getattr(npnorm, operation)
        x, dy, out = (self.gpu.array((8, 1024), "float32") for _ in range(3))
        weight = self.gpu.array((1024,), "float32")
        if operation.endswith("backward"):
            options = {"output_mask": (True, False, False), "out": (out, None, None)}
            self.call = backward(function, dy, x, weight, options, self.gpu)
        else:
            self.call = partial(function, x, weight, out=out)
        self.call()
        self.gpu.do("cuCtxSynchronize")

    def teardown(self, operation):
        self.gpu.do("cuCtxSynchronize")

    def time_host(self, operation):
        self.call()
