"""What the plots share: small panels that a phone can show, in colours for light and for dark pages."""

import contextlib
import os
import sys
from pathlib import Path

# Stand-ins for the colours of text and page, which the file takes from the reader's colour scheme.
INK, PAPER = "#30343b", "#fdfdfe"
SCHEME = (
    "<style>svg { --ink: #30343b; --paper: #ffffff }\n"
    "@media (prefers-color-scheme: dark) { svg { --ink: #ced2d9; --paper: #131416 } }</style>"
)

# By library; each is legible on white and on black.
COLOURS = {
    "npnorm": "#2f7fd6",
    "PyTorch": "#e0662f",
    "ONNX Runtime": "#2f9e63",
    "JAX": "#a06bd6",
    "NumPy": "#8a8f98",
}


def pyplot():
    """Matplotlib without a screen, which makes the same file from the same figures."""
    try:
        import matplotlib
    except ImportError:
        sys.exit("a plot needs Matplotlib")
    matplotlib.use("agg")
    ink = ["text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color", "grid.color"]
    matplotlib.rcParams |= dict.fromkeys(ink, INK) | {
        "svg.hashsalt": "npnorm",
        "font.size": 10,
        "axes.titlesize": 11,
        "legend.fontsize": 9,
        "legend.frameon": False,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.axisbelow": True,
        "grid.alpha": 0.25,
    }
    import matplotlib.pyplot as plt

    return plt


@contextlib.contextmanager
def panel(path, title, height=3.6):
    """Axes to draw in; afterwards the legend is put below them, and the drawing is saved."""
    figure, axes = pyplot().subplots(figsize=(4.6, height), layout="constrained")
    axes.set_title(title)
    axes.grid(axis="y")
    yield axes
    figure.legend(loc="outside lower center", ncols=2)
    save(figure, path)


def save(figure, path):
    """Write the drawing without a background; of an SVG, make ink and paper follow the reader's colour scheme."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    svg = path.suffix == ".svg"
    figure.savefig(path, transparent=True, metadata={"Date": None} if svg else None)
    if svg:
        text = path.read_text().replace(INK, f"var(--ink, {INK})").replace(PAPER, f"var(--paper, {PAPER})")
        path.write_text(text.replace(" <defs>", f" {SCHEME}\n <defs>", 1))


def colour(candidate):
    """The colour of the library that a candidate belongs to: ``PyTorch, inference mode`` is PyTorch."""
    return COLOURS[candidate.split(",")[0]]


def beside(path, name):
    """``speed-name.svg`` beside ``speed.svg``."""
    path = Path(path)
    return path.with_name(f"{path.stem}-{name}{path.suffix}")


def panels(paths, words, page):
    """Markdown that shows drawings side by side, or one below the other where a screen is narrow."""
    folder = Path(page).resolve().parent
    links = [
        f"![{text}]({Path(os.path.relpath(Path(path).resolve(), folder)).as_posix()})"
        for path, text in zip(paths, words, strict=True)
    ]
    return "\n\n".join(["```{container} panels", *links]) + "\n```\n\n"
