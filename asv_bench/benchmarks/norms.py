"""The operations over dtypes and shapes, in seconds and beside a copy."""

from .common import DTYPES, SHAPES, cell, ratio_to_copy


class Forward:
    params = [["layer_norm", "rms_norm"], DTYPES, SHAPES]
    param_names = ["operation", "dtype", "shape"]
    # With a `setup`, asv times single calls: many of them, for at most a quarter of a second.
    rounds = 1
    repeat = (3, 500, 0.25)
    warmup_time = 0.05

    def setup(self, operation, dtype, shape):
        self.cell = cell(operation, dtype, shape)

    def time_into(self, operation, dtype, shape):
        self.cell.into()

    def time_fresh(self, operation, dtype, shape):
        self.cell.fresh()

    def track_into(self, operation, dtype, shape):
        return ratio_to_copy(self.cell.into, self.cell.traffic)

    track_into.unit = "x copy"


class Backward(Forward):
    params = [["layer_norm_backward", "rms_norm_backward"], DTYPES, SHAPES]


class Add(Forward):
    params = [
        ["add_layer_norm", "add_rms_norm"],
        DTYPES,
        ["1x768", "512x768", "4096x768", "4096x4096"],
    ]
