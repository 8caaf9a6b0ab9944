"""An ONNX model of one norm. Protobuf is simple enough to write out, so `onnx` is not needed.

The numbers are the fields of onnx.proto3; https://github.com/onnx/onnx/blob/main/onnx/onnx.proto
"""

import numpy as np

ELEMENTS = {"float32": 1, "float16": 10, "float64": 11}  # TensorProto.DataType


def one_node_model(operator, opset, inputs, outputs, domain="", **attributes):
    """The bytes of a model of one operator: named arrays in, names out; "" leaves an output out.

    `attributes` are ints and NumPy float32 numbers. None for a dtype that a model cannot have.
    """
    if any(array.dtype.name not in ELEMENTS for array in inputs.values()):
        return None
    node = b"".join(_field(1, name) for name in inputs)
    node += b"".join(_field(2, name) for name in outputs)
    node += _field(4, operator) + _field(7, domain)
    node += b"".join(_field(5, _attribute(name, value)) for name, value in attributes.items())
    graph = _field(1, node) + _field(2, "norm")
    graph += b"".join(_field(11, _value(name, array)) for name, array in inputs.items())
    graph += b"".join(_field(12, _field(1, name)) for name in outputs if name)
    opsets = _field(8, _field(1, "") + _field(2, opset))
    if domain:
        opsets += _field(8, _field(1, domain) + _field(2, 1))
    return _field(1, 10) + _field(7, graph) + opsets


def _attribute(name, value):
    floating = isinstance(value, np.float32)
    number, kind = (2, 1) if floating else (3, 2)  # FLOAT, INT
    return _field(1, name) + _field(number, value) + _field(20, kind)


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
