"""Every error: its type, what its message says, and that nothing was written before it was raised."""

import fractions

import numpy as np
import pytest
from table import DTYPES, LAYER_NORM, NORMS, RMS_NORM, random
from zoo import poisoned

import npnorm

pytestmark = pytest.mark.parametrize("norm", NORMS, ids=lambda norm: norm.name)

ROWS, COLS = 3, 8


def valid(norm):
    """Arguments of the three functions that would do, with outputs full of NaN."""
    x, vector = random((ROWS, COLS)), random(COLS, seed=1)
    statistics = {"rstd": np.ones((ROWS, 1))}
    if norm.centered:
        statistics["mean"] = np.zeros((ROWS, 1))

    def empty(*shape):
        return poisoned(shape, np.float32)

    parameters = {"weight": vector, "bias": vector.copy()}
    return {
        "": {"x": x, **parameters, "out": empty(ROWS, COLS)},
        "add": {
            "x": x,
            "residual": x.copy(),
            **parameters,
            "out": empty(ROWS, COLS),
            "residual_out": empty(ROWS, COLS),
        },
        "backward": {
            "dy": x.copy(),
            "x": x,
            "weight": vector,
            **statistics,
            "dresidual": x.copy(),
            "out": (empty(ROWS, COLS), empty(COLS), empty(COLS)),
        },
    }


def call(norm, kind, arguments):
    function = {"": norm.forward, "add": norm.add, "backward": norm.backward}[kind]
    return function(**arguments)


def refused(norm, error, pieces, change, kinds=("", "add", "backward")):
    """`change` spoils valid arguments: every kind of call that has them raises, and says why."""
    for kind in kinds:
        arguments = valid(norm)[kind]
        outputs = arguments["out"] if kind == "backward" else [arguments["out"]]
        outputs = [*outputs, arguments.get("residual_out")]
        if not set(change) <= set(arguments) | {"axis", "eps", "weight_offset", "output_mask"}:
            continue
        with pytest.raises(error) as caught:
            call(norm, kind, {**arguments, **change})
        message = str(caught.value)
        for piece in pieces:
            assert piece in message, f"{piece!r} is not in {message!r}"
        assert "numba" not in message.lower()
        assert caught.type in (TypeError, ValueError, np.exceptions.AxisError)
        for output in outputs:
            assert output is None or np.isnan(output).all(), "written to before all checks"


ARRAYS = ("x", "weight", "bias", "residual", "dy", "dresidual", "mean", "rstd")


def shape_of(name, norm):
    return (COLS,) if name in ("weight", "bias") else (ROWS, 1 if name in ("mean", "rstd") else COLS)


def skip_mean_of_rms(name, norm):
    if name == "mean" and not norm.centered:
        pytest.skip("RMSNorm has no mean")


def test_what_is_valid(norm):
    """The arguments that the other tests spoil one by one."""
    for kind, arguments in valid(norm).items():
        call(norm, kind, arguments)
        outputs = arguments["out"] if kind == "backward" else [arguments["out"]]
        assert all(np.isfinite(output).all() for output in outputs)


@pytest.mark.parametrize("name", ARRAYS)
@pytest.mark.parametrize(
    "dtype",
    ["int8", "int32", "int64", "uint16", "bool", "complex64", "complex128", "object", "longdouble",
     "datetime64[s]", "timedelta64[s]", "U3", "S3", "V2", [("a", "f4")]],
    ids=str,
)  # fmt: skip
def test_dtypes(norm, name, dtype):
    """The message names the argument, the dtype and the cast; integers are not promoted silently."""
    skip_mean_of_rms(name, norm)
    array = np.zeros(shape_of(name, norm), dtype)
    if array.dtype == np.float64:
        pytest.skip("longdouble is float64 here")
    remedy = [] if array.dtype.kind in "cV" else ["astype"]
    refused(norm, TypeError, [f"`{name}`", "float32", str(array.dtype), *remedy], {name: array})


@pytest.mark.parametrize("name", ARRAYS)
def test_masked_arrays(norm, name):
    skip_mean_of_rms(name, norm)
    array = np.ma.masked_array(np.zeros(shape_of(name, norm)), mask=False)
    refused(norm, TypeError, [f"`{name}`", "masked", "filled"], {name: array})


@pytest.mark.parametrize("name", ARRAYS)
def test_things_that_are_no_arrays(norm, name):
    skip_mean_of_rms(name, norm)
    zeros = np.zeros(shape_of(name, norm), int).tolist()
    refused(norm, TypeError, [f"`{name}`", "int64", "astype"], {name: zeros})
    for thing in ("text", object(), {1: 2}, ...):
        refused(norm, TypeError, [f"`{name}`"], {name: thing})
    if name in ("x", "residual", "dy"):
        refused(norm, TypeError, [f"`{name}`"], {name: None})


@pytest.mark.parametrize("name", [name for name in ARRAYS if name != "x"])
def test_shapes(norm, name):
    """The rule and the shape that was given; nothing is broadcast."""
    skip_mean_of_rms(name, norm)
    right = shape_of(name, norm)
    for wrong in [(), (1,), (COLS - 1,), (COLS + 1,), (1, COLS), (COLS, 1), (ROWS,), (ROWS, COLS + 1),
                  (ROWS + 1, COLS), (1, ROWS, COLS), (0, COLS), (COLS, ROWS)]:  # fmt: skip
        if wrong != right:
            pieces = [f"`{name}` must have shape {right}", "got", str(wrong)]
            refused(norm, ValueError, pieces, {name: np.zeros(wrong, np.float32)})


def test_the_message_of_the_contract(norm):
    x, weight = np.zeros((2, 768), np.float32), np.zeros(512, np.float32)
    with pytest.raises(ValueError) as caught:
        norm.forward(x, weight)
    assert str(caught.value) == (
        "`weight` must have shape (768,), the shape of the normalized axes of `x`; got (512,)"
    )


def test_shapes_of_several_axes(norm):
    x = random((2, 3, 5))
    with pytest.raises(ValueError, match=r"`weight` must have shape \(3, 5\)"):
        norm.forward(x, np.ones(15, np.float32), axis=(-2, -1))
    with pytest.raises(ValueError, match=r"`bias` must have shape \(3, 5\)"):
        norm.forward(x, bias=np.ones(5, np.float32), axis=(-2, -1))
    with pytest.raises(ValueError, match=r"`rstd` must have shape \(2, 1, 1\)"):
        norm.backward(x, x, rstd=np.ones((2, 1)), axis=(-2, -1))


def test_axis(norm):
    out_of_range = np.exceptions.AxisError
    for axis in (2, -3, 100, (0, 2), (-3, -1), 2**70):
        refused(norm, out_of_range, ["axis", "2"], {"axis": axis})
    for axis in (0, -2, (0,), (-2,)):
        refused(norm, ValueError, ["`axis`", "trailing", "np.moveaxis"], {"axis": axis})
    for axis in [(-1, -1), (1, -1), (0, 1, 1), (0, 1, -2)]:
        refused(norm, ValueError, ["`axis`", "twice", str(axis)], {"axis": axis})
    refused(norm, ValueError, ["`axis`", "()"], {"axis": ()})
    for axis in (1.0, "1", "-1", None, (1.0,), ("x",), (None,), (0, (1,)), np.array(1.5), {}):
        refused(norm, TypeError, ["`axis`", "int"], {"axis": axis})


def test_axes_in_the_middle(norm):
    """A separate piece of work: until it lands, the error names np.moveaxis, and its advice is right."""
    x = random((2, 3, 5))
    for axis in (0, 1, (0, 1), (0, 2), (-3, -1)):
        with pytest.raises(ValueError, match=r"np\.moveaxis"):
            norm.forward(x, axis=axis)
    y = np.moveaxis(norm.forward(np.moveaxis(x, 1, -1)), -1, 1)
    assert y.shape == x.shape


def test_scalars(norm):
    """A 0-d x has no axis to normalize."""
    for x in (np.float32(1), np.array(1.0), 1.0):
        with pytest.raises(np.exceptions.AxisError):
            norm.forward(x)
        with pytest.raises(np.exceptions.AxisError):
            norm.backward(x, x)
        with pytest.raises(np.exceptions.AxisError):
            norm.add(x, x)
    with pytest.raises(TypeError, match="`x`"):
        norm.forward(1)


def test_eps(norm):
    for eps in (-1e-5, -1, -np.inf, np.inf, np.nan, np.float32(-1), np.float64("nan")):
        refused(norm, ValueError, ["`eps`", "finite", repr(eps)], {"eps": eps})
    for eps in ("1e-5", 1j, True, np.True_, [1e-5], (), np.array([1e-5]), object()):
        refused(norm, TypeError, ["`eps`"], {"eps": eps})
    if norm.centered:
        refused(norm, TypeError, ["`eps`", "None"], {"eps": None})
    assert np.isfinite(norm.forward(random((ROWS, COLS)), eps=fractions.Fraction(1, 3))).all()


def test_eps_beyond_a_float(norm):
    """An int too large for a float is no OverflowError."""
    with pytest.raises(ValueError, match="`eps`"):
        norm.forward(random((ROWS, COLS)), eps=10**400)


def test_weight_offset(norm):
    for offset in (np.inf, -np.inf, np.nan):
        refused(norm, ValueError, ["`weight_offset`", "finite"], {"weight_offset": offset})
    for offset in ("1", 1j, None, True, [1.0], np.ones(COLS)):
        refused(norm, TypeError, ["`weight_offset`"], {"weight_offset": offset})
    change = {"weight_offset": 1.0, "weight": None}
    refused(norm, ValueError, ["`weight_offset`", "`weight`"], change, kinds=("", "add"))
    with pytest.raises(ValueError, match="`weight`"):
        norm.backward(random((ROWS, COLS)), random((ROWS, COLS)), weight_offset=1.0)


def spoiled_outputs(right_shape):
    """(error, pieces, an array that is no good as output of this shape)."""
    frozen = poisoned(right_shape, np.float32)
    frozen.flags.writeable = False
    yield ValueError, ["read-only"], frozen
    wrong_shape = (*right_shape[:-1], right_shape[-1] + 1)
    yield ValueError, [str(right_shape), str(wrong_shape)], poisoned(wrong_shape, np.float32)
    yield ValueError, [str(right_shape)], poisoned((1, *right_shape), np.float32)
    for dtype in ("int64", "complex64", "bool", "object", "longdouble"):
        array = np.zeros(right_shape, dtype)
        if array.dtype != np.float64:
            yield ValueError, [str(array.dtype), "float32"], array
    if len(right_shape) > 1:
        line = poisoned((1, right_shape[1]), np.float32)
        repeated = np.lib.stride_tricks.as_strided(line, right_shape, (0, 4), writeable=True)
        yield ValueError, [], repeated
    yield TypeError, ["list"], poisoned(right_shape, np.float32).tolist()
    yield TypeError, [], np.ma.masked_array(poisoned(right_shape, np.float32))


@pytest.mark.parametrize("name", ["out", "residual_out"])
def test_outputs(norm, name):
    for error, pieces, array in spoiled_outputs((ROWS, COLS)):
        before = np.array(array)
        refused(norm, error, [f"`{name}`", *pieces], {name: array}, kinds=("", "add"))
        np.testing.assert_array_equal(np.array(array), before)


@pytest.mark.parametrize("place", [0, 1, 2])
def test_gradient_outputs(norm, place):
    right = [(ROWS, COLS), (COLS,), (COLS,)]
    for error, pieces, array in spoiled_outputs(right[place]):
        out = [poisoned(shape, np.float32) for shape in right]
        out[place] = array
        before = [np.array(a) for a in out]
        refused(norm, error, ["`out", *pieces], {"out": tuple(out)}, kinds=("backward",))
        for array, copy in zip(out, before, strict=True):
            np.testing.assert_array_equal(np.array(array), copy)


def test_the_tuple_of_gradient_outputs(norm):
    good = poisoned((ROWS, COLS), np.float32)
    vector = poisoned(COLS, np.float32)
    for out in [(), (good,), (good, vector), (good, vector, vector.copy(), None), good, 3]:
        with pytest.raises((ValueError, TypeError), match=r"`out`.*three"):
            norm.backward(random((ROWS, COLS)), random((ROWS, COLS)), random(COLS), out=out)
    assert np.isnan(good).all()


def test_an_output_that_is_masked_out(norm):
    x, weight = random((ROWS, COLS)), random(COLS)
    for place in range(3):
        mask = [True, True, True]
        mask[place] = False
        out = [None, None, None]
        out[place] = poisoned(x.shape if place == 0 else (COLS,), np.float32)
        with pytest.raises(ValueError, match="`out.*`output_mask"):
            norm.backward(x, x, weight, output_mask=mask, out=tuple(out))
        assert np.isnan(out[place]).all()
    # dweight and dbias are not computed by default when there is no weight.
    with pytest.raises(ValueError, match="`out.*`output_mask"):
        norm.backward(x, x, out=(None, poisoned(COLS, np.float32), None))


def test_output_mask(norm):
    for mask in [(), (True,), (True, True), (True,) * 4, 3, True, "abc"]:
        refused(norm, (ValueError, TypeError), ["`output_mask`", "three"], {"output_mask": mask},
                kinds=("backward",))  # fmt: skip
    for mask in [(1, 0, 1), ("a", "b", "c"), (None, True, True), (1.0, 1.0, 1.0)]:
        refused(norm, TypeError, ["`output_mask`"], {"output_mask": mask}, kinds=("backward",))


def test_residual_out_has_the_dtype_of_x(norm):
    for dtype in DTYPES:
        if dtype != "float32":
            array = poisoned((ROWS, COLS), DTYPES[dtype])
            pieces = ["`residual_out`", "float32", dtype]
            refused(norm, ValueError, pieces, {"residual_out": array}, kinds=("add",))
            assert np.isnan(array).all()


def right_or_refused(run, expected, output, name):
    """A partial overlap gives the right answer or a ValueError that names the output, never a wrong one."""
    try:
        run()
    except ValueError as error:
        assert name in str(error)
        assert "overlap" in str(error)
    else:
        np.testing.assert_array_equal(output, expected)


def test_partial_overlaps_with_x(norm):
    for dtype in DTYPES:
        for rows, cols in [(3, 8), (40, 129)]:
            base = random((2 * rows + 2, 2 * cols + 2), dtype)
            place = base[1 : rows + 1, 1 : cols + 1]
            others = [
                base[0:rows, 1 : cols + 1],
                base[2 : rows + 2, 1 : cols + 1],
                base[1 : rows + 1, 0:cols],
                base[1 : rows + 1, 2 : cols + 2],
                base[1 : rows + 1, 1 : 2 * cols + 1 : 2],
                base[1 : rows + 1, 1 : cols + 1][::-1],
                base[1 : rows + 1, 1 : cols + 1][:, ::-1],
                base[1 : 2 * rows + 1 : 2, 1 : cols + 1],
            ]
            for x in others:
                before = base.copy()
                expected = norm.forward(x.copy())
                right_or_refused(lambda: norm.forward(x, out=place), expected, place, "`out`")  # noqa: B023
                base[...] = before
                expected = norm.backward(x.copy(), x.copy()).dx
                right_or_refused(
                    lambda: norm.backward(x, x.copy(), out=(place, None, None)),  # noqa: B023
                    expected, place, "`out",
                )  # fmt: skip
                base[...] = before
                right_or_refused(
                    lambda: norm.backward(x.copy(), x, out=(place, None, None)),  # noqa: B023
                    expected, place, "`out",
                )  # fmt: skip
                base[...] = before
                expected = norm.add(x.copy(), x.copy())
                right_or_refused(
                    lambda: norm.add(x, x.copy(), residual_out=place),  # noqa: B023
                    expected.residual_out, place, "`residual_out`",
                )  # fmt: skip
                base[...] = before


def test_overlaps_with_parameters_and_statistics(norm):
    x, dy = random((ROWS, COLS)), random((ROWS, COLS), seed=1)
    base = random((ROWS + 2, COLS), seed=2)
    weight, out = base[2], base[:ROWS]
    expected = norm.forward(x, weight.copy())
    right_or_refused(lambda: norm.forward(x, weight, out=out), expected, out, "`out`")
    base[...] = random(base.shape, seed=2)
    expected = norm.forward(x, bias=weight.copy())
    right_or_refused(lambda: norm.forward(x, bias=weight, out=out), expected, out, "`out`")
    base[...] = random(base.shape, seed=2)
    expected = norm.backward(dy, x, weight.copy()).dx
    right_or_refused(lambda: norm.backward(dy, x, weight, out=(out, None, None)), expected, out, "`out")
    base[...] = random(base.shape, seed=2)
    expected = norm.backward(dy, x, weight.copy()).dweight
    right_or_refused(
        lambda: norm.backward(dy, x, weight, out=(None, weight, None)), expected, weight, "`out"
    )
    rstd = np.ones((ROWS, COLS))
    given = {"rstd": rstd[:, :1]} | ({"mean": np.zeros((ROWS, 1))} if norm.centered else {})
    expected = norm.backward(dy, x, **{k: v.copy() for k, v in given.items()}).dx
    right_or_refused(
        lambda: norm.backward(dy, x, **given, out=(rstd, None, None)), expected, rstd, "`out"
    )


def test_outputs_that_overlap_each_other(norm):
    x, weight = random((ROWS, COLS)), random(COLS)
    array = poisoned((ROWS, COLS), np.float32)
    with pytest.raises(ValueError, match="overlap"):
        norm.add(x, x.copy(), out=array, residual_out=array)
    with pytest.raises(ValueError, match="overlap"):
        norm.backward(x, x, weight, out=(array, array[0], None))
    with pytest.raises(ValueError, match="overlap"):
        norm.backward(x, x, weight, out=(None, array[0], array[0]))
    assert np.isnan(array).all()


def test_interleaved_views_do_not_overlap(norm):
    """x in the even columns, y in the odd ones of the same memory."""
    base = np.empty((ROWS, 2 * COLS), np.float32)
    x = random((ROWS, COLS))
    base[:, ::2] = x
    norm.forward(base[:, ::2], out=base[:, 1::2])
    np.testing.assert_array_equal(base[:, 1::2], norm.forward(x))
    np.testing.assert_array_equal(base[:, ::2], x)


def test_checks_come_before_the_empty_shortcut(norm):
    for shape in [(0, 5), (3, 0), (0, 0), (0, 3, 5)]:
        x = np.zeros(shape, np.float32)
        cols = shape[-1]
        with pytest.raises(TypeError, match="`x`"):
            norm.forward(x.astype(int))
        with pytest.raises(TypeError, match="`weight`"):
            norm.forward(x, np.ones(cols, int))
        with pytest.raises(ValueError, match="`weight`"):
            norm.forward(x, np.ones(cols + 1, np.float32))
        with pytest.raises(ValueError, match="`bias`"):
            norm.forward(x, bias=np.ones((1, cols), np.float32))
        with pytest.raises(ValueError, match="`eps`"):
            norm.forward(x, eps=-1.0)
        with pytest.raises(ValueError, match="`out`"):
            norm.forward(x, out=np.zeros((*shape, 1), np.float32))
        with pytest.raises(ValueError, match="`dy`"):
            norm.backward(np.zeros((*shape, 1), np.float32), x)
        with pytest.raises(ValueError, match="`residual`"):
            norm.add(x, np.zeros((*shape, 1), np.float32))
        with pytest.raises(ValueError, match="`axis`"):
            norm.forward(x, axis=0)


def test_unknown_and_positional_arguments(norm):
    x = random((ROWS, COLS))
    with pytest.raises(TypeError):
        norm.forward(x, epsilon=1e-5)
    with pytest.raises(TypeError):
        norm.forward(x, None, None, -1)
    with pytest.raises(TypeError):
        norm.forward()
    if not norm.centered:
        with pytest.raises(TypeError):
            norm.backward(x, x, mean=np.zeros((ROWS, 1)))


def test_threads_are_checked(norm, threads):
    for count in (0, -1):
        with pytest.raises(ValueError, match="`n`"):
            npnorm.set_num_threads(count)
    for count in (1.5, "2", None, [2], True):
        with pytest.raises((TypeError, ValueError), match="`n`"):
            npnorm.set_num_threads(count)
    npnorm.set_num_threads(np.int64(3))
    assert npnorm.get_num_threads() == 3


def test_errors_leave_the_library_working(norm):
    x = random((ROWS, COLS))
    expected = norm.forward(x)
    for _ in range(3):
        with pytest.raises(ValueError):
            norm.forward(x, eps=-1)
        np.testing.assert_array_equal(norm.forward(x), expected)


def test_both_norms_say_the_same(norm):
    messages = []
    for one in (LAYER_NORM, RMS_NORM):
        with pytest.raises(ValueError) as caught:
            one.forward(random((ROWS, COLS)), bias=np.ones(3, np.float32))
        messages.append(str(caught.value))
    assert messages[0] == messages[1]


def test_arrays_and_bools_as_options(norm):
    x = random((ROWS, COLS))
    for axis in (True, np.True_, (0, True), np.array([-1, -2]), np.array([-1.0])):
        with pytest.raises(TypeError, match="`axis` must be an int or a tuple of ints"):
            norm.forward(x, axis=axis)
    with pytest.raises(ValueError, match="`output_mask` must be three bools"):
        norm.backward(x, x, output_mask=np.array(True))


def test_ragged_sequences(norm):
    with pytest.raises(ValueError, match="`x` must be an array or nested sequences of equal lengths"):
        norm.forward([[1.0, 2.0], [3.0]])


@pytest.mark.parametrize("name", ["axis", "eps", "weight_offset", "output_mask", "out", "stream"])
def test_messages_do_not_print_arrays(norm, name):
    x, large = np.ones((3, 1000), np.float32), np.ones((2, 1000), np.float32)
    for value in (large, (large, large), [large], list(range(1000))):
        with pytest.raises((TypeError, ValueError)) as raised:
            norm.backward(x, x, x[0], **{name: value})
        assert len(str(raised.value)) < 400 and "\n" not in str(raised.value)


def test_messages_about_threads_do_not_print_arrays(norm):
    with pytest.raises(TypeError, match=r"got an array of shape \(300, 200\)"):
        npnorm.set_num_threads(np.ones((300, 200)))
