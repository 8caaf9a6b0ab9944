"""Chunks of elements: from memory to words, from words to numbers, and back."""

from typing import Any, NamedTuple

import numpy as np
from numba import cuda

from . import vectors
from .table import CHUNK, HALVES, SIZES, WHOLE
from .vectors import as_double, as_float, as_word, device, double_words, load2, store2, to_odd

try:
    from numba.cuda.types import float32, float64, uint32
except ImportError:
    from numba.core.types import float32, float64, uint32

TYPES = {np.float32: float32, np.float64: float64}

LOW = {"float16": vectors.low_half, "bfloat16": vectors.low_bfloat}
HIGH = {"float16": vectors.high_half, "bfloat16": vectors.high_bfloat}
PACK = {"float16": vectors.float_to_halves, "bfloat16": vectors.float_to_bfloats}
LOAD = {4: vectors.load4, 8: vectors.load8, 16: vectors.load16}
STORE = {4: vectors.store4, 8: vectors.store8, 16: vectors.store16}


class Elements(NamedTuple):
    """Device functions for the chunks of arrays of one format. An array that is absent has functions that are not
    used."""

    words: int
    """Words of a chunk."""
    load: Any
    """load(words, at, row, j, cols): the chunk at column j of a row, into words[at:]; beyond `cols` zeros."""
    store: Any
    """store(row, j, cols, words, at): the chunk at column j of a row = words[at:]."""
    write: Any
    """write(row, j, cols, numbers): the chunk at column j of a row = numbers, rounded once."""
    number: Any
    """number(words, at, i): element i of a chunk."""
    scaled: Any
    """scaled(words, at, numbers, scale): numbers = a chunk, times a power of two that is 1 for all but extreme rows."""
    put: Any
    """put(words, at, numbers): a chunk of words = numbers, rounded once."""
    rounded: Any
    """rounded(number): as an element would be stored."""


def make_elements(form, chunk, width, number, access=WHOLE):
    """Functions for a format (None as float32), `chunk` elements at a time, accessed `width` at a time, in the
    dtype `number`.

    With width == chunk every chunk that begins in a row ends in it, and nothing is masked. Elements that are not
    accessed whole take a width of 1.
    """
    form = form or "float32"
    size = SIZES[form]
    count = max(1, chunk * size // 4)
    whole = width == chunk
    step = min(width, CHUNK // size)
    narrow = step * size < 4
    half = form in HALVES
    low, high, pack = LOW.get(form), HIGH.get(form), PACK.get(form)
    load_words, store_words, load_half, store_half = accessors(step * size, access)

    if narrow:

        @device
        def load(words, at, row, j, cols):
            for i in range(0, chunk, 2):
                word = np.uint32(0)
                if j + i < cols:
                    word = load_half(row + (j + i) * size)
                if j + i + 1 < cols:
                    word = np.uint32(word | np.uint32(load_half(row + (j + i + 1) * size) << np.uint32(16)))
                words[at + i // 2] = word

        @device
        def store(row, j, cols, words, at):
            for i in range(0, chunk, 2):
                if j + i < cols:
                    store_half(row + (j + i) * size, words[at + i // 2])
                if j + i + 1 < cols:
                    store_half(row + (j + i + 1) * size, np.uint32(words[at + i // 2] >> np.uint32(16)))

    else:

        @device
        def load(words, at, row, j, cols):
            for i in range(0, chunk, step):
                if whole or j + i < cols:
                    load_words(words, at + i * size // 4, row + (j + i) * size)
                else:
                    for word in range(step * size // 4):
                        words[at + i * size // 4 + word] = np.uint32(0)

        @device
        def store(row, j, cols, words, at):
            for i in range(0, chunk, step):
                if whole or j + i < cols:
                    store_words(row + (j + i) * size, words, at + i * size // 4)

    if half and number is np.float64:

        @device
        def packed(first, second):
            return pack(to_odd(first), to_odd(second))

    else:
        packed = pack

    if half:

        @device
        def number_of(words, at, i):
            word = words[at + i // 2]
            return number(low(word)) if i % 2 == 0 else number(high(word))

        @device
        def put(words, at, numbers):
            for i in range(0, chunk, 2):
                words[at + i // 2] = packed(numbers[i], numbers[i + 1])

        @device
        def rounded(value):
            return number(low(packed(value, value)))

    elif form == "float32":

        @device
        def number_of(words, at, i):
            return number(as_float(words[at + i]))

        @device
        def put(words, at, numbers):
            for i in range(chunk):
                words[at + i] = as_word(np.float32(numbers[i]))

        @device
        def rounded(value):
            return number(np.float32(value))

    else:

        @device
        def number_of(words, at, i):
            return number(as_double(words[at + 2 * i], words[at + 2 * i + 1]))

        @device
        def put(words, at, numbers):
            for i in range(chunk):
                low_word, high_word = double_words(np.float64(numbers[i]))
                words[at + 2 * i] = low_word
                words[at + 2 * i + 1] = high_word

        @device
        def rounded(value):
            return value

    one = number(1.0)

    @device
    def scaled(words, at, numbers, scale):
        for i in range(chunk):
            numbers[i] = number_of(words, at, i)
        if scale != one:  # a branch a chunk costs less than a product an element
            for i in range(chunk):
                numbers[i] = numbers[i] * scale

    @device
    def write(row, j, cols, numbers):
        words = cuda.local.array(count, uint32)
        put(words, 0, numbers)
        store(row, j, cols, words, 0)

    return Elements(count, load, store, write, number_of, scaled, put, rounded)


def accessors(size, access):
    """Functions that load and store `size` bytes, and those for 2 bytes."""
    if access == WHOLE:
        return LOAD.get(size), STORE.get(size), load2, store2
    return (
        vectors.make_load(size, access), vectors.make_store(size, access), vectors.make_load2(access),
        vectors.make_store2(access),
    )  # fmt: skip


class Element(NamedTuple):
    """Device functions for single elements of a format."""

    get: Any
    """get(row, j): element j."""
    put: Any
    """put(row, j, value): element j = value, rounded once."""
    rounded: Any
    """rounded(value): as it would be stored."""


def make_element(form, number, access=WHOLE):
    """`Element` of a format (None as float32), accessed so, as numbers of the dtype `number`."""
    form = form or "float32"
    size = SIZES[form]
    half = form in HALVES
    many = make_elements(form, 2 if half else 1, 2 if half else 1, number)
    words, number_of, put_words = many.words, many.number, many.put
    kind = TYPES[number]
    load_words, store_words, load_half, store_half = accessors(size, access)

    @device
    def get(row, j):
        own = cuda.local.array(words, uint32)
        if half:
            own[0] = load_half(row + j * size)
        else:
            load_words(own, 0, row + j * size)
        return number_of(own, 0, 0)

    @device
    def put(row, j, value):
        own = cuda.local.array(words, uint32)
        numbers = cuda.local.array(2, kind)
        numbers[0] = value
        numbers[1] = value
        put_words(own, 0, numbers)
        if half:
            store_half(row + j * size, own[0])
        else:
            store_words(row + j * size, own, 0)

    return Element(get, put, many.rounded)


@device
def add_exactly(total, error, value):
    """total + value, and error plus what that addition lost (Knuth's two-sum)."""
    result = total + value
    part_of_value = result - total
    lost = (total - (result - part_of_value)) + (value - part_of_value)
    return result, error + lost


@device
def add_closely(total, error, value):
    """`add_exactly` in half the instructions; exact where |total| >= |value|, else no worse than one rounding."""
    result = total + value
    return result, error + (value - (result - total))


@device
def known_sum(total, error):
    """total + error; NaN where an addition on the way to a finite total overflowed, and its error is not known."""
    return total + error if abs(total) < np.inf else total


@device
def compensated(total, error):
    """total + error; an infinite total leaves a NaN as its error."""
    return total + error if error == error else total
