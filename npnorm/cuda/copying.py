"""The kernel that copies between arrays of any layout, byte order and alignment."""

from typing import Any

from llvmlite import ir

from .copies import Copy
from .table import SIZES

_FLOATS = {"float16": ir.HalfType(), "float32": ir.FloatType(), "float64": ir.DoubleType()}
_I32, _I64 = ir.IntType(32), ir.IntType(64)


def move(builder: Any, source: Any, target: Any, spec: Copy, space: int) -> None:
    """Emit the copy of one element from an address to another, in an address space: 1 is a GPU's global memory."""
    word = _access(builder, source, spec.source, space)
    loaded = builder.load(word)
    loaded.align = SIZES[spec.source] if spec.aligned else 1
    value = _swapped(builder, loaded) if spec.source_swapped else loaded
    if spec.source != spec.target:
        value = _as_double(builder, value, spec.source)
    if spec.target_swapped:
        value = _swapped(builder, value)
    stored = builder.store(value, _access(builder, target, spec.target, space))
    stored.align = SIZES[spec.target] if spec.aligned else 1


def _access(builder: Any, address: Any, format_: str, space: int) -> Any:
    return builder.inttoptr(address, ir.PointerType(ir.IntType(8 * SIZES[format_]), addrspace=space))


def _swapped(builder: Any, value: Any) -> Any:
    """The bytes in reverse."""
    bits = value.type.width
    swap = builder.module.declare_intrinsic("llvm.bswap", [value.type], ir.FunctionType(value.type, [value.type]))
    assert bits in (16, 32, 64)
    return builder.call(swap, [value])


def _as_double(builder: Any, value: Any, format_: str) -> Any:
    """The bits of the number as a float64."""
    if format_ == "bfloat16":
        value = builder.shl(builder.zext(value, _I32), _I32(16))
        format_ = "float32"
    number = builder.fpext(builder.bitcast(value, _FLOATS[format_]), _FLOATS["float64"])
    return builder.bitcast(number, _I64)


def make_copy(spec: Copy, intrinsic: Any, types: Any, grid: Any, space: int) -> Any:
    """The kernel of a spec, for the target whose `intrinsic` and `types` are given.

    `grid` tells the first element of a thread and the step to its next.
    """

    @intrinsic
    def move_element(typingctx, source, target):
        def codegen(context, builder, signature, args):
            move(builder, args[0], args[1], spec, space)
            return context.get_dummy_value()

        return types.void(types.int64, types.int64), codegen

    def copy(source, target, n0, n1, n2, n3, s0, s1, s2, s3, t0, t1, t2, t3):
        first, step = grid()
        for i in range(first, n0 * n1 * n2 * n3, step):
            i3 = i % n3
            rest = i // n3
            i2 = rest % n2
            rest = rest // n2
            i1 = rest % n1
            i0 = rest // n1
            move_element(
                source + i0 * s0 + i1 * s1 + i2 * s2 + i3 * s3,
                target + i0 * t0 + i1 * t1 + i2 * t2 + i3 * t3,
            )

    return copy


def compile_copy(spec: Copy, capability: tuple[int, int]) -> Any:
    """Compile the kernel for a compute capability."""
    from numba import cuda
    from numba.cuda import types
    from numba.cuda.extending import intrinsic

    from .compile import compile_kernel

    @cuda.jit(device=True, inline="always")
    def grid():
        return cuda.grid(1), cuda.gridsize(1)

    kernel = make_copy(spec, intrinsic, types, grid, 1)
    return compile_kernel(kernel, (types.int64,) * 14, capability, spec.threads)
