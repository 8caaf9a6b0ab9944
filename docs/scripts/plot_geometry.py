"""Draw docs/images/geometry-*.svg: what LayerNorm and RMSNorm do to vectors of three numbers.

Run from the repository: ``python docs/scripts/plot_geometry.py`` (needs Matplotlib).
"""

import sys
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "asv_bench"))

import figures  # noqa: E402
from figures import INK, PAPER  # noqa: E402
from mpl_toolkits.mplot3d.art3d import Poly3DCollection  # noqa: E402

plt = figures.pyplot()
RADIUS = np.sqrt(3)
BEFORE, AFTER, PLANE = "#8a8f98", "#d0533a", "#4a78b5"


def panel(title):
    """A 3-d axes without its box, seen so that the diagonal (1, 1, 1) points up and away."""
    figure = plt.figure(figsize=(3.4, 3.2))
    axes = figure.add_axes((0, 0, 1, 0.9), projection="3d")
    axes.set_proj_type("ortho")
    axes.view_init(elev=14, azim=12)
    axes.set(xlim=(-2, 2), ylim=(-2, 2), zlim=(-2, 2))
    axes.set_box_aspect((1, 1, 1), zoom=1.25)
    axes.set_axis_off()
    axes.set_title(title, y=1.02)
    return axes


def draw_plane(axes):
    """The plane of vectors whose mean is 0, and the direction (1, 1, 1) that it is square to."""
    across = np.array([1, -1, 0]) / np.sqrt(2)
    along = np.array([1, 1, -2]) / np.sqrt(6)
    corners = [2.15 * (a * across + b * along) for a, b in ((-1, -1), (-1, 1), (1, 1), (1, -1))]
    axes.add_collection3d(Poly3DCollection([corners], facecolor=PLANE, alpha=0.16))
    axes.quiver(0, 0, 0, 1.5, 1.5, 1.5, color=INK, arrow_length_ratio=0.08, linewidth=1)
    axes.text(1.6, 1.6, 1.62, "(1, 1, 1)", color=INK)
    return across, along


def draw_moves(axes, start, end):
    """A thin line for the way of each vector, an open dot where it was, a full one where it is."""
    for a, b in zip(start, end, strict=True):
        axes.plot(*np.array([a, b]).T, color=BEFORE, linewidth=0.8)
    axes.scatter(*start.T, facecolor=PAPER, edgecolor=BEFORE, s=22, depthshade=False)
    axes.scatter(*end.T, color=AFTER, s=22, depthshade=False)


def save(axes, name):
    figures.save(axes.figure, ROOT / "docs" / "images" / f"geometry-{name}.svg")


def main():
    random = np.random.default_rng(7)
    x = random.standard_normal((14, 3)) * 0.9 + 0.35
    centred = x - x.mean(axis=1, keepdims=True)
    layer_normed = RADIUS * centred / np.linalg.norm(centred, axis=1, keepdims=True)
    rms_normed = RADIUS * x / np.linalg.norm(x, axis=1, keepdims=True)

    axes = panel("LayerNorm, step 1: subtract the mean")
    draw_plane(axes)
    draw_moves(axes, x, centred)

    save(axes, "plane")

    axes = panel("LayerNorm, step 2: variance 1")
    across, along = draw_plane(axes)
    angle = np.linspace(0, 2 * np.pi, 200)
    circle = RADIUS * (np.outer(np.cos(angle), across) + np.outer(np.sin(angle), along))
    axes.plot(*circle.T, color=AFTER, linewidth=1.2)
    draw_moves(axes, centred, layer_normed)

    save(axes, "circle")

    axes = panel("RMSNorm: mean square 1")
    longitude, latitude = np.mgrid[0 : 2 * np.pi : 60j, 0 : np.pi : 30j]
    sphere = RADIUS * np.array(
        [
            np.cos(longitude) * np.sin(latitude),
            np.sin(longitude) * np.sin(latitude),
            np.cos(latitude),
        ]
    )
    axes.plot_wireframe(*sphere, color=PLANE, alpha=0.25, linewidth=0.5, rstride=5, cstride=3)
    draw_moves(axes, x, rms_normed)

    save(axes, "sphere")


if __name__ == "__main__":
    main()
