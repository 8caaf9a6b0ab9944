"""A slip in `workers` makes the tests twice as long, and nothing else shows it."""

import pytest
from workers import kernels_of


@pytest.mark.parametrize("norm", ["layer_norm", "rms_norm"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
@pytest.mark.parametrize("more", ["large numbers - and small", "float32 rows"])
def test_a_norm_and_a_dtype_share_a_worker(request, norm, dtype, more):
    assert kernels_of(request.node.nodeid) == f"{norm} {dtype}"


@pytest.mark.parametrize("name, capability", [("forward, 4 axes", (8, 0)), ("forward, 4 axes", (9, 0))], ids=str)
def test_a_launch_has_a_worker(request, name, capability):
    nodeid = request.node.nodeid
    assert kernels_of(nodeid) == nodeid, "it names no norm"
    assert kernels_of(nodeid.replace("tests/", "tests/cuda_compile/")) == name
