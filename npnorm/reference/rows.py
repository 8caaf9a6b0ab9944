"""The arithmetic of the specification, on rows by columns of float64, and how arrays become rows."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from npnorm._results import Array

Dtype = np.dtype[Any]
Number = float | np.floating[Any]


def forward_rows(
    x: Array, scale: Array | float, bias: Array | float, eps: Number, centered: bool,
    rounded_to: Dtype | None = None,
) -> tuple[Array, Array, Array]:  # fmt: skip
    """Return y, mean and rstd of the rows of `x`, unrounded.

    `x` is float64, or np.longdouble for an oracle of float64 itself. `rounded_to` is the dtype of
    `round_before_weight`.
    """
    normalized, mean, rstd = normalize(x, None, None, eps, centered)
    if rounded_to is not None:
        normalized = rounded(normalized, rounded_to).astype(x.dtype)
    return normalized * scale + bias, mean, rstd


def backward_rows(
    dy: Array, x: Array, scale: Array | float, mean: Array | None, rstd: Array | None,
    dresidual: Array | float, eps: Number, centered: bool,
) -> tuple[Array, Array, Array]:  # fmt: skip
    """Return dx, dweight and dbias of the rows of `dy` and `x`, unrounded.

    Statistics that are None are computed, and then used as if they had been given: same bits.
    """
    if rstd is None or (centered and mean is None):
        _, own_mean, own_rstd = normalize(x, None, None, eps, centered)
        mean = own_mean if mean is None else mean
        rstd = own_rstd if rstd is None else rstd
    normalized, _, rstd = normalize(x, mean, rstd, eps, centered)
    dx = rstd * without_ignored(dy * scale, normalized, centered) + dresidual
    return dx, sum_of_rows(dy * normalized), sum_of_rows(dy)


def jvp_rows(
    x: Array, scale: Array | float, dx: Array | float, dweight: Array | float, dbias: Array | float,
    eps: Number, centered: bool,
) -> Array:  # fmt: skip
    """Return dy of the rows of `x` and `dx`, unrounded; tangents that were not given are 0."""
    normalized, _, rstd = normalize(x, None, None, eps, centered)
    dx = np.broadcast_to(dx, x.shape)
    dnormalized = rstd * without_ignored(dx, normalized, centered)
    dy: Array = dnormalized * scale + normalized * dweight + dbias
    return dy


def without_ignored(rows: Array, normalized: Array, centered: bool) -> Array:
    """Rows without their parts along what a norm ignores: a stretch of its row, and a shift."""
    projection = normalized * mean_of_rows(rows * normalized)
    if centered:
        projection = projection + mean_of_rows(rows)
    rest: Array = rows - projection
    return rest


def normalize(
    x: Array, mean: Array | None, rstd: Array | None, eps: Number, centered: bool
) -> tuple[Array, Array, Array]:
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
            mean = np.ldexp(first + mean_of_rows(deviations - first), exponent)
        deviations = deviations - np.ldexp(mean, -exponent)
        deviations = deviations - mean_of_rows(deviations)  # the low part of the mean

    # Divide by the power of two just above the largest deviation, or above sqrt(eps).
    largest = np.abs(deviations).max(axis=1, keepdims=True, initial=0.0)
    power = np.frexp(np.maximum(largest, np.ldexp(np.sqrt(eps), -exponent)))[1]
    deviations, exponent = np.ldexp(deviations, -power), exponent + power
    if rstd is not None:
        return deviations * np.ldexp(rstd, exponent), mean, rstd
    variance = mean_of_rows(deviations * deviations)
    scaled_rstd = 1.0 / np.sqrt(variance + np.ldexp(eps, -2 * exponent))
    return deviations * scaled_rstd, mean, np.ldexp(scaled_rstd, -exponent)


def mean_of_rows(rows: Array) -> Array:
    """Mean of each row, as a column; NaN without columns."""
    mean: Array = rows.sum(axis=1, keepdims=True) / rows.shape[1]
    return mean


def sum_of_rows(rows: Array) -> Array:
    """Sum over the rows; along contiguous memory, where NumPy adds pairwise."""
    total: Array = np.ascontiguousarray(rows.T).sum(axis=1)
    return total


def trailing(axis: int | Sequence[int]) -> int:
    """How many trailing axes `axis` names."""
    return len(axis) if isinstance(axis, Sequence) else 1


def as_rows(x: Array, axis: int | Sequence[int]) -> NDArray[np.float64]:
    """`x` as contiguous float64 rows by columns."""
    count = trailing(axis)
    shape = math.prod(x.shape[:-count]), math.prod(x.shape[-count:])
    return x.astype(np.float64, order="C").reshape(shape)


def compute_dtype(*dtypes: Dtype) -> Dtype:
    """float64 when any of the dtypes is, else float32."""
    return np.dtype(np.float64 if any(d.name == "float64" for d in dtypes) else np.float32)


def epsilon(eps: float | None, dtype: Dtype) -> np.float64:
    """eps, or for None the machine epsilon of the compute dtype of an x of `dtype`; a float64 scalar."""
    return np.float64(np.finfo(compute_dtype(dtype)).eps if eps is None else eps)


def as_vector(parameter: ArrayLike, compute: Dtype) -> Array:
    """A weight or bias in the compute dtype, as one row."""
    return np.asarray(parameter).astype(compute).reshape(1, -1)


def scale_of(weight: ArrayLike | None, weight_offset: float, compute: Dtype) -> Array | float:
    """What multiplies the normalized rows, in float64; the offset is added in the compute dtype."""
    if weight is None:
        return 1.0
    scale: Array = (as_vector(weight, compute) + compute.type(weight_offset)).astype(np.float64)
    return scale


def rounded(values: Array, dtype: Dtype) -> Array:
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


def delivered(result: Array, out: Array | None) -> Array:
    """Return `result`, or `out` filled with it."""
    if out is None:
        return result
    out[...] = result
    return out
