"""The building blocks for kernels of one's own, and the example that uses them."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest
import support  # noqa: F401  it installs the simulated GPU
from machine import FakeCUDA, run
from table import random

from npnorm.cuda import device, simulated
from npnorm.cuda.table import Launch

EXAMPLE = Path(__file__).parents[2] / "examples" / "cuda_gated_norm.py"


def example():
    specification = importlib.util.spec_from_file_location("cuda_gated_norm", EXAMPLE)
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    module.cuda = FakeCUDA()
    return module


@pytest.mark.parametrize(("format", "threads"), [("float16", 8), ("float32", 64)])
def test_example(format, threads):
    chunk = 16 // np.dtype(format).itemsize
    rows, cols = 3, 2 * threads * chunk - chunk
    x, gate = random((rows, cols), format), random((rows, cols), format, 1)
    weight, y = random(cols, format, 2), np.full_like(x, np.nan)
    simulated.MEMORY.clear()
    addresses = [simulated.held(array) for array in (x, gate, weight, y)]
    kernel = example().make_gated_norm(format, threads, 2)
    run(kernel, Launch(None, (2, 1, 1), (threads, 1, 1), 0), (*addresses, rows, cols, 1e-6))
    x, gate, weight = (array.astype(np.float64) for array in (x, gate, weight))
    exact = x / np.sqrt((x * x).mean(axis=1, keepdims=True) + 1e-6) * weight * gate / (1 + np.exp(-gate))
    np.testing.assert_allclose(y, exact, rtol=2 * np.finfo(format).eps, atol=1e-6)


def test_example_without_a_device():
    module = example()
    module.cuda.is_available = lambda: False
    with pytest.raises(SystemExit, match="needs an NVIDIA GPU and its driver"):
        module.main()


@pytest.mark.parametrize("threads", [8, 64])
def test_sums(threads):
    add, size = device.make_sum(threads, 1, 2)
    found = []
    fake = FakeCUDA()

    def kernel():
        shared = fake.shared.array(size, "float64")
        thread = fake.threadIdx.x
        found.append(add(float(thread), 1.0, shared, thread, 0))

    run(kernel, Launch(None, (1, 1, 1), (threads, 1, 1), 0), ())
    assert found == [(threads * (threads - 1) / 2, float(threads))] * threads


def test_fused_products_overflow():
    for sign in (1.0, -1.0):
        assert simulated.fma(np.float64(sign * 1e300), np.float64(1e300), np.float64(1.0)) == sign * np.inf


@pytest.mark.parametrize("threads", [0, 3, 48, 33, 2048])
def test_wrong_threads(threads):
    with pytest.raises(ValueError, match="`threads` must be a power of two"):
        device.make_norm("float32", threads, 1)


@pytest.mark.parametrize(
    "name, make, options",
    [
        ("format", device.make_norm, {"format": "float8", "threads": 32, "vectors": 1}),
        ("format", device.make_vectors, {"format": "int8"}),
        ("chunk", device.make_vectors, {"format": "float32", "chunk": 3}),
        ("chunk", device.make_vectors, {"format": "float16", "chunk": 1}),
        ("rows", device.make_sum, {"threads": 64, "rows": 17}),
        ("rows", device.make_norm, {"format": "float16", "threads": 64, "vectors": 1, "rows": 0}),
        ("values", device.make_sum, {"threads": 64, "values": 3}),
    ],
)
def test_wrong_options(name, make, options):
    with pytest.raises(ValueError, match=f"`{name}` must be"):
        make(**options)
