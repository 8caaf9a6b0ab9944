"""The forward kernel: one body for every format, option and width of row."""

import math

import numpy as np
from numba import cuda

from .addresses import make_place, make_row_start
from .elements import HALVES, TYPES, make_element, make_elements
from .rows import (
    LARGEST_FACTOR,
    LARGEST_FACTOR_DOUBLE,
    LIMIT,
    LIMIT_DOUBLE,
    exponent_of,
    finite_factor,
    is_ordinary,
    make_anyone,
    make_moderate,
    power_of_two,
)
from .statistics import make_source, make_statistics
from .table import SIZES, exchange_size
from .vectors import device, fma, reciprocal_root

try:
    from numba.cuda.types import float64, uint32
except ImportError:
    from numba.core.types import float64, uint32

AHEAD = 64
"""Bytes of weight and bias that a thread reads along with x, before the row is summed up; if there are more, or
statistics in float64 want the registers, it reads them chunk by chunk when it needs them."""


def make_read(spec):
    """A function that reads a row, adds the residual, and keeps the sum where passes over the row find it."""
    plan, chunk, threads = spec.plan, spec.chunk, spec.threads
    registers, shared, added = spec.mode == "registers", spec.mode == "shared", plan.other is not None
    # A half-precision x and another format are added in float64, so that the sum is rounded once.
    wide = (
        np.float64 if "float64" in (plan.x, plan.other) or (plan.x in HALVES and plan.other != plan.x) else np.float32
    )
    kind = TYPES[wide]
    x_elements, residual_elements, total_elements, _ = (
        make_elements(form, chunk, spec.width, wide, access)
        for form, access in zip((plan.x, plan.other, plan.x, None), spec.access, strict=True)
    )
    residual_words = residual_elements.words
    load, number, put, store = x_elements.load, x_elements.number, x_elements.put, total_elements.store
    load_residual, residual_number = residual_elements.load, residual_elements.number

    @device
    def add(words, at, residual_row, total_row, j, limit):
        """words[at:] = x + residual, rounded to x's format, and stored."""
        others = cuda.local.array(residual_words, uint32)
        sums = cuda.local.array(chunk, kind)
        load_residual(others, 0, residual_row, j, limit)
        for i in range(chunk):
            sums[i] = number(words, at, i) + residual_number(others, 0, i)
        put(words, at, sums)
        store(total_row, j, limit, words, at)

    @device
    def read(words, x_row, residual_row, total_row, steps, thread, limit):
        for k in range(steps):
            at = 4 * k if registers else 0
            j = (k * threads + thread) * chunk
            if j < limit and (registers or shared or added):
                load(words, at, x_row, j, limit)
                if added:
                    add(words, at, residual_row, total_row, j, limit)
                if shared:
                    staged = cuda.shared.array(0, uint32)
                    for word in range(4):
                        staged[(4 * k + word) * threads + thread] = words[word]

    return read


def make_write(spec, number):
    """A function that writes y = x̂·weight + bias, x̂ = ((x·scale - high) - low)·rstd, in the dtype `number`."""
    plan, chunk = spec.plan, spec.chunk
    centered, rounding, offset = plan.centered, plan.rounding, spec.offset
    weighted, biased = plan.weight is not None, plan.bias is not None
    ahead = reads_ahead(spec)
    fetch = make_source(spec)
    x_elements = make_elements(plan.x, chunk, spec.width, number)
    scaled, rounded = x_elements.scaled, x_elements.rounded
    weight_elements = make_elements(plan.weight, chunk, spec.width, number)
    bias_elements = make_elements(plan.bias, chunk, spec.width, number)
    weight_words, bias_words = weight_elements.words, bias_elements.words
    load_weight, weight_of = weight_elements.load, weight_elements.number
    load_bias, bias_of = bias_elements.load, bias_elements.number
    write_chunk = make_elements(plan.out, chunk, spec.width, number, spec.access[3]).write
    kind = TYPES[number]

    @device
    def write(
        words, weights, biases, row, weight, bias, y_row, steps, thread, limit, scale, high, low, rstd, weight_offset
    ):  # fmt: skip
        first, second, factor = number(high), number(low), number(rstd)
        more = number(weight_offset)
        numbers = cuda.local.array(chunk, kind)
        for k in range(steps):
            at, j = fetch(words, row, k, thread, limit)
            weight_at, bias_at = 0, 0
            if ahead:
                weight_at, bias_at = weight_words * k, bias_words * k
            if j < limit:
                if weighted and not ahead:
                    load_weight(weights, 0, weight, j, limit)
                if biased and not ahead:
                    load_bias(biases, 0, bias, j, limit)
                scaled(words, at, numbers, number(scale))
                for i in range(chunk):
                    d = numbers[i]
                    if centered:
                        d = (d - first) - second
                    d = d * factor
                    if rounding:
                        d = rounded(d)
                    if weighted:
                        w = weight_of(weights, weight_at, i)
                        if offset:
                            w = w + more
                        d = fma(d, w, bias_of(biases, bias_at, i)) if biased else d * w
                    elif biased:
                        d = d + bias_of(biases, bias_at, i)
                    numbers[i] = d
                write_chunk(y_row, j, limit, numbers)

    return write


def reads_ahead(spec):
    """Whether weight and bias are read along with x, and stay in registers."""
    size = sum(SIZES[form] for form in (spec.plan.weight, spec.plan.bias) if form)
    fitting = spec.plan.rstd is None and spec.vectors * spec.chunk * size <= AHEAD
    return spec.mode == "registers" and fitting


def make_forward(spec):
    """The forward kernel of a spec."""
    plan, chunk, threads, together = spec.plan, spec.chunk, spec.threads, spec.rows
    registers, ahead = spec.mode == "registers", reads_ahead(spec)
    vectors = max(1, spec.vectors)
    held = vectors if ahead else 1
    weighted, biased, added, written = (given is not None for given in (plan.weight, plan.bias, plan.other, plan.out))
    x_double = plan.x == "float64"
    keep_rstd, keep_mean = plan.rstd is not None, plan.mean is not None
    double = plan.double
    number = np.float64 if double else np.float32
    # The numbers x and the sums over it are in; y may need better statistics than float32 sums give.
    sums = np.float64 if x_double else np.float32
    refining = not x_double and (plan.double or (plan.x in HALVES and plan.out == "float32"))
    refined = not x_double and (keep_rstd or refining)
    direct = written and not refining or x_double
    limit_of_variance, largest_factor = (LIMIT_DOUBLE, LARGEST_FACTOR_DOUBLE) if double else (LIMIT, LARGEST_FACTOR)
    moderate = make_moderate(sums)
    read, write = make_read(spec), make_write(spec, number)
    find_mean, find_rstd, refine, find_largest = make_statistics(spec, sums)
    put_statistic = make_element("float64", np.float64).put
    anyone = make_anyone(threads, together)
    weight_elements = make_elements(plan.weight, chunk, spec.width, number)
    bias_elements = make_elements(plan.bias, chunk, spec.width, number)
    load_weight, load_bias = weight_elements.load, bias_elements.load
    weight_words, bias_words = weight_elements.words, bias_elements.words
    shared_size = exchange_size(threads, together)
    word_count, weight_count, bias_count = 4 * vectors, weight_words * held, bias_words * held
    find_place, row_start = make_place(spec.lead), make_row_start(spec.lead)
    x_unit, residual_unit, total_unit, y_unit = spec.units(plan.x, plan.other, plan.x, plan.out)

    def forward(
        x, residual, weight, bias, residual_out, y, mean, rstd, rows, cols, lengths,
        x_strides, residual_strides, residual_out_strides, y_strides, eps, weight_offset,
    ):  # fmt: skip
        """y = (x - mean)·rstd·weight + bias, rstd = 1/sqrt(var + eps); x is x + residual if any."""
        words = cuda.local.array(word_count, uint32)
        weights = cuda.local.array(weight_count, uint32)
        biases = cuda.local.array(bias_count, uint32)
        shared = cuda.shared.array(shared_size, float64)
        thread, group = np.int64(cuda.threadIdx.x), 0
        if together > 1:
            group = thread // threads
            thread = thread % threads
        count = np.float64(cols)
        inverse = 1.0 / count
        chunks = (cols + chunk - 1) // chunk
        many = (chunks - thread + threads - 1) // threads
        steps = vectors if registers else many
        base = np.int64(cuda.blockIdx.x) * together
        while base < rows:
            row = base + group
            active = row < rows
            row = min(row, rows - 1)
            limit = cols if active else 0
            place = find_place(row, lengths)
            x_row = row_start(x, place, x_strides, x_unit)
            residual_row, total_row, y_row = x_row, x_row, x_row
            if added:
                residual_row = row_start(residual, place, residual_strides, residual_unit)
                total_row = row_start(residual_out, place, residual_out_strides, total_unit)
            if written:
                y_row = row_start(y, place, y_strides, y_unit)
            read(words, x_row, residual_row, total_row, steps, thread, limit)
            if ahead and written:
                for k in range(vectors):
                    j = (k * threads + thread) * chunk
                    if j < limit:
                        if weighted:
                            load_weight(weights, weight_words * k, weight, j, limit)
                        if biased:
                            load_bias(biases, bias_words * k, bias, j, limit)

            scale, inverse_scale, first, again = 1.0, 1.0, True, True
            high, low, r, variance, kept_mean, kept_rstd = 0.0, 0.0, 0.0, 0.0, 0.0, 0.0
            while again:
                floor = eps * scale * scale
                high, low = find_mean(words, total_row, steps, shared, thread, group, limit, count, inverse, scale)
                ordinary = high - high == 0.0
                if direct:
                    r, variance = find_rstd(
                        words, total_row, steps, shared, thread, group, limit, count, inverse, scale, floor, high, low
                    )  # fmt: skip
                    ordinary = is_ordinary(variance, limit_of_variance)
                kept_mean, kept_rstd = high, r
                if refined:
                    kept_mean, rest, kept_rstd, variance = refine(
                        words, total_row, steps, shared, thread, group, limit, count, inverse, scale, floor, high
                    )  # fmt: skip
                    if refining:
                        high, low, r = kept_mean, rest, kept_rstd
                        if not double:
                            low = (high - np.float64(np.float32(high))) + low
                            ordinary = is_ordinary(variance, limit_of_variance)
                again = first and anyone(active and not ordinary)
                first = False
                if again:
                    most = find_largest(words, total_row, steps, shared, thread, group, limit, count, inverse)
                    if not ordinary:
                        exponent = moderate(-exponent_of(max(most, math.sqrt(eps))))
                        scale, inverse_scale = power_of_two(exponent), power_of_two(-exponent)
            if keep_rstd and active and thread == 0:
                # The scaled eps of a constant row may vanish.
                constant = variance == eps * scale * scale
                put_statistic(rstd, row, reciprocal_root(eps) if constant else kept_rstd * scale)
                if keep_mean:
                    put_statistic(mean, row, kept_mean * inverse_scale)
            if written:
                write(
                    words, weights, biases, total_row, weight, bias, y_row, steps, thread, limit,
                    scale, high, low, finite_factor(r, eps > 0.0, largest_factor), weight_offset,
                )  # fmt: skip
            base += np.int64(cuda.gridDim.x) * together

    return forward
