"""What the machine offers: CPUs and caches. Nothing here imports Numba."""

import math
import os
import platform
from functools import cache
from glob import glob

LARGEST_SHARE = 2**26
"""Bytes of the largest cache that one process can count on: where it is larger, dozens of cores share it. On two of an
Intel Xeon's with 504 MB, gradients of 8192 x 768 float32 (three arrays of 24 MB) took 3.1 to 5.3 ms with ordinary
stores, as the neighbours liked, and 3.3 past the cache; LayerNorm of 4096 x 4096 took 6.2 to 9.1 and 5.3."""


def streaming_size() -> float:
    """Bytes from which an output is better written past the cache: half of the largest cache's, or of a share in it."""
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return math.inf  # only x86-64 has the instructions that kernels use for it
    sizes = [_read_size(path) for path in glob("/sys/devices/system/cpu/cpu0/cache/index*/size")]
    return min(max(sizes, default=0) or 2**25, LARGEST_SHARE) // 2


def _read_size(path: str) -> int:
    try:
        with open(path) as file:
            return int(file.read().strip().removesuffix("K")) * 1024
    except (OSError, ValueError):
        return 0


def usable_cpus() -> int:
    """How many CPUs this process may use: its affinity, and no more than the container's quota."""
    count, quota = affine_cpus(), _cgroup_quota()
    return count if quota is None else max(1, min(count, quota))


def affine_cpus() -> int:
    """How many CPUs this process may use by its affinity alone."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


@cache
def _cgroup_quota() -> int | None:
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


def _cgroup_folders() -> list[str]:
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
