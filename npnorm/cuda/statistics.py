"""The statistics of a row, from chunks that stay in registers, in shared memory, or are read again for each pass."""

from typing import Any, NamedTuple

import numpy as np
from numba import cuda

from .elements import TYPES, compensated, make_elements
from .rows import (
    larger,
    make_chunk_sums,
    make_reduce,
    mean_of_pair,
    mean_of_sum,
    one,
    pair,
    rstd_of_squares,
    two,
)
from .vectors import device, fma, reciprocal_root

try:
    from numba.cuda.types import uint32
except ImportError:
    from numba.core.types import uint32


class Statistics(NamedTuple):
    """Device functions that all threads of a row call together. `row` is its address; those with steps = 0 add
    nothing."""

    mean: Any
    """mean(words, row, steps, shared, thread, group, limit, count, inverse, scale): the mean as a pair. These and those
    below are of x·scale."""
    rstd: Any
    """rstd(..., scale, eps, high, low): 1/sqrt(var + eps) and var + eps."""
    refined: Any
    """refined(..., scale, eps, mean): high, low, rstd and var + eps in float64 all through, from a mean that is nearly
    right."""
    largest: Any
    """largest(words, row, steps, shared, thread, group, limit, count, inverse): the largest |x|."""


def make_source(spec):
    """A function fetch(words, row, k, thread, limit) -> (at, j): chunk k of a thread is words[at:], and columns j
    and on.

    The chunk is in registers, is read from shared memory, or from the row's address. Only j < limit is there.
    """
    chunk, threads = spec.chunk, spec.threads
    registers, in_shared = spec.mode == "registers", spec.mode == "shared"
    access = spec.access[0 if spec.plan.other is None else 2]  # what `row` is: x, or its sum with the residual
    load = make_elements(spec.plan.x, chunk, spec.width, np.float32, access).load

    @device
    def fetch(words, row, k, thread, limit):
        j = (k * threads + thread) * chunk
        if registers:
            return 4 * k, j
        if j < limit:
            if in_shared:
                staged = cuda.shared.array(0, uint32)
                for word in range(4):
                    words[word] = staged[(4 * k + word) * threads + thread]
            else:
                load(words, 0, row, j, limit)
        return 0, j

    return fetch


def make_statistics(spec, number):
    """`Statistics` with sums in the dtype `number`."""
    plan, chunk, threads, rows = spec.plan, spec.chunk, spec.threads, spec.rows
    centered, whole = plan.centered, spec.width == spec.chunk
    fetch = make_source(spec)
    scaled = make_elements(plan.x, chunk, spec.width, number).scaled
    exact_value = make_elements(plan.x, chunk, spec.width, np.float64).number
    add_elements, add_products = make_chunk_sums(chunk, number, plan.x == "float16" and number is np.float32)
    double = number is np.float64
    reduce_mean = make_reduce(threads, rows, pair if double else one, mean_of_pair if double else mean_of_sum)
    reduce_rstd = make_reduce(threads, rows, one, rstd_of_squares)
    reduce_two = make_reduce(threads, rows, two)
    reduce_largest = make_reduce(threads, rows, larger)
    kind, zero, one_number = TYPES[number], number(0.0), number(1.0)

    @device
    def mean(words, row, steps, shared, thread, group, limit, count, inverse, scale):
        if not centered:
            return 0.0, 0.0
        values = cuda.local.array(chunk, kind)
        total, error = zero, zero
        for k in range(steps):
            at, j = fetch(words, row, k, thread, limit)
            if j < limit:
                scaled(words, at, values, number(scale))
                total, error = add_elements(total, error, values)
        if double:
            return reduce_mean(np.float64(total), np.float64(error), shared, thread, group, count, inverse, 0.0)
        exact = np.float64(total)
        if error == error:
            exact = exact + np.float64(error)
        high, _ = reduce_mean(exact, 0.0, shared, thread, group, count, inverse, 0.0)
        return high, high - np.float64(np.float32(high))

    @device
    def rstd(words, row, steps, shared, thread, group, limit, count, inverse, scale, eps, high, low):
        values = cuda.local.array(chunk, kind)
        first, second = number(high), number(low)
        squares, error = zero, zero
        for k in range(steps):
            at, j = fetch(words, row, k, thread, limit)
            if j < limit:
                scaled(words, at, values, number(scale))
                for i in range(chunk):
                    d = values[i]
                    if centered:
                        d = (d - first) - second
                    if not whole and j + i >= limit:
                        d = zero
                    values[i] = d
                squares, error = add_products(squares, error, values, values)
        exact = compensated(np.float64(squares), np.float64(error))  # infinity, not NaN: rstd 0 is that of its row
        return reduce_rstd(exact, 0.0, shared, thread, group, count, inverse, eps)

    @device
    def refined(words, row, steps, shared, thread, group, limit, count, inverse, scale, eps, mean):
        total, squares = 0.0, 0.0
        for k in range(steps):
            at, j = fetch(words, row, k, thread, limit)
            if j < limit:
                for i in range(chunk):
                    d = exact_value(words, at, i) * scale
                    if centered:
                        d = d - mean
                    if not whole and j + i >= limit:
                        d = 0.0
                    if centered:
                        total = total + d
                    squares = fma(d, d, squares)
        if not centered:
            r, variance = reduce_rstd(squares, 0.0, shared, thread, group, count, inverse, eps)
            return 0.0, 0.0, r, variance
        total, squares = reduce_two(total, squares, shared, thread, group, count, inverse, eps)
        more = total * inverse
        high = mean + more
        variance = fma(-total, more, squares) * inverse + eps
        return high, (mean - high) + more, reciprocal_root(variance), variance

    @device
    def largest(words, row, steps, shared, thread, group, limit, count, inverse):
        values = cuda.local.array(chunk, kind)
        most = zero
        for k in range(steps):
            at, j = fetch(words, row, k, thread, limit)
            if j < limit:
                scaled(words, at, values, one_number)
                for i in range(chunk):
                    most = max(most, abs(values[i]))
        most, _ = reduce_largest(np.float64(most), 0.0, shared, thread, group, count, inverse, 0.0)
        return most

    return Statistics(mean, rstd, refined, largest)
