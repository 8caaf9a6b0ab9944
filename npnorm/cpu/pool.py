"""A small pool of Python threads that run kernels, which release the GIL.

Numba's own threading layers abort the process when two threads call at once, or after a fork. This
pool starts at the first call that needs it, is shared by all callers, starts anew in a forked
child, and runs serially when entered from one of its own threads.
"""

import os
import threading
from collections import deque
from queue import SimpleQueue


class _Pool:
    def __init__(self):
        self.queue: SimpleQueue[_Batch] = SimpleQueue()
        self.threads = []
        self.lock = threading.Lock()

    def grow(self, count):
        with self.lock:
            while len(self.threads) < count:
                name = f"npnorm-{len(self.threads)}"
                thread = threading.Thread(target=_serve, args=(self.queue,), name=name, daemon=True)
                thread.start()
                self.threads.append(thread)


class _Batch:
    """Calls of one function that any thread may take, and what became of them."""

    def __init__(self, function, jobs):
        self.function = function
        self.jobs = deque(jobs)
        self.left = len(self.jobs)
        self.lock = threading.Lock()
        self.finished = threading.Lock()
        self.finished.acquire()
        self.error = None

    def work(self):
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


def run(function, jobs, threads):
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
    batch.work()
    batch.finished.acquire()
    if batch.error is not None:
        raise batch.error


def _serve(queue):
    _here.serving = True
    while True:
        queue.get().work()


def _reset():
    global _pool
    _pool = _Pool()


_here = threading.local()
_pool = _Pool()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_reset)


def usable_cpus():
    """How many CPUs this process may use: its affinity, and no more than the container's quota."""
    affinity = getattr(os, "sched_getaffinity", None)
    count = len(affinity(0)) if affinity else os.cpu_count() or 1
    quota = _cgroup_quota()
    return count if quota is None else max(1, min(count, quota))


def _cgroup_quota():
    """The CPUs that the container's quota amounts to, rounded up; None without one. cgroup v2, then v1."""
    quotas = []
    for folder in _cgroup_folders():
        try:
            with open(f"{folder}/cpu.max") as file:
                quota, period = file.read().split()
        except (OSError, ValueError):
            try:
                with open(f"{folder}/cpu.cfs_quota_us") as file:
                    quota = file.read()
                with open(f"{folder}/cpu.cfs_period_us") as file:
                    period = file.read()
            except OSError:
                continue
        try:
            if int(quota) > 0:
                quotas.append(-(-int(quota) // int(period)))
        except ValueError:  # "max": no quota
            continue
    return min(quotas, default=None)


def _cgroup_folders():
    """Every folder from this process's control group up to the root: the narrowest quota counts."""
    root = "/sys/fs/cgroup"
    folders = [root, f"{root}/cpu", f"{root}/cpu,cpuacct"]
    try:
        with open("/proc/self/cgroup") as file:
            lines = file.read().splitlines()
    except OSError:
        return folders
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "cpu", "cpu,cpuacct"):
            continue
        base = f"{root}/{controllers}".rstrip("/")
        while path.strip("/"):
            folders.append(base + path)
            path = os.path.dirname(path)
    return folders
