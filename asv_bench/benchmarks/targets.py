"""What npnorm must reach, as ratios of two calls that take turns in one process.

asv follows them as `track_value`; `python asv_bench/compare_peers.py --targets` prints them all.
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import numpy as np

import npnorm

from . import peers
from .common import cell
from .timing import Inside, shortest_times

KINDS = {"LN": "layer_norm", "RMS": "rms_norm"}
Pair = tuple[Callable[[], object], Callable[[], object] | None]


class Target(NamedTuple):
    limit: float
    prepare: Callable[[], Pair]  # what is timed, and what its time is divided by
    check: Callable[[], object] = bool  # raises NotImplementedError where it cannot be measured
    seconds: float = 1.0  # of one measurement

    def measure(self) -> tuple[float, float]:
        """The shortest times of the two calls; the second is 1 where there is none."""
        self.check()
        call, other = self.prepare()
        times = shortest_times({"call": call} | ({"other": other} if other else {}), self.seconds)
        return times["call"], times.get("other", 1.0)


def beside_copy(operation, shape):
    """With an output given, beside `np.copyto` of x."""
    this = cell(operation, "float32", shape)
    x = this.arguments[1 if "backward" in operation else 0]
    return this.into, partial(np.copyto, np.empty_like(x), x)


def beside_torch(operation, dtype, shape, name="PyTorch"):
    """With a fresh output, as PyTorch's."""
    kind = "LN" if "layer" in operation else "RMS"
    this = cell(operation, dtype, shape)
    other = peers.torch_backward if "backward" in operation else peers.torch_forward
    return this.fresh, other(kind, *this.arguments)[name]


def two_threads(operation, shape):
    """On two threads beside one."""
    into = cell(operation, "float32", shape).into
    return Inside(into, partial(_threads, 2)), Inside(into, partial(_threads, 1))


@contextmanager
def _threads(number):
    before = npnorm.get_num_threads()
    npnorm.set_num_threads(number)
    yield
    npnorm.set_num_threads(before)


NPNORM = "import numpy, npnorm; npnorm.{}(numpy.ones((1, 768), 'f4'), numpy.ones(768, 'f4'))"
TORCH = "import torch; torch.nn.functional.{}(torch.ones(1, 768), (768,), torch.ones(768))"


def first_result(norm):
    """A process from its start to its first result, the kernel in the cache, beside PyTorch's."""
    return python(NPNORM.format(norm)), python(TORCH.format(norm))


def first_result_ever(norm):
    """The same with an empty cache, in seconds."""

    def call():
        with tempfile.TemporaryDirectory() as folder:
            python(NPNORM.format(norm), NPNORM_CACHE_DIR=folder)()

    return call, None


def imports():
    return python("import npnorm"), python("import numpy")


def python(code, **environment):
    """A call that runs code in a new process."""
    return partial(subprocess.run, [sys.executable, "-c", code], check=True, env=os.environ | environment)


def needs_torch():
    if not peers.installed("torch"):
        raise NotImplementedError("needs torch")


def needs_two_cpus():
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    if cpus == 1:
        raise NotImplementedError("needs two CPUs")


CHECKS = {beside_torch: needs_torch, two_threads: needs_two_cpus}


def _targets():
    def both(words, shapes, limits, prepare, suffix=""):
        """A target for either norm; `limits` are LayerNorm's and RMSNorm's, None for no target."""
        for shape in shapes:
            for (kind, norm), limit in zip(KINDS.items(), limits, strict=True):
                if limit is not None:
                    operation = f"{norm}{suffix}"
                    call = partial(prepare, operation, shape=shape)
                    check = CHECKS.get(call.func, bool)
                    yield f"{kind} {words}, {shape}", Target(limit, call, check)

    words = "forward, `out=` / copy"
    yield from both(words, ["4096x4096"], (1.15, 1.15), beside_copy)
    yield from both(words, ["4096x768"], (1.3, 1.3), beside_copy)
    yield from both(words, ["512x768", "64x768"], (2.7, 2.2), beside_copy)
    yield from both(words, ["65536x64"], (1.6, 1.4), beside_copy)

    sizes = ["1x768", "64x768", "512x768", "4096x768", "4096x4096"]
    single = partial(beside_torch, dtype="float32")
    yield from both("forward / torch", sizes, (0.75, 0.5), single)
    for dtype in "float16", "bfloat16":
        half = partial(beside_torch, dtype=dtype)
        yield from both(f"forward / torch, {dtype}", ["16x4096", "512x4096"], (0.8, 0.25), half)

    words = "backward, `out=` / copy"
    for shape, limit in ("4096x4096", 2.3), ("4096x768", 2.4), ("512x768", 5.0):
        yield from both(words, [shape], (limit, None), beside_copy, "_backward")
    operator = partial(single, name="PyTorch, operator")
    words = "backward / torch's operator"
    yield from both(words, sizes[:-1], (0.85, None), operator, "_backward")
    yield from both(words, sizes[-1:], (0.6, None), operator, "_backward")
    yield from both("backward / torch's autograd", sizes, (None, 0.4), single, "_backward")

    for suffix, direction in ("", "forward"), ("_backward", "backward"):
        words = f"{direction}, two threads / one"
        yield from both(words, ["4096x768"], (0.75, 0.75), two_threads, suffix)
        yield from both(words, ["512x768"], (0.7, 0.7), two_threads, suffix)
        yield from both(words, ["1x1000000", "16x65536"], (0.7, 0.7), two_threads, suffix)

    yield from both("call / torch", ["1x768", "1x1x768"], (0.7, 0.25), single)

    for kind, norm in KINDS.items():
        yield f"{kind} process start to first result / torch", Target(0.35, partial(first_result, norm), needs_torch, 6)
        yield f"{kind} first result ever, seconds", Target(2.5, partial(first_result_ever, norm), seconds=4)
    yield "`import npnorm` / `import numpy`", Target(1.35, imports, seconds=3)


TARGETS = dict(_targets())


# asv's pages show names as they are, in a narrow column.
BY_WORDS = {name.replace("`", ""): target for name, target in TARGETS.items()}


class Targets:
    """Lower is better."""

    params = [list(BY_WORDS)]
    param_names = ["target"]
    timeout = 120
    unit = "ratio"

    def setup(self, target):
        BY_WORDS[target].check()

    def track_value(self, target):
        first, second = BY_WORDS[target].measure()
        return round(first / second, 3)
