"""`add_layer_norm` and `add_rms_norm`."""

from typing import Any, Literal, overload

from numpy.typing import ArrayLike

from .. import _backend
from .._results import AddLayerNormStatsResult, AddNormResult, AddRMSNormStatsResult, Array
from .common import Axis, OptionalArray, is_simple, planned_forward


@overload
def add_layer_norm(
    x: ArrayLike, residual: ArrayLike, weight: OptionalArray = ..., bias: OptionalArray = ..., *,
    axis: Axis = ..., eps: float = ..., weight_offset: float = ...,
    round_before_weight: bool = ..., out: Array | None = ..., residual_out: Array | None = ...,
    return_stats: Literal[False] = ..., stream: Any = ...,
) -> AddNormResult: ...  # fmt: skip
@overload
def add_layer_norm(
    x: ArrayLike, residual: ArrayLike, weight: OptionalArray = ..., bias: OptionalArray = ..., *,
    axis: Axis = ..., eps: float = ..., weight_offset: float = ...,
    round_before_weight: bool = ..., out: Array | None = ..., residual_out: Array | None = ...,
    return_stats: Literal[True], stream: Any = ...,
) -> AddLayerNormStatsResult: ...  # fmt: skip
@overload
def add_layer_norm(
    x: ArrayLike, residual: ArrayLike, weight: OptionalArray = ..., bias: OptionalArray = ..., *,
    axis: Axis = ..., eps: float = ..., weight_offset: float = ...,
    round_before_weight: bool = ..., out: Array | None = ..., residual_out: Array | None = ...,
    return_stats: bool, stream: Any = ...,
) -> AddNormResult | AddLayerNormStatsResult: ...  # fmt: skip
def add_layer_norm(
    x: ArrayLike,
    residual: ArrayLike,
    weight: OptionalArray = None,
    bias: OptionalArray = None,
    *,
    axis: Axis = -1,
    eps: float = 1e-5,
    weight_offset: float = 0.0,
    round_before_weight: bool = False,
    out: Array | None = None,
    residual_out: Array | None = None,
    return_stats: bool = False,
    stream: Any = None,
) -> AddNormResult | AddLayerNormStatsResult:
    """Add a residual and layer-normalize the sum, in one pass.

    Parameters
    ----------
    x : array_like
        float16, bfloat16, float32 or float64, of any layout.
    residual : array_like
        Of x's shape and any supported dtype.
    weight, bias, axis, eps, weight_offset, round_before_weight
        As for `layer_norm`.
    out, residual_out : ndarray, optional
        Where to put y and the sum: arrays of x's shape, the latter of x's dtype. Each may be `x` or
        `residual` itself.
    return_stats : bool, default False
        Whether to return mean and rstd of the sum too.
    stream : int or stream, optional
        As for `layer_norm`.

    Returns
    -------
    y : ndarray
        The norm of the rounded sum: bit for bit what ``layer_norm(residual_out, ...)`` gives.
    residual_out : ndarray
        ``x + residual``, rounded to x's dtype.
    mean, rstd : ndarray
        With `return_stats` alone.

    Raises
    ------
    TypeError, ValueError, numpy.exceptions.AxisError
        As for `layer_norm`.

    Examples
    --------
    >>> import numpy as np
    >>> import npnorm
    >>> x = np.array([1, -2, 1, 0], np.float32)
    >>> y, residual = npnorm.add_layer_norm(x, np.array([1, 1, 2, 0], np.float32))
    >>> residual
    array([ 2., -1.,  3.,  0.], dtype=float32)
    >>> y.round(4)
    array([ 0.6325, -1.2649,  1.2649, -0.6325], dtype=float32)
    """
    quick = _backend.loaded if residual_out is None and stream is None else None
    if quick and is_simple(axis, weight_offset, round_before_weight, return_stats):
        both = quick.quick_forward(True, x, residual, weight, bias, eps, out)
        if both is not None:
            return AddNormResult(*both)
    backend, call = planned_forward(
        True, x, residual, weight, bias, axis, eps, weight_offset, round_before_weight, out,
        residual_out, return_stats, True, stream=stream,
    )  # fmt: skip
    y, total, mean, rstd = backend.forward(call)
    y, total = y if out is None else out, total if residual_out is None else residual_out
    if return_stats:
        return AddLayerNormStatsResult(y, total, mean, rstd)
    return AddNormResult(y, total)


@overload
def add_rms_norm(
    x: ArrayLike, residual: ArrayLike, weight: OptionalArray = ..., bias: OptionalArray = ..., *,
    axis: Axis = ..., eps: float | None = ..., weight_offset: float = ...,
    round_before_weight: bool = ..., out: Array | None = ..., residual_out: Array | None = ...,
    return_stats: Literal[False] = ..., stream: Any = ...,
) -> AddNormResult: ...  # fmt: skip
@overload
def add_rms_norm(
    x: ArrayLike, residual: ArrayLike, weight: OptionalArray = ..., bias: OptionalArray = ..., *,
    axis: Axis = ..., eps: float | None = ..., weight_offset: float = ...,
    round_before_weight: bool = ..., out: Array | None = ..., residual_out: Array | None = ...,
    return_stats: Literal[True], stream: Any = ...,
) -> AddRMSNormStatsResult: ...  # fmt: skip
@overload
def add_rms_norm(
    x: ArrayLike, residual: ArrayLike, weight: OptionalArray = ..., bias: OptionalArray = ..., *,
    axis: Axis = ..., eps: float | None = ..., weight_offset: float = ...,
    round_before_weight: bool = ..., out: Array | None = ..., residual_out: Array | None = ...,
    return_stats: bool, stream: Any = ...,
) -> AddNormResult | AddRMSNormStatsResult: ...  # fmt: skip
def add_rms_norm(
    x: ArrayLike,
    residual: ArrayLike,
    weight: OptionalArray = None,
    bias: OptionalArray = None,
    *,
    axis: Axis = -1,
    eps: float | None = 1e-6,
    weight_offset: float = 0.0,
    round_before_weight: bool = False,
    out: Array | None = None,
    residual_out: Array | None = None,
    return_stats: bool = False,
    stream: Any = None,
) -> AddNormResult | AddRMSNormStatsResult:
    """Add a residual and RMS-normalize the sum, in one pass.

    Parameters
    ----------
    x : array_like
        float16, bfloat16, float32 or float64, of any layout.
    residual : array_like
        Of x's shape and any supported dtype.
    weight, bias, axis, eps, weight_offset, round_before_weight
        As for `rms_norm`.
    out, residual_out : ndarray, optional
        Where to put y and the sum: arrays of x's shape, the latter of x's dtype. Each may be `x` or
        `residual` itself.
    return_stats : bool, default False
        Whether to return rstd of the sum too.
    stream : int or stream, optional
        As for `layer_norm`.

    Returns
    -------
    y : ndarray
        The norm of the rounded sum: bit for bit what ``rms_norm(residual_out, ...)`` gives.
    residual_out : ndarray
        ``x + residual``, rounded to x's dtype.
    rstd : ndarray
        With `return_stats` alone.

    Raises
    ------
    TypeError, ValueError, numpy.exceptions.AxisError
        As for `rms_norm`.

    Examples
    --------
    >>> import numpy as np
    >>> import npnorm
    >>> y, residual = npnorm.add_rms_norm(np.float32([1, 2, 3]), np.float32([2, 2, 2]))
    >>> residual
    array([3., 4., 5.], dtype=float32)
    >>> y.round(4)
    array([0.7348, 0.9798, 1.2247], dtype=float32)
    """
    quick = _backend.loaded if residual_out is None and stream is None else None
    if quick and is_simple(axis, weight_offset, round_before_weight, return_stats):
        both = quick.quick_forward(False, x, residual, weight, bias, eps, out)
        if both is not None:
            return AddNormResult(*both)
    backend, call = planned_forward(
        False, x, residual, weight, bias, axis, eps, weight_offset, round_before_weight, out,
        residual_out, return_stats, True, stream=stream,
    )  # fmt: skip
    y, total, _, rstd = backend.forward(call)
    y, total = y if out is None else out, total if residual_out is None else residual_out
    if return_stats:
        return AddRMSNormStatsResult(y, total, rstd)
    return AddNormResult(y, total)
