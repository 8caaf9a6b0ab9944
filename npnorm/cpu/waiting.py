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
def _pause(typingctx):
    """Tell an x86 that this loop waits."""

    def codegen(context, builder, signature, args):
        if platform.machine() in ("x86_64", "AMD64"):
            function = ir.FunctionType(ir.VoidType(), [])
            builder.call(cgutils.get_or_insert_function(builder.module, function, "llvm.x86.sse2.pause"), [])
        return context.get_dummy_value()

    return types.none(), codegen


def wait(signal, known, rounds, more):
    """Return when signal[0] is no longer `known`, and `more` rounds later; or after so many rounds."""
    numbers = vector(signal, 1)
    for _ in range(rounds):
        if _now(numbers) != known:
            for _ in range(more):
                _pause()
            return
        _pause()
