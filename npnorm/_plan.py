"""A call's arguments, checked, and the plan they make. Nothing here allocates, computes or writes."""

from typing import Any, NamedTuple

import numpy as np

from ._checks import (
    check_host,
    check_overlap,
    check_shape,
    check_side,
    checked_array,
    checked_eps,
    checked_gradients,
    checked_mask,
    checked_offset,
    checked_output,
    checked_parameter,
    checked_workspace,
    compute_format,
    trailing_axes,
)
from ._results import Checked


class Plan(NamedTuple):
    """What a kernel is compiled for: hashable, and the same for every shape. Formats are None for absent arrays."""

    backward: bool
    centered: bool
    double: bool
    """Whether the compute dtype is float64, not float32."""
    rounding: bool
    """Whether the normalized value is rounded before the weight."""
    x: str
    other: str | None
    """The format of the residual, or of dy."""
    weight: str | None
    """The format of the weight as the kernel gets it: an offset is added before."""
    bias: str | None
    out: str | None
    """The format of y or dx."""
    mean: str | None
    rstd: str | None
    """"float64" for statistics that a forward kernel keeps, or a backward kernel is given."""
    dweight: str | None = None
    dbias: str | None = None
    """"float64", the format of sums over rows."""
    dresidual: str | None = None


class Forward(NamedTuple):
    """A checked forward call."""

    plan: Plan
    x: Checked
    residual: Checked | None
    weight: Checked | None
    bias: Checked | None
    out: Checked | None
    residual_out: Checked | None
    axes: int
    """How many trailing axes are normalized."""
    eps: float
    weight_offset: float
    stream: Any
    """What the caller gave as the stream, of calls on a CUDA device."""


class Backward(NamedTuple):
    """A checked backward call."""

    plan: Plan
    dy: Checked
    x: Checked
    weight: Checked | None
    mean: Checked | None
    rstd: Checked | None
    dresidual: Checked | None
    mask: tuple[bool, bool, bool]
    out: tuple[Checked | None, Checked | None, Checked | None]
    axes: int
    eps: float
    weight_offset: float
    stream: Any
    workspace: Checked | None


HOST = {np.ndarray, type(None)}
"""The types of checked arrays in host memory."""


class Derivative(NamedTuple):
    """A checked call for a directional derivative, as a forward and a backward plan without parameters."""

    normalized: Plan
    """What gives the normalized rows, in float64."""
    projected: Plan
    """What gives their derivative along dx, in float64: the gradient's formula, with dx for dy."""
    double: bool
    """Whether the compute dtype, in which an offset is added, is float64."""
    x: Checked
    weight: Checked | None
    dx: Checked | None
    dweight: Checked | None
    dbias: Checked | None
    out: Checked | None
    axes: int
    eps: float
    weight_offset: float


def plan_forward(
    centered: bool,
    x: Any,
    residual: Any,
    weight: Any,
    bias: Any,
    axis: Any,
    eps: Any,
    weight_offset: Any,
    round_before_weight: Any,
    out: Any,
    residual_out: Any,
    return_stats: Any,
    fused: bool = False,
    *,
    stream: Any = None,
) -> Forward:
    """Check the arguments of a forward function; `fused` is True for those that add a residual."""
    x, x_format = checked_array("x", x)
    axes = trailing_axes(axis, x.ndim)
    shape = x.shape[x.ndim - axes :]
    residual_format = out_format = None
    if fused:
        residual, residual_format = checked_array("residual", residual)
        check_shape("residual", residual, x.shape, "the shape of `x`")
    weight, weight_format = checked_parameter("weight", weight, shape)
    bias, bias_format = checked_parameter("bias", bias, shape)
    weight_offset = checked_offset(weight_offset, weight)
    if out is not None:
        out, out_format = checked_output("out", out, x.shape)
    double = x_format == "float64" or out_format == "float64"
    eps = checked_eps(eps, centered, x_format)
    if residual_out is not None:
        residual_out, sum_format = checked_output("residual_out", residual_out, x.shape)
        if sum_format != x_format:
            raise ValueError(
                f"`residual_out` must have the dtype of `x`, {x_format}; got {residual_out.dtype}"
            )
    types = {type(x), type(residual), type(weight), type(bias), type(out), type(residual_out)}
    if stream is not None or not types <= HOST:
        inputs = {"x": x, "residual": residual, "weight": weight, "bias": bias}
        check_side({**inputs, "out": out, "residual_out": residual_out}, stream)
    if out is not None or residual_out is not None:
        inputs = {"x": x, "residual": residual, "weight": weight, "bias": bias}
        check_overlap("out", out, {**inputs, "residual_out": residual_out}, ("x", "residual"))
        check_overlap("residual_out", residual_out, inputs, ("x", "residual"))
    plan = Plan(
        False,
        centered,
        double,
        bool(round_before_weight),
        x_format,
        residual_format,
        compute_format(double) if weight_offset else weight_format,
        bias_format,
        out_format or x_format,
        "float64" if return_stats and centered else None,
        "float64" if return_stats else None,
    )
    return Forward(
        plan, x, residual, weight, bias, out, residual_out, axes, eps, weight_offset, stream
    )


def plan_backward(
    centered: bool,
    dy: Any,
    x: Any,
    weight: Any,
    mean: Any,
    rstd: Any,
    axis: Any,
    eps: Any,
    weight_offset: Any,
    dresidual: Any,
    output_mask: Any,
    out: Any,
    *,
    stream: Any = None,
    workspace: Any = None,
) -> Backward:
    """Check the arguments of a backward function."""
    dy, dy_format = checked_array("dy", dy)
    x, x_format = checked_array("x", x)
    axes = trailing_axes(axis, x.ndim)
    shape = x.shape[x.ndim - axes :]
    check_shape("dy", dy, x.shape, "the shape of `x`")
    weight, weight_format = checked_parameter("weight", weight, shape)
    weight_offset = checked_offset(weight_offset, weight)
    kept = x.shape[: x.ndim - axes] + (1,) * axes
    rule = "the shape of the statistics that `return_stats=True` gives"
    if mean is not None:
        mean, _ = checked_array("mean", mean)
        check_shape("mean", mean, kept, rule)
    if rstd is not None:
        rstd, _ = checked_array("rstd", rstd)
        check_shape("rstd", rstd, kept, rule)
    dresidual_format = None
    if dresidual is not None:
        dresidual, dresidual_format = checked_array("dresidual", dresidual)
        check_shape("dresidual", dresidual, x.shape, "the shape of `x`")
    mask = checked_mask(output_mask, weight)
    outputs, formats = checked_gradients(out, mask, x.shape, shape)
    double = (
        "float64" in (x_format, dy_format, *formats)
        or dresidual_format == "float64"
        or weight_format == "float64"  # dweight's dtype; wanted or not, so that dx has the same bits
    )
    eps = checked_eps(eps, centered, x_format)
    types = {type(dy), type(x), type(weight), type(mean), type(rstd), type(dresidual), *map(type, outputs)}
    if stream is not None or workspace is not None or not types <= HOST:
        given = {f"out[{i}]": array for i, array in enumerate(outputs)}
        given |= {"dy": dy, "x": x, "weight": weight, "mean": mean, "rstd": rstd, "dresidual": dresidual}
        check_side(given, stream)
        workspace = checked_workspace(workspace, x)
        check_side({"x": x, "workspace": workspace}, stream)
        check_overlap("workspace", workspace, given, ())
    if out is not None:
        inputs = {"dy": dy, "x": x, "weight": weight, "mean": mean, "rstd": rstd, "dresidual": dresidual}
        check_overlap("out[0]", outputs[0], inputs, ("dy", "x", "dresidual"))
        check_overlap("out[1]", outputs[1], {**inputs, "out[0]": outputs[0]}, ())
        check_overlap(
            "out[2]", outputs[2], {**inputs, "out[0]": outputs[0], "out[1]": outputs[1]}, ()
        )
    plan = Plan(
        True,
        centered,
        double,
        False,
        x_format,
        dy_format,
        compute_format(double) if weight_offset else weight_format,
        None,
        (formats[0] or x_format) if mask[0] else None,
        None if mean is None else "float64",
        None if rstd is None else "float64",
        "float64" if mask[1] else None,
        "float64" if mask[2] else None,
        dresidual_format if mask[0] else None,
    )
    return Backward(
        plan,
        dy,
        x,
        weight,
        mean,
        rstd,
        dresidual if mask[0] else None,
        mask,
        outputs,
        axes,
        eps,
        weight_offset,
        stream,
        workspace,
    )


def plan_jvp(
    centered: bool,
    x: Any,
    weight: Any,
    dx: Any,
    dweight: Any,
    dbias: Any,
    axis: Any,
    eps: Any,
    weight_offset: Any,
    out: Any,
) -> Derivative:
    """Check the arguments of a directional derivative."""
    x, x_format = checked_array("x", x)
    axes = trailing_axes(axis, x.ndim)
    shape = x.shape[x.ndim - axes :]
    weight, weight_format = checked_parameter("weight", weight, shape)
    weight_offset = checked_offset(weight_offset, weight)
    dx_format = out_format = None
    if dx is not None:
        dx, dx_format = checked_array("dx", dx)
        check_shape("dx", dx, x.shape, "the shape of `x`")
    dweight, dweight_format = checked_parameter("dweight", dweight, shape)
    dbias, dbias_format = checked_parameter("dbias", dbias, shape)
    if dx is None and dweight is None and dbias is None:
        raise ValueError(
            "`dx`, `dweight` and `dbias` must not all be None, for then nothing changes; got no tangent: "
            "give the direction of change of x, weight or bias"
        )
    eps = checked_eps(eps, centered, x_format)
    inputs = {"x": x, "weight": weight, "dx": dx, "dweight": dweight, "dbias": dbias}
    if out is not None:
        out, out_format = checked_output("out", out, x.shape)
    check_host({**inputs, "out": out})
    check_overlap("out", out, inputs, ("x", "dx"))
    formats = (x_format, weight_format, dx_format, dweight_format, dbias_format, out_format)
    normalized = Plan(
        False, centered, True, False, x_format, None, None, None, "float64", None, None
    )
    projected = normalized._replace(backward=True, other=dx_format)
    double = "float64" in formats
    return Derivative(
        normalized, projected, double, x, weight, dx, dweight, dbias, out, axes, eps, weight_offset
    )
