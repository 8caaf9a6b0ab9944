"""Elements moved between memory and the compute dtype, and lines of the cache.

An array of float16 arrives as int16 and one of bfloat16 as uint16, since Numba knows neither: the
integer type names the format. Conversions are LLVM code of a single width without branches, so the
loops around them vectorize.
"""

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.registry import cpu_target
from numba.extending import intrinsic

from .arrays import LINE
from .lanes import Lanes, spread

HALF, BFLOAT = types.int16, types.uint16
_I16, _I32, _I64 = ir.IntType(16), ir.IntType(32), ir.IntType(64)
_F16, _F32, _F64 = ir.HalfType(), ir.FloatType(), ir.DoubleType()
_OUTPUTS = 6  # the most arrays that one loop writes


def has_half_instructions():
    """Whether the CPU compiled for converts float16 itself. Where it cannot, LLVM would call a missing function."""
    triple, _, features = cpu_target.target_context.codegen().magic_tuple()
    return triple.startswith(("aarch64", "arm64")) or "+f16c" in features.split(",")


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
    kind = Lanes(value, LINE * 8 // vector.dtype.bitwidth)
    return kind(value, vector), lambda context, builder, signature, args: spread(builder, args[0], kind.count)


@intrinsic
def stream(typingctx, vector, j, values):
    """`store` of a whole cache line, which is not brought into the cache. vector[j] must begin a line."""

    def codegen(context, builder, signature, args):
        number = _narrow(builder, args[2], vector.dtype)
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
        return _widen(builder, instruction, vector.dtype, context.get_value_type(like))

    return like(vector, types.intp, like), codegen


@intrinsic(prefer_literal=True)
def store(typingctx, vector, j, value, output):
    """vector[j] = value, rounded once to the vector's format. `output` numbers the arrays a loop writes."""
    if not isinstance(output, types.IntegerLiteral):
        return None
    value = types.unliteral(value)

    def codegen(context, builder, signature, args):
        number = _narrow(builder, args[2], vector.dtype)
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
        number = _narrow(builder, args[0], vector.dtype)
        return _widen(builder, number, vector.dtype, args[0].type)

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
        return getattr(builder, operation)(
            args[0], _widen(builder, number, vector.dtype, args[0].type)
        )

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


# Formats


def _llvm_type(dtype):
    return {types.float32: _F32, types.float64: _F64}[dtype]


def _as(kind, value):
    """An LLVM type of elements, or a vector of them where the value is one."""
    return ir.VectorType(kind, value.type.count) if isinstance(value.type, ir.VectorType) else kind


def _constant(value, number):
    """A number, or a vector of it, of the value's type."""
    if isinstance(value.type, ir.VectorType):
        return ir.Constant(value.type, [number] * value.type.count)
    return ir.Constant(value.type, number)


def _widen(builder, value, dtype, target):
    """The exact value of a stored element as a float32 or float64."""
    if dtype == HALF:
        value = _half_to_float(builder, value)
    elif dtype == BFLOAT:
        bits = builder.zext(value, _as(_I32, value))
        value = builder.bitcast(builder.shl(bits, _constant(bits, 16)), _as(_F32, value))
    return _resize(builder, value, target)


def _resize(builder, value, target):
    if value.type == target:
        return value
    wider = target == _as(_F64, value)
    return builder.fpext(value, target) if wider else builder.fptrunc(value, target)


def _narrow(builder, value, dtype):
    """A float32 or float64 rounded once, to nearest even, to an element's format."""
    if dtype in (types.float32, types.float64):
        return _resize(builder, value, _as(_llvm_type(dtype), value))
    if value.type == _F64:
        value = _round_to_odd(builder, value)
    return _float_to_half(builder, value) if dtype == HALF else _float_to_bfloat(builder, value)


def _round_to_odd(builder, value):
    """float64 to float32 such that rounding it to 16 bits is as if that were done at once.

    S. Boldo, G. Melquiond, "Emulation of FMA and correctly rounded sums: proved algorithms using
    rounding to odd", IEEE Transactions on Computers 57, 2008.
    """
    integer = _as(_I32, value)
    nearest = builder.fptrunc(value, _as(_F32, value))
    back = builder.fpext(nearest, value.type)
    bits = builder.bitcast(nearest, integer)
    magnitude, magnitude_back = (_magnitude64(builder, v) for v in (value, back))
    beyond = builder.zext(builder.fcmp_ordered(">", magnitude_back, magnitude), integer)
    inexact = builder.zext(builder.fcmp_unordered("!=", back, value), integer)
    bits = builder.or_(builder.sub(bits, beyond), inexact)
    return builder.bitcast(bits, nearest.type)


def _magnitude64(builder, value):
    bits = builder.bitcast(value, _as(_I64, value))
    return builder.bitcast(builder.and_(bits, _constant(bits, (1 << 63) - 1)), value.type)


def _float_to_bfloat(builder, value):
    bits = builder.bitcast(value, _as(_I32, value))
    even = builder.and_(builder.lshr(bits, _constant(bits, 16)), _constant(bits, 1))
    near = builder.add(bits, builder.add(even, _constant(bits, 0x7FFF)))
    # A NaN that an operation made or passed on is quiet, so its upper half is one too.
    is_nan = builder.fcmp_unordered("uno", value, value)
    upper = builder.lshr(builder.select(is_nan, bits, near), _constant(bits, 16))
    return builder.trunc(upper, _as(_I16, value))


def _half_to_float(builder, bits):
    if has_half_instructions():
        return builder.fpext(builder.bitcast(bits, _as(_F16, bits)), _as(_F32, bits))
    bits = builder.zext(bits, _as(_I32, bits))
    sign = builder.shl(builder.and_(bits, _constant(bits, 0x8000)), _constant(bits, 16))
    magnitude = builder.and_(bits, _constant(bits, 0x7FFF))
    # Exponent and fraction in their float32 places, 2^112 too small: the product mends that, for
    # subnormals too.
    small = builder.bitcast(builder.shl(magnitude, _constant(bits, 13)), _as(_F32, bits))
    number = builder.bitcast(builder.fmul(small, _constant(small, 2.0**112)), bits.type)
    special = builder.icmp_unsigned(">=", magnitude, _constant(bits, 0x7C00))
    exponent = builder.select(special, _constant(bits, 0x7F800000), _constant(bits, 0))
    return builder.bitcast(builder.or_(builder.or_(number, exponent), sign), _as(_F32, bits))


def _float_to_half(builder, value):
    if has_half_instructions():
        return builder.bitcast(builder.fptrunc(value, _as(_F16, value)), _as(_I16, value))
    bits = builder.bitcast(value, _as(_I32, value))
    sign = builder.and_(builder.lshr(bits, _constant(bits, 16)), _constant(bits, 0x8000))
    magnitude = builder.and_(bits, _constant(bits, 0x7FFFFFFF))
    even = builder.and_(builder.lshr(magnitude, _constant(bits, 13)), _constant(bits, 1))
    normal = builder.add(builder.add(magnitude, even), _constant(bits, 0xFFF - (112 << 23)))
    normal = builder.lshr(normal, _constant(bits, 13))
    # Below 2^-14 the spacing is 2^-24, the spacing of float32 from 0.5: adding 0.5 rounds.
    tiny = builder.fadd(builder.bitcast(magnitude, value.type), _constant(value, 0.5))
    tiny = builder.sub(builder.bitcast(tiny, bits.type), _constant(bits, 0x3F000000))
    number = builder.select(builder.icmp_unsigned("<", magnitude, _constant(bits, 0x38800000)), tiny, normal)
    infinite = builder.icmp_unsigned(">=", magnitude, _constant(bits, 0x47800000))
    number = builder.select(infinite, _constant(bits, 0x7C00), number)
    is_nan = builder.icmp_unsigned(">", magnitude, _constant(bits, 0x7F800000))
    number = builder.select(is_nan, _constant(bits, 0x7E00), number)
    return builder.trunc(builder.or_(number, sign), _as(_I16, value))
