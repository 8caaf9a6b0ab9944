"""What the compiler makes of the kernels of the launch table, for three generations of GPUs. No GPU is needed."""

import importlib.util
import re
from collections import Counter
from pathlib import Path

import pytest

from npnorm._plan import Plan

pytest.importorskip("cuda.bindings", reason="needs the extra cu13")
pytest.importorskip("numba_cuda", reason="needs the extra cu13")

from npnorm.cuda import table  # noqa: E402
from npnorm.cuda.compile import compile_kernel, compile_spec, link  # noqa: E402
from npnorm.cuda.kernels import make_kernel  # noqa: E402

EXAMPLE = Path(__file__).parents[2] / "examples" / "cuda_gated_norm.py"
CAPABILITIES = [(8, 0), (9, 0), (10, 0)]

SCALAR_DOUBLES = {"forward": 120, "backward": 120, "sums": 60, "total": 0}
"""The most float64 instructions of a float32 or half-precision kernel in PTX: sums over threads, mean and rstd,
each once a row."""


SPILLS = {"backward": 128}
"""The most bytes that may be spilt and loaded again for ordinary rows: compensated sums of dweight and dbias take
32 registers of 64. What the code for rows of extreme size spills comes on top: see `test_no_kernel_spills`."""


SPILLING = [f"backward float32 {cols}" for cols in ("128 layer", "512 layer", "2048 layer")]
"""Kernels that spill more than they should, 220 to 472 bytes."""


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
    for cols in (40000, 100000):
        yield f"forward {half} {cols}", table.forward_launch(forward_plan(half), 8192, cols, 8)
    four_axes = table.forward_launch(forward_plan(half, residual=half), 8192, 4096, 8, lead=4)
    yield "forward residual, rows along 4 axes", four_axes
    yield "forward statistics", table.forward_launch(forward_plan(half, statistics=True), 8192, 4096, 8)
    yield "forward float32 weight", table.forward_launch(forward_plan(half, parameter="float32"), 8192, 4096, 8)
    yield "forward float16", table.forward_launch(forward_plan("float16"), 8192, 4096, 8)
    yield "forward odd", table.forward_launch(forward_plan(half), 8192, 4097, 1)
    yield "total", table.total_launch(backward_plan(half), half, 264, 4096)


LAUNCHES = dict(launches())


def named(condition=lambda spec: True):
    """Launches by name; all tests of one run in the same process, which compiles it once."""
    names = [name for name, launch in LAUNCHES.items() if condition(launch.spec)]
    return pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.xdist_group(name)) for name in names])


@pytest.fixture(scope="module")
def texts():
    """PTX by kernel, without the code for rows of extreme size, which runs for no ordinary row."""
    kept = {}

    def text(name, capability=(9, 0)):
        if (name, capability) not in kept:
            spec = LAUNCHES[name].spec
            options = {} if spec.kind == "total" else {"careful": False}
            kernel = make_kernel(spec, **options)
            kept[name, capability] = link(*kernel, capability, spec.block, spec.resident, True)[0].decode(
                errors="replace"
            )
        return kept[name, capability]

    return text


def operations(text):
    return Counter(re.findall(r"^\s+(?:@!?%p\d+ )?([a-z][\w.]+)", text, re.MULTILINE))


@named()
def test_resources(name):
    """Registers within the launch bound, and shared memory that every GPU has."""
    launch = LAUNCHES[name]
    spec = launch.spec
    compiled = compile_spec(spec, (9, 0))
    assert 0 < compiled.registers <= 65536 // (spec.block * spec.resident)
    assert compiled.shared + launch.shared_bytes <= 99 * 1024


@named(lambda spec: spec.kind != "total")
def test_ordinary_rows_spill_little(name, request):
    """Without the code for rows of extreme size."""
    if name in SPILLING:
        request.applymarker(pytest.mark.xfail(reason="8 float32 elements a thread are too many", strict=True))
    spec = LAUNCHES[name].spec
    compiled = compile_kernel(*make_kernel(spec, careful=False), (9, 0), spec.block, spec.resident)
    assert compiled.spills <= SPILLS.get(spec.kind, 0), compiled.log


@pytest.mark.xfail(reason="rows of extreme size want a kernel of their own", strict=True)
@pytest.mark.parametrize("name", ["forward float32 weight", "backward float32 2048 layer"])
def test_no_kernel_spills(name):
    """Not even in the code for rows of extreme size."""
    assert compile_spec(LAUNCHES[name].spec, (9, 0)).spills == 0


@pytest.mark.parametrize("capability", CAPABILITIES, ids=str)
@pytest.mark.parametrize("name", ["forward bfloat16 4096 layer", "backward float32 2048 layer", "total"])
def test_generations(name, capability):
    compiled = compile_spec(LAUNCHES[name].spec, capability)
    assert compiled.cubin.startswith(b"\x7fELF")
    assert 0 < compiled.registers <= 64


@named()
def test_accesses(name, texts):
    """16 bytes at a time where the width allows, and no local memory in PTX."""
    spec = LAUNCHES[name].spec
    found = operations(texts(name))
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
        assert wide >= 2 * vectors, accesses
        others = {key: value for key, value in accesses.items() if ".v" not in key}
        # Statistics are read and written as single float64.
        assert sum(others.values()) <= 8, others
    else:
        assert wide == 0 or "partial" in name or spec.kind == "backward"


@named(lambda spec: not spec.plan.double)
def test_double_precision_is_for_scalars(name, texts):
    """float64 instructions do not grow with the elements of a thread, but for statistics, which are all float64."""
    found = operations(texts(name))
    doubles = {
        key: value
        for key, value in found.items()
        if ".f64" in key and key.split(".")[0] in ("add", "sub", "mul", "fma", "div", "rcp", "cvt", "rsqrt", "sqrt")
    }
    allowed = SCALAR_DOUBLES[LAUNCHES[name].spec.kind]
    if "statistics" in name:
        allowed += 5 * LAUNCHES[name].spec.vectors * 8
    assert sum(doubles.values()) <= allowed, doubles


def test_the_mean_is_subtracted_in_two_steps(texts):
    """No product is fused with a sum but where the kernel says so, and (x - high) - low stays two subtractions."""
    found = operations(texts("forward bfloat16 4096 layer"))
    elements = 16
    assert found["sub.rn.f32"] >= 4 * elements
    assert found["fma.rn.f32"] <= elements + elements // 2
    assert not any("ftz" in operation for operation in found)


def test_a_cubin_has_the_kernel_that_it_names():
    compiled = compile_spec(LAUNCHES["total"].spec, (9, 0))
    assert compiled.name.encode() in compiled.cubin


def test_example():
    """The fused kernel of the documentation holds its row in registers, and reads and writes 16 bytes at a time."""
    specification = importlib.util.spec_from_file_location("cuda_gated_norm", EXAMPLE)
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    for format in ("float16", "bfloat16"):
        function = module.make_gated_norm(format, 256, 2)
        compiled = compile_kernel(function, module.SIGNATURE, (9, 0), 256, 4)
        assert compiled.spills == compiled.stack == 0
        found = operations(link(function, module.SIGNATURE, (9, 0), 256, 4, True)[0].decode(errors="replace"))
        assert found["ld.global.v4.u32"] == 6
        assert found["st.global.v4.u32"] == 2
