"""`layer_norm_jvp` and `rms_norm_jvp`: forward-mode derivatives."""

from numpy.typing import ArrayLike

from .._results import Array
from .common import Axis, OptionalArray, planned_jvp


def layer_norm_jvp(
    x: ArrayLike,
    weight: OptionalArray = None,
    *,
    dx: OptionalArray = None,
    dweight: OptionalArray = None,
    dbias: OptionalArray = None,
    axis: Axis = -1,
    eps: float = 1e-5,
    weight_offset: float = 0.0,
    out: Array | None = None,
) -> Array:
    r"""The directional derivative of `layer_norm`: how y changes as x, weight and bias change.

    Parameters
    ----------
    x : array_like
        What is normalized: float16, bfloat16, float32 or float64, of any layout.
    weight : array_like, optional
        As in the forward call. The bias does not matter to a derivative.
    dx : array_like, optional
        The tangent of x, its direction of change: x's shape, any supported dtype.
    dweight, dbias : array_like, optional
        The tangents of weight and bias: the shape of the normalized axes, any supported dtype.
        What is left out of the three does not change, and costs nothing; one must be given.
    axis, eps, weight_offset
        As in the forward call.
    out : ndarray, optional
        Where to put dy: an array of x's shape and any supported dtype. It may be `x` or `dx`
        itself.

    Returns
    -------
    dy : ndarray
        The tangent of y: of x's shape and dtype, or `out`.

    Raises
    ------
    TypeError
        For an argument of the wrong type or dtype.
    ValueError
        For shapes that do not fit, axes that are not the trailing ones, an `eps` out of range, no
        tangent at all, an `out` that is read-only or overlaps an input in part.
    numpy.exceptions.AxisError
        For an axis that `x` does not have.

    See Also
    --------
    layer_norm_backward : the gradients, which are the transpose of this.

    Notes
    -----
    With :math:`\hat{x} = (x - \operatorname{mean}) \cdot \operatorname{rstd}` and means along a
    row,

    .. math::

       d\hat{x} = \operatorname{rstd} \cdot (dx - \operatorname{mean}(dx) - \hat{x} \cdot
       \operatorname{mean}(dx \cdot \hat{x})), \quad dy = d\hat{x} \cdot w + \hat{x} \cdot dw + db

    The first formula is that of the gradient with dx in place of g: the Jacobian of the normalized
    row is symmetric. All is computed in float64 and rounded once.

    ``jax.jvp(layer_norm, (x, weight, bias), (dx, dweight, dbias))`` gives y as well; here that is
    the call of `layer_norm` that one has anyway.

    Examples
    --------
    >>> import numpy as np
    >>> import npnorm
    >>> x = np.array([[2, -1, 3, 0]], np.float32)
    >>> dx = np.array([[1, 0, 0, 0]], np.float32)
    >>> npnorm.layer_norm_jvp(x, dx=dx).round(4)
    array([[ 0.4111, -0.0316, -0.2846, -0.0949]], dtype=float32)
    >>> npnorm.layer_norm_jvp(x, dweight=np.array([0, 1, 0, 0]) / 2, dbias=np.ones(4)).round(4)
    array([[1.    , 0.3675, 1.    , 1.    ]], dtype=float32)
    """
    backend, call = planned_jvp(True, x, weight, dx, dweight, dbias, axis, eps, weight_offset, out)
    dy: Array = backend.jvp(call)
    return dy if out is None else out


def rms_norm_jvp(
    x: ArrayLike,
    weight: OptionalArray = None,
    *,
    dx: OptionalArray = None,
    dweight: OptionalArray = None,
    dbias: OptionalArray = None,
    axis: Axis = -1,
    eps: float | None = 1e-6,
    weight_offset: float = 0.0,
    out: Array | None = None,
) -> Array:
    r"""The directional derivative of `rms_norm`: how y changes as x, weight and bias change.

    Parameters
    ----------
    x : array_like
        What is normalized: float16, bfloat16, float32 or float64, of any layout.
    weight : array_like, optional
        As in the forward call. The bias does not matter to a derivative.
    dx : array_like, optional
        The tangent of x, its direction of change: x's shape, any supported dtype.
    dweight, dbias : array_like, optional
        The tangents of weight and bias: the shape of the normalized axes, any supported dtype.
        What is left out of the three does not change, and costs nothing; one must be given.
    axis, eps, weight_offset
        As in the forward call.
    out : ndarray, optional
        Where to put dy: an array of x's shape and any supported dtype. It may be `x` or `dx`
        itself.

    Returns
    -------
    dy : ndarray
        The tangent of y: of x's shape and dtype, or `out`.

    Raises
    ------
    TypeError, ValueError, numpy.exceptions.AxisError
        As for `layer_norm_jvp`.

    See Also
    --------
    rms_norm_backward : the gradients, which are the transpose of this.

    Notes
    -----
    With :math:`\hat{x} = x \cdot \operatorname{rstd}` and the mean along a row,

    .. math::

       d\hat{x} = \operatorname{rstd} \cdot (dx - \hat{x} \cdot \operatorname{mean}(dx \cdot
       \hat{x})), \quad dy = d\hat{x} \cdot w + \hat{x} \cdot dw + db

    See `layer_norm_jvp`.

    Examples
    --------
    >>> import numpy as np
    >>> import npnorm
    >>> x = np.array([3.0, -3.0])
    >>> npnorm.rms_norm_jvp(x, dx=np.array([6.0, 0.0]), eps=0.0)
    array([1., 1.])
    """
    backend, call = planned_jvp(False, x, weight, dx, dweight, dbias, axis, eps, weight_offset, out)
    dy: Array = backend.jvp(call)
    return dy if out is None else out
