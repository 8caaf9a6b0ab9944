"""A small pool of Python threads that run kernels, which release the GIL.

Numba's own threading layers abort the process when two threads call at once, or after a fork. This
pool starts at the first call that needs it, is shared by all callers, starts anew in a forked
child, and runs serially when entered from one of its own threads.
"""

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from queue import SimpleQueue
from typing import Any


class _Pool:
    def __init__(self) -> None:
        self.queue: SimpleQueue[_Batch] = SimpleQueue()
        self.threads: list[threading.Thread] = []
        self.lock = threading.Lock()

    def grow(self, count: int) -> None:
        with self.lock:
            while len(self.threads) < count:
                name = f"npnorm-{len(self.threads)}"
                thread = threading.Thread(target=_serve, args=(self.queue,), name=name, daemon=True)
                try:
                    thread.start()
                except RuntimeError:  # no more threads, or the interpreter ends: fewer will do
                    return
                self.threads.append(thread)


class _Batch:
    """Calls of one function that any thread may take, and what became of them."""

    def __init__(self, function: Callable[..., Any], jobs: Iterable[Sequence[Any]]) -> None:
        self.function = function
        self.jobs = deque(jobs)
        self.left = len(self.jobs)
        self.lock = threading.Lock()
        self.finished = threading.Lock()
        self.finished.acquire()
        self.error: BaseException | None = None
        self.helpers = 0

    def work(self) -> None:
        while True:
            try:
                job = self.jobs.popleft()
            except IndexError:
                return
            try:
                if self.error is None:
                    self.function(*job)
            except BaseException as error:
                self.error = error
            with self.lock:
                self.left -= 1
                if self.left == 0:
                    self.finished.release()

    def help(self) -> None:
        with self.lock:
            self.helpers += 1
        try:
            self.work()
        finally:
            with self.lock:
                self.helpers -= 1

    def give_up(self) -> None:
        """Drop the jobs that nobody has begun, and wait for the others."""
        self.jobs.clear()
        while self.helpers:
            time.sleep(1e-3)


def run(function: Callable[..., Any], jobs: Sequence[Sequence[Any]], threads: int) -> None:
    """Call function(*job) for every job, on up to `threads` threads, and return when all are done."""
    if threads == 1 or len(jobs) == 1 or getattr(_here, "serving", False):
        for job in jobs:
            function(*job)
        return
    helpers = min(threads, len(jobs)) - 1
    pool = _pool
    pool.grow(helpers)
    batch = _Batch(function, jobs)
    for _ in range(helpers):
        pool.queue.put(batch)
    try:
        batch.work()
        batch.finished.acquire()
    except BaseException:  # Ctrl-C: return when nobody writes any more
        batch.give_up()
        raise
    error, batch.error = batch.error, None  # else they keep each other, and all arrays
    try:
        if error is not None:
            raise error
    finally:
        del error


def _serve(queue: "SimpleQueue[_Batch]") -> None:
    _here.serving = True
    while True:
        queue.get().help()


def _reset() -> None:
    global _pool
    _pool = _Pool()


_here = threading.local()
_pool = _Pool()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_reset)
