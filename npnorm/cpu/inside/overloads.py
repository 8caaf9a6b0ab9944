"""From the types of a call in users' compiled code to its implementation, or to a TypingError."""

from functools import cache

import numpy as np
from numba import njit, types
from numba.core.errors import TypingError

from ..._checks import compute_format, trailing_axes
from ..._numba import OPTIONS
from ..._plan import Plan
from ..._results import (
    AddLayerNormStatsResult,
    AddNormResult,
    AddRMSNormStatsResult,
    LayerNormResult,
    NormGradients,
    RMSNormResult,
)
from ..specialize import ELEMENTS
from .arrays import itself, nothing, output_check, output_maker, output_room, row_reader, shape_check, vector_reader
from .calls import make_backward, make_forward

SCALARS = {"float32": np.float32, "float64": np.float64}
COLUMNS = "the shape of the normalized axes of `x`"
KEPT = "the shape of the statistics that `return_stats=True` gives"
EPS = {True: 1e-5, False: 1e-6}


def implementation(name, given):
    """What Numba compiles in the place of npnorm's function `name`: `given` has the types of its arguments.

    An argument that is left out has its default value instead of a type.
    """
    given = {key: _known(value) for key, value in given.items()}
    centered = "layer" in name
    if name.endswith("_backward"):
        return _backward(centered, **given)
    return _add(centered, **given) if name.startswith("add") else _norm(centered, **given)


def _known(value):
    """A type, or a value where that is known: the default, None."""
    if isinstance(value, types.Omitted):
        value = value.value
    return None if isinstance(value, types.NoneType) else value


# Implementations: the signatures are the public ones, but Numba knows no keyword-only parameters.


def _norm(centered, **given):
    call = _forward(centered, residual=None, residual_out=None, **given)

    def norm(
        x, weight=None, bias=None, axis=-1, eps=EPS[centered], weight_offset=0.0,
        round_before_weight=False, out=None, return_stats=False,
    ):  # fmt: skip
        return call(x, None, weight, bias, eps, weight_offset, out, None)

    return norm


def _add(centered, **given):
    call = _forward(centered, fused=True, **given)

    def add(
        x, residual, weight=None, bias=None, axis=-1, eps=EPS[centered], weight_offset=0.0,
        round_before_weight=False, out=None, residual_out=None, return_stats=False,
    ):  # fmt: skip
        return call(x, residual, weight, bias, eps, weight_offset, out, residual_out)

    return add


def _backward(centered, **given):
    call = _gradients(centered, **given)
    three = none_given if given["out"] is None else three_given

    def layer_norm_backward(
        dy, x, weight=None, mean=None, rstd=None, axis=-1, eps=EPS[True], weight_offset=0.0,
        dresidual=None, output_mask=None, out=None,
    ):  # fmt: skip
        dx, dweight, dbias = three(out)
        return call(dy, x, weight, mean, rstd, eps, weight_offset, dresidual, dx, dweight, dbias)

    def rms_norm_backward(
        dy, x, weight=None, rstd=None, axis=-1, eps=EPS[False], weight_offset=0.0, dresidual=None,
        output_mask=None, out=None,
    ):  # fmt: skip
        dx, dweight, dbias = three(out)
        return call(dy, x, weight, None, rstd, eps, weight_offset, dresidual, dx, dweight, dbias)

    return layer_norm_backward if centered else rms_norm_backward


@njit(**OPTIONS)
def three_given(out):
    return out[0], out[1], out[2]


@njit(**OPTIONS)
def none_given(out):
    return None, None, None


# Calls by their types, as the plan makes them by their values


def _forward(
    centered, *, x, residual, weight, bias, axis, eps, weight_offset, round_before_weight, out,
    residual_out, return_stats, fused=False,
):  # fmt: skip
    x_format = _format("x", x)
    lead = _lead(axis, x)
    residual_format = _format("residual", residual, x.ndim) if fused else None
    weight_format = _format("weight", weight, x.ndim - lead, optional=True)
    bias_format = _format("bias", bias, x.ndim - lead, optional=True)
    out_format = _output_format("out", out, x.ndim)
    if _output_format("residual_out", residual_out, x.ndim) not in (None, x_format):
        raise TypingError(
            f"`residual_out` must have the dtype of `x`, {x_format}; got {residual_out}: pass np.empty_like(x)"
        )
    double = "float64" in (x_format, out_format)
    offset = _offset(weight_offset, weight)
    _check_number("eps", eps, may_be_none=not centered)
    stats = _flag("return_stats", return_stats)
    if offset is not None:
        weight_format = compute_format(double)
    plan = Plan(
        False,
        centered,
        double,
        _flag("round_before_weight", round_before_weight),
        x_format,
        residual_format,
        weight_format,
        bias_format,
        out_format or x_format,
        "float64" if stats and centered else None,
        "float64" if stats else None,
    )
    inputs = (
        _input("x", x, lead),
        _input("residual", residual, lead),
        _vector("weight", weight, COLUMNS, weight_format, offset),
        _vector("bias", bias, COLUMNS, bias_format),
    )
    outputs = (
        _output("out", out, x_format, lead),
        _output("residual_out", residual_out, x_format if fused else None, lead),
    )
    return make_forward(plan, lead, inputs, outputs, _giver(centered, fused, stats), _machine_eps(x_format))


def _gradients(
    centered, *, dy, x, weight, rstd, axis, eps, weight_offset, dresidual, output_mask, out, mean=None
):
    x_format = _format("x", x)
    lead = _lead(axis, x)
    dy_format = _format("dy", dy, x.ndim)
    weight_format = _format("weight", weight, x.ndim - lead, optional=True)
    dresidual_format = _format("dresidual", dresidual, x.ndim, optional=True)
    for name, value in (("mean", mean), ("rstd", rstd)):
        _format(name, value, x.ndim, optional=True)
    mask = _mask(output_mask, weight)
    outs = _three(out, mask)
    formats = [
        _output_format(f"out[{i}]", array, ndim)
        for i, (array, ndim) in enumerate(zip(outs, (x.ndim, x.ndim - lead, x.ndim - lead), strict=True))
    ]
    double = "float64" in (x_format, dy_format, weight_format, dresidual_format, *formats)
    offset = _offset(weight_offset, weight)
    _check_number("eps", eps, may_be_none=not centered)
    scale_format = weight_format if offset is None else compute_format(double)
    plan = Plan(
        True,
        centered,
        double,
        False,
        x_format,
        dy_format,
        scale_format,
        None,
        (formats[0] or x_format) if mask[0] else None,
        None if mean is None else "float64",
        None if rstd is None else "float64",
        "float64" if mask[1] else None,
        "float64" if mask[2] else None,
        dresidual_format if mask[0] else None,
    )
    inputs = (
        _input("dy", dy, lead),
        _input("x", x, lead),
        _vector("weight", weight, COLUMNS, scale_format, offset),
        _vector("mean", mean, KEPT, "float64"),
        _vector("rstd", rstd, KEPT, "float64"),
        _input("dresidual", dresidual, lead, mask[0]),
    )
    gradient_format = weight_format or x_format
    outputs = tuple(
        _output(f"out[{i}]", array, wanted and own, own_lead)
        for i, (array, wanted, own, own_lead) in enumerate(
            zip(outs, mask, (x_format, gradient_format, gradient_format), (lead, 0, 0), strict=True)
        )
    )
    return make_backward(plan, lead, inputs, outputs, _give_gradients, _machine_eps(x_format))


def _input(name, array, lead, wanted=True):
    """The check and the reader of an input of x's shape; of None, None."""
    if array is None:
        return nothing, nothing
    reader = row_reader(array.aligned or None, lead) if wanted else nothing
    return shape_check(name, "the shape of `x`"), reader


def _vector(name, array, rule, element_format, offset=None):
    """The same of a smaller input."""
    if array is None:
        return nothing, nothing
    plain = array.layout == "C" and array.aligned and array.dtype == ELEMENTS[element_format]
    plain = plain and offset is None
    return shape_check(name, rule), vector_reader(plain or None, SCALARS[element_format], offset)


def _output(name, array, default, lead):
    """What checks an output, makes it, finds room to write it and settles that. By default it is new."""
    if array is not None:
        plain = array.layout == "C" and array.aligned
        return output_check(name), itself, *output_room(plain or None, array.aligned or None, lead)
    if default:
        return nothing, output_maker(SCALARS[default]), itself, nothing
    return nothing, nothing, nothing, nothing


def _machine_eps(x_format):
    return float(np.finfo(SCALARS[x_format]).eps)


@cache
def _giver(centered, fused, stats):
    """What makes the result of a forward function."""
    if fused and stats:
        give = _give_sum_and_all if centered else _give_sum_and_rstd
    elif fused:
        give = _give_sum
    elif stats:
        give = _give_all if centered else _give_rstd
    else:
        give = _give_y
    return njit(**OPTIONS)(give)


def _give_y(y, total, mean, rstd):
    return y


def _give_all(y, total, mean, rstd):
    return LayerNormResult(y, mean, rstd)


def _give_rstd(y, total, mean, rstd):
    return RMSNormResult(y, rstd)


def _give_sum(y, total, mean, rstd):
    return AddNormResult(y, total)


def _give_sum_and_all(y, total, mean, rstd):
    return AddLayerNormStatsResult(y, total, mean, rstd)


def _give_sum_and_rstd(y, total, mean, rstd):
    return AddRMSNormStatsResult(y, total, rstd)


@njit(**OPTIONS)
def _give_gradients(dx, dweight, dbias):
    return NormGradients(dx, dweight, dbias)


# Types of single arguments


def _format(name, kind, ndim=None, optional=False):
    """The format of an array by its type."""
    if kind is None and optional:
        return None
    if isinstance(kind, types.Optional):
        raise TypingError(
            f"`{name}` must be known to be an array or None when the code is compiled; got {kind}: call npnorm "
            f"in both branches of `if {name} is None`"
        )
    formats = [f for f in SCALARS if isinstance(kind, types.Array) and kind.dtype == ELEMENTS[f]]
    if not formats:
        remedy = "pass a NumPy array"
        if isinstance(kind, types.Array):
            real = not isinstance(kind.dtype, types.Complex)
            remedy = f"write {name}.astype(np.float32)" if real else "norm its real and imaginary parts"
        if name.startswith(("out", "residual_out")):
            remedy = "pass an array of one of them to write to"
        raise TypingError(f"`{name}` must be an array of float32 or float64 in compiled code; got {kind}: {remedy}")
    if not kind.ndim:
        raise TypingError(f"`{name}` must have at least one axis; got {kind}")
    if ndim is not None and kind.ndim != ndim:
        axes = "1 axis" if ndim == 1 else f"{ndim} axes"
        raise TypingError(f"`{name}` must have {axes} for this `x` and `axis`; got {kind}")
    return formats[0]


def _output_format(name, kind, ndim):
    found = _format(name, kind, ndim, optional=True)
    if found is not None and not kind.mutable:
        raise TypingError(f"`{name}` must be writable; got {kind}, a read-only array: pass a copy of it")
    return found


def _lead(axis, x):
    """How many lead axes an x has, by an `axis` that is known when the code is compiled."""
    if isinstance(axis, types.Type):
        members = axis.types if isinstance(axis, types.BaseTuple) else [axis]
        if not all(isinstance(member, types.IntegerLiteral) for member in members):
            raise TypingError(
                f"`axis` must be an int or a tuple of ints written in the call, in compiled code; got {axis}: "
                "write axis=-1, or a tuple such as (-2, -1)"
            )
        numbers = tuple(member.literal_value for member in members)
        axis = numbers if isinstance(axis, types.BaseTuple) else numbers[0]
    try:
        return x.ndim - trailing_axes(axis, x.ndim)
    except (TypeError, ValueError) as error:
        raise TypingError(str(error)) from None


def _flag(name, value):
    if isinstance(value, types.BooleanLiteral):
        return value.literal_value
    if isinstance(value, types.Type):
        raise TypingError(
            f"`{name}` must be True or False, written in the call, in compiled code; got {value}: it decides "
            "what is returned, so call npnorm in both branches of an `if`"
        )
    return bool(value)


def _check_number(name, value, may_be_none=False):
    if value is None and may_be_none:
        return
    kind = types.unliteral(value) if isinstance(value, types.Type) else value
    if isinstance(kind, types.Boolean | bool) or not isinstance(kind, types.Integer | types.Float | int | float):
        raise TypingError(f"`{name}` must be a real number; got {value}")


def _offset(value, weight):
    """True if an offset is added to the weight, None if it is 0 as far as types tell."""
    _check_number("weight_offset", value)
    return None if weight is None or value == 0.0 else True


def _mask(mask, weight):
    if mask is None:
        return True, weight is not None, weight is not None
    members = mask.types if isinstance(mask, types.BaseTuple) else mask
    if not isinstance(members, tuple) or len(members) != 3:
        raise TypingError(f"`output_mask` must be three bools, for dx, dweight and dbias; got {mask}")
    dx, dweight, dbias = (_flag(f"output_mask[{i}]", member) for i, member in enumerate(members))
    return dx, dweight, dbias


def _three(out, mask):
    if out is None:
        return None, None, None
    members = out.types if isinstance(out, types.BaseTuple) else out
    if not isinstance(members, tuple) or len(members) != 3:
        raise TypingError(
            f"`out` must be a tuple of three arrays or None, for dx, dweight and dbias; got {out}"
        )
    known = tuple(_known(member) for member in members)
    for i, (array, wanted) in enumerate(zip(known, mask, strict=True)):
        if array is not None and not wanted:
            raise TypingError(
                f"`out[{i}]` must be None, since `output_mask[{i}]` is False; got {array}: mask it in or pass None"
            )
    return known
