"""An ONNX model of one norm. Protobuf is simple enough to write out, so `onnx` is not needed.

The numbers are the fields of onnx.proto3; https://github.com/onnx/onnx/blob/main/onnx/onnx.proto
"""

import numpy as np

OPERATORS = {"LN": ("LayerNormalization", 17), "RMS": ("RMSNormalization", 23)}
ELEMENTS = {"float32": 1, "float16": 10, "float64": 11}  # TensorProto.DataType


def one_node_model(kind, eps, inputs):
    """The bytes of a model from named arrays, x first, to y; None for a dtype it cannot have."""
    operator, opset = OPERATORS[kind]
    x = inputs["x"]
    if x.dtype.name not in ELEMENTS:
        return None
    axis = _field(1, "axis") + _field(3, -1) + _field(20, 2)  # type 2 is INT
    epsilon = _field(1, "epsilon") + _field(2, np.float32(eps)) + _field(20, 1)  # FLOAT
    node = b"".join(_field(1, name) for name in inputs)
    node += _field(2, "y") + _field(4, operator) + _field(5, axis) + _field(5, epsilon)
    graph = _field(1, node) + _field(2, "norm")
    graph += b"".join(_field(11, _value(name, array)) for name, array in inputs.items())
    graph += _field(12, _value("y", x))
    return _field(1, 10) + _field(7, graph) + _field(8, _field(1, "") + _field(2, opset))


def _value(name, array):
    dimensions = b"".join(_field(1, _field(1, size)) for size in array.shape)
    tensor = _field(1, ELEMENTS[array.dtype.name]) + _field(2, dimensions)
    return _field(1, name) + _field(2, _field(1, tensor))


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
