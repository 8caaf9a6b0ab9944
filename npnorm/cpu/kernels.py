"""The two kernels: one body forward and one backward, for every dtype, option and layout.

They run over rows of 3-d arrays whose last axis is contiguous: a 2-d view of rows, whose first axis
is split in two where its strides do not merge. Flags are closure constants, True or None, and
arrays that are None: the compiler prunes both.

A kernel returns the row it stopped at. It stops before the first row whose statistics are extreme,
which another specialization, `extreme`, does in scaled float64 until the first ordinary row: so
ordinary kernels stay small.
"""

from .elements import row
from .rows import (
    extreme_statistics,
    in_compute_dtype,
    is_ordinary,
    lost_of_mean,
    mean_gradients,
    mean_pair,
    statistics,
    unscaled,
    write_gradients,
    write_normalized,
    write_sum,
)


def make_forward(centered, double, exact, rounding, extreme, zero):
    """The forward kernel.

    `double` computes in float64, `exact` says that x is float64, `rounding` rounds before the
    weight, and a residual is added in the dtype of `zero`.
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
                    return i
                if y is not None:
                    high, low = mean_pair(m, low, centered, double)
                    scaled_r = in_compute_dtype(r, double)
                    write_normalized(
                        source, weight, bias, row(y, i), None, high, low, scaled_r, form
                    )
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
        return stop

    return forward


def make_backward(centered, double, recompute, extreme):
    """The backward kernel."""
    precise = True if extreme is not None else double

    def backward(
        dy, x, weight, dresidual, mean, rstd, dx, dweight, dbias, eps, start, stop
    ):
        """dx = (g - mean(g) - x̂·mean(g·x̂))·rstd, g = dy·weight; dweight += Σ dy·x̂; dbias += Σ dy."""
        for i in range(start, stop):
            source, gradient = row(x, i), row(dy, i)
            if recompute is None:
                m, r = mean[i], rstd[i]
                low = lost_of_mean(source, m, centered, double)
            else:
                m, low, r = statistics(source, eps, centered, double)
            if extreme is None:
                if not is_ordinary(r, double):
                    return i
                scale = None
                high, low = mean_pair(m, low, centered, double)
                r = in_compute_dtype(r, double)
            else:
                if i > start and is_ordinary(r, double):
                    return i
                scale, high, low, r = extreme_statistics(source, eps, centered)
            mean_g, mean_gx = mean_gradients(
                gradient, source, weight, scale, high, low, r, centered, precise
            )
            write_gradients(
                gradient, source, weight, row(dresidual, i), row(dx, i), dweight, dbias,
                scale, high, low, r, mean_g, mean_gx, double,
            )  # fmt: skip
        return stop

    return backward
