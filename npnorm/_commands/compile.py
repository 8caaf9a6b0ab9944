"""``npnorm compile``: fills the kernel cache ahead of time."""

import argparse
import os
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from .._api.common import Mask
from .._plan import Backward, Forward, plan_backward, plan_forward
from ..cpu import cache
from ..cpu.ahead import needed
from ..cpu.specialize import Key, build
from .operations import is_centered, with_progress

CPU_VARIABLES = "NUMBA_CPU_NAME", "NUMBA_CPU_FEATURES"


def run(options: argparse.Namespace) -> int:
    if options.cache_dir:
        # Absolute, since the process that reads it may stand in another folder.
        os.environ["NPNORM_CACHE_DIR"] = str(Path(options.cache_dir).absolute())
    folders = cache.folders()
    if not any(map(cache.is_writable, folders)):
        print(f"npnorm: cannot write to {' or '.join(map(str, folders))}", file=sys.stderr)
        return 1
    kernels = labelled_kernels(options)
    before = cache.outcomes.copy()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", RuntimeWarning)
        for key in with_progress((label, key) for key, label in kernels.items()):
            build(*key)
    for warning in caught:
        print(f"npnorm: {warning.message}", file=sys.stderr)
    saved, loaded = (cache.outcomes[o] - before[o] for o in ("saved", "loaded"))
    lost = len(kernels) - saved - loaded
    found = f"{len(kernels)} kernels: {saved} compiled, {loaded} found in the cache"
    print(found + (f", {lost} not saved" if lost else ""))
    for folder in folders:
        files = cache.files(folder)
        print(f"{folder}: {len(files)} files, {sum(files.values()) / 1e6:.1f} MB")
    if options.cache_dir:
        print(f"Set at run time: NPNORM_CACHE_DIR={os.environ['NPNORM_CACHE_DIR']}")
    for name in CPU_VARIABLES:
        if name in os.environ:
            print(f"Set at run time: {name}={os.environ[name]}")
    if os.environ.get(CPU_VARIABLES[0], "generic") != "generic" and CPU_VARIABLES[1] not in os.environ:
        # Numba then adds what this machine's CPU has: x86-64-v3 kernels were full of AVX-512.
        print(f"npnorm: these kernels need this machine's CPU: set {CPU_VARIABLES[1]}, too", file=sys.stderr)
    return 1 if lost else 0


def labelled_kernels(options: argparse.Namespace) -> dict[Key, str]:
    """The keys of all kernels that the chosen calls need, each with a label to show."""
    labels: dict[Key, str] = {}
    for operation in options.operations:
        for dtype in options.dtypes:
            for parameters in options.parameters:
                for call in checked_calls(
                    operation, dtype, options.weight_dtype or dtype, parameters, options.dresidual
                ):
                    for key in needed(call):
                        labels.setdefault(key, f"{operation} {dtype}")
    return labels


def checked_calls(
    operation: str, dtype: np.dtype[Any], weight_dtype: np.dtype[Any], parameters: str, dresidual: bool
) -> Iterator[Forward | Backward]:
    """Tiny calls of an operation, one for each plan that a user's ordinary calls have."""
    centered = is_centered(operation)
    if parameters == "usual":
        parameters = "weight+bias" if centered else "weight"
    x, vector, statistic = np.ones((1, 1), dtype), np.ones(1, weight_dtype), np.ones((1, 1))
    weight = None if parameters == "none" else vector
    if not operation.endswith("backward"):
        bias = vector if parameters == "weight+bias" else None
        fused = operation.startswith("add")
        residual = x if fused else None
        for return_stats in (False, True):
            yield plan_forward(
                centered, x, residual, weight, bias, -1, 1.0, 0.0, False, None, None, return_stats, fused
            )
        return
    masks: list[Mask | None] = [None]
    if parameters == "weight":
        masks.append((True, True, False))  # what a layer without bias asks for
    for mask in masks:
        for saved in (statistic, None):
            mean = saved if centered else None
            for added in (None, x) if dresidual else (None,):
                yield plan_backward(
                    centered, x, x, weight, mean, saved, -1, 1.0, 0.0, added, mask, None
                )
