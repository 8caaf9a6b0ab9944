"""Ranges of rows through kernels: ordinary ones, and each extreme one through the kernel for those."""

from collections.abc import Sequence
from typing import Any

from .._plan import Plan
from .specialize import kernel
from .work import spread

Arguments = Sequence[Any]
"""What a kernel takes before the range of rows: arrays, eps and the number of columns."""


def run(plan: Plan, phase: str, arguments: Arguments, start: int, stop: int) -> None:
    """A kernel of a plan over rows start to stop."""
    reached = kernel(plan, False, phase)(*arguments, start, stop)
    if reached < stop:
        finish(plan, phase, arguments, reached, stop)


def run_shared(plan: Plan, phase: str, jobs: Sequence[tuple[Any, ...]]) -> None:
    """The same for jobs (*arguments, start, stop), shared out over the threads there are.

    Each is a single call of compiled code: between two calls a thread waits for the GIL.
    """
    ended = spread(kernel(plan, False, phase), jobs)
    left = [(plan, phase, job[:-2], reached, job[-1]) for job, reached in ended if reached < job[-1]]
    if left:
        spread(finish, left)


def finish(plan: Plan, phase: str, arguments: Arguments, start: int, stop: int) -> None:
    """Rows from `start` on, an extreme one, at which the ordinary kernel has stopped."""
    ordinary = kernel(plan, False, phase)
    if plan.backward:
        extreme = kernel(plan, True, "" if phase == "stream" else phase)
    else:
        extreme = kernel(plan._replace(other=None), True)
    while start < stop:
        if plan.backward or plan.other is None:
            start = extreme(*arguments, start, stop)
        else:  # the residual has been added already
            _, _, weight, bias, total, *others = arguments
            start = extreme(total, None, weight, bias, None, *others, start, start + 1)
        if start < stop:
            start = ordinary(*arguments, start, stop)
