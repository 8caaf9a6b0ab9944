"""Launches that copy between device arrays of any layout, for what the norms' kernels cannot take as it is."""

import math
from collections.abc import Iterator
from typing import NamedTuple

from .._checks import format_of
from .arrays import DeviceArray
from .layout import is_aligned, merged, parts_of
from .table import Launch

AXES = 4
"""How many axes one launch walks. Arrays that need more, which are rare, take a launch for each index of the others."""

THREADS, MOST_BLOCKS = 256, 2**16


class Copy(NamedTuple):
    """A compiled kernel that copies, and converts to float64 if formats differ."""

    kind: str
    source: str
    source_swapped: bool
    """Whether the byte order is not the device's."""
    target: str
    target_swapped: bool
    aligned: bool
    """Whether every element lies at a multiple of its size; else bytes are moved one by one."""
    threads: int = THREADS


def copies(source: DeviceArray, target: DeviceArray) -> Iterator[tuple[Launch, tuple[int, ...]]]:
    """The launches, and their arguments, that copy an array into another of the same shape.

    Parameters of the kernel: the addresses of source and target, the lengths of four axes, the strides in bytes of the
    source along them, those of the target.
    """
    spec = Copy(
        "copy",
        _format(source),
        not source.dtype.isnative,
        _format(target),
        not target.dtype.isnative,
        is_aligned(source) and is_aligned(target),
    )
    axes = merged(source.shape, (source.strides, target.strides))
    for offsets, taken in parts_of(axes, 2, AXES):
        lengths = [length for length, _ in taken]
        strides = [[steps[array] for _, steps in taken] for array in range(2)]
        blocks = min(-(-math.prod(lengths) // THREADS), MOST_BLOCKS)
        pointers = source.pointer + offsets[0], target.pointer + offsets[1]
        launch = Launch(spec, (blocks, 1, 1), (THREADS, 1, 1), 0)  # type: ignore[arg-type]  # a spec of our own
        yield launch, (*pointers, *lengths, *strides[0], *strides[1])


def _format(array: DeviceArray) -> str:
    found = format_of(array.dtype)
    assert found is not None  # the plan has seen to it
    return found
