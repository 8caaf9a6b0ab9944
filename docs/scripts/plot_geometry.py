"""Draw docs/images/geometry.svg: what LayerNorm and RMSNorm do to vectors of three numbers.

Run from the repository: ``python docs/scripts/plot_geometry.py`` (needs Matplotlib).
"""

from pathlib import Path

import matplotlib
import numpy as np

matplotlib.use("svg")
matplotlib.rcParams["svg.hashsalt"] = "npnorm"  # the same drawing gives the same file
matplotlib.rcParams["font.size"] = 12

import matplotlib.pyplot as plt  # noqa: E402
from mpl_toolkits.mplot3d.art3d import Poly3DCollection  # noqa: E402

RADIUS = np.sqrt(3)
INK, BEFORE, AFTER, PLANE = "#30343b", "#8a8f98", "#c4462d", "#4a78b5"


def panel(figure, position, title):
    """A 3-d axes without its box, seen so that the diagonal (1, 1, 1) points up and away."""
    axes = figure.add_subplot(1, 3, position, projection="3d")
    axes.set_proj_type("ortho")
    axes.view_init(elev=14, azim=12)
    axes.set(xlim=(-2, 2), ylim=(-2, 2), zlim=(-2, 2))
    axes.set_box_aspect((1, 1, 1), zoom=1.22)
    axes.set_axis_off()
    axes.set_title(title, color=INK, y=1.02)
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
    axes.scatter(*start.T, facecolor="white", edgecolor=BEFORE, s=22, depthshade=False)
    axes.scatter(*end.T, color=AFTER, s=22, depthshade=False)


def main():
    random = np.random.default_rng(7)
    x = random.standard_normal((14, 3)) * 0.9 + 0.35
    centred = x - x.mean(axis=1, keepdims=True)
    layer_normed = RADIUS * centred / np.linalg.norm(centred, axis=1, keepdims=True)
    rms_normed = RADIUS * x / np.linalg.norm(x, axis=1, keepdims=True)

    figure = plt.figure(figsize=(12, 4.2))
    axes = panel(figure, 1, "LayerNorm, step 1: subtract the mean")
    draw_plane(axes)
    draw_moves(axes, x, centred)

    axes = panel(figure, 2, "LayerNorm, step 2: variance 1")
    across, along = draw_plane(axes)
    angle = np.linspace(0, 2 * np.pi, 200)
    circle = RADIUS * (np.outer(np.cos(angle), across) + np.outer(np.sin(angle), along))
    axes.plot(*circle.T, color=AFTER, linewidth=1.2)
    draw_moves(axes, centred, layer_normed)

    axes = panel(figure, 3, "RMSNorm: mean square 1")
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

    figure.subplots_adjust(left=0, right=1, bottom=0, top=0.9, wspace=0)
    path = Path(__file__).resolve().parents[1] / "images" / "geometry.svg"
    figure.savefig(path, metadata={"Date": None}, facecolor="white")


if __name__ == "__main__":
    main()
