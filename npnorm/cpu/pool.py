"""A small pool of Python threads that run kernels, which release the GIL.

Numba's own threading layers abort the process when two threads call at once, or after a fork. This
pool starts at the first call that needs it, is shared by all callers, starts anew in a forked
child, and runs serially when entered from one of its own threads.

A thread that has nothing left to do waits without sleep for a while, outside the GIL: waking it takes 15 to 50 µs, as
long as 2^17 elements.
"""

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from queue import SimpleQueue
from typing import Any, TypeAlias

import numpy as np

from .specialize import waiting_kernel

ROUNDS = 2000
"""How long a thread waits without sleep: 30 to 80 µs."""

MORE = 100
"""How long it goes on waiting when there is news, 2 to 4 µs: whoever brings them has the GIL for that long, and a
thread that waits for the GIL sleeps. Two threads with 37 µs of work each took 63 µs without, and take 45."""

Signal: TypeAlias = np.ndarray[Any, np.dtype[np.int64]]

_UNHEARD: Signal = np.zeros(1, np.int64)
"""What nobody waits for."""


class _Pool:
    def __init__(self) -> None:
        self.queue: SimpleQueue[_Batch] = SimpleQueue()
        self.threads: list[threading.Thread] = []
        self.lock = threading.Lock()
        self.batches = np.zeros(1, np.int64)
        """Another number whenever there is a new batch."""

    def put(self, batch: "_Batch", count: int) -> None:
        for _ in range(count):
            self.queue.put(batch)
        self.batches[0] += 1

    def get(self, ended: Signal) -> "_Batch":
        """The next batch; whoever waits for `ended` hears of it when this thread has left the GIL."""
        known = int(self.batches[0])
        rounds = ROUNDS if self.queue.empty() else 0
        waiting_kernel()(ended, self.batches, known, rounds, MORE)
        return self.queue.get()

    def grow(self, count: int) -> None:
        if len(self.threads) >= count:
            return
        with self.lock:
            while len(self.threads) < count:
                name = f"npnorm-{len(self.threads)}"
                thread = threading.Thread(target=_serve, args=(self,), name=name, daemon=True)
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
        self.ended: list[tuple[Any, Any]] = []
        self.left = len(self.jobs)
        self.lock = threading.Lock()
        self.finished = threading.Lock()
        self.finished.acquire()
        self.end = np.zeros(1, np.int64)
        self.error: BaseException | None = None
        self.helpers: list[None] = []

    def work(self) -> bool:
        """Do jobs until nobody has to begin one; whether this thread ended the last of all."""
        while True:
            try:
                job = self.jobs.popleft()
            except IndexError:
                return False
            try:
                if self.error is None:
                    self.ended.append((job, self.function(*job)))
            except BaseException as error:
                self.error = error
            with self.lock:
                self.left -= 1
                last = self.left == 0
            if last:
                self.finished.release()
                return True

    def wait(self) -> None:
        """Until all jobs are done."""
        waiting_kernel()(_UNHEARD, self.end, 0, ROUNDS, 0)
        self.finished.acquire()

    def help(self) -> Signal:
        """Work, and what is to be said then."""
        self.helpers.append(None)
        try:
            return self.end if self.work() else _UNHEARD
        finally:
            self.helpers.pop()

    def give_up(self) -> None:
        """Drop the jobs that nobody has begun, and wait for the others."""
        self.jobs.clear()
        while self.helpers:
            time.sleep(1e-3)


def run(function: Callable[..., Any], jobs: Sequence[Sequence[Any]], threads: int) -> list[tuple[Any, Any]]:
    """Call function(*job) for every job, on up to `threads` threads: (job, result) of each, in any order."""
    if threads == 1 or len(jobs) == 1 or _here.serving:
        return [(job, function(*job)) for job in jobs]
    helpers = min(threads, len(jobs)) - 1
    pool = _pool
    waiting_kernel()  # compiled here: threads of the pool only call it
    pool.grow(helpers)
    batch = _Batch(function, jobs)
    pool.put(batch, helpers)
    try:
        if not batch.work():
            batch.wait()
    except BaseException:  # Ctrl-C: return when nobody writes any more
        batch.give_up()
        raise
    error, batch.error = batch.error, None  # else they keep each other, and all arrays
    try:
        if error is not None:
            raise error
    finally:
        del error
    return batch.ended


def _serve(pool: _Pool) -> None:
    _here.serving = True
    ended = _UNHEARD
    while True:
        ended = pool.get(ended).help()


def _reset() -> None:
    global _pool
    _pool = _Pool()


class _Here(threading.local):
    serving = False  # found without an error, which would cost 0.3 µs


_here = _Here()
_pool = _Pool()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_reset)
