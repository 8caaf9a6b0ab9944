"""Kernels for gradients of very wide rows, which threads share: sums over rows, means of them, gradients.

Work is counted in places: row after row in leaves, or block of columns after block in rows. A kernel does those from
start to stop and returns the place it stopped at, before an extreme row, as kernels over rows do.
"""

from .arrays import part, row, rows, stack, vector
from .gradients import HIGH, LOW, PARAMETERS, RSTD, SCALE, add_leaf, put_mean, put_means, put_statistics, statistics_of
from .passes import add_rows, clear, put_sums, write_rows
from .rows import LEAF, add_exactly, compensated

COLUMNS = 512
"""Columns of dweight and dbias that are added to at once: with the rows' they stay in the first cache,
without which a pass over 8192 x 768 took 1.5 times as long."""


def make_gather(centered, double, extreme):
    """The kernel that finds the parameters of rows, and of ordinary float32 rows the sums of leaves."""
    whole = None if double is None and extreme is None else True

    def gather(dy, x, weight, mean, rstd, parameters, sums, eps, cols, leaves, start, stop):
        """mean, rstd, Σg and Σg·x̂, g = dy·weight. Rows have so many `leaves`; others than float32 are one."""
        dy_rows, x_rows, weights = rows(dy, cols), rows(x, cols), vector(weight, cols)
        count = -(-stop // leaves)
        means, rstds = vector(mean, count), vector(rstd, count)
        found, all_sums = vector(parameters, PARAMETERS * count), vector(sums, 2 * leaves * count)
        own = stack(PARAMETERS)
        reached = start
        while reached < stop:
            i = reached // leaves
            last = min(stop, (i + 1) * leaves)
            dy_row, x_row = row(dy_rows, i), row(x_rows, i)
            # On the stack: other threads may find the same for this row.
            put_statistics(own, x_row, means, rstds, i, eps, centered, double, extreme)
            if extreme is None:
                if own[SCALE] != 0.0:
                    break
            elif reached > start and own[SCALE] == 0.0:
                break
            target = part(found, PARAMETERS * i, PARAMETERS)
            if whole is None:
                known = statistics_of(own, centered, double, extreme)
                for place in range(reached, last):
                    first = LEAF * (place - i * leaves)
                    size = min(LEAF, cols - first)
                    total, product, _, _ = add_leaf(
                        part(dy_row, first, size), part(x_row, first, size), None, None, part(weights, first, size),
                        None, None, None, None, known, known, None, None, None,
                    )  # fmt: skip
                    all_sums[2 * place], all_sums[2 * place + 1] = total, product
                target[SCALE], target[HIGH], target[LOW], target[RSTD] = own[SCALE], own[HIGH], own[LOW], own[RSTD]
            else:
                put_means(
                    own, dy_row, x_row, None, None, None, weights, None, None, centered, double, extreme, None, None
                )  # fmt: skip
                for j in range(PARAMETERS):
                    target[j] = own[j]
            reached = last
        return reached

    return gather


def means(parameters, sums, cols, leaves, count):
    """mean(g) and mean(g·x̂) of ordinary float32 rows, from the sums of their leaves in order."""
    found, all_sums = vector(parameters, PARAMETERS * count), vector(sums, 2 * leaves * count)
    for i in range(count):
        own = part(found, PARAMETERS * i, PARAMETERS)
        if own[SCALE] == 0.0:
            total = total_error = product = product_error = 0.0
            for place in range(i * leaves, (i + 1) * leaves):
                total, total_error = add_exactly(total, total_error, all_sums[2 * place])
                product, product_error = add_exactly(product, product_error, all_sums[2 * place + 1])
            put_mean(own, compensated(total, total_error), compensated(product, product_error), cols, None, None)


def make_apply(centered, double, extreme):
    """The kernel that takes rows with known parameters in blocks of columns, `width` each."""

    def apply(
        dy, x, weight, dresidual, parameters, weight_sums, bias_sums, dx, dweight, dbias, cols, width, count,
        start, stop,
    ):  # fmt: skip
        """dx = (g - mean(g) - x̂·mean(g·x̂))·rstd, g = dy·weight; dweight = Σ dy·x̂; dbias = Σ dy, each rounded once."""
        dy_rows, x_rows, dx_rows = rows(dy, cols), rows(x, cols), rows(dx, cols)
        dresidual_rows, weights = rows(dresidual, cols), vector(weight, cols)
        dweights, dbiases = vector(dweight, cols), vector(dbias, cols)
        sums_size = width if double is None else 2 * width
        sums, sums_2 = vector(weight_sums, sums_size), vector(bias_sums, sums_size)
        found = vector(parameters, PARAMETERS * count)
        reached = start
        while reached < stop:
            first = reached % count
            column = reached // count * width
            size = min(width, cols - column)
            last = first
            while last < count and (found[PARAMETERS * last + SCALE] == 0.0) == (extreme is None):
                last += 1
            if last == first:
                break
            if first == 0:
                clear(sums)
                clear(sums_2)
            for i in range(first, last, 2):
                end = min(i + 2, last)
                for place in range(0, size, COLUMNS):
                    many = min(COLUMNS, size - place)
                    add_rows(
                        found, dy_rows, x_rows, sums, sums_2, i, end, column + place, place, many, width,
                        centered, double, extreme,
                    )  # fmt: skip
                    if dx is not None:
                        write_rows(
                            found, 0, dy_rows, x_rows, weights, dresidual_rows, dx_rows, i, end, end,
                            column + place, many, centered, double, extreme, None, None, 0,
                        )  # fmt: skip
            if last == count:
                put_sums(dweights, sums, column, size, width, double)
                put_sums(dbiases, sums_2, column, size, width, double)
            reached += last - first
        return reached

    return apply
