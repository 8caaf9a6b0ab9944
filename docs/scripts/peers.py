"""The libraries that npnorm is compared with: each norm as a plain function of NumPy arrays.

A library that is not installed is simply absent, so the tables can be made anywhere.
"""

import importlib.metadata
import importlib.util

import numpy as np

EPS = {"LN": 1e-5, "RMS": 1e-6}


def installed(*names):
    """Those of the packages that can be imported here."""
    return [name for name in names if importlib.util.find_spec(name)]


def versions(*names):
    """For a table's footer: ``numpy 2.4.6, numba 0.68.1``."""
    return ", ".join(f"{name} {importlib.metadata.version(name)}" for name in installed(*names))


def torch_forward(kind, x, weight, bias):
    """A call of PyTorch's functional norm on tensors that share the arrays' memory.

    LayerNorm and RMSNorm stand in `torch.nn.functional`; its RMSNorm takes no bias.
    """
    import torch

    torch.set_num_threads(1)
    tensors = [torch.from_numpy(array) for array in (x, weight, bias)]
    shape = tensors[1].shape
    if kind == "LN":
        norm = torch.nn.functional.layer_norm
        return lambda: norm(tensors[0], shape, tensors[1], tensors[2], EPS[kind])
    norm = torch.nn.functional.rms_norm
    return lambda: norm(tensors[0], shape, tensors[1], EPS[kind])


def torch_backward(kind, dy, x, weight, bias):
    """A call that gives dx, dweight (and dbias) through PyTorch's autograd."""
    import torch

    torch.set_num_threads(1)
    tensors = [torch.from_numpy(array).requires_grad_() for array in (x, weight, bias)]
    shape = tensors[1].shape
    if kind == "LN":
        y = torch.nn.functional.layer_norm(*tensors[:1], shape, *tensors[1:], EPS[kind])
    else:
        tensors = tensors[:2]
        y = torch.nn.functional.rms_norm(tensors[0], shape, tensors[1], EPS[kind])
    gradient = torch.from_numpy(dy)
    return lambda: torch.autograd.grad(y, tensors, gradient, retain_graph=True)


def onnxruntime_forward(kind, x, weight, bias):
    """A call of ONNX Runtime on a model of one node: LayerNormalization or RMSNormalization."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    inputs = {"x": x, "weight": weight}
    if kind == "LN":
        inputs["bias"] = bias
    model = _one_node_model(kind, {name: array.shape for name, array in inputs.items()}, x.shape)
    session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    return lambda: session.run(None, inputs)[0]


def _one_node_model(kind, input_shapes, output_shape):
    """The bytes of an ONNX model: protobuf is simple enough to write out, so `onnx` is not needed.

    The numbers are the fields of onnx.proto3; https://github.com/onnx/onnx/blob/main/onnx/onnx.proto
    """
    operator, opset = {"LN": ("LayerNormalization", 17), "RMS": ("RMSNormalization", 23)}[kind]

    def value(name, shape):
        dimensions = b"".join(_field(1, _field(1, size)) for size in shape)
        tensor = _field(1, 1) + _field(2, dimensions)  # elem_type 1 is float32
        return _field(1, name) + _field(2, _field(1, tensor))

    axis = _field(1, "axis") + _field(3, -1) + _field(20, 2)  # type 2 is INT
    epsilon = _field(1, "epsilon") + _field(2, np.float32(EPS[kind])) + _field(20, 1)  # FLOAT
    node = b"".join(_field(1, name) for name in input_shapes)
    node += _field(2, "y") + _field(4, operator) + _field(5, axis) + _field(5, epsilon)
    graph = _field(1, node) + _field(2, "norm")
    graph += b"".join(_field(11, value(name, shape)) for name, shape in input_shapes.items())
    graph += _field(12, value("y", output_shape))
    return _field(1, 10) + _field(7, graph) + _field(8, _field(1, "") + _field(2, opset))


def _field(number, content):
    """One protobuf field: an int as a varint, a float32 as four bytes, else length and bytes."""
    if isinstance(content, np.float32):
        return _varint(number << 3 | 5) + content.astype("<f4").tobytes()
    if isinstance(content, int):
        return _varint(number << 3) + _varint(content)
    content = content.encode() if isinstance(content, str) else content
    return _varint(number << 3 | 2) + _varint(len(content)) + content


def _varint(value):
    value &= 2**64 - 1
    groups = []
    while value > 127:
        groups.append(value & 127 | 128)
        value >>= 7
    return bytes([*groups, value])
