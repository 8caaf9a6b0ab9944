"""The CPU backend: Numba kernels, and threads of our own to run them."""
