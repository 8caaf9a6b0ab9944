"""Time per element over widths and over numbers of rows, and every cliff in it.

Run on a quiet machine, from the repository: ``python asv_bench/sweep.py``. A cliff is a point above
1.5 times both of its neighbours, measured a second time and still there. One thread, outputs given.
"""

import argparse
import json
import re
import sys
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import figures
import numpy as np
import tables
from benchmarks.timing import shortest_times

import npnorm

CLIFF = 1.5
PASSES = 3  # a slow moment of the machine then spoils no stretch of a curve
SECONDS = 0.04  # of a pass at a point
SECONDS_AGAIN = 0.5
LARGE, SMALL = 2**20, 2**13  # elements, or the next full row, where it is the width that varies
MOST_COLS, MOST_ROWS = 20_000, 100_000
OPERATIONS = ["layer_norm", "rms_norm", "layer_norm_backward", "rms_norm_backward"]


def around_powers(most, others):
    """1 to `most`: powers of two and their neighbours, and some others."""
    powers = [2**k for k in range(most.bit_length())]
    values = {value + step for value in powers for step in (-1, 0, 1)} | set(others)
    return sorted(value for value in values if 1 <= value <= most)


COLS = around_powers(
    MOST_COLS,
    [10, 12, 24, 48, 50, 96, 100, 192, 300, 384, 500, 768, 769, 1000, 1536, 3000, 5120, 6144, 7001, 10_000]
    + [12_288, 14_001, 18_000, 20_000],
)
ROWS = around_powers(MOST_ROWS, [6, 10, 20, 24, 50, 100, 300, 1000, 3000, 10_000, 50_000, 100_000])


class Curve(NamedTuple):
    name: str
    variable: str
    shapes: list[tuple[int, int]]

    def at(self, index):
        """The value of what varies."""
        return self.shapes[index][self.variable == "columns"]


CURVES = [
    Curve(f"rows x columns = {LARGE:,}", "columns", [(-(-LARGE // d), d) for d in COLS]),
    Curve(f"rows x columns = {SMALL:,}", "columns", [(-(-SMALL // d), d) for d in COLS]),
    Curve("768 columns", "rows", [(n, 768) for n in ROWS]),
    Curve("64 columns", "rows", [(n, 64) for n in ROWS]),
]


class Buffers:
    """Memory that the arrays of every shape are views of: it is filled, and first touched, once."""

    def __init__(self, curves):
        size = max(rows * cols for curve in curves for rows, cols in curve.shapes)
        random = np.random.default_rng(0).standard_normal(2**20, dtype=np.float32)
        self.flat = {name: np.resize(random, size) for name in ("x", "dy", "out")}
        self.vectors = np.random.default_rng(1).standard_normal((4, MOST_COLS), dtype=np.float32)

    def call(self, operation, shape):
        """A call of the operation on arrays of this shape, outputs and statistics given."""
        rows, cols = shape
        x, dy, out = (flat[: rows * cols].reshape(shape) for flat in self.flat.values())
        weight, bias, dweight, dbias = self.vectors[:, :cols]
        centered = "layer" in operation
        function = getattr(npnorm, operation)
        if "backward" not in operation:
            parameters = (weight, bias) if centered else (weight,)
            return lambda: function(x, *parameters, out=out)
        norm = npnorm.layer_norm if centered else npnorm.rms_norm
        _, *statistics = norm(x, out=out, return_stats=True)
        options = dict(zip(("mean", "rstd")[-len(statistics) :], statistics, strict=True))
        options["output_mask"] = (True, True, centered)
        options["out"] = (out, dweight, dbias if centered else None)
        return lambda: function(dy, x, weight, **options)


def nanoseconds(buffers, operation, shape, seconds):
    """Per element."""
    best = shortest_times({"call": buffers.call(operation, shape)}, seconds)["call"]
    return best / (shape[0] * shape[1]) * 1e9


def measure(buffers, curve, passes):
    """Nanoseconds an element at every point of a curve, by operation."""
    best = {operation: [np.inf] * len(curve.shapes) for operation in OPERATIONS}
    for count in range(passes):
        print(f"{curve.name}, pass {count + 1}", file=sys.stderr)
        for operation, times in best.items():
            for index, shape in enumerate(curve.shapes):
                times[index] = min(times[index], nanoseconds(buffers, operation, shape, SECONDS))
    return best


def cliffs(times):
    """Where a point is far above both of its neighbours."""
    inner = range(1, len(times) - 1)
    return [i for i in inner if times[i] > CLIFF * max(times[i - 1], times[i + 1])]


def confirmed_cliffs(buffers, curve, best):
    """Sentences about the cliffs that a longer measurement, in turn with both neighbours, finds again."""
    found = []
    for operation, times in best.items():
        for middle in cliffs(times):
            indices = range(middle - 1, middle + 2)
            calls = {i: buffers.call(operation, curve.shapes[i]) for i in indices}
            for index, time in shortest_times(calls, SECONDS_AGAIN).items():
                rows, cols = curve.shapes[index]
                times[index] = min(times[index], time / (rows * cols) * 1e9)
            if middle in cliffs(times):
                before, here, after = (f"{times[i]:.3g}" for i in indices)
                found.append(
                    f"{operation}, {curve.name}: {here} ns an element at {curve.at(middle):,} {curve.variable}, "
                    f"{before} at {curve.at(middle - 1):,}, {after} at {curve.at(middle + 1):,}"
                )
    return found


def steps(curve, best):
    """Where a curve rises for good: the largest rise between neighbours, a sentence for each operation."""
    for operation, times in best.items():
        rise, index = max((after / before, i) for i, (before, after) in enumerate(pairwise(times)))
        yield (
            f"{operation}, {curve.name}: at most x {rise:.2f} between neighbours, from "
            f"{curve.at(index):,} to {curve.at(index + 1):,} {curve.variable}"
        )


def measured(quick):
    """Every curve, as --json writes it."""
    npnorm.set_num_threads(1)
    curves, passes = CURVES, PASSES
    if quick:
        curves, passes = [curve._replace(shapes=curve.shapes[::4]) for curve in CURVES], 1
    buffers = Buffers(curves)
    results = [(curve, measure(buffers, curve, passes)) for curve in curves]
    found = [cliff for curve, best in results for cliff in confirmed_cliffs(buffers, curve, best)]
    print("\n".join(rise for curve, best in results for rise in steps(curve, best)), file=sys.stderr)
    records = [{"name": curve.name, "shapes": curve.shapes, "nanoseconds": best} for curve, best in results]
    return {**tables.provenance(), "cliffs": found, "curves": records}


def plot(curves, path):
    """A panel for each curve, both axes logarithmic; the paths of the files."""
    paths = []
    for curve in curves:
        paths.append(figures.beside(path, re.sub(r"\W+", "-", curve["name"].replace(",", ""))))
        variable = next(each.variable for each in CURVES if each.name == curve["name"])
        where = [rows if variable == "rows" else cols for rows, cols in curve["shapes"]]
        with figures.panel(paths[-1], curve["name"]) as axes:
            for operation, times in curve["nanoseconds"].items():
                axes.loglog(where, times, ".-", linewidth=0.8, markersize=3, label=operation)
            axes.set(xlabel=variable, ylabel="ns / element")
    return paths


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    tables.add_outputs(parser, "the cliffs", "the curves", "every fourth point, once")
    arguments = parser.parse_args()
    made = json.loads(Path(arguments.from_json).read_text()) if arguments.from_json else measured(arguments.quick)
    curves = made["curves"]
    points = sum(len(curve["shapes"]) for curve in curves)
    found = made["cliffs"]
    summary = (
        f"{points} shapes, {len(OPERATIONS)} operations; points above {CLIFF} times both neighbours: {len(found)}."
    )
    listed = "\n".join(f"- {cliff}" for cliff in found)
    text = "\n\n".join(filter(None, [summary, listed, tables.footer(made)]))
    print(text)
    paths = plot(curves, arguments.plot) if arguments.plot else []
    if arguments.markdown:
        shown = figures.panels(paths, [f"Time per element, {curve['name']}" for curve in curves], arguments.markdown)
        tables.write(arguments.markdown, (shown if paths else "") + text)
    if arguments.json:
        tables.write(arguments.json, json.dumps(made, indent=1))


if __name__ == "__main__":
    main()
