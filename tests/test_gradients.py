"""The gradients are derivatives: central differences of the forward, in float64."""

import numpy as np
import pytest
from table import NORMS, random

import npnorm

# A loss of y.sum() would pass with any dx, for the true dx is 0: dy is random everywhere.
SHAPE = (3, 13)
STEP = 1e-6


def differences(function, array):
    """The gradient of `function` at `array`, one central difference per element."""
    gradient = np.empty_like(array)
    for index in np.ndindex(array.shape):
        there = array.copy()
        there[index] = array[index] + STEP
        above = function(there)
        there[index] = array[index] - STEP
        gradient[index] = (above - function(there)) / (2 * STEP)
    return gradient


@pytest.mark.parametrize("where", ["npnorm", "reference"])
@pytest.mark.parametrize("norm", NORMS, ids=lambda norm: norm.name)
@pytest.mark.parametrize(
    "options",
    [{}, {"eps": 0.5}, {"weight_offset": 1.0}, {"offset": 30.0}, {"scale": 1e-2}, {"axis": (-2, -1)}],
    ids=str,
)
def test_central_differences(where, norm, options):
    options = dict(options)
    x = random(SHAPE, "float64", scale=options.pop("scale", 1.0), offset=options.pop("offset", 0.0))
    count = len(options.get("axis", (0,)))
    weight, bias = random(SHAPE[-count:], "float64", 1), random(SHAPE[-count:], "float64", 2)
    dy = random(SHAPE, "float64", 3)
    if where == "npnorm":
        forward, backward = norm.forward, norm.backward
    else:
        forward, backward = norm.reference(), norm.reference("backward")

    gradients = backward(dy, x, weight, **options)
    for name, analytic in gradients._asdict().items():

        def loss(value, name=name):
            given = {"dx": x, "dweight": weight, "dbias": bias} | {name: value}
            y = forward(given["dx"], given["dweight"], given["dbias"], **options)
            return (dy * y).sum()

        numeric = differences(loss, {"dx": x, "dweight": weight, "dbias": bias}[name])
        # The third derivative in x grows with rstd cubed; the difference of losses loses 1e-16/STEP.
        size = np.abs(analytic).max()
        np.testing.assert_allclose(numeric, analytic, rtol=1e-6, atol=1e-6 * size, err_msg=name)


@pytest.mark.parametrize("norm", NORMS, ids=lambda norm: norm.name)
def test_gradient_is_orthogonal(norm):
    """With eps = 0, dx lies across x; and across the constant row, when the norm centres."""
    x, dy = random((5, 129), "float64", offset=2.0), random((5, 129), "float64", 1)
    dx = norm.backward(dy, x, eps=0.0).dx
    scale = np.abs(dx).sum(axis=1)
    centre = x.mean(axis=1, keepdims=True) if norm.centered else 0.0
    assert (np.abs((dx * (x - centre)).sum(axis=1)) < 1e-13 * scale).all()
    if norm.centered:
        assert (np.abs(dx.sum(axis=1)) < 1e-14 * scale).all()


def test_float32_gradients_agree_with_float64():
    """The one place where the float32 kernels meet the differentiated float64 ones."""
    for norm in NORMS:
        x, dy = random((33, 129)), random((33, 129), seed=1)
        weight = random(129, seed=2)
        narrow = norm.backward(dy, x, weight)
        wide = norm.backward(*(a.astype(np.float64) for a in (dy, x, weight)))
        for got, want in zip(narrow, wide, strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    assert npnorm.reference.layer_norm(x).dtype == np.float32
