"""Arrays as rows: as views where strides allow it, else a few rows at a time through a buffer."""

from collections.abc import Sequence

import numpy as np

from .._results import Array

BUFFER = 2**16  # bytes of a buffer, of which a thread has up to four: they stay in the second cache


def row_view(array: Array, axes: int, cols: int) -> Array | None:
    """The array as kernels take it: contiguous, or (outer, inner, cols) with cols contiguous; None if it cannot be."""
    flags = array.flags
    if flags.c_contiguous and flags.aligned and array.dtype.isnative:
        return array
    if not (flags.aligned and array.dtype.isnative):
        return None
    lead = _merged(array.shape[:-axes], array.strides[:-axes])
    inner = _merged(array.shape[-axes:], array.strides[-axes:])
    if len(lead) > 2 or len(inner) > 1 or (inner and inner[0][1] != array.itemsize):
        return None
    lead = [(1, 0)] * (2 - len(lead)) + lead
    return np.lib.stride_tricks.as_strided(
        array,
        (lead[0][0], lead[1][0], cols),
        (lead[0][1], lead[1][1], array.itemsize),
        writeable=flags.writeable,
    )


def _merged(shape: Sequence[int], strides: Sequence[int]) -> list[tuple[int, int]]:
    """(length, stride) of the fewest axes that walk the same elements in the same order."""
    merged: list[tuple[int, int]] = []
    for length, stride in zip(shape, strides, strict=True):
        if length == 1:
            continue
        if merged and merged[-1][1] == stride * length:
            merged[-1] = (merged[-1][0] * length, stride)
        else:
            merged.append((length, stride))
    return merged


class Rows:
    """Rows of an array for kernels: parts of a view, or copies of a few rows where there is no view that can be cut."""

    def __init__(self, array: Array, axes: int, rows: int, cols: int) -> None:
        view = row_view(array, axes, cols)
        if view is not None and view.flags.c_contiguous:
            view = view.reshape(1, rows, cols)
        # A view whose rows run along two axes cannot be cut into ranges of rows.
        self.view = view if view is not None and len(view) == 1 else None
        if self.view is None:
            self.lead = array.shape[:-axes] or (1,)
            self.shape = array.shape[-axes:]
            self.array = array.reshape(self.lead + self.shape) if array.ndim == axes else array

    def read(self, start: int, stop: int) -> Array:
        """Rows start to stop, to be read."""
        if self.view is not None:
            return self.view[:, start:stop]
        rows = self.array[self._index(start, stop)]
        return np.require(rows, rows.dtype.newbyteorder("="), ["C", "A"])

    def buffer(self, start: int, stop: int) -> Array:
        """Room for rows start to stop, to be written and then given to `write`."""
        if self.view is not None:
            return self.view[:, start:stop]
        return np.empty((stop - start, *self.shape), self.array.dtype.newbyteorder("="))

    def write(self, start: int, stop: int, rows: Array) -> None:
        """Put the rows of a buffer in their places."""
        if self.view is None:
            self.array[self._index(start, stop)] = rows

    def _index(self, start: int, stop: int) -> slice | tuple[Array, ...]:
        if len(self.lead) == 1:
            return slice(start, stop)
        return np.unravel_index(np.arange(start, stop), self.lead)
