"""What the compiler makes of the kernels of the launch table, for four generations of GPUs. No GPU is needed."""

import functools
import importlib.util
import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from npnorm._plan import Plan

pytest.importorskip("cuda.bindings", reason="needs the extra cu13")
pytest.importorskip("numba_cuda", reason="needs the extra cu13")

from numba import cuda, njit, types  # noqa: E402
from numba.extending import intrinsic  # noqa: E402

from npnorm.cuda import table, vectors  # noqa: E402
from npnorm.cuda.compile import assemble, link, lower  # noqa: E402
from npnorm.cuda.kernels import make_kernel  # noqa: E402

EXAMPLE = Path(__file__).parents[2] / "examples" / "cuda_gated_norm.py"
CAPABILITIES = [(8, 0), (9, 0), (10, 0)]
ODD = "of rows at odd addresses and of the other byte order"
LATEST = (12, 0)
"""Compiled for the kernels of one format only: a minute less."""

SPILLING = [("forward bfloat16 16384 layer", (12, 0))]
"""Since rows of bfloat16 are added up in exact pairs."""

SCALAR_DOUBLES = {"forward": 120, "backward": 120, "sums": 60, "total": 0}
"""The most float64 instructions of a float32 or half-precision kernel in PTX: sums over threads, mean and rstd,
each once a row."""


def forward_plan(x, centered=True, parameter=None, out=None, residual=None, statistics=False):
    parameter = parameter or x
    return Plan(
        False, centered, "float64" in (x, out), False, x, residual, parameter, parameter if centered else None, out
        or x,
        "float64" if statistics and centered else None, "float64" if statistics else None,
    )  # fmt: skip


def backward_plan(x, centered=True, parameter=None, dresidual=None):
    parameter = parameter or x
    return Plan(
        True, centered, "float64" in (x, parameter), False, x, x, parameter, None, x, "float64" if centered else
        None, "float64",
        parameter, parameter if centered else None, dresidual,
    )  # fmt: skip


def launches():
    """The table's launches: a name, and the launch of a call on 8192 rows."""
    cases = [(x, row, True) for x in ("bfloat16", "float32") for row in (512, 2048, 8192, 32768)]
    cases += [("bfloat16", 8192, False), ("float32", 8192, False), ("float64", 8192, True)]
    for x, row, centered in cases:
        cols, width = row // table.SIZES[x], 16 // table.SIZES[x]
        name = f"{x} {cols} {'layer' if centered else 'rms'}"
        yield f"forward {name}", table.forward_launch(forward_plan(x, centered), 8192, cols, width)
        for launch in table.backward_launches(backward_plan(x, centered), 8192, cols, width):
            yield f"{launch.spec.kind} {name}", launch
    half = "bfloat16"
    for cols in (40960, 100000):
        yield f"forward {half} {cols}", table.forward_launch(forward_plan(half), 8192, cols, 8)
    four_axes = table.forward_launch(forward_plan(half, residual=half), 8192, 4096, 8, lead=4)
    yield "forward residual, rows along 4 axes", four_axes
    for lead in (2, 4):
        (launch,) = table.backward_launches(backward_plan(half, dresidual=half), 8192, 4096, 8, lead=lead)
        yield f"backward, rows along {lead} axes", launch
    yield "forward statistics", table.forward_launch(forward_plan(half, statistics=True), 8192, 4096, 8)
    yield "forward float32 weight", table.forward_launch(forward_plan(half, parameter="float32"), 8192, 4096, 8)
    yield "forward float16", table.forward_launch(forward_plan("float16"), 8192, 4096, 8)
    yield "forward odd", table.forward_launch(forward_plan(half), 8192, 4097, 1)
    for name, make, plan in (
        ("forward", table.forward_launch, forward_plan("float32", residual="float32")),
        ("backward", lambda *given: table.backward_launches(*given)[0], backward_plan("float32", dresidual="float32")),
    ):
        access = table.SWAPPED, table.WHOLE, table.BYTES, table.SWAPPED
        yield f"{name} {ODD}", make(plan, 8192, 2048, 1, False, 1, access)
    yield "total", table.total_launch(backward_plan(half), half, 4096)
    yield from more_launches()


def more_launches():
    """Formats that are mixed, and each format with all options at once, one element at a time: these want the most
    registers."""
    for x in table.SIZES:
        every = forward_plan(x, residual=x, statistics=True)._replace(rounding=True)
        yield f"forward {x} every option", table.forward_launch(every, 8192, 3000 // table.SIZES[x], 1, True)
        every, cols = backward_plan(x, dresidual=x), 500 // table.SIZES[x]
        yield f"backward {x} every option", table.backward_launches(every, 8192, cols, 1, True)[0]
        yield f"total {x}", table.total_launch(backward_plan(x), x, 4096, 2)
    for x in ("bfloat16", "float32"):
        yield f"forward {x} alone", table.forward_launch(table.statistics_plan(backward_plan(x)), 8192, 4096, 4)
    for x, other, cols in (
        ("bfloat16", "float32", 1024), ("bfloat16", "float32", 8192), ("float16", "float64", 512),
        ("float16", "float64", 4096), ("float32", "float64", 512), ("float32", "float64", 2048),
    ):  # fmt: skip
        name, width = f"{x} with {other} {cols}", 16 // table.SIZES[x]
        mixed = forward_plan(x, True, other, other, other, True)
        yield f"forward {name}", table.forward_launch(mixed, 8192, cols, width, True)
        mixed = backward_plan(x, True, other, other)._replace(other=other)
        for launch in table.backward_launches(mixed, 8192, cols, width, True):
            yield f"{launch.spec.kind} {name}", launch


LAUNCHES = dict(launches())


def named(condition=lambda spec: True):
    """Launches by name; all tests of one run in the same process (see conftest.py), which compiles it once."""
    return pytest.mark.parametrize("name", [name for name, launch in LAUNCHES.items() if condition(launch.spec)])


@functools.cache
def lowered(name):
    spec = LAUNCHES[name].spec
    return lower(*make_kernel(spec), spec.block, spec.resident)


@functools.cache
def text(name):
    """PTX."""
    return link(lowered(name), (9, 0), True)[0].decode(errors="replace")


def operations(text):
    return Counter(re.findall(r"^\s+(?:@!?%p\d+ )?([a-z][\w.]+)", text, re.MULTILINE))


@pytest.mark.parametrize("capability", CAPABILITIES, ids=str)
@named()
def test_resources(name, capability):
    check_resources(name, capability)


@named(lambda spec: spec.plan.x == spec.plan.other == "bfloat16" or spec.vectors == 4)
def test_resources_of_the_latest(name, request):
    if (name, LATEST) in SPILLING:
        request.applymarker(pytest.mark.xfail(reason="spills 80 bytes", strict=True))
    check_resources(name, LATEST)


def check_resources(name, capability):
    """Nothing spills, registers are within the launch bound, and every GPU has the shared memory."""
    launch = LAUNCHES[name]
    spec = launch.spec
    compiled = assemble(lowered(name), capability)
    assert compiled.cubin.startswith(b"\x7fELF")
    assert compiled.name.encode() in compiled.cubin
    assert compiled.spills == compiled.stack == 0, compiled.log
    assert 0 < compiled.registers <= 65536 // (spec.block * spec.resident)
    assert compiled.shared + launch.shared_bytes <= table.SHARED


@named()
def test_accesses(name):
    """16 bytes at a time where the width allows, and no local memory in PTX."""
    spec = LAUNCHES[name].spec
    found = operations(text(name))
    assert not any(".local" in operation for operation in found)
    if spec.kind == "total":
        return
    accesses = {key: value for key, value in found.items() if key.startswith(("ld.global", "st.global"))}
    wide = sum(
        value
        for key, value in accesses.items()
        if ".v4." in key or ".v2.f64" in key or ".v2.u64" in key or ".v2.b64" in key
    )
    vectors = max(1, spec.vectors)
    if spec.width == spec.chunk:
        assert wide >= vectors * (2 if spec.plan.out else 1), accesses
        others = {key: value for key, value in accesses.items() if ".v" not in key}
        # Statistics are read and written as single float64.
        assert sum(others.values()) <= 8, others
    else:
        assert wide == 0 or "partial" in name or spec.kind == "backward"


@named(lambda spec: spec.access != table.ORDINARY)
def test_accesses_of_odd_rows(name):
    """Rows that may lie anywhere are moved byte by byte; the other arrays, and they alone, element by element."""
    spec = LAUNCHES[name].spec
    elements, backward = spec.vectors * spec.chunk, spec.plan.backward
    found = operations(text(name))

    def count(operation, *kinds):
        return sum(found[f"{operation}.global.{kind}"] for kind in kinds)

    assert not any(".v4" in operation for operation in found)
    assert count("ld", "u8", "b8") == 4 * elements * (2 if backward else 1)
    assert count("st", "u8", "b8") >= 4 * elements * (1 if backward else 2)
    # The residual, weight and bias, or x and twice the weight; partial sums.
    assert count("ld", "f32", "u32", "b32") == 3 * elements
    assert count("st", "f32", "u32", "b32") == (2 * elements if backward else 0)


@pytest.mark.parametrize("access", [table.WHOLE, table.BYTES, table.SWAPPED])
@pytest.mark.parametrize("size", [2, 4, 8])
def test_accesses_on_the_host(size, access):
    """The instructions of LLVM that move elements, compiled for this processor: any byte order at any address."""
    whole = vectors.ir.IntType(8 * size)
    kind = vectors.ir.VectorType(vectors.ir.IntType(32), 2) if size == 8 else whole  # as words of a kernel

    @intrinsic
    def load(typingctx, address):
        def codegen(context, builder, signature, args):
            loaded = vectors._load(builder, args[0], kind, size, access)
            return builder.zext(builder.bitcast(loaded, whole), vectors.ir.IntType(64))

        return types.uint64(types.int64), codegen

    @intrinsic
    def store(typingctx, address, value):
        def codegen(context, builder, signature, args):
            value = builder.bitcast(builder.trunc(args[1], whole), kind)
            vectors._store(builder, value, args[0], size, access)
            return context.get_dummy_value()

        return types.void(types.int64, types.uint64), codegen

    @njit
    def move(source, target):
        value = load(source)
        store(target, value)
        return value

    memory = np.arange(1, 33, dtype=np.uint8)
    source, target = (1, 19) if access != table.WHOLE else (8, 16)
    expected = memory.copy()
    expected[target : target + size] = memory[source : source + size]
    content = memory[source : source + size].tobytes()
    value = move(memory.ctypes.data + source, memory.ctypes.data + target)
    assert value == int.from_bytes(content, "big" if access == table.SWAPPED else "little")
    assert (memory == expected).all()


@named(lambda spec: not spec.plan.double)
def test_double_precision_is_for_scalars(name):
    """float64 instructions do not grow with the elements of a thread, but for statistics, which are all float64, and
    for the sum of a half-precision x and a residual of another format. Partial sums are added up without any, until
    threads have told each other that one is beyond float32."""
    spec = LAUNCHES[name].spec
    found = operations(text(name).partition("bar.red")[0] if spec.kind == "total" else text(name))
    doubles = {
        key: value
        for key, value in found.items()
        if ".f64" in key and key.split(".")[0] in ("add", "sub", "mul", "fma", "div", "rcp", "cvt", "rsqrt", "sqrt")
    }
    allowed, elements = SCALAR_DOUBLES[spec.kind], spec.vectors * spec.chunk
    if spec.kind == "forward" and spec.plan.rstd:
        allowed += 5 * elements
    if spec.kind == "forward" and spec.plan.other not in (None, spec.plan.x):
        allowed += 6 * elements
    assert sum(doubles.values()) <= allowed, doubles


def test_the_mean_is_subtracted_in_two_steps():
    """No product is fused with a sum but where the kernel says so, and (x - high) - low stays two subtractions."""
    found = operations(text("forward bfloat16 4096 layer"))
    elements = 16
    assert found["sub.rn.f32"] >= 4 * elements
    # y, and the squares two by two, for rows that are scaled and for those that are not.
    assert found["fma.rn.f32"] <= elements + 2 * (elements // 2)
    assert not any("ftz" in operation for operation in found)


def test_the_order_of_halves():
    """The element with the lower index is the lower half of a word, and the lower word of a float64 is the first."""
    uint32, word, double = cuda.types.uint32, np.uint32, vectors.as_double

    def kernel(low, high, address):
        words = cuda.local.array(8, uint32)
        words[0] = vectors.float_to_halves(low, high)
        words[1] = vectors.float_to_bfloats(low, high)
        words[2] = vectors.as_word(vectors.low_half(word(0x40003C00)))
        words[3] = vectors.as_word(vectors.high_half(word(0x40003C00)))
        words[4] = vectors.as_word(vectors.low_bfloat(word(0x40003F80)))
        words[5] = vectors.as_word(vectors.high_bfloat(word(0x40003F80)))
        words[6], words[7] = vectors.double_words(double(word(1), word(0x3FF00000)) + 1.0)
        vectors.store16(address, words, 0)
        vectors.store16(address + 16, words, 4)

    floats = cuda.types.float32, cuda.types.float32
    ptx = link(lower(kernel, (*floats, cuda.types.int64), 32), (9, 0), True)[0].decode(errors="replace")
    values = dict(re.findall(r"ld\.param\.f32\s+(%f\d+), \[\w+_param_(\d)\]", ptx))
    for register, number in re.findall(r"mov\.u32\s+(%r\d+), (\d+);", ptx):
        values[register] = word(int(number)).view(np.float32)
    for name, register, *halves in re.findall(r"cvt\.rn\.(\w+)x2\.f32 (%r\d+), (%f\d+), (%f\d+);", ptx):
        values[register] = name, *(values[half] for half in halves)  # the upper one comes first
    stored = ", ".join(re.findall(r"st\.global\.v4\.u32.*\{(.*)\}", ptx)).split(", ")
    packed = [("f16", "1", "0"), ("bf16", "1", "0")]
    assert [values[register] for register in stored] == [*packed, 1.0, 2.0, 1.0, 2.0, 0.0, 2.0]


def test_example():
    """The fused kernel of the documentation holds its row in registers, and reads and writes 16 bytes at a time."""
    specification = importlib.util.spec_from_file_location("cuda_gated_norm", EXAMPLE)
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    for format in ("float16", "bfloat16"):
        function = module.make_gated_norm(format, 256, 2)
        code = lower(function, module.SIGNATURE, 256, 4)
        compiled = assemble(code, (9, 0))
        assert compiled.spills == compiled.stack == 0
        found = operations(link(code, (9, 0), True)[0].decode(errors="replace"))
        assert found["ld.global.v4.u32"] == 6
        assert found["st.global.v4.u32"] == 2
