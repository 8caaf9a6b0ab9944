"""Calls like one that was seen before: straight to the same plan, and small ones to its kernel.

A plan takes 15 to 25 µs, a launch 5 to 10, the norm of a row of 768 numbers 0.1. What they would find out is known here
by the dtypes, once the arrays are seen to be plain: exactly NumPy's class, contiguous, aligned. Whatever
is not plain, errors too, takes the long way.
"""

import math

import numpy as np
from numpy import empty, ndarray, zeros

from . import launch
from .runs import finish
from .specialize import kernel, total_kernel
from .work import SPLIT, WIDE, touch

PLAIN, WRITEABLE, OWNER = 0x101, 0x501, 0x4
"""The flags C_CONTIGUOUS and ALIGNED; WRITEABLE besides; OWNDATA."""

DOUBLE = np.dtype(np.float64)
ALL, DX_ALONE = (True, True, True), (True, False, False)

_forward: dict = {}
"""`Known` of simple forward calls, by norm and dtypes."""

_backward: dict = {}
"""`Known` of simple backward calls, by norm, dtypes, statistics given and mask."""


class Known:
    """A plan, and the kernels of its small calls, once there was one."""

    __slots__ = ("plan", "run", "total")

    def __init__(self, plan):
        self.plan = plan
        self.run = self.total = None

    def load(self):
        plan = self.plan
        if plan.backward:
            self.total = total_kernel(plan.double, plan.weight or plan.x)
        self.run = kernel(plan)
        return self.run


def remember_forward(call):
    """Note the plan of a call, if it is a simple one: no option but an epsilon, an output of x's dtype."""
    plan = call.plan
    if plan.rounding or plan.rstd or call.weight_offset or plan.out != plan.x:
        return
    dtypes = [None if a is None else a.dtype for a in (call.x, call.residual, call.weight, call.bias)]
    if all(dtype is None or dtype.isnative for dtype in dtypes):
        _forward.setdefault((plan.centered, *dtypes), Known(plan))


def forward(centered, x, residual, weight, bias, eps, out):
    """y, or (y, residual_out) if there is a residual; None if this is no call for here."""
    if type(x) is not ndarray or type(eps) is not float:
        return None
    shape = x.shape
    dtype = x.dtype
    row_shape = shape[-1:]
    flags = x.flags.num
    residual_dtype = weight_dtype = bias_dtype = None
    # Written out for weight and bias, which most calls have: a function would take 60 ns for each.
    if weight is not None:
        if type(weight) is not ndarray or weight.shape != row_shape:
            return None
        flags &= weight.flags.num
        weight_dtype = weight.dtype
    if bias is not None:
        if type(bias) is not ndarray or bias.shape != row_shape:
            return None
        flags &= bias.flags.num
        bias_dtype = bias.dtype
    if residual is not None:
        if type(residual) is not ndarray or residual.shape != shape:
            return None
        flags &= residual.flags.num
        residual_dtype = residual.dtype
    known = _forward.get((centered, dtype, residual_dtype, weight_dtype, bias_dtype))
    if known is None or flags & PLAIN != PLAIN or not 0.0 <= eps < math.inf or not shape:
        return None
    size = x.size
    if not size:
        return None
    if out is None:
        y = empty(shape, dtype)
    elif type(out) is not ndarray or out.shape != shape or out.dtype != dtype:
        return None
    else:
        y = out
        out_flags = out.flags.num
        if out_flags & WRITEABLE != WRITEABLE:
            return None
        # If each array has memory of its own, that takes 0.8 µs less to see than to look at them one by one.
        if not (flags & out_flags & OWNER and out is not weight and out is not bias) and not _are_apart(
            (out,), (weight, bias, None if x is out else x, None if residual is out else residual)
        ):
            return None
    total = None if residual is None else empty(shape, dtype)
    cols = shape[-1]
    rows = size // cols
    arguments = (x, residual, weight, bias, total, y, None, None, eps, cols)
    if size >= SPLIT:
        touch(y if out is None else None, total)
        launch.forward_rows(known.plan, arguments, rows, x is y)
    else:
        run = known.run or known.load()
        reached = run(*arguments, 0, rows)
        if reached != rows:
            finish(known.plan, "", arguments, reached, rows)
    return y if residual is None else (y, total)


def remember_backward(call):
    """Note the plan of a call, if it is a simple one: outputs of the default dtypes."""
    plan = call.plan
    if plan.dresidual or call.weight_offset or plan.out not in (None, plan.x) or not any(call.mask):
        return
    if plan.double != ("float64" in (plan.x, plan.other, plan.weight)):
        return  # for an argument that the kernel does not see
    gradient = (call.x if call.weight is None else call.weight).dtype
    if any(array is not None and array.dtype != gradient for array in call.out[1:]):
        return
    dtypes = [None if a is None else a.dtype for a in (call.dy, call.x, call.weight)]
    if all(dtype is None or dtype.isnative for dtype in dtypes):
        key = (plan.centered, *dtypes, plan.mean, plan.rstd, call.mask)
        _backward.setdefault(key, Known(plan))


def backward(centered, dy, x, weight, mean, rstd, eps, mask, out):
    """dx, dweight and dbias; None if this is no call for here."""
    if type(x) is not ndarray or type(eps) is not float or x.flags.num & PLAIN != PLAIN:
        return None
    shape = x.shape
    size = x.size
    if not shape or not size or not 0.0 <= eps < math.inf or not _is_plain(dy, shape):
        return None
    dtype = gradient_dtype = x.dtype
    row_shape = shape[-1:]
    weight_dtype = None
    if weight is not None:
        if not _is_plain(weight, row_shape):
            return None
        weight_dtype = gradient_dtype = weight.dtype
    kept = (*shape[:-1], 1)
    for statistic in (mean, rstd):
        if statistic is not None and not (_is_plain(statistic, kept) and statistic.dtype == DOUBLE):
            return None
    if mask is None:
        mask = ALL if weight is not None else DX_ALONE
    elif type(mask) is not tuple or any(type(wanted) is not bool for wanted in mask):
        return None
    known = _backward.get((
        centered, dy.dtype, dtype, weight_dtype, None if mean is None else "float64",
        None if rstd is None else "float64", mask,
    ))  # fmt: skip
    if known is None:
        return None
    dx = dweight = dbias = None
    if out is not None:
        if type(out) is not tuple or len(out) != 3:
            return None
        dx, dweight, dbias = out
        if not (
            (dx is None or (mask[0] and _is_plain_output(dx, shape, dtype)))
            and (dweight is None or (mask[1] and _is_plain_output(dweight, row_shape, gradient_dtype)))
            and (dbias is None or (mask[2] and _is_plain_output(dbias, row_shape, gradient_dtype)))
            and _are_apart(out, (weight, mean, rstd, None if dy is dx else dy, None if x is dx else x))
        ):
            return None
    cols = shape[-1]
    rows = size // cols
    plan = known.plan
    if dx is None and mask[0]:
        dx = empty(shape, dtype)
    if dweight is None and mask[1]:
        dweight = empty(row_shape, gradient_dtype)
    if dbias is None and mask[2]:
        dbias = empty(row_shape, gradient_dtype)
    inputs = (dy, x, weight, None, mean, rstd)
    if size >= SPLIT or cols > WIDE:
        touch(dx if out is None else None)
        launch.backward_rows(plan, inputs, dx, (dweight, dbias), eps, rows, cols)
        return dx, dweight, dbias
    run = known.run or known.load()
    length = 2 * cols if plan.double else cols
    sums = None if dweight is None else zeros(length)
    sums_2 = None if dbias is None else zeros(length)
    arguments = (*inputs, dx, sums, sums_2, eps, cols)
    reached = run(*arguments, 0, rows)
    if reached != rows:
        finish(plan, "", arguments, reached, rows)
    if sums is not None:
        known.total(sums, dweight, 1, length, cols)
    if sums_2 is not None:
        known.total(sums_2, dbias, 1, length, cols)
    return dx, dweight, dbias


def _is_plain(array, shape):
    """Whether kernels take an input of this shape as it is, whatever its dtype."""
    return type(array) is ndarray and array.shape == shape and array.flags.num & PLAIN == PLAIN


def _is_plain_output(out, shape, dtype):
    """Whether kernels can write to it as it is."""
    return type(out) is ndarray and out.shape == shape and out.dtype == dtype and out.flags.num & WRITEABLE == WRITEABLE


def _are_apart(outputs, inputs):
    """Whether outputs surely share memory with no other array."""
    owners = [_owner(array) for array in inputs if array is not None]
    for out in outputs:
        if out is not None:
            owner = _owner(out)
            if owner is None:
                return False
            for other in owners:
                if other is None or other is owner:
                    return False
            owners.append(owner)
    return True


def _owner(array):
    """The object that holds an array's memory, if that is plain to see: no other has it."""
    base = array.base
    if base is None:
        base = array
    return base if type(base) is bytes or (type(base) is ndarray and base.flags.owndata) else None
