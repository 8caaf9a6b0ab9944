"""Elements moved between memory and the compute dtype, and lines of the cache."""

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from .arrays import LINE
from .formats import BFLOAT, as_float, even_and_odd, narrow, resize, stored_form, widen
from .lanes import Lanes, spread

_I32, _I64, _F64 = ir.IntType(32), ir.IntType(64), ir.DoubleType()
_OUTPUTS = 6  # the most arrays that one loop writes


# Lines of the cache


@intrinsic
def to_line(typingctx, vector):
    """How many elements stand before the vector's first cache line."""

    def codegen(context, builder, signature, args):
        data = context.make_array(vector)(context, builder, args[0]).data
        integer = ir.IntType(64)
        address = builder.ptrtoint(data, integer)
        beyond = builder.and_(builder.neg(address), integer(LINE - 1))
        return builder.udiv(beyond, integer(vector.dtype.bitwidth // 8))

    return types.intp(vector), codegen


@intrinsic
def line_of(typingctx, value, vector):
    """A float32 or float64 value in as many lanes as a cache line has elements of the vector."""
    return _line_of(value, vector)


@intrinsic
def pairs_of(typingctx, value, vector):
    """`line_of` for a vector of bfloat16, whose lanes are paired; None for others."""
    if vector.dtype == BFLOAT:
        return _line_of(value, vector)
    return types.none(value, vector), lambda context, builder, signature, args: context.get_dummy_value()


def _line_of(value, vector):
    kind = Lanes(value, LINE * 8 // vector.dtype.bitwidth, vector.dtype == BFLOAT)
    return kind(value, vector), lambda context, builder, signature, args: spread(builder, args[0], kind.count)


@intrinsic
def stream(typingctx, vector, j, values):
    """`store` of a whole cache line, which is not brought into the cache. vector[j] must begin a line."""

    def codegen(context, builder, signature, args):
        number = stored_form(builder, args[2], vector.dtype, values)
        _stream(builder, number, _place(context, builder, vector, args, values))
        return context.get_dummy_value()

    return types.none(vector, types.intp, values), codegen


@intrinsic
def stream_line(typingctx, line, vector, j):
    """vector[j:] = a line, which is not brought into the cache. vector[j] must begin one."""

    def codegen(context, builder, signature, args):
        kind = ir.VectorType(context.get_data_type(line.dtype), LINE * 8 // line.dtype.bitwidth).as_pointer()
        here, there = (
            builder.bitcast(_element(context, builder, array, (value, place)), kind)
            for array, value, place in ((line, args[0], _I64(0)), (vector, args[1], args[2]))
        )
        whole = builder.load(here)
        whole.align = LINE
        _stream(builder, whole, there)
        return context.get_dummy_value()

    return types.none(line, vector, types.intp), codegen


def _stream(builder, line, pointer):
    instruction = builder.store(line, pointer)
    instruction.align = LINE
    instruction.set_metadata("nontemporal", builder.module.add_metadata([_I32(1)]))


@intrinsic
def finish_streaming(typingctx):
    """Wait until streamed lines are in memory: other threads may read them next."""

    def codegen(context, builder, signature, args):
        function = ir.FunctionType(ir.VoidType(), [])
        name = "llvm.x86.sse.sfence"
        builder.call(cgutils.get_or_insert_function(builder.module, function, name), [])
        return context.get_dummy_value()

    return types.none(), codegen


@intrinsic
def prefetch(typingctx, vector, j):
    """Ask for the cache line of vector[j], which is about to be read."""

    def codegen(context, builder, signature, args):
        pointer = _element(context, builder, vector, args)
        pointer = builder.bitcast(pointer, ir.IntType(8).as_pointer())
        function = ir.FunctionType(ir.VoidType(), [pointer.type, _I32, _I32, _I32])
        function = cgutils.get_or_insert_function(builder.module, function, "llvm.prefetch.p0")
        builder.call(function, [pointer, _I32(0), _I32(2), _I32(1)])  # read, second cache, data
        return context.get_dummy_value()

    return types.none(vector, types.intp), codegen


# Elements. Inputs are declared not to alias outputs, and outputs not each other: the run-time
# overlap checks would otherwise send every in-place call to a scalar loop (7 copies instead of
# 2.4). An output may be exactly an input, since each element is read before it is written; the plan
# refuses every other overlap.


@intrinsic
def load(typingctx, vector, j, like):
    """vector[j] in the dtype of `like`, a float32 or float64 value; as many elements as that has lanes."""

    def codegen(context, builder, signature, args):
        instruction = _read(context, builder, vector, args, like)
        instruction.set_metadata("noalias", _scopes(builder, range(_OUTPUTS)))
        return widen(builder, instruction, vector.dtype, like, context.get_value_type(like))

    return like(vector, types.intp, like), codegen


@intrinsic
def load_both(typingctx, vector, j, like):
    """vector[j] and the elements after it, twice as many as `like` has lanes, as two results in any order: pairs of
    bfloat16 are parted, which takes fewer instructions than to spread them out."""
    kind = types.UniTuple(like, 2)

    def codegen(context, builder, signature, args):
        if vector.dtype == BFLOAT:
            reads = [_read(context, builder, vector, args, Lanes(like.dtype, 2 * like.count))]
            parts = even_and_odd(builder, *reads)
        else:  # two reads: from halves of one, AVX2 took 2.5 times as long for RMSNorm of float16
            places = args[1], builder.add(args[1], _I64(like.count))
            reads = [_read(context, builder, vector, (args[0], place), like) for place in places]
            parts = [as_float(builder, part, vector.dtype) for part in reads]
        for read in reads:
            read.set_metadata("noalias", _scopes(builder, range(_OUTPUTS)))
        wide = [resize(builder, part, context.get_value_type(like)) for part in parts]
        return context.make_tuple(builder, kind, wide)

    return kind(vector, types.intp, like), codegen


@intrinsic(prefer_literal=True)
def store(typingctx, vector, j, value, output):
    """vector[j] = value, rounded once to the vector's format. `output` numbers the arrays a loop writes."""
    if not isinstance(output, types.IntegerLiteral):
        return None
    value = types.unliteral(value)

    def codegen(context, builder, signature, args):
        number = stored_form(builder, args[2], vector.dtype, value)
        pointer = _place(context, builder, vector, args, value)
        instruction = builder.store(number, pointer)
        instruction.align = vector.dtype.bitwidth // 8
        _mark_output(builder, instruction, output.literal_value)
        return context.get_dummy_value()

    return types.none(vector, types.intp, value, output), codegen


@intrinsic(prefer_literal=True)
def stored(typingctx, vector, j, like, output):
    """vector[j] of a float64 array that this loop also writes, as `load` gives it."""
    if not isinstance(output, types.IntegerLiteral):
        return None
    like = types.unliteral(like)

    def codegen(context, builder, signature, args):
        instruction = _read(context, builder, vector, args, like)
        _mark_output(builder, instruction, output.literal_value)
        return instruction

    return like(vector, types.intp, like, output), codegen


@intrinsic
def multiply_add(typingctx, a, b, c):
    """a·b + c, rounded once where the CPU can, whatever stands around it."""

    def codegen(context, builder, signature, args):
        kind = args[2].type
        a, b = (value if value.type == kind else spread(builder, value, kind.count) for value in args[:2])
        element, lanes = (kind.element, f"v{kind.count}") if isinstance(kind, ir.VectorType) else (kind, "")
        name = f"llvm.fmuladd.{lanes}{'f64' if element == _F64 else 'f32'}"
        function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(kind, [kind] * 3), name)
        return builder.call(function, [a, b, args[2]])

    return c(a, b, c), codegen


@intrinsic
def rounded(typingctx, value, vector):
    """value rounded to the format of the vector's elements; value itself when the vector is None."""
    if isinstance(vector, types.NoneType):
        return value(value, vector), lambda context, builder, signature, args: args[0]

    def codegen(context, builder, signature, args):
        number = narrow(builder, args[0], vector.dtype)
        return resize(builder, as_float(builder, number, vector.dtype), args[0].type)

    return value(value, vector), codegen


@intrinsic
def scaled(typingctx, value, weight, j):
    """value * weight[j]; value itself when there is no weight."""
    return value(value, weight, types.intp), _with_element(value, weight, "fmul")


@intrinsic
def shifted(typingctx, value, bias, j):
    """value + bias[j]; value itself when there is no bias."""
    return value(value, bias, types.intp), _with_element(value, bias, "fadd")


def _with_element(value, vector, operation):
    def codegen(context, builder, signature, args):
        if isinstance(vector, types.NoneType):
            return args[0]
        number = _read(context, builder, vector, args[1:], value)
        number.set_metadata("noalias", _scopes(builder, range(_OUTPUTS)))
        number = widen(builder, number, vector.dtype, value, args[0].type)
        return getattr(builder, operation)(args[0], number)

    return codegen


def _element(context, builder, vector, args):
    data = context.make_array(vector)(context, builder, args[0]).data
    return builder.gep(data, [args[1]])


def _place(context, builder, vector, args, like):
    """Where the elements stand that `like`, a number or lanes, has room for."""
    pointer = _element(context, builder, vector, args)
    if not isinstance(like, Lanes):
        return pointer
    return builder.bitcast(pointer, ir.VectorType(pointer.type.pointee, like.count).as_pointer())


def _read(context, builder, vector, args, like):
    instruction = builder.load(_place(context, builder, vector, args, like))
    instruction.align = vector.dtype.bitwidth // 8
    return instruction


def _mark_output(builder, instruction, output):
    instruction.set_metadata("alias.scope", _scopes(builder, [output]))
    others = [i for i in range(_OUTPUTS) if i != output]
    instruction.set_metadata("noalias", _scopes(builder, others))


def _scopes(builder, outputs):
    module = builder.module
    domain = module.add_metadata([ir.MetaDataString(module, "npnorm")])
    return module.add_metadata(
        [
            module.add_metadata([ir.MetaDataString(module, f"npnorm.output{i}"), domain])
            for i in outputs
        ]
    )
