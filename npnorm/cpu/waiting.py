"""Waiting for another thread without sleep: waking one that sleeps takes 15 to 50 µs."""

import platform

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from .arrays import vector


@intrinsic
def _now(typingctx, signal):
    """signal[0] as it is in memory now."""

    def codegen(context, builder, signature, args):
        data = context.make_array(signal)(context, builder, args[0]).data
        return builder.load_atomic(data, "acquire", 8)

    return types.int64(signal), codegen


@intrinsic
def _announce(typingctx, signal):
    """Make signal[0] 1, after all that was written before."""

    def codegen(context, builder, signature, args):
        data = context.make_array(signal)(context, builder, args[0]).data
        builder.store_atomic(context.get_constant(types.int64, 1), data, "release", 8)
        return context.get_dummy_value()

    return types.none(signal), codegen


@intrinsic
def _pause(typingctx):
    """Tell an x86 that this loop waits."""

    def codegen(context, builder, signature, args):
        if platform.machine() in ("x86_64", "AMD64"):
            function = ir.FunctionType(ir.VoidType(), [])
            builder.call(cgutils.get_or_insert_function(builder.module, function, "llvm.x86.sse2.pause"), [])
        return context.get_dummy_value()

    return types.none(), codegen


def wait(ended, signal, known, rounds, more):
    """Make ended[0] 1. Return when signal[0] is no longer `known`, and `more` rounds later; or after so many rounds."""
    _announce(vector(ended, 1))
    numbers = vector(signal, 1)
    for _ in range(rounds):
        if _now(numbers) != known:
            for _ in range(more):
                _pause()
            return
        _pause()
