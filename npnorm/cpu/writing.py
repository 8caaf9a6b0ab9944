"""A row of outputs: in lanes, or past the cache and a line of it at a time."""

from numba import njit

from .arrays import LINE, is_followed_by, part
from .elements import line_of, pairs_of, prefetch, store, stream, stream_line, to_line
from .options import STRICT


@njit(**STRICT)
def fetch(x, start, size):
    """Ask for a part of a row that is about to be read, unless x is None."""
    if x is not None:
        for j in range(start, start + size, LINE // x.itemsize):
            prefetch(x, j)


# Rows that follow each other share lines, which are written when they are whole: `edge` has what one row has for
# such a line, `held` elements, until the next row completes it. Written with ordinary stores, those lines had to be
# read first: 16384 x 512 took 3.8 ms, where rows begin and end with lines 1.9.


@njit(**STRICT)
def finish_edge(edge, held, y, head):
    """Write the line that ends with y[:head], the last elements of the edge, or as much of it as is there."""
    if held > 0:
        stream_line(edge, y, -held)
    else:
        for j in range(head):
            y[j] = edge[edge.size - head + j]


@njit(**STRICT)
def release(edge, held, y):
    """Write what is held, which stands before y."""
    target = part(y, -held, held)
    for j in range(held):
        target[j] = edge[j]


@njit(**STRICT)
def hold_edge(edge, held, y, following):
    """How many of the last elements of y are held for the line that the next row of outputs completes."""
    if is_followed_by(y, following):
        return held
    release(edge, held, part(y, y.size, 0))
    return 0


@njit(**STRICT)
def write_lanes(element, inputs, parameters, rstd, y):
    """y = `element` as far as the lanes of rstd go; returns how far: nowhere if rstd is None."""
    if rstd is None:
        return 0
    step = LINE // y.itemsize
    whole = y.size - y.size % step
    for j in range(0, whole, step):
        store(y, j, element(inputs, j, parameters, rstd), 0)
    return whole


@njit(**STRICT)
def write_row(element, inputs, parameters, rstd, y, following, pace, y_next, edge, held):
    """y[j] = element(inputs, j, parameters, rstd), as many as rstd has lanes; returns how many elements are held now.

    With an edge, stores go past the cache, and `following` is fetched meanwhile, at one `pace`-th of the speed.
    Ordinary stores read a line of y from memory before they write it.
    """
    if edge is None:
        for j in range(write_lanes(element, inputs, parameters, pairs_of(rstd, y), y), y.size):
            store(y, j, element(inputs, j, parameters, rstd), 0)
    else:
        step, many = edge.size, line_of(rstd, y)
        head = min(to_line(y), y.size)
        tail = head + (y.size - head) // step * step
        for j in range(head):
            store(edge, step - head + j, element(inputs, j, parameters, rstd), 0)
        finish_edge(edge, held, y, head)
        for j in range(head, tail, step):
            fetch(following, j // pace, step // pace)
            stream(y, j, element(inputs, j, parameters, many))
        for j in range(tail, y.size):
            store(edge, j - tail, element(inputs, j, parameters, rstd), 0)
        held = hold_edge(edge, y.size - tail, y, y_next)
    return held
