"""Shortest times of calls that take turns, so that a slow moment of the machine meets them all."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from math import inf
from time import perf_counter
from timeit import Timer

SAMPLE = 2e-4  # seconds of calls in a sample: it fits between two interruptions
TURN = 4e-3  # seconds of samples in a turn
SLOW = 1e-2  # a call of so many seconds finds nothing in the caches, and needs no warming


class Inside:
    """A call that is made, and timed, inside a context: entering it is not timed."""

    def __init__(self, call: Callable[[], object], around: Callable[[], AbstractContextManager]):
        self.call = call
        self.around = around

    def __call__(self) -> object:
        with self.around():
            return self.call()


def shortest_times(calls: Mapping[str, Callable[[], object]], seconds: float) -> dict[str, float]:
    """The shortest time of each call, in seconds, from turns that take about `seconds` in all."""
    turns = {name: _Turn(call) for name, call in calls.items()}
    stop = perf_counter() + seconds
    for count in range(10**9):
        if count >= 2 and perf_counter() > stop:
            break
        for turn in turns.values():
            turn.take()
    return {name: turn.best for name, turn in turns.items()}


class _Turn:
    def __init__(self, call: Callable[[], object]):
        self.around = call.around if isinstance(call, Inside) else nullcontext
        self.call = call.call if isinstance(call, Inside) else call
        self.timer = Timer(self.call)
        with self.around():
            self.call()  # compiles, and touches every page
            once = self.timer.timeit(1)
            if once < SLOW:
                once = min(self.timer.repeat(3, 1))
        self.number = max(1, int(SAMPLE / once))
        self.slow = once > SLOW
        self.best = inf

    def take(self) -> None:
        with self.around():
            if not self.slow:
                self.call()  # brings its code and data back into the caches
            stop = perf_counter() + TURN
            while True:
                self.best = min(self.best, self.timer.timeit(self.number) / self.number)
                if perf_counter() > stop:
                    return
