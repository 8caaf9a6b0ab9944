"""Device arrays as kernels take them: rows of contiguous columns, along as few lead axes as all arrays allow."""

import itertools
import math
from collections.abc import Iterator, Sequence

from .arrays import DeviceArray
from .table import BYTES, SWAPPED, WHOLE

ACCESS = 16  # bytes of the largest memory access

Axis = tuple[int, tuple[int, ...]]
"""The length of an axis, and its stride in bytes in each of several arrays."""


def merged(shape: Sequence[int], strides: Sequence[Sequence[int]]) -> list[Axis]:
    """The fewest axes along which all arrays, of one shape, have their elements in the same order."""
    axes: list[Axis] = []
    for length, steps in zip(shape, zip(*strides, strict=True), strict=True):
        if length == 1:
            continue
        if axes and axes[-1][1] == tuple(length * step for step in steps):
            axes[-1] = axes[-1][0] * length, steps
        else:
            axes.append((length, steps))
    return axes


def is_aligned(array: DeviceArray) -> bool:
    """Whether its elements lie at multiples of their size."""
    if array.pointer % array.itemsize:
        return False
    return not any(
        stride % array.itemsize for length, stride in zip(array.shape, array.strides, strict=True) if length > 1
    )


def is_plain(array: DeviceArray) -> bool:
    """Whether its elements can be read at once: aligned, in native byte order."""
    return array.dtype.isnative and is_aligned(array)


def accesses(arrays: Sequence[DeviceArray | None]) -> tuple[str, ...]:
    """How kernels access the elements of several arrays: see `table.Spec.access`."""
    return tuple(
        WHOLE if array is None or is_plain(array) else BYTES if array.dtype.isnative else SWAPPED for array in arrays
    )


def has_rows(array: DeviceArray, axes: int) -> bool:
    """Whether the last `axes` axes are one run of contiguous elements."""
    inner = merged(array.shape[-axes:], [array.strides[-axes:]])
    return not inner or (len(inner) == 1 and inner[0][1] == (array.itemsize,))


def lead_axes(arrays: Sequence[DeviceArray | None], axes: int) -> list[Axis]:
    """The axes of the rows of several arrays of one shape; the strides of None are 0."""
    shape = next(array.shape for array in arrays if array is not None)[:-axes]
    nothing = (0,) * len(shape)
    return merged(shape, [nothing if array is None else array.strides[:-axes] for array in arrays])


def reach(array: DeviceArray) -> tuple[int, int]:
    """The first byte and the end of an array's memory, counted from its address."""
    if not array.size:
        return 0, 0
    steps = [(length - 1) * stride for length, stride in zip(array.shape, array.strides, strict=True)]
    return sum(step for step in steps if step < 0), sum(step for step in steps if step > 0) + array.itemsize


def steps_of(lead: list[Axis], arrays: Sequence[DeviceArray | None]) -> tuple[int, tuple[int, ...]]:
    """How many lead axes a kernel takes, and its arguments: their lengths, then each array's strides in elements,
    or in bytes where elements are not accessed at once.

    A power of two, so that few kernels are compiled: more axes have length 1. Absent arrays have strides of 0.
    """
    count = 1 << max(0, len(lead) - 1).bit_length()
    nothing: Axis = (1, (0,) * len(arrays))
    axes = [nothing] * (count - len(lead)) + lead
    sizes = [1 if array is None or not is_plain(array) else array.itemsize for array in arrays]
    strides = [steps[i] // size for i, size in enumerate(sizes) for _, steps in axes]
    return count, (*(length for length, _ in axes), *strides)


def parts_of(axes: list[Axis], arrays: int, kept: int) -> Iterator[tuple[tuple[int, ...], list[Axis]]]:
    """Cut so that `kept` axes are left: of each part, its offset in bytes in each array, and its axes."""
    nothing: Axis = (1, (0,) * arrays)
    taken = ([nothing] * kept + axes)[-kept:]
    rest = axes[:-kept]
    for index in itertools.product(*(range(length) for length, _ in rest)):
        steps = [[i * step for step in strides] for i, (_, strides) in zip(index, rest, strict=True)]
        yield tuple(sum(offsets) for offsets in zip(nothing[1], *steps, strict=True)), taken


def width(
    x: DeviceArray, cols: int, arrays: Sequence[DeviceArray | None], lead: list[Axis],
    vectors: Sequence[DeviceArray | None],
) -> int:  # fmt: skip
    """How many elements a memory access takes, which the addresses and strides of all arrays decide."""
    elements = math.gcd(ACCESS // x.itemsize, cols) if {*accesses(arrays)} == {WHOLE} else 1
    places = [(array.itemsize, [array.pointer]) for array in vectors if array is not None]
    for number, array in enumerate(arrays):
        if array is not None:
            places.append((array.itemsize, [array.pointer, *(steps[number] for _, steps in lead)]))
    while elements > 1 and any(
        value % min(ACCESS, elements * itemsize) for itemsize, values in places for value in values
    ):
        elements //= 2
    return elements
