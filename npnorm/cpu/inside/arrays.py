"""Arrays of users' compiled code, checked and brought to the forms that kernels take: rows and vectors.

The makers here get what is known when the code is compiled, as closure constants that are True or
None: the compiler prunes both.
"""

import math
from functools import cache

import numpy as np
from numba import njit
from numba.cpython.unsafe.tuple import tuple_setitem

from ..._numba import OPTIONS
from ..arrays import row_view, vector_view

# Where arrays lie


@njit(**OPTIONS)
def span(array):
    """The addresses from which and up to which an array's elements lie; the same twice if it has none."""
    first = last = array.ctypes.data
    if array.size == 0:
        return first, last
    for i in range(array.ndim):
        reach = array.strides[i] * (array.shape[i] - 1)
        first += min(reach, 0)
        last += max(reach, 0)
    return first, last + array.itemsize


@njit(**OPTIONS)
def meets(array, output):
    """Whether the elements of two arrays may lie among each other."""
    if array is None or output is None:
        return False
    first, last = span(array)
    start, stop = span(output)
    return first < stop and start < last


@njit(**OPTIONS)
def hides(array, output):
    """Whether writing an output in the place of `array`, row by row, may spoil rows that are read later."""
    if array is None or output is None:
        return False
    same = array.ctypes.data == output.ctypes.data and array.itemsize == output.itemsize
    return not (same and array.strides == output.strides) and meets(array, output)


@njit(**OPTIONS)
def steps(array, lead):
    """Whether an array can be seen as rows: then the strides and the inner length of its merged lead axes."""
    size = array.itemsize
    for i in range(array.ndim - 1, lead - 1, -1):
        if array.shape[i] != 1:
            if array.strides[i] != size:
                return False, 0, 0, 1
            size *= array.shape[i]
    outer = inner = 0
    outer_length = inner_length = 1
    for i in range(lead - 1, -1, -1):
        length, stride = array.shape[i], array.strides[i]
        if length == 1:
            continue
        if outer_length == 1 and (inner_length == 1 or stride == inner * inner_length):
            inner = stride if inner_length == 1 else inner
            inner_length *= length
        elif outer_length == 1 or stride == outer * outer_length:
            outer = stride if outer_length == 1 else outer
            outer_length *= length
        else:
            return False, 0, 0, 1
    return True, outer, inner, inner_length


@njit(**OPTIONS)
def as_rows(array, lead):
    """The view of rows of an array that has one."""
    cols = 1
    for i in range(lead, array.ndim):
        cols *= array.shape[i]
    _, outer, inner, length = steps(array, lead)
    return row_view(array, outer, inner, length, cols)


@njit(**OPTIONS)
def nothing(array, *rest):
    return None


@njit(**OPTIONS)
def itself(array, *rest):
    return array


@cache
def shape_check(name, rule):
    message = f"`{name}` must have the first of these shapes, {rule}; got the second"

    @njit(**OPTIONS)
    def check(array, shape):
        if array.shape != shape:
            raise ValueError(message, shape, array.shape)

    return check


@cache
def output_check(name):
    """The check of an output: its shape, and that no two of its elements share memory."""
    check_shape = shape_check(name, "the shape of the result")
    message = f"`{name}` must not repeat its own elements: pass a copy of it; its strides are"

    @njit(**OPTIONS)
    def check(array, shape):
        check_shape(array, shape)
        if repeats_elements(array):
            raise ValueError(message, array.strides)

    return check


@njit(**OPTIONS)
def repeats_elements(array):
    """Whether elements may share memory with each other, as no slice of an array's do."""
    reach, known = array.itemsize, 0
    for _ in range(array.ndim):  # axes by the size of their strides
        step, length, axis = -1, 1, 0
        for i in range(array.ndim):
            if array.shape[i] > 1 and not (known >> i) & 1 and (step < 0 or abs(array.strides[i]) < step):
                step, length, axis = abs(array.strides[i]), array.shape[i], i
        if step < 0:
            return False
        if step < reach:
            return array.size > 0
        reach += step * (length - 1)
        known |= 1 << axis
    return False


@cache
def row_reader(aligned, lead):
    """Rows of an input: of a copy where outputs hide it or its layout has no rows."""

    @njit(**OPTIONS)
    def read(array, output, output_2):
        kept = array
        if aligned is None or hides(array, output) or hides(array, output_2) or not steps(array, lead)[0]:
            kept = array.copy()
        return as_rows(kept, lead)

    return read


@cache
def vector_reader(plain, dtype, offset):
    """A vector of a small input's elements; `plain` if that may be a view, `offset` if one is added to them."""

    @njit(**OPTIONS)
    def read(array, number, output, output_2):
        if plain is not None and not meets(array, output) and not meets(array, output_2):
            return vector_view(array)
        copied = np.empty(array.size, dtype)
        for i, value in enumerate(array.flat):
            copied[i] = dtype(value)
            if offset is not None and number != 0.0:
                copied[i] += dtype(number)
        return copied

    return read


@cache
def output_maker(dtype):
    """A new output of a dtype."""

    @njit(**OPTIONS)
    def new(output, shape):
        return np.empty(shape, dtype)

    return new


@njit(**OPTIONS)
def new_statistic(shape, lead):
    return np.full(kept(shape, lead), np.nan)


@cache
def output_room(plain, aligned, lead):
    """Two functions: an array to write in an output's stead, itself if it has rows; and its way back."""
    if plain is not None:
        return itself, nothing

    @njit(**OPTIONS)
    def room(output):
        if aligned is None or not steps(output, lead)[0]:
            return np.empty(output.shape, output.dtype)
        return output

    @njit(**OPTIONS)
    def settle(output, written):
        if written.ctypes.data != output.ctypes.data:
            output[...] = written

    return room, settle


# Checks of values


@njit(**OPTIONS)
def checked_eps(eps, machine_eps):
    if eps is None:
        return machine_eps
    number = float(eps)
    if not 0.0 <= number < math.inf:
        raise ValueError("`eps` must be a finite real number that is not negative; got", number)
    return number


@njit(**OPTIONS)
def checked_offset(offset, weight):
    number = float(offset)
    if not math.isfinite(number):
        raise ValueError("`weight_offset` must be a finite real number; got", number)
    if weight is None and number != 0.0:
        raise ValueError("`weight_offset` is added to `weight`, which is None: pass a weight of zeros; got", number)
    return number


@cache
def apart_check(name, other):
    message = (
        f"`{name}` and `{other}` must not share memory, nor lie among each other in compiled code: pass another output"
    )

    @njit(**OPTIONS)
    def check(output, output_2):
        if meets(output, output_2):
            raise ValueError(message)

    return check


@njit(**OPTIONS)
def extent(shape, lead):
    """The numbers of rows and columns."""
    rows = cols = 1
    for i in range(lead):
        rows *= shape[i]
    for i in range(lead, len(shape)):
        cols *= shape[i]
    return rows, cols


@njit(**OPTIONS)
def kept(shape, lead):
    """The shape of statistics."""
    for i in range(lead, len(shape)):
        shape = tuple_setitem(shape, i, 1)
    return shape
