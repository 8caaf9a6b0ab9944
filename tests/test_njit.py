"""npnorm's functions inside compiled code: the same bits as from Python, whatever array comes; errors; registration.

Each call in CALLS is compiled once, for arrays of any layout, and then meets every shape and layout: a
compilation takes seconds.
"""

import configparser
import importlib.metadata
import os
import subprocess
import sys
import textwrap
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from numba import njit, types
from numba.core.errors import TypingError
from numpy.lib.stride_tricks import as_strided
from table import random
from zoo import LAYOUTS, LEADS, assert_only_written, misaligned, poisoned

import npnorm

ROOT = str(Path(npnorm.__file__).parents[1])
npnorm.register_numba()  # another test may have imported npnorm before Numba
WIDTHS = (1, 7, 129, 769, 4097)


def given(kind, ndim, mutable=False):
    return types.Array(getattr(types, kind), ndim, "A", readonly=not mutable)


# Calls: functions of an x, another array of its shape, vectors of its columns, an output of its shape.


def norm_all(x, other, weight, bias, out):
    return npnorm.layer_norm(x, weight, bias, return_stats=True)


def rms_rounded(x, other, weight, bias, out):
    return npnorm.rms_norm(x, weight, bias, round_before_weight=True, return_stats=True)


def rms_offset_out(x, other, weight, bias, out):
    return npnorm.rms_norm(x, weight, eps=None, weight_offset=1.0, out=out)


def add_rms(x, other, weight, bias, out):
    return npnorm.add_rms_norm(x, other, eps=1e-3, residual_out=out, return_stats=True)


def gradients(x, other, weight, bias, out):
    return npnorm.layer_norm_backward(other, x, weight, eps=1e-3, output_mask=(True, True, False))


def gradients_saved(x, other, weight, bias, out):
    mean, rstd = np.full((len(x), 1), 0.25), np.full((len(x), 1), 0.75)  # taken as they are
    return npnorm.layer_norm_backward(
        other, x, mean=mean, rstd=rstd, dresidual=x, output_mask=(True, True, True), out=(out, None, bias)
    )


def rms_gradients(x, other, weight, bias, out):
    return npnorm.rms_norm_backward(other, x, weight, weight_offset=1.0, dresidual=other)


# With their dtypes; None for what is None.
F4, F8 = "float32", "float64"
CALLS = [
    (norm_all, F4, None, F4, F4, None),
    (rms_rounded, F8, None, F4, F4, None),
    (rms_offset_out, F4, None, F8, None, F8),
    (add_rms, F4, F8, None, None, F4),
    (gradients, F8, F8, F8, None, None),
    (gradients_saved, F4, F4, None, F4, F4),
    (rms_gradients, F4, F4, F4, None, None),
]
calls = pytest.mark.parametrize("spec", CALLS, ids=lambda spec: spec[0].__name__)


@cache
def compiled(call, x, other, weight, bias, out):
    """The call compiled for 2-d arrays of these dtypes in any layout."""
    kinds = (
        given(x, 2),
        other and given(other, 2),
        weight and given(weight, 1),
        bias and given(bias, 1, mutable=call is gradients_saved),
        out and given(out, 2, mutable=True),
    )
    return njit([tuple(kind or types.none for kind in kinds)])(call)


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


def arrays(spec, shape, layout=np.array):
    """The arguments of a call in CALLS."""
    _, x, other, weight, bias, out = spec
    return (
        layout(random(shape, x, seed=1)),
        None if other is None else layout(random(shape, other, seed=2)),
        None if weight is None else random(2 * shape[-1], weight, seed=3)[::2],
        None if bias is None else random(2 * shape[-1], bias, seed=4)[::2],
        None if out is None else layout(poisoned(shape, out)),
    )


def with_extreme_rows(x, *others):
    """Ordinary and extreme rows in turn, some not finite: kernels hand over to each other."""
    largest = np.finfo(x.dtype).max
    for i, scale in enumerate((largest / 8, 1.0, 1.0, 64 / largest, 1.0, 0.0)):
        x[i] *= scale
    x[6, 3], x[8, 2] = np.nan, np.inf
    return x, *others


def assert_same_call(spec, got, wanted):
    """The same results, and the same arguments afterwards."""
    assert_same_bits(compiled(*spec)(*got), spec[0](*wanted))
    assert_same_bits(tuple(got), tuple(wanted))


def layouts(spec):
    """The layouts for a call: Numba has a type of its own for misaligned arrays, and none for subclasses."""
    for name, layout in LAYOUTS.items():
        if "misaligned" in name or name == "subclassed":
            continue
        if spec[-1] and name.startswith(("read_only", "memory_mapped", "overlapping", "broadcast")):
            continue  # none for outputs
        yield layout


@calls
def test_same_bits_as_from_python(spec):
    for cols in WIDTHS:
        for rows in (1, 5, 33):
            assert_same_call(spec, arrays(spec, (rows, cols)), arrays(spec, (rows, cols)))
    for layout in layouts(spec):
        got, wanted = (arrays(spec, (6, 129), layout) for _ in range(2))
        assert_same_call(spec, got, wanted)
    assert_same_call(spec, *(with_extreme_rows(*arrays(spec, (11, 129))) for _ in range(2)))
    for shape in ((0, 5), (3, 0), (0, 0)):
        assert_same_call(spec, arrays(spec, shape), arrays(spec, shape))
    if spec[0] in (gradients, rms_gradients):  # blocks of rows; rows that Python cuts by columns
        for shape in ((700, 769), (5, 40000), (2100, 129)):
            assert_same_call(spec, arrays(spec, shape), arrays(spec, shape))


# One function with every argument of the forward functions, for the tests below.


@njit
def add_and_norm(x, residual, weight, bias, eps, offset, out, residual_out):
    return npnorm.add_layer_norm(
        x, residual, weight, bias, eps=eps, weight_offset=offset, out=out, residual_out=residual_out
    )


def arguments(shape=(4, 8)):
    x, residual = random(shape, seed=1), random(shape, seed=2)
    weight, bias = random(shape[-1], seed=3), random(shape[-1], seed=4)
    return [x, residual, weight, bias, 1e-5, 1.0, np.empty_like(x), np.empty_like(x)]


X, RESIDUAL, WEIGHT, BIAS, NUMBER, OFFSET, OUT, RESIDUAL_OUT = range(8)


@pytest.mark.parametrize(
    ("argument", "value", "message"),
    [
        (RESIDUAL, random((4, 7)), "`residual` .* the shape of `x`.*(4, 8).*(4, 7)"),
        (RESIDUAL, random((1, 8)), "`residual` .* the shape of `x`"),
        (WEIGHT, random(7), "`weight` .* the shape of the normalized axes of `x`.*(8,).*(7,)"),
        (BIAS, random(1), "`bias` .* the shape of the normalized axes"),
        (OUT, random((5, 8)), "`out` .* the shape of the result"),
        (RESIDUAL_OUT, random((4, 9)), "`residual_out` .* the shape of the result"),
        (OUT, as_strided(random(64), (4, 8), (4, 4)), "`out` must not repeat its own elements"),
        (OUT, as_strided(random(64), (4, 8), (0, 4)), "`out` must not repeat its own elements"),
        (OUT, as_strided(random(64), (4, 8), (32, 0)), "`out` must not repeat its own elements"),
        (NUMBER, -1.0, "`eps` must be a finite real number that is not negative.*-1.0"),
        (NUMBER, np.nan, "`eps` must be"),
        (OFFSET, np.inf, "`weight_offset` must be a finite"),
    ],
)
def test_wrong_shapes_and_numbers_raise_when_run(argument, value, message):
    given = arguments()
    given[argument] = value
    for i in {OUT, RESIDUAL_OUT} - {argument}:
        given[i][...] = 7
    with pytest.raises(ValueError, match=message):
        add_and_norm(*given)
    assert all((given[i] == 7).all() for i in {OUT, RESIDUAL_OUT} - {argument})


def test_outputs_in_the_place_of_inputs():
    wanted = npnorm.add_layer_norm(*arguments()[:4], weight_offset=1.0)
    for out, residual_out in ((X, RESIDUAL), (RESIDUAL, X)):
        given = arguments()
        given[OUT], given[RESIDUAL_OUT] = given[out], given[residual_out]
        result = add_and_norm(*given)
        assert_same_bits(result, wanted)
        assert_same_bits((given[out], given[residual_out]), tuple(wanted))


def test_outputs_over_a_part_of_inputs():
    """They hide inputs before these are read: which are copied then."""
    wanted = npnorm.add_layer_norm(*arguments()[:4], weight_offset=1.0)
    for input_rows, output_rows in ((slice(1, 5), slice(0, 4)), (slice(0, 4), slice(1, 5))):
        given = arguments()
        for argument, output in ((X, OUT), (RESIDUAL, RESIDUAL_OUT)):
            memory = np.empty((5, 8), np.float32)
            memory[input_rows] = given[argument]
            given[argument], given[output] = memory[input_rows], memory[output_rows]
        assert_same_bits(add_and_norm(*given), wanted)
    given = arguments()
    given[OUT][2] = given[WEIGHT]
    given[WEIGHT] = given[OUT][2]
    assert_same_bits(add_and_norm(*given), wanted)


def test_outputs_must_not_overlap_each_other():
    given = arguments()
    given[OUT] = given[RESIDUAL_OUT]
    with pytest.raises(ValueError, match="`out` and `residual_out` must not share memory"):
        add_and_norm(*given)


def test_lead_axes_in_any_order():
    """More than two lead axes, and such as have no common stride."""

    def norm(x, weight):
        return npnorm.rms_norm(x, weight)

    inside = njit([(given(F4, 4), given(F4, 1))])(norm)
    for lead in LEADS.values():
        x = lead(random)
        x = x[None] if x.ndim == 3 else x[:, 0] if x.ndim == 5 else x
        weight = random(x.shape[-1], seed=3)
        assert_same_bits(inside(x, weight), norm(x, weight))


def test_several_axes():
    @njit
    def norm(x, weight, out):
        return npnorm.rms_norm(x, weight, axis=(-1, 1), out=out)

    x, weight = random((3, 4, 10))[:, :, ::2], random((4, 5), seed=3)
    memory, wanted = poisoned((3, 5, 4), "float32"), np.empty((3, 4, 5), np.float32)
    norm(x, weight, memory.transpose(0, 2, 1))
    assert_same_bits(memory.transpose(0, 2, 1), norm.py_func(x, weight, wanted))
    memory = poisoned((6, 4, 5), "float32")
    norm(x, weight, memory[::2])
    assert_only_written(memory, memory[::2])


def test_misaligned_arrays():
    @njit
    def norm(x, weight, out):
        npnorm.rms_norm(x, weight, out=out)

    x, weight = random((3, 7)), random(7, seed=3)
    out = misaligned(np.zeros((3, 7), np.float32))
    norm(misaligned(x), misaligned(weight), out)
    assert_same_bits(np.array(out), npnorm.rms_norm(x, weight))


def test_example_in_prange_with_other_options(monkeypatch):
    """The user's fastmath and parallel are for the user's code."""
    monkeypatch.syspath_prepend(f"{ROOT}/examples")
    from njit_recurrence import example_arrays, scan, scan_in_python

    inside = njit(parallel=True, fastmath=True, boundscheck=True)(scan.py_func)
    arrays = example_arrays(batch=5, steps=7, width=769)
    arrays[0][2] += 1e4
    arrays[0][3, 4, 5] = np.nan
    arrays[0][4] *= 1e30
    assert_same_bits(inside(*arrays), scan_in_python(*arrays))


# Wrong types


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: npnorm.layer_norm(1.5), "`x` must be an array of float32 or float64.*got float64.*astype"),
        (lambda x: npnorm.layer_norm([1.0, 2.0]), "`x` must be an array of float32 or float64.*got list"),
        (lambda x: npnorm.layer_norm(x > 0), "`x` must be an array.*got array.bool"),
        (lambda x: npnorm.layer_norm(x, 5), "`weight` must be an array .*got int64"),
        (lambda x: npnorm.layer_norm(x, x), "`weight` must have 1 axis.*got array.float32, 2d"),
        (lambda x: npnorm.add_rms_norm(x, x[0]), "`residual` must have 2 axes"),
        (lambda x: npnorm.layer_norm(x, axis=0), "`axis` must name the trailing axes.*moveaxis"),
        (lambda x: npnorm.layer_norm(x, axis=2), "axis 2 is out of bounds"),
        (lambda x: npnorm.layer_norm(x, axis=len(x)), "`axis` must be an int .* written in the call"),
        (lambda x: npnorm.layer_norm(x, eps="tiny"), "`eps` must be a real number"),
        (lambda x: npnorm.layer_norm(x, eps=None), "`eps` must be a real number.*got None"),
        (lambda x: npnorm.layer_norm(x, return_stats=len(x) > 1), "`return_stats` must be True or False"),
        (lambda x: npnorm.layer_norm(x, out=np.broadcast_to(x, x.shape)), "`out` must be writable"),
        (lambda x: npnorm.layer_norm(x, epsilon=1e-5), "unexpected keyword argument 'epsilon'"),
        (
            lambda x: npnorm.add_rms_norm(x, x, residual_out=np.empty(x.shape)),
            "`residual_out` must have the dtype of `x`",
        ),
        (
            lambda x: npnorm.rms_norm_backward(x, x, output_mask=(True, False)),
            "`output_mask` must be three bools",
        ),
        (
            lambda x: npnorm.rms_norm_backward(x, x, output_mask=(True, False, len(x) > 1)),
            "`output_mask.2.` must be True or False",
        ),
        (lambda x: npnorm.rms_norm_backward(x, x, out=x), "`out` must be a tuple of three"),
        (
            lambda x: npnorm.rms_norm_backward(x, x, out=(None, x[0], None)),
            "`out.1.` must be None, since `output_mask.1.` is False",
        ),
    ],
)
def test_wrong_types_raise_when_compiled(call, message):
    with pytest.raises(TypingError, match=message):
        njit(call)(random((2, 3)))


def test_an_array_or_none_is_no_type():
    @njit
    def norm(x, weight, use):
        return npnorm.layer_norm(x, weight if use else None)

    with pytest.raises(TypingError, match="`weight` must be known to be an array or None"):
        norm(random((2, 3)), random(3), True)


# Registration, in processes of their own


def run(code, *folders, **environment):
    path = os.pathsep.join([*map(str, folders), *filter(None, [os.environ.get("PYTHONPATH")]), ROOT])
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**os.environ, "PYTHONPATH": path, **environment},
        cwd=folders[0] if folders else None,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


KNOWN = """
def is_known():
    from numba.core.errors import TypingError
    from numba.core.registry import cpu_target
    cpu_target.typing_context.refresh()
    return type(cpu_target.typing_context.resolve_value_type(npnorm.layer_norm)).__name__ == "Function"
"""


@pytest.fixture
def installed(tmp_path):
    """A folder that makes an npnorm that can be imported an installed one: its entry points, as setup.cfg has them."""
    setup = configparser.ConfigParser()
    setup.read(f"{ROOT}/setup.cfg")
    sections = setup["options.entry_points"].items()
    text = "\n".join(f"[{group}]\n{lines.strip()}" for group, lines in sections)
    folder = tmp_path / "site" / "npnorm-0.dist-info"
    folder.mkdir(parents=True)
    (folder / "entry_points.txt").write_text(text)
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: npnorm\nVersion: 0\n")
    return folder.parent


def test_other_users_of_numba_import_one_small_module(installed):
    code = """
        import sys
        import numba
        numba.njit(lambda i: i + 1)(1)
        print(*sorted(name for name in sys.modules if "npnorm" in name and "__editable__" not in name))
        """
    assert run(code, installed).split() == ["_npnorm_numba"]


def test_kernels_are_imported_for_calls_alone(installed):
    code = """
        import sys
        import npnorm
        import numba
        numba.njit(lambda i: i + 1)(1)
        assert is_known()
        print(*sorted(name for name in sys.modules if name.startswith("npnorm.cpu")))
        """
    assert run(KNOWN + textwrap.dedent(code), installed).split() == ["npnorm.cpu", "npnorm.cpu.machine"]


def test_npnorm_that_is_not_installed():
    if "npnorm" in str(importlib.metadata.entry_points(group="numba_extensions")):
        pytest.skip("npnorm is installed here")
    assert run(KNOWN + "import numba, npnorm; print(is_known())") == "True\n"
    code = """
        import npnorm, numba
        try:
            print(is_known())
        except Exception as error:
            print(type(error).__name__)
        npnorm.register_numba()
        npnorm.register_numba()
        print(is_known())
        """
    assert run(KNOWN + textwrap.dedent(code)).split()[-1] == "True"


def test_cached_functions(installed, tmp_path):
    """Numba keeps the kernels with the user's function."""
    (tmp_path / "user.py").write_text(
        textwrap.dedent("""
        import numba
        import npnorm

        @numba.njit(cache=True)
        def norm(x):
            return npnorm.rms_norm(x)
        """)
    )
    code = """
        import numpy as np
        import user
        x = np.linspace(-3, 5, 777, dtype=np.float32).reshape(7, 111)
        y = user.norm(x)
        print(sum(user.norm.stats.cache_hits.values()))
        assert np.array_equal(y, user.npnorm.rms_norm(x))
        """
    own = {"NUMBA_CACHE_DIR": str(tmp_path / "numba")}
    assert run(code, tmp_path, installed, **own) == "0\n"
    assert run(code, tmp_path, installed, **own) == "1\n"
