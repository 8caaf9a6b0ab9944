"""Kernels by plan: each is compiled, or loaded, when it is first called for."""

import numpy as np
import numpy.ma  # noqa: F401  Numba imports it at its first call: a fork then would hang the child
from numba import njit, types

from .._threads import importing_or_compiling
from .kernels import make_backward, make_forward, make_total

KernelCache: type | None
try:
    from .cache import KernelCache
except ImportError:  # it stands on private parts of Numba
    KernelCache = None

ELEMENTS = {
    "float16": types.int16,
    "bfloat16": types.uint16,
    "float32": types.float32,
    "float64": types.float64,
}
STATISTICS = types.Array(types.float64, 1, "C")


def kernel(plan, extreme=False, phase=""):
    """The compiled kernel of a plan.

    `extreme` is the one for rows of extreme size. The phase of a backward kernel is "gather", "apply",
    or both at once; that of a forward kernel may be "stream", for outputs larger than the cache.
    """
    return _kernels.get((plan, extreme, phase)) or _compiled((plan, extreme, phase))


def total_kernel(plan, dtype):
    """The compiled kernel that adds sums of blocks up, for gradients of a dtype as kernels see it."""
    key = ("total", plan.double, dtype)
    return _kernels.get(key) or _compiled(key)


def _compiled(key):
    with importing_or_compiling:
        if key not in _kernels:
            _kernels[key] = build(*key)
        return _kernels[key]


def build(plan, extreme=False, phase="", cached=True):
    """A new dispatcher: what `kernel` and `total_kernel` keep."""
    if plan == "total":
        function, signature = _total(extreme, phase)
    elif plan.backward:
        function, signature = _backward(plan, extreme, phase)
    else:
        function, signature = _forward(plan, extreme, phase)
    dispatcher = njit(nogil=True, error_model="numpy")(function)
    if cached and KernelCache is not None:
        key = repr((plan, extreme, phase))
        dispatcher._cache = KernelCache(key)  # type: ignore[attr-defined]
    dispatcher.compile(signature)
    dispatcher.disable_compile()
    return dispatcher


def _total(double, dtype):
    gradient = types.Array(getattr(types, dtype.name), 1, "C")
    return make_total(double or None), types.void(types.Array(types.float64, 2, "C"), gradient)


def _forward(plan, extreme, phase):
    add_in_double = "float64" in (plan.x, plan.other)
    function = make_forward(
        plan.centered or None,
        plan.double or None,
        plan.x == "float64" or None,
        plan.option or None,
        extreme or None,
        np.float64(0) if add_in_double else np.float32(0),
        phase == "stream" or None,
    )
    signature = types.intp(
        _rows(plan.x),
        _rows(plan.other),
        _vector(plan.weight),
        _vector(plan.bias),
        _rows(plan.other and plan.x, output=True),
        _rows(plan.out, output=True),
        STATISTICS,
        STATISTICS,
        types.boolean,
        types.float64,
        types.intp,
        types.intp,
    )
    return function, signature


def _backward(plan, extreme, phase):
    # Statistics saved by a float32 computation are not exact enough for a float64 one.
    recompute = plan.option or (plan.double and plan.x != "float64")
    function = make_backward(
        plan.centered or None,
        plan.double or None,
        recompute or None,
        extreme or None,
        phase != "apply" or None,
        phase != "gather" or None,
    )
    signature = types.intp(
        _rows(plan.other),
        _rows(plan.x),
        _vector(plan.weight),
        _rows(plan.dresidual),
        STATISTICS,
        STATISTICS,
        types.Array(types.float64, 2, "C"),
        _rows(plan.out, output=True),
        STATISTICS if plan.dweight else types.none,
        STATISTICS if plan.dbias else types.none,
        types.float64,
        types.intp,
        types.intp,
    )
    return function, signature


def _rows(element_format, output=False):
    """Any 3-d array: contiguous and writable ones convert to it in the call, so one kernel serves."""
    if element_format is None:
        return types.none
    return types.Array(ELEMENTS[element_format], 3, "A", readonly=not output)


def _vector(element_format):
    if element_format is None:
        return types.none
    return types.Array(ELEMENTS[element_format], 1, "C", readonly=True)


_kernels: dict = {}
