"""What the public functions share: types, the lane of simple calls, outputs that were given."""

from typing import Any

from .._results import Array

Axis = int | tuple[int, ...]
Mask = tuple[bool, bool, bool]
GradientsOut = tuple[Array | None, Array | None, Array | None]


def given_or_new(out: tuple[Array | None, ...] | None, results: tuple[Array | None, ...]) -> tuple[Array | None, ...]:
    """The outputs a caller gave, as those very objects, and the results where none were given."""
    if out is None:
        return results
    return tuple(
        result if given is None else given for given, result in zip(out, results, strict=True)
    )


def is_simple(axis: Any, weight_offset: Any, round_before_weight: Any, return_stats: Any) -> bool:
    """Whether the options of a forward call are the usual ones, exactly."""
    return (
        return_stats is False
        and round_before_weight is False
        and type(axis) is int
        and axis == -1
        and type(weight_offset) is float
        and weight_offset == 0.0
    )
