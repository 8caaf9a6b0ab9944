"""Where a row begins, along any number of lead axes: kernels take their lengths and strides as tuples.

A tuple of n is n parameters of a kernel. Axes are cut off from the last one on, function by function,
so that no index is left to run time.
"""

from .vectors import device


def make_place(lead):
    """place(row, lengths): the indices of a row along `lead` axes, the last of which runs fastest."""
    if lead == 1:

        @device
        def place(row, lengths):
            return (row,)

        return place

    outer_place = make_place(lead - 1)

    @device
    def place(row, lengths):
        rest = row // lengths[-1]
        return outer_place(rest, lengths[:-1]) + (row - rest * lengths[-1],)

    return place


def make_row_start(lead):
    """row_start(base, place, strides, size): the address at indices along `lead` axes, strides in elements."""
    if lead == 1:

        @device
        def row_start(base, place, strides, size):
            return base + place[0] * strides[0] * size

        return row_start

    outer_start = make_row_start(lead - 1)

    @device
    def row_start(base, place, strides, size):
        return outer_start(base + place[-1] * strides[-1] * size, place[:-1], strides[:-1], size)

    return row_start
