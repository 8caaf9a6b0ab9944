"""The kernel that copies arrays of any layout, compiled for the CPU: the same source, the same instructions of LLVM."""

import itertools

import numpy as np
import pytest
from bounds import assert_same_bits
from numba import njit, types
from numba.extending import intrinsic
from table import DTYPES, random
from zoo import LAYOUTS, LEADS, byte_swapped

from npnorm.cuda.arrays import DeviceArray
from npnorm.cuda.copies import MOST_BLOCKS, THREADS, copies
from npnorm.cuda.copying import make_copy

kernels = {}


@njit
def grid():
    return 0, 1


def kernel(spec):
    if spec not in kernels:
        kernels[spec] = njit(types.void(*(types.int64,) * 14))(make_copy(spec, intrinsic, types, grid, 0))
    return kernels[spec]


def view(array):
    pointer = array.__array_interface__["data"][0]
    return DeviceArray(pointer, array.shape, array.strides, array.dtype)


def copy(source, target):
    """Copy on the CPU; the number of launches."""
    launches = list(copies(view(source), view(target)))
    for launch, arguments in launches:
        assert launch.block == (THREADS, 1, 1) and 0 < launch.grid[0] <= MOST_BLOCKS
        kernel(launch.spec)(*arguments)
    return len(launches)


@pytest.mark.parametrize("layout", [*LAYOUTS, "byte_swapped"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_layouts(layout, dtype):
    """From any layout into a contiguous array, and back into it where it can be written."""
    if layout == "byte_swapped" and dtype == "bfloat16":
        pytest.skip("bfloat16 has no other byte order")
    array = np.asarray(LAYOUTS.get(layout, byte_swapped)(random((6, 12), dtype)))
    out = np.empty(array.shape, array.dtype.newbyteorder("="))
    assert copy(array, out) == 1
    assert_same_bits(out, np.array(array, out.dtype))
    if array.flags.writeable and "broadcast" not in layout and layout != "overlapping_windows":
        other = random((6, 12), dtype, seed=1)
        copy(other, array)
        assert_same_bits(np.array(array, other.dtype), other)


@pytest.mark.parametrize("lead", LEADS)
def test_lead_axes(lead):
    array = LEADS[lead](random)
    out = np.empty(array.shape, array.dtype)
    copy(array, out)
    assert_same_bits(out, np.array(array))


def test_more_than_four_axes():
    array = random((2, 3, 4, 5, 6, 2)).transpose(5, 3, 1, 4, 2, 0)
    out = np.empty(array.shape, array.dtype)
    assert copy(array, out) == 2 * 5
    assert_same_bits(out, np.array(array))


@pytest.mark.parametrize("dtype", DTYPES)
def test_into_float64(dtype):
    """Every kind of number, exactly."""
    values = np.array([0.0, -0.0, 1.5, -2.0**-14, 2.0**-20, np.inf, -np.inf, 3.0e4])
    array = np.array([values.astype(DTYPES[dtype]), random(8, dtype)])[:, ::-1]
    for source in (array,) if dtype == "bfloat16" else (array, byte_swapped(array)):
        out = np.empty(array.shape)
        copy(source, out)
        assert_same_bits(out, array.astype(np.float64))
    nan = np.full(1, np.nan, DTYPES[dtype])
    out = np.zeros(1)
    copy(nan, out)
    assert np.isnan(out).all()


def test_alignment():
    """Elements at odd addresses are moved byte by byte, others at once."""
    found = set()
    for first, second in itertools.product(("contiguous", "misaligned", "misaligned_rows"), repeat=2):
        source, target = (LAYOUTS[layout](random((3, 5))) for layout in (first, second))
        ((launch, _),) = copies(view(source), view(target))
        assert launch.spec.aligned is (first == second == "contiguous")
        found.add(launch.spec)
    assert len(found) == 2
