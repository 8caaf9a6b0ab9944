"""Scratch memory of a call, and the contiguous copies in it of arrays that kernels cannot take as they are.

Those are arrays whose rows are not contiguous, weights and sums with strides, at odd addresses or in the other byte
order, statistics that are not float64. Everything is planned before anything is allocated: a stand-in's pointer is an
offset until `begin`.
"""

import numpy as np

from . import driver
from .arrays import DeviceArray, trusted
from .copies import copies
from .layout import has_rows, is_plain
from .results import scratch

ALIGNMENT = 256  # bytes


class Staging:
    """The scratch memory of one call."""

    def __init__(self) -> None:
        self.size = 0
        self._stand_ins: list[DeviceArray] = []
        self._before: list[tuple[DeviceArray, DeviceArray]] = []
        self._after: list[tuple[DeviceArray, DeviceArray]] = []
        self._memory: DeviceArray | None = None

    def rows(self, array: DeviceArray | None, axes: int, written: bool = False) -> DeviceArray | None:
        """An array whose last `axes` axes are contiguous: the one given, or its stand-in."""
        if array is None or has_rows(array, axes):
            return array
        return self.stand_in(array, written)

    def vector(
        self, array: DeviceArray | None, dtype: np.dtype | None = None, written: bool = False
    ) -> DeviceArray | None:
        """A contiguous array: the one given if it has the dtype, or its stand-in."""
        # Never `dtype in (None, ...)`: NumPy takes None for float64.
        if array is None or (array.c_contiguous and is_plain(array) and (dtype is None or dtype == array.dtype)):
            return array
        return self.stand_in(array, written, dtype)

    def stand_in(self, array: DeviceArray, written: bool, dtype: np.dtype | None = None) -> DeviceArray:
        """A contiguous array to be filled from the one given, or to be copied to it if it is `written`."""
        copy = self.room(array.shape, array.dtype.newbyteorder("=") if dtype is None else dtype)
        if written:
            self._after.append((copy, array))
        else:
            self._before.append((array, copy))
        return copy

    def room(self, shape: tuple[int, ...], dtype: np.dtype) -> DeviceArray:
        """A new array in the scratch memory."""
        array = trusted(self.size, shape, None, dtype, False, None, None)
        self._stand_ins.append(array)
        self.size += -(-array.nbytes // ALIGNMENT) * ALIGNMENT
        return array

    def begin(self, like: DeviceArray, stream: int, workspace: DeviceArray | None = None) -> None:
        """Find the memory, and fill the stand-ins."""
        self._memory = memory_for(like, self.size, stream, workspace)
        if self._memory is not None:
            for array in self._stand_ins:
                array.pointer += self._memory.pointer
        _run(self._before, stream)

    def end(self, stream: int) -> None:
        """Bring results to their places."""
        _run(self._after, stream)


def memory_for(like: DeviceArray, size: int, stream: int, workspace: DeviceArray | None) -> DeviceArray | None:
    """The caller's workspace, or new memory; None if nothing is needed."""
    if workspace is not None and workspace.nbytes < size:
        raise ValueError(
            f"`workspace` must have at least {size} bytes for this call; got {workspace.nbytes}: "
            f"npnorm.cuda.workspace_bytes tells how many are needed"
        )
    if not size:
        return None
    return workspace or scratch(like, size, stream)


def _run(pairs: list[tuple[DeviceArray, DeviceArray]], stream: int) -> None:
    for source, target in pairs:
        for launch, arguments in copies(source, target):
            driver.launch(launch, arguments, stream)
