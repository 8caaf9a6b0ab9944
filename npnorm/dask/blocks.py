"""What runs in Dask's workers, on the NumPy arrays that chunks are. Each call keeps to its own thread."""

import math

import numpy as np

from .._backend import host_backend
from .._checks import format_of
from .._plan import plan_backward, plan_forward, plan_jvp
from .._threads import alone


def norm_forward(
    x, residual, weight, bias, *, centered, axes, eps, weight_offset, rounding, stats, fused
):
    """y, residual_out, mean and rstd of a chunk, as the CPU backend gives them."""
    axis = tuple(range(-axes, 0))
    options = axis, eps, weight_offset, rounding, None, None, stats, fused
    with alone():
        return host_backend().forward(plan_forward(centered, x, residual, weight, bias, *options))


def norm_backward(
    dy, x, weight, mean, rstd, dresidual, *, centered, axes, eps, weight_offset, mask
):
    """dx of a chunk, and its parts of dweight and dbias: pairs of a float64 sum and what additions lost of it.

    The parts have a lead axis of length 1 for each of the chunk's.
    """
    lead, shape = x.ndim - axes, x.shape[x.ndim - axes :]
    axis = tuple(range(-axes, 0))
    options = axis, eps, weight_offset, dresidual, mask, None
    call = plan_backward(centered, dy, x, weight, mean, rstd, *options)
    parts = [np.zeros((2, *shape)) if wanted else None for wanted in mask[1:]]
    # The plan stays that of an `out` of weight's dtype: a float64 one would change dx.
    dweight, dbias = (None if part is None else part[0] for part in parts)
    with alone():
        dx, *_ = host_backend().backward(call._replace(out=(None, dweight, dbias)))
    return dx, *(part if part is None else part.reshape((1,) * lead + part.shape) for part in parts)


def norm_jvp(x, weight, dx, dweight, dbias, *, centered, axes, eps, weight_offset):
    """dy of a chunk, as the CPU backend gives it."""
    options = tuple(range(-axes, 0)), eps, weight_offset, None
    with alone():
        return host_backend().jvp(plan_jvp(centered, x, weight, dx, dweight, dbias, *options))


def norm_result(results, index):
    """One of a chunk's results."""
    return results[index]


def unchanged(pairs, axis=None, keepdims=None):
    """What Dask wants to do to each chunk before a reduction."""
    return pairs


def add_pairs(pairs, axis, keepdims=True):
    """The pairs of several chunks, in the order of the chunks, as one."""
    lead = len(axis) - 1
    shape = pairs.shape[lead:]
    pairs = pairs.reshape(math.prod(pairs.shape[:lead]), *shape)
    total = pairs[0].copy()
    high, low = total
    with np.errstate(all="ignore"):  # as IEEE says, without a warning
        for more, more_low in pairs[1:]:
            exactly = high + more
            rest = exactly - high
            low += (high - (exactly - rest)) + (more - rest) + more_low
            high[...] = exactly
    return total.reshape((1,) * lead + shape)


def round_pairs(pairs, axis, keepdims=False, *, gradient_dtype):
    """The gradient that the pairs add up to, rounded once to its dtype."""
    total = add_pairs(pairs, axis)
    gradient = np.empty(total.shape[len(axis) :], gradient_dtype)
    if gradient.size:
        host_backend()  # which imports Numba as no fork may interrupt it
        from ..cpu.specialize import total_kernel

        # Not NumPy's conversion, which takes two roundings to bfloat16.
        total_kernel(True, format_of(gradient.dtype))(total, gradient, 1, total.size, gradient.size)
    return gradient
