"""npnorm beside a copy and every peer that is installed: speed and, beside it, accuracy.

Run on a quiet machine, from the repository, with the extra `peers`: ``python asv_bench/compare_peers.py``.
With ``--targets`` it measures instead what npnorm has to reach, and says whether it does.

The candidates take turns in one process, so that a slow moment of the machine meets them all; the
shortest time of each counts.
"""

import argparse
import json
import sys

import numpy as np
import tables
from benchmarks import peers
from benchmarks.common import Data, cell
from benchmarks.targets import KINDS, TARGETS
from benchmarks.timing import shortest_times
from errors import backward_error, forward_error

import npnorm

SHAPES = {
    "float32": ["1x768", "64x768", "512x768", "4096x768", "4096x4096", "65536x64"],
    "float16": ["16x4096", "512x4096"],
    "bfloat16": ["16x4096", "512x4096"],
}
QUICK = {"float32": ["64x768", "512x768"], "float16": ["16x4096"], "bfloat16": []}
README_SHAPES = ["512x768", "4096x768"]
TITLES = {"LN": "LayerNorm", "RMS": "RMSNorm"}
COPY, OUT = "np.copyto", "npnorm, out="
ACCURACY_ROWS = 256
OFFSETS = {"randn": 0, "randn + 1e3": 1e3}


def compare(direction, kind, dtype, shape, seconds):
    """A record for each candidate: its name, seconds and errors."""
    operation = KINDS[kind] + ("_backward" if direction == "backward" else "")
    this = cell(operation, dtype, shape)
    peer_calls = getattr(peers, direction)(kind, *this.arguments)
    x = this.arguments[0]
    target = np.empty_like(x)
    calls = {COPY: lambda: np.copyto(target, x), OUT: this.into, "npnorm": this.fresh, **peer_calls}
    times = shortest_times(calls, seconds)
    errors = accuracy(direction, kind, dtype, shape)
    where = {"direction": direction, "norm": kind, "dtype": dtype, "shape": shape}
    return [
        {**where, "candidate": name, "seconds": time, "errors": errors.get(name, {})} for name, time in times.items()
    ]


def accuracy(direction, kind, dtype, shape):
    """Errors in u by candidate and kind of rows, from at most ACCURACY_ROWS rows."""
    rows, cols = map(int, shape.split("x"))
    own = getattr(npnorm, KINDS[kind] + ("_backward" if direction == "backward" else ""))
    measure = forward_error if direction == "forward" else backward_error
    found = {}
    for rows_are, offset in OFFSETS.items():
        data = Data(dtype, f"{min(rows, ACCURACY_ROWS)}x{cols}")
        x = (data.random.standard_normal(data.shape) + offset).astype(data.dtype)
        arguments = (x, data.vector(), data.vector())[: 3 if kind == "LN" else 2]
        if direction == "backward":
            arguments = (data.matrix(), x, data.vector())
        calls = {"npnorm": lambda a=arguments: own(*a), **getattr(peers, direction)(kind, *arguments)}
        for name, call in calls.items():
            result = peers.as_numpy(call())
            found.setdefault(name, {})[rows_are] = measure(kind, peers.EPS[kind], result, *arguments)
    return {**found, OUT: found["npnorm"]}


def table(records, figure):
    """The Markdown table of one norm in one direction; `figure` makes a cell of a record."""
    names = list(dict.fromkeys(record["candidate"] for record in records))
    lines = {}
    for record in records:
        lines.setdefault(label(record), {})[record["candidate"]] = figure(record)
    rows = [[where, *(cells.get(name, "–") for name in names)] for where, cells in lines.items()]
    return tables.markdown(["µs", *map(heading, names)], rows)


def heading(name):
    return name.replace(COPY, f"`{COPY}`").replace("out=", "`out=`")


def label(record):
    """A shape in words that no narrow table breaks in two."""
    size = record["shape"].replace("x", "\u00a0×\u00a0")
    return size if record["dtype"] == "float32" else f"{size}, {record['dtype']}"


def speed(record):
    microseconds = record["seconds"] * 1e6
    return f"{microseconds:.1f}" if microseconds < 10 else f"{microseconds:,.0f}"


def speed_and_errors(record):
    errors = [np.atleast_1d(error) for error in record["errors"].values()]
    figures = "; ".join("/".join(number(error) for error in each) for each in errors)
    return speed(record) + (f" ({figures})" if figures else "")


def number(value):
    """A figure as a reader wants it: 1.4, 512, 8e5, NaN."""
    if not np.isfinite(value):
        return "NaN" if np.isnan(value) else "inf"
    if value < 100:
        return f"{value:.1f}"
    return f"{value:.0f}" if value < 1e4 else f"{value:.0e}".replace("e+0", "e").replace("e+", "e")


def sections(records, figure):
    """Every table under its title."""
    texts = []
    for direction in "forward", "backward":
        for kind, title in TITLES.items():
            chosen = [r for r in records if (r["direction"], r["norm"]) == (direction, kind)]
            if chosen:
                texts.append(f"**{title} {direction}**\n\n{table(chosen, figure)}")
    return texts


def plot(records, path):
    """Times over a copy's, a panel for each norm and direction."""
    plt = tables.pyplot()
    figure, panels = plt.subplots(2, 2, figsize=(12, 9), sharey=True, layout="constrained")
    for axes, (direction, kind) in zip(
        panels.flat, [(d, k) for d in ("forward", "backward") for k in TITLES], strict=True
    ):
        chosen = [r for r in records if (r["direction"], r["norm"]) == (direction, kind)]
        places = list(dict.fromkeys(map(label, chosen)))
        copies = {label(r): r["seconds"] for r in chosen if r["candidate"] == COPY}
        for name in dict.fromkeys(r["candidate"] for r in chosen if r["candidate"] != COPY):
            points = [r for r in chosen if r["candidate"] == name]
            ratios = [r["seconds"] / copies[label(r)] for r in points]
            where = [places.index(label(r)) for r in points]
            axes.plot(where, ratios, "o-" if "npnorm" in name else "s--", label=name)
        axes.set_title(f"{TITLES[kind]} {direction}")
        axes.set_yscale("log")
        axes.set_xticks(range(len(places)), places, rotation=30, ha="right")
        axes.axhline(1, color="black", linewidth=0.8)
        axes.grid(axis="y", alpha=0.3)
        axes.legend(fontsize=8)
    for axes in panels[:, 0]:
        axes.set_ylabel("time / time of np.copyto")
    tables.save_figure(figure, path)


CAPTION = (
    "Microseconds (largest error in u, on `randn` rows; on `randn + 1e3` rows; of a backward pass dx/dweight).\n"
    "{threads} thread{s}. {missing}"
)


def report(arguments):
    """Measure all, print the tables and write what was asked for."""
    records = []
    for direction in "forward", "backward":
        for kind in TITLES:
            for dtype, shapes in (QUICK if arguments.quick else SHAPES).items():
                for shape in shapes:
                    print(f"{direction} {kind} {dtype} {shape}", file=sys.stderr)
                    seconds = 0.3 if arguments.quick else 3.0
                    records += compare(direction, kind, dtype, shape, seconds)
    absent = [name for library, name in peers.NAMES.items() if not peers.installed(library)]
    missing = f"Not installed, so not measured: {', '.join(absent)}." if absent else ""
    threads = arguments.threads
    caption = CAPTION.format(threads=threads, s="" if threads == 1 else "s", missing=missing).strip()
    text = "\n\n".join([*sections(records, speed_and_errors), caption, tables.footer()])
    print(text)
    if arguments.plot:
        plot(records, arguments.plot)
    if arguments.markdown:
        tables.write(arguments.markdown, tables.figure_link(arguments, "Times over a copy's") + text)
    if arguments.json:
        made = {**tables.provenance(), "threads": threads, "missing": absent}
        tables.write(arguments.json, json.dumps({**made, "results": records}, indent=1))
    if arguments.readme:
        short = [r for r in records if r["shape"] in README_SHAPES and r["dtype"] == "float32"]
        tables.put_in_readme("speed", "\n\n".join([*sections(short, speed), tables.footer()]))


def targets(arguments):
    """Measure every target, in passes: a slow minute of the machine then spoils none of them."""
    best = {}
    skipped = {}
    for _ in range(1 if arguments.quick else 2):
        for name, target in TARGETS.items():
            print(name, file=sys.stderr)
            try:
                times = target.measure()
            except NotImplementedError as error:
                skipped[name] = str(error)
                continue
            best[name] = tuple(map(min, times, best.get(name, times)))
    rows, records = [], []
    for name, target in TARGETS.items():
        if name in skipped:
            rows.append([name, f"{target.limit:g}", "–", skipped[name]])
            continue
        got = best[name][0] / best[name][1]
        met = got <= target.limit
        rows.append([name, f"{target.limit:g}", f"{got:.2f}", "met" if met else "**not met**"])
        records.append({"target": name, "limit": target.limit, "got": got, "met": met, "seconds": best[name]})
    table = tables.markdown(["target", "at most", "got", ""], rows)
    met = sum(record["met"] for record in records)
    text = f"{table}\n\n{met} of {len(records)} met. {tables.footer()}"
    print(text)
    if arguments.markdown:
        tables.write(arguments.markdown, text)
    if arguments.json:
        tables.write(arguments.json, json.dumps({**tables.provenance(), "targets": records}, indent=1))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    tables.add_outputs(parser, "the tables", "the speeds", "few shapes, rough figures")
    parser.add_argument("--readme", action="store_true", help="put the short tables in README.md")
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="threads of every library")
    parser.add_argument("--targets", action="store_true", help="measure what npnorm has to reach")
    arguments = parser.parse_args()
    if arguments.targets and (arguments.plot or arguments.readme or arguments.threads != 1):
        parser.error("--targets takes no --plot, --readme or --threads")
    npnorm.set_num_threads(arguments.threads)
    peers.set_threads(arguments.threads)
    (targets if arguments.targets else report)(arguments)


if __name__ == "__main__":
    main()
