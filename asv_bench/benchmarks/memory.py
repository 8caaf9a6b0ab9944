"""What an operation allocates beyond its results, whatever the layout: a copy of x would be 64 MiB."""

import tracemalloc

import numpy as np

import npnorm

from .common import OPERATIONS

COLS = 4096
LAYOUTS = {
    "contiguous": lambda base: base.reshape(-1, COLS)[: len(base)],
    "strided rows": lambda base: base[:, :COLS],
    "every other column": lambda base: base[:, ::2],
    "reversed": lambda base: base[::-1, COLS - 1 :: -1],
    "Fortran": lambda base: base.reshape(-1)[: base.size // 2].reshape(COLS, -1).T,
    "byte-swapped": lambda base: base[:, :COLS].view(base.dtype.newbyteorder()),
}


def prepare(operation, layout, rows):
    """A call with outputs given, all arrays of x's size in this layout."""
    # One array for all inputs, of twice their size whatever the layout: it is peak memory that counts.
    x = LAYOUTS[layout](np.ones((rows, 2 * COLS), np.float32))
    out = np.ones((rows, COLS), np.float32)
    function = getattr(npnorm, operation)
    if operation.startswith("add"):
        total = np.ones_like(out)
        return lambda: function(x, x, out=out, residual_out=total)
    if operation.endswith("backward"):
        weight, dweight = np.ones((2, COLS), np.float32)
        options = {"output_mask": (True, True, False), "out": (out, dweight, None)}
        return lambda: function(x, x, weight, **options)
    return lambda: function(x, out=out)


class Memory:
    params = [list(OPERATIONS), list(LAYOUTS)]
    param_names = ["operation", "layout"]

    def setup_cache(self):
        # Compiling takes 60 MB: asv calls this in another process, and kernels come from the disk.
        for operation in OPERATIONS:
            for layout in LAYOUTS:
                prepare(operation, layout, 2)()

    def setup(self, operation, layout):
        self.call = prepare(operation, layout, 4096)

    def peakmem_process(self, operation, layout):
        self.call()

    def track_extra(self, operation, layout):
        """Bytes, of Python and NumPy, that are allocated at once during a call."""
        prepare(operation, layout, 2)()  # what loading the kernel takes is not counted
        tracemalloc.start()
        self.call()
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return peak

    track_extra.unit = "bytes"
