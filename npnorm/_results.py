"""The named tuples that npnorm's functions return."""

from typing import Any, NamedTuple

from numpy.typing import NDArray

Array = NDArray[Any]
"""An array of any dtype."""

Checked = Any
"""A checked array, of NumPy or a `DeviceArray`."""


class LayerNormResult(NamedTuple):
    """`layer_norm(..., return_stats=True)`: mean and rstd are float64 and broadcast against x."""

    y: Array
    mean: Array
    rstd: Array


class RMSNormResult(NamedTuple):
    """`rms_norm(..., return_stats=True)`: rstd is float64 and broadcasts against x."""

    y: Array
    rstd: Array


class AddNormResult(NamedTuple):
    """`add_layer_norm` and `add_rms_norm`: the norm of the rounded sum, and that sum."""

    y: Array
    residual_out: Array


class AddLayerNormStatsResult(NamedTuple):
    """`add_layer_norm(..., return_stats=True)`."""

    y: Array
    residual_out: Array
    mean: Array
    rstd: Array


class AddRMSNormStatsResult(NamedTuple):
    """`add_rms_norm(..., return_stats=True)`."""

    y: Array
    residual_out: Array
    rstd: Array


class NormGradients(NamedTuple):
    """The gradients of a norm; what `output_mask` left out is None."""

    # "Or Any", not "or None": who asked for a gradient need not prove to a type checker that it is there.
    dx: Array | Any
    dweight: Array | Any
    dbias: Array | Any
