"""What the benchmarks share: shapes, dtypes, the table of operations, the ratio to a copy."""

import os

# asv sets this from its configuration, except with --python=same. npnorm reads it when it starts.
os.environ.setdefault("NPNORM_NUM_THREADS", "1")

from collections.abc import Callable
from functools import lru_cache, partial
from typing import NamedTuple

import numpy as np

import npnorm

from .timing import shortest_times

DTYPES = ["float16", "bfloat16", "float32", "float64"]

# One row; batches in and out of the caches; very narrow and very wide rows.
SHAPES = [
    "1x768",
    "16x4096",
    "64x768",
    "512x768",
    "512x4096",
    "4096x768",
    "4096x4096",
    "65536x64",
    "16x65536",
    "1x1000000",
]


class Data:
    """Seeded random arrays of one dtype and shape."""

    def __init__(self, dtype: str, shape: str):
        if dtype == "bfloat16":
            try:
                import ml_dtypes  # noqa: F401  (makes NumPy know the name)
            except ImportError:
                raise NotImplementedError("bfloat16 needs ml_dtypes") from None
        self.dtype = np.dtype(dtype)
        self.shape = tuple(map(int, shape.split("x")))
        self.random = np.random.default_rng(0)

    def normal(self, shape: tuple[int, ...]) -> np.ndarray:
        return self.random.standard_normal(shape, dtype=np.float32).astype(self.dtype)

    def matrix(self) -> np.ndarray:
        return self.normal(self.shape)

    def vector(self) -> np.ndarray:
        return self.normal(self.shape[-1:])


class Call(NamedTuple):
    """Arguments of one call; `outputs` are those that say where its results go."""

    arguments: tuple
    options: dict
    outputs: dict


def forward(data: Data, centered: bool) -> Call:
    x, weight = data.matrix(), data.vector()
    parameters = (weight, data.vector()) if centered else (weight,)
    return Call((x, *parameters), {}, {"out": np.empty_like(x)})


def backward(data: Data, centered: bool) -> Call:
    dy, x, weight = data.matrix(), data.matrix(), data.vector()
    norm = npnorm.layer_norm if centered else npnorm.rms_norm
    _, *statistics = norm(x, weight, return_stats=True)
    names = ("mean", "rstd") if centered else ("rstd",)
    options = dict(zip(names, statistics, strict=True), output_mask=(True, True, centered))
    dbias = np.empty_like(weight) if centered else None
    out = (np.empty_like(x), np.empty_like(weight), dbias)
    return Call((dy, x, weight), options, {"out": out})


def add(data: Data, centered: bool) -> Call:
    (x, *parameters), options, outputs = forward(data, centered)
    outputs["residual_out"] = np.empty_like(x)
    return Call((x, data.matrix(), *parameters), options, outputs)


def derivative(data: Data, centered: bool) -> Call:
    x, dx, weight = data.matrix(), data.matrix(), data.vector()
    options = {"dx": dx, "dweight": data.vector()} | ({"dbias": data.vector()} if centered else {})
    return Call((x, weight), options, {"out": np.empty_like(x)})


class Operation(NamedTuple):
    prepare: Callable[[Data, bool], Call]
    centered: bool
    arrays: int  # arrays of x's size that it must read or write: what a copy has two of


OPERATIONS = {
    "layer_norm": Operation(forward, True, 2),
    "rms_norm": Operation(forward, False, 2),
    "layer_norm_backward": Operation(backward, True, 3),
    "rms_norm_backward": Operation(backward, False, 3),
    "add_layer_norm": Operation(add, True, 4),
    "add_rms_norm": Operation(add, False, 4),
    "layer_norm_jvp": Operation(derivative, True, 3),
    "rms_norm_jvp": Operation(derivative, False, 3),
}


class Cell(NamedTuple):
    """One operation on one array, compiled and ready to run."""

    into: Callable[[], object]  # with outputs given
    fresh: Callable[[], object]  # with outputs allocated by npnorm
    traffic: int  # bytes it must move
    arguments: tuple  # arrays, to give to others


# asv runs `setup` again before every sample, with the same arguments.
@lru_cache(maxsize=1)
def cell(operation: str, dtype: str, shape: str) -> Cell:
    """The cell of an operation; `NotImplementedError`, to asv a skip, where there is none."""
    if not hasattr(npnorm, operation):
        raise NotImplementedError(f"this npnorm has no {operation}")
    prepare, centered, arrays = OPERATIONS[operation]
    arguments, options, outputs = prepare(Data(dtype, shape), centered)
    fresh = partial(getattr(npnorm, operation), *arguments, **options)
    into = partial(fresh, **outputs)
    into(), fresh()
    x = arguments[0]
    return Cell(into, fresh, arrays * x.nbytes, arguments)


def ratio_to_copy(call: Callable[[], object], traffic: int) -> float:
    """Time of `call` over the time that `np.copyto` takes to move as many bytes."""
    source, target = (np.ones(traffic // 2, np.uint8) for _ in range(2))
    times = shortest_times({"call": call, "copy": partial(np.copyto, target, source)}, 0.4)
    return round(times["call"] / times["copy"], 3)
