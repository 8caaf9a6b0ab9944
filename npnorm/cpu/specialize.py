"""Kernels by plan: each is compiled, or loaded, when it is first called for."""

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.ma  # noqa: F401  Numba imports it at its first call: a fork then would hang the child
from numba import njit, types

from .._locks import importing_or_compiling
from .._numba import OPTIONS
from .._plan import Plan
from .arrays import Argument
from .kernels import make_backward, make_forward, make_total, make_wide
from .waiting import wait
from .wide import make_apply, make_gather, means

Key = tuple[Plan, bool, str] | tuple[str, bool, str]
"""What names a kernel: a plan, whether it is for extreme rows, and a phase; "total", `double` and a format; `WAIT`,
`MEANS`."""

WAIT: Key = ("wait", False, "")
MEANS: Key = ("means", False, "")

Signature = Any  # Numba's, which mypy does not know

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


def kernel(plan: Plan, extreme: bool = False, phase: str = "") -> Callable[..., Any]:
    """The compiled kernel of a plan, a function of whatever is of the types it was compiled for: it checks nothing.

    `extreme` is the one for rows of extreme size. The phase "stream" is for arrays larger than the cache, "short",
    of a forward kernel without options, for many short rows; "gather" and "apply" are the halves for very wide rows.
    Of the last, dweight and dbias are the gradients, not sums.
    """
    key: Key = (plan, extreme, phase)
    return _kernels.get(key) or _compiled(key)


def is_simple(plan: Plan) -> bool:
    """Whether a forward plan has special kernels for short and wide rows: not with options that few have."""
    return not (plan.double or plan.other or plan.rstd)


def gather_plan(plan: Plan) -> Plan:
    """What the phase "gather" needs of a backward plan."""
    return plan._replace(out=None, dweight=None, dbias=None, dresidual=None)


def apply_plan(plan: Plan, dweight: str | None, dbias: str | None) -> Plan:
    """What the phase "apply" needs of a backward plan, with the formats of dweight and dbias."""
    return plan._replace(mean=None, rstd=None, dweight=dweight, dbias=dbias)


def total_kernel(double: bool, gradient_format: str) -> Callable[..., Any]:
    """The compiled kernel that adds sums of blocks up, for gradients of a format."""
    key: Key = ("total", double, gradient_format)
    return _kernels.get(key) or _compiled(key)


def waiting_kernel() -> Callable[..., Any]:
    """The compiled `waiting.wait`."""
    return _kernels.get(WAIT) or _compiled(WAIT)


def means_kernel() -> Callable[..., Any]:
    """The compiled `wide.means`."""
    return _kernels.get(MEANS) or _compiled(MEANS)


def _compiled(key: Key) -> Callable[..., Any]:
    with importing_or_compiling():
        if key not in _kernels:
            (compiled,) = build(*key).overloads.values()
            # Numba's own way to it looks at the type of every argument first, in 0.7 µs.
            _kernels[key] = compiled.entry_point
        return _kernels[key]


def build(plan: Plan | str, extreme: bool = False, phase: str = "", cached: bool = True) -> Any:
    """A new dispatcher, for the key of a kernel."""
    function, signature = source(plan, extreme, phase)
    dispatcher = njit(nogil=True, error_model="numpy")(function)
    if cached and KernelCache is not None:
        key = repr((plan, extreme, phase))
        dispatcher._cache = KernelCache(key)  # type: ignore[attr-defined]
    dispatcher.compile(signature)
    dispatcher.disable_compile()
    return dispatcher


def inner_kernel(plan: Plan | str, extreme: bool = False, phase: str = "") -> Any:
    """The dispatcher of a kernel for arrays of Numba, compiled where users' compiled code first calls it."""
    key: Any = (plan, extreme, phase)
    if key not in _inner_kernels:
        function, _ = source(*key)
        dispatcher: Any = njit(**OPTIONS)(function)
        if KernelCache is not None:
            dispatcher._cache = KernelCache(repr(("inside", key, OPTIONS)))
        _inner_kernels[key] = dispatcher
    return _inner_kernels[key]


def source(plan: Plan | str, extreme: bool, phase: str) -> tuple[Callable[..., Any], Signature]:
    """The Python function of a kernel, and the types it is compiled for."""
    if plan == "wait":
        return wait, types.void(*(Argument(types.int64),) * 2, types.int64, types.intp, types.intp)
    if plan == "means":
        return means, types.void(*(_array("float64"),) * 2, *RANGE)
    if isinstance(plan, str):
        return _total(extreme, phase)
    if phase in ("gather", "apply"):
        if not plan.backward:
            return _wide(plan, phase)
        return _gather(plan, extreme) if phase == "gather" else _apply(plan, extreme)
    return _backward(plan, extreme, phase) if plan.backward else _forward(plan, extreme, phase)


def _total(double: bool, gradient_format: str) -> tuple[Callable[..., Any], Signature]:
    function = make_total(double or None)
    return function, types.void(_array("float64"), _array(gradient_format), *(types.intp,) * 3)


def _forward(plan: Plan, extreme: bool, phase: str) -> tuple[Callable[..., Any], Signature]:
    add_in_double = plan.other not in (None, plan.x) or plan.x == "float64"
    function = make_forward(
        plan.centered or None,
        plan.double or None,
        plan.x == "float64" or None,
        plan.rounding or None,
        extreme or None,
        np.float64(0) if add_in_double else np.float32(0),
        phase == "stream" or None,
        phase == "short" or None,
    )
    signature = types.intp(
        _array(plan.x),
        _array(plan.other),
        _array(plan.weight),
        _array(plan.bias),
        _array(plan.other and plan.x),
        _array(plan.out),
        _array(plan.mean),
        _array(plan.rstd),
        types.float64,
        *RANGE,
    )
    return function, signature


def _wide(plan: Plan, phase: str) -> tuple[Callable[..., Any], Signature]:
    gather = phase == "gather" or None
    function = make_wide(plan.centered or None, plan.rounding or None, gather)
    signature = types.boolean(
        _array(plan.x),
        _array(plan.weight),
        _array(plan.bias),
        _array(plan.out),
        _array("float64"),
        types.float64,
        *RANGE,
        types.intp,
    )
    return function, signature


def _backward(plan: Plan, extreme: bool, phase: str) -> tuple[Callable[..., Any], Signature]:
    function = make_backward(
        plan.centered or None,
        plan.double or None,
        extreme or None,
        phase == "stream" or None,
    )
    signature = types.intp(
        _array(plan.other),
        _array(plan.x),
        _array(plan.weight),
        _array(plan.dresidual),
        _array(plan.mean),
        _array(plan.rstd),
        _array(plan.out),
        _array(plan.dweight),
        _array(plan.dbias),
        types.float64,
        *RANGE,
    )
    return function, signature


def _gather(plan: Plan, extreme: bool) -> tuple[Callable[..., Any], Signature]:
    function = make_gather(plan.centered or None, plan.double or None, extreme or None)
    inputs = (plan.other, plan.x, plan.weight, plan.mean, plan.rstd, "float64", "float64")
    return function, types.intp(*map(_array, inputs), types.float64, *RANGE, types.intp)


def _apply(plan: Plan, extreme: bool) -> tuple[Callable[..., Any], Signature]:
    function = make_apply(plan.centered or None, plan.double or None, extreme or None)
    inputs = (plan.other, plan.x, plan.weight, plan.dresidual, "float64")
    sums = (plan.dweight and "float64", plan.dbias and "float64")
    arrays = (*inputs, *sums, plan.out, plan.dweight, plan.dbias)
    return function, types.intp(*map(_array, arrays), *(types.intp,) * 5)


def _array(element_format: str | None) -> Any:
    return types.none if element_format is None else Argument(ELEMENTS[element_format])


RANGE = (types.intp, types.intp, types.intp)
"""The number of columns, and the rows from start to stop."""

_kernels: dict[Key, Callable[..., Any]] = {}
_inner_kernels: dict[Key, Any] = {}
