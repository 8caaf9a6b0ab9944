"""The launch table, which is plain Python."""

import itertools

import pytest

from npnorm._plan import Plan
from npnorm.cuda import table

FORMATS = list(table.SIZES)


def forward_plan(x, out=None):
    return Plan(False, True, "float64" in (x, out), False, x, None, x, x, out or x, None, None)


def backward_plan(x, gradient=None, centered=True, statistics=None):
    gradient = gradient or x
    double = "float64" in (x, gradient)
    return Plan(True, centered, double, False, x, x, gradient, None, x, statistics, statistics, gradient, gradient)


COLUMNS = [
    1,
    2,
    7,
    8,
    9,
    64,
    65,
    255,
    256,
    257,
    768,
    1024,
    1025,
    3072,
    4096,
    4097,
    5120,
    8192,
    16384,
    16385,
    32768,
    40960,
    49152,
    50000,
    10**6,
]


@pytest.mark.parametrize("x", FORMATS)
@pytest.mark.parametrize("cols", COLUMNS)
def test_forward(x, cols):
    chunk = 16 // table.SIZES[x]
    chunks = -(-cols // chunk)
    launches = [
        table.forward_launch(forward_plan(x, out), rows, cols, width, offset)
        for rows, width, out, offset in itertools.product(
            (1, 5, 10**5, 2**33), (1, chunk), (None, "float64"), (False, True)
        )
    ]
    # The order of sums follows from the columns and x's format alone.
    assert len({(launch.spec.threads, launch.spec.mode) for launch in launches}) == 1
    for launch in launches:
        spec = launch.spec
        assert launch.block == (spec.threads * spec.rows, 1, 1)
        assert spec.block <= 1024
        assert spec.threads & (spec.threads - 1) == 0 if spec.threads <= 32 else spec.threads % 32 == 0
        assert spec.threads <= 32 or spec.rows == 1
        assert 1 <= launch.grid[0] < 2**31
        assert launch.grid[1:] == (1, 1)
        assert launch.shared_bytes + 8 * table.exchange_size(spec.threads, spec.rows) <= 101_376  # of 8.6, 8.9, 12.0
        if spec.mode == "registers":
            assert spec.threads * spec.vectors >= chunks > spec.threads * (spec.vectors - 1)
            assert spec.vectors <= 4
        elif spec.mode == "shared":
            assert launch.shared_bytes >= 16 * chunks
    assert launches[0].grid[0] == 1
    assert launches[0].spec.mode == ("registers" if chunks <= 4096 else "shared" if chunks <= 5120 else "looped")


@pytest.mark.parametrize("x", FORMATS)
@pytest.mark.parametrize("gradient", FORMATS)
@pytest.mark.parametrize("cols", COLUMNS)
def test_backward(x, gradient, cols):
    chunk = 16 // table.SIZES[x]
    chunks = -(-cols // chunk)
    plan = backward_plan(x, gradient)
    for rows in (1, 4, 5, 100, 8192, 10**7):
        count = table.partials(plan, rows, cols)
        assert 1 <= count <= table.PARTIALS
        assert count == table.partials(plan._replace(out=None, dbias=None), rows, cols)
        *first, launch = table.backward_launches(plan, rows, cols, chunk)
        spec = launch.spec
        assert spec.block <= 1024
        if not first:
            assert launch.grid == (count, 1, 1)
            assert spec.threads * spec.vectors >= chunks > spec.threads * (spec.vectors - 1)
            # Registers of sums, and of the row if it is held: two for each element, four in float32, eight in float64.
            sums = spec.vectors * chunk * (8 if plan.double else 4 if "float32" in (x, gradient) else 2)
            assert sums <= (32 if spec.mode == "registers" else 64)
            assert spec.block * spec.resident * (sums + 60) <= 65536
            assert launch.shared_bytes <= 48 * 1024
            assert spec.rows == 1 or launch.shared_bytes >= 2 * (8 if plan.double else 4) * cols
        else:
            assert [launch.spec.kind for launch in first] == ["sums"]
            assert launch.grid == (-(-chunks // spec.threads), count, 1)
            assert first[0].grid == (rows, 1, 1)


@pytest.mark.parametrize("cols", [64, 4096, 10**5])
def test_lead_axes_decide_nothing_else(cols):
    """Rows along more axes have kernels of their own, and the same threads, blocks and partial sums."""
    forward, backward = forward_plan("bfloat16"), backward_plan("bfloat16")
    flat = [table.forward_launch(forward, 99, cols, 8), *table.backward_launches(backward, 99, cols, 8)]
    for lead in (2, 8):
        launches = [
            table.forward_launch(forward, 99, cols, 8, lead=lead),
            *table.backward_launches(backward, 99, cols, 8, lead=lead),
        ]
        assert {launch.spec.lead for launch in launches} == {lead}
        assert [launch._replace(spec=launch.spec._replace(lead=1)) for launch in launches] == flat


def test_narrow_rows_share_blocks():
    """Else the lanes of a warp would have nothing to do, and there would be as many partial sums as rows."""
    assert table.forward_launch(forward_plan("bfloat16"), 64, 64, 8).spec[4:6] == (8, 16)
    spec = table.backward_launches(backward_plan("bfloat16"), 64, 64, 8)[0].spec
    assert (spec.threads, spec.rows) == (4, 64)
    assert table.partials(backward_plan("bfloat16"), 64, 64) == 1


@pytest.mark.parametrize(
    "x, gradient, held, cached",
    [("bfloat16", "bfloat16", 8192, 16384), ("bfloat16", "float32", 4096, 8192), ("float32", "float32", 4096, 8192),
     ("float32", "float64", 1024, 2048), ("float64", "float64", 2048, 4096), ("bfloat16", "float64", 0, 2048)],
)  # fmt: skip
def test_backward_modes(x, gradient, held, cached):
    """How many columns are held in registers, and how many are read from memory once."""
    plan = backward_plan(x, gradient)
    places = sorted({1, held or 1, held + 1, cached, cached + 1, 20000})
    modes = [table.backward_launches(plan, 8192, cols, 1)[-1].spec.mode for cols in places]
    assert modes == ["registers" if cols <= held else "cached" if cols <= cached else "looped" for cols in places]


@pytest.mark.parametrize("statistics", [None, "float64"])
@pytest.mark.parametrize("centered", [True, False])
@pytest.mark.parametrize("cols", [64, 10**5])
def test_workspace(statistics, centered, cols):
    """Parts follow each other, aligned, and only those that are used."""
    rows = 1000
    plan = backward_plan("bfloat16", "float32", centered, statistics)
    found = table.workspace(plan, rows, cols)
    partial = 4 * cols * table.partials(plan, rows, cols)
    sizes = {
        "mean": None if statistics or not centered else 8 * rows,
        "rstd": None if statistics else 8 * rows,
        "sums": 40 * rows if cols == 10**5 else None,
        "dweight": partial,
        "dbias": partial,
    }
    end = 0
    for name, size in sizes.items():
        place = getattr(found, name)
        assert (place is None) == (size is None), name
        if size is not None:
            assert place == end
            end = -(-(place + size) // table.ALIGNMENT) * table.ALIGNMENT
    assert found.size == end == table.workspace_bytes(plan, rows, cols)
    assert table.workspace_bytes(plan._replace(dweight=None, dbias=None, mean="float64", rstd="float64"), rows, 64) == 0


def test_statistics_of_a_backward_call_are_those_of_a_forward_one():
    plan = table.statistics_plan(backward_plan("bfloat16", "float32"))
    forward = table.forward_launch(forward_plan("bfloat16"), 10, 4096, 8).spec
    alone = table.forward_launch(plan, 10, 4096, 8).spec
    assert (alone.threads, alone.vectors, alone.mode) == (forward.threads, forward.vectors, forward.mode)
    assert plan.out is None
    assert (plan.mean, plan.rstd) == ("float64", "float64")
