"""The checks of single arguments, and their messages."""

import math
import operator
import sys
from collections.abc import Sequence
from numbers import Real
from typing import Any

import numpy as np

from ._results import Checked

FORMATS: dict[np.dtype[Any], str] = {
    np.dtype(order + code): name
    for code, name in (("f2", "float16"), ("f4", "float32"), ("f8", "float64"))
    for order in "<>"
}
"""The supported dtypes that NumPy itself has, in either byte order; bfloat16 is added when it is first met."""


def format_of(dtype: np.dtype[Any]) -> str | None:
    """The name of a supported dtype, or None."""
    name = FORMATS.get(dtype)
    if name is None and dtype.name == "bfloat16" and dtype.itemsize == 2:
        FORMATS[dtype] = name = "bfloat16"
    return name


def shown(value: Any) -> str:
    """A value as messages show it: in a few words, if it is more than those."""
    if isinstance(value, np.ndarray):
        return f"an array of shape {value.shape} and dtype {value.dtype}"
    if type(value) is tuple and 1 < len(value) < 9:
        return f"({', '.join(map(shown, value))})"
    text = repr(value)
    return text if len(text) < 200 and "\n" not in text else f"an object of type {type(value).__name__}"


def checked_array(name: str, value: Any) -> tuple[Checked, str]:
    """The value as a plain NumPy array of a supported dtype, not copied if it is an array, and its format.

    What lies on a CUDA device comes as a `DeviceArray` of the same memory.
    """
    if type(value) is not np.ndarray:
        value = device_array(name, value) or _host_array(name, value)
    found = format_of(value.dtype)
    if found is None:
        remedy = f"write np.asarray({name}).astype(np.float32)"
        if value.dtype.kind == "c":
            remedy = "norm its real and imaginary parts, or its absolute value"
        elif type(value) is not np.ndarray:
            remedy = "cast it to one of them"
        raise TypeError(
            f"`{name}` must have dtype float16, bfloat16, float32 or float64; got {value.dtype}: {remedy}"
        )
    return value, found


def _host_array(name: str, value: Any) -> Checked:
    if _is_masked(value):
        raise TypeError(
            f"`{name}` must not be a masked array, since its mask would be ignored; got "
            f"{type(value).__name__}: write {name}.filled(0) or {name}.data"
        )
    try:
        return np.asarray(value)
    except ValueError as error:
        raise ValueError(f"`{name}` must be an array or nested sequences of equal lengths; got {error}") from None


def device_array(name: str, value: Any) -> Checked | None:
    """The `DeviceArray` of an array on a CUDA device; None for all that is not on one."""
    # The type is asked first: a torch tensor that requires a gradient raises RuntimeError for its interface.
    if value is None or isinstance(value, np.ndarray):
        return None
    if not (hasattr(type(value), "__dlpack_device__") or hasattr(value, "__cuda_array_interface__")):
        return None
    from .cuda.arrays import device_array

    return device_array(name, value)


def _is_masked(value: Any) -> bool:
    masked = sys.modules.get("numpy.ma")  # not imported: there are no masked arrays
    return masked is not None and isinstance(value, masked.MaskedArray)


def is_dask(value: Any) -> bool:
    """Whether it is a Dask array, of which there are none before Dask is imported."""
    return isinstance(value, getattr(sys.modules.get("dask.array"), "Array", ()))


def trailing_axes(axis: Any, ndim: int) -> int:
    """How many trailing axes `axis` names."""
    if type(axis) is int and axis == -1 and ndim:
        return 1
    axes = axis if isinstance(axis, Sequence) and not isinstance(axis, str) else (axis,)
    try:
        numbers = [_index(a) for a in axes]
    except TypeError:
        raise TypeError(f"`axis` must be an int or a tuple of ints; got {shown(axis)}") from None
    if not numbers:
        raise ValueError("`axis` must name at least one axis; got ()")
    for number in numbers:
        if not -ndim <= number < ndim:
            raise np.exceptions.AxisError(number, ndim, "`axis` of `x`")
    named = sorted(number % ndim for number in numbers)
    if len(set(named)) != len(named):
        raise ValueError(f"`axis` must not name an axis twice; got {shown(axis)} for a {ndim}-d `x`")
    if named != list(range(ndim - len(named), ndim)):
        raise ValueError(
            f"`axis` must name the trailing axes of `x`; got {shown(axis)} for a {ndim}-d `x`: move them to the end "
            f"with np.moveaxis(x, {tuple(named)}, {tuple(range(-len(named), 0))}), and y back"
        )
    return len(named)


def _index(number: Any) -> int:
    """An integer, which True is not."""
    if isinstance(number, bool | np.bool_):
        raise TypeError
    return operator.index(number)


def checked_normalized_shape(shape: Any) -> tuple[int, ...]:
    """A layer's `normalized_shape` as a tuple."""
    rule = "`normalized_shape` must be an int or a tuple of ints, the lengths of the trailing axes"
    lengths = shape if isinstance(shape, Sequence) and not isinstance(shape, str) else (shape,)
    try:
        numbers = tuple(_index(length) for length in lengths)
    except TypeError:
        raise TypeError(f"{rule}; got {shown(shape)}") from None
    if not numbers or min(numbers) < 0:
        raise ValueError(f"{rule}, at least one and none negative; got {shown(shape)}")
    return numbers


def checked_parameter_dtype(dtype: Any) -> np.dtype[Any]:
    """A layer's dtype."""
    found: np.dtype[Any] = np.dtype(dtype)
    if format_of(found) is None:
        raise TypeError(f"`dtype` must be float16, bfloat16, float32 or float64; got {found}")
    return found


def check_layer_input(x: Any, shape: tuple[int, ...]) -> None:
    """Whether the trailing axes of a layer's input are its `normalized_shape`."""
    got = x.shape if type(x) is np.ndarray or is_dask(x) else checked_array("x", x)[0].shape
    if not got:
        raise np.exceptions.AxisError(-len(shape), 0, "`axis` of `x`")
    if got[len(got) - len(shape) :] != shape or len(got) < len(shape):
        raise ValueError(
            f"`x` must end in the axes {shape}, the layer's `normalized_shape`; got shape {got}"
        )


def checked_parameter(
    name: str, value: Any, shape: tuple[int, ...]
) -> tuple[Checked | None, str | None]:
    if value is None:
        return None, None
    value, found = checked_array(name, value)
    check_shape(name, value, shape, "the shape of the normalized axes of `x`")
    return value, found


def compute_format(double: bool) -> str:
    return "float64" if double else "float32"


def check_shape(name: str, array: Checked, shape: tuple[int, ...], rule: str) -> None:
    if array.shape != shape:
        raise ValueError(f"`{name}` must have shape {shape}, {rule}; got {array.shape}")


def checked_number(name: str, value: Any, rule: str) -> float:
    if type(value) is float:
        return value
    if isinstance(value, bool | np.bool_) or not isinstance(value, Real):
        raise TypeError(f"`{name}` must be {rule}; got {shown(value)}")
    try:
        return float(value)
    except OverflowError:
        raise ValueError(f"`{name}` must be {rule}; got {shown(value)}") from None


def checked_eps(eps: Any, centered: bool, x_format: str) -> float:
    """eps as a number; for None, forward and backward alike, the machine epsilon of x's compute dtype."""
    rule = "a finite real number that is not negative"
    if eps is None and not centered:
        return float(np.finfo(np.float64 if x_format == "float64" else np.float32).eps)
    number = checked_number("eps", eps, rule)
    if not 0.0 <= number < math.inf:
        raise ValueError(f"`eps` must be {rule}; got {shown(eps)}")
    return number


def checked_offset(offset: Any, weight: Checked | None) -> float:
    number = checked_number("weight_offset", offset, "a finite real number")
    if not math.isfinite(number):
        raise ValueError(f"`weight_offset` must be a finite real number; got {shown(offset)}")
    if number and weight is None:
        raise ValueError(
            f"`weight_offset` is added to `weight`, which is None; got {shown(offset)}: pass a weight of zeros"
        )
    return number


def checked_output(name: str, array: Any, shape: tuple[int, ...]) -> tuple[Checked, str]:
    """An output as a plain NumPy array, or a `DeviceArray`, of the same memory, and its format."""
    device = None if type(array) is np.ndarray else device_array(name, array)
    if device is not None:
        array = device
    elif not isinstance(array, np.ndarray) or _is_masked(array):
        raise TypeError(f"`{name}` must be a NumPy array; got {type(array).__name__}")
    found = format_of(array.dtype)
    if found is None:
        raise ValueError(
            f"`{name}` must have dtype float16, bfloat16, float32 or float64; got {array.dtype}"
        )
    check_shape(name, array, shape, "the shape of the result")
    if not array.flags.writeable:
        raise ValueError(f"`{name}` must be writable; got a read-only array: pass a copy of it")
    if not array.flags.c_contiguous and _repeats_elements(array):
        raise ValueError(
            f"`{name}` must not repeat its own elements; got strides {array.strides}: pass a copy of it"
        )
    return device or np.asarray(array), found


def _repeats_elements(array: Checked) -> bool:
    """Whether elements of an array may share memory with each other, as no slice of an array's do."""
    reach = array.itemsize
    for step, length in sorted(zip(map(abs, array.strides), array.shape, strict=True)):
        if length > 1:
            if step < reach:
                return True
            reach += step * (length - 1)
    return False


def checked_mask(mask: Any, weight: Checked | None) -> tuple[bool, bool, bool]:
    if mask is None:
        return True, weight is not None, weight is not None
    if not isinstance(mask, Sequence | np.ndarray) or np.ndim(mask) != 1 or len(mask) != 3:
        raise ValueError(
            f"`output_mask` must be three bools, for dx, dweight and dbias; got {shown(mask)}"
        )
    if not all(isinstance(wanted, bool | np.bool_) for wanted in mask):
        raise TypeError(f"`output_mask` must be three bools; got {shown(mask)}")
    return bool(mask[0]), bool(mask[1]), bool(mask[2])


def checked_gradients(
    out: Any, mask: tuple[bool, bool, bool], x_shape: tuple[int, ...], shape: tuple[int, ...]
) -> tuple[tuple[Checked | None, Checked | None, Checked | None], list[str | None]]:
    """The arrays of a backward `out`, and their formats."""
    if out is None:
        return (None, None, None), [None, None, None]
    if not isinstance(out, tuple) or len(out) != 3:
        raise ValueError(
            f"`out` must be a tuple of three arrays or None, for dx, dweight and dbias; got {shown(out)}"
        )
    arrays: list[Checked | None] = [None, None, None]
    formats: list[str | None] = [None, None, None]
    for i, (array, wanted) in enumerate(zip(out, mask, strict=True)):
        if array is None:
            continue
        if not wanted:
            raise ValueError(
                f"`out[{i}]` must be None, since `output_mask[{i}]` is False; got an array: mask it in or pass None"
            )
        arrays[i], formats[i] = checked_output(f"out[{i}]", array, shape if i else x_shape)
    return (arrays[0], arrays[1], arrays[2]), formats


def check_host(arrays: dict[str, Checked | None]) -> None:
    """Whether all arrays are in host memory, as directional derivatives want them."""
    for name, array in arrays.items():
        if array is not None and type(array) is not np.ndarray:
            raise TypeError(
                f"`{name}` must be in host memory, where alone directional derivatives are computed; got an array "
                f"on a CUDA device: copy it to the host"
            )


def check_side(arrays: dict[str, Checked | None], stream: Any) -> None:
    """Whether all arrays are in host memory, or all on one CUDA device."""
    given = {name: array for name, array in arrays.items() if array is not None}
    host = next((name for name, array in given.items() if type(array) is np.ndarray), None)
    device = next((name for name, array in given.items() if type(array) is not np.ndarray), None)
    if host is not None and device is not None:
        raise TypeError(
            f"`{host}` and `{device}` must be on the same side; got `{host}` in host memory and `{device}` on a "
            f"CUDA device: copy one of them to the other side"
        )
    if device is None:
        if stream is not None:
            raise ValueError(f"`stream` must be None for arrays in host memory; got {shown(stream)}: leave it out")
        return
    numbers = {name: array.device for name, array in given.items() if array.device is not None}
    for name, number in numbers.items():
        first = next(iter(numbers))
        if number != numbers[first]:
            raise ValueError(
                f"`{name}` must be on the CUDA device of `{first}`, {numbers[first]}; got device {number}: "
                f"copy it there"
            )


def checked_workspace(workspace: Any, x: Checked) -> Checked | None:
    """Device memory for a backward call's sums. Whether it is large enough, the launch knows."""
    if workspace is None:
        return None
    if type(x) is np.ndarray:
        raise ValueError(
            f"`workspace` must be None for arrays in host memory; got {type(workspace).__name__}: leave it out"
        )
    array = device_array("workspace", workspace)
    rule = "`workspace` must be a contiguous, writable array on the CUDA device, its address a multiple of 16"
    if array is None:
        raise TypeError(f"{rule}; got {type(workspace).__name__}")
    if not (array.flags.c_contiguous and array.flags.writeable) or array.pointer % 16:
        raise ValueError(
            f"{rule}; got strides {array.strides}, {'writable' if array.flags.writeable else 'read-only'}, "
            f"at {array.pointer:#x}: pass a new array of bytes"
        )
    return array


def check_overlap(
    name: str, out: Checked | None, others: dict[str, Checked | None], identical: tuple[str, ...]
) -> None:
    """Refuse an output that overlaps another array, unless it may be, and is, exactly that array."""
    if out is None:
        return
    out = _addresses(out)
    for other_name, other in others.items():
        if other is None or (other is out and other_name in identical):
            continue
        other = _addresses(other)
        if not np.may_share_memory(out, other) or not _shares_memory(out, other):
            continue
        if other_name in identical and _same_memory(out, other):
            continue
        raise ValueError(
            f"`{name}` must not overlap `{other_name}`"
            + (" in part" if other_name in identical else "")
            + f"; got arrays that share memory: pass a copy of `{other_name}` or another output"
        )


EFFORT: Any = 100_000
"""How long NumPy may think about two arrays. (Some versions of its stubs know of two special values alone.)"""


def _addresses(array: Checked) -> Checked:
    """A NumPy array at the addresses of an array, never to be read if they are a device's."""
    return array if type(array) is np.ndarray else array.addresses()


def _shares_memory(a: Checked, b: Checked) -> bool:
    try:
        return np.shares_memory(a, b, max_work=EFFORT)
    except np.exceptions.TooHardError:
        return True


def _same_memory(a: Checked, b: Checked) -> bool:
    here, there = a.__array_interface__["data"][0], b.__array_interface__["data"][0]
    return bool(here == there and a.strides == b.strides and a.itemsize == b.itemsize)
