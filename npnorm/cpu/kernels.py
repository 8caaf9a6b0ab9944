"""The kernels: one body forward and one backward, for every dtype, option and layout.

They run over rows of whatever arrays they are given. Flags are closure constants, True or None, and
arrays that are None: the compiler prunes both.

A kernel returns the row it stopped at. It stops before the first row whose statistics are extreme,
which another specialization, `extreme`, does in scaled float64 until the first ordinary row: so
ordinary kernels stay small.
"""

from .arrays import part, row, rows, stack, stack_line, vector
from .elements import finish_streaming, store
from .fours import write_four
from .gradients import PARAMETERS, SCALE, put_statistics
from .passes import ahead, gather_rows, write_rows
from .rows import (
    LEAF,
    add_exactly,
    add_leaf_sums,
    compensated,
    exact_statistics,
    extreme_statistics,
    in_compute_dtype,
    is_far,
    is_ordinary,
    mean_and_rstd,
    mean_pair,
    put_leaf_sums,
    statistics,
    unscaled,
    write_normalized,
    write_sum,
)
from .writing import release

NARROW = 512
"""Columns up to which rows from memory are better read one by one than in pairs: their sums stay in the first cache."""

PAIR_PARAMETERS = 2 * PARAMETERS


def make_forward(centered, double, exact, rounding, extreme, zero, stream, short):
    """The forward kernel.

    `double` computes in float64, `exact` says that x is float64, `rounding` rounds before the
    weight, a residual is added in the dtype of `zero`, `stream` writes past the cache,
    and `short` does rows four at a time, if there is no residual and no statistics are returned.
    """

    def forward(x, residual, weight, bias, residual_out, y, mean, rstd, eps, cols, start, stop):
        """y = (x - mean)·rstd·weight + bias, rstd = 1/sqrt(var + eps); x is x + residual if any."""
        x_rows, y_rows = rows(x, cols), rows(y, cols)
        residual_rows, total_rows = rows(residual, cols), rows(residual_out, cols)
        weights, biases = vector(weight, cols), vector(bias, cols)
        means, rstds = vector(mean, stop), vector(rstd, stop)
        edge, held = stack_line(y_rows if stream is not None else None), 0
        reached = alone = start
        while reached < stop:
            if short is not None and alone <= reached <= stop - 4:
                if write_four(x_rows, weights, biases, y_rows, reached, cols, eps, centered, rounding):
                    reached += 4
                    continue
                alone = reached + 4
            source = row(x_rows, reached)
            if residual is not None:
                total = row(total_rows, reached)
                write_sum(source, row(residual_rows, reached), total, zero)
                source = total
            following = ahead(x_rows, reached + 1, stop, stream)
            m, low, r = statistics(source, eps, centered, double, following)
            scale = None
            if extreme is None:
                if not is_ordinary(r, double):
                    break
                high, low = mean_pair(m, low, centered, double)
                scaled_r = in_compute_dtype(r, double)
            else:
                if reached > start and is_ordinary(r, double):
                    break
                scale, high, low, scaled_r = extreme_statistics(source, eps, centered)
                m, r = unscaled(scale, high, scaled_r)
            if rstd is not None:
                if exact is None:
                    m, r = exact_statistics(source, eps, centered)
                rstds[reached] = r
                if mean is not None:
                    means[reached] = m
            form = source if rounding is not None else None
            y_row = row(y_rows, reached)
            held = write_normalized(
                source, weights, biases, y_row, scale, high, low, scaled_r, form,
                following, row(y_rows, reached + 1), edge, held,
            )  # fmt: skip
            reached += 1
        if stream is not None:
            release(edge, held, row(y_rows, reached))
            finish_streaming()
        return reached

    return forward


def make_wide(centered, rounding, gather):
    """The halves of the forward kernel for one very wide row that threads share: `gather` adds up leaves."""

    def gather_leaves(x, weight, bias, y, sums, eps, cols, i, start, stop):
        """The sums of leaves start to stop of row i."""
        put_leaf_sums(row(rows(x, cols), i), vector(sums, 2 * -(-cols // LEAF)), start, stop, centered)
        return True

    def apply_leaves(x, weight, bias, y, sums, eps, cols, i, start, stop):
        """y of leaves start to stop of row i; False, and nothing is written, if the row is extreme or far from zero."""
        total, squares = add_leaf_sums(vector(sums, 2 * -(-cols // LEAF)))
        m, r = mean_and_rstd(0.0, total, squares, cols, eps, centered)
        if not is_ordinary(r, None) or (centered is not None and is_far(total, squares, cols)):
            return False
        high, low = mean_pair(m, 0.0, centered, None)
        first, size = LEAF * start, min(LEAF * stop, cols) - LEAF * start
        source = part(row(rows(x, cols), i), first, size)
        form = source if rounding is not None else None
        write_normalized(
            source, part(vector(weight, cols), first, size), part(vector(bias, cols), first, size),
            part(row(rows(y, cols), i), first, size), None, high, low, in_compute_dtype(r, None), form,
            None, None, None, 0,
        )  # fmt: skip
        return True

    return apply_leaves if gather is None else gather_leaves


def make_total(double):
    """The kernel that adds up the sums of blocks."""

    def total(sums, gradient, blocks, stride, cols):
        """gradient = Σ sums over the blocks in order, rounded once; for float64 with what was lost."""
        all_sums = vector(sums, blocks * stride)
        target = vector(gradient, cols)
        for j in range(cols):
            value = all_sums[j]
            error = 0.0
            if double is not None:
                error = all_sums[cols + j]
            for block in range(1, blocks):
                if double is None:
                    value += all_sums[block * stride + j]
                else:
                    value, error = add_exactly(value, error, all_sums[block * stride + j])
                    error += all_sums[block * stride + cols + j]
            store(target, j, compensated(value, error), 0)

    return total


def make_backward(centered, double, extreme, stream):
    """The backward kernel, for all columns of a row at once.

    Rows are done in pairs, if dweight or dbias is wanted. `stream` is for arrays larger than the cache, with a dx that
    shares no memory with dy and x: dx is written past the cache, while the next rows are fetched. That has the same
    bits, and so have the kernels for very wide rows.
    """

    def backward(dy, x, weight, dresidual, mean, rstd, dx, dweight, dbias, eps, cols, start, stop):
        """dx = (g - mean(g) - x̂·mean(g·x̂))·rstd, g = dy·weight; dweight += Σ dy·x̂; dbias += Σ dy."""
        dy_rows, x_rows, dx_rows = rows(dy, cols), rows(x, cols), rows(dx, cols)
        dresidual_rows, weights = rows(dresidual, cols), vector(weight, cols)
        means, rstds = vector(mean, stop), vector(rstd, stop)
        sums_size = cols if double is None else 2 * cols
        dweights, dbiases = vector(dweight, sums_size), vector(dbias, sums_size)
        found = stack(PAIR_PARAMETERS)
        size = 1 if dweight is None and dbias is None or stream is not None and cols <= NARROW else 2
        edge, held = stack_line(dx_rows if stream is not None else None), 0
        reached = start
        while reached < stop:
            first, last = reached, min(reached + size, stop)
            while reached < last:
                own = part(found, PARAMETERS * (reached - first), PARAMETERS)
                put_statistics(own, row(x_rows, reached), means, rstds, reached, eps, centered, double, extreme)
                if extreme is None:
                    if own[SCALE] != 0.0:
                        break
                elif reached > start and own[SCALE] == 0.0:
                    break
                reached += 1
            gather_rows(
                found, dy_rows, x_rows, weights, dweights, dbiases, first, reached, stop,
                centered, double, extreme, stream,
            )  # fmt: skip
            if dx is not None:
                held = write_rows(
                    found, first, dy_rows, x_rows, weights, dresidual_rows, dx_rows, first, reached, stop,
                    0, cols, centered, double, extreme, stream, edge, held,
                )  # fmt: skip
            if reached < last:
                break
        if stream is not None:
            release(edge, held, row(dx_rows, reached))
            finish_streaming()
        return reached

    return backward
