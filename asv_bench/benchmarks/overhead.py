"""What a call costs before it computes anything, on one row of eight columns, and on one row of 768."""

from functools import partial

import numpy as np

import npnorm

from .common import OPERATIONS, cell

x = np.ones((1, 8), np.float32)
weight = bias = np.ones(8, np.float32)

VARIANTS = {
    "no weight": partial(npnorm.layer_norm, x),
    "weight and bias": partial(npnorm.layer_norm, x, weight, bias),
    "out": partial(npnorm.layer_norm, x, weight, bias, out=np.empty_like(x)),
    "statistics": partial(npnorm.layer_norm, x, weight, bias, return_stats=True),
    "two axes": partial(npnorm.layer_norm, x, x, x, axis=(0, 1)),
    "strided": partial(npnorm.layer_norm, np.ones((1, 16), np.float32)[:, ::2], weight, bias),
    "layer": partial(npnorm.LayerNorm(8), x),
}


class _Overhead:
    """Without a `setup` asv times batches of calls; the first, a warm-up, compiles."""

    rounds = 1
    number = 1000
    repeat = (20, 50, 0.3)
    warmup_time = 0.05


class Operations(_Overhead):
    params = list(OPERATIONS)
    param_names = ["operation"]

    def time_into(self, operation):
        cell(operation, "float32", "1x8").into()


class OneRow(_Overhead):
    """A row of a transformer, in a matrix and in a batch of one."""

    params = [list(OPERATIONS), ["1x768", "1x1x768"]]
    param_names = ["operation", "shape"]

    def time_fresh(self, operation, shape):
        cell(operation, "float32", shape).fresh()


class Variants(_Overhead):
    params = list(VARIANTS)
    param_names = ["variant"]

    def time_layer_norm(self, variant):
        VARIANTS[variant]()
