"""The two kernels: one body forward and one backward, for every dtype, option and layout.

They run over rows of 3-d arrays whose last axis is contiguous: a 2-d view of rows, whose first axis
is split in two where its strides do not merge. Flags are closure constants, True or None, and
arrays that are None: the compiler prunes both.

A kernel returns the row it stopped at. It stops before the first row whose statistics are extreme,
which another specialization, `extreme`, does in scaled float64 until the first ordinary row: so
ordinary kernels stay small.
"""

import math

from .elements import finish_streaming, row, store
from .rows import (
    SCALE,
    add_exactly,
    compensated,
    extreme_statistics,
    in_compute_dtype,
    is_ordinary,
    known_statistics,
    mean_pair,
    parameters_of,
    put_extreme_parameters,
    put_ordinary_parameters,
    statistics,
    stream_normalized,
    unscaled,
    write_gradients,
    write_normalized,
    write_sum,
    write_two_gradients,
)


def make_forward(centered, double, exact, rounding, extreme, zero, stream):
    """The forward kernel.

    `double` computes in float64, `exact` says that x is float64, `rounding` rounds before the
    weight, a residual is added in the dtype of `zero`, and `stream` writes past the cache.
    """

    def forward(x, residual, weight, bias, residual_out, y, mean, rstd, keep, eps, start, stop):
        """y = (x - mean)·rstd·weight + bias, rstd = 1/sqrt(var + eps); x is x + residual if any."""
        for i in range(start, stop):
            source = row(x, i)
            if residual is not None:
                total = row(residual_out, i)
                write_sum(source, row(residual, i), total, zero)
                source = total
            form = source if rounding is not None else None
            m, low, r = statistics(source, eps, centered, double)
            if extreme is None:
                if not is_ordinary(r, double):
                    if stream is not None:
                        finish_streaming()
                    return i
                if y is not None:
                    high, low = mean_pair(m, low, centered, double)
                    scaled_r = in_compute_dtype(r, double)
                    if stream is None:
                        write_normalized(
                            source, weight, bias, row(y, i), None, high, low, scaled_r, form
                        )
                    else:
                        stream_normalized(
                            source, weight, bias, row(y, i), None, high, low, scaled_r, form,
                            row(x, min(i + 1, stop - 1)),
                        )  # fmt: skip
            else:
                if i > start and is_ordinary(r, double):
                    return i
                scale, high, low, scaled_r = extreme_statistics(source, eps, centered)
                m, r = unscaled(scale, high, scaled_r, double)
                if y is not None:
                    write_normalized(
                        source, weight, bias, row(y, i), scale, high, low, scaled_r, form
                    )
            if keep:
                if double is not exact:  # statistics are those of x, whatever the dtype of y
                    m, low, r = statistics(source, eps, centered, exact)
                mean[i] = m
                rstd[i] = r
        if stream is not None:
            finish_streaming()
        return stop

    return forward


def make_total(double):
    """The kernel that adds up the sums of blocks."""

    def total(sums, gradient):
        """gradient = Σ sums over the blocks in order, rounded once; for float64 with what was lost."""
        for j in range(gradient.size):
            value = sums[0, j]
            error = 0.0
            if double is not None:
                error = sums[0, gradient.size + j]
            for block in range(1, sums.shape[0]):
                if double is None:
                    value += sums[block, j]
                else:
                    value, error = add_exactly(value, error, sums[block, j])
                    error += sums[block, gradient.size + j]
            store(gradient, j, compensated(value, error), 0)

    return total


def make_backward(centered, double, recompute, extreme, gather, apply):
    """The backward kernel: `gather` finds the parameters of rows, `apply` uses them.

    Most rows are gathered and applied at once, float32 rows two at a time, which halves the traffic
    with the sums and changes no bit; `parameters` is room for two. Very wide rows are all gathered
    first, then applied range by range of columns, so that the sums of a range stay in the cache;
    `parameters` has a place for each row.
    """
    pair = 2 if double is None else 1
    at_once = gather is not None and apply is not None

    def backward(
        dy, x, weight, dresidual, mean, rstd, parameters, dx, dweight, dbias, eps, start, stop
    ):  # fmt: skip
        """dx = (g - mean(g) - x̂·mean(g·x̂))·rstd, g = dy·weight; dweight += Σ dy·x̂; dbias += Σ dy."""
        for i in range(start, stop, pair):
            last = min(i + pair, stop)
            found = parameters[:pair] if at_once else parameters[i:last]
            if gather is not None:
                for k in range(i, last):
                    m, low, r = known_statistics(
                        row(x, k), mean, rstd, k, eps, centered, double, recompute
                    )
                    if is_ordinary(r, double):
                        put_ordinary_parameters(
                            found[k - i], row(dy, k), row(x, k), weight, m, low, r, centered, double
                        )
                    elif extreme is not None:
                        put_extreme_parameters(
                            found[k - i], row(dy, k), row(x, k), weight, eps, centered
                        )
                    else:
                        found[k - i, SCALE] = math.nan
            ordinary = True
            for k in range(i, last):
                ordinary = ordinary and found[k - i, SCALE] == 0.0
            if extreme is None and not ordinary:
                return i
            if extreme is not None and ordinary and i > start:
                return i
            if apply is None:
                continue
            if extreme is None and double is None and last - i == 2:
                write_two_gradients(
                    row(dy, i), row(x, i), weight, row(dresidual, i), row(dx, i), dweight, dbias,
                    parameters_of(found[0], centered, None),
                    row(dy, i + 1), row(x, i + 1), row(dresidual, i + 1), row(dx, i + 1),
                    parameters_of(found[1], centered, None),
                )  # fmt: skip
                continue
            for k in range(i, last):
                one = found[k - i]
                if extreme is not None and one[SCALE] != 0.0:
                    write_gradients(
                        row(dy, k), row(x, k), weight, row(dresidual, k), row(dx, k), dweight,
                        dbias, one[SCALE], parameters_of(one, centered, True), double,
                    )  # fmt: skip
                else:
                    write_gradients(
                        row(dy, k), row(x, k), weight, row(dresidual, k), row(dx, k), dweight,
                        dbias, None, parameters_of(one, centered, double), double,
                    )  # fmt: skip
        return stop

    return backward
