"""The contract's bounds on the error of every number, as the documentation states them.

With u the machine epsilon of the output's dtype, s its smallest subnormal, and * the exact value:

    |y - y*|   <= 3u (|x̂* w| + |b|) + u² |mean* rstd* w| + (1 + |rstd* w|) s     0.51u for halves
    |dx - dx*| <= 4u rstd (|g| + mean|g| + |x̂| mean|g x̂|)
    |dweight - dweight*| <= Σ |dy| (3u |x̂| + u² |mean rstd|)
    |dbias - dbias*| <= u Σ|dy|

float64, whose sums have no wider type to run in: 8u ((|x̂*| + 1) |w| + |b|) for y, and for the
gradients four times the above with |x̂| + 1 for |x̂|.

    |dy - dy*| <= 0.51u |dy*| + 2^-49 S        of a directional derivative, float64 too, with
    S = rstd |w| (|dx| + mean|dx| + n mean(|dx| n)) + n |dweight| + |dbias| and n = |x̂| + 1

Two things any implementation needs are added to the derivatives: (1 + rstd) s, as in the forward, for
nothing can be nearer than the subnormal numbers lie, and u |dresidual| for the one addition.

The exact values are computed here, apart from the package's own reference, in NumPy's longdouble.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from ._results import Array

LONG = np.longdouble
# 64 bits and a wide exponent on x86-64; plain float64 on some platforms, too little to judge float64.
HAS_LONGDOUBLE = np.finfo(LONG).nmant > np.finfo(np.float64).nmant

EPSILON = {
    "float16": 2.0**-10,
    "bfloat16": 2.0**-7,
    "float32": 2.0**-23,
    "float64": 2.0**-52,
}
SMALLEST = {
    "float16": 2.0**-24,
    "bfloat16": 2.0**-133,
    "float32": 2.0**-149,
    "float64": 2.0**-1074,
}
LARGEST = {
    "float16": 65504.0,
    "bfloat16": (2 - 2.0**-7) * 2.0**127,
    "float32": (2 - 2.0**-23) * 2.0**127,
    "float64": (2 - 2.0**-52) * 2.0**1023,
}


class Exact(NamedTuple):
    """The exact statistics of each row, as columns, and the normalized rows."""

    normalized: Array
    mean: Array
    rstd: Array


@np.errstate(all="ignore")
def normalize(rows: Array, centered: bool, eps: float) -> Exact:
    """Two passes over long doubles, the mean mended by a third."""
    if rows.shape[1] == 0:
        nothing = np.full((len(rows), 1), np.nan, LONG)
        return Exact(rows, nothing, nothing)
    deviations = rows
    mean: Array = np.zeros((len(rows), 1), LONG)
    if centered:
        mean = rows[:, :1] + (rows - rows[:, :1]).mean(axis=1, keepdims=True)
        deviations = rows - mean
        deviations = deviations - deviations.mean(axis=1, keepdims=True)
    rstd = 1 / np.sqrt((deviations * deviations).mean(axis=1, keepdims=True) + LONG(eps))
    return Exact(deviations * rstd, mean, rstd)


def forward_bound(name: str, exact: Exact, product: Array, scale: Array, shift: Array) -> Array:
    """The bound on y, where `product` is the exact normalized rows times `scale`."""
    u, s = LONG(EPSILON[name]), LONG(SMALLEST[name])
    if name == "float64":
        return 8 * u * ((np.abs(exact.normalized) + 1) * np.abs(scale) + np.abs(shift))
    factor = LONG(3) if name == "float32" else LONG("0.51")
    return (
        factor * u * (np.abs(product) + np.abs(shift))
        + u**2 * np.abs(exact.mean * exact.rstd * scale)
        + (1 + np.abs(exact.rstd * scale)) * s
    )


def dx_and_bound(name: str, centered: bool, g: Array, exact: Exact) -> tuple[Array, Array]:
    """The exact dx, without a dresidual, and its bound."""

    size, factor = np.abs(exact.normalized), 4
    if name == "float64":
        size, factor = size + 1, 16
    bound = factor * LONG(EPSILON[name]) * exact.rstd * _size_of_dx(g, size)
    return _projected(centered, g, exact), bound + (1 + exact.rstd) * LONG(SMALLEST[name])


def jvp_and_bound(
    name: str, centered: bool, dx: Array, scale: Array, dweight: Array, dbias: Array, exact: Exact
) -> tuple[Array, Array]:
    """The exact directional derivative dy, and its bound. `scale`, `dweight` and `dbias` are vectors or numbers."""
    normalized, rstd = exact.normalized, exact.rstd
    dy = _projected(centered, dx, exact) * scale + normalized * dweight + dbias
    size, weight, change = np.abs(normalized) + 1, np.abs(scale), np.abs(dweight)
    whole = rstd * weight * _size_of_dx(dx, size) + size * change + np.abs(dbias)
    lost = LONG(SMALLEST[name]) + LONG(SMALLEST["float64"]) * ((1 + rstd) * weight + change)
    return dy, LONG("0.51") * LONG(EPSILON[name]) * np.abs(dy) + LONG(2.0**-49) * whole + lost


def _projected(centered: bool, g: Array, exact: Exact) -> Array:
    """The rows g times the Jacobian of the normalized rows, which is symmetric."""
    dx = g - exact.normalized * _mean(g * exact.normalized)
    if centered:
        dx = dx - _mean(g)
    return dx * exact.rstd


def _size_of_dx(g: Array, size: Array) -> Array:
    """The sum of the sizes of a gradient's terms, without rstd; `size` is that of the normalized rows."""
    return np.abs(g) + _mean(np.abs(g)) + size * _mean(np.abs(g) * size)


def _mean(rows: Array) -> Array:
    return rows.mean(axis=1, keepdims=True) if rows.shape[1] else np.full((1, 1), np.nan)


def dweight_bound(dy: Array, exact: Exact) -> Callable[[str], Array]:
    """The bound on dweight by dtype, in terms to add up over rows."""

    def bound(name: str) -> Array:
        u, size, factor = LONG(EPSILON[name]), np.abs(exact.normalized), 1
        if name == "float64":
            size, factor = size + 1, 4
        subnormal = (1 + exact.rstd) * SMALLEST["float64" if name == "float64" else "float32"]
        lost_of_mean = u**2 * np.abs(exact.mean * exact.rstd)
        return np.abs(dy) * (factor * (3 * u * size + lost_of_mean) + subnormal)

    return bound


def dbias_bound(dy: Array) -> Callable[[str], Array]:
    """The bound on dbias by dtype, in terms to add up over rows."""

    def bound(name: str) -> Array:
        return (4 if name == "float64" else 1) * LONG(EPSILON[name]) * np.abs(dy)

    return bound
