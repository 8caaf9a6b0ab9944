"""From a checked call on Dask arrays to a graph: nothing is computed here."""

from functools import partial

import dask.array as da
import numpy as np

from ..cpu.work import native
from . import blocks

SPLIT_EVERY = 8
"""About how many parts of dweight or dbias a task adds up. Stated, so that Dask's configuration changes no bit."""


def forward(call):
    """y, residual_out, mean and rstd of a checked call, None where they are not asked for."""
    plan, x, axes = call.plan, call.x, call.axes
    results = _map(
        blocks.norm_forward,
        (x, call.residual, call.weight, call.bias),
        centered=plan.centered,
        axes=axes,
        eps=call.eps,
        weight_offset=call.weight_offset,
        rounding=plan.rounding,
        stats=plan.rstd is not None,
        fused=plan.other is not None,
    )
    kept = x.chunks[: x.ndim - axes] + ((1,),) * axes
    y = _take(results, 0, x.chunks, native(x.dtype))
    total = _take(results, 1, x.chunks, native(x.dtype)) if plan.other else None
    mean = _take(results, 2, kept, np.float64) if plan.mean else None
    rstd = _take(results, 3, kept, np.float64) if plan.rstd else None
    return y, total, mean, rstd


def backward(call):
    """dx, dweight and dbias of a checked call, None where they are masked out."""
    x, axes = call.x, call.axes
    results = _map(
        blocks.norm_backward,
        (call.dy, x, call.weight, call.mean, call.rstd, call.dresidual),
        centered=call.plan.centered,
        axes=axes,
        eps=call.eps,
        weight_offset=call.weight_offset,
        mask=call.mask,
    )
    dtype = native((x if call.weight is None else call.weight).dtype)
    lead = x.ndim - axes
    dx = _take(results, 0, x.chunks, native(x.dtype)) if call.mask[0] else None
    dweight, dbias = (
        _add_up(results, i, lead, x.chunks, dtype) if call.mask[i] else None for i in (1, 2)
    )
    return dx, dweight, dbias


def jvp(call):
    """dy of a checked call."""
    x = call.x
    return _map(
        blocks.norm_jvp,
        (x, call.weight, call.dx, call.dweight, call.dbias),
        centered=call.normalized.centered,
        axes=call.axes,
        eps=call.eps,
        weight_offset=call.weight_offset,
    )


def _map(function, arrays, **options):
    """An array whose chunks are what `function` returns, an array or a tuple, for each chunk of x."""
    x = arrays[0]
    dtype = native(x.dtype)
    return da.map_blocks(function, *arrays, dtype=dtype, meta=_meta(x.ndim, dtype), **options)


def _take(results, index, chunks, dtype, new_axis=None):
    meta = _meta(len(chunks), dtype)
    return da.map_blocks(
        blocks.norm_result, results, index, dtype=dtype, chunks=chunks, new_axis=new_axis, meta=meta
    )


def _add_up(results, index, lead, chunks, dtype):
    """The parts of a gradient in all chunks, added up in a tree that follows from the chunks alone."""
    shape = chunks[lead:]
    ones = tuple((1,) * len(sizes) for sizes in chunks[:lead])
    parts = _take(results, index, (*ones, (2,), *shape), np.float64, new_axis=lead)
    axis = tuple(range(lead + 1))
    return da.reduction(
        parts,
        name="dweight" if index == 1 else "dbias",
        chunk=blocks.unchanged,
        combine=blocks.add_pairs,
        aggregate=partial(blocks.round_pairs, gradient_dtype=dtype),
        axis=axis,
        dtype=dtype,
        split_every=dict.fromkeys(axis, max(2, int(SPLIT_EVERY ** (1 / max(1, lead))))),
        meta=_meta(len(shape), dtype),
    )


def _meta(ndim, dtype):
    """What Dask takes for a sample of the chunks, so that it calls no function to see one."""
    return np.empty((0,) * ndim, dtype)
