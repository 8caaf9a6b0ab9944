"""The operations over dtypes and shapes, in seconds and beside a copy."""

import npnorm

from .common import DTYPES, SHAPES, cell, ratio_to_copy


class _Sampled:
    """With a `setup`, asv times single calls: many of them, for at most a quarter of a second."""

    rounds = 1
    repeat = (3, 500, 0.25)
    warmup_time = 0.05


class Forward(_Sampled):
    params = [["layer_norm", "rms_norm"], DTYPES, SHAPES]
    param_names = ["operation", "dtype", "shape"]

    def setup(self, operation, dtype, shape):
        self.cell = cell(operation, dtype, shape)

    def time_into(self, operation, dtype, shape):
        self.cell.into()

    def time_fresh(self, operation, dtype, shape):
        self.cell.fresh()

    def track_into(self, operation, dtype, shape):
        return ratio_to_copy(self.cell.into, self.cell.traffic)

    track_into.unit = "times a copy"


class Backward(Forward):
    params = [["layer_norm_backward", "rms_norm_backward"], DTYPES, SHAPES]


class Add(Forward):
    params = [
        ["add_layer_norm", "add_rms_norm"],
        DTYPES,
        ["1x768", "512x768", "4096x768", "4096x4096"],
    ]


class Derivative(Forward):
    params = [["layer_norm_jvp", "rms_norm_jvp"], DTYPES, ["1x768", "512x768", "4096x768", "4096x4096"]]


class Threads(_Sampled):
    """The ratio of two threads to one is among the targets."""

    params = [
        ["layer_norm", "rms_norm", "layer_norm_backward", "rms_norm_backward"],
        ["512x768", "4096x768", "16x65536", "1x1000000"],
        [1, 2],
    ]
    param_names = ["operation", "shape", "threads"]

    def setup(self, operation, shape, threads):
        npnorm.set_num_threads(threads)
        self.cell = cell(operation, "float32", shape)

    def teardown(self, operation, shape, threads):
        npnorm.set_num_threads(1)

    def time_into(self, operation, shape, threads):
        self.cell.into()
