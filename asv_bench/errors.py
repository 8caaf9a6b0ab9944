"""Errors of a norm's results in u, the machine epsilon of their dtype, as docs/numerics.md measures them.

The exact values are those of `npnorm.reference` in float64.
"""

import numpy as np

import npnorm.reference as reference


def precision(dtype):
    """u and the smallest subnormal."""
    if np.dtype(dtype).name == "bfloat16":
        return 2.0**-7, 2.0**-133
    info = np.finfo(dtype)
    return float(info.eps), float(info.smallest_subnormal)


@np.errstate(all="ignore")
def forward_error(kind, eps, y, x, weight, bias=None):
    """The smallest c with |y - exact| <= c u (|x̂ w| + |b|) + u² |mean rstd w| + (1 + |rstd w|) s."""
    u, s = precision(x.dtype)
    x, weight = (array.astype(np.float64) for array in (x, weight))
    bias = np.zeros_like(weight) if bias is None else bias.astype(np.float64)
    norm = reference.layer_norm if kind == "LN" else reference.rms_norm
    scaled, *mean, rstd = norm(x, weight, eps=eps, return_stats=True)
    scale = np.abs(rstd * weight)
    allowed = (1 + scale) * s + (u**2 * np.abs(mean[0]) * scale if mean else 0)
    return _worst(y, scaled + bias, u * (np.abs(scaled) + np.abs(bias)), allowed)


@np.errstate(all="ignore")
def backward_error(kind, eps, gradients, dy, x, weight):
    """The smallest c with |dx - exact| <= c u rstd (|g| + mean|g| + |x̂| mean|g x̂|) + (1 + rstd) s,
    and that with |dweight - exact| <= c u Σ|dy x̂| + s."""
    u, s = precision(x.dtype)
    dy, x, weight = (array.astype(np.float64) for array in (dy, x, weight))
    name = "layer_norm" if kind == "LN" else "rms_norm"
    normalized, *_, rstd = getattr(reference, name)(x, eps=eps, return_stats=True)
    dx, dweight, _ = getattr(reference, f"{name}_backward")(dy, x, weight, eps=eps)
    g, size = np.abs(dy * weight), np.abs(normalized)
    scale = rstd * (g + _mean(g) + size * _mean(g * size))
    sums = np.abs(dy * normalized).sum(axis=0)
    return (
        _worst(gradients[0], dx, u * scale, (1 + rstd) * s),
        _worst(gradients[1], dweight, u * sums, s),
    )


def _worst(actual, exact, unit, allowed):
    return float((np.maximum(np.abs(actual - exact) - allowed, 0) / unit).max())


def _mean(rows):
    return rows.mean(axis=-1, keepdims=True)
