"""npnorm's functions inside compiled code: the same bits as from Python, whatever array comes; errors; registration.

Each call in CALLS is compiled once, for arrays of any layout, and then meets every shape and layout: a
compilation takes seconds.
"""

import os
import subprocess
import sys
import textwrap
from functools import cache

import numba
import numpy as np
import pytest
from numba import njit, prange, types
from numba.core.errors import TypingError
from table import random
from zoo import LAYOUTS, LEADS, assert_only_written, misaligned, poisoned

import npnorm

WIDTHS = (1, 7, 129, 769, 4097)


def given(kind, ndim, mutable=False):
    return types.Array(getattr(types, kind), ndim, "A", readonly=not mutable)


# Calls: a function of an x, another array of its shape, vectors of its columns, outputs of its shape;
# with the dtypes of these, None for those that are None.
def norm_all(x, other, weight, bias, out):
    return npnorm.layer_norm(x, weight, bias, return_stats=True)


def rms_offset_out(x, other, weight, bias, out):
    return npnorm.rms_norm(x, weight, eps=None, weight_offset=1.0, out=out)


def rms_rounded(x, other, weight, bias, out):
    return npnorm.rms_norm(x, weight, bias, round_before_weight=True, return_stats=True)


def add_layer(x, other, weight, bias, out):
    return npnorm.add_layer_norm(x, other, weight, bias, eps=1e-3, residual_out=out)


def add_rms(x, other, weight, bias, out):
    return npnorm.add_rms_norm(x, other, out=out, return_stats=True)


def gradients(x, other, weight, bias, out):
    return npnorm.layer_norm_backward(other, x, weight, eps=1e-3)


def gradients_saved(x, other, weight, bias, out):
    _, mean, rstd = npnorm.layer_norm(x, return_stats=True)
    return npnorm.layer_norm_backward(
        other, x, mean=mean, rstd=rstd, dresidual=x, output_mask=(True, True, True), out=(out, None, bias)
    )


def rms_gradients(x, other, weight, bias, out):
    return npnorm.rms_norm_backward(other, x, weight, weight_offset=1.0, dresidual=other)


def rms_dweight(x, other, weight, bias, out):
    return npnorm.rms_norm_backward(other, x, weight, output_mask=(False, True, False))


F4, F8 = "float32", "float64"
CALLS = [
    (norm_all, F4, None, F4, F4, None),
    (norm_all, F8, None, F4, None, None),
    (rms_offset_out, F4, None, F4, None, F8),
    (rms_rounded, F4, None, F8, F4, None),
    (add_layer, F4, F4, F4, F4, F4),
    (add_rms, F4, F8, None, None, F4),
    (gradients, F4, F4, F4, None, None),
    (gradients, F8, F8, F8, None, None),
    (gradients_saved, F4, F8, None, F4, F4),
    (rms_gradients, F4, F4, F4, None, None),
    (rms_dweight, F4, F4, F8, None, None),
]


@cache
def compiled(call, x, other, weight, bias, out):
    """The call compiled for 2-d arrays of these dtypes in any layout."""
    writes_bias = call is gradients_saved
    kinds = [
        given(x, 2),
        types.none if other is None else given(other, 2),
        types.none if weight is None else given(weight, 1),
        types.none if bias is None else given(bias, 1, mutable=writes_bias),
        types.none if out is None else given(out, 2, mutable=True),
    ]
    return njit([tuple(kinds)])(call)


def assert_same_bits(got, wanted):
    if not isinstance(wanted, tuple):
        got, wanted = (got,), (wanted,)
    assert type(got) is type(wanted)
    for here, there in zip(got, wanted, strict=True):
        if there is None:
            assert here is None
            continue
        assert here.dtype == there.dtype and here.shape == there.shape
        np.testing.assert_array_equal(here, there)
        np.testing.assert_array_equal(np.signbit(here), np.signbit(there))


def arrays(spec, shape, layout=np.array, scale=1.0):
    """The arguments of a call in CALLS."""
    _, x, other, weight, bias, out = spec
    return (
        layout(random(shape, x, seed=1, scale=scale)),
        None if other is None else layout(random(shape, other, seed=2)),
        None if weight is None else random(2 * shape[-1], weight, seed=3)[::2],
        None if bias is None else random(2 * shape[-1], bias, seed=4)[::2],
        None if out is None else layout(poisoned(shape, out)),
    )


def name_of(spec):
    return "-".join([spec[0].__name__, *(str(dtype) for dtype in spec[1:])])


calls = pytest.mark.parametrize("spec", CALLS, ids=name_of)


@calls
def test_bits_of_all_widths(spec):
    for cols in WIDTHS:
        for rows in (1, 5, 33):
            got, wanted = arrays(spec, (rows, cols)), arrays(spec, (rows, cols))
            assert_same_bits(compiled(*spec)(*got), spec[0](*wanted))
            assert_same_bits(tuple(got), tuple(wanted))


def outputs_may_have(layout):
    """Whether a layout is one of outputs: writable, and no element repeated."""
    return layout.__name__ not in ("read_only", "memory_mapped", "overlapping_windows") and not (
        layout.__name__.startswith("broadcast")
    )


@calls
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_bits_of_all_layouts(spec, layout):
    if "misaligned" in layout.__name__ or layout.__name__ == "subclassed":
        pytest.skip("another type to Numba: below, and none of Numba's")
    if spec[-1] and not outputs_may_have(layout):
        pytest.skip("no layout of outputs")
    got, wanted = arrays(spec, (6, 129), layout), arrays(spec, (6, 129), layout)
    assert_same_bits(compiled(*spec)(*got), spec[0](*wanted))
    assert_same_bits(tuple(got), tuple(wanted))


@calls
def test_rows_of_extreme_size_and_not_finite(spec):
    """Ordinary and extreme rows in turn: the kernels hand over to each other."""

    def data(shape):
        x, *others = arrays(spec, shape)
        largest = np.finfo(x.dtype).max
        for i, scale in enumerate((largest / 8, 1.0, 1.0, largest**-1 * 64, 1.0, 0.0)):
            x[i] *= scale
        x[6, 3], x[8, 2] = np.nan, np.inf
        return x, *others

    assert_same_bits(compiled(*spec)(*data((11, 129))), spec[0](*data((11, 129))))


@calls
@pytest.mark.parametrize("shape", [(0, 5), (3, 0), (0, 0)])
def test_no_rows_or_columns(spec, shape):
    got, wanted = arrays(spec, shape), arrays(spec, shape)
    assert_same_bits(compiled(*spec)(*got), spec[0](*wanted))
    assert_same_bits(tuple(got), tuple(wanted))


@pytest.mark.parametrize("shape", [(700, 769), (5, 70001), (2100, 129)])
def test_sums_of_many_rows(shape):
    """Blocks of rows, and rows that Python gives to threads by ranges of columns."""
    for spec in [spec for spec in CALLS if spec[0] is gradients]:
        assert_same_bits(compiled(*spec)(*arrays(spec, shape)), spec[0](*arrays(spec, shape)))
