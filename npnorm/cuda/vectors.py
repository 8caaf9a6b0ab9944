"""Memory accesses of 2 to 16 bytes and conversions of words: what Numba has no words for.

A thread moves memory in words of 32 bits, at 64-bit addresses: a word holds one float32, two numbers of half
precision or half a float64. Each function here has a twin in `simulated`, with which the same kernels run in Numba's
simulator.
"""

import numpy as np
from numba import cuda

try:
    from numba.cuda import config
except ImportError:
    from numba.core import config

from .table import SWAPPED, WHOLE

SIMULATED = bool(config.ENABLE_CUDASIM)
ALL_LANES = 0xFFFFFFFF


def device(function):
    """A function that kernels call; it is inlined."""
    return function if SIMULATED else cuda.jit(device=True, inline="always")(function)


if SIMULATED:
    from .simulated import (
        any_lane,
        as_double,
        as_float,
        as_word,
        double_words,
        float_to_bfloats,
        float_to_halves,
        fma,
        high_bfloat,
        high_half,
        load2,
        load4,
        load8,
        load16,
        low_bfloat,
        low_half,
        make_load,
        make_load2,
        make_store,
        make_store2,
        prefetch,
        reciprocal_root,
        shuffle,
        store2,
        store4,
        store8,
        store16,
    )
else:
    from llvmlite import ir
    from numba.cuda import libdevice, types
    from numba.cuda.extending import intrinsic

    _I16, _I32, _I64 = (ir.IntType(bits) for bits in (16, 32, 64))
    _F16, _F32, _F64 = ir.HalfType(), ir.FloatType(), ir.DoubleType()

    # Memory

    def _element(context, builder, array, value, index, offset):
        data = context.make_array(array)(context, builder, value).data
        return builder.gep(data, [builder.add(index, index.type(offset))])

    def _pointer(builder, address, element):
        return builder.inttoptr(address, ir.PointerType(element, addrspace=1))

    def _load(builder, address, kind, size, access):
        """`size` bytes at a global address, as a type of LLVM."""
        whole = access == WHOLE
        loaded = builder.load(_pointer(builder, address, kind if whole else ir.IntType(8 * size)))
        loaded.align = size if whole else 1  # the compiler makes bytes of it
        return builder.bitcast(builder.bswap(loaded) if access == SWAPPED else loaded, kind)

    def _store(builder, value, address, size, access):
        """The bytes at a global address = a value."""
        if access != WHOLE:
            value = builder.bitcast(value, ir.IntType(8 * size))
        if access == SWAPPED:
            value = builder.bswap(value)
        builder.store(value, _pointer(builder, address, value.type)).align = size if access == WHOLE else 1

    def make_load(size, access=WHOLE):
        count = size // 4
        kind = ir.VectorType(_I32, count) if count > 1 else _I32

        @intrinsic
        def load(typingctx, words, at, address):
            """words[at:] = the `size` bytes at a global address; `size` divides it if they are accessed whole."""

            def codegen(context, builder, signature, args):
                loaded = _load(builder, args[2], kind, size, access)
                for i in range(count):
                    word = builder.extract_element(loaded, _I32(i)) if count > 1 else loaded
                    builder.store(word, _element(context, builder, words, args[0], args[1], i))
                return context.get_dummy_value()

            return types.none(words, types.int64, types.int64), codegen

        return load

    def make_store(size, access=WHOLE):
        count = size // 4
        kind = ir.VectorType(_I32, count) if count > 1 else _I32

        @intrinsic
        def store(typingctx, address, words, at):
            """The bytes at a global address = words[at:]."""

            def codegen(context, builder, signature, args):
                vector = ir.Constant(kind, ir.Undefined)
                for i in range(count):
                    word = builder.load(_element(context, builder, words, args[1], args[2], i))
                    vector = builder.insert_element(vector, word, _I32(i)) if count > 1 else word
                _store(builder, vector, args[0], size, access)
                return context.get_dummy_value()

            return types.none(types.int64, words, types.int64), codegen

        return store

    def make_load2(access=WHOLE):
        @intrinsic
        def load(typingctx, address):
            """The 16 bits at a global address, as the low half of a word."""

            def codegen(context, builder, signature, args):
                return builder.zext(_load(builder, args[0], _I16, 2, access), _I32)

            return types.uint32(types.int64), codegen

        return load

    def make_store2(access=WHOLE):
        @intrinsic
        def store(typingctx, address, word):
            """The 16 bits at a global address = the low half of a word."""

            def codegen(context, builder, signature, args):
                _store(builder, builder.trunc(args[1], _I16), args[0], 2, access)
                return context.get_dummy_value()

            return types.none(types.int64, types.uint32), codegen

        return store

    load2, load4, load8, load16 = make_load2(), *map(make_load, (4, 8, 16))
    store2, store4, store8, store16 = make_store2(), *map(make_store, (4, 8, 16))

    @intrinsic
    def prefetch(typingctx, address):
        """Ask for what stands at a global address, from memory to the second cache; no register waits for it."""

        def codegen(context, builder, signature, args):
            kind = ir.FunctionType(ir.VoidType(), [_I64])
            builder.asm(kind, "prefetch.global.L2 [$0];", "l", [args[0]], True)
            return context.get_dummy_value()

        return types.none(types.int64), codegen

    # Words and numbers

    def _conversion(result, arguments, code):
        """An intrinsic of fixed types; `code` gets the builder and the arguments."""

        def typed(typingctx, *given):
            return result(*arguments), lambda context, builder, signature, args: code(builder, *args)

        if len(arguments) == 1:
            return intrinsic(lambda typingctx, a: typed(typingctx, a))
        return intrinsic(lambda typingctx, a, b: typed(typingctx, a, b))

    def _half(builder, word):
        return builder.fpext(builder.bitcast(builder.trunc(word, _I16), _F16), _F32)

    def _packed(instruction):
        """Two float32 rounded to 16 bits each in one instruction, which takes the high one first."""

        def code(builder, low, high):
            kind = ir.FunctionType(_I32, [_F32, _F32])
            return builder.asm(kind, instruction + " $0, $2, $1;", "=r,f,f", [low, high], False)

        return code

    def _double_words(builder, number):
        bits = builder.bitcast(number, _I64)
        return builder.trunc(bits, _I32), builder.trunc(builder.lshr(bits, _I64(32)), _I32)

    as_float = _conversion(types.float32, (types.uint32,), lambda b, word: b.bitcast(word, _F32))
    as_word = _conversion(types.uint32, (types.float32,), lambda b, number: b.bitcast(number, _I32))
    low_half = _conversion(types.float32, (types.uint32,), _half)
    high_half = _conversion(types.float32, (types.uint32,), lambda b, word: _half(b, b.lshr(word, _I32(16))))
    low_bfloat = _conversion(types.float32, (types.uint32,), lambda b, word: b.bitcast(b.shl(word, _I32(16)), _F32))
    high_bfloat = _conversion(
        types.float32, (types.uint32,), lambda b, word: b.bitcast(b.and_(word, _I32(0xFFFF0000)), _F32)
    )
    float_to_halves = _conversion(types.uint32, (types.float32,) * 2, _packed("cvt.rn.f16x2.f32"))
    float_to_bfloats = _conversion(types.uint32, (types.float32,) * 2, _packed("cvt.rn.bf16x2.f32"))
    as_double = _conversion(
        types.float64,
        (types.uint32,) * 2,
        lambda b, low, high: b.bitcast(b.or_(b.zext(low, _I64), b.shl(b.zext(high, _I64), _I64(32))), _F64),
    )
    _low_word = _conversion(types.uint32, (types.float64,), lambda b, number: _double_words(b, number)[0])
    _high_word = _conversion(types.uint32, (types.float64,), lambda b, number: _double_words(b, number)[1])

    @device
    def double_words(number):
        """The low and the high word of a float64."""
        return _low_word(number), _high_word(number)

    # Arithmetic and lanes

    @device
    def fma(a, b, c):
        """a·b + c, rounded once."""
        return cuda.fma(a, b, c)

    @device
    def reciprocal_root(number):
        """1/sqrt(number) of a float64, to the last digit or two."""
        return libdevice.rsqrt(number)

    @device
    def shuffle(value, lanes):
        """`value` of the lane whose number differs in the bits of `lanes`."""
        return cuda.shfl_xor_sync(ALL_LANES, value, lanes)

    @device
    def any_lane(flag):
        """Whether `flag` is True in any lane of the warp."""
        return cuda.any_sync(ALL_LANES, flag)


@device
def to_odd(number):
    """float64 to float32, such that rounding it to 16 bits is as if that were done at once.

    S. Boldo, G. Melquiond, "Emulation of FMA and correctly rounded sums: proved algorithms using rounding to odd", IEEE
    Transactions on Computers 57, 2008.
    """
    nearest = np.float32(number)
    back = np.float64(nearest)
    bits = as_word(nearest)
    if back != number and number == number:
        if abs(back) > abs(number):
            bits = np.uint32(bits - np.uint32(1))
        bits = np.uint32(bits | np.uint32(1))
    return as_float(bits)
