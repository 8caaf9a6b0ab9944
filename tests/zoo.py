"""A zoo of array layouts: each takes a (rows, columns) array and returns one of its shape and dtype.

The values may differ (a broadcast has fewer of them), so a test compares a call on the array from
the zoo with the same call on a plain copy of it.
"""

import tempfile

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view


def contiguous(array):
    return np.array(array, order="C")


def every_other_column(array):
    rows, cols = array.shape
    base = poisoned((rows, 2 * cols), array.dtype)
    base[:, ::2] = array
    return base[:, ::2]


def every_other_row(array):
    rows, cols = array.shape
    base = poisoned((2 * rows, cols), array.dtype)
    base[::2] = array
    return base[::2]


def reversed_rows(array):
    return np.array(array[::-1])[::-1]


def reversed_columns(array):
    return np.array(array[:, ::-1])[:, ::-1]


def reversed_both(array):
    return np.array(array[::-1, ::-1])[::-1, ::-1]


def reversed_every_third(array):
    rows, cols = array.shape
    base = poisoned((3 * rows, 3 * cols), array.dtype)
    view = base[::-3, ::-3]
    view[...] = array
    return view


def broadcast_rows(array):
    """The first row, over and over, with stride 0."""
    row = array[0] if len(array) else np.ones(array.shape[1], array.dtype)
    return np.broadcast_to(np.array(row), array.shape)


def broadcast_columns(array):
    """Constant rows, with an innermost stride of 0."""
    first = array[:, :1] if array.shape[1] else np.ones((len(array), 1), array.dtype)
    return np.broadcast_to(np.array(first), array.shape)


def broadcast_scalar(array):
    """Both strides 0: the gradient of a sum."""
    return np.broadcast_to(np.ones((), array.dtype), array.shape)


def fortran(array):
    return np.array(array, order="F")


def offset_view(array):
    rows, cols = array.shape
    base = poisoned((rows + 4, cols + 7), array.dtype)
    view = base[3 : 3 + rows, 5 : 5 + cols]
    view[...] = array
    return view


def overlapping_windows(array):
    """Row i + 1 is row i moved by one: strides of one element both ways."""
    rows, cols = array.shape
    line = np.resize(array.ravel(), max(rows + cols - 1, cols))
    if not cols or not rows:
        return np.array(array)
    return sliding_window_view(line, cols)[:rows]


def misaligned(array):
    memory = np.zeros(array.nbytes + 1, np.uint8)
    view = np.ndarray(array.shape, array.dtype, buffer=memory, offset=1)
    view[...] = array
    assert not array.size or array.itemsize == 1 or not view.flags.aligned
    return view


def misaligned_rows(array):
    """Aligned columns, but rows an odd number of bytes apart."""
    rows, cols = array.shape
    stride = cols * array.itemsize + 1
    memory = np.zeros(rows * stride + 1, np.uint8)
    view = np.ndarray(array.shape, array.dtype, memory, strides=(stride, array.itemsize))
    view[...] = array
    return view


def read_only(array):
    array = np.array(array)
    array.flags.writeable = False
    return array


def memory_mapped(array):
    with tempfile.TemporaryFile() as file:
        file.write(b"a header of some" + array.tobytes() + b"the end")
        file.flush()
        return np.memmap(file, array.dtype, mode="r", offset=16, shape=array.shape)


def subclassed(array):
    class Subclass(np.ndarray):
        pass

    return np.array(array).view(Subclass)


LAYOUTS = {
    layout.__name__: layout
    for layout in [
        contiguous,
        every_other_column,
        every_other_row,
        reversed_rows,
        reversed_columns,
        reversed_both,
        reversed_every_third,
        broadcast_rows,
        broadcast_columns,
        broadcast_scalar,
        fortran,
        offset_view,
        overlapping_windows,
        misaligned,
        misaligned_rows,
        read_only,
        memory_mapped,
        subclassed,
    ]
}


def byte_swapped(array):
    """Not for bfloat16, which has no other byte order."""
    return array.astype(array.dtype.newbyteorder())


# Lead axes that do not merge into one stride; make(shape) gives the array to look into.
def transposed_lead(make):
    return make((4, 5, 33)).transpose(1, 0, 2)


def query_of_joint(make):
    """Q of a joint QKV array of shape (batch, sequence, 3, heads, width)."""
    return make((2, 5, 3, 4, 33))[:, :, 0]


def key_by_head(make):
    """K of the same array, heads before the sequence."""
    return make((2, 5, 3, 4, 33))[:, :, 1].transpose(0, 2, 1, 3)


def columns_in_the_middle(make):
    """The normalized axis is not the fastest in memory."""
    return make((4, 33, 5)).transpose(0, 2, 1)


def everything_reversed(make):
    return make((4, 5, 66))[::-1, ::-2, ::-2]


def lead_broadcast(make):
    return np.broadcast_to(make((4, 1, 33)), (3, 4, 5, 33))


def one_long_axes(make):
    return make((4, 5, 33))[:, None, ::2, None, :]


LEADS = {
    lead.__name__: lead
    for lead in [
        transposed_lead,
        query_of_joint,
        key_by_head,
        columns_in_the_middle,
        everything_reversed,
        lead_broadcast,
        one_long_axes,
    ]
}


def poisoned(shape, dtype):
    """An array of NaN: a kernel that reads or writes beside its view is found out."""
    return np.full(shape, np.nan, dtype)


def assert_only_written(base, view):
    """Everything of the poisoned `base` outside its `view` is still NaN, and `view` is not."""
    assert not np.isnan(view).any()
    copy = np.array(base)
    mask = np.zeros(base.shape, bool)
    # The same slice of a mask: the view's offset and strides, in elements.
    size = base.itemsize
    offset = view.__array_interface__["data"][0] - base.__array_interface__["data"][0]
    strides = tuple(stride // size for stride in view.strides)
    np.lib.stride_tricks.as_strided(
        mask.reshape(-1)[offset // size :], view.shape, strides, writeable=True
    )[...] = True
    assert np.isnan(copy[~mask]).all()
