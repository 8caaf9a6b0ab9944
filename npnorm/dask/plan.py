"""The arguments of a call on Dask arrays, checked by their shapes and dtypes, and their chunks brought in line.

The checks are those of `npnorm._plan`: it gets stand-ins, arrays of a Dask array's shape and dtype without memory.
"""

import math
from typing import Any

import dask.array as da
import numpy as np

from .. import _plan
from .._checks import format_of, shown, trailing_axes
from .._plan import Backward, Derivative, Forward

Array = Any
"""A Dask or NumPy array."""

Chunks = tuple[tuple[float, ...], ...]


def plan_forward(
    centered: bool,
    x: Any,
    residual: Any,
    weight: Any,
    bias: Any,
    axis: Any,
    eps: Any,
    weight_offset: Any,
    round_before_weight: Any,
    out: Any,
    residual_out: Any,
    return_stats: Any,
    fused: bool = False,
    *,
    stream: Any = None,
) -> Forward:
    """Check the arguments of a forward function; the call has Dask arrays of the same chunks."""
    _refuse_option("stream", stream)
    _refuse("out", out)
    _refuse("residual_out", residual_out)
    rows = {"x": x, "residual": residual}
    vectors = {"weight": weight, "bias": bias}
    seen = _stand_ins(rows, vectors, axis)
    call = _plan.plan_forward(
        centered, seen["x"], seen["residual"], seen["weight"], seen["bias"], axis, eps, weight_offset,
        round_before_weight, None, None, return_stats, fused,
    )  # fmt: skip
    return call._replace(**_aligned(call, rows, vectors))


def plan_backward(
    centered: bool,
    dy: Any,
    x: Any,
    weight: Any,
    mean: Any,
    rstd: Any,
    axis: Any,
    eps: Any,
    weight_offset: Any,
    dresidual: Any,
    output_mask: Any,
    out: Any,
    *,
    stream: Any = None,
    workspace: Any = None,
) -> Backward:
    """Check the arguments of a backward function; the call has Dask arrays of the same chunks."""
    _refuse_option("stream", stream)
    _refuse_option("workspace", workspace)
    _refuse("out", out)
    rows = {"x": x, "dy": dy, "dresidual": dresidual, "mean": mean, "rstd": rstd}
    vectors = {"weight": weight}
    seen = _stand_ins(rows, vectors, axis)
    call = _plan.plan_backward(
        centered, seen["dy"], seen["x"], seen["weight"], seen["mean"], seen["rstd"], axis, eps, weight_offset,
        seen["dresidual"], output_mask, None,
    )  # fmt: skip
    if call.dresidual is None:  # masked out
        del rows["dresidual"]
    return call._replace(**_aligned(call, rows, vectors))


def plan_jvp(
    centered: bool,
    x: Any,
    weight: Any,
    dx: Any,
    dweight: Any,
    dbias: Any,
    axis: Any,
    eps: Any,
    weight_offset: Any,
    out: Any,
) -> Derivative:
    """Check the arguments of a directional derivative; the call has Dask arrays of the same chunks."""
    _refuse("out", out)
    rows = {"x": x, "dx": dx}
    vectors = {"weight": weight, "dweight": dweight, "dbias": dbias}
    seen = _stand_ins(rows, vectors, axis)
    call = _plan.plan_jvp(
        centered, seen["x"], seen["weight"], seen["dx"], seen["dweight"], seen["dbias"], axis, eps,
        weight_offset, None,
    )  # fmt: skip
    return call._replace(**_aligned(call, rows, vectors))


def _refuse_option(name: str, value: Any) -> None:
    if value is not None:
        raise ValueError(
            f"`{name}` must be None for Dask arrays, it is for arrays on a CUDA device; got {shown(value)}: "
            f"leave it out"
        )


def _refuse(name: str, output: Any) -> None:
    if output is not None:
        raise ValueError(
            f"`{name}` must be None for Dask arrays, whose results are computed later; got "
            f"{type(output).__name__}: use the result, or store it with dask.array.store"
        )


def _stand_ins(rows: dict[str, Any], vectors: dict[str, Any], axis: Any) -> dict[str, Any]:
    """The arguments for the checks, arrays without memory in place of Dask arrays.

    Where the length of a lead axis is not known, all of them have 1.
    """
    x = rows["x"]
    arrays = {**rows, **vectors}
    lazy = {name: array for name, array in arrays.items() if isinstance(array, da.Array)}
    first = x.ndim - trailing_axes(axis, x.ndim) if "x" in lazy else math.inf
    unknown: set[int] = set()
    for name, array in lazy.items():
        _check_dtype_and_kind(name, array)
        places = {i for i, length in enumerate(array.shape) if math.isnan(length)}
        if places and (name in vectors or max(places) >= first):
            raise ValueError(
                f"`{name}` must be of known lengths on the normalized axes; got shape {array.shape}: call "
                f"{name}.compute_chunk_sizes() before"
            )
        unknown |= places
    if unknown:
        for name, array in rows.items():
            if array is not None and name not in lazy:
                raise ValueError(_unlike(name, type(array).__name__))

    def stand_in(name: str, array: Any) -> Any:
        if name not in lazy:
            return array
        hidden = unknown if name in rows else ()
        shape = tuple(1 if i in hidden else length for i, length in enumerate(array.shape))
        return np.broadcast_to(np.empty((), array.dtype), shape)

    return {name: stand_in(name, array) for name, array in arrays.items()}


def _check_dtype_and_kind(name: str, array: Array) -> None:
    """What stand-ins can not show, and what a Dask array's owner does about it without loading the array."""
    if format_of(array.dtype) is None:
        remedy = f"write {name}.astype(np.float32)"
        if array.dtype.kind == "c":
            remedy = "norm its real and imaginary parts, or its absolute value"
        raise TypeError(
            f"`{name}` must have dtype float16, bfloat16, float32 or float64; got {array.dtype}: {remedy}"
        )
    kind = type(array._meta)
    masked = issubclass(kind, np.ma.MaskedArray)
    if masked or not issubclass(kind, np.ndarray):
        remedy = f"write dask.array.ma.filled({name}, 0)" if masked else f"convert them with {name}.map_blocks"
        raise TypeError(
            f"`{name}` must have chunks that are NumPy arrays; got chunks of {kind.__module__}.{kind.__qualname__}: "
            + remedy
        )


def _unlike(name: str, got: object) -> str:
    return (
        f"`{name}` must be a Dask array in the same chunks as the others where the sizes of chunks are not known; "
        f"got {got}: call compute_chunk_sizes() on each before"
    )


def _aligned(
    call: Forward | Backward | Derivative, rows: dict[str, Any], vectors: dict[str, Any]
) -> dict[str, Any]:
    """The arrays of a call as Dask arrays: rows in the chunks of x, vectors in one."""
    given = {
        name: array if isinstance(array, da.Array) else getattr(call, name)
        for name, array in {**rows, **vectors}.items()
    }
    x, axes = given["x"], call.axes
    if not isinstance(x, da.Array):
        lazy = (a.chunks for a in given.values() if isinstance(a, da.Array) and a.shape == x.shape)
        x = da.from_array(x, next(lazy, "auto"))
    given["x"] = x = _whole_rows(x, axes)
    kept = x.chunks[: x.ndim - axes] + ((1,),) * axes
    return {
        name: array
        if array is None
        else _one_chunk(array)
        if name in vectors
        else _in_chunks(name, array, kept if name in ("mean", "rstd") else x.chunks, axes)
        for name, array in given.items()
    }


def _whole_rows(x: Array, axes: int) -> Array:
    """x with rows in one chunk each: of fewer rows where need be, so that chunks do not grow."""
    lead = x.ndim - axes
    if all(count == 1 for count in x.numblocks[lead:]):
        return x
    chunks: dict[int, Any] = dict.fromkeys(range(lead, x.ndim), -1)
    if _has_unknown(x.chunks):
        return x.rechunk(chunks)
    chunks |= dict.fromkeys(range(lead), "auto")
    largest = math.prod(max(sizes) for sizes in x.chunks) * x.dtype.itemsize
    return x.rechunk(chunks, block_size_limit=max(1, largest))


def _in_chunks(name: str, array: Array, chunks: Chunks, axes: int) -> Array:
    """An array in the chunks that x has along its axes; Dask itself can not cut where it knows no sizes."""
    if not isinstance(array, da.Array):
        return da.from_array(array, chunks)
    if not (_has_unknown(array.chunks) or _has_unknown(chunks)):
        return array.rechunk(chunks)
    array = _whole_rows(array, axes)
    if array.numblocks != tuple(map(len, chunks)) or not all(
        np.array_equal(sizes, wanted, equal_nan=True)
        for sizes, wanted in zip(array.chunks, chunks, strict=True)
    ):
        raise ValueError(_unlike(name, f"chunks {array.chunks}"))
    return array


def _has_unknown(chunks: Chunks) -> bool:
    return any(math.isnan(size) for sizes in chunks for size in sizes)


def _one_chunk(vector: Array) -> Array:
    """A weight or bias in one chunk; a NumPy array as it is now, whatever is written to it later."""
    if isinstance(vector, da.Array):
        return vector.rechunk(-1)
    return da.from_array(np.array(vector), -1)
