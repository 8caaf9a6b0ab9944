"""How helpers of kernels are compiled."""

# `fastmath` must be said: left out, it is inherited from whichever caller is compiled first. Nothing but
# kernels calls these functions, so they need no ways in from Python and C, which took a third of a compilation.
STRICT = {
    "nogil": True, "forceinline": True, "error_model": "numpy", "fastmath": False,
    "no_cpython_wrapper": True, "no_cfunc_wrapper": True,
}
