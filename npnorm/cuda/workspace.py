"""How much scratch memory a backward call needs."""

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np

from .._api import layer_norm_backward, rms_norm_backward
from .._plan import plan_backward
from .arrays import DeviceArray
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
        The size of any contiguous device array to give as `workspace`; 0 if the call needs none. Calls with fewer
        rows or columns may need more, so ask for each shape.

    Raises
    ------
    TypeError, ValueError, numpy.exceptions.AxisError
        For another function, and as the call itself.

    Examples
    --------
    >>> import numpy as np
    >>> import npnorm.cuda
    >>> x = np.empty((4, 8), np.float32)
    >>> npnorm.cuda.workspace_bytes(npnorm.layer_norm_backward, x, x, output_mask=(True, False, False))
    0
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
    call = call._replace(
        **{name: _viewed(getattr(call, name)) for name in ("dy", "x", "weight", "mean", "rstd", "dresidual")},
        out=tuple(map(_viewed, call.out)),
    )
    if not (any(call.mask) and call.x.size):
        return 0
    return Gradients(call, call.out).staging.size


def _viewed(array: Any) -> DeviceArray | None:
    """An array as if it were on a device."""
    if not isinstance(array, np.ndarray):
        return array
    return DeviceArray(array.ctypes.data, array.shape, array.strides, array.dtype)
