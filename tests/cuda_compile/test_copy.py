"""The copy kernel for GPUs, from source to cubin; no GPU is needed."""

import pytest

pytest.importorskip("numba_cuda", reason="the extra cu12 or cu13 is not installed")

from npnorm.cuda import cache
from npnorm.cuda.compile import link
from npnorm.cuda.copies import Copy
from npnorm.cuda.copying import compile_copy

SPECS = [
    Copy("copy", format_, swapped, target, swapped, aligned)
    for format_, target in (("float16",) * 2, ("float32",) * 2, ("float64",) * 2, ("bfloat16", "float64"))
    for swapped in (False, True)
    for aligned in (False, True)
]


@pytest.mark.parametrize("capability", [(8, 0), (9, 0), (10, 0)], ids=str)
def test_copies(capability):
    for spec in SPECS[:: 1 if capability == (9, 0) else 5]:
        compiled = compile_copy(spec, capability)
        assert compiled.cubin[:4] == b"\x7fELF"
        assert compiled.spills == compiled.stack == 0
        assert compiled.registers <= 64


def test_a_device_newer_than_the_linker():
    with pytest.raises(RuntimeError, match=r"nvJitLink \d+\.\d+ makes no code for compute capability 99.0"):
        link(b"", (99, 0))


def test_cached(tmp_path, monkeypatch):
    monkeypatch.setenv("NPNORM_CACHE_DIR", str(tmp_path))
    first = cache.cubin(SPECS[0], (9, 0))
    assert "copy" in first.name and len(cache.files(tmp_path)) == 1
    monkeypatch.setattr(cache, "_compile", None)
    assert cache.cubin(SPECS[0], (9, 0)) == first
