"""No operation allocates more than its results and a megabyte, whatever the layout of its arrays."""

import tracemalloc
from functools import partial

import numpy as np
import pytest
import zoo
from table import DTYPES, HALVES

import npnorm

MEGABYTE = 2**20
COLS = 4096
OPERATIONS = ["layer_norm", "rms_norm", "add_layer_norm", "add_rms_norm", "layer_norm_backward", "rms_norm_backward"]
LAYOUTS = {**zoo.LAYOUTS, "byte_swapped": zoo.byte_swapped}
GATHERED = ("every_other_column", "fortran", "byte_swapped")


# float32 in every layout; the others where they could be converted as a whole.
CASES = [("float32", layout, 1) for layout in LAYOUTS]
CASES += [(dtype, layout, 1) for dtype in HALVES for layout in ("contiguous", "fortran")]
CASES += [("float64", layout, count) for layout in ("contiguous", *GATHERED) for count in (1, 2)]
CASES += [("float32", layout, 2) for layout in ("contiguous", "every_other_row", *GATHERED)]


def prepare(operation, x, given):
    """A call on one array taken for all inputs, and the results that are `given` to it."""
    function = getattr(npnorm, operation)
    weight = np.ones(x.shape[-1], x.dtype)
    y, total = (np.empty(x.shape, x.dtype.newbyteorder("=")) if given else None for _ in range(2))
    if operation.startswith("add"):
        return partial(function, x, x, weight, out=y, residual_out=total), (y, total)
    if operation.endswith("backward"):
        out = (y, np.empty_like(weight) if given else None, None)
        return partial(function, x, x, weight, output_mask=(True, True, False), out=out), out
    return partial(function, x, weight, out=y, return_stats=True), (y,)


def extra_bytes(call, given):
    """The most that was allocated at once during a call, less the results that are new."""
    call()  # compiles, which is not counted; a kernel for large arrays may be another one
    tracemalloc.start()
    try:
        results = call()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    new = (r for r in results if r is not None and not any(r is other for other in given))
    return peak - sum(result.nbytes for result in new)


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize(("dtype", "layout", "count"), CASES)
def test_extra_memory(threads, operation, dtype, layout, count):
    threads(count)
    rows = 16 * MEGABYTE // (COLS * DTYPES[dtype].itemsize)
    x = LAYOUTS[layout](np.ones((rows, COLS), DTYPES[dtype]))
    assert x.nbytes >= 16 * MEGABYTE
    for given in True, False:
        assert extra_bytes(*prepare(operation, x, given)) <= MEGABYTE


@pytest.mark.parametrize("shape", [(1, 2**22), (64, 2**16), (2**18, 16)])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_extra_memory_of_wide_and_narrow_rows(threads, operation, shape):
    threads(1)
    x = np.ones(shape, np.float32)
    assert extra_bytes(*prepare(operation, x, False)) <= MEGABYTE


def test_a_copy_would_be_noticed():
    x = np.ones((1024, COLS), np.float32)
    assert extra_bytes(lambda: (x.copy()[:1],), ()) > 15 * MEGABYTE
