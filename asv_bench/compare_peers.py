"""npnorm beside a copy and every peer that is installed: speed and, beside it, accuracy.

Run on a quiet machine, from the repository, with the extra `peers`: ``python asv_bench/compare_peers.py``.
With ``--targets`` it measures instead what npnorm has to reach, and says whether it does.

The candidates take turns in one process, so that a slow moment of the machine meets them all; the
shortest time of each counts.
"""

import argparse
import json
import sys
from pathlib import Path

import figures
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


def table(records, figure, corner="µs"):
    """The Markdown table of one norm in one direction; `figure` makes a cell of a record."""
    names = list(dict.fromkeys(record["candidate"] for record in records))
    lines = {}
    for record in records:
        lines.setdefault(label(record), {})[record["candidate"]] = figure(record)
    rows = [[where, *(cells.get(name, "–") for name in names)] for where, cells in lines.items()]
    return tables.markdown([corner, *map(heading, names)], rows)


def heading(name):
    return name.replace(COPY, f"`{COPY}`").replace("out=", "`out=`")


def label(record):
    """A shape in words that no narrow table breaks in two."""
    size = record["shape"].replace("x", "\u00a0×\u00a0")
    return size if record["dtype"] == "float32" else f"{size}, {record['dtype']}"


def speed(record):
    microseconds = record["seconds"] * 1e6
    return f"{microseconds:.1f}" if microseconds < 10 else f"{microseconds:,.0f}"


def errors(record):
    """Its errors on each kind of rows; of a backward pass those of dx and of dweight."""
    return "; ".join("/".join(map(number, np.atleast_1d(error))) for error in record["errors"].values())


def number(value):
    """A figure as a reader wants it: 1.4, 512, 8e5, NaN."""
    if not np.isfinite(value):
        return "NaN" if np.isnan(value) else "inf"
    if value < 100:
        return f"{value:.1f}"
    return f"{value:.0f}" if value < 1e4 else f"{value:.0e}".replace("e+0", "e").replace("e+", "e")


def each_norm(records):
    """Those of every norm and direction that was measured, with a title."""
    records = list(records)
    for direction in "forward", "backward":
        for kind, title in TITLES.items():
            chosen = [r for r in records if (r["direction"], r["norm"]) == (direction, kind)]
            if chosen:
                yield f"{title} {direction}", chosen


def short_sections(records):
    """Every table of speeds under its title."""
    return [f"**{title}**\n\n{table(chosen, speed)}" for title, chosen in each_norm(records)]


def sections(records):
    """Every table of speeds under its title, and that of errors below it."""
    for title, chosen in each_norm(records):
        libraries = [r for r in chosen if r["candidate"] in ("npnorm", *peers.NAMES.values())]
        yield f"**{title}**\n\n{table(chosen, speed)}\n\n{table(libraries, errors, 'error, u')}"


def plot(records, path):
    """Times over a copy's, a panel for each norm and direction, and one that sums up; the paths of the former."""
    outline(records, path)
    paths = []
    for title, chosen in each_norm(records):
        paths.append(figures.beside(path, title.lower().replace(" ", "-")))
        with figures.panel(paths[-1], title, height=4.4) as axes:
            places = list(dict.fromkeys(map(label, chosen)))
            for name, times in over_copy(chosen).items():
                line = "-" if name in figures.COLOURS else "--"
                axes.plot(
                    times.keys(), times.values(), line + "o", color=figures.colour(name), label=name, markersize=4
                )
            finish(axes)
            axes.set_xticks(range(len(places)), places, rotation=45, ha="right", rotation_mode="anchor")
    return paths


def outline(records, path):
    """Every norm and direction at one shape, in bars that begin at the time of a copy."""
    bars = {}
    shape = [r["shape"] for r in records if r["shape"] in README_SHAPES][-1]
    for title, chosen in each_norm(r for r in records if (r["dtype"], r["shape"]) == ("float32", shape)):
        for name, times in over_copy(chosen).items():
            if name in (OUT, *figures.COLOURS):
                bars.setdefault(name, {})[title.replace(" ", "\n")] = next(iter(times.values()))
    groups = list(bars["npnorm"])
    width = 0.85 / len(bars)
    with figures.panel(path, f"Time, {label({'shape': shape, 'dtype': 'float32'})} float32") as axes:
        for index, (name, times) in enumerate(bars.items()):
            where = [groups.index(group) + (index - (len(bars) - 1) / 2) * width for group in times]
            style = {"color": figures.colour(name), "alpha": 0.6 if name == OUT else 1.0}
            drawn = axes.bar(where, times.values(), 0.9 * width, label=name, **style)
            axes.bar_label(drawn, fmt="{:.1f}", fontsize=7.5, padding=1)
        axes.set_xticks(range(len(groups)), groups)
        finish(axes)
        axes.set_ylim(bottom=1)


def over_copy(records):
    """By candidate and shape, the time over a copy's."""
    copies = {label(r): r["seconds"] for r in records if r["candidate"] == COPY}
    times = {}
    for record in records:
        if record["candidate"] != COPY:
            where = label(record)
            times.setdefault(record["candidate"], {})[where] = record["seconds"] / copies[where]
    return times


def finish(axes):
    """What panels of times have in common."""
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.axhline(1, color=figures.INK, linewidth=0.8)
    axes.set_ylabel("times a copy of the array")


CAPTION = (
    "Speeds in microseconds. Below them the largest errors in u, on `randn` rows; on `randn + 1e3` rows "
    "(of a backward pass dx/dweight).\n{threads} thread{s}. {missing}"
)


def measured(arguments):
    """Every figure, as --json writes it."""
    records = []
    for direction in "forward", "backward":
        for kind in TITLES:
            for dtype, shapes in (QUICK if arguments.quick else SHAPES).items():
                for shape in shapes:
                    print(f"{direction} {kind} {dtype} {shape}", file=sys.stderr)
                    seconds = 0.3 if arguments.quick else 3.0
                    records += compare(direction, kind, dtype, shape, seconds)
    absent = [name for library, name in peers.NAMES.items() if not peers.installed(library)]
    return {**tables.provenance(), "threads": arguments.threads, "missing": absent, "results": records}


def report(arguments):
    """Measure all, or read what was measured; print the tables and write what was asked for."""
    made = json.loads(Path(arguments.from_json).read_text()) if arguments.from_json else measured(arguments)
    records, threads = made["results"], made["threads"]
    missing = f"Not installed, so not measured: {', '.join(made['missing'])}." if made["missing"] else ""
    caption = CAPTION.format(threads=threads, s="" if threads == 1 else "s", missing=missing).strip()
    text = "\n\n".join([*sections(records), caption, tables.footer(made)])
    print(text)
    paths = plot(records, arguments.plot) if arguments.plot else []
    if arguments.markdown:
        words = [f"{title}: time over that of a copy" for title, _ in each_norm(records)]
        shown = figures.panels(paths, words, arguments.markdown) if paths else ""
        tables.write(arguments.markdown, shown + text)
    if arguments.json:
        tables.write(arguments.json, json.dumps(made, indent=1))
    if arguments.readme:
        short = [r for r in records if r["shape"] in README_SHAPES and r["dtype"] == "float32"]
        tables.put_in_readme("speed", "\n\n".join([*short_sections(short), tables.footer(made)]))


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
    if arguments.targets and (arguments.plot or arguments.readme or arguments.from_json or arguments.threads != 1):
        parser.error("--targets takes no --plot, --readme, --from-json or --threads")
    npnorm.set_num_threads(arguments.threads)
    peers.set_threads(arguments.threads)
    (targets if arguments.targets else report)(arguments)


if __name__ == "__main__":
    main()
