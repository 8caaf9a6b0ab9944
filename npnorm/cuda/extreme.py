"""Rows of extreme size, in float64 and one element after another: rare, so the code is small rather than fast.

x of float64 is scaled by a power of two, which is exact, and eps with it; the other formats need no scale in float64.
Elements belong to the same threads as in ordinary rows, and sums are compensated.
"""

import math
from typing import Any, NamedTuple

import numpy as np

from .elements import add_exactly, make_element
from .rows import largest, make_reduce, mean_of_pair, pair, rstd_of_squares
from .vectors import device, reciprocal_root


class Extreme(NamedTuple):
    """Device functions that all threads of a row call together."""

    statistics: Any
    """statistics(row, shared, thread, group, limit, count, inverse, eps) -> scale, high, low, rstd of x·scale."""
    write: Any
    """write(...): y of a forward kernel."""


def make_places(spec):
    """A function place(i, thread) -> the column of a thread's element number i."""
    chunk, threads = spec.chunk, spec.threads

    @device
    def place(i, thread):
        k = i // chunk
        return (k * threads + thread) * chunk + (i - k * chunk)

    return place


def make_extreme(spec):
    """`Extreme` of a forward kernel."""
    plan, threads, rows = spec.plan, spec.threads, spec.rows
    centered, rounding, offset = plan.centered, plan.rounding, spec.offset
    weighted, biased = plan.weight is not None, plan.bias is not None
    scaled = plan.x == "float64"
    place = make_places(spec)
    x_element = make_element(plan.x, np.float64)
    get, rounded = x_element.get, x_element.rounded
    get_weight, get_bias = make_element(plan.weight, np.float64).get, make_element(plan.bias, np.float64).get
    put = make_element(plan.out, np.float64).put
    reduce_mean = make_reduce(threads, rows, pair, mean_of_pair)
    reduce_rstd = make_reduce(threads, rows, pair, rstd_of_squares)
    reduce_largest = make_reduce(threads, rows, largest)
    number = np.float64 if plan.double else np.float32

    @device
    def find_scale(row, own, shared, thread, group, limit, count, inverse, eps):
        most = math.sqrt(eps)
        for i in range(own):
            j = place(i, thread)
            if j < limit:
                most = max(most, abs(get(row, j)))
        most, _ = reduce_largest(most, 0.0, shared, thread, group, count, inverse, eps)
        if most > 0.0 and most < math.inf:
            _, exponent = math.frexp(most)
            return math.ldexp(1.0, max(-1000, min(1000, -exponent)))
        return 1.0

    @device
    def statistics(row, own, shared, thread, group, limit, count, inverse, eps):
        scale, high, low = 1.0, 0.0, 0.0
        if scaled:
            scale = find_scale(row, own, shared, thread, group, limit, count, inverse, eps)
        if centered:
            total, error = 0.0, 0.0
            for i in range(own):
                j = place(i, thread)
                if j < limit:
                    total, error = add_exactly(total, error, get(row, j) * scale)
            high, low = reduce_mean(total, error, shared, thread, group, count, inverse, eps)
        squares, error = 0.0, 0.0
        for i in range(own):
            j = place(i, thread)
            if j < limit:
                d = (get(row, j) * scale - high) - low
                squares, error = add_exactly(squares, error, d * d)
        floor = eps * scale * scale
        rstd, variance = reduce_rstd(squares, error, shared, thread, group, count, inverse, floor)
        if variance == floor:  # a constant row, whose scaled eps may vanish
            return 1.0, high / scale, low / scale, reciprocal_root(eps)
        return scale, high, low, rstd

    @device
    def write(row, y_row, weight, bias, own, thread, limit, scale, high, low, rstd, weight_offset):
        for i in range(own):
            j = place(i, thread)
            if j < limit:
                d = ((get(row, j) * scale - high) - low) * rstd
                if rounding:
                    d = rounded(d)
                if weighted:
                    w = get_weight(weight, j)
                    if offset:
                        w = np.float64(number(w) + number(weight_offset))
                    d = d * w
                if biased:
                    d = d + get_bias(bias, j)
                put(y_row, j, d)

    return Extreme(statistics, write)
