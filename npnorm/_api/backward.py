"""`layer_norm_backward` and `rms_norm_backward`."""

from typing import Any

from numpy.typing import ArrayLike

from .. import _backend
from .._results import NormGradients
from .common import (
    Axis,
    GradientsOut,
    Mask,
    OptionalArray,
    given_or_new,
    is_simple,
    planned_backward,
)


def layer_norm_backward(
    dy: ArrayLike,
    x: ArrayLike,
    weight: OptionalArray = None,
    *,
    mean: OptionalArray = None,
    rstd: OptionalArray = None,
    axis: Axis = -1,
    eps: float = 1e-5,
    weight_offset: float = 0.0,
    dresidual: OptionalArray = None,
    output_mask: Mask | None = None,
    out: GradientsOut | None = None,
    stream: Any = None,
    workspace: Any = None,
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
    stream : int or stream, optional
        As in the forward call.
    workspace : device array, optional
        For arrays on a CUDA device: memory for the sums over rows, so that with `out` nothing is
        allocated; `npnorm.cuda.workspace_bytes` tells its size.

    Returns
    -------
    dx : ndarray or None
        Of x's shape and dtype.
    dweight, dbias : ndarray or None
        Of the shape of the normalized axes and weight's dtype (x's, if there is no weight).

    Raises
    ------
    TypeError
        For an argument of the wrong type or dtype, or arrays both in host memory and on a CUDA device.
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
    quick = _backend.loaded if dresidual is None and stream is None and workspace is None else None
    if quick and is_simple(axis, weight_offset, False, False):
        gradients = quick.quick_backward(True, dy, x, weight, mean, rstd, eps, output_mask, out)
        if gradients is not None:
            return NormGradients(*gradients)
    backend, call = planned_backward(
        True, dy, x, weight, mean, rstd, axis, eps, weight_offset, dresidual, output_mask, out,
        stream=stream, workspace=workspace,
    )  # fmt: skip
    return NormGradients(*given_or_new(out, backend.backward(call)))


def rms_norm_backward(
    dy: ArrayLike,
    x: ArrayLike,
    weight: OptionalArray = None,
    *,
    rstd: OptionalArray = None,
    axis: Axis = -1,
    eps: float | None = 1e-6,
    weight_offset: float = 0.0,
    dresidual: OptionalArray = None,
    output_mask: Mask | None = None,
    out: GradientsOut | None = None,
    stream: Any = None,
    workspace: Any = None,
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
    stream : int or stream, optional
        As in the forward call.
    workspace : device array, optional
        For arrays on a CUDA device: memory for the sums over rows, so that with `out` nothing is
        allocated; `npnorm.cuda.workspace_bytes` tells its size.

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
    quick = _backend.loaded if dresidual is None and stream is None and workspace is None else None
    if quick and is_simple(axis, weight_offset, False, False):
        gradients = quick.quick_backward(False, dy, x, weight, None, rstd, eps, output_mask, out)
        if gradients is not None:
            return NormGradients(*gradients)
    backend, call = planned_backward(
        False, dy, x, weight, None, rstd, axis, eps, weight_offset, dresidual, output_mask, out,
        stream=stream, workspace=workspace,
    )  # fmt: skip
    return NormGradients(*given_or_new(out, backend.backward(call)))
