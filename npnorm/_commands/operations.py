"""What the commands have in common: operations and dtypes by name, and progress. Nothing here imports Numba."""

import sys
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

import numpy as np

OPERATIONS = (
    "layer_norm",
    "rms_norm",
    "layer_norm_backward",
    "rms_norm_backward",
    "add_layer_norm",
    "add_rms_norm",
)
DTYPES = ("float16", "bfloat16", "float32", "float64")

Item = TypeVar("Item")


def is_centered(operation: str) -> bool:
    return "layer_norm" in operation


def numpy_dtype(name: str) -> np.dtype[Any]:
    """The dtype of a name; ValueError if there is none."""
    if name not in DTYPES:
        raise ValueError(f"invalid choice: {name!r} (choose from {', '.join(DTYPES)})")
    if name != "bfloat16":
        return np.dtype(name)
    try:
        from ml_dtypes import bfloat16
    except ImportError:
        raise ValueError("bfloat16 needs a package: python -m pip install ml_dtypes") from None
    found: np.dtype[Any] = np.dtype(bfloat16)
    return found


def all_dtypes() -> list[np.dtype[Any]]:
    """The supported dtypes that there are: bfloat16 may be missing."""
    found = []
    for name in DTYPES:
        try:
            found.append(numpy_dtype(name))
        except ValueError:
            continue
    return found


def with_progress(items: Iterable[tuple[str, Item]]) -> Iterator[Item]:
    """The items, each announced by its label on stderr: in a bar on a terminal, in lines elsewhere."""
    items = list(items)
    bar = sys.stderr.isatty()
    for done, (label, item) in enumerate(items):
        if bar:
            filled = 30 * done // len(items)
            line = f"\r[{'#' * filled}{' ' * (30 - filled)}] {done}/{len(items)} {label}\x1b[K"
        else:
            line = f"{done + 1}/{len(items)} {label}\n"
        print(line, end="", file=sys.stderr, flush=True)
        yield item
    if bar:
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)
