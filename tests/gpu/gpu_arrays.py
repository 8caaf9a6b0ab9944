"""Arrays on a device with poison around and, for outputs, in them."""

import numpy as np
from gpu_machine import Gpu  # noqa: F401  finds npnorm and tests/

from npnorm.cuda import DeviceArray

GUARD = 256
"""Bytes before and after every array. Poison is 0xFF: NaN in every format."""

PADS = {"rows apart": 32, "lead axes apart": 64}
"""Bytes between the rows of a layout."""

LAYOUTS = (
    *("contiguous", "rows apart", "rows apart, odd", "lead axes apart", "misaligned", "odd address"),
    *("reversed", "columns apart", "byte-swapped", "far apart"),
)


class Placed:
    """An array in a layout; `values` are its elements on the host, None for an output."""

    def __init__(self, machine, shape, dtype, layout="contiguous", values=None):
        self.machine, self.shape = machine, tuple(shape)
        dtype = np.dtype(dtype)
        if layout == "byte-swapped" and values is not None:
            dtype = dtype.newbyteorder()
        self.dtype = dtype
        start, self.strides, size = _laid_out(self.shape, dtype.itemsize, layout, machine.far)
        self.start = GUARD + start
        # Of an array of many gigabytes, the rows alone are written and read.
        far = layout == "far apart"
        rows = range(self.shape[0]) if far else [None]
        self.pointer = machine.allocate(size + 2 * GUARD)
        self.pieces = []
        for row in rows:
            offset = 0 if row is None else row * self.strides[0]
            piece_size = size if row is None else self.shape[1] * dtype.itemsize
            image = np.full(piece_size + 2 * GUARD, 0xFF, np.uint8)
            if values is not None:
                part = values if row is None else values[row : row + 1]
                self._view(image, row)[...] = part
            machine.upload(self.pointer + offset, image)
            self.pieces.append((offset, image, row))

    def _view(self, image, row):
        shape = self.shape if row is None else (1, *self.shape[1:])
        return np.ndarray(shape, self.dtype, image, self.start, self.strides)

    @property
    def array(self):
        return DeviceArray(self.pointer + self.start, self.shape, self.strides, self.dtype, device=0)

    def read(self, written=True):
        """The elements, once all around them is seen to be as it was; of an input, they too."""
        found = []
        for offset, before, row in self.pieces:
            after = self.machine.download(self.pointer + offset, len(before))
            values = self._view(after, row).astype(self.dtype.newbyteorder("="), order="C")
            if written:
                # What is left, once the elements are taken out, must be poison.
                itemsize = self.dtype.itemsize
                np.ndarray((*values.shape, itemsize), np.uint8, after, self.start, (*self.strides, 1))[...] = 0xFF
            changed = np.flatnonzero(after != before)
            if self.machine.judged and changed.size:
                what = "beside an output" if written else "an input"
                first = changed[0] - self.start
                raise AssertionError(f"{what}: {changed.size} bytes are changed, the first at {first}")
            found.append(values)
        return found[0] if len(found) == 1 else np.concatenate(found)

    def free(self):
        self.machine.free(self.pointer)


def _laid_out(shape, itemsize, layout, far):
    """The first element's place, the strides, and the bytes of all."""
    if layout not in LAYOUTS:
        raise ValueError(f"there is no layout {layout!r}")
    if layout == "far apart":
        return 0, (far * itemsize, itemsize), ((shape[0] - 1) * far + shape[1]) * itemsize
    step = itemsize * (2 if layout == "columns apart" else 1)
    pad = itemsize if layout == "rows apart, odd" else PADS.get(layout, 0)
    strides, size = [step], shape[-1] * step
    for length in reversed(shape[:-1]):
        size += pad
        strides.insert(0, size)
        size *= length
    start = {"misaligned": itemsize, "odd address": 1}.get(layout, 0)
    if layout == "reversed":
        start = (shape[0] - 1) * strides[0]
        strides[0] = -strides[0]
    return start, tuple(strides), size + (start if layout != "reversed" else 0)
