"""The kernel that adds up the partial sums of dweight and dbias."""

import numpy as np
from numba import cuda

from .elements import TYPES, add_exactly, compensated, make_element
from .table import COLUMNS, SLICES


def make_total(spec):
    """The kernel that adds up partial sums."""
    plan = spec.plan
    double = plan.double
    number = np.float64 if double else np.float32
    kind, zero = TYPES[number], number(0.0)
    get = make_element("float64" if double else "float32", number).get
    put = make_element(plan.out, number).put
    size = COLUMNS * SLICES

    def total(dweight_partials, dbias_partials, dweight, dbias, partials, cols):
        """gradient = Σ partials in order, compensated and rounded once."""
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
        if here and part == 0:
            for i in range(1, SLICES):
                place = i * COLUMNS + column
                value, error = add_exactly(value, error + errors[place], totals[place])
            put(gradient, j, compensated(value, error))

    return total
