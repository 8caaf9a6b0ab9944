"""The formats of elements: float16 and bfloat16 to float32 and back, one number or several at once.

An array of float16 arrives as int16 and one of bfloat16 as uint16, since Numba knows neither: the
integer type names the format. Conversions are LLVM code of a single width without branches, so the
loops around them vectorize.
"""

from itertools import chain

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.registry import cpu_target

from .lanes import Lanes

HALF, BFLOAT = types.int16, types.uint16
_I16, _I32, _I64 = ir.IntType(16), ir.IntType(32), ir.IntType(64)
_F16, _F32, _F64 = ir.HalfType(), ir.FloatType(), ir.DoubleType()
_UPPER = 0xFFFF0000


def has(feature):
    """Whether the CPU compiled for has a feature, by LLVM's name."""
    _, _, features = cpu_target.target_context.codegen().magic_tuple()
    return f"+{feature}" in features.split(",")


def has_half_instructions():
    """Whether the CPU compiled for converts float16 itself. Where it cannot, LLVM would call a missing function."""
    triple, _, _ = cpu_target.target_context.codegen().magic_tuple()
    return triple.startswith(("aarch64", "arm64")) or has("f16c")


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


def widen(builder, value, dtype, like, target):
    """The exact value of a stored element as a float32 or float64; of several in the order of the lanes of `like`."""
    if not (isinstance(like, Lanes) and like.paired):
        value = as_float(builder, value, dtype)
    elif dtype == BFLOAT:
        even, odd = even_and_odd(builder, value)
        value = builder.shuffle_vector(even, odd, _places(range(like.count)))
    else:
        value = as_float(builder, value, dtype)
        value = builder.shuffle_vector(value, value, _places([*range(0, like.count, 2), *range(1, like.count, 2)]))
    return resize(builder, value, target)


def stored_form(builder, value, dtype, like):
    """Numbers in the order of the lanes of `like` as elements, `narrow`, in that of memory."""
    if not (isinstance(like, Lanes) and like.paired):
        return narrow(builder, value, dtype)
    if dtype == BFLOAT:
        even, odd = _halves(builder, _bfloat_bits(builder, value))
        pairs = builder.or_(builder.lshr(even, _constant(even, 16)), builder.and_(odd, _constant(odd, _UPPER)))
        return builder.bitcast(pairs, ir.VectorType(_I16, like.count))
    value = narrow(builder, value, dtype)
    even, odd = range(like.count // 2), range(like.count // 2, like.count)
    return builder.shuffle_vector(value, value, _places(chain.from_iterable(zip(even, odd, strict=True))))


def even_and_odd(builder, value):
    """The float32 values of the bfloat16 in even places, and in odd ones."""
    pairs = builder.bitcast(value, ir.VectorType(_I32, value.type.count // 2))
    bits = builder.shl(pairs, _constant(pairs, 16)), builder.and_(pairs, _constant(pairs, _UPPER))
    return [builder.bitcast(half, _as(_F32, half)) for half in bits]


def _halves(builder, value):
    half = value.type.count // 2
    return [builder.shuffle_vector(value, value, _places(range(start, start + half))) for start in (0, half)]


def _places(places):
    places = list(places)
    return ir.Constant(ir.VectorType(_I32, len(places)), places)


def as_float(builder, value, dtype):
    """The exact value of a stored element as a float32, or as the float64 it is."""
    if dtype == HALF:
        return _fenced(builder, _half_to_float(builder, value))
    if dtype == BFLOAT:
        bits = builder.zext(value, _as(_I32, value))
        return builder.bitcast(builder.shl(bits, _constant(bits, 16)), _as(_F32, value))
    return value


def _fenced(builder, value):
    """Float32 lanes, which no later conversion takes in: from float16 to float64 at once (AVX512-FP16) takes an Intel
    Xeon 0.19 ns a number, by way of float32 0.08."""
    if not (isinstance(value.type, ir.VectorType) and has("avx512fp16")):
        return value
    function = ir.FunctionType(value.type, [value.type])
    name = f"llvm.arithmetic.fence.v{value.type.count}f32"
    return builder.call(cgutils.get_or_insert_function(builder.module, function, name), [value])


def resize(builder, value, target):
    if value.type == target:
        return value
    wider = target == _as(_F64, value)
    return builder.fpext(value, target) if wider else builder.fptrunc(value, target)


def narrow(builder, value, dtype):
    """A float32 or float64 rounded once, to nearest even, to an element's format."""
    if dtype in (types.float32, types.float64):
        return resize(builder, value, _as(_llvm_type(dtype), value))
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
    bits = _bfloat_bits(builder, value)
    return builder.trunc(builder.lshr(bits, _constant(bits, 16)), _as(_I16, value))


def _bfloat_bits(builder, value):
    """32 bits whose upper half is the nearest bfloat16 of a float32 or float64."""
    if value.type == _as(_F64, value):
        value = _round_to_odd(builder, value)
    bits = builder.bitcast(value, _as(_I32, value))
    even = builder.and_(builder.lshr(bits, _constant(bits, 16)), _constant(bits, 1))
    near = builder.add(bits, builder.add(even, _constant(bits, 0x7FFF)))
    # A NaN that an operation made or passed on is quiet, so its upper half is one too.
    is_nan = builder.fcmp_unordered("uno", value, value)
    return builder.select(is_nan, bits, near)


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
    if value.type == _as(_F64, value):
        value = _round_to_odd(builder, value)
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
