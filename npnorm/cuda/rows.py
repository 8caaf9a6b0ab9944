"""One row: sums over the threads that share it, and its statistics."""

import numpy as np
from numba import cuda

from .elements import TYPES, add_exactly, compensated
from .table import WARP
from .vectors import any_lane, as_double, device, double_words, fma, reciprocal_root, shuffle

LIMIT, LIMIT_DOUBLE = 2.0**90, 2.0**900
"""Rows whose var + eps lies between 1/limit and limit are ordinary: no square overflows or vanishes. The others, of
extreme size, are done again, times a power of two that brings their largest element near 1."""

LEAST_EXPONENT, MOST_EXPONENT, MOST_EXPONENT_DOUBLE = -126, 110, 1000
"""Between the first two lies the exponent of that power of two; in float64, between minus the third and the third."""

LARGEST_FACTOR, LARGEST_FACTOR_DOUBLE = 2.0**100, 2.0**500
"""The rstd of a scaled row is less, or the row is constant: then its differences are 0, and must not meet infinity."""


# Sums over the threads of a row


@device
def one(a, b, a_2, b_2):
    """One sum; b is not used."""
    return a + a_2, b


@device
def two(a, b, a_2, b_2):
    """Two sums at once."""
    return a + a_2, b + b_2


@device
def pair(a, b, a_2, b_2):
    """The sum of two compensated sums: b and b_2 are what a and a_2 have lost."""
    total, lost = add_exactly(a, 0.0, a_2)
    return total, (b + b_2) + lost


@device
def larger(a, b, a_2, b_2):
    """The larger one; b is not used."""
    return max(a, a_2), b


@device
def as_they_are(a, b, count, inverse, eps):
    return a, b


def make_reduce(threads, rows, combine, finish=as_they_are):
    """A function that combines the float64 values a and b of all threads of a row, in an order fixed by `threads`.

    Lanes of one warp exchange values. In more warps the first one takes the values of all, then the result is read
    by all:
    that costs the others hardly an instruction. `finish` is applied to the result by those who have it first.
    `shared` has
    `table.exchange_size` float64; its parts for values and for the result are apart, so that the next reduction may
    follow at once.
    """
    second = combine is two or combine is pair
    warps = threads // WARP

    @device
    def in_warp(a, b, lanes):
        step = lanes // 2
        while step > 0:
            other, other_b = shuffle(a, step), b
            if second:
                other_b = shuffle(b, step)
            a, b = combine(a, b, other, other_b)
            step //= 2
        return a, b

    if threads <= WARP:

        @device
        def reduce(a, b, shared, thread, group, count, inverse, eps):
            a, b = in_warp(a, b, threads)
            return finish(a, b, count, inverse, eps)

        return reduce

    @device
    def reduce(a, b, shared, thread, group, count, inverse, eps):
        # Indices without a sign: Numba looks whether the others are negative.
        own = np.uint32(group * 2 * threads + thread)
        result = np.uint32(2 * threads * rows + 2 * group)
        shared[own] = a
        if second:
            shared[own + np.uint32(threads)] = b
        cuda.syncthreads()
        if thread < WARP:
            for warp in range(1, warps):
                i = own + np.uint32(WARP * warp)
                other, other_b = shared[i], b
                if second:
                    other_b = shared[i + np.uint32(threads)]
                a, b = combine(a, b, other, other_b)
            a, b = in_warp(a, b, WARP)
            a, b = finish(a, b, count, inverse, eps)
            if thread == 0:
                shared[result] = a
                shared[result + np.uint32(1)] = b
        cuda.syncthreads()
        return shared[result], shared[result + np.uint32(1)]

    return reduce


def make_anyone(threads, rows):
    """A function that tells whether a flag is True for any of the rows whose threads go the same way through a
    kernel."""
    if threads <= WARP:
        return any_lane
    if rows == 1:

        @device
        def anyone(flag):
            return flag

    else:

        @device
        def anyone(flag):
            return cuda.syncthreads_or(np.int32(1 if flag else 0)) != 0

    return anyone


# Statistics


@device
def divided(total, count, inverse):
    """total / count, rounded once, where inverse is 1 / count."""
    quotient = total * inverse
    rest = fma(-quotient, count, total)
    return fma(rest, inverse, quotient) if rest == rest else quotient


@device
def mean_of_pair(total, error, count, inverse, eps):
    """The mean as a pair, from a compensated sum."""
    mean = divided(compensated(total, error), count, inverse)
    low = (fma(-mean, count, total) + error) * inverse
    return mean, low if low == low else 0.0


@device
def mean_of_sum(total, error, count, inverse, eps):
    """The mean, from a sum."""
    return divided(total, count, inverse), 0.0


@device
def rstd_of_squares(squares, error, count, inverse, eps):
    """rstd and var + eps, from a sum of squares."""
    variance = compensated(squares, error) * inverse + eps
    return reciprocal_root(variance), variance


@device
def exponent_of(number):
    """e of a float64 ±2^e·1.…; -1023 for zero and subnormal numbers, 1024 for infinity and NaN."""
    _, high = double_words(number)
    return np.int64((high >> np.uint32(20)) & np.uint32(0x7FF)) - 1023


@device
def power_of_two(exponent):
    """2^exponent, a normal float64."""
    return as_double(np.uint32(0), np.uint32((exponent + 1023) << 20))


@device
def finite_factor(rstd, finite, largest):
    """The rstd of a scaled row; if it should be `finite`, one by which 0 can be multiplied."""
    return largest if finite and rstd > largest else rstd


@device
def is_ordinary(variance, limit):
    """Whether squares neither overflow nor vanish. False for NaN."""
    return 1.0 / limit < variance and variance < limit


def make_moderate(number):
    """A function moderate(exponent) -> such that a number of that dtype times 2^exponent may stand between sums."""
    least, most = LEAST_EXPONENT, MOST_EXPONENT
    if number is np.float64:
        least, most = -MOST_EXPONENT_DOUBLE, MOST_EXPONENT_DOUBLE

    @device
    def moderate(exponent):
        return max(least, min(most, exponent))

    return moderate


def make_chunk_sums(chunk, number, plainly):
    """Functions that add up a chunk: to the pair (total, error), its elements, or the products of two chunks.

    Elements are added exactly; `plainly` adds those of a chunk as they are, for float16 and for gradients of half
    precision, where next to nothing is lost of 8 of them in float32. bfloat16 reaches farther: where large numbers of
    a row cancel each other, what is lost shows in those below 2^-15 of its deviation.
    """
    half, kind = chunk // 2, TYPES[number]

    @device
    def tree(t):
        """The sum of chunk/2 numbers."""
        if half == 4:
            return (t[0] + t[2]) + (t[1] + t[3])
        if half == 2:
            return t[0] + t[1]
        return t[0]

    @device
    def add_elements(total, error, values):
        if plainly:
            sums = cuda.local.array(half, kind)
            for i in range(half):
                sums[i] = values[i] + values[i + half]
            total, error = add_exactly(total, error, tree(sums))
        else:
            for i in range(chunk):
                total, error = add_exactly(total, error, values[i])
        return total, error

    @device
    def add_products(total, error, a, b):
        sums = cuda.local.array(half, kind)
        for i in range(half):
            sums[i] = fma(a[i + half], b[i + half], a[i] * b[i])
        return add_exactly(total, error, tree(sums))

    return add_elements, add_products
