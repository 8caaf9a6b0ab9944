"""Whole calls as Numba compiles them into users' code, around the same kernels, on the thread they are called from."""

from functools import cache

import numpy as np
from numba import njit
from numba.core import cgutils
from numba.extending import intrinsic

from ..._numba import OPTIONS
from .. import work
from ..arrays import part, vector_view
from ..specialize import inner_kernel
from .arrays import (
    apart_check,
    as_rows,
    checked_eps,
    checked_offset,
    extent,
    kept,
    new_statistic,
    nothing,
)

INLINED = {**OPTIONS, "inline": "always"}
"""The options of what is called in one place: every library that kernels are linked to optimizes them once more."""


@intrinsic
def outlined(typingctx, kernel, arguments):
    """kernel(*arguments), never merged with the code around it, which could change the order of its sums."""
    signature = kernel.get_call_type(typingctx, tuple(arguments), {})

    def codegen(context, builder, _, args):
        compiled = kernel.dispatcher.overloads[signature.args]
        function = context.declare_function(builder.module, compiled.fndesc)
        context.active_code_library.add_linking_library(compiled.library)
        values = [
            context.cast(builder, value, given, wanted)
            for value, given, wanted in zip(
                cgutils.unpack_tuple(builder, args[1]), arguments, signature.args, strict=True
            )
        ]
        _, result = context.call_conv.call_function(
            builder, function, signature.return_type, signature.args, values, ("noinline",)
        )
        return result

    return signature.return_type(kernel, arguments), codegen


# Kernels over rows


@cache
def over_rows(plan):
    """Ranges of rows through the forward kernels of a plan, as `runs.run` takes them."""
    ordinary = inner_kernel(plan)
    extreme = inner_kernel(plan._replace(other=None), True)
    has_residual = True if plan.other else None

    @njit(**INLINED)
    def run(x, residual, weight, bias, total, y, mean, rstd, eps, cols, rows):
        start = 0
        while start < rows:
            start = outlined(
                ordinary, (x, residual, weight, bias, total, y, mean, rstd, eps, cols, start, rows)
            )
            if start < rows:
                if has_residual is None:
                    start = outlined(
                        extreme, (x, None, weight, bias, None, y, mean, rstd, eps, cols, start, rows)
                    )
                else:
                    start = outlined(
                        extreme,
                        (total, None, weight, bias, None, y, mean, rstd, eps, cols, start, start + 1),
                    )

    return run


@cache
def gradients_over_rows(plan):
    """Ranges of rows through the backward kernels of a plan, as `runs.run` takes them."""
    ordinary, extreme = inner_kernel(plan), inner_kernel(plan, True)

    @njit(**INLINED)
    def run(dy, x, weight, dresidual, mean, rstd, dx, dweight, dbias, eps, cols, start, stop):
        while start < stop:
            start = outlined(
                ordinary,
                (dy, x, weight, dresidual, mean, rstd, dx, dweight, dbias, eps, cols, start, stop),
            )
            if start < stop:
                start = outlined(
                    extreme,
                    (dy, x, weight, dresidual, mean, rstd, dx, dweight, dbias, eps, cols, start, stop),
                )

    return run


# Calls. No argument is looked at but through functions: inlined, these have none that the compiler could prune by.


@cache
def make_forward(plan, lead, inputs, outputs, give, machine_eps):
    """A forward call of arrays with `lead` lead axes.

    `inputs` has a check and a reader for each input, `outputs` a check, a maker and two more for each
    output, all from inside/arrays.py; `give` makes of y, the sum, mean and rstd what is returned.
    Checks come first: Numba never frees what is held when an error passes.
    """
    over = over_rows(plan)
    checks, (read_x, read_residual, read_weight, read_bias) = zip(*inputs, strict=True)
    _, check_residual, check_weight, check_bias = checks
    (check_y, new_y, room_y, settle_y), (check_total, new_total, room_total, settle_total) = outputs
    rows_of_total = as_rows if plan.other else nothing
    new_mean, mean_of = (new_statistic, vector_view) if plan.mean else (nothing, nothing)
    new_rstd, rstd_of = (new_statistic, vector_view) if plan.rstd else (nothing, nothing)
    check_apart = apart_check("out", "residual_out")

    @njit(**INLINED)
    def forward(x, residual, weight, bias, eps, weight_offset, out, residual_out):
        shape = x.shape
        row_shape = shape[lead:]
        rows, cols = extent(shape, lead)
        check_residual(residual, shape)
        check_weight(weight, row_shape)
        check_bias(bias, row_shape)
        check_y(out, shape)
        check_total(residual_out, shape)
        check_apart(out, residual_out)
        number = checked_eps(eps, machine_eps)
        offset = checked_offset(weight_offset, weight)
        x_rows = read_x(x, out, residual_out)
        residual_rows = read_residual(residual, out, residual_out)
        weights = read_weight(weight, offset, out, residual_out)
        biases = read_bias(bias, 0.0, out, residual_out)
        y, total = new_y(out, shape), new_total(residual_out, shape)
        mean, rstd = new_mean(shape, lead), new_rstd(shape, lead)
        y_written, total_written = room_y(y), room_total(total)
        if rows > 0 and cols > 0:
            over(
                x_rows, residual_rows, weights, biases, rows_of_total(total_written, lead),
                as_rows(y_written, lead), mean_of(mean), rstd_of(rstd), number, cols, rows,
            )  # fmt: skip
            settle_y(y, y_written)
            settle_total(total, total_written)
        return give(y, total, mean, rstd)

    return forward


@cache
def make_backward(plan, lead, inputs, outputs, give, machine_eps):
    """A backward call, as `make_forward` makes a forward one."""
    over = gradients_over_rows(plan)
    checks, readers = zip(*inputs, strict=True)
    check_dy, _, check_weight, check_mean, check_rstd, check_dresidual = checks
    read_dy, read_x, read_weight, read_mean, read_rstd, read_dresidual = readers
    (check_dx, new_dx, room_dx, settle_dx), of_dweight, of_dbias = outputs
    check_dweight, new_dweight, room_dweight, settle_dweight = of_dweight
    check_dbias, new_dbias, room_dbias, settle_dbias = of_dbias
    rows_of_dx = as_rows if plan.out else nothing
    (new_dweights, put_dweight), (new_dbiases, put_dbias) = (
        gradient_sums(plan.double, wanted is not None) for wanted in (plan.dweight, plan.dbias)
    )
    apart_01, apart_02, apart_12 = (
        apart_check(f"out[{i}]", f"out[{j}]") for i, j in ((0, 1), (0, 2), (1, 2))
    )
    double, has_sums = plan.double, bool(plan.dweight or plan.dbias)

    @njit(**INLINED)
    def backward(
        dy, x, weight, mean, rstd, eps, weight_offset, dresidual, out_dx, out_dweight, out_dbias
    ):  # fmt: skip
        shape = x.shape
        row_shape, stats_shape = shape[lead:], kept(shape, lead)
        rows, cols = extent(shape, lead)
        check_dy(dy, shape)
        check_weight(weight, row_shape)
        check_mean(mean, stats_shape)
        check_rstd(rstd, stats_shape)
        check_dresidual(dresidual, shape)
        check_dx(out_dx, shape)
        check_dweight(out_dweight, row_shape)
        check_dbias(out_dbias, row_shape)
        number = checked_eps(eps, machine_eps)
        offset = checked_offset(weight_offset, weight)
        apart_01(out_dx, out_dweight)
        apart_02(out_dx, out_dbias)
        apart_12(out_dweight, out_dbias)
        # Nothing is copied for the sake of dweight and dbias: when they are written, all has been read.
        dy_rows = read_dy(dy, out_dx, None)
        x_rows = read_x(x, out_dx, None)
        dresidual_rows = read_dresidual(dresidual, out_dx, None)
        weights = read_weight(weight, offset, out_dx, None)
        means = read_mean(mean, 0.0, out_dx, None)
        rstds = read_rstd(rstd, 0.0, out_dx, None)
        dx = new_dx(out_dx, shape)
        dweight, dbias = new_dweight(out_dweight, row_shape), new_dbias(out_dbias, row_shape)
        dx_written, dweight_written, dbias_written = room_dx(dx), room_dweight(dweight), room_dbias(dbias)
        size, blocks = block_size(rows, cols, double, has_sums)
        dweights, dbiases = new_dweights(blocks, cols), new_dbiases(blocks, cols)
        if rows > 0 and cols > 0:
            length = 2 * cols if double else cols
            for block in range(blocks):
                over(
                    dy_rows, x_rows, weights, dresidual_rows, means, rstds, rows_of_dx(dx_written, lead),
                    part(dweights, block * length, length), part(dbiases, block * length, length),
                    number, cols, block * size, min((block + 1) * size, rows),
                )  # fmt: skip
            settle_dx(dx, dx_written)
        put_dweight(dweights, dweight_written, blocks, cols)
        put_dbias(dbiases, dbias_written, blocks, cols)
        settle_dweight(dweight, dweight_written)
        settle_dbias(dbias, dbias_written)
        return give(dx, dweight, dbias)

    return backward


block_count = njit(**OPTIONS)(work.block_count)


@njit(**OPTIONS)
def block_size(rows, cols, double, has_sums):
    """The number of rows of a block, and of blocks, as `launch` cuts them."""
    count = block_count(rows, cols, double) if has_sums and cols > 0 else 1
    size = max(1, -(-rows // count))
    return size, -(-rows // size)


@cache
def gradient_sums(double, wanted):
    """Two functions: zeros for the sums of blocks, and what makes a gradient of the sums."""
    if not wanted:
        return nothing, nothing
    total = inner_kernel("total", double, "float64")  # of any format

    @njit(**OPTIONS)
    def zeros(blocks, cols):
        return np.zeros(blocks * (2 * cols if double else cols))

    @njit(**OPTIONS)
    def put(sums, gradient, blocks, cols):
        if blocks == 0:
            gradient[...] = 0
        elif cols > 0:
            outlined(total, (sums, vector_view(gradient), blocks, sums.size // blocks, cols))

    return zeros, put
