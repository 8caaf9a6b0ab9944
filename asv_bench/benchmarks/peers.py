"""The libraries that npnorm is compared with: each norm as calls of no arguments, by name.

A library that is not installed is simply absent, so the tables can be made anywhere. Each is called
as its users call it and, where it has them, with the settings that make it fastest.
"""

import importlib.metadata
import importlib.util
import os

import numpy as np

from .onnx_model import one_node_model
from .timing import Inside

EPS = {"LN": 1e-5, "RMS": 1e-6}
NAMES = {"torch": "PyTorch", "onnxruntime": "ONNX Runtime", "jax": "JAX"}
threads = 1


def set_threads(number):
    """How many threads the libraries use from now on; JAX knows it only from before its import."""
    global threads
    threads = number
    os.environ["NPROC"] = str(number)
    os.environ["XLA_FLAGS"] = f"--xla_cpu_multi_thread_eigen={str(number > 1).lower()}"


def installed(*names):
    """Those of the packages that can be imported here."""
    return [name for name in names if importlib.util.find_spec(name)]


def versions(*names):
    """For a table's footer: ``numpy 2.4.6, numba 0.68.1``."""
    return ", ".join(f"{name} {importlib.metadata.version(name)}" for name in installed(*names))


def forward(kind, x, weight, bias=None):
    """Calls of every installed library that give the norm of x. RMSNorm has no bias."""
    calls = {}
    for library in installed(*NAMES):
        calls |= FORWARD[library](kind, x, weight, bias)
    return calls


def backward(kind, dy, x, weight):
    """Calls of every installed library that give dx, dweight and LayerNorm's dbias."""
    calls = {}
    for library in installed(*BACKWARD):
        calls |= BACKWARD[library](kind, dy, x, weight)
    return calls


def as_numpy(result):
    """What a library returned as float64, for a tuple one array each."""
    if isinstance(result, (tuple, list)):
        return [as_numpy(each) for each in result]
    if hasattr(result, "detach"):
        return result.detach().double().numpy()
    return np.asarray(result).astype(np.float64)


def _tensor(array):
    """A tensor that shares the array's memory; PyTorch does not know NumPy's bfloat16."""
    import torch

    torch.set_num_threads(threads)
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def torch_forward(kind, x, weight, bias=None):
    import torch

    tensors = [_tensor(array) for array in (x, weight, bias) if array is not None]
    shape, eps = tensors[1].shape, EPS[kind]
    norm = torch.nn.functional.layer_norm if kind == "LN" else torch.nn.functional.rms_norm

    def call():
        return norm(tensors[0], shape, *tensors[1:], eps=eps)

    return {"PyTorch": call, "PyTorch, inference mode": Inside(call, torch.inference_mode)}


def torch_backward(kind, dy, x, weight):
    """Autograd, which users call; for LayerNorm also the operator that it calls."""
    import torch

    tensors = [_tensor(array).requires_grad_() for array in (x, weight)]
    shape, eps, gradient = tensors[1].shape, EPS[kind], _tensor(dy)
    if kind == "RMS":
        y = torch.nn.functional.rms_norm(*tensors[:1], shape, *tensors[1:], eps=eps)
    else:
        tensors.append(torch.zeros_like(tensors[1]).requires_grad_())
        y = torch.nn.functional.layer_norm(*tensors[:1], shape, *tensors[1:], eps=eps)
    calls = {"PyTorch": lambda: torch.autograd.grad(y, tensors, gradient, retain_graph=True)}
    if kind == "LN":
        x, weight, bias = (tensor.detach() for tensor in tensors)
        _, mean, rstd = torch.ops.aten.native_layer_norm(x, shape, weight, bias, eps)
        operator = torch.ops.aten.native_layer_norm_backward.default
        arguments = (gradient, x, shape, mean, rstd, weight, bias, [True] * 3)
        calls["PyTorch, operator"] = Inside(lambda: operator(*arguments), torch.inference_mode)
    return calls


def onnxruntime_forward(kind, x, weight, bias=None):
    """A model of one node: LayerNormalization or RMSNormalization."""
    import onnxruntime

    inputs = {"x": x, "weight": weight} | ({} if bias is None else {"bias": bias})
    operator, opset = {"LN": ("LayerNormalization", 17), "RMS": ("RMSNormalization", 23)}[kind]
    model = one_node_model(operator, opset, inputs, ["y"], axis=-1, epsilon=np.float32(EPS[kind]))
    if model is None:
        return {}
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    options.log_severity_level = 4
    try:
        session = onnxruntime.InferenceSession(model, options, ["CPUExecutionProvider"])
    except Exception:  # it has no kernel for this dtype
        return {}
    y = np.empty_like(x)
    binding = session.io_binding()
    for name, array in inputs.items():
        binding.bind_ortvalue_input(name, onnxruntime.OrtValue.ortvalue_from_numpy(array))
    binding.bind_output("y", "cpu", 0, y.dtype, y.shape, y.ctypes.data)

    def bound():
        session.run_with_iobinding(binding)
        return y

    return {"ONNX Runtime": lambda: session.run(None, inputs)[0], "ONNX Runtime, bound": bound}


def _jax_norm(kind):
    """The formula as JAX's layer libraries write it: float32 inside, x's dtype outside."""
    import jax.numpy as jnp
    from jax import lax

    def norm(x, weight, *bias):
        y = x.astype(jnp.float32)
        if kind == "LN":
            y = y - y.mean(-1, keepdims=True)
        y = y * lax.rsqrt(jnp.square(y).mean(-1, keepdims=True) + EPS[kind]) * weight
        return (y + bias[0] if bias else y).astype(x.dtype)

    return norm


def _jax_calls(function, arrays):
    import jax

    arrays = [jax.device_put(array) for array in arrays]
    compiled = jax.jit(function)
    ahead = compiled.lower(*arrays).compile()
    return {
        "JAX": lambda: jax.block_until_ready(compiled(*arrays)),
        "JAX, ahead of time": lambda: jax.block_until_ready(ahead(*arrays)),
    }


def jax_forward(kind, x, weight, bias=None):
    return _jax_calls(_jax_norm(kind), [a for a in (x, weight, bias) if a is not None])


def jax_backward(kind, dy, x, weight):
    """`jax.vjp` under jit, which computes the statistics again."""
    import jax

    parameters = [weight] + [np.zeros_like(weight)] * (kind == "LN")

    def gradients(dy, *arrays):
        return jax.vjp(_jax_norm(kind), *arrays)[1](dy)

    return _jax_calls(gradients, [dy, x, *parameters])


FORWARD = {"torch": torch_forward, "onnxruntime": onnxruntime_forward, "jax": jax_forward}
BACKWARD = {"torch": torch_backward, "jax": jax_backward}
