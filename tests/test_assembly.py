"""The machine code: loops over elements are vector loops. LLVM gives up on one silently."""

import platform
import re

import llvmlite.binding
import numpy as np
import pytest
from table import DTYPES, random

from npnorm._plan import plan_backward, plan_forward
from npnorm.cpu.specialize import build

FEATURES = llvmlite.binding.get_host_cpu_features()
pytestmark = pytest.mark.skipif(
    platform.machine() not in ("x86_64", "AMD64")
    or not all(FEATURES.get(name) for name in ("avx2", "f16c", "fma")),
    reason="the mnemonics are those of x86-64 with AVX2, FMA and F16C",
)

# A packed operation on at least 256 bits, by what it computes in.
SINGLE = r"v(sub|mul|fn?m(add|sub)\d+)ps\b.*[yz]mm"
DOUBLE = r"v(sub|mul|fn?m(add|sub)\d+)pd\b.*[yz]mm"
SCALAR = r"v\w+s[sd]\b.*xmm"
SUM = r"v(add|fmadd\d+)pd\b.*[yz]mm"
STORE = r"v(movup[sd]|movap[sd]|movntp[sd]|movdqu\d*|movdqa\d*|vcvtps2ph|cvtps2ph|pmov\w+)\b.*[xyz]mm\d+, .*\("
# How elements of 16 bits become float32, and how they are stored.
WIDEN = {"float16": r"vcvtph2psx?\b.*[yz]mm", "bfloat16": r"vpslld\b.*[yz]mm"}
NARROW = {"float16": r"vcvtps2phx?\b.*[yz]mm", "bfloat16": r"vpaddd\b.*[yz]mm"}


def plan_of(kind, dtype, which):
    x = random((3, 8), dtype)
    weight = random(8, dtype) if which else None
    if kind == "backward":
        return plan_backward(
            True, x, x, weight, None, None, -1, 1e-5, 0.0, None, (True, True, True), None
        ).plan
    residual = x.copy() if kind == "add" else None
    return plan_forward(
        True, x, residual, weight, weight, -1, 1e-5, 0.0, False, None, None, False, kind == "add"
    ).plan


def assembly(plan):
    """Compiled here and now: functions that come from the cache have no assembly."""
    (text,) = build(plan, cached=False).inspect_asm().values()
    return text


def loops(text):
    """The instructions of every block that ends in a jump to its own beginning."""
    found, label, block = [], None, []
    for line in text.splitlines():
        start = re.match(r"([.\w$]+):", line)
        if start:
            label, block = start[1], []
        elif line.startswith("\t") and not line.startswith("\t."):
            block.append(line.strip())
            if re.match(rf"j\w+\s+{re.escape(label or '')}$", line.strip()):
                found.append(block)
                block = []
    return found


def has(block, pattern):
    return any(re.search(pattern, instruction) for instruction in block)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("which", [False, True], ids=["plain", "weight"])
@pytest.mark.parametrize("kind", ["forward", "add", "backward"])
def test_loops_are_packed(kind, dtype, which):
    text = assembly(plan_of(kind, dtype, which))
    found = loops(text)
    # Each loop is left as a vector loop, or two of them, and a scalar one for the tail.
    vectors = 0
    for block in found:
        if has(block, SCALAR) and not has(block, r"[yz]mm"):
            assert vectors, "a loop is scalar:\n" + "\n".join(block)
            vectors = 0
        else:
            vectors += 1
    arithmetic = DOUBLE if dtype == "float64" else SINGLE
    writing = [block for block in found if has(block, arithmetic) and has(block, STORE)]
    assert writing, "no vector loop writes results"
    # Only float64 writes what it computed in float64; a gradient's sums over rows are stored where they are added to.
    summing = [block for block in found if has(block, SUM) and not (dtype == "float64" and has(block, STORE))]
    assert summing, "no vector loop sums"
    if dtype in WIDEN:
        assert any(has(block, WIDEN[dtype]) for block in writing), "elements are read one by one"
        assert any(has(block, WIDEN[dtype]) for block in summing), "elements are read one by one"
        assert any(has(block, NARROW[dtype]) for block in writing), "elements are stored one by one"
    for block in (*writing, *summing):
        assert not has(block, r"^call"), "a vector loop calls a function"
        assert not has(block, r"vcvtph2pd\b.*zmm"), "float16 becomes float64 at once, which takes twice as long"
    if dtype == "bfloat16" and kind == "forward":
        for blocks in (writing, summing):
            assert any(not has(block, r"vpmovzxwd|vpmovdw") for block in blocks), "bfloat16 is spread out, not parted"


@pytest.mark.parametrize("kind", ["forward", "backward"])
def test_halves_need_no_library(kind):
    """No conversion is left to a run-time function, which Numba's linker may not find."""
    text = assembly(plan_of(kind, "float16", True))
    assert not re.search(r"__(gnu_(h2f|f2h)|extendhf|trunc[sd]fhf)", text)


def test_loops_are_found():
    """This file's own tool, on a scalar loop and a vector loop."""
    text = """
f:
\tvmovss\t(%rdi), %xmm0
.LBB0_1:
\tvmovups\t(%rdi,%rax), %ymm1
\tvmulps\t%ymm0, %ymm1, %ymm1
\tvmovups\t%ymm1, (%rsi,%rax)
\taddq\t$32, %rax
\tjne\t.LBB0_1
.LBB0_2:
\tvmulss\t(%rdi), %xmm0, %xmm1
\tjne\t.LBB0_2
\tretq
"""
    vector, scalar = loops(text)
    assert has(vector, SINGLE) and has(vector, STORE) and not has(vector, SUM)
    assert not has(scalar, SINGLE) and not has(scalar, STORE)
    assert np.dtype(np.float16) in DTYPES.values()
