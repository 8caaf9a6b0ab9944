"""The launch table: which kernel runs, on how many threads and blocks. Plain Python.

A row is cut into chunks of 16 bytes of x. Chunk c belongs to thread c % threads of its row, whatever the access width,
so sums are added in one order and no width, layout, batch or device changes a bit. `threads` follows from the number
of columns and x's format alone.
"""

from typing import NamedTuple

from .._plan import Plan

SIZES = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}
"""Bytes of an element, by format."""

HALVES = ("float16", "bfloat16")

WHOLE, BYTES, SWAPPED = "whole", "bytes", "swapped"
"""How an element is read and written: at once; byte by byte, for it may lie at any address; or so and in the other
byte order."""

ORDINARY = 4 * (WHOLE,)

LEAST = (8, 0)
"""The oldest compute capability: code is lowered for it, and the linker makes that of newer ones from it."""

CHUNK = 16
"""Bytes of a chunk of x: the widest access of a thread."""

WARP = 32
MOST_THREADS = 1024
RESIDENT, RESIDENT_BACKWARD = 1024, 512
"""Threads a multiprocessor should hold at once: with 64 registers each, or 128 (also forward in float64). What keeps
memory busy is bytes on their way, and half as many threads with twice as many elements ask for as many."""

FORWARD_BLOCK = 128
"""Threads of a forward block of rows that take a warp or less."""

BACKWARD_BLOCK = 256
"""Threads of a backward block of rows that take as many or less: two such blocks share a multiprocessor."""

SUMS = 32
"""Registers of a backward thread for sums of dweight and dbias, if it also holds its part of the row; else twice as
many."""

SHARED = 99 * 1024
"""The most bytes of shared memory that a block has on every device: those with the least are 8.6, 8.9 and 12.0."""

PARTIALS = 264
"""The most partial sums of dweight and dbias: two for each of an H200's 132 multiprocessors."""

ROWS_A_PARTIAL = 4
"""The fewest rows that a partial sum is worth."""

TILE = 256
"""Chunks of columns that a block of the looped backward kernel takes."""

COLUMNS, SLICES = 32, 16
"""Columns of a block of the kernel that adds up partial sums, and threads that share a column."""

ALIGNMENT = 256
"""Bytes to which the parts of a workspace are aligned."""


class Spec(NamedTuple):
    """One compiled kernel."""

    kind: str
    """"forward", "sums" (row sums of a looped backward), "backward" or "total"."""
    plan: Plan
    """Formats and flags; the weight's format is its own, those of dweight and dbias are the gradients' own."""
    offset: bool
    """Whether a weight_offset is added."""
    width: int
    """Elements of x a memory access moves; 16 bytes at most of any array."""
    threads: int
    """Threads a row."""
    rows: int
    """Rows a block has at once."""
    vectors: int
    """Chunks of a row that a thread holds; 0 if it has as many as the row needs."""
    mode: str
    """Where the row stays between passes: in "registers", "shared" memory, or nowhere ("looped"); of a backward kernel,
    nowhere but in the device's second cache, its sums being in registers ("cached")."""
    lead: int = 1
    """Lead axes whose lengths and strides the kernel takes. Rows have the same bits along any number of them."""
    access: tuple[str, ...] = ORDINARY
    """How elements of each array that has strides are accessed; the width is 1 if any of them is not accessed whole."""

    def units(self, *formats: str | None) -> list[int]:
        """The bytes that strides count, of the arrays that have strides: elements, or bytes where these may lie
        anywhere."""
        return [
            SIZES[form or "float32"] if access == WHOLE else 1
            for form, access in zip(formats, self.access, strict=True)
        ]

    @property
    def chunk(self) -> int:
        """Elements of a chunk."""
        return CHUNK // SIZES[self.plan.x]

    @property
    def block(self) -> int:
        """Threads a block."""
        return self.threads * self.rows

    @property
    def resident(self) -> int:
        """Blocks that shall fit on a multiprocessor."""
        few = self.plan.double or self.kind in ("backward", "sums")
        return max(1, (_resident_backward(self.plan) if few else RESIDENT) // self.block)


class Launch(NamedTuple):
    """A kernel and how it is launched."""

    spec: Spec
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared_bytes: int


class Workspace(NamedTuple):
    """Where the parts of a backward call's scratch memory begin, in bytes; None for parts it has not."""

    mean: int | None
    """rows float64, if the mean is not given; and so on."""
    rstd: int | None
    sums: int | None
    """5 float64 for each row, of a looped backward."""
    dweight: int | None
    """partials x cols of the compute dtype."""
    dbias: int | None
    size: int


def forward_launch(
    plan: Plan, rows: int, cols: int, width: int, offset: bool = False, lead: int = 1,
    access: tuple[str, ...] = ORDINARY,
) -> Launch:  # fmt: skip
    """The launch of a forward call, or of one for statistics alone (`statistics_plan`)."""
    chunks = -(-cols // (CHUNK // SIZES[plan.x]))
    threads = forward_threads(chunks)
    vectors, mode, shared = -(-chunks // threads), "registers", 0
    if vectors > 4:
        staged = CHUNK * threads * vectors
        fits = staged + 8 * exchange_size(threads, 1) <= SHARED
        vectors, mode, shared = (0, "shared", staged) if fits else (0, "looped", 0)
    together = max(1, FORWARD_BLOCK // threads) if threads <= WARP else 1
    spec = Spec("forward", plan, offset, width, threads, together, vectors, mode, lead, access)
    return _launch(spec, -(-rows // together), 1, shared)


def forward_threads(chunks: int) -> int:
    """Threads a row: a part of a warp, a warp, or as many warps as hold it in 2 or 4 chunks a thread."""
    if chunks <= WARP:
        return _power_of_two(chunks)
    if chunks <= 4 * WARP:
        return WARP
    return min(MOST_THREADS, WARP * -(-chunks // (WARP * (2 if chunks <= 512 else 4))))


def statistics_plan(plan: Plan) -> Plan:
    """The forward plan of a backward plan's row statistics: with the bits that a forward call would return."""
    mean = "float64" if plan.centered else None
    return Plan(False, plan.centered, False, False, plan.x, None, None, None, None, mean, "float64")


def backward_launches(
    plan: Plan, rows: int, cols: int, width: int, offset: bool = False, lead: int = 1,
    access: tuple[str, ...] = ORDINARY,
) -> tuple[Launch, ...]:  # fmt: skip
    """The launches of a backward call, in order, all with the same arguments."""
    threads, vectors, mode = _backward_shape(plan, cols)
    count = partials(plan, rows, cols)
    if mode != "looped":
        spec = Spec("backward", plan, offset, width, threads, _together(threads), vectors, mode, lead, access)
        return (_launch(spec, count, 1, _exchange_bytes(spec)),)
    chunks = -(-cols // (CHUNK // SIZES[plan.x]))
    bare = plan._replace(out=None, dweight=None, dbias=None, dresidual=None)
    most = min(_resident_backward(plan), forward_threads(chunks))
    sums = Spec("sums", bare, offset, width, most, 1, 0, "looped", lead, (*access[:2], WHOLE, WHOLE))
    apply = Spec("backward", plan, offset, width, threads, 1, vectors, mode, lead, access)
    return _launch(sums, rows, 1, 0), _launch(apply, -(-chunks // threads), count, 0)


def total_launch(
    plan: Plan, gradient_format: str, cols: int, lead: int = 1, access: tuple[str, ...] = ORDINARY
) -> Launch:
    """The launch that adds up partial sums: the y axis of the grid is dweight, then dbias."""
    bare = Plan(True, plan.centered, plan.double, False, plan.x, plan.other, None, None, gradient_format, None, None)
    access = (*access[:2], WHOLE, WHOLE)
    spec = Spec("total", bare, False, 1, SLICES, COLUMNS, 0, "looped", lead, access)
    return _launch(spec, -(-cols // COLUMNS), 2, 0)


def partials(plan: Plan, rows: int, cols: int) -> int:
    """How many partial sums of dweight and dbias there are: from (rows, cols) and formats alone."""
    threads, _, mode = _backward_shape(plan, cols)
    together = 1 if mode == "looped" else _together(threads)
    return max(1, min(PARTIALS, -(-rows // (ROWS_A_PARTIAL * together))))


def workspace(plan: Plan, rows: int, cols: int) -> Workspace:
    """The scratch memory of a backward call."""
    given = plan.rstd is not None and (plan.mean is not None or not plan.centered)
    statistics = None if given else 8 * rows
    looped = _backward_shape(plan, cols)[2] == "looped"
    partial = partials(plan, rows, cols) * cols * (8 if plan.double else 4)
    sizes = (
        statistics if plan.centered else None,
        statistics,
        40 * rows if looped else None,
        partial if plan.dweight else None,
        partial if plan.dbias else None,
    )
    places: list[int | None] = []
    end = 0
    for size in sizes:
        places.append(None if size is None else end)
        end += -(-(size or 0) // ALIGNMENT) * ALIGNMENT
    mean, rstd, sums, dweight, dbias = places
    return Workspace(mean, rstd, sums, dweight, dbias, end)


def workspace_bytes(plan: Plan, rows: int, cols: int) -> int:
    """The bytes of `workspace`."""
    return workspace(plan, rows, cols).size


def _backward_shape(plan: Plan, cols: int) -> tuple[int, int, str]:
    """Threads a row of a backward call, the chunks of which each has the sums, and the mode.

    The two sums of an element take a register each if all is of half precision, else two, and twice as many in float64.
    """
    size = CHUNK // SIZES[plan.x]
    chunks = -(-cols // size)
    halves = {plan.x, plan.weight, plan.dweight, plan.dbias} <= {*HALVES, None}
    sums = 8 if plan.double else 2 if halves else 4
    vectors, mode, most = SUMS // (sums * size), "registers", _resident_backward(plan)
    if chunks > most * vectors:
        vectors, mode = -(-chunks // most), "cached"
    if vectors * sums * size > 2 * SUMS:
        return TILE, 1, "looped"
    threads = _power_of_two(-(-chunks // vectors))
    if threads > WARP:
        threads = WARP * -(-chunks // (WARP * vectors))
    return threads, -(-chunks // threads), mode


def _resident_backward(plan: Plan) -> int:
    """Threads with 128 registers each; 4 or 8 numbers a chunk, in float64, take twice as many."""
    return RESIDENT_BACKWARD // 2 if plan.double and plan.x != "float64" else RESIDENT_BACKWARD


def _together(threads: int) -> int:
    """Rows that a backward block has at once."""
    return max(1, BACKWARD_BLOCK // threads) if threads <= BACKWARD_BLOCK // 2 else 1


def exchange_size(threads: int, rows: int) -> int:
    """float64 of static shared memory, in which threads of a row add up what each of them has."""
    return 1 if threads <= WARP else 2 * (threads + 1) * rows


def _exchange_bytes(spec: Spec) -> int:
    """Shared memory in which the rows of a block add up their partial sums."""
    if spec.rows == 1 or not (spec.plan.dweight or spec.plan.dbias):
        return 0
    return spec.threads * spec.vectors * spec.chunk * (16 if spec.plan.double else 8)


def _power_of_two(count: int) -> int:
    return 1 << max(0, count - 1).bit_length()


def _launch(spec: Spec, x: int, y: int, shared: int) -> Launch:
    return Launch(spec, (min(x, 2**31 - 1), y, 1), (spec.block, 1, 1), shared)
