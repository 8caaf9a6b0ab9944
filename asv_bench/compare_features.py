"""What docs/comparison.md says of npnorm and its peers, as far as it can be run: errors, bits, memory, size on disk.

Run from the repository: ``python asv_bench/compare_features.py``. Libraries that are not installed are left out.
"""

import importlib.metadata
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import tables
from accuracy_table import COLS, arrays, by_hand, error, number
from benchmarks import peers

import npnorm

NEEDS = {
    "npnorm": "numpy numba llvmlite",
    "torch": "torch filelock typing_extensions sympy mpmath networkx jinja2 markupsafe fsspec",
    "onnxruntime": "onnxruntime numpy flatbuffers protobuf packaging",
    "jax": "jax jaxlib numpy scipy ml_dtypes opt_einsum",
    "numpy": "numpy",
}
LIBRARIES = ["npnorm", *peers.installed(*peers.NAMES), "numpy"]
normal, weight, bias = arrays()


def prepared(library, x, *parameters):
    """LayerNorm of a NumPy array by a library, as a call of no arguments."""
    if library == "npnorm":
        return partial(npnorm.layer_norm, x, *parameters)
    if library == "numpy":
        return partial(by_hand, x, *parameters)
    return peers.FORWARD[library]("LN", x, *parameters).get(peers.NAMES[library])


def layer_norm(library, x):
    return np.asarray(prepared(library, x, weight, bias)())


def errors(library):
    """In u, on rows at growing distances from zero."""
    for offset in 0, 10, 1e3, 1e6:
        x = (normal + offset).astype(np.float32)
        yield f"{offset:g}: {number(error('LN', layer_norm(library, x), x, weight, bias))}"


def dtypes(library):
    """Those that it takes and returns."""
    import ml_dtypes  # noqa: F401  (makes NumPy know bfloat16)

    for name in "float16", "bfloat16", "float32", "float64":
        call = prepared(library, *(np.ones(shape, name) for shape in ((4, COLS), COLS, COLS)))
        if call is not None and str(call().dtype).endswith(name):
            yield name


def same_bits(library):
    """Of rows alone, and seven at a time, beside sixty."""
    x = np.random.default_rng(2).standard_normal((60, COLS), dtype=np.float32)
    y = layer_norm(library, x)
    for count in 1, 7:
        parts = [layer_norm(library, x[i : i + count]) for i in range(0, len(x), count)]
        yield f"{count}: {np.array_equal(np.concatenate(parts), y)}"


def same_dweight(library):
    """On one thread and on two."""
    if library not in ("npnorm", "torch"):
        return
    x, dy = np.random.default_rng(3).standard_normal((2, 4096, COLS), dtype=np.float32)
    results = []
    for threads in 1, 2:
        npnorm.set_num_threads(threads)
        peers.set_threads(threads)
        if library == "torch":
            results.append(peers.as_numpy(peers.torch_backward("LN", dy, x, weight)["PyTorch"]())[1])
        else:
            results.append(npnorm.layer_norm_backward(dy, x, weight).dweight)
    peers.set_threads(1)
    yield str(np.array_equal(*results))


def memory(library):
    """What a call on rows that stand apart in memory adds to the process, in arrays of that size: 1 is the result."""
    code = f"import compare_features as c; print(c.growth({library!r}))"
    run = subprocess.run([sys.executable, "-c", code], cwd=tables.ROOT / "asv_bench", capture_output=True, text=True)
    yield run.stdout.strip() or run.stderr.strip().splitlines()[-1]


def growth(library):
    """The highest memory of this process during a call, less that before. Linux only."""
    x = np.ones((60_000, 2 * COLS), np.float32)[:, :COLS]
    layer_norm(library, x[:10])
    prepare = partial(prepared, library, x, weight, bias)
    call = (lambda: prepare()()) if library == "jax" else prepare()  # what JAX computes with are arrays of its own
    Path("/proc/self/clear_refs").write_text("5")  # the highest memory is that of now
    before = highest_memory()
    result = call()  # kept: it is a part of what a call costs
    assert result.shape == x.shape
    return f"{(highest_memory() - before) * 1024 / (x.size * x.itemsize):.1f}"


def highest_memory():
    return int(re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[1])


def on_disk(library):
    """Megabytes of the package and what it needs."""
    size = 0
    for name in NEEDS[library].split():
        files = importlib.metadata.files(name) or []
        size += sum(file.locate().stat().st_size for file in files if file.locate().is_file())
    yield f"{size / 1e6:.0f}"


def main():
    for question in errors, dtypes, same_bits, same_dweight, memory, on_disk:
        print(f"\n{question.__name__.replace('_', ' ')}: {question.__doc__}")
        for library in LIBRARIES:
            print(f"  {peers.NAMES.get(library, library):14}", ", ".join(question(library)))
    print(f"\n{tables.footer()}")


if __name__ == "__main__":
    main()
