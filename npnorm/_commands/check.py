"""``npnorm check``: errors in units of what npnorm promises, and times beside a copy."""

import argparse
import json
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

import npnorm

from .. import _bounds as bounds
from .._results import Array
from .operations import all_dtypes, is_centered, with_progress

SHAPES = ((1, 768), (512, 768), (4096, 768))
EPS = 1e-5
LARGE = {"float16": 1e3, "bfloat16": 1e36, "float32": 1e36, "float64": 1e300}
"""Scales at which the rows are extreme: not in float16, which has no such numbers."""


def run(options: argparse.Namespace) -> int:
    cells = [
        (f"{operation} {dtype}", (operation, dtype))
        for operation in options.operations
        for dtype in options.dtypes or all_dtypes()
    ]
    results = [check(operation, dtype) for operation, dtype in with_progress(cells)]
    passed = all(result["within"] is not False for result in results)
    if options.json:
        print(json.dumps({"passed": passed, "threads": npnorm.get_num_threads(), "results": results}, indent=2))
    else:
        print("\n".join(table(results)))
        print("every error is within its bound" if passed else "FAILED: an error is larger than npnorm promises")
    return 0 if passed else 1


def check(operation: str, dtype: np.dtype) -> dict[str, Any]:
    """The largest error of an operation and its times, as JSON has them."""
    # Where long doubles are doubles, there is nothing to hold float64 against.
    judged = bounds.HAS_LONGDOUBLE or dtype != np.float64
    error = largest_error(operation, dtype) if judged else None
    return {
        "operation": operation,
        "dtype": dtype.name,
        "error": error,
        "within": None if error is None else error <= 1,
        "times": [times(operation, dtype, shape) for shape in SHAPES],
    }


# Accuracy
def largest_error(operation: str, dtype: np.dtype) -> float:
    """The largest error in units of its bound, over rows that are ordinary, far from zero, and large."""
    x, other, weight, bias = arguments((48, 768), dtype)
    x[16:32] += dtype.type(1000)
    x[32:] *= dtype.type(LARGE[dtype.name])
    with np.errstate(all="ignore"):
        return max(errors(operation, x, other, weight, bias))


def errors(operation: str, x: Array, other: Array, weight: Array, bias: Array) -> Iterator[float]:
    """The errors of each result; `other` is the residual, or dy."""
    run, name, centered = getattr(npnorm, operation), x.dtype.name, is_centered(operation)
    scale = long(weight)
    if operation.endswith("backward"):
        dx, dweight, dbias = run(other, x, weight, eps=EPS)
        exact, dy = bounds.normalize(long(x), centered, EPS), long(other)
        yield in_bounds(dx, *bounds.dx_and_bound(name, centered, dy * scale, exact))
        for gradient, terms, bound_of in (
            (dweight, dy * exact.normalized, bounds.dweight_bound(dy, exact)),
            (dbias, dy, bounds.dbias_bound(dy)),
        ):
            subnormal = bounds.LONG(bounds.SMALLEST[name])
            yield in_bounds(gradient, terms.sum(axis=0), bound_of(name).sum(axis=0) + subnormal)
        return
    if operation.startswith("add"):
        right = getattr(npnorm.reference, operation)(x, other).residual_out
        y, x = run(x, other, weight, bias, eps=EPS)
        yield 0.0 if np.array_equal(x, right) else np.inf  # a sum that is rounded once has no error
    else:
        y = run(x, weight, bias, eps=EPS)
    exact = bounds.normalize(long(x), centered, EPS)
    product = exact.normalized * scale
    bound = bounds.forward_bound(name, exact, product, scale, long(bias))
    yield in_bounds(y, product + long(bias), bound)


def in_bounds(actual: Array, exact: Array, bound: Array) -> float:
    """The largest error in units of its bound; infinite where a result is not a number."""
    ratio = np.abs(long(actual) - exact) / bound
    return float(np.where(np.isnan(ratio), np.inf, ratio).max())


def long(array: Array) -> Array:
    """The same numbers as long doubles; bfloat16 knows the way only through float64."""
    return array.astype(np.float64).astype(bounds.LONG)


# Speed
def times(operation: str, dtype: np.dtype, shape: tuple[int, int]) -> dict[str, Any]:
    """Seconds of a call into given outputs, and of a copy that moves as many bytes."""
    x, other, weight, bias = arguments(shape, dtype)
    run, out = getattr(npnorm, operation), np.empty_like(x)
    if operation.endswith("backward"):
        outputs = (out, np.empty_like(weight), np.empty_like(bias))
        call, moved = partial(run, other, x, weight, eps=EPS, out=outputs), 3
    elif operation.startswith("add"):
        call = partial(run, x, other, weight, bias, eps=EPS, out=out, residual_out=np.empty_like(x))
        moved = 4
    else:
        call, moved = partial(run, x, weight, bias, eps=EPS, out=out), 2
    source = np.zeros(moved * x.nbytes // 2, np.uint8)
    copy = partial(np.copyto, np.empty_like(source), source)
    seconds, copy_seconds = shortest(call, copy)
    return {
        "shape": shape,
        "seconds": seconds,
        "copy_seconds": copy_seconds,
        "ratio": seconds / copy_seconds,
    }


def shortest(*calls: Callable[[], object], samples: int = 15) -> list[float]:
    """The shortest time of each call. They take turns, since noise comes and goes, and only adds time."""
    counts = []
    for call in calls:
        sample(call, 1)  # compiles, and touches every page
        counts.append(max(1, int(5e-4 / sample(call, 1))))
    best = [float("inf")] * len(calls)
    for _ in range(samples):
        for i, (call, count) in enumerate(zip(calls, counts, strict=True)):
            best[i] = min(best[i], sample(call, count))
    return best


def sample(call: Callable[[], object], count: int) -> float:
    start = time.perf_counter()
    for _ in range(count):
        call()
    return (time.perf_counter() - start) / count


# Both
def arguments(shape: tuple[int, int], dtype: np.dtype) -> list[Array]:
    """x, a residual or dy, weight and bias: normal random numbers."""
    random = np.random.default_rng(0)
    shapes = (shape, shape, shape[1:], shape[1:])
    return [random.standard_normal(s).astype(dtype) for s in shapes]


def table(results: list[dict[str, Any]]) -> Iterator[str]:
    yield "Error: in units of the bound. Times: microseconds, and in parentheses as a multiple of a copy's."
    shapes = [f"{rows} x {cols}" for rows, cols in SHAPES]
    yield f"{'operation':<20}{'dtype':<10}{'error':>12}" + "".join(f"{shape:>18}" for shape in shapes)
    for result in results:
        error, within = result["error"], result["within"]
        verdict = "-" if within is None else f"{error:.2f} {'pass' if within else 'FAIL'}"
        line = f"{result['operation']:<20}{result['dtype']:<10}{verdict:>12}"
        for measured in result["times"]:
            line += f"{measured['seconds'] * 1e6:>10,.1f} ({measured['ratio']:4.1f})"
        yield line
