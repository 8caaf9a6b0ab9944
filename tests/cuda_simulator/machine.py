"""A small GPU: runs a kernel's Python function on threads that take turns.

Numba's simulator has no warp operations. This has them, and is stricter: a thread runs until its next barrier or
shuffle and
then hands over to the next one, so that a missing barrier shows; lanes that do not all reach a
shuffle, threads that do not all reach a barrier, and shared memory that is read before it is written are errors.
"""

import sys
import threading

import numpy as np

from npnorm.cuda import simulated

WARP = 32


class Place:
    def __init__(self, x=0, y=0, z=0):
        self.x, self.y, self.z = x, y, z


class Stopped(Exception):
    """The run has failed in another thread."""


class Block:
    """The threads of a block, of which one runs at a time: in one block from the first to the last, in the next
    the other way."""

    descending = False

    def __init__(self, function, arguments, index, grid, count, shared_bytes, place):
        self.count, self.shared_bytes, self.place = count, shared_bytes, place
        self.blockIdx, self.gridDim, self.blockDim = Place(*index), Place(*grid), Place(count, 1, 1)
        self.locks = [threading.Semaphore(0) for _ in range(count)]
        self.turn = threading.Semaphore(0)
        self.waiting = [None] * count
        self.values = [None] * count
        self.error = None
        self.arrays = {}
        self.dynamic = np.full(shared_bytes // 4, 0x7FC00000 + 0x1234, np.uint32)
        self.threads = [
            threading.Thread(target=self.run, args=(i, function, arguments), daemon=True) for i in range(count)
        ]

    def run(self, number, function, arguments):
        self.locks[number].acquire()
        HERE.block, HERE.number, HERE.calls = self, number, 0
        try:
            if self.error is None:
                with np.errstate(all="ignore"):
                    function(*arguments)
        except Stopped:
            pass
        except BaseException as error:
            self.error = self.error or error
        self.waiting[number] = "done"
        self.turn.release()

    def resume(self, number):
        self.waiting[number] = None
        self.locks[number].release()
        self.turn.acquire()

    def simulate(self):
        for thread in self.threads:
            thread.start()
        order = range(self.count)
        if Block.descending:
            order = order[::-1]
        Block.descending = not Block.descending
        for number in order:
            self.resume(number)
        while self.error is None and any(state != "done" for state in self.waiting):
            ready = [number for number in order if self.is_released(number)]
            if not ready:
                self.error = AssertionError(f"threads wait for each other: {sorted(set(map(str, self.waiting)))}")
                break
            # What they wait for is decided before the first of them goes on.
            for number in ready:
                self.resume(number)
        if self.error is not None:
            for number in order:
                if self.waiting[number] != "done":
                    self.resume(number)
            raise self.error
        for thread in self.threads:
            thread.join()

    def is_released(self, number):
        """Whether all threads that a thread waits for wait at the same place."""
        state = self.waiting[number]
        if state == "done":
            return False
        peers = range(self.count)
        if state[0] == "warp":
            first = number // WARP * WARP
            peers = range(first, min(first + WARP, self.count))
        return all(self.waiting[peer] == state for peer in peers)

    def wait(self, state):
        number = HERE.number
        self.waiting[number] = state
        self.turn.release()
        self.locks[number].acquire()
        if self.error is not None:
            raise Stopped

    def exchange(self, value):
        """The values that the lanes of this warp give at the same time."""
        number = HERE.number
        self.values[number] = value
        HERE.calls += 1
        self.wait(("warp", HERE.calls, code_place()))
        first = number // WARP * WARP
        values = self.values[first : first + WARP]
        self.wait(("warp", HERE.calls, "read"))
        return values


HERE = threading.local()


def code_place():
    """The line of the kernel, and of its helpers, that a thread is at."""
    frame, lines = sys._getframe(2), []
    while frame is not None and "npnorm" in frame.f_code.co_filename and "machine" not in frame.f_code.co_filename:
        lines.append(frame.f_lineno)
        frame = frame.f_back
    return tuple(lines)


class Lanes:
    """What `npnorm.cuda.simulated` asks of other lanes."""

    def shuffle(self, value, mask):
        values = HERE.block.exchange(value)
        return values[(HERE.number % WARP) ^ mask]

    def any_lane(self, flag):
        return any(HERE.block.exchange(bool(flag)))


class Local:
    def array(self, size, dtype):
        return (
            np.full(size, 0xDEAD, dtype_of(dtype))
            if dtype_of(dtype).kind == "u"
            else np.full(size, np.nan, dtype_of(dtype))
        )


class Shared:
    def array(self, size, dtype):
        """One array for a line of the kernel, as the compiler has it; of size 0, the dynamic shared memory."""
        block = HERE.block
        if size == 0:
            return block.dynamic.view(dtype_of(dtype))
        frame = sys._getframe(1)
        key = frame.f_code.co_filename, frame.f_lineno, frame.f_lasti
        if key not in block.arrays:
            block.arrays[key] = np.full(size, np.nan, dtype_of(dtype))
        return block.arrays[key]


def dtype_of(kind):
    return np.dtype(str(kind))


class FakeCUDA:
    """What kernels use of the module `numba.cuda`."""

    local, shared = Local(), Shared()

    @property
    def threadIdx(self):
        return Place(HERE.number)

    @property
    def blockIdx(self):
        return HERE.block.blockIdx

    @property
    def gridDim(self):
        return HERE.block.gridDim

    @property
    def blockDim(self):
        return HERE.block.blockDim

    def syncthreads(self):
        HERE.calls += 1
        HERE.block.wait(("block", code_place()))

    def syncthreads_or(self, flag):
        block = HERE.block
        block.values[HERE.number] = bool(flag)
        block.wait(("block", code_place()))
        found = any(block.values)
        block.wait(("block", "read"))
        return int(found)


def install():
    """Put the small GPU in the place of numba.cuda, in every module of kernels."""
    fake = FakeCUDA()
    simulated.lanes = Lanes()
    for name, module in list(sys.modules.items()):
        if name.startswith("npnorm.cuda.") and hasattr(module, "cuda"):
            module.cuda = fake


def run(function, launch, arguments):
    """Run a kernel, block after block."""
    simulated.WRITTEN.clear()
    for y in range(launch.grid[1]):
        for x in range(launch.grid[0]):
            Block(function, arguments, (x, y), launch.grid, launch.block[0], launch.shared_bytes, None).simulate()
