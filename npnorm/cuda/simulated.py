"""Twins of `vectors` for Numba's simulator: plain Python that checks every access.

Addresses are those of NumPy arrays that are held in `MEMORY`; an access outside of them, or at an address that is no
multiple of its size, is an error, and so is a second store at an address: which of two threads comes last is chance on
a GPU. What needs other lanes is given by whoever runs a kernel, in `lanes`.
"""

import math
from fractions import Fraction

import numpy as np

from .table import SWAPPED, WHOLE

MEMORY: dict[int, np.ndarray] = {}
"""Arrays of bytes that kernels may touch, by address."""

WRITTEN: dict[int, np.ndarray] = {}
"""Which of their bytes have been written; whoever runs a kernel clears it before."""

lanes = None
"""An object with `shuffle(value, lanes)` and `any_lane(flag)`."""


def held(array):
    """The address of an array that kernels may touch: its own memory and nothing around it."""
    flat = array.reshape(-1).view(np.uint8)
    MEMORY[flat.ctypes.data] = flat
    return flat.ctypes.data


def _find(address, size, access=WHOLE):
    if access == WHOLE and address % size:
        raise AssertionError(f"an access of {size} bytes at {address:#x}")
    for start, memory in MEMORY.items():
        if start <= address and address + size <= start + memory.size:
            return start, slice(address - start, address - start + size)
    raise AssertionError(f"an access of {size} bytes outside of every array")


def _bytes(address, size, access):
    start, place = _find(address, size, access)
    return _ordered(MEMORY[start][place], access)


def _ordered(memory, access):
    return memory[::-1] if access == SWAPPED else memory


def _bytes_once(address, size, access):
    start, place = _find(address, size, access)
    written = WRITTEN.setdefault(start, np.zeros(MEMORY[start].size, bool))
    if written[place].any():
        raise AssertionError(f"{size} bytes at {address:#x} are written twice")
    written[place] = True
    return _ordered(MEMORY[start][place], access)


def make_load(size, access=WHOLE):
    def load(words, at, address):
        words[at : at + size // 4] = np.frombuffer(_bytes(address, size, access).tobytes(), np.uint32)

    return load


def make_store(size, access=WHOLE):
    def store(address, words, at):
        _bytes_once(address, size, access)[:] = words[at : at + size // 4].view(np.uint8)

    return store


def make_load2(access=WHOLE):
    def load(address):
        return np.uint32(int.from_bytes(_bytes(address, 2, access).tobytes(), "little"))

    return load


def make_store2(access=WHOLE):
    def store(address, word):
        _bytes_once(address, 2, access)[:] = int(word) & 0xFF, int(word) >> 8 & 0xFF

    return store


load2, load4, load8, load16 = make_load2(), *map(make_load, (4, 8, 16))
store2, store4, store8, store16 = make_store2(), *map(make_store, (4, 8, 16))


def prefetch(address):
    _find(address, 1)


def as_float(word):
    return np.uint32(word).view(np.float32)


def as_word(number):
    return np.float32(number).view(np.uint32)


def low_half(word):
    return np.float32(np.uint16(int(word) & 0xFFFF).view(np.float16))


def high_half(word):
    return low_half(int(word) >> 16)


def low_bfloat(word):
    return np.uint32((int(word) & 0xFFFF) << 16).view(np.float32)


def high_bfloat(word):
    return np.uint32(int(word) & 0xFFFF0000).view(np.float32)


def float_to_halves(low, high):
    low, high = (int(np.float16(number).view(np.uint16)) for number in (low, high))
    return np.uint32(low | high << 16)


def _bfloat_bits(number):
    bits = int(as_word(number))
    if number != number:
        return 0x7FFF
    return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16


def float_to_bfloats(low, high):
    return np.uint32(_bfloat_bits(low) | _bfloat_bits(high) << 16)


def as_double(low, high):
    return np.uint64(int(low) | int(high) << 32).view(np.float64)


def double_words(number):
    bits = int(np.float64(number).view(np.uint64))
    return np.uint32(bits & 0xFFFFFFFF), np.uint32(bits >> 32)


def fma(a, b, c):
    """Rounded once: by float64, which holds products of float32, or by fractions."""
    if isinstance(a, np.float32):
        return np.float32(np.float64(a) * np.float64(b) + np.float64(c))
    if not (math.isfinite(a) and math.isfinite(b) and math.isfinite(c)):
        return np.float64(a) * b + c
    exact = Fraction(float(a)) * Fraction(float(b)) + Fraction(float(c))
    try:
        return np.float64(float(exact)) if exact else np.float64(a) * b + c
    except OverflowError:
        return np.float64(math.inf if exact > 0 else -math.inf)


def reciprocal_root(number):
    return np.float64(1.0) / np.sqrt(np.float64(number))


def shuffle(value, mask):
    return lanes.shuffle(value, mask)


def any_lane(flag):
    return lanes.any_lane(flag)
