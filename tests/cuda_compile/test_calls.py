"""The kernels that calls ask for, compiled; and their parameters, which are those that calls hand over."""

import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("numba_cuda", reason="the extra cu12 or cu13 is not installed")
sys.path.insert(0, str(Path(__file__).parents[1]))

import device
from device import Interface
from numba.cuda import types
from table import random

import npnorm
from npnorm.cuda import cache
from npnorm.cuda.kernels import make_kernel


@pytest.fixture
def gpu(monkeypatch, tmp_path):
    monkeypatch.setenv("NPNORM_CACHE_DIR", str(tmp_path))
    return device.install(monkeypatch)


@pytest.mark.parametrize("dtype, cols", [("float32", 768), ("bfloat16", 769), ("float16", 40_000), ("float64", 96)])
def test_calls(gpu, dtype, cols):
    x, residual, dy, weight, bias = (
        Interface(gpu.memory.hold(random(shape, dtype, seed)))
        for seed, shape in enumerate(3 * ((5, cols),) + 2 * ((cols,),))
    )
    npnorm.add_layer_norm(x, residual, weight, bias, return_stats=True)
    npnorm.rms_norm(x, weight, weight_offset=1.0, round_before_weight=True)
    npnorm.layer_norm_backward(dy, x, weight, dresidual=residual)
    npnorm.rms_norm_backward(dy, x, weight, rstd=Interface(gpu.memory.hold(np.ones((5, 1)))))
    kinds = {launch.spec.kind: (launch.spec, arguments) for launch, arguments, _ in gpu.launches()}
    assert kinds.keys() >= {"forward", "backward", "total"}
    for launch, arguments, _ in gpu.launches():
        _, signature = make_kernel(launch.spec)
        given = [types.float64 if type(argument) is float else types.int64 for argument in arguments]
        wanted = [tuple(kind) if isinstance(kind, types.UniTuple) else (kind,) for kind in signature]
        assert given == [item for kinds in wanted for item in kinds]
    # Compilation takes seconds; the launch table's kernels are compiled in test_compile.py.
    for spec, _ in kinds.values() if dtype == "float32" else ():
        cubin = cache.cubin(spec, (9, 0))
        assert cubin.code[:4] == b"\x7fELF" and cubin.name
