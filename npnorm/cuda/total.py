"""The kernel that adds up the partial sums of dweight and dbias."""

import numpy as np
from numba import cuda

from .addresses import make_place, make_row_start
from .elements import TYPES, add_exactly, compensated, known_sum, make_element
from .table import COLUMNS, SLICES
from .vectors import device

try:
    from numba.cuda.types import float64
except ImportError:
    from numba.core.types import float64


def may_overflow(plan):
    """Whether partial sums in float32 can be beyond it, and dy is there to add it up again: of float16 it would take
    2^80 rows."""
    return not plan.double and plan.other not in (None, "float16")


def make_sum_again(spec):
    """A function for a sum over every SLICES-th row that float32 did not hold: what float64 holds, and its error.

    again(dy, x, mean, rstd, rows, lengths, dy_strides, x_strides, part, j, of_products)
    """
    centered = spec.plan.centered
    dy_access, x_access = spec.access[:2]
    dy_of = make_element(spec.plan.other, np.float64, dy_access).get
    x_of = make_element(spec.plan.x, np.float64, x_access).get
    statistic = make_element("float64", np.float64).get
    find_place, row_start = make_place(spec.lead), make_row_start(spec.lead)
    dy_unit, x_unit, _, _ = spec.units(spec.plan.other, spec.plan.x, None, None)

    @device
    def again(dy, x, mean, rstd, rows, lengths, dy_strides, x_strides, part, j, of_products):
        """Σ dy·x̂, or Σ dy, over rows part, part + SLICES, … of column j."""
        value, error = 0.0, 0.0
        for row in range(part, rows, SLICES):
            place = find_place(row, lengths)
            term = dy_of(row_start(dy, place, dy_strides, dy_unit), j)
            if of_products:
                difference = x_of(row_start(x, place, x_strides, x_unit), j)
                if centered:
                    difference = difference - statistic(mean, row)
                term = term * (difference * statistic(rstd, row))
            value, error = add_exactly(value, error, term)
        return value, error

    return again


@device
def over_slices(totals, errors, column, value, error):
    """The sum of a column, and its error: of the first slice, and of the others in order."""
    for i in range(1, SLICES):
        place = i * COLUMNS + column
        value, error = add_exactly(value, error + errors[place], totals[place])
    return value, error


def make_total(spec):
    """The kernel that adds up partial sums."""
    plan = spec.plan
    number = np.float64 if plan.double else np.float32
    kind, zero = TYPES[number], number(0.0)
    get = make_element("float64" if plan.double else "float32", number).get
    put, put_double = (make_element(plan.out, dtype).put for dtype in (number, np.float64))
    size = COLUMNS * SLICES
    finished = compensated if plan.double else known_sum
    overflows = may_overflow(plan)
    sum_again = make_sum_again(spec) if overflows else None

    def total(
        dy, x, mean, rstd, dweight_partials, dbias_partials, dweight, dbias, partials, rows, cols, lengths, dy_strides,
        x_strides,
    ):  # fmt: skip
        """gradient = Σ partials in order, compensated and rounded once; Σ dy·x̂ or Σ dy where these are beyond
        float32."""
        totals, errors = cuda.shared.array(size, kind), cuda.shared.array(size, kind)
        partial, gradient = dweight_partials, dweight
        if cuda.blockIdx.y == 1:
            partial, gradient = dbias_partials, dbias
        thread = np.int64(cuda.threadIdx.x)
        part, column = thread // COLUMNS, thread % COLUMNS
        j = np.int64(cuda.blockIdx.x) * COLUMNS + column
        here = gradient != 0 and j < cols
        value, error = zero, zero
        if here:
            for i in range(part, partials, SLICES):
                value, error = add_exactly(value, error, get(partial, i * cols + j))
        totals[thread] = value
        errors[thread] = error
        cuda.syncthreads()
        if part == 0:
            value, error = over_slices(totals, errors, column, value, error)
            value = finished(value, error)
            totals[thread] = value
            if here and (not overflows or abs(value) < np.inf):
                put(gradient, j, value)
        if overflows:
            cuda.syncthreads()
            lost = here and not abs(totals[column]) < np.inf
            if cuda.syncthreads_or(np.int32(1 if lost else 0)) != 0:
                doubles, double_errors = cuda.shared.array(size, float64), cuda.shared.array(size, float64)
                exact, exact_error = 0.0, 0.0
                if lost:
                    exact, exact_error = sum_again(
                        dy, x, mean, rstd, rows, lengths, dy_strides, x_strides, part, j, cuda.blockIdx.y == 0
                    )
                doubles[thread] = exact
                double_errors[thread] = exact_error
                cuda.syncthreads()
                if lost and part == 0:
                    exact, exact_error = over_slices(doubles, double_errors, column, exact, exact_error)
                    put_double(gradient, j, compensated(exact, exact_error))

    return total
