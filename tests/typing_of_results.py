"""What a type checker sees of npnorm. Nothing here is run: `make lint` checks it, and so does test_typing.py."""

from typing import Any, assert_type

import numpy as np
from numpy.typing import NDArray

import npnorm
from npnorm._results import (
    AddLayerNormStatsResult,
    AddNormResult,
    AddRMSNormStatsResult,
    LayerNormResult,
    NormGradients,
    RMSNormResult,
)

Array = NDArray[Any]


def check(x: NDArray[np.float32], weight: NDArray[np.float32], flag: bool) -> None:
    assert_type(npnorm.layer_norm(x, weight), Array)
    assert_type(npnorm.layer_norm(x, return_stats=False), Array)
    assert_type(npnorm.layer_norm(x, return_stats=True), LayerNormResult)
    assert_type(npnorm.layer_norm(x, return_stats=flag), Array | LayerNormResult)
    assert_type(npnorm.rms_norm([1.0, 2.0], eps=None), Array)
    assert_type(npnorm.rms_norm(x, out=x, return_stats=True), RMSNormResult)
    assert_type(npnorm.rms_norm(x, return_stats=flag), Array | RMSNormResult)

    assert_type(npnorm.add_layer_norm(x, x, weight), AddNormResult)
    assert_type(npnorm.add_layer_norm(x, x, return_stats=True), AddLayerNormStatsResult)
    assert_type(npnorm.add_rms_norm(x, x).residual_out, Array)
    assert_type(npnorm.add_rms_norm(x, x, return_stats=True), AddRMSNormStatsResult)
    assert_type(npnorm.add_rms_norm(x, x, return_stats=flag), AddNormResult | AddRMSNormStatsResult)

    y, mean, rstd = npnorm.layer_norm(x, weight, return_stats=True)
    assert_type(mean, Array)
    gradients = npnorm.layer_norm_backward(y, x, weight, mean=mean, rstd=rstd)
    assert_type(gradients, NormGradients)
    assert_type(gradients.dweight, Array | Any)
    dx, dweight, _ = npnorm.rms_norm_backward(y, x, weight)
    weight -= 0.1 * dweight
    assert_type(dx, Array | Any)

    assert_type(npnorm.layer_norm_jvp(x, weight, dx=x, dbias=weight), Array)
    assert_type(npnorm.rms_norm_jvp(x, dx=x, eps=None, out=y), Array)

    layer = npnorm.LayerNorm(x.shape[-1])
    assert_type(layer(x), Array)
    assert_type(layer(x, return_stats=True), LayerNormResult)
    assert_type(layer(x, return_stats=flag), Array | LayerNormResult)
    assert_type(layer.weight, Array | None)
    assert_type(layer.backward(y, x, mean=mean, rstd=rstd), NormGradients)
    assert_type(npnorm.RMSNorm((x.shape[-1],), eps=None)(x, return_stats=True), RMSNormResult)

    assert_type(npnorm.get_num_threads(), int)
    assert_type(npnorm.reference.layer_norm(x), Array | LayerNormResult)
    assert_type(npnorm.reference.layer_norm_jvp(x, dx=x), Array)


def check_errors(x: NDArray[np.float32]) -> None:
    """Mistakes that a type checker finds: each `ignore` is an error if it is not needed."""
    npnorm.layer_norm(x, axis=0.5)  # type: ignore[call-overload]
    npnorm.layer_norm(x, eps=None)  # type: ignore[call-overload]
    npnorm.layer_norm(x, None, None, -1)  # type: ignore[call-overload]
    npnorm.layer_norm(x, out="y")  # type: ignore[call-overload]
    npnorm.layer_norm_backward(x)  # type: ignore[call-arg]
    npnorm.layer_norm_jvp(x, x, x)  # type: ignore[call-arg]
    npnorm.rms_norm(x, return_stats=True).mean  # type: ignore[attr-defined]  # noqa: B018
