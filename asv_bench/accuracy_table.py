"""Write docs/_generated/accuracy.md: the error of a norm's output, in units of machine epsilon.

Run from the repository: ``python asv_bench/accuracy_table.py``. It draws docs/images/accuracy.svg, too. The
answers to compare with are computed in extended precision (`numpy.longdouble`), independently of
`npnorm.reference`.
"""

import warnings
from functools import partial

import figures
import numpy as np
import tables
from benchmarks import peers

import npnorm

ROWS, COLS = 256, 768
EPSILON = np.finfo(np.float32).eps


def error(kind, y, x, weight, bias):
    """The smallest c with |y - exact| <= c u (|x̂ w| + |b|) + the contract's second-order term."""
    x, weight, bias = (array.astype(np.longdouble) for array in (x, weight, bias))
    mean = x.mean(axis=-1, keepdims=True) if kind == "LN" else np.longdouble(0)
    variance = np.square(x - mean).mean(axis=-1, keepdims=True)
    rstd = 1 / np.sqrt(variance + peers.EPS[kind])
    scaled = (x - mean) * rstd * weight
    second_order = EPSILON**2 * np.abs(mean * rstd * weight)
    over = np.maximum(np.abs(y - (scaled + bias)) - second_order, 0)
    return float((over / (EPSILON * (np.abs(scaled) + np.abs(bias)))).max())


def forward(library, kind, x, weight, bias):
    """The norm of x as one library computes it."""
    arguments = (x, weight, bias) if kind == "LN" else (x, weight)
    if library == "npnorm":
        norm = npnorm.layer_norm if kind == "LN" else npnorm.rms_norm
        return norm(*arguments, eps=peers.EPS[kind])
    return peers.as_numpy(peers.FORWARD[library](kind, *arguments)[peers.NAMES[library]]())


def number(value):
    """A figure as a reader wants it: 1.4, 512, 8e5, NaN."""
    if np.isnan(value):
        return "NaN"
    if np.isinf(value):
        return "inf"
    if value < 100:
        return f"{value:.1f}"
    return f"{value:.0f}" if value < 1e4 else f"{value:.0e}".replace("e+0", "e").replace("e+", "e")


def by_hand(x, weight, bias):
    """LayerNorm as it is mostly written in NumPy, in the dtype of x."""
    centred = x - x.mean(axis=-1, keepdims=True)
    return centred / np.sqrt(np.square(centred).mean(axis=-1, keepdims=True) + x.dtype.type(1e-5)) * weight + bias


def plot(normal, weight, bias, libraries, path):
    """LayerNorm's errors on the same rows at growing distances from zero."""
    offsets = 10.0 ** np.arange(-1, 7.5, 0.5)
    rows = [(normal + offset).astype(np.float32) for offset in offsets]
    norms = {peers.NAMES.get(name, name): partial(forward, name, "LN") for name in libraries}
    norms["NumPy, by hand"] = by_hand
    with figures.panel(path, "LayerNorm, float32: error") as axes:
        for name, norm in norms.items():
            errors = [error("LN", norm(x, weight, bias), x, weight, bias) for x in rows]
            axes.loglog(offsets, errors, "o-", markersize=3, color=figures.colour(name), label=name)
        axes.set(xlabel="offset of the rows, in deviations", ylabel="largest error, u")
        axes.axhline(1 / EPSILON, color=figures.INK, linewidth=0.8, linestyle=":")
        axes.text(offsets[0], 1.4 / EPSILON, "no digit is right", fontsize=9)


def arrays():
    """Rows to move and scale, weight and bias."""
    random = np.random.default_rng(20250101)
    normal = random.standard_normal((ROWS, COLS))
    return normal, *random.standard_normal((2, COLS)).astype(np.float32)


def main():
    normal, weight, bias = arrays()
    inputs = {
        "`randn`": normal,
        "`randn + 10`": normal + 10,
        "`randn + 1e3`": normal + 1e3,
        "`randn + 1e6`": normal + 1e6,
        "`randn * 1e19`": normal * 1e19,
        "`randn * 1e30`": normal * 1e30,
    }
    libraries = ["npnorm", *peers.installed("torch", "onnxruntime")]
    names = [peers.NAMES.get(library, library) for library in libraries]
    sections = []
    for kind, title in (("LN", "LayerNorm"), ("RMS", "RMSNorm")):
        shift = bias if kind == "LN" else np.zeros_like(bias)
        lines = []
        for name, values in inputs.items():
            x = values.astype(np.float32)
            results = (forward(library, kind, x, weight, shift) for library in libraries)
            lines.append([name, *(number(error(kind, y, x, weight, shift)) for y in results)])
        sections.append(tables.markdown([f"{title}, {ROWS} x {COLS}", *names], lines))
    plot(normal, weight, bias, libraries, tables.ROOT / "docs" / "images" / "accuracy.svg")
    text = "\n\n".join([*sections, tables.footer()])
    tables.write(tables.GENERATED / "accuracy.md", text)
    tables.put_in_readme("accuracy", text)
    print(text)


if __name__ == "__main__":
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        main()
