"""Calls of single kernels, on NumPy arrays with poison around their rows."""

import itertools
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

import machine  # noqa: E402

from npnorm._plan import Plan  # noqa: E402
from npnorm._results import NormGradients  # noqa: E402
from npnorm.cuda import kernels, simulated, table  # noqa: E402

machine.install()


class Shape(NamedTuple):
    """How a kernel is launched."""

    threads: int = 8
    rows: int = 2
    mode: str = "registers"
    width: int | None = None
    """None for 16 bytes of x."""
    layout: str = "plain"
    """"plain": rows follow each other; "lead": they lie along two axes, with poison between them."""
    blocks: int | None = None
    """Blocks of the grid; fewer than there are rows make blocks go on to other rows."""


class Placed(NamedTuple):
    """An array among poison."""

    address: int
    outer: int
    inner: int
    view: np.ndarray
    base: np.ndarray

    def check(self):
        """Nothing around the rows is written."""
        poison = np.ones(self.base.shape, bool)
        poison[self.where] = False
        assert np.isnan(self.base[poison].astype(np.float64)).all()

    @property
    def where(self):
        offset = (self.view.__array_interface__["data"][0] - self.base.ctypes.data) // self.base.itemsize
        places = offset + np.arange(self.view.shape[1])[None, :]
        rows = (
            np.array([self.row(r) for r in range(len(self.view))])[:, None] if len(self.view) else np.zeros((0, 1), int)
        )
        return (rows + places).ravel()

    def row(self, r):
        return r // INNER * self.outer + r % INNER * self.inner


INNER = 2
PLAIN = Shape()


def place(array, layout, aligned):
    """Rows 2 by 2: contiguous, or with poison between rows and pairs of rows; `aligned` elements divide every
    address. Memory that may be touched, or asked for ahead, ends with the last row."""
    rows, cols = array.shape
    gap = 0 if layout == "plain" else aligned * (3 if aligned > 1 else 5)
    start = 0 if layout == "plain" else aligned
    inner = cols + gap
    outer = 2 * inner + (0 if layout == "plain" else aligned)
    last = max(rows - 1, 0)
    size = start + last // INNER * outer + last % INNER * inner + cols
    base = np.full(size + inner + 16, np.nan, array.dtype)  # nobody else's memory follows
    begin = (-base.ctypes.data % 16) // base.itemsize if base.itemsize > 1 else 0
    base = base[begin : begin + size]
    view = np.full((rows, cols), np.nan, array.dtype)
    placed = Placed(simulated.held(base) + start * base.itemsize, outer, inner, view, base)
    for r in range(rows):
        at = start + placed.row(r)
        base[at : at + cols] = array[r]
    return placed, start


def read(placed, start, shape):
    rows, cols = shape
    out = np.empty(shape, placed.base.dtype)
    mask = np.ones(placed.base.size, bool)
    for r in range(rows):
        at = start + placed.row(r)
        out[r] = placed.base[at : at + cols]
        mask[at : at + cols] = False
    assert np.isnan(placed.base[mask].astype(np.float64)).all(), "written outside of the rows"
    return out


def name_of(array):
    return None if array is None else array.dtype.name


def vector(array):
    return 0 if array is None else simulated.held(np.ascontiguousarray(array))


class Arrays:
    """Placed arrays, and their addresses and strides as kernels take them; held as long as this is."""

    def __init__(self, layout, aligned):
        self.layout, self.aligned, self.places = layout, aligned, {}

    def put(self, name, array):
        if array is None:
            self.places[name] = None
            return 0
        self.places[name] = place(array, self.layout, self.aligned)
        return self.places[name][0].address

    def steps(self, rows, *names):
        """The lengths of the lead axes, and strides along them."""
        lead = lead_of(self.layout)
        yield from (-(-rows // INNER), INNER) if lead == 2 else (rows,)
        for name in names:
            placed = self.places[name]
            yield from (0, 0)[:lead] if placed is None else (placed[0].outer, placed[0].inner)[-lead:]

    def get(self, name, shape):
        return read(*self.places[name], shape)


def spec_of(kind, plan, shape, cols, offset):
    chunk = 16 // table.SIZES[plan.x]
    chunks = -(-cols // chunk)
    vectors = max(1, -(-chunks // shape.threads))
    if shape.mode in ("shared", "looped"):
        vectors = 1 if kind == "backward" else 0
    width, lead = shape.width or chunk, lead_of(shape.layout)
    return table.Spec(kind, plan, offset, width, shape.threads, shape.rows, vectors, shape.mode, lead)


def lead_of(layout):
    return 1 if layout == "plain" else 2


def run(spec, grid, shared, arguments):
    launch(table.Launch(spec, grid, (spec.block, 1, 1), shared), arguments)


def launch(what, arguments, stream=0):
    """Run a kernel with the parameters of a launch, of which a tuple takes as many as it has items."""
    function, signature = kernels.make_kernel(what.spec)
    left = iter(arguments)
    taken = [tuple(itertools.islice(left, getattr(kind, "count", 0))) or next(left) for kind in signature]
    assert next(left, None) is None
    machine.run(function, what, taken)


def forward(
    x, weight=None, bias=None, *, centered=True, residual=None, eps=1e-5, weight_offset=0.0, rounding=False, out=None,
    stats=False, written=True, in_place=False, shape=PLAIN,
):  # fmt: skip
    """y, residual_out, mean and rstd of one launch."""
    simulated.MEMORY.clear()
    rows, cols = x.shape
    dtype = np.dtype(out or x.dtype)
    double = "float64" in (x.dtype.name, dtype.name)
    plan = Plan(
        False, centered, double, rounding, x.dtype.name, name_of(residual), name_of(weight), name_of(bias),
        dtype.name if written else None, "float64" if stats and centered else None, "float64" if stats else None,
    )  # fmt: skip
    spec = spec_of("forward", plan, shape, cols, weight_offset != 0)
    arrays = Arrays(shape.layout, spec.width)
    mean, rstd = (np.full(rows, np.nan) if stats and (centered or i) else None for i in (0, 1))
    addresses = [arrays.put("x", x), arrays.put("residual", residual), vector(weight), vector(bias)]
    addresses.append(arrays.put("total", None if residual is None else np.full(x.shape, np.nan, x.dtype)))
    if in_place:
        arrays.places["y"] = arrays.places["x"]
        addresses.append(addresses[0])
    else:
        addresses.append(arrays.put("y", np.full(x.shape, np.nan, dtype) if written else None))
    addresses += [vector(mean), vector(rstd)]
    steps = arrays.steps(rows, "x", "residual", "total", "y")
    chunks = -(-cols // spec.chunk)
    shared = 16 * shape.threads * -(-chunks // shape.threads) if shape.mode == "shared" else 0
    grid = (shape.blocks or max(1, -(-rows // shape.rows)), 1, 1)
    run(spec, grid, shared, (*addresses, rows, cols, *steps, eps, weight_offset))
    return (
        arrays.get("y", x.shape) if written else None,
        arrays.get("total", x.shape) if residual is not None else None,
        mean,
        rstd,
    )


def backward(
    dy, x, weight=None, *, centered=True, mean=None, rstd=None, eps=1e-5, weight_offset=0.0, dresidual=None,
    mask=(True, True, True), gradient=None, shape=PLAIN, partials=2,
):  # fmt: skip
    """The gradients, of launches as the host makes them; partial sums are added up by NumPy unless `gradient` is a
    kernel's."""
    rows, cols = x.shape
    if rstd is None:
        _, _, mean, rstd = forward(
            x,
            centered=centered,
            eps=eps,
            stats=True,
            written=False,
            shape=shape._replace(rows=max(1, 32 // shape.threads), mode="registers"),
        )
    simulated.MEMORY.clear()
    parameter = np.dtype(gradient or (x if weight is None else weight).dtype)
    double = "float64" in (x.dtype.name, dy.dtype.name, parameter.name, name_of(dresidual), name_of(weight))
    plan = Plan(
        True, centered, double, False, x.dtype.name, dy.dtype.name, name_of(weight), None,
        x.dtype.name if mask[0] else None, "float64" if centered else None, "float64",
        parameter.name if mask[1] else None, parameter.name if mask[2] else None, name_of(dresidual),
    )  # fmt: skip
    compute = np.float64 if double else np.float32
    spec = spec_of("backward", plan, shape, cols, weight_offset != 0)
    arrays = Arrays(shape.layout, spec.width)
    addresses = [arrays.put("dy", dy), arrays.put("x", x), vector(weight), vector(mean), vector(rstd)]
    addresses += [arrays.put("dresidual", dresidual)]
    addresses += [arrays.put("dx", np.full(x.shape, np.nan, x.dtype) if mask[0] else None)]
    sums = np.full((rows, 5), np.nan)
    dweights, dbiases = (np.full((partials, cols), np.nan, compute) if wanted else None for wanted in mask[1:])
    addresses += [vector(sums), vector(dweights), vector(dbiases)]
    steps = arrays.steps(rows, "dy", "x", "dresidual", "dx")
    arguments = (*addresses, rows, cols, *steps, eps, weight_offset)
    grid = (partials, 1, 1)
    if shape.mode == "looped":
        bare = plan._replace(out=None, dweight=None, dbias=None, dresidual=None)
        run(spec._replace(kind="sums", plan=bare, rows=1, vectors=0), (rows, 1, 1), 0, arguments)
        grid = (-(-cols // (spec.chunk * shape.threads)), partials, 1)
        spec = spec._replace(rows=1)
    run(spec, grid, max(16, table._exchange_bytes(spec)), arguments)
    dx = arrays.get("dx", x.shape) if mask[0] else None
    with np.errstate(all="ignore"):
        dweight, dbias = (
            None if partial is None else partial.astype(np.float64).sum(axis=0).astype(parameter)
            for partial in (dweights, dbiases)
        )
    return NormGradients(dx, dweight, dbias)
