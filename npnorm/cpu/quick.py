"""Small calls like one that was seen before: straight to the same kernel, without a plan.

A plan and a launch take 4 µs, as long as the norm of ten rows. What they would find out is known here by the
dtypes, once the arrays are seen to be plain: exactly NumPy's class, contiguous, aligned. Whatever
is not plain, errors too, takes the long way.
"""

import math

from numpy import empty, ndarray

from .specialize import kernel
from .work import SPLIT

PLAIN = 0x101
"""The flags C_CONTIGUOUS and ALIGNED."""

_forward: dict = {}
"""Kernels of simple forward calls, by norm and dtypes."""


def remember_forward(call):
    """Note the kernel of a call, if it is a simple one: no option but an epsilon, an output of x's dtype."""
    plan = call.plan
    if plan.rounding or plan.rstd or call.weight_offset or plan.out != plan.x:
        return
    dtypes = [None if a is None else a.dtype for a in (call.x, call.residual, call.weight, call.bias)]
    if all(dtype is None or dtype.isnative for dtype in dtypes):
        _forward[plan.centered, *dtypes] = kernel(plan)


def forward(centered, x, residual, weight, bias, eps, out):
    """y, or (y, residual_out) if there is a residual; None if this is no call for here."""
    if type(x) is not ndarray or type(eps) is not float:
        return None
    shape = x.shape
    dtype = x.dtype
    row_shape = shape[-1:]
    residual_dtype = weight_dtype = bias_dtype = None
    # Written out for weight and bias, which most calls have: a function would take 60 ns for each.
    if weight is not None:
        if type(weight) is not ndarray or weight.shape != row_shape:
            return None
        if weight.flags.num & PLAIN != PLAIN:
            return None
        weight_dtype = weight.dtype
    if bias is not None:
        if type(bias) is not ndarray or bias.shape != row_shape:
            return None
        if bias.flags.num & PLAIN != PLAIN:
            return None
        bias_dtype = bias.dtype
    if residual is not None:
        if not _is_plain(residual, shape):
            return None
        residual_dtype = residual.dtype
    run = _forward.get((centered, dtype, residual_dtype, weight_dtype, bias_dtype))
    if run is None or x.flags.num & PLAIN != PLAIN or not 0.0 <= eps < math.inf or not shape:
        return None
    size = x.size
    if not 0 < size < SPLIT:
        return None
    if out is None:
        y = empty(shape, dtype)
    elif _is_plain_output(out, shape, dtype, x, residual, weight, bias):
        y = out
    else:
        return None
    cols = shape[-1]
    rows = size // cols
    total = None if residual is None else empty(shape, dtype)
    if run(x, residual, weight, bias, total, y, None, None, eps, cols, 0, rows) != rows:
        return None  # an extreme row, which takes another kernel
    return y if residual is None else (y, total)


def _is_plain(array, shape):
    """Whether kernels take an input of this shape as it is, whatever its dtype."""
    return type(array) is ndarray and array.shape == shape and array.flags.num & PLAIN == PLAIN


def _is_plain_output(out, shape, dtype, x, *others):
    if not _is_plain(out, shape) or out.dtype != dtype or not out.flags.writeable:
        return False
    memory = _memory(out)
    if memory is None:
        return False
    for array in others if x is out else (x, *others):
        if array is not None and _memory(array) in (None, memory):
            return False
    return True


def _memory(array):
    """The number of the object that holds an array's memory; None if that is not sure."""
    base = array.base
    if base is None:
        base = array
    elif type(base) is bytes:
        return id(base)
    if type(base) is not ndarray or not base.flags.owndata:
        return None
    return id(base)
