"""Ranges of rows through kernels: ordinary ones, and each extreme one through the kernel for those."""

from collections.abc import Sequence
from typing import Any

from .._plan import Plan
from .specialize import kernel


def run_forward(plan: Plan, phase: str, arguments: Sequence[Any], start: int, stop: int) -> None:
    """The forward kernel of a plan over rows start to stop."""
    run = kernel(plan, False, phase)
    while (start := run(*arguments, start, stop)) < stop:
        # An extreme row. With a residual, it has been added already.
        x, residual, weight, bias, total, *others = arguments
        extreme = kernel(plan._replace(other=None), True)
        if residual is None:
            start = extreme(*arguments, start, stop)
        else:
            start = extreme(total, None, weight, bias, None, *others, start, start + 1)
        if start == stop:
            return


def run_backward(plan: Plan, phase: str, arguments: Sequence[Any], start: int, stop: int) -> None:
    """A backward kernel of a plan over rows start to stop."""
    while start < stop:
        start = kernel(plan, False, phase)(*arguments, start, stop)
        if start < stop:
            extreme = kernel(plan, True, "" if phase == "stream" else phase)
            start = extreme(*arguments, start, stop)
