"""The public functions: plan, backend, result."""

from typing import Any

from . import _backend
from ._backend import backend
from ._plan import plan_backward, plan_forward
from ._results import (
    AddLayerNormStatsResult,
    AddNormResult,
    AddRMSNormStatsResult,
    Array,
    LayerNormResult,
    NormGradients,
    RMSNormResult,
)

Axis = int | tuple[int, ...]
Mask = tuple[bool, bool, bool]
GradientsOut = tuple[Array | None, Array | None, Array | None]


def layer_norm(
    x: Any,
    weight: Any = None,
    bias: Any = None,
    *,
    axis: Axis = -1,
    eps: float = 1e-5,
    weight_offset: float = 0.0,
    round_before_weight: bool = False,
    out: Array | None = None,
    return_stats: bool = False,
) -> Array | LayerNormResult:
    r"""Layer normalization: every row to mean 0 and variance 1, then scaled and shifted.

    Parameters
    ----------
    x : array_like
        float16, bfloat16, float32 or float64, of any layout. A row is what lies along `axis`.
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

    Returns
    -------
    y : ndarray
        Of x's shape and dtype, or `out`. With `return_stats`, a named tuple ``(y, mean, rstd)``,
        the statistics in float64 with length 1 on the normalized axes.

    Raises
    ------
    TypeError
        For an argument of the wrong type or dtype.
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
    quick = _backend.loaded
    if quick and _is_simple(axis, weight_offset, round_before_weight, return_stats):
        y = quick.quick_forward(True, x, None, weight, bias, eps, out)
        if y is not None:
            return y
    call = plan_forward(
        True, x, None, weight, bias, axis, eps, weight_offset, round_before_weight, out, None,
        return_stats,
    )  # fmt: skip
    y, _, mean, rstd = backend().forward(call)
    if out is not None:
        y = out
    return LayerNormResult(y, mean, rstd) if return_stats else y


def rms_norm(
    x: Any,
    weight: Any = None,
    bias: Any = None,
    *,
    axis: Axis = -1,
    eps: float | None = 1e-6,
    weight_offset: float = 0.0,
    round_before_weight: bool = False,
    out: Array | None = None,
    return_stats: bool = False,
) -> Array | RMSNormResult:
    r"""Root mean square normalization: every row to root mean square 1, then scaled and shifted.

    Parameters
    ----------
    x : array_like
        float16, bfloat16, float32 or float64, of any layout. A row is what lies along `axis`.
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

    Returns
    -------
    y : ndarray
        Of x's shape and dtype, or `out`. With `return_stats`, a named tuple ``(y, rstd)``, rstd in
        float64 with length 1 on the normalized axes.

    Raises
    ------
    TypeError
        For an argument of the wrong type or dtype.
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
    quick = _backend.loaded
    if quick and _is_simple(axis, weight_offset, round_before_weight, return_stats):
        y = quick.quick_forward(False, x, None, weight, bias, eps, out)
        if y is not None:
            return y
    call = plan_forward(
        False, x, None, weight, bias, axis, eps, weight_offset, round_before_weight, out, None,
        return_stats,
    )  # fmt: skip
    y, _, _, rstd = backend().forward(call)
    if out is not None:
        y = out
    return RMSNormResult(y, rstd) if return_stats else y


def add_layer_norm(
    x: Any,
    residual: Any,
    weight: Any = None,
    bias: Any = None,
    *,
    axis: Axis = -1,
    eps: float = 1e-5,
    weight_offset: float = 0.0,
    round_before_weight: bool = False,
    out: Array | None = None,
    residual_out: Array | None = None,
    return_stats: bool = False,
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
    quick = None if residual_out is not None else _backend.loaded
    if quick and _is_simple(axis, weight_offset, round_before_weight, return_stats):
        both = quick.quick_forward(True, x, residual, weight, bias, eps, out)
        if both is not None:
            return AddNormResult(*both)
    call = plan_forward(
        True, x, residual, weight, bias, axis, eps, weight_offset, round_before_weight, out,
        residual_out, return_stats, True,
    )  # fmt: skip
    y, total, mean, rstd = backend().forward(call)
    y, total = _given((out, residual_out), (y, total))
    if return_stats:
        return AddLayerNormStatsResult(y, total, mean, rstd)
    return AddNormResult(y, total)


def add_rms_norm(
    x: Any,
    residual: Any,
    weight: Any = None,
    bias: Any = None,
    *,
    axis: Axis = -1,
    eps: float | None = 1e-6,
    weight_offset: float = 0.0,
    round_before_weight: bool = False,
    out: Array | None = None,
    residual_out: Array | None = None,
    return_stats: bool = False,
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
    quick = None if residual_out is not None else _backend.loaded
    if quick and _is_simple(axis, weight_offset, round_before_weight, return_stats):
        both = quick.quick_forward(False, x, residual, weight, bias, eps, out)
        if both is not None:
            return AddNormResult(*both)
    call = plan_forward(
        False, x, residual, weight, bias, axis, eps, weight_offset, round_before_weight, out,
        residual_out, return_stats, True,
    )  # fmt: skip
    y, total, _, rstd = backend().forward(call)
    y, total = _given((out, residual_out), (y, total))
    if return_stats:
        return AddRMSNormStatsResult(y, total, rstd)
    return AddNormResult(y, total)


def layer_norm_backward(
    dy: Any,
    x: Any,
    weight: Any = None,
    *,
    mean: Any = None,
    rstd: Any = None,
    axis: Axis = -1,
    eps: float = 1e-5,
    weight_offset: float = 0.0,
    dresidual: Any = None,
    output_mask: Mask | None = None,
    out: GradientsOut | None = None,
) -> NormGradients:
    r"""The gradients of `layer_norm`.

    Parameters
    ----------
    dy : array_like
        The gradient that reaches y: x's shape, any supported dtype.
    x : array_like
        What was normalized. For `add_layer_norm`, its `residual_out`.
    weight : array_like, optional
        As in the forward call.
    mean, rstd : array_like, optional
        The statistics of the forward call. What is left out is computed again, with the same bits.
    axis, eps, weight_offset
        As in the forward call.
    dresidual : array_like, optional
        Added to dx in the same pass: the gradient that reaches the sum of `add_layer_norm` from
        elsewhere.
    output_mask : tuple of 3 bools, optional
        Whether to compute dx, dweight, dbias. By default dx, and both others if there is a weight.
    out : tuple of 3 arrays or None, optional
        Where to put them. The first may be `dy`, `x` or `dresidual` itself.

    Returns
    -------
    dx : ndarray or None
        Of x's shape and dtype.
    dweight, dbias : ndarray or None
        Of the shape of the normalized axes and weight's dtype (x's, if there is no weight).

    Raises
    ------
    TypeError
        For an argument of the wrong type or dtype.
    ValueError
        For shapes that do not fit, axes that are not the trailing ones, an `eps` out of range, an
        output that is read-only or overlaps an input in part.
    numpy.exceptions.AxisError
        For an axis that `x` does not have.

    Notes
    -----
    With :math:`\hat{x} = (x - \operatorname{mean}) \cdot \operatorname{rstd}` and :math:`g = dy
    \cdot w`,

    .. math::

       dx = \operatorname{rstd} \cdot (g - \operatorname{mean}(g) - \hat{x} \cdot
       \operatorname{mean}(g \hat{x})), \quad dw = \sum dy \cdot \hat{x}, \quad db = \sum dy

    where means run along a row and sums over all rows.

    Examples
    --------
    >>> import numpy as np
    >>> import npnorm
    >>> x = np.array([[2, -1, 3, 0]], np.float32)
    >>> dy = np.array([[1, 0, 0, 0]], np.float32)
    >>> npnorm.layer_norm_backward(dy, x).dx.round(4)
    array([[ 0.4111, -0.0316, -0.2846, -0.0949]], dtype=float32)
    """
    quick = None if dresidual is not None else _backend.loaded
    if quick and _is_simple(axis, weight_offset, False, False):
        gradients = quick.quick_backward(True, dy, x, weight, mean, rstd, eps, output_mask, out)
        if gradients is not None:
            return NormGradients(*gradients)
    call = plan_backward(
        True, dy, x, weight, mean, rstd, axis, eps, weight_offset, dresidual, output_mask, out
    )
    return NormGradients(*_given(out, backend().backward(call)))


def rms_norm_backward(
    dy: Any,
    x: Any,
    weight: Any = None,
    *,
    rstd: Any = None,
    axis: Axis = -1,
    eps: float | None = 1e-6,
    weight_offset: float = 0.0,
    dresidual: Any = None,
    output_mask: Mask | None = None,
    out: GradientsOut | None = None,
) -> NormGradients:
    r"""The gradients of `rms_norm`.

    Parameters
    ----------
    dy : array_like
        The gradient that reaches y: x's shape, any supported dtype.
    x : array_like
        What was normalized. For `add_rms_norm`, its `residual_out`.
    weight : array_like, optional
        As in the forward call.
    rstd : array_like, optional
        The statistic of the forward call. Left out, it is computed again, with the same bits.
    axis, eps, weight_offset
        As in the forward call.
    dresidual : array_like, optional
        Added to dx in the same pass: the gradient that reaches the sum of `add_rms_norm` from
        elsewhere.
    output_mask : tuple of 3 bools, optional
        Whether to compute dx, dweight, dbias. By default dx, and both others if there is a weight.
    out : tuple of 3 arrays or None, optional
        Where to put them. The first may be `dy`, `x` or `dresidual` itself.

    Returns
    -------
    dx : ndarray or None
        Of x's shape and dtype.
    dweight, dbias : ndarray or None
        Of the shape of the normalized axes and weight's dtype (x's, if there is no weight).

    Raises
    ------
    TypeError, ValueError, numpy.exceptions.AxisError
        As for `layer_norm_backward`.

    Notes
    -----
    With :math:`\hat{x} = x \cdot \operatorname{rstd}` and :math:`g = dy \cdot w`,

    .. math::

       dx = \operatorname{rstd} \cdot (g - \hat{x} \cdot \operatorname{mean}(g \hat{x})),
       \quad dw = \sum dy \cdot \hat{x}, \quad db = \sum dy

    where the mean runs along a row and sums over all rows.

    Examples
    --------
    >>> import numpy as np
    >>> import npnorm
    >>> x = np.array([1.0, 0, 0, 0])
    >>> npnorm.rms_norm_backward(x, x, eps=1e-4).dx
    array([0.00079952, 0.        , 0.        , 0.        ])
    """
    quick = None if dresidual is not None else _backend.loaded
    if quick and _is_simple(axis, weight_offset, False, False):
        gradients = quick.quick_backward(False, dy, x, weight, None, rstd, eps, output_mask, out)
        if gradients is not None:
            return NormGradients(*gradients)
    call = plan_backward(
        False, dy, x, weight, None, rstd, axis, eps, weight_offset, dresidual, output_mask, out
    )
    return NormGradients(*_given(out, backend().backward(call)))


def _given(out: tuple[Array | None, ...] | None, results: tuple[Array | None, ...]) -> tuple[Array | None, ...]:
    """The outputs a caller gave, as those very objects, and the results where none were given."""
    if out is None:
        return results
    return tuple(
        result if given is None else given for given, result in zip(out, results, strict=True)
    )


def _is_simple(axis: Any, weight_offset: Any, round_before_weight: Any, return_stats: Any) -> bool:
    """Whether the options of a forward call are the usual ones, exactly."""
    return (
        return_stats is False
        and round_before_weight is False
        and type(axis) is int
        and axis == -1
        and type(weight_offset) is float
        and weight_offset == 0.0
    )
