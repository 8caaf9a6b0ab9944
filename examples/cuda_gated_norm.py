"""RMSNorm and a SiLU gate in one kernel: y = x·rstd·weight · gate/(1 + exp(-gate)), as in gated attention and Mamba-2.

Two kernels would write the norm to memory and read it again: five passes over memory, this takes three. Run it on
a machine with an
NVIDIA GPU and numba-cuda (`pip install npnorm[cu13]`):

    python examples/cuda_gated_norm.py
"""

import math

import numpy as np
from numba import cuda

from npnorm.cuda.device import make_norm, make_vectors

try:
    from numba.cuda.types import float32, float64, int64, uint32
except ImportError:
    from numba.core.types import float32, float64, int64, uint32

SIGNATURE = (int64, int64, int64, int64, int64, int64, float64)


def make_gated_norm(format, threads, vectors):
    """A kernel for contiguous rows of up to threads·vectors chunks of 16 bytes; a block a row."""
    norm = make_norm(format, threads, vectors, centered=False)
    row_words, shared_size, chunk, other_words = norm.words, norm.shared, norm.vectors.chunk, norm.vectors.words
    read, statistics, normalized = norm.read, norm.statistics, norm.normalized
    number, store = norm.vectors.number, norm.vectors.store
    load = make_vectors(format).load
    size = 16 // chunk

    def gated_norm(x, gate, weight, y, rows, cols, eps):
        words = cuda.local.array(row_words, uint32)
        gates = cuda.local.array(other_words, uint32)
        weights = cuda.local.array(other_words, uint32)
        numbers = cuda.local.array(chunk, float32)
        shared = cuda.shared.array(shared_size, float64)
        thread = np.int64(cuda.threadIdx.x)
        row = np.int64(cuda.blockIdx.x)
        while row < rows:
            start = row * cols * size
            read(words, x + start, thread, cols)
            high, low, rstd = statistics(words, shared, thread, 0, cols, eps)
            m, rest, r = np.float32(high), np.float32(low), np.float32(rstd)
            for k in range(vectors):
                j = (k * threads + thread) * chunk
                if j < cols:
                    load(gates, 0, gate + start, j, cols)
                    load(weights, 0, weight, j, cols)
                    for i in range(chunk):
                        g = number(gates, 0, i)
                        silu = g / (np.float32(1.0) + math.exp(-g))
                        scaled = normalized(number(words, 4 * k, i), m, rest, r) * number(weights, 0, i)
                        numbers[i] = scaled * np.float32(silu)
                    store(y + start, j, cols, numbers)
            row += np.int64(cuda.gridDim.x)

    return gated_norm


def main():
    if not cuda.is_available():
        raise SystemExit("This example needs an NVIDIA GPU and its driver, and finds none.")
    rows, cols = 4096, 4096
    generator = np.random.default_rng(0)
    x, gate = (generator.standard_normal((rows, cols)).astype(np.float16) for _ in range(2))
    weight = generator.standard_normal(cols).astype(np.float16)
    arrays = [cuda.to_device(array) for array in (x, gate, weight, np.empty_like(x))]
    kernel = cuda.jit(make_gated_norm("float16", 256, 2))
    addresses = [array.__cuda_array_interface__["data"][0] for array in arrays]
    kernel[rows, 256](*addresses, rows, cols, 1e-6)
    y = arrays[3].copy_to_host()
    x, gate, weight = (array.astype(np.float64) for array in (x, gate, weight))
    exact = x / np.sqrt((x * x).mean(axis=1, keepdims=True) + 1e-6) * weight * gate / (1 + np.exp(-gate))
    print(f"largest error: {np.abs(y - exact).max():.1e}, of numbers up to {np.abs(exact).max():.1f}")


if __name__ == "__main__":
    main()
