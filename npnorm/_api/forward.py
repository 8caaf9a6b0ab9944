"""`layer_norm` and `rms_norm`."""

from typing import Any, Literal, overload

from numpy.typing import ArrayLike

from .. import _backend
from .._results import Array, LayerNormResult, RMSNormResult
from .common import Axis, OptionalArray, is_simple, planned_forward


@overload
def layer_norm(
    x: ArrayLike, weight: OptionalArray = ..., bias: OptionalArray = ..., *, axis: Axis = ..., eps: float = ...,
    weight_offset: float = ..., round_before_weight: bool = ..., out: Array | None = ...,
    return_stats: Literal[False] = ..., stream: Any = ...,
) -> Array: ...  # fmt: skip
@overload
def layer_norm(
    x: ArrayLike, weight: OptionalArray = ..., bias: OptionalArray = ..., *, axis: Axis = ..., eps: float = ...,
    weight_offset: float = ..., round_before_weight: bool = ..., out: Array | None = ...,
    return_stats: Literal[True], stream: Any = ...,
) -> LayerNormResult: ...  # fmt: skip
@overload
def layer_norm(
    x: ArrayLike, weight: OptionalArray = ..., bias: OptionalArray = ..., *, axis: Axis = ..., eps: float = ...,
    weight_offset: float = ..., round_before_weight: bool = ..., out: Array | None = ...,
    return_stats: bool, stream: Any = ...,
) -> Array | LayerNormResult: ...  # fmt: skip
def layer_norm(
    x: ArrayLike,
    weight: OptionalArray = None,
    bias: OptionalArray = None,
    *,
    axis: Axis = -1,
    eps: float = 1e-5,
    weight_offset: float = 0.0,
    round_before_weight: bool = False,
    out: Array | None = None,
    return_stats: bool = False,
    stream: Any = None,
) -> Array | LayerNormResult:
    r"""Layer normalization: every row to mean 0 and variance 1, then scaled and shifted.

    Parameters
    ----------
    x : array_like
        float16, bfloat16, float32 or float64, of any layout. A row is what lies along `axis`. If it
        is an array on a CUDA device, all others must be, and the results are arrays of its library.
    weight, bias : array_like, optional
        Scale and shift, of the shape of the normalized axes and any supported dtype, each on its
        own.
    axis : int or tuple of int, default -1
        The trailing axes to normalize over, in any order.
    eps : float, default 1e-5
        Added to the variance; finite, not negative.
    weight_offset : float, default 0.0
        Added to `weight` in the compute dtype, for checkpoints that store the scale less 1.
    round_before_weight : bool, default False
        Whether the normalized value is rounded to x's dtype before weight and bias are applied.
    out : ndarray, optional
        Where to put y: an array of x's shape and any supported dtype. It may be `x` itself.
    return_stats : bool, default False
        Whether to return mean and rstd too.
    stream : int or stream, optional
        For arrays on a CUDA device: the stream to work on, as an address, an object with
        `__cuda_stream__`, or a stream of CuPy, Numba or PyTorch. By default the stream that x's
        interface names (PyTorch's current stream for a tensor), else the legacy default stream.

    Returns
    -------
    y : ndarray
        Of x's shape and dtype, or `out`. With `return_stats`, a named tuple ``(y, mean, rstd)``,
        the statistics in float64 with length 1 on the normalized axes.

    Raises
    ------
    TypeError
        For an argument of the wrong type or dtype, or arrays both in host memory and on a CUDA device.
    ValueError
        For shapes that do not fit, axes that are not the trailing ones, an `eps` out of range, an
        `out` that is read-only or overlaps an input in part.
    numpy.exceptions.AxisError
        For an axis that `x` does not have.

    See Also
    --------
    layer_norm_backward : its gradients.
    add_layer_norm : the same of a sum.
    rms_norm : without the mean.

    Notes
    -----
    .. math:: y = \frac{x - \operatorname{mean}(x)}{\sqrt{\operatorname{var}(x) + \epsilon}} \cdot w + b

    with the population variance [1]_. Sums are float64, and the mean is subtracted as a pair of
    numbers, so that the result is within 3 units of rounding for every finite input.

    References
    ----------
    .. [1] Ba, Kiros and Hinton, "Layer Normalization", 2016, arXiv:1607.06450.

    Examples
    --------
    >>> import numpy as np
    >>> import npnorm
    >>> x = np.array([[2, -1, 3, 0]], np.float32)
    >>> npnorm.layer_norm(x).round(4)
    array([[ 0.6325, -1.2649,  1.2649, -0.6325]], dtype=float32)
    >>> y, mean, rstd = npnorm.layer_norm(x, return_stats=True)
    >>> mean, rstd.round(4)
    (array([[1.]]), array([[0.6325]]))
    """
    quick = _backend.loaded if stream is None else None
    if quick and is_simple(axis, weight_offset, round_before_weight, return_stats):
        y: Array | None = quick.quick_forward(True, x, None, weight, bias, eps, out)
        if y is not None:
            return y
    backend, call = planned_forward(
        True, x, None, weight, bias, axis, eps, weight_offset, round_before_weight, out, None,
        return_stats, stream=stream,
    )  # fmt: skip
    y, _, mean, rstd = backend.forward(call)
    if out is not None:
        y = out
    return LayerNormResult(y, mean, rstd) if return_stats else y


@overload
def rms_norm(
    x: ArrayLike, weight: OptionalArray = ..., bias: OptionalArray = ..., *, axis: Axis = ..., eps: float | None = ...,
    weight_offset: float = ..., round_before_weight: bool = ..., out: Array | None = ...,
    return_stats: Literal[False] = ..., stream: Any = ...,
) -> Array: ...  # fmt: skip
@overload
def rms_norm(
    x: ArrayLike, weight: OptionalArray = ..., bias: OptionalArray = ..., *, axis: Axis = ..., eps: float | None = ...,
    weight_offset: float = ..., round_before_weight: bool = ..., out: Array | None = ...,
    return_stats: Literal[True], stream: Any = ...,
) -> RMSNormResult: ...  # fmt: skip
@overload
def rms_norm(
    x: ArrayLike, weight: OptionalArray = ..., bias: OptionalArray = ..., *, axis: Axis = ..., eps: float | None = ...,
    weight_offset: float = ..., round_before_weight: bool = ..., out: Array | None = ...,
    return_stats: bool, stream: Any = ...,
) -> Array | RMSNormResult: ...  # fmt: skip
def rms_norm(
    x: ArrayLike,
    weight: OptionalArray = None,
    bias: OptionalArray = None,
    *,
    axis: Axis = -1,
    eps: float | None = 1e-6,
    weight_offset: float = 0.0,
    round_before_weight: bool = False,
    out: Array | None = None,
    return_stats: bool = False,
    stream: Any = None,
) -> Array | RMSNormResult:
    r"""Root mean square normalization: every row to root mean square 1, then scaled and shifted.

    Parameters
    ----------
    x : array_like
        float16, bfloat16, float32 or float64, of any layout. A row is what lies along `axis`. If it
        is an array on a CUDA device, all others must be, and the results are arrays of its library.
    weight, bias : array_like, optional
        Scale and shift, of the shape of the normalized axes and any supported dtype, each on its
        own.
    axis : int or tuple of int, default -1
        The trailing axes to normalize over, in any order.
    eps : float or None, default 1e-6
        Added to the mean square; finite, not negative. None is the machine epsilon of x's
        compute dtype: of float64 for a float64 x, else of float32.
    weight_offset : float, default 0.0
        Added to `weight` in the compute dtype, as Gemma's ``1 + w``.
    round_before_weight : bool, default False
        Whether the normalized value is rounded to x's dtype before weight and bias are applied, as
        Hugging Face's Llama does.
    out : ndarray, optional
        Where to put y: an array of x's shape and any supported dtype. It may be `x` itself.
    return_stats : bool, default False
        Whether to return rstd too.
    stream : int or stream, optional
        As for `layer_norm`.

    Returns
    -------
    y : ndarray
        Of x's shape and dtype, or `out`. With `return_stats`, a named tuple ``(y, rstd)``, rstd in
        float64 with length 1 on the normalized axes.

    Raises
    ------
    TypeError
        For an argument of the wrong type or dtype, or arrays both in host memory and on a CUDA device.
    ValueError
        For shapes that do not fit, axes that are not the trailing ones, an `eps` out of range, an
        `out` that is read-only or overlaps an input in part.
    numpy.exceptions.AxisError
        For an axis that `x` does not have.

    See Also
    --------
    rms_norm_backward : its gradients.
    add_rms_norm : the same of a sum.
    layer_norm : with the mean taken away.

    Notes
    -----
    .. math:: y = \frac{x}{\sqrt{\operatorname{mean}(x^2) + \epsilon}} \cdot w + b

    See [1]_.

    References
    ----------
    .. [1] Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019, arXiv:1910.07467.

    Examples
    --------
    >>> import numpy as np
    >>> import npnorm
    >>> npnorm.rms_norm(np.array([3, 4, 5], np.float32)).round(4)
    array([0.7348, 0.9798, 1.2247], dtype=float32)
    """
    quick = _backend.loaded if stream is None else None
    if quick and is_simple(axis, weight_offset, round_before_weight, return_stats):
        y: Array | None = quick.quick_forward(False, x, None, weight, bias, eps, out)
        if y is not None:
            return y
    backend, call = planned_forward(
        False, x, None, weight, bias, axis, eps, weight_offset, round_before_weight, out, None,
        return_stats, stream=stream,
    )  # fmt: skip
    y, _, _, rstd = backend.forward(call)
    if out is not None:
        y = out
    return RMSNormResult(y, rstd) if return_stats else y
