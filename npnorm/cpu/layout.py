"""Arrays as rows: as views where strides allow it, else a few rows at a time through a buffer."""

import math

import numpy as np

BUFFER = 32768  # elements of a buffer: 128 KB of float32, half of the smallest level-2 cache in use


def row_view(array, axes, rows, cols):
    """The array as (outer, inner, cols), outer·inner = rows, cols contiguous; None if it cannot be."""
    flags = array.flags
    if flags.c_contiguous and flags.aligned and array.dtype.isnative:
        return as_elements(array).reshape(1, rows, cols)
    if not (flags.aligned and array.dtype.isnative):
        return None
    lead = _merged(array.shape[:-axes], array.strides[:-axes])
    inner = _merged(array.shape[-axes:], array.strides[-axes:])
    if len(lead) > 2 or len(inner) > 1 or (inner and inner[0][1] != array.itemsize):
        return None
    lead = [(1, 0)] * (2 - len(lead)) + lead
    return np.lib.stride_tricks.as_strided(
        as_elements(array),
        (lead[0][0], lead[1][0], cols),
        (lead[0][1], lead[1][1], array.itemsize),
        writeable=flags.writeable,
    )


def _merged(shape, strides):
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


def as_elements(array):
    """16-bit floats as the integers that kernels take them for."""
    if array.itemsize != 2:
        return array
    return array.view(np.int16 if array.dtype.kind == "f" else np.uint16)


class Rows:
    """Rows of an array for kernels: parts of a view, or copies of a few rows where there is no view that can be cut."""

    def __init__(self, array, view, axes):
        self.view = view
        if view is None:
            self.lead = array.shape[:-axes] or (1,)
            self.shape = array.shape[-axes:]
            self.array = array.reshape(self.lead + self.shape) if array.ndim == axes else array

    def read(self, start, stop):
        """Rows start to stop as (1, stop - start, cols), to be read."""
        if self.view is not None:
            return self.view[:, start:stop]
        rows = self.array[self._index(start, stop)]
        rows = np.require(rows, rows.dtype.newbyteorder("="), ["C", "A"])
        return as_elements(rows).reshape(1, stop - start, -1)

    def buffer(self, start, stop):
        """Room for rows start to stop, to be written and then given to `write`."""
        if self.view is not None:
            return self.view[:, start:stop]
        rows = np.empty((1, stop - start, math.prod(self.shape)), self.array.dtype.newbyteorder("="))
        return as_elements(rows)

    def write(self, start, stop, rows):
        """Put the rows of a buffer in their places."""
        if self.view is None:
            rows = rows.view(self.array.dtype.newbyteorder("="))
            self.array[self._index(start, stop)] = rows.reshape(stop - start, *self.shape)

    def _index(self, start, stop):
        if len(self.lead) == 1:
            return slice(start, stop)
        return np.unravel_index(np.arange(start, stop), self.lead)
