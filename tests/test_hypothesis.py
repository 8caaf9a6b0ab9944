"""Any shape, layout, dtype and option that Hypothesis thinks of, against the bounds. Derandomized."""

import numpy as np
import pytest
from bounds import HAS_LONGDOUBLE, SMALLEST, assert_same_bits, check_backward, check_forward
from table import DTYPES, NORMS

hypothesis = pytest.importorskip("hypothesis")
given, settings, st = hypothesis.given, hypothesis.settings, hypothesis.strategies
extra = pytest.importorskip("hypothesis.extra.numpy")

bounded = settings(derandomize=True, deadline=None, max_examples=150, database=None)
norms = st.sampled_from(NORMS)
# Each combination of dtypes is a kernel to compile: x, weight and bias have the same.
dtypes = st.sampled_from([name for name in DTYPES if name != "float64" or HAS_LONGDOUBLE])
# Magnitudes that leave exact values within each dtype's reach, y and dx included.
magnitude = {"float16": 1e3, "bfloat16": 1e18, "float32": 1e18, "float64": 1e150}


@st.composite
def arrays(draw, shape, dtype, size=None):
    size = magnitude[dtype] if size is None else size
    kind = draw(st.sampled_from(["small", "any", "integers"]))
    elements = {
        "small": st.floats(-4, 4, width=16),
        "any": st.floats(-size, size, allow_subnormal=False),
        "integers": st.integers(-3, 3).map(float),
    }[kind]
    values = draw(extra.arrays(np.float64, shape, elements=elements))
    return values.astype(DTYPES[dtype])


@st.composite
def views(draw, dtype):
    """A view: a slice with any step of a larger array, its axes in any order."""
    shape = draw(extra.array_shapes(min_dims=1, max_dims=4, min_side=0, max_side=6))
    steps = [draw(st.sampled_from([1, 1, -1, 2, -3])) for _ in shape]
    base = draw(arrays(tuple(n * abs(step) for n, step in zip(shape, steps, strict=True)), dtype))
    view = base[tuple(slice(None, None, step) for step in steps)]
    order = draw(st.permutations(range(len(shape))))
    return view.transpose(order)


@st.composite
def calls(draw):
    dtype = draw(dtypes)
    x = draw(views(dtype))
    count = draw(st.integers(1, x.ndim))
    shape = x.shape[-count:]
    return {
        "norm": draw(norms),
        "x": x,
        "axis": tuple(draw(st.permutations(range(-count, 0)))),
        "weight": draw(st.none() | arrays(shape, dtype, 4.0)),
        "bias": draw(st.none() | arrays(shape, dtype, 4.0)),
        "eps": draw(st.sampled_from([1e-5, 1e-12, 1.0, 1e-2])),
        "dtype": dtype,
        "data": draw(st.integers(0, 2**32 - 1)),
    }


@bounded
@given(calls())
def test_forward(call):
    norm, x, axis = call["norm"], call["x"], call["axis"]
    options = {"axis": axis, "eps": call["eps"]}
    y = norm.forward(x, call["weight"], call["bias"], **options)
    assert y.dtype == x.dtype and y.shape == x.shape
    check_forward(norm, y, x, call["weight"], call["bias"], **options)
    copy = np.ascontiguousarray(x)
    assert_same_bits(norm.forward(copy, call["weight"], call["bias"], **options), y)
    reference = norm.reference()(x, call["weight"], call["bias"], **options)
    check_forward(norm, reference, x, call["weight"], call["bias"], **options)


@bounded
@given(calls())
def test_backward(call):
    norm, x, axis = call["norm"], call["x"], call["axis"]
    dy = np.random.default_rng(call["data"]).standard_normal(x.shape).astype(x.dtype)
    options = {"axis": axis, "eps": call["eps"]}
    for backward in (norm.backward, norm.reference("backward")):
        gradients = backward(dy, x, call["weight"], output_mask=(True,) * 3, **options)
        check_backward(norm, gradients, dy, x, call["weight"], **options)


@bounded
@given(calls())
def test_add(call):
    norm, x = call["norm"], call["x"]
    residual = np.random.default_rng(call["data"]).standard_normal(x.shape).astype(x.dtype)
    options = {"axis": call["axis"], "eps": call["eps"]}
    total = x + residual
    result = norm.add(x, residual, call["weight"], call["bias"], **options)
    assert_same_bits(result.residual_out, np.ascontiguousarray(total))
    expected = norm.forward(total, call["weight"], call["bias"], **options)
    assert_same_bits(result.y, expected)


@bounded
@given(st.data(), norms, dtypes)
def test_rows_are_independent(data, norm, dtype):
    rows, cols = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 40))
    x = data.draw(arrays((rows, cols), dtype))
    chosen = data.draw(st.lists(st.integers(0, rows - 1), min_size=1, max_size=9))
    assert_same_bits(norm.forward(x[chosen]), norm.forward(x)[chosen])


def test_magnitudes_are_no_subnormals():
    """What the strategies draw stays above the numbers whose spacing is absolute."""
    assert all(SMALLEST[name] < 1e-7 for name in magnitude)
