"""Write docs/_generated/speed.md: npnorm beside a copy, PyTorch and ONNX Runtime, on one thread.

Run from the repository, on a quiet machine: ``python docs/scripts/speed_table.py``. The candidates
take turns, so that a slow moment of the machine meets them all; the shortest time of each counts.
"""

import time

import numpy as np
import peers
import tables

import npnorm

SECONDS_PER_CASE = 3.0
SECONDS_PER_TURN = 0.01
SHAPES = [
    (1, 768, np.float32),
    (64, 768, np.float32),
    (512, 768, np.float32),
    (4096, 768, np.float32),
    (4096, 4096, np.float32),
    (512, 4096, np.float16),
]
README_SHAPES = SHAPES[2:4]
TITLES = {"LN": "LayerNorm", "RMS": "RMSNorm"}


def forward_candidates(kind, x, weight, bias):
    """One call to time for each column of a forward table."""
    out = np.empty_like(x)
    if kind == "LN":
        calls = {
            "npnorm, `out=`": lambda: npnorm.layer_norm(x, weight, bias, out=out),
            "npnorm": lambda: npnorm.layer_norm(x, weight, bias),
        }
    else:
        calls = {
            "npnorm, `out=`": lambda: npnorm.rms_norm(x, weight, out=out),
            "npnorm": lambda: npnorm.rms_norm(x, weight),
        }
    if peers.installed("torch"):
        calls["PyTorch"] = peers.torch_forward(kind, x, weight, bias)
    if peers.installed("onnxruntime"):
        half = x.dtype != np.float32  # the one-node model is float32 only
        calls["ONNX Runtime"] = None if half else peers.onnxruntime_forward(kind, x, weight, bias)
    target = np.empty_like(x)
    return {"`np.copyto`": lambda: np.copyto(target, x), **calls}


def backward_candidates(kind, x, weight, bias):
    """One call to time for each column of a backward table: dx, dweight and LayerNorm's dbias."""
    dy = np.random.default_rng(1).standard_normal(x.shape).astype(x.dtype)
    out = (np.empty_like(x), np.empty_like(weight), np.empty_like(bias))
    if kind == "LN":
        _, mean, rstd = npnorm.layer_norm(x, weight, bias, return_stats=True)
        saved = {"mean": mean, "rstd": rstd}
        backward = npnorm.layer_norm_backward
    else:
        _, rstd = npnorm.rms_norm(x, weight, return_stats=True)
        saved = {"rstd": rstd, "output_mask": (True, True, False)}
        backward = npnorm.rms_norm_backward
        out = (*out[:2], None)
    calls = {
        "npnorm, `out=`": lambda: backward(dy, x, weight, **saved, out=out),
        "npnorm": lambda: backward(dy, x, weight, **saved),
    }
    if peers.installed("torch"):
        calls["PyTorch"] = peers.torch_backward(kind, dy, x, weight, bias)
    target = np.empty_like(x)
    return {"`np.copyto`": lambda: np.copyto(target, x), **calls}


def shortest_times(calls):
    """The shortest time of each call in microseconds, or None for a call that is absent."""
    calls = {name: call for name, call in calls.items() if call}
    best = dict.fromkeys(calls, np.inf)
    for call in calls.values():  # compile, and touch every page
        call()
    stop = time.perf_counter() + SECONDS_PER_CASE
    while time.perf_counter() < stop:
        for name, call in calls.items():
            call()  # brings its code and data back into the caches
            turn = time.perf_counter() + SECONDS_PER_TURN
            start = 0.0
            while start < turn:
                start = time.perf_counter()
                call()
                best[name] = min(best[name], time.perf_counter() - start)
    return {name: seconds * 1e6 for name, seconds in best.items()}


def table(kind, candidates, shapes):
    """The Markdown table of one norm in one direction."""
    lines = []
    for rows, cols, dtype in shapes:
        random = np.random.default_rng(0)
        x = random.standard_normal((rows, cols)).astype(dtype)
        weight, bias = random.standard_normal((2, cols)).astype(dtype)
        calls = candidates(kind, x, weight, bias)
        times = shortest_times(calls)
        label = size(rows, cols) + (f", {np.dtype(dtype)}" if dtype != np.float32 else "")
        lines.append([label, *(figure(times.get(name)) for name in calls)])
    return tables.markdown(["µs", *calls], lines)


def size(rows, cols):
    """A shape in words that no narrow table breaks in two."""
    return f"{rows}\u00a0×\u00a0{cols}"


def figure(microseconds):
    """Two or more digits, or a dash for what was not measured."""
    if microseconds is None:
        return "–"
    return f"{microseconds:.1f}" if microseconds < 10 else f"{microseconds:,.0f}"


def main():
    npnorm.set_num_threads(1)
    sections = {}
    for direction, candidates in (
        ("forward", forward_candidates),
        ("backward", backward_candidates),
    ):
        for kind in ("LN", "RMS"):
            sections[f"{TITLES[kind]} {direction}"] = table(kind, candidates, SHAPES)
    footer = tables.provenance("python docs/scripts/speed_table.py")
    whole = [f"**{title}**\n\n{text}" for title, text in sections.items()]
    chosen = {size(rows, cols) + " " for rows, cols, _ in README_SHAPES}
    short = []
    for title, text in sections.items():
        lines = text.splitlines()
        kept = lines[:2] + [line for line in lines if any(name in line for name in chosen)]
        short.append(f"**{title}**\n\n" + "\n".join(kept))
    tables.publish("speed", "\n\n".join([*whole, footer]), "\n\n".join([*short, footer]))


if __name__ == "__main__":
    main()
