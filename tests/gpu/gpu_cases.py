"""Right results, forward and backward: random inputs, poisoned outputs, the contract's bounds, and the same bits."""

import zlib
from types import SimpleNamespace
from typing import NamedTuple

import bounds
import numpy as np
from gpu_arrays import Placed
from gpu_machine import Gpu  # noqa: F401  finds npnorm and tests/
from table import DTYPES, LAYER_NORM, RMS_NORM, Norm

from npnorm import reference
from npnorm._results import LayerNormResult, NormGradients, RMSNormResult

LARGE = {"float16": 1e3, "bfloat16": 1e30, "float32": 1e30, "float64": 1e200}
SMALL = {"float16": 1e-6, "bfloat16": 1e-38, "float32": 1e-38, "float64": 1e-200}


class Case(NamedTuple):
    """One forward and one backward call, in several ways."""

    name: str
    norm: Norm
    shape: tuple[int, ...]
    dtype: str
    weight: str | None = None
    bias: str | None = None
    residual: str | None = None
    """The format of the residual, and of the gradient that comes along it."""
    dy: str | None = None
    """The format of dy, x's if it is None."""
    layout: str = "contiguous"
    values: str = "normal"
    weight_offset: float = 0.0
    rounding: bool = False


def _cases():
    ln, rms = LAYER_NORM, RMS_NORM
    yield Case("LN bf16", ln, (64, 4096), "bfloat16", "bfloat16", "bfloat16")
    yield Case("RMS bf16", rms, (64, 4096), "bfloat16", "bfloat16")
    yield Case("LN f32", ln, (64, 4096), "float32", "float32", "float32")
    yield Case("RMS f32", rms, (64, 4096), "float32", "float32")
    yield Case("LN f16", ln, (33, 1024), "float16", "float16", "float16")
    yield Case("RMS f16", rms, (33, 1024), "float16", "float16")
    yield Case("LN f64", ln, (17, 2048), "float64", "float64", "float64")
    yield Case("RMS f64", rms, (17, 2048), "float64", "float64")
    yield Case("LN bare", ln, (40, 768), "float32")
    yield Case("RMS bare", rms, (40, 768), "bfloat16")
    yield Case("LN bias only", ln, (40, 768), "bfloat16", None, "float32")
    yield Case("add LN bf16", ln, (50, 2048), "bfloat16", "bfloat16", "bfloat16", "bfloat16")
    yield Case("add RMS bf16", rms, (50, 2048), "bfloat16", "bfloat16", None, "bfloat16")
    yield Case("add RMS f32 to bf16", rms, (50, 512), "bfloat16", "float32", None, "float32")
    yield Case("add LN f32", ln, (50, 512), "float32", "float32", "float32", "float32")
    yield Case("mixed dtypes", ln, (30, 640), "float32", "bfloat16", "float16", None, "bfloat16")
    yield Case("bf16 with f64 weight", rms, (30, 640), "bfloat16", "float64", None, None, "float32")
    yield Case("weight offset", rms, (30, 2304), "bfloat16", "bfloat16", None, weight_offset=1.0)
    yield Case("rounding before weight", rms, (30, 4096), "bfloat16", "bfloat16", None, rounding=True)
    yield Case("rounding, LN f16", ln, (30, 1536), "float16", "float32", "float32", rounding=True)
    yield Case("D = 1", ln, (300, 1), "float32", "float32", "float32")
    yield Case("D = 7", ln, (300, 7), "bfloat16", "bfloat16", "bfloat16")
    yield Case("D = 64", rms, (1000, 64), "float32", "float32")
    yield Case("odd D", ln, (33, 4097), "bfloat16", "bfloat16", "bfloat16")
    yield Case("odd D f32", rms, (33, 1023), "float32", "float32")
    yield Case("D = 16,384", ln, (9, 16384), "bfloat16", "bfloat16", "bfloat16")
    yield Case("D = 16,384 f32", rms, (9, 16384), "float32", "float32")
    yield Case("D = 65,536", ln, (5, 65536), "bfloat16", "bfloat16", "bfloat16")
    yield Case("D = 65,536 f32", rms, (5, 65536), "float32", "float32")
    yield Case("D = 65,537 f64", ln, (3, 65537), "float64", "float64", "float64")
    yield Case("D = 1,000,003", ln, (2, 1_000_003), "float32", "float32", "float32")
    yield Case("70,001 rows", ln, (70_001, 8), "float32", "float32", "float32")
    yield Case("70,001 rows bf16", rms, (70_001, 16), "bfloat16", "bfloat16")
    yield Case("3,000 rows", ln, (3000, 256), "bfloat16", "bfloat16", "bfloat16")
    yield Case("rows apart", ln, (33, 1024), "bfloat16", "bfloat16", "bfloat16", "bfloat16", layout="rows apart")
    yield Case("rows apart, odd", rms, (33, 1024), "float32", "float32", layout="rows apart, odd")
    yield Case("misaligned", ln, (33, 1024), "bfloat16", "bfloat16", "bfloat16", layout="misaligned")
    yield Case("odd address", rms, (33, 256), "float32", "float32", layout="odd address")
    yield Case("reversed", ln, (33, 768), "float32", "float32", "float32", layout="reversed")
    yield Case("columns apart", rms, (33, 768), "bfloat16", "bfloat16", layout="columns apart")
    yield Case("lead axes apart", ln, (3, 2, 5, 256), "float32", "float32", "float32", layout="lead axes apart")
    yield Case("byte-swapped", ln, (33, 768), "float32", "float32", "float32", layout="byte-swapped")
    yield Case("beyond 2^31 elements", ln, (3, 4096), "bfloat16", "bfloat16", "bfloat16", layout="far apart")
    yield Case("offset", ln, (40, 4096), "float32", "float32", "float32", values="offset")
    yield Case("offset bf16", ln, (40, 2048), "bfloat16", "bfloat16", "bfloat16", values="offset")
    yield Case("outliers", ln, (40, 4096), "float32", "float32", "float32", values="outliers")
    for norm, short in ((ln, "LN"), (rms, "RMS")):
        yield Case(f"{short} large", norm, (20, 1000), "float32", "float32", values="large")
        yield Case(f"{short} tiny", norm, (20, 1000), "float32", "float32", values="tiny")
        yield Case(f"{short} large f64", norm, (20, 1000), "float64", "float64", values="large")
    yield Case("LN large, D = 65,536", ln, (3, 65536), "float32", "float32", values="large")
    yield Case("constant", ln, (40, 1000), "float32", "float32", "float32", values="constant")
    yield Case("constant bf16", ln, (40, 1000), "bfloat16", "bfloat16", "bfloat16", values="constant")
    for dtype, cols in (("float32", 1), ("bfloat16", 13), ("float64", 1001)):
        yield Case(f"constant large {dtype}", ln, (40, cols), *3 * (dtype,), values="constant large")
    yield Case("NaN and infinity", ln, (40, 1000), "float32", "float32", "float32", values="special")


CASES = [case for case in _cases() if case.dtype in DTYPES]


def chosen(names):
    """The cases whose names are given, with | between them; all, if none are."""
    wanted = set(names.split("|") if names else ())
    unknown = wanted - {case.name for case in CASES}
    if unknown:
        raise ValueError(f"there are no cases {sorted(unknown)}")
    return [case for case in CASES if not wanted or case.name in wanted]


def _data(case):
    """Arrays of a case on the host, the same at every run."""
    random = np.random.default_rng(zlib.crc32(case.name.encode()))
    cols = case.shape[-1:]

    def normal(shape, format_, offset=0.0):
        return None if format_ is None else (random.standard_normal(shape) + offset).astype(DTYPES[format_])

    x = random.standard_normal(case.shape)
    if case.values == "offset":
        x += 1000
    elif case.values == "large":
        x *= LARGE[case.dtype]
    elif case.values == "tiny":
        x *= SMALL[case.dtype]
    elif case.values == "outliers":
        x[..., ::97] *= 1e4
    elif case.values == "constant":
        x[...] = x[..., :1] * 1e3
    elif case.values == "constant large":
        x[...] = np.sign(x[..., :1]) * bounds.LARGEST[case.dtype]
    elif case.values == "special":
        x[1, 5], x[2, 7], x[3, 0] = np.nan, np.inf, -np.inf
    x = x.astype(DTYPES[case.dtype])
    residual = normal(case.shape, case.residual)
    normed = x
    if residual is not None:
        normed = getattr(reference, f"add_{case.norm.name}")(x, residual).residual_out
    return SimpleNamespace(
        x=x, residual=residual, normed=normed, dy=normal(case.shape, case.dy or case.dtype),
        dresidual=normal(case.shape, case.residual),
        weight=normal(cols, case.weight, 0.5), bias=normal(cols, case.bias),
    )  # fmt: skip


ROWS = ("x", "residual", "normed", "dy", "dresidual")


class Run:
    """The results of a case's calls on a machine, as NumPy arrays: y, mean, dx and so on, None where there are none."""

    def __init__(self, machine, case, data, layout="contiguous", rows=None, statistics=True):
        if rows is not None:
            part = {name: None if getattr(data, name) is None else getattr(data, name)[rows] for name in ROWS}
            data = SimpleNamespace(**{**vars(data), **part})
        self.machine, self.case, self.data, self.layout = machine, case, data, layout
        self.placed = []
        try:
            self._forward()
            self._backward(statistics)
        finally:
            machine.synchronize()
            for placed in self.placed:
                placed.free()

    def _put(self, values, layout=None):
        """An input: its device array, and itself."""
        if values is None:
            return None
        layout = layout or self.layout
        placed = Placed(self.machine, values.shape, values.dtype, layout, values)
        self.placed.append(placed)
        self.inputs.append(placed)
        return placed.array

    def _vector(self, values):
        """A weight or bias: misaligned where the rest is."""
        odd = self.layout in ("misaligned", "odd address", "byte-swapped")
        return self._put(values, self.layout if odd else "contiguous")

    def _room(self, shape, dtype, layout=None):
        placed = Placed(self.machine, shape, dtype, layout or self.layout)
        self.placed.append(placed)
        return placed

    def _kept(self, array):
        """The numbers of a contiguous result that npnorm has allocated."""
        found = self.machine.download(array.pointer, array.nbytes)
        return found.view(array.dtype).reshape(array.shape)

    def _forward(self):
        case, data, self.inputs = self.case, self.data, []
        y = self._room(data.x.shape, data.x.dtype)
        options = {
            "eps": case.norm.eps, "weight_offset": case.weight_offset, "round_before_weight": case.rounding,
            "out": y.array, "return_stats": True,
        }  # fmt: skip
        weight, bias = self._vector(data.weight), self._vector(data.bias)
        total = None
        if data.residual is None:
            result = case.norm.forward(self._put(data.x), weight, bias, **options)
        else:
            total = self._room(data.x.shape, data.x.dtype)
            result = case.norm.add(
                self._put(data.x), self._put(data.residual), weight, bias, residual_out=total.array, **options
            )
        self.machine.synchronize()
        self.y = y.read()
        self.residual_out = total and total.read()
        self.mean = self._kept(result.mean) if case.norm.centered else None
        self.rstd = self._kept(result.rstd)
        self._unchanged()

    def _backward(self, statistics):
        case, data, self.inputs = self.case, self.data, []
        given = {}
        if statistics:
            given = {"rstd": self._put(self.rstd, "contiguous")}
            if case.norm.centered:
                given["mean"] = self._put(self.mean, "contiguous")
        mask = True, data.weight is not None, data.bias is not None
        gradient = data.x.dtype if data.weight is None else data.weight.dtype
        cols = data.x.shape[-1:]
        shapes = (data.x.shape, data.x.dtype), (cols, gradient, "contiguous"), (cols, gradient, "contiguous")
        rooms = [self._room(*shape) if wanted else None for shape, wanted in zip(shapes, mask, strict=True)]
        case.norm.backward(
            self._put(data.dy), self._put(data.normed), self._vector(data.weight), **given, eps=case.norm.eps,
            weight_offset=case.weight_offset, dresidual=self._put(data.dresidual), output_mask=mask,
            out=tuple(room and room.array for room in rooms),
        )  # fmt: skip
        self.machine.synchronize()
        self.dx, self.dweight, self.dbias = (room and room.read() for room in rooms)
        self._unchanged()

    def _unchanged(self):
        for placed in self.inputs:
            placed.read(written=False)


RESULTS = ("y", "residual_out", "mean", "rstd", "dx", "dweight", "dbias")
"""The last two are sums over rows."""


@np.errstate(all="ignore")
def check(machine, case):
    """Run a case in all ways, and judge it. Returns the largest error in units of its bound."""
    data = _data(case)
    run = Run(machine, case, data, case.layout)
    everything, few = slice(None), slice(1, 3) if len(data.x) > 3 else slice(0, 1)
    others = [
        ("again", Run(machine, case, data, case.layout), RESULTS, everything),
        ("statistics left out", Run(machine, case, data, case.layout, statistics=False), RESULTS, everything),
        ("in a batch of few rows", Run(machine, case, data, rows=few), RESULTS[:5], few),
    ]
    if case.layout != "contiguous":
        others.append(("contiguous", Run(machine, case, data), RESULTS, everything))
    if not machine.judged:
        return None
    worst = _judge(case, data, run)
    for what, other, names, rows in others:
        for name in names:
            if getattr(run, name) is not None:
                bounds.assert_same_bits(getattr(other, name), getattr(run, name)[rows], f"{name}, {what}")
    return worst


def _judge(case, data, run):
    if data.residual is not None:
        bounds.assert_same_bits(run.residual_out, data.normed, "residual_out beside npnorm.reference")
    norm = case.norm
    worst = _Worst()
    with worst:
        options = {"eps": norm.eps, "weight_offset": case.weight_offset}
        bounds.check_forward(
            norm, run.y, data.normed, data.weight, data.bias, round_before=case.rounding, **options
        )
        bounds.check_backward(
            norm, NormGradients(run.dx, run.dweight, run.dbias), data.dy, data.normed, data.weight, **options,
            dresidual=data.dresidual,
        )  # fmt: skip
    kept = LayerNormResult(run.y, run.mean, run.rstd) if norm.centered else RMSNormResult(run.y, run.rstd)
    if case.values not in ("large", "tiny", "special"):
        bounds.check_statistics(norm, kept, data.normed, eps=norm.eps)
    if case.values.startswith("constant"):
        right = np.broadcast_to(data.bias.astype(np.float64), run.y.shape).astype(run.y.dtype)
        bounds.assert_same_bits(run.y, right, "a constant row gives exactly the bias")
    return worst.ratio


class _Worst:
    """Notes the largest error in units of its bound, wherever tests/bounds.py looks at one."""

    def __enter__(self):
        self.ratio, self.plain = 0.0, bounds.assert_within
        bounds.assert_within = self._look
        return self

    def _look(self, actual, exact, bound, name, what):
        self.plain(actual, exact, bound, name, what)
        ratio = np.abs(actual - exact) / np.where(bound > 0, bound, np.inf)
        ratio = ratio[np.isfinite(ratio)]
        self.ratio = max(self.ratio, float(ratio.max(initial=0.0)))

    def __exit__(self, *_):
        bounds.assert_within = self.plain
