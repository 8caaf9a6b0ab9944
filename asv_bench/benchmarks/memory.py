"""Peak memory of the whole process: a copy of the input, 64 MiB, would show."""

import numpy as np

import npnorm

COLS = 4096


def arrays(rows, layout):
    """An input whose memory is twice its size whatever the layout, and an output."""
    base = np.ones((rows, 2 * COLS), np.float32)
    x = {
        "contiguous": base.reshape(-1, COLS)[:rows],
        "strided rows": base[:, :COLS],
        "every other column": base[:, ::2],
    }[layout]
    return x, np.ones((rows, COLS), np.float32)


def forward(x, out):
    npnorm.layer_norm(x, out=out)


def backward(x, out):
    npnorm.layer_norm_backward(out, x, out=(out, None, None))


class PeakMemory:
    params = ["contiguous", "strided rows", "every other column"]
    param_names = ["layout"]

    def setup_cache(self):
        # Compiling takes 60 MB: asv calls this in another process, and kernels come from the disk.
        for layout in self.params:
            for call in forward, backward:
                call(*arrays(2, layout))

    def setup(self, layout):
        self.arrays = arrays(4096, layout)

    def peakmem_layer_norm(self, layout):
        forward(*self.arrays)

    def peakmem_layer_norm_backward(self, layout):
        backward(*self.arrays)
