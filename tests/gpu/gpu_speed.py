"""Times on the device by events, beside a copy of as many bytes, and times on the host of small calls."""

from functools import partial

import numpy as np
from gpu_machine import host_seconds, seconds
from table import DTYPES

import npnorm
from npnorm.cuda import DeviceArray, workspace_bytes

COLUMNS = (256, 512, 768, 1024, 2048, 4096, 5120, 8192, 16384, 32768, 65536)
FORMATS = ("bfloat16", "float32")
OPERATIONS = ("layer_norm", "rms_norm", "layer_norm_backward", "rms_norm_backward")

SETS = 3
"""Sets of arrays that take turns."""

BLOCK = 2**20
"""Random numbers, which are repeated to fill an array."""

GOALS = {"layer_norm": 0.9, "rms_norm": 0.9, "layer_norm_backward": 0.8, "rms_norm_backward": 0.8}
"""Fractions of the copy's speed that are to be reached for 1,024 to 16,384 columns."""


def filled(machine, dtype, elements, seed=0):
    """A device's memory with a block of random numbers, again and again: its address, and the block."""
    dtype = np.dtype(dtype)
    block = np.random.default_rng(seed).standard_normal(min(BLOCK, elements)).astype(dtype)
    size, done = elements * dtype.itemsize, block.nbytes
    pointer = machine.allocate(size)
    machine.upload(pointer, block)
    while done < size:
        count = min(done, size - done)
        machine.copy(pointer + done, pointer, count)
        done += count
    return pointer, block


class Buffers:
    """The memory of all that is timed in one format; widths are views of it."""

    def __init__(self, machine, format_):
        self.machine, self.dtype, self.elements = machine, DTYPES[format_], machine.elements
        self.sets = [
            {name: filled(machine, self.dtype, self.elements, seed)[0] for seed, name in enumerate(("x", "dy", "out"))}
            for _ in range(SETS)
        ]
        self.weight, self.bias = (filled(machine, self.dtype, max(COLUMNS), seed)[0] for seed in (5, 6))
        self.dweight, self.dbias = (machine.allocate(8 * max(COLUMNS)) for _ in range(2))
        # For a kernel's time any statistics do.
        self.statistics = self.machine.allocate(8 * self.elements // min(COLUMNS))
        self.machine.upload(self.statistics, np.ones(self.elements // min(COLUMNS)))
        self.workspace, self.room = 0, 0

    def matrix(self, pointer, cols):
        return DeviceArray(pointer, (self.elements // cols, cols), None, self.dtype, device=0)

    def vector(self, pointer, cols):
        return DeviceArray(pointer, (cols,), None, self.dtype, device=0)

    def scratch(self, size):
        if size > self.room:
            self.workspace, self.room = self.machine.allocate(size), size
        return DeviceArray(self.workspace, (size,), None, np.dtype(np.uint8), device=0)

    def calls(self, operation, cols):
        """An operation's calls on each set; nothing is allocated in them."""
        weight, bias = self.vector(self.weight, cols), self.vector(self.bias, cols)
        centered = operation.startswith("layer")
        found = []
        for arrays in self.sets:
            x, dy, out = (self.matrix(arrays[name], cols) for name in ("x", "dy", "out"))
            function = getattr(npnorm, operation)
            if operation in ("layer_norm", "rms_norm"):
                parameters = (weight, bias) if centered else (weight,)
                found.append(partial(function, x, *parameters, eps=1e-5, out=out))
                continue
            kept = DeviceArray(self.statistics, (self.elements // cols, 1), None, np.dtype(np.float64), device=0)
            given = {"rstd": kept, **({"mean": kept} if centered else {})}
            dbias = self.vector(self.dbias, cols) if centered else None
            options = {
                **given, "eps": 1e-5, "output_mask": (True, True, centered),
                "out": (out, self.vector(self.dweight, cols), dbias),
            }  # fmt: skip
            size = workspace_bytes(function, dy, x, weight, **options)
            found.append(partial(function, dy, x, weight, **options, workspace=self.scratch(size) if size else None))
        return found

    def copies(self, by_kernel):
        size = self.elements * self.dtype.itemsize
        copy = self.machine.copy_by_kernel if by_kernel else self.machine.copy
        return [partial(copy, arrays["out"], arrays["x"], size) for arrays in self.sets]

    def free(self):
        for arrays in self.sets:
            for pointer in arrays.values():
                self.machine.free(pointer)


def ceilings(machine):
    """Copies of several sizes: bytes read and written in a second."""
    rows = []
    for size in (2 * machine.elements, 4 * machine.elements, 16 * machine.elements):
        pairs = [(machine.allocate(size), machine.allocate(size)) for _ in range(SETS)]
        for target, source in pairs:
            machine.fill(source, 0x3C, size)
            machine.fill(target, 0, size)
        row = {"bytes": size}
        for name, copy in (("memcpy", machine.copy), ("kernel", machine.copy_by_kernel)):
            taken, spread = seconds(machine, [partial(copy, target, source, size) for target, source in pairs])
            row |= {name: 2 * size / taken, f"{name}_spread": spread}
        if machine.judged:
            copied = machine.download(pairs[0][0], 2**14)
            assert (copied == 0x3C).all(), "the copy kernel has not copied"
        rows.append(row)
        for pair in pairs:
            for pointer in pair:
                machine.free(pointer)
    return rows


def speed(machine, format_, peers, is_time, show):
    """Every operation in one format over all widths, a row of figures each; as far as time allows."""
    buffers = Buffers(machine, format_)
    try:
        copy = {
            name: seconds(machine, buffers.copies(by_kernel))[0]
            for name, by_kernel in (("memcpy", False), ("kernel", True))
        }
        best = min(copy.values())
        # Widths first: what time cuts off is the same for every operation.
        for cols in COLUMNS[:: machine.every]:
            if buffers.elements < cols:
                continue
            for operation in OPERATIONS:
                if not is_time():
                    return
                arrays = 3 if operation.endswith("backward") else 2
                rows = buffers.elements // cols
                taken, spread = seconds(machine, buffers.calls(operation, cols))
                figures = {
                    "operation": operation, "format": format_, "rows": rows, "cols": cols,
                    "seconds": taken, "spread": spread, "copy_seconds": best,
                    "bytes_a_second": arrays * rows * cols * buffers.dtype.itemsize / taken,
                    "fraction_of_copy": best * arrays / 2 * (rows * cols / buffers.elements) / taken, "peers": {},
                }  # fmt: skip
                for name, calls in peers(operation, format_, rows, cols):
                    try:
                        figures["peers"][name] = seconds(machine, calls())[0]
                    except Exception as error:
                        figures["peers"][name] = None
                        figures.setdefault("peer_errors", {})[name] = f"{type(error).__name__}: {error}"[:300]
                show(figures)
                yield figures
    finally:
        machine.synchronize()
        buffers.free()


def launch_costs(machine, peers, shape=(8, 1024)):
    """Host seconds of small calls by who makes them."""
    found = {}
    machine_elements, machine.elements = machine.elements, shape[0] * shape[1]
    try:
        buffers = Buffers(machine, "bfloat16")
    finally:
        machine.elements = machine_elements
    for operation in OPERATIONS:
        costs = found[operation] = {}
        costs["npnorm, out="] = host_seconds(machine, buffers.calls(operation, shape[1])[0])
        for name, calls in peers(operation, "bfloat16", *shape):
            try:
                costs[name] = host_seconds(machine, calls()[0])
            except Exception as error:
                costs[name] = f"{type(error).__name__}: {error}"[:300]
    return found
