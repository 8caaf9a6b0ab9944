"""The specification: every function of npnorm in plain NumPy, with float64 inside.

Read this module to learn what the fast kernels compute; the tests hold them to it. ``x`` is seen as
rows by columns: N rows from the lead axes, D columns from the normalized trailing axes. For one row

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

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from npnorm._results import (
    AddLayerNormStatsResult,
    AddNormResult,
    AddRMSNormStatsResult,
    LayerNormResult,
    NormGradients,
    RMSNormResult,
)

# mypy: allow-untyped-defs, allow-incomplete-defs
# fmt: off (the signatures read better as the documentation writes them)

__all__ = [
    "add_layer_norm", "add_rms_norm", "layer_norm", "layer_norm_backward", "rms_norm",
    "rms_norm_backward",
]

Array = NDArray[Any]


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
def _norm(centered, x, weight, bias, axis, eps, weight_offset, round_before_weight, out):
    """Both norms on arrays of any shape: cut into rows, normalize, round once."""
    x = np.asarray(x)
    dtype = x.dtype if out is None else out.dtype
    compute = _compute_dtype(x.dtype, dtype)
    y, mean, rstd = _forward(
        _rows(x, axis),
        _scale(weight, weight_offset, compute),
        0.0 if bias is None else _vector(bias, compute),
        _epsilon(eps, x.dtype),
        centered,
        x.dtype if round_before_weight else None,
    )
    stats_shape = x.shape[: -_count(axis)] + (1,) * _count(axis)
    y = _deliver(_round(y, dtype).reshape(x.shape), out)
    return y, mean.reshape(stats_shape), rstd.reshape(stats_shape)


@np.errstate(all="ignore")
def _gradients(
    centered, dy, x, weight, mean, rstd, axis, eps, weight_offset, dresidual, output_mask, out
):
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
    compute = _compute_dtype(x.dtype, dy.dtype, *added, *wanted)
    gradients = _backward(
        _rows(dy, axis),
        _rows(x, axis),
        _scale(weight, weight_offset, compute),
        None if mean is None else np.asarray(mean, np.float64).reshape(-1, 1),
        None if rstd is None else np.asarray(rstd, np.float64).reshape(-1, 1),
        0.0 if dresidual is None else _rows(np.asarray(dresidual), axis),
        _epsilon(eps, x.dtype),
        centered,
    )
    shapes = (x.shape,) + 2 * (x.shape[-_count(axis) :],)
    results = zip(gradients, dtypes, shapes, given, mask, strict=True)
    return NormGradients(*(
        _deliver(_round(values, dtype).reshape(shape), array) if want else None
        for values, dtype, shape, array, want in results
    ))


def _forward(x, scale, bias, eps, centered, rounded_to=None):
    """Return y, mean and rstd of the rows of `x`, unrounded.

    `x` is float64, or np.longdouble for an oracle of float64 itself. `rounded_to` is the dtype of
    `round_before_weight`.
    """
    normalized, mean, rstd = _normalize(x, None, None, eps, centered)
    if rounded_to is not None:
        normalized = _round(normalized, rounded_to).astype(x.dtype)
    return normalized * scale + bias, mean, rstd


def _backward(dy, x, scale, mean, rstd, dresidual, eps, centered):
    """Return dx, dweight and dbias of the rows of `dy` and `x`, unrounded.

    Statistics that are None are computed, and then used as if they had been given: same bits.
    """
    if rstd is None or (centered and mean is None):
        _, own_mean, own_rstd = _normalize(x, None, None, eps, centered)
        mean = own_mean if mean is None else mean
        rstd = own_rstd if rstd is None else rstd
    normalized, _, rstd = _normalize(x, mean, rstd, eps, centered)
    g = dy * scale
    projection = normalized * _mean(g * normalized)
    if centered:
        projection = projection + _mean(g)
    return rstd * (g - projection) + dresidual, _sum_rows(dy * normalized), _sum_rows(dy)


def _normalize(x, mean, rstd, eps, centered):
    """Return ``(x - mean) * rstd`` of each row, mean and rstd; compute the statistics not given."""
    # Sums of the largest float64 numbers overflow, the mean of the smallest has no digits left.
    largest = np.abs(x).max(axis=1, keepdims=True, initial=0.0)
    exponent = 128 * ((largest > 2.0**900).astype(np.int32) - (largest < 2.0**-900))
    deviations = np.ldexp(x, -exponent)
    if not centered:
        mean = np.zeros_like(largest)
    else:
        if mean is None:
            # Shifted by the first element, the sum is exact for constant rows.
            first = deviations[:, :1] if x.shape[1] else np.nan
            mean = np.ldexp(first + _mean(deviations - first), exponent)
        deviations = deviations - np.ldexp(mean, -exponent)
        deviations = deviations - _mean(deviations)  # the low part of the mean

    # Divide by the power of two just above the largest deviation, or above sqrt(eps).
    largest = np.abs(deviations).max(axis=1, keepdims=True, initial=0.0)
    power = np.frexp(np.maximum(largest, np.ldexp(np.sqrt(eps), -exponent)))[1]
    deviations, exponent = np.ldexp(deviations, -power), exponent + power
    if rstd is not None:
        return deviations * np.ldexp(rstd, exponent), mean, rstd
    variance = _mean(deviations * deviations)
    scaled_rstd = 1.0 / np.sqrt(variance + np.ldexp(eps, -2 * exponent))
    return deviations * scaled_rstd, mean, np.ldexp(scaled_rstd, -exponent)


def _mean(rows):
    """Mean of each row, as a column; NaN without columns."""
    return rows.sum(axis=1, keepdims=True) / rows.shape[1]


def _sum_rows(rows):
    """Sum over the rows; along contiguous memory, where NumPy adds pairwise."""
    return np.ascontiguousarray(rows.T).sum(axis=1)


def _add(x, residual, residual_out):
    """The sum, rounded once to x's dtype."""
    x = np.asarray(x)
    with np.errstate(all="ignore"):
        total = x.astype(np.float64) + np.asarray(residual).astype(np.float64)
        return _deliver(_round(total, x.dtype), residual_out)


def _count(axis):
    """How many trailing axes `axis` names."""
    return len(axis) if isinstance(axis, Sequence) else 1


def _rows(x, axis):
    """`x` as contiguous float64 rows by columns."""
    lead, normalized = x.shape[: -_count(axis)], x.shape[-_count(axis) :]
    return x.astype(np.float64, order="C").reshape(math.prod(lead), math.prod(normalized))


def _compute_dtype(*dtypes):
    """float64 when any of the dtypes is, else float32."""
    return np.dtype(np.float64 if any(d.name == "float64" for d in dtypes) else np.float32)


def _epsilon(eps, dtype):
    """eps, or for None the machine epsilon of the compute dtype of an x of `dtype`; a float64 scalar."""
    return np.float64(np.finfo(_compute_dtype(dtype)).eps if eps is None else eps)


def _vector(parameter, compute):
    """A weight or bias in the compute dtype, as one row."""
    return np.asarray(parameter).astype(compute).reshape(1, -1)


def _scale(weight, weight_offset, compute):
    """What multiplies the normalized rows, in float64; the offset is added in the compute dtype."""
    if weight is None:
        return 1.0
    return (_vector(weight, compute) + compute.type(weight_offset)).astype(np.float64)


def _round(values, dtype):
    """Round float64 `values` once to `dtype`, in native byte order."""
    if dtype.name != "bfloat16":
        return values.astype(dtype if dtype.isnative else dtype.newbyteorder("="))
    # ml_dtypes goes through float32 and rounds twice. Rounding that step to odd keeps what the
    # second rounding must know: that the number was not a tie.
    narrow = values.astype(np.float32)
    bits = narrow.view(np.uint32)
    bits -= np.abs(narrow) > np.abs(values)
    bits |= narrow != values
    return narrow.astype(dtype)


def _deliver(result, out):
    """Return `result`, or `out` filled with it."""
    if out is None:
        return result
    out[...] = result
    return out
