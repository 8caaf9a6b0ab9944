"""The specification: every function of npnorm in plain NumPy, with float64 inside.

Read this module and `rows` to learn what the fast kernels compute; the tests hold them to it. ``x``
is seen as rows by columns: N rows from the lead axes, D columns from the normalized trailing axes.
For one row

    mean = sum(x) / D                              (0 for RMSNorm)
    rstd = 1 / sqrt(sum((x - mean)**2) / D + eps)
    y = (x - mean) * rstd * (weight + weight_offset) + bias

LayerNorm is the form with a mean [1]_, RMSNorm the form without [2]_.

Inputs become float64, which holds the three smaller dtypes exactly; results are rounded once. Two
rules make the numbers right for every finite row, float64 rows included:

- The mean is a pair ``high + low``. ``high`` is the mean rounded to float64, ``low`` the mean of
  ``x - high``: what the rounding lost. Rows far from zero keep all their digits this way.
- Deviations are scaled by a power of two, which is exact, and eps is scaled along, so that no
  square overflows (1e200) or vanishes (1e-200).

Arguments are not checked here: `npnorm.layer_norm` and its fellows do that.

References
----------
.. [1] Ba, Kiros and Hinton, "Layer Normalization", 2016, arXiv:1607.06450.
.. [2] Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019, arXiv:1910.07467.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from npnorm._results import (
    AddLayerNormStatsResult,
    AddNormResult,
    AddRMSNormStatsResult,
    Array,
    LayerNormResult,
    NormGradients,
    RMSNormResult,
)

from .rows import (
    as_rows,
    as_vector,
    backward_rows,
    compute_dtype,
    delivered,
    epsilon,
    forward_rows,
    jvp_rows,
    rounded,
    scale_of,
    trailing,
)

# fmt: off (the signatures read better as the documentation writes them)

__all__ = [
    "add_layer_norm", "add_rms_norm", "layer_norm", "layer_norm_backward", "layer_norm_jvp",
    "rms_norm", "rms_norm_backward", "rms_norm_jvp",
]

def layer_norm(
    x: ArrayLike, weight: ArrayLike | None = None, bias: ArrayLike | None = None, *,
    axis: int | Sequence[int] = -1, eps: float = 1e-5, weight_offset: float = 0.0,
    round_before_weight: bool = False, out: Array | None = None, return_stats: bool = False,
) -> Array | LayerNormResult:
    """Layer normalization; the parameters are those of `npnorm.layer_norm`.

    Notes
    -----
    ``y = (x - mean) / sqrt(var + eps) * (weight + weight_offset) + bias`` with the mean and the
    population variance of each row; Ba, Kiros and Hinton, 2016, equation 4.

    Examples
    --------
    >>> x = np.array([[40000, 40001, 40002, 40003]], dtype=np.float32)
    >>> layer_norm(x)
    array([[-1.3416355, -0.4472118,  0.4472118,  1.3416355]], dtype=float32)
    """
    y, mean, rstd = _norm(True, x, weight, bias, axis, eps, weight_offset, round_before_weight, out)
    return LayerNormResult(y, mean, rstd) if return_stats else y


def rms_norm(
    x: ArrayLike, weight: ArrayLike | None = None, bias: ArrayLike | None = None, *,
    axis: int | Sequence[int] = -1, eps: float | None = 1e-6, weight_offset: float = 0.0,
    round_before_weight: bool = False, out: Array | None = None, return_stats: bool = False,
) -> Array | RMSNormResult:
    """Root mean square normalization; the parameters are those of `npnorm.rms_norm`.

    Notes
    -----
    ``y = x / sqrt(mean(x**2) + eps) * (weight + weight_offset) + bias``; Zhang and Sennrich, 2019,
    equation 4.

    Examples
    --------
    >>> x = np.array([[1, 7], [-5, 5]], dtype=np.float32)
    >>> rms_norm(x, eps=0.0)
    array([[ 0.2,  1.4],
           [-1. ,  1. ]], dtype=float32)
    """
    y, _, rstd = _norm(False, x, weight, bias, axis, eps, weight_offset, round_before_weight, out)
    return RMSNormResult(y, rstd) if return_stats else y


def layer_norm_backward(
    dy: ArrayLike, x: ArrayLike, weight: ArrayLike | None = None, *,
    mean: ArrayLike | None = None, rstd: ArrayLike | None = None, axis: int | Sequence[int] = -1,
    eps: float = 1e-5, weight_offset: float = 0.0, dresidual: ArrayLike | None = None,
    output_mask: Sequence[bool] | None = None, out: Sequence[Array | None] | None = None,
) -> NormGradients:
    """Gradients of `layer_norm`; the parameters are those of `npnorm.layer_norm_backward`.

    Notes
    -----
    With ``normalized = (x - mean) * rstd``, ``g = dy * (weight + weight_offset)`` and ``mean_row``
    the mean over the D columns,

        dx = rstd * (g - mean_row(g) - normalized * mean_row(g * normalized)) + dresidual
        dweight = sum over rows of dy * normalized
        dbias = sum over rows of dy

    dx is g without its parts along the two directions that a norm ignores: a shift of the row
    and a stretch of it.

    Examples
    --------
    >>> x = np.array([[-2.0, 0.0, 2.0]])
    >>> dy = np.array([[0.0, 3.0, 0.0]])
    >>> dx, dweight, dbias = layer_norm_backward(dy, x, np.ones(3), eps=4 / 3)
    >>> dx
    array([[-0.5,  1. , -0.5]])
    >>> dbias
    array([0., 3., 0.])
    """
    return _gradients(
        True, dy, x, weight, mean, rstd, axis, eps, weight_offset, dresidual, output_mask, out
    )


def rms_norm_backward(
    dy: ArrayLike, x: ArrayLike, weight: ArrayLike | None = None, *,
    rstd: ArrayLike | None = None, axis: int | Sequence[int] = -1, eps: float | None = 1e-6,
    weight_offset: float = 0.0, dresidual: ArrayLike | None = None,
    output_mask: Sequence[bool] | None = None, out: Sequence[Array | None] | None = None,
) -> NormGradients:
    """Gradients of `rms_norm`; the parameters are those of `npnorm.rms_norm_backward`.

    Notes
    -----
    As in `layer_norm_backward` with a mean of 0 and without the term ``mean_row(g)``.

    Examples
    --------
    >>> x = np.array([[3.0, -3.0]])
    >>> dy = np.array([[6.0, 0.0]])
    >>> rms_norm_backward(dy, x, np.ones(2), eps=0.0)
    NormGradients(dx=array([[1., 1.]]), dweight=array([6., 0.]), dbias=array([6., 0.]))
    """
    return _gradients(
        False, dy, x, weight, None, rstd, axis, eps, weight_offset, dresidual, output_mask, out
    )


def layer_norm_jvp(
    x: ArrayLike, weight: ArrayLike | None = None, *, dx: ArrayLike | None = None,
    dweight: ArrayLike | None = None, dbias: ArrayLike | None = None,
    axis: int | Sequence[int] = -1, eps: float = 1e-5, weight_offset: float = 0.0,
    out: Array | None = None,
) -> Array:
    """Directional derivative of `layer_norm`; the parameters are those of `npnorm.layer_norm_jvp`.

    Notes
    -----
    With ``normalized = (x - mean) * rstd`` and ``mean_row`` the mean over the D columns,

        dnormalized = rstd * (dx - mean_row(dx) - normalized * mean_row(dx * normalized))
        dy = dnormalized * (weight + weight_offset) + normalized * dweight + dbias

    The first line is the formula of the gradient: the matrix between dx and dnormalized is
    symmetric.

    Examples
    --------
    >>> x, dx = np.array([[-2.0, 0.0, 2.0]]), np.array([[0.0, 3.0, 0.0]])
    >>> layer_norm_jvp(x, dx=dx, eps=4 / 3)
    array([[-0.5,  1. , -0.5]])
    """
    return _jvp(True, x, weight, dx, dweight, dbias, axis, eps, weight_offset, out)


def rms_norm_jvp(
    x: ArrayLike, weight: ArrayLike | None = None, *, dx: ArrayLike | None = None,
    dweight: ArrayLike | None = None, dbias: ArrayLike | None = None,
    axis: int | Sequence[int] = -1, eps: float | None = 1e-6, weight_offset: float = 0.0,
    out: Array | None = None,
) -> Array:
    """Directional derivative of `rms_norm`; the parameters are those of `npnorm.rms_norm_jvp`.

    Notes
    -----
    As in `layer_norm_jvp` with a mean of 0 and without the term ``mean_row(dx)``.

    Examples
    --------
    >>> x, dx = np.array([[3.0, -3.0]]), np.array([[6.0, 0.0]])
    >>> rms_norm_jvp(x, dx=dx, dbias=np.array([0.0, 0.5]), eps=0.0)
    array([[1. , 1.5]])
    """
    return _jvp(False, x, weight, dx, dweight, dbias, axis, eps, weight_offset, out)


def add_layer_norm(
    x: ArrayLike, residual: ArrayLike, weight: ArrayLike | None = None,
    bias: ArrayLike | None = None, *, axis: int | Sequence[int] = -1, eps: float = 1e-5,
    weight_offset: float = 0.0, round_before_weight: bool = False, out: Array | None = None,
    residual_out: Array | None = None, return_stats: bool = False,
) -> AddNormResult | AddLayerNormStatsResult:
    """`layer_norm` of ``x + residual``; the parameters are those of `npnorm.add_layer_norm`.

    Notes
    -----
    The sum is rounded to x's dtype first, so the result is that of the two separate calls.

    Examples
    --------
    >>> x, residual = np.array([[1.0, 2.0]]), np.array([[-2.0, 1.0]])
    >>> add_layer_norm(x, residual, eps=0.0)
    AddNormResult(y=array([[-1.,  1.]]), residual_out=array([[-1.,  3.]]))
    """
    total = _add(x, residual, residual_out)
    y, mean, rstd = _norm(
        True, total, weight, bias, axis, eps, weight_offset, round_before_weight, out
    )
    if return_stats:
        return AddLayerNormStatsResult(y, total, mean, rstd)
    return AddNormResult(y, total)


def add_rms_norm(
    x: ArrayLike, residual: ArrayLike, weight: ArrayLike | None = None,
    bias: ArrayLike | None = None, *, axis: int | Sequence[int] = -1, eps: float | None = 1e-6,
    weight_offset: float = 0.0, round_before_weight: bool = False, out: Array | None = None,
    residual_out: Array | None = None, return_stats: bool = False,
) -> AddNormResult | AddRMSNormStatsResult:
    """`rms_norm` of ``x + residual``; the parameters are those of `npnorm.add_rms_norm`.

    Notes
    -----
    The sum is rounded to x's dtype first, so the result is that of the two separate calls.

    Examples
    --------
    >>> x, residual = np.array([[1.0, 2.0]]), np.array([[-4.0, 1.0]])
    >>> add_rms_norm(x, residual, eps=0.0)
    AddNormResult(y=array([[-1.,  1.]]), residual_out=array([[-3.,  3.]]))
    """
    total = _add(x, residual, residual_out)
    y, _, rstd = _norm(
        False, total, weight, bias, axis, eps, weight_offset, round_before_weight, out
    )
    if return_stats:
        return AddRMSNormStatsResult(y, total, rstd)
    return AddNormResult(y, total)


@np.errstate(all="ignore")
def _norm(
    centered: bool, x: ArrayLike, weight: ArrayLike | None, bias: ArrayLike | None,
    axis: int | Sequence[int], eps: float | None, weight_offset: float, round_before_weight: bool,
    out: Array | None,
) -> tuple[Array, Array, Array]:
    """Both norms on arrays of any shape: cut into rows, normalize, round once."""
    x = np.asarray(x)
    dtype = x.dtype if out is None else out.dtype
    compute = compute_dtype(x.dtype, dtype)
    y, mean, rstd = forward_rows(
        as_rows(x, axis),
        scale_of(weight, weight_offset, compute),
        0.0 if bias is None else as_vector(bias, compute),
        epsilon(eps, x.dtype),
        centered,
        x.dtype if round_before_weight else None,
    )
    stats_shape = x.shape[: -trailing(axis)] + (1,) * trailing(axis)
    y = delivered(rounded(y, dtype).reshape(x.shape), out)
    return y, mean.reshape(stats_shape), rstd.reshape(stats_shape)


@np.errstate(all="ignore")
def _gradients(
    centered: bool, dy: ArrayLike, x: ArrayLike, weight: ArrayLike | None, mean: ArrayLike | None,
    rstd: ArrayLike | None, axis: int | Sequence[int], eps: float | None, weight_offset: float,
    dresidual: ArrayLike | None, output_mask: Sequence[bool] | None,
    out: Sequence[Array | None] | None,
) -> NormGradients:
    """Both gradients on arrays of any shape: cut into rows, differentiate, round once."""
    dy, x = np.asarray(dy), np.asarray(x)
    parameter = x.dtype if weight is None else np.asarray(weight).dtype
    mask = (True, weight is not None, weight is not None) if output_mask is None else output_mask
    given = (None, None, None) if out is None else out
    dtypes = [
        own if array is None else array.dtype
        for own, array in zip((x.dtype, parameter, parameter), given, strict=True)
    ]
    wanted = (dtype for dtype, want in zip(dtypes, mask, strict=True) if want)
    added = () if dresidual is None else (np.asarray(dresidual).dtype,)
    compute = compute_dtype(x.dtype, dy.dtype, *added, *wanted)
    gradients = backward_rows(
        as_rows(dy, axis),
        as_rows(x, axis),
        scale_of(weight, weight_offset, compute),
        None if mean is None else np.asarray(mean, np.float64).reshape(-1, 1),
        None if rstd is None else np.asarray(rstd, np.float64).reshape(-1, 1),
        0.0 if dresidual is None else as_rows(np.asarray(dresidual), axis),
        epsilon(eps, x.dtype),
        centered,
    )
    shapes = (x.shape,) + 2 * (x.shape[-trailing(axis) :],)
    results = zip(gradients, dtypes, shapes, given, mask, strict=True)
    return NormGradients(*(
        delivered(rounded(values, dtype).reshape(shape), array) if want else None
        for values, dtype, shape, array, want in results
    ))


@np.errstate(all="ignore")
def _jvp(
    centered: bool, x: ArrayLike, weight: ArrayLike | None, dx: ArrayLike | None,
    dweight: ArrayLike | None, dbias: ArrayLike | None, axis: int | Sequence[int],
    eps: float | None, weight_offset: float, out: Array | None,
) -> Array:
    """Both directional derivatives on arrays of any shape: cut into rows, differentiate, round once."""
    x = np.asarray(x)
    dtype = x.dtype if out is None else out.dtype
    inputs = (np.asarray(a).dtype for a in (weight, dx, dweight, dbias) if a is not None)
    dy = jvp_rows(
        as_rows(x, axis),
        scale_of(weight, weight_offset, compute_dtype(x.dtype, dtype, *inputs)),
        0.0 if dx is None else as_rows(np.asarray(dx), axis),
        0.0 if dweight is None else as_vector(dweight, np.dtype(np.float64)),
        0.0 if dbias is None else as_vector(dbias, np.dtype(np.float64)),
        epsilon(eps, x.dtype),
        centered,
    )
    return delivered(rounded(dy, dtype).reshape(x.shape), out)


def _add(x: ArrayLike, residual: ArrayLike, residual_out: Array | None) -> Array:
    """The sum, rounded once to x's dtype."""
    x = np.asarray(x)
    with np.errstate(all="ignore"):
        total = x.astype(np.float64) + np.asarray(residual).astype(np.float64)
        return delivered(rounded(total, x.dtype), residual_out)
