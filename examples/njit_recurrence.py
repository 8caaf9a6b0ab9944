"""A gated recurrence with a norm in every step, compiled whole with Numba: npnorm inside a loop over time.

State-space and other recurrent layers keep a state that fades and takes in one token after another; what
leaves the layer is the state's norm. Each step needs the one before, so NumPy needs a Python loop over time,
with small calls. In compiled code the sequences run side by side, each at its own pace.

Run: python examples/njit_recurrence.py
"""

from time import perf_counter

import numpy as np
from numba import njit, prange

import npnorm


@njit(parallel=True)
def scan(x, decay, weight):
    """y[b, t] = rms_norm(h[t])·weight with h[t] = decay·h[t - 1] + x[b, t]; x is (batch, steps, width)."""
    y = np.empty_like(x)
    for b in prange(len(x)):
        h = np.zeros_like(x[b, 0])
        for t in range(x.shape[1]):
            for j in range(h.size):
                h[j] *= decay[j]
            npnorm.add_rms_norm(x[b, t], h, weight, out=y[b, t], residual_out=h)
    return y


def scan_in_python(x, decay, weight):
    """The same with a Python loop, all sequences at once."""
    y = np.empty_like(x)
    h = np.zeros_like(x[:, 0])
    for t in range(x.shape[1]):
        h *= decay
        npnorm.add_rms_norm(x[:, t], h, weight, out=y[:, t], residual_out=h)
    return y


def example_arrays(batch=8, steps=1000, width=256):
    """Random numbers for `scan`."""
    generator = np.random.default_rng(0)
    x = generator.standard_normal((batch, steps, width), dtype=np.float32)
    decay = generator.uniform(0.9, 1.0, width).astype(np.float32)
    return x, decay, np.ones(width, np.float32)


def main():
    npnorm.register_numba()  # an installed npnorm needs no such line
    arrays = example_arrays()
    print(f"{len(arrays[0])} sequences of {arrays[0].shape[1]} steps, {arrays[0].shape[2]} numbers each")
    results = []
    for name, function in (("compiled", scan), ("Python loop", scan_in_python)):
        start = perf_counter()
        function(*arrays)
        first = perf_counter() - start
        times = []
        for _ in range(5):
            start = perf_counter()
            results.append(function(*arrays))
            times.append(perf_counter() - start)
        print(f"{name:12} {1e3 * min(times):7.1f} ms; the first call, with compilation, {first:.1f} s")
    print("same bits:", all(np.array_equal(result, results[0]) for result in results))


if __name__ == "__main__":
    main()
