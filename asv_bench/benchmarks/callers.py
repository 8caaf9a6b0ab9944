"""Calls that do not come from Python: out of users' code that Numba compiles, and out of Dask's workers."""

import numpy as np

import npnorm

from .common import Data

OPERATIONS = ["layer_norm", "layer_norm_backward"]
ROWS = 1000
"""Rows that compiled code norms one by one, and chunks that Dask's threads share."""


class Compiled:
    """A loop over rows of 768 numbers in the user's own function, beside which a call from Python would be long."""

    params = [OPERATIONS]
    param_names = ["operation"]

    def setup(self, operation):
        from numba import njit

        if not hasattr(npnorm, "register_numba"):
            raise NotImplementedError("this npnorm cannot be called by compiled code")
        npnorm.register_numba()
        layer_norm, layer_norm_backward = npnorm.layer_norm, npnorm.layer_norm_backward
        data = Data("float32", f"{ROWS}x768")
        x, weight, bias = data.matrix(), data.vector(), data.vector()

        @njit
        def forward(x, weight, bias, y):
            for i in range(len(x)):
                layer_norm(x[i : i + 1], weight, bias, out=y[i : i + 1])

        @njit
        def backward(x, weight, bias, y):
            for i in range(len(x)):
                y[i] = layer_norm_backward(x[i : i + 1], x[i : i + 1], weight).dx[0]

        self.loop = forward if operation == "layer_norm" else backward
        self.arguments = x, weight, bias, np.empty_like(x)
        self.loop(*self.arguments)

    def time_loop(self, operation):
        self.loop(*self.arguments)


class Dask:
    """Ten chunks of 1000 rows, with threads: the graph is made and run."""

    params = [OPERATIONS]
    param_names = ["operation"]

    def setup(self, operation):
        try:
            import dask.array as da
        except ImportError:
            raise NotImplementedError("Dask is not installed") from None
        data = Data("float32", f"{10 * ROWS}x768")
        self.x, self.weight = da.from_array(data.matrix(), chunks=(ROWS, -1)), data.vector()
        try:
            self.time_compute(operation)
        except TypeError:
            raise NotImplementedError("this npnorm takes no arrays of Dask") from None

    def time_compute(self, operation):
        import dask

        if operation == "layer_norm":
            npnorm.layer_norm(self.x, self.weight).compute(scheduler="threads")
        else:
            dask.compute(*npnorm.layer_norm_backward(self.x, self.x, self.weight), scheduler="threads")
