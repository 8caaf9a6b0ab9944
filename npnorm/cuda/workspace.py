"""How much scratch memory a backward call needs."""

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np

from .._api import layer_norm_backward, rms_norm_backward
from .._plan import plan_backward
from .arrays import trusted
from .launch import Gradients

BACKWARD = {layer_norm_backward: True, rms_norm_backward: False}
"""The functions that take a workspace, and whether they subtract the mean."""


def workspace_bytes(function: Callable[..., Any], *arguments: Any, **options: Any) -> int:
    """The bytes of `workspace` that a call needs, so that it allocates nothing.

    Parameters
    ----------
    function : callable
        `npnorm.layer_norm_backward` or `npnorm.rms_norm_backward`.
    *arguments, **options
        The arguments of the call. They are looked at, not read, and may as well be NumPy arrays of the same shapes,
        strides and dtypes.

    Returns
    -------
    int
        The least size of a contiguous device array to give as `workspace`; 0 if the call needs none.

    Raises
    ------
    TypeError, ValueError, numpy.exceptions.AxisError
        For another function, and as the call itself.

    Examples
    --------
    >>> import numpy as np
    >>> import npnorm.cuda
    >>> x, rstd = np.empty((4, 8), np.float32), np.empty((4, 1))
    >>> npnorm.cuda.workspace_bytes(npnorm.rms_norm_backward, x, x, rstd=rstd)
    0
    >>> npnorm.cuda.workspace_bytes(npnorm.rms_norm_backward, x, x, x[0], rstd=rstd) > 0
    True
    """
    if function not in BACKWARD:
        raise TypeError(
            "`function` must be npnorm.layer_norm_backward or npnorm.rms_norm_backward, which alone take a "
            f"workspace; got {function!r}"
        )
    bound = inspect.signature(function).bind(*arguments, **options)
    bound.apply_defaults()
    given = {"mean": None, **bound.arguments, "stream": None, "workspace": None}
    call = plan_backward(BACKWARD[function], **given)
    dx, dweight, dbias = map(_viewed, call.out)
    call = call._replace(
        dy=_viewed(call.dy),
        x=_viewed(call.x),
        weight=_viewed(call.weight),
        mean=_viewed(call.mean),
        rstd=_viewed(call.rstd),
        dresidual=_viewed(call.dresidual),
        out=(dx, dweight, dbias),
    )
    if not (any(call.mask) and call.x.size):
        return 0
    return Gradients(call, call.out).staging.size


def _viewed(array: Any) -> Any:
    """An array as if it were on a device."""
    if not isinstance(array, np.ndarray):
        return array
    return trusted(array.ctypes.data, array.shape, array.strides, array.dtype, False, None, None)
