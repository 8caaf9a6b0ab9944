"""The recipes of docs/checkpoints.md against the published formulas, and against the real libraries.

The formulas stand here as their libraries write them, step by step in float32, in plain NumPy. In half
precision the place of every rounding shows: the right recipe differs in fewer than 1 number of 1000,
and any other convention in more than 1 of 10. That is tested too.
"""

import doctest
import importlib.util
import tracemalloc
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from bounds import EPSILON, assert_same_bits
from table import DTYPES, HALVES

import npnorm

ROOT = Path(__file__).parents[1]
ROWS, WIDTH = 24, 768


@pytest.fixture(scope="module")
def page():
    """The functions that docs/checkpoints.md defines."""
    text = (ROOT / "docs" / "checkpoints.md").read_text(encoding="utf-8")
    names = {"np": np, "npnorm": npnorm}
    for example in doctest.DocTestParser().get_examples(text):
        if example.source.startswith("def "):
            exec(example.source, names)
    return SimpleNamespace(**names)


@pytest.fixture(params=DTYPES)
def arrays(request):
    return make_arrays(DTYPES[request.param])


@pytest.fixture(params=["float16", "float32"])
def onnx_arrays(request):
    return make_arrays(DTYPES[request.param])


@pytest.fixture(params=HALVES)
def half_arrays(request):
    return make_arrays(HALVES[request.param])


def make_arrays(dtype):
    random = np.random.default_rng(5)
    return SimpleNamespace(
        dtype=dtype,
        x=(2 * random.standard_normal((ROWS, WIDTH)) + 1).astype(dtype),
        skip=random.standard_normal((ROWS, WIDTH)).astype(dtype),
        weight=random.uniform(0.5, 2, WIDTH).astype(dtype),
        small=(0.3 * random.standard_normal(WIDTH)).astype(dtype),
        bias=random.standard_normal(WIDTH).astype(dtype),
    )


def single(x):
    """As float32; float64 stays as it is."""
    return x if x.dtype == np.float64 else x.astype(np.float32)


def terms_of(weight, bias):
    """Of a layer norm, where the mean of `make_arrays` is less than its deviation."""
    return np.abs(weight.astype(np.float64)) + np.abs(bias.astype(np.float64))


def share_of_differences(actual, published):
    assert actual.dtype == published.dtype
    return np.mean(actual != published)


def assert_agrees(actual, published, terms=0):
    """Up to rounding errors of float32 (float64); in half precision, few numbers, one unit of rounding.

    `terms` are the sizes of what was added and subtracted on the way: such sums cancel.
    """
    assert actual.dtype == published.dtype
    assert actual.shape == published.shape
    half = actual.dtype.itemsize == 2
    units = 2 if half else 16
    wide = published.astype(np.float64)
    bound = units * EPSILON[actual.dtype.name] * (np.abs(wide) + terms)
    np.testing.assert_array_less(np.abs(actual.astype(np.float64) - wide), bound + 1e-300)
    if half:
        assert share_of_differences(actual, published) < 1 / 1000


def assert_differs(other, published):
    assert share_of_differences(other, published) > 1 / 10


# The published formulas


def mean_square_normalized(x, eps):
    return x * (1 / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + x.dtype.type(eps)))


def normalized(x, eps, axes=(-1,)):
    deviations = x - x.mean(axis=axes, keepdims=True)
    variance = np.mean(deviations**2, axis=axes, keepdims=True)
    return deviations / np.sqrt(variance + x.dtype.type(eps))


def torch_rms_norm(x, weight, eps):
    return (mean_square_normalized(single(x), eps) * single(weight)).astype(x.dtype)


def torch_layer_norm(x, weight, bias, eps):
    return (normalized(single(x), eps) * single(weight) + single(bias)).astype(x.dtype)


def llama_rms_norm(x, weight, eps):
    return weight * mean_square_normalized(single(x), eps).astype(x.dtype)


def gemma_rms_norm(x, weight, eps):
    return (mean_square_normalized(single(x), eps) * (1 + single(weight))).astype(x.dtype)


def t5_layer_norm(x, weight, eps):
    hidden = mean_square_normalized(single(x), eps)
    if weight.dtype.itemsize == 2:
        hidden = hidden.astype(weight.dtype)
    return weight * hidden


def onnx_layer_normalization(x, scale, b, axis, epsilon):
    """Stage 1 in the stash type and cast back, stage 2 in the type of x: each operator rounds."""
    axes = tuple(range(axis % x.ndim, x.ndim))
    wide = single(x)
    mean = wide.mean(axis=axes, keepdims=True)
    inv_std_dev = 1 / np.sqrt(np.mean((wide - mean) ** 2, axis=axes, keepdims=True) + wide.dtype.type(epsilon))
    y = ((wide - mean) * inv_std_dev).astype(x.dtype) * scale
    return (y if b is None else y + b), mean, inv_std_dev


# PyTorch


def test_torch_formula(arrays):
    x, weight, bias = arrays.x, arrays.weight, arrays.bias
    published = torch_layer_norm(x, weight, bias, 1e-5)
    assert_agrees(npnorm.layer_norm(x, weight, bias, eps=1e-5), published, terms=terms_of(weight, bias))
    assert_agrees(npnorm.rms_norm(x, weight, eps=1e-5), torch_rms_norm(x, weight, 1e-5))
    assert_agrees(npnorm.rms_norm(x, weight, eps=None), torch_rms_norm(x, weight, machine_epsilon(x)))
    if arrays.dtype.itemsize == 2:
        assert_differs(npnorm.layer_norm(x, weight, bias, eps=1e-5, round_before_weight=True), published)


def machine_epsilon(x):
    return np.finfo(single(x).dtype).eps


@pytest.fixture
def torch():
    return pytest.importorskip("torch")


def as_tensor(torch, array):
    dtype = getattr(torch, array.dtype.name)
    return torch.from_numpy(array.astype(np.float64)).to(dtype)


def as_array(tensor, dtype):
    return tensor.detach().double().numpy().astype(dtype)


def test_torch_itself(torch, arrays):
    x, weight, bias = arrays.x, arrays.weight, arrays.bias
    tensors = [as_tensor(torch, array) for array in (x, weight, bias)]
    theirs = as_array(torch.nn.functional.layer_norm(tensors[0], (WIDTH,), *tensors[1:]), x.dtype)
    assert_agrees(npnorm.layer_norm(x, weight, bias), theirs, terms=terms_of(weight, bias))
    layer = torch.nn.RMSNorm(WIDTH, eps=1e-6, dtype=tensors[0].dtype)
    layer.weight = torch.nn.Parameter(tensors[1])
    assert_agrees(npnorm.rms_norm(x, weight), as_array(layer(tensors[0]), x.dtype))


def test_torch_rms_norm_without_eps(torch, arrays):
    x = (arrays.x.astype(np.float64) * 1e-3).astype(arrays.dtype)  # so small that eps shows
    weight = np.ones(WIDTH, x.dtype)
    theirs = as_array(torch.nn.RMSNorm(WIDTH, dtype=as_tensor(torch, x).dtype)(as_tensor(torch, x)), x.dtype)
    assert_agrees(npnorm.rms_norm(x, weight, eps=None), theirs)
    assert_agrees(npnorm.rms_norm(x, weight, eps=machine_epsilon(x)), theirs)


def test_torch_normalized_shape(torch):
    x, weight = np.random.default_rng(1).standard_normal((2, 3, 20)).astype(np.float32), np.ones((3, 20), np.float32)
    weight[1, 3] = -2
    layer, theirs = npnorm.LayerNorm((3, 20), bias=False), torch.nn.LayerNorm((3, 20), bias=False)
    theirs.weight = torch.nn.Parameter(as_tensor(torch, weight))
    layer.weight = theirs.weight.detach().numpy()
    assert_agrees(layer(x), as_array(theirs(as_tensor(torch, x)), x.dtype), terms=2)


# Hugging Face Transformers


def test_llama(half_arrays):
    x, weight = half_arrays.x, half_arrays.weight
    published = llama_rms_norm(x, weight, 1e-6)
    assert_agrees(npnorm.rms_norm(x, weight, eps=1e-6, round_before_weight=True), published)
    assert_differs(npnorm.rms_norm(x, weight, eps=1e-6), published)


def test_llama_multiplies_in_half_precision(half_arrays):
    x, weight = half_arrays.x, half_arrays.weight
    y = npnorm.rms_norm(x, weight, eps=1e-6, round_before_weight=True)
    assert_same_bits(y, weight * npnorm.rms_norm(x, eps=1e-6))


def test_llama_with_float32_weight(half_arrays):
    x, weight = half_arrays.x, half_arrays.weight.astype(np.float32)
    published = llama_rms_norm(x, weight, 1e-6)
    assert published.dtype == np.float32
    out = np.empty(x.shape, np.float32)
    npnorm.rms_norm(x, weight, eps=1e-6, round_before_weight=True, out=out)
    assert share_of_differences(out, published) < 1 / 1000
    assert_differs(npnorm.rms_norm(x, weight, eps=1e-6, out=np.empty_like(out)), published)


def test_gemma(half_arrays):
    x, weight = half_arrays.x, half_arrays.small
    published = gemma_rms_norm(x, weight, 1e-6)
    y = npnorm.rms_norm(x, weight, eps=1e-6, weight_offset=1.0)
    assert_agrees(y, published)
    assert_same_bits(y, npnorm.rms_norm(x, 1 + weight.astype(np.float32), eps=1e-6))
    assert_differs(npnorm.rms_norm(x, weight, eps=1e-6, weight_offset=1.0, round_before_weight=True), published)
    assert_differs(npnorm.rms_norm(x, 1 + weight, eps=1e-6), published)


@pytest.mark.parametrize("weight_dtype", ["float16", "float32"])
@pytest.mark.parametrize("x_dtype", ["float16", "float32"])
def test_t5(page, x_dtype, weight_dtype):
    arrays = make_arrays(DTYPES[x_dtype])
    x, weight = arrays.x, arrays.weight.astype(DTYPES[weight_dtype])
    y, published = page.t5_layer_norm(x, weight), t5_layer_norm(x, weight, 1e-6)
    assert_agrees(y, published)
    if weight.dtype.itemsize == 2:
        assert_differs(npnorm.rms_norm(x, weight, eps=1e-6, out=np.empty(x.shape, weight.dtype)), published)
    if weight.dtype == x.dtype:
        assert_same_bits(y, npnorm.rms_norm(x, weight, eps=1e-6, round_before_weight=True))


# ONNX


@pytest.mark.parametrize("axis", [-1, 1, -3, 0])
def test_onnx_layer_normalization(page, onnx_arrays, axis):
    x = onnx_arrays.x.reshape(2, 3, 4, -1)
    shape = x.shape[axis % 4 :]
    scale = np.resize(onnx_arrays.weight, shape)
    b = np.resize(onnx_arrays.bias, shape)
    y, mean, inv_std_dev = page.layer_normalization(x, scale, b, axis)
    published, their_mean, their_inv_std_dev = onnx_layer_normalization(x, scale, b, axis, 1e-5)
    assert_agrees(y, published, terms=terms_of(scale, b))
    assert_agrees(mean, their_mean, terms=1)
    assert_agrees(inv_std_dev, their_inv_std_dev)
    if onnx_arrays.dtype.itemsize == 2:
        axes = tuple(range(axis % 4, 4))
        assert_differs(npnorm.layer_norm(x, scale, b, axis=axes), published)
        assert_differs(npnorm.layer_norm(x, scale, b, axis=axes, round_before_weight=True), published)


def test_onnx_scale_of_fewer_axes(page, onnx_arrays):
    x = onnx_arrays.x.reshape(2, 3, 4, -1)
    scale, b = onnx_arrays.weight[: x.shape[-1]], onnx_arrays.bias[: x.shape[-1]]
    y, _, _ = page.layer_normalization(x, scale, b, axis=1)
    assert_agrees(y, onnx_layer_normalization(x, scale, b, 1, 1e-5)[0], terms=terms_of(scale, b))


@pytest.fixture
def run_onnx():
    """One operator in ONNX Runtime."""
    onnxruntime = pytest.importorskip("onnxruntime")
    path = ROOT / "asv_bench" / "benchmarks" / "onnx_model.py"
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    def run(operator, opset, inputs, outputs, domain="", **attributes):
        model = module.one_node_model(operator, opset, inputs, outputs, domain, **attributes)
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4
        options.intra_op_num_threads = 1
        session = onnxruntime.InferenceSession(model, options, ["CPUExecutionProvider"])
        return session.run(None, inputs)

    return run


def test_onnxruntime_layer_normalization(page, run_onnx, onnx_arrays):
    x = onnx_arrays.x.reshape(2, 3, 4, -1)
    scale, b = (np.resize(array, x.shape[1:]) for array in (onnx_arrays.weight, onnx_arrays.bias))
    y, mean, inv_std_dev = run_onnx(
        "LayerNormalization", 17, {"x": x, "scale": scale, "b": b}, ["y", "mean", "inv_std_dev"],
        axis=1, epsilon=np.float32(1e-5),
    )  # fmt: skip
    assert_agrees(page.runtime_layer_normalization(x, scale, b, axis=1), y, terms=terms_of(scale, b))
    specified, our_mean, our_inv_std_dev = page.layer_normalization(x, scale, b, axis=1)
    if x.dtype == np.float16:
        assert_differs(specified, y)
    assert_agrees(our_mean, mean, terms=1)
    assert_agrees(our_inv_std_dev, inv_std_dev)


def test_onnxruntime_rms_normalization(run_onnx, onnx_arrays):
    x, scale = onnx_arrays.x, onnx_arrays.weight
    (y,) = run_onnx("RMSNormalization", 23, {"x": x, "scale": scale}, ["y"], axis=-1, epsilon=np.float32(1e-5))
    assert_agrees(npnorm.rms_norm(x, scale, axis=-1, eps=1e-5), y)


SKIP_OUTPUTS = ["y", "mean", "inv_std_var", "input_skip_bias_sum"]


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("broadcast", [False, True])
def test_onnxruntime_skip_layer_normalization(page, run_onnx, with_bias, broadcast):
    arrays = make_arrays(np.dtype(np.float32))
    x = arrays.x.reshape(2, -1, WIDTH)
    inputs = {"x": x, "skip": arrays.skip.reshape(x.shape)[0 if broadcast else ...]}
    inputs |= {"gamma": arrays.weight, "beta": arrays.small}
    inputs |= {"bias": arrays.bias} if with_bias else {}
    theirs = run_onnx("SkipLayerNormalization", 17, inputs, SKIP_OUTPUTS, "com.microsoft")
    y, mean, inv_std_var, total = page.skip_layer_normalization(**inputs)
    assert_same_bits(total, theirs[3])
    assert_agrees(y, theirs[0], terms=terms_of(arrays.weight, arrays.small))
    assert_agrees(mean.astype(np.float32), theirs[1], terms=1)
    assert_agrees(inv_std_var.astype(np.float32), theirs[2])


def test_onnxruntime_skip_simplified_layer_normalization(run_onnx, onnx_arrays):
    x, skip, gamma = onnx_arrays.x, onnx_arrays.skip, onnx_arrays.weight
    theirs = run_onnx(
        "SkipSimplifiedLayerNormalization", 17, {"x": x, "skip": skip, "gamma": gamma},
        ["y", "", "", "input_skip_bias_sum"], "com.microsoft", epsilon=np.float32(1e-6),
    )  # fmt: skip
    y, total = npnorm.add_rms_norm(x, skip, gamma, eps=1e-6)
    assert_same_bits(total, theirs[1])
    if x.dtype == np.float16:
        assert_differs(y, theirs[0])  # it normalizes the sum before rounding it
        unrounded = x.astype(np.float32) + skip
        y = npnorm.rms_norm(unrounded, gamma, eps=1e-6, out=np.empty_like(x))
    assert_agrees(y, theirs[0])


# Per-head norms of queries and keys


HEADS, GROUPS, HEAD_WIDTH = 8, 2, 64


def joint_qkv(layout, dtype):
    """A joint array of 4 x 256 tokens, and a function that gives the view of the queries in such an array."""
    parts = (HEADS, 3) if layout == "interleaved" else (HEADS + 2 * GROUPS,)
    qkv = np.random.default_rng(2).standard_normal((4, 256, *parts, HEAD_WIDTH)).astype(dtype)
    view = {
        "joint": lambda array: array[:, :, :HEADS],
        "heads first": lambda array: array[:, :, :HEADS].swapaxes(1, 2),
        "interleaved": lambda array: array[..., 0, :],
    }
    return qkv, view[layout]


LAYOUTS = ["joint", "heads first", "interleaved"]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_per_head_norm_writes_over_its_view(layout, dtype):
    qkv, view = joint_qkv(layout, dtype)
    query, others = view(qkv), np.ones(qkv.shape, bool)
    view(others)[...] = False
    before, copy = qkv.copy(), np.ascontiguousarray(query)
    weight = np.linspace(0.5, 2, HEAD_WIDTH, dtype=dtype)
    assert npnorm.rms_norm(query, weight, eps=1e-6, round_before_weight=True, out=query) is query
    assert_same_bits(query, npnorm.rms_norm(copy, weight, eps=1e-6, round_before_weight=True))
    assert_agrees(np.ascontiguousarray(query), llama_rms_norm(copy, weight, 1e-6))
    assert_same_bits(qkv[others], before[others])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_per_head_norm_copies_nothing(threads, layout):
    """A copy of the queries were 2 MiB. Rows along three axes pass through four buffers of 64 KiB."""
    threads(1)
    most = 2**19 if layout == "heads first" else 2**15
    qkv, view = joint_qkv(layout, np.float32)
    query, dquery = view(qkv), view(np.zeros_like(qkv))
    weight = np.ones(HEAD_WIDTH, np.float32)

    def forward():
        npnorm.rms_norm(query, weight, eps=1e-6, out=query)

    def backward():
        npnorm.rms_norm_backward(query, query, weight, eps=1e-6, out=(dquery, None, None))

    for call in (forward, backward):
        call()  # compiles
        assert peak_memory(call) < most, call.__name__


def peak_memory(call):
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_per_head_gradient_on_views():
    qkv, view = joint_qkv("joint", np.float32)
    dqkv = np.random.default_rng(3).standard_normal(qkv.shape).astype(np.float32)
    before, query, dquery = dqkv.copy(), view(qkv), view(dqkv)
    weight = np.linspace(0.5, 2, HEAD_WIDTH, dtype=np.float32)
    expected = npnorm.rms_norm_backward(dquery.copy(), query.copy(), weight)
    gradients = npnorm.rms_norm_backward(dquery, query, weight, out=(dquery, None, None))
    assert gradients.dx is dquery
    assert_same_bits(dquery, expected.dx)
    assert_same_bits(gradients.dweight, expected.dweight)
    assert_same_bits(dqkv[:, :, HEADS:], before[:, :, HEADS:])
