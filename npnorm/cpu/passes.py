"""The passes of a gradient over rows: sums are gathered, dx is written."""

from numba import njit

from .arrays import part, row
from .elements import store
from .gradients import PARAMETERS, add_leaf, errors_of, put_means, statistics_of, widest, write_gradient
from .options import STRICT
from .rows import compensated


@njit(**STRICT)
def ahead(rows, i, end, stream):
    """Row i, or the last before `end`: it is fetched, if arrays are streamed."""
    return None if stream is None else row(rows, min(i, end - 1))


@njit(**STRICT)
def gather_rows(
    found, dy_rows, x_rows, weight, dweight, dbias, first, stop, end, centered, double, extreme, stream
):  # fmt: skip
    """`put_means` of rows first to stop, whose parameters `found` has, ordinary float32 rows two at a time: half the
    traffic with the sums.

    As many rows of dy after them, up to `end`, are fetched if arrays are streamed.
    """
    i = first
    while i < stop:
        own = part(found, PARAMETERS * (i - first), PARAMETERS)
        dy, x = row(dy_rows, i), row(x_rows, i)
        following = ahead(dy_rows, i + stop - first, end, stream)
        if extreme is None and double is None and i + 1 < stop:
            own_2 = part(own, PARAMETERS, PARAMETERS)
            dy_2, x_2 = row(dy_rows, i + 1), row(x_rows, i + 1)
            following_2 = ahead(dy_rows, i + 1 + stop - first, end, stream)
            put_means(
                own, dy, x, own_2, dy_2, x_2, weight, dweight, dbias, centered, double, extreme, following, following_2
            )  # fmt: skip
            i += 2
        else:
            put_means(
                own, dy, x, None, None, None, weight, dweight, dbias, centered, double, extreme, following, None
            )  # fmt: skip
            i += 1


@njit(**STRICT)
def add_rows(
    found, dy_rows, x_rows, dweights, dbiases, first, stop, start, place, size, width, centered, double, extreme
):  # fmt: skip
    """dweight += dy·x̂ and dbias += dy of rows first to stop whose statistics are known, `size` columns from `start`;
    their sums stand from `place` on, of as many as `width`."""
    dweight, dbias = part(dweights, place, size), part(dbiases, place, size)
    dweight_errors, dbias_errors = (
        errors_of(dweights, width, place, size, double), errors_of(dbiases, width, place, size, double)
    )  # fmt: skip
    i = first
    while i < stop:
        own = statistics_of(part(found, PARAMETERS * i, PARAMETERS), centered, double, extreme)
        dy, x = part(row(dy_rows, i), start, size), part(row(x_rows, i), start, size)
        if extreme is None and double is None and i + 1 < stop:
            own_2 = statistics_of(part(found, PARAMETERS * (i + 1), PARAMETERS), centered, double, extreme)
            dy_2, x_2 = part(row(dy_rows, i + 1), start, size), part(row(x_rows, i + 1), start, size)
            add_leaf(dy, x, dy_2, x_2, None, dweight, None, dbias, None, own, own_2, None, None, None)
            i += 2
        else:
            add_leaf(
                dy, x, None, None, None, dweight, dweight_errors, dbias, dbias_errors, own, own,
                widest(double, extreme), None, None,
            )  # fmt: skip
            i += 1


@njit(**STRICT)
def write_rows(
    found, base, dy_rows, x_rows, weights, dresidual_rows, dx_rows, first, stop, end, start, size,
    centered, double, extreme, stream, edge, held,
):  # fmt: skip
    """dx of rows first to stop, `size` columns from `start`; returns how many elements are held now. As many
    rows of x after them are fetched if arrays are streamed."""
    weight = part(weights, start, size)
    for i in range(first, stop):
        held = write_gradient(
            part(found, PARAMETERS * (i - base), PARAMETERS), part(row(dy_rows, i), start, size),
            part(row(x_rows, i), start, size), weight, part(row(dresidual_rows, i), start, size),
            part(row(dx_rows, i), start, size), centered, double, extreme,
            ahead(x_rows, i + stop - first, end, stream), row(dx_rows, i + 1), edge, held,
        )  # fmt: skip
    return held


@njit(**STRICT)
def clear(sums):
    """No sums yet, unless they are None."""
    if sums is not None:
        for j in range(sums.size):
            sums[j] = 0.0


@njit(**STRICT)
def put_sums(gradient, sums, start, size, width, double):
    """gradient[start:] = the first `size` sums, rounded once; for float64 with what was lost. Nothing if it is None."""
    if gradient is not None:
        for j in range(size):
            error = 0.0 if double is None else sums[width + j]
            store(gradient, start + j, compensated(sums[j], error), 0)
