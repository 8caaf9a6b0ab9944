"""Several numbers at once: a vector register as a Numba type.

The compiler makes vectors of plain loops by itself, and decides how many partial sums a sum gets: another loop around
the same sum may get others, and then other bits. Where several kernels must find the same sum they add `Lanes`. Helpers
written for a number serve lanes as well.
"""

import math
import operator

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.imputils import lower_builtin
from numba.core.typing.templates import AbstractTemplate, infer_global, signature
from numba.extending import intrinsic, models, register_model

_I32 = ir.IntType(32)


class Lanes(types.Type):
    """`count` numbers of type `dtype`; if they are `paired`, those of even places come before those of odd ones."""

    def __init__(self, dtype, count, paired=False):
        self.dtype, self.count, self.paired = dtype, count, paired
        super().__init__(name=f"npnorm.Lanes({dtype}, {count}, {paired})")


@register_model(Lanes)
class _LanesModel(models.PrimitiveModel):
    def __init__(self, manager, kind):
        super().__init__(manager, kind, ir.VectorType(manager[kind.dtype].get_value_type(), kind.count))


def _count(vector):
    """Float64 lanes for elements of a vector. Conversions of float32 take 0.07 ns a number for 256 bits and 0.09 for
    512 (EPYC Zen 4); those of 16 bits come in eights."""
    return 8 if vector.dtype.bitwidth == 16 else 4


@intrinsic
def lane_count(typingctx, vector):
    """How many lanes sums over a vector's elements have."""

    def codegen(context, builder, signature, args):
        return context.get_constant(types.intp, _count(vector))

    return types.intp(vector), codegen


@intrinsic
def lanes(typingctx, value, vector):
    """A float64 in each of the lanes for a vector's elements."""
    kind = Lanes(value, _count(vector))
    return kind(value, vector), lambda context, builder, signature, args: spread(builder, args[0], kind.count)


@intrinsic
def four_lanes(typingctx, value):
    """A number in each of four lanes."""
    return Lanes(value, 4)(value), lambda context, builder, signature, args: spread(builder, args[0], 4)


@intrinsic
def lane_sum(typingctx, values):
    """The sum of all lanes: one half is added to the other until one lane is left."""

    def codegen(context, builder, signature, args):
        total, count = args[0], values.count
        while count > 1:
            count //= 2
            halves = (
                builder.shuffle_vector(total, total, ir.Constant(ir.VectorType(_I32, count), list(places)))
                for places in (range(count), range(count, 2 * count))
            )
            total = builder.fadd(*halves)
        return builder.extract_element(total, _I32(0))

    return values.dtype(values), codegen


@intrinsic
def first_lane(typingctx, values):
    """The first of some lanes."""
    return values.dtype(values), lambda context, builder, signature, args: builder.extract_element(args[0], _I32(0))


@intrinsic
def pushed(typingctx, values, value):
    """All lanes but the first, and then the value."""

    def codegen(context, builder, signature, args):
        places = [*range(1, values.count), 0]
        turned = builder.shuffle_vector(args[0], args[0], ir.Constant(ir.VectorType(_I32, values.count), places))
        return builder.insert_element(turned, args[1], _I32(values.count - 1))

    return values(values, value), codegen


@intrinsic
def all_less(typingctx, a, b):
    """Whether a < b in all lanes of either; not where one is NaN."""

    def codegen(context, builder, signature, args):
        count = next(kind.count for kind in (a, b) if isinstance(kind, Lanes))
        a_values, b_values = (
            value if isinstance(kind, Lanes) else spread(builder, value, count)
            for kind, value in zip(signature.args, args, strict=True)
        )
        bits = builder.bitcast(builder.fcmp_ordered("<", a_values, b_values), ir.IntType(count))
        return builder.icmp_unsigned("==", bits, ir.IntType(count)((1 << count) - 1))

    return types.boolean(a, b), codegen


def spread(builder, value, count):
    """An LLVM value in every lane of a vector."""
    nothing = ir.Constant(ir.VectorType(value.type, count), ir.Undefined)
    places = ir.Constant(ir.VectorType(_I32, count), [0] * count)
    return builder.shuffle_vector(builder.insert_element(nothing, value, _I32(0)), nothing, places)


class _Arithmetic(AbstractTemplate):
    """Lanes with lanes, or with one number for all."""

    def generic(self, args, kws):
        kinds = [kind for kind in args if isinstance(kind, Lanes)]
        if kinds and all(kind in (kinds[0], kinds[0].dtype) for kind in args):
            return signature(kinds[0], *args)
        return None


def _lower(instruction):
    def lowered(context, builder, signature, args):
        count = signature.return_type.count
        vectors = [
            value if isinstance(kind, Lanes) else spread(builder, value, count)
            for kind, value in zip(signature.args, args, strict=True)
        ]
        return getattr(builder, instruction)(*vectors)

    return lowered


_INSTRUCTIONS = {operator.add: "fadd", operator.sub: "fsub", operator.mul: "fmul", operator.truediv: "fdiv"}
for _operator, _instruction in _INSTRUCTIONS.items():
    infer_global(_operator)(type(f"_{_instruction}", (_Arithmetic,), {}))
    for _kinds in ((Lanes, Lanes), (Lanes, types.Float), (types.Float, Lanes)):
        lower_builtin(_operator, *_kinds)(_lower(_instruction))


@lower_builtin(operator.neg, Lanes)
def _negate(context, builder, signature, args):
    return builder.fneg(args[0])


@infer_global(operator.neg)
class _Negative(AbstractTemplate):
    def generic(self, args, kws):
        return signature(args[0], args[0]) if isinstance(args[0], Lanes) else None


@infer_global(math.sqrt)
class _Root(AbstractTemplate):
    def generic(self, args, kws):
        return signature(args[0], args[0]) if isinstance(args[0], Lanes) else None


@lower_builtin(math.sqrt, Lanes)
def _square_root(context, builder, signature, args):
    function = ir.FunctionType(args[0].type, [args[0].type])
    name = f"llvm.sqrt.v{args[0].type.count}f64"
    return builder.call(cgutils.get_or_insert_function(builder.module, function, name), args)
