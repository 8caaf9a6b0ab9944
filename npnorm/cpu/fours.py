"""Four rows at once: what a row's end needs, from the last additions to rstd, takes as long for one row as for four."""

from numba import njit

from .arrays import row
from .lanes import all_less, first_lane, four_lanes, pushed
from .options import STRICT
from .rows import (
    FAR,
    LIMIT,
    in_compute_dtype,
    leaf_sums,
    mean_and_rstd,
    mean_pair,
    write_normalized,
)


@njit(**STRICT)
def are_ordinary(totals, squares, rstds, size, centered):
    """Whether all rows are ordinary, and none is far from zero."""
    if centered is not None and not all_less(squares, FAR * (squares - totals * (totals * (1.0 / size)))):
        return False
    return all_less(1.0 / LIMIT, rstds) and all_less(rstds, LIMIT)


@njit(**STRICT)
def write_four(x_rows, weight, bias, y_rows, i, cols, eps, centered, rounding):
    """y of rows i to i + 3, each a leaf at most; False, and nothing is written, if one is extreme or far from zero.

    A loop does one row after another: the processor fetches what an instruction will read next by what it has read.
    """
    totals = squares = four_lanes(0.0)
    for k in range(4):
        total, square = leaf_sums(row(x_rows, i + k), None, None, centered, None)
        totals, squares = pushed(totals, total), pushed(squares, square)
    means, rstds = mean_and_rstd(0.0, totals, squares, cols, eps, centered)
    if not are_ordinary(totals, squares, rstds, cols, centered):
        return False
    means = rstds if centered is None else means  # lanes in any case
    for k in range(4):
        x = row(x_rows, i + k)
        high, low = mean_pair(first_lane(means), 0.0, centered, None)
        form = x if rounding is not None else None
        rstd = in_compute_dtype(first_lane(rstds), None)
        write_normalized(x, weight, bias, row(y_rows, i + k), None, high, low, rstd, form, None, None, None, 0)
        means, rstds = pushed(means, 0.0), pushed(rstds, 0.0)
    return True
