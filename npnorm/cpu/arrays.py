"""How kernels receive arrays, and the vectors they cut from them.

A kernel gets a NumPy array as it is, any number of axes and any class: an `Argument`. Numba's own array arguments cost
100 ns each, are tied to a number of axes, and know neither float16 nor bfloat16; these cost 5.
Nothing checks them but the plan. In users' compiled code there are no Python objects: there a kernel
gets Numba's arrays, brought to the two forms that `rows` and `vector` make of an `Argument`.
"""

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.imputils import impl_ret_borrowed
from numba.extending import NativeValue, intrinsic, models, register_model, unbox

LINE = 64  # bytes of a cache line
_I64 = ir.IntType(64)

# Where the fields of NumPy's array object stand, in bytes; its ABI fixes them.
_DATA = object.__basicsize__
_DIMENSIONS, _STRIDES, _FLAGS = _DATA + 16, _DATA + 24, _DATA + 48


class Argument(types.Type):
    """A NumPy array whose elements are taken for `dtype`."""

    def __init__(self, dtype):
        self.dtype = dtype
        super().__init__(name=f"npnorm.Argument({dtype})")


register_model(Argument)(models.OpaqueModel)  # a pointer to the Python object


@unbox(Argument)
def _unbox(argument, value, context):
    return NativeValue(value)


@intrinsic
def rows(typingctx, argument, cols):
    """An argument as rows of `cols` elements, a 3-d array; None of None.

    It is C-contiguous with any axes, or a 3-d view whose last axis, `cols` long, is contiguous. An
    array of Numba is such a view already.
    """
    if isinstance(argument, types.NoneType):
        return _same(argument, cols)
    if isinstance(argument, types.Array):
        return _borrowed(argument, cols)
    array = types.Array(argument.dtype, 3, "A")

    def codegen(context, builder, signature, args):
        flags = builder.load(_field(builder, args[0], _FLAGS, ir.IntType(32)))
        contiguous = builder.trunc(flags, ir.IntType(1))  # the lowest bit: C_CONTIGUOUS
        itemsize = _I64(argument.dtype.bitwidth // 8)
        # Rows of a contiguous array are as many as one asks for.
        merged = (_I64(0), builder.mul(args[1], itemsize), _I64(2**62))
        outer, inner, length = (
            cgutils.alloca_once_value(builder, value, name=name)
            for value, name in zip(merged, ("outer", "inner", "length"), strict=True)
        )
        with builder.if_then(builder.not_(contiguous), likely=False):
            strides = builder.load(_field(builder, args[0], _STRIDES, _I64.as_pointer()))
            dimensions = builder.load(_field(builder, args[0], _DIMENSIONS, _I64.as_pointer()))
            builder.store(builder.load(strides), outer)
            builder.store(builder.load(builder.gep(strides, [_I64(1)])), inner)
            builder.store(builder.load(builder.gep(dimensions, [_I64(1)])), length)
        out = context.make_array(array)(context, builder)
        context.populate_array(
            out,
            data=_data(context, builder, argument, args[0]),
            shape=[_I64(2**62), builder.load(length), args[1]],
            strides=[builder.load(outer), builder.load(inner), itemsize],
            itemsize=itemsize,
            meminfo=None,
        )
        return out._getvalue()

    return array(argument, types.intp), codegen


@intrinsic
def vector(typingctx, argument, size):
    """The first `size` elements of a contiguous argument, as a vector; None of None."""
    if isinstance(argument, types.NoneType):
        return _same(argument, size)
    if isinstance(argument, types.Array):
        return _borrowed(argument, size)

    def codegen(context, builder, signature, args):
        data = _data(context, builder, argument, args[0])
        return _vector(context, builder, signature.return_type, data, args[1])

    return types.Array(argument.dtype, 1, "C")(argument, types.intp), codegen


@intrinsic
def row(typingctx, array, index):
    """Row `index` of a 3-d array whose last axis is contiguous, as a vector; None of None."""
    if isinstance(array, types.NoneType):
        return _same(array, index)

    def codegen(context, builder, signature, args):
        source = context.make_array(array)(context, builder, args[0])
        strides = cgutils.unpack_tuple(builder, source.strides)
        _, length, size = cgutils.unpack_tuple(builder, source.shape)
        # Nearly always all rows run along one axis: a branch is cheaper than a 64-bit division a
        # row.
        outer = cgutils.alloca_once_value(builder, ir.Constant(args[1].type, 0))
        with builder.if_then(builder.icmp_signed(">=", args[1], length), likely=False):
            builder.store(builder.sdiv(args[1], length), outer)
        outer = builder.load(outer)
        inner = builder.sub(args[1], builder.mul(outer, length))
        offset = builder.add(builder.mul(outer, strides[0]), builder.mul(inner, strides[1]))
        data = cgutils.pointer_add(builder, source.data, offset)
        return _vector(context, builder, signature.return_type, data, size)

    return types.Array(array.dtype, 1, "C")(array, types.intp), codegen


@intrinsic
def part(typingctx, vector, start, size):
    """vector[start : start + size], without a look at the bounds; None of None."""

    def codegen(context, builder, signature, args):
        if isinstance(vector, types.NoneType):
            return args[0]
        source = context.make_array(vector)(context, builder, args[0])
        return _vector(context, builder, vector, builder.gep(source.data, [args[1]]), args[2])

    return vector(vector, types.intp, types.intp), codegen


@intrinsic
def row_view(typingctx, array, outer, inner, length, cols):
    """An array of Numba as `rows` makes one of an argument, by its strides in bytes: it keeps the memory alive."""

    def codegen(context, builder, signature, args):
        source = context.make_array(array)(context, builder, args[0])
        shape = [_I64(2**62), args[3], args[4]]
        strides = [args[1], args[2], source.itemsize]
        return _view(context, builder, signature.return_type, source, shape, strides)

    sizes = [types.intp] * 4
    return types.Array(array.dtype, 3, "A")(array, *sizes), codegen


@intrinsic
def vector_view(typingctx, array):
    """A contiguous array of Numba as a vector: it keeps the memory alive."""

    def codegen(context, builder, signature, args):
        source = context.make_array(array)(context, builder, args[0])
        shape, strides = [source.nitems], [source.itemsize]
        return _view(context, builder, signature.return_type, source, shape, strides)

    return types.Array(array.dtype, 1, "C")(array), codegen


@intrinsic(prefer_literal=True)
def stack(typingctx, size):
    """A float64 vector of `size` (a literal) elements on the stack."""
    if not isinstance(size, types.IntegerLiteral):
        return None
    result, count = types.Array(types.float64, 1, "C"), size.literal_value
    return result(size), lambda context, builder, signature, args: _on_stack(context, builder, result, count)


@intrinsic
def stack_line(typingctx, array):
    """A vector on the stack of as many elements of an array as a cache line has; None of None."""
    if isinstance(array, types.NoneType):
        return array(array), lambda context, builder, signature, args: args[0]
    result = types.Array(array.dtype, 1, "C")
    size = LINE * 8 // array.dtype.bitwidth
    return result(array), lambda context, builder, signature, args: _on_stack(context, builder, result, size)


def _on_stack(context, builder, kind, size):
    element = context.get_data_type(kind.dtype)
    room = cgutils.alloca_once(builder, ir.ArrayType(element, size))
    room.align = LINE
    return _vector(context, builder, kind, builder.bitcast(room, element.as_pointer()), _I64(size))


@intrinsic
def is_followed_by(typingctx, vector, other):
    """Whether the other begins where this one ends."""

    def codegen(context, builder, signature, args):
        first, second = (context.make_array(vector)(context, builder, value) for value in args)
        end = builder.gep(first.data, [first.nitems])
        return builder.icmp_unsigned("==", builder.ptrtoint(end, _I64), builder.ptrtoint(second.data, _I64))

    return types.boolean(vector, vector), codegen


def _view(context, builder, kind, source, shape, strides):
    out = context.make_array(kind)(context, builder)
    context.populate_array(
        out, data=source.data, shape=shape, strides=strides, itemsize=source.itemsize,
        meminfo=source.meminfo, parent=source.parent,
    )  # fmt: skip
    return impl_ret_borrowed(context, builder, kind, out._getvalue())


def _borrowed(array, integer):
    """The array without a share in its memory, which the kernel's caller holds."""

    def codegen(context, builder, signature, args):
        out = context.make_array(array)(context, builder, args[0])
        out.meminfo = cgutils.get_null_value(out.meminfo.type)
        return out._getvalue()

    return array(array, types.intp), codegen


def _same(none, integer):
    return none(none, types.intp), lambda context, builder, signature, args: args[0]


def _field(builder, value, offset, kind):
    return builder.bitcast(cgutils.pointer_add(builder, value, offset), kind.as_pointer())


def _data(context, builder, argument, value):
    pointer = context.get_data_type(argument.dtype).as_pointer()
    return builder.load(_field(builder, value, _DATA, pointer))


def _vector(context, builder, kind, data, size):
    itemsize = context.get_constant(types.intp, context.get_abi_sizeof(data.type.pointee))
    out = context.make_array(kind)(context, builder)
    context.populate_array(
        out, data=data, shape=[size], strides=[itemsize], itemsize=itemsize, meminfo=None
    )
    return out._getvalue()
