"""Device calls like one before are neither checked nor planned again, and no call is taken for another."""

import weakref

import device
import numpy as np
import pytest
from bounds import assert_same_bits
from device import Interface
from table import NORMS, random
from zoo import byte_swapped, misaligned

from npnorm import _backend
from npnorm.cuda import DeviceArray, launch, quick, workspace_bytes

pytestmark = pytest.mark.parametrize("norm", NORMS, ids=lambda norm: norm.name)

SHAPE = (6, 24)
MASK = (True, False, False)


@pytest.fixture
def gpu(monkeypatch):
    return device.install(monkeypatch)


@pytest.fixture
def planned(monkeypatch, gpu):
    """What has been checked, and what has been planned: names of functions."""
    made = []

    def counted(module, name):
        function = getattr(module, name)

        def call(*arguments, **options):
            made.append(name)
            return function(*arguments, **options)

        monkeypatch.setattr(module, name, call)

    for name in ("plan_forward", "plan_backward"):
        counted(quick, name)
    for name in ("_forward_launch", "Gradients"):
        counted(launch, name)
    return made


def put(gpu, array, **options):
    return Interface(gpu.memory.hold(array), **options)


def inputs(seed=0, shape=SHAPE):
    return random(shape, seed=seed), random(shape, seed=seed + 1), random(shape[-1], seed=seed + 2)


def calls(norm, gpu, seed=0):
    """Calls of every kind on new arrays: the call, and what it is to give."""
    x, other, weight = inputs(seed)
    a, b, w = (put(gpu, array) for array in (x, other, weight))
    out = [put(gpu, np.full_like(array, np.nan)) for array in (x, weight, weight)]
    size = workspace_bytes(norm.backward, other, x, weight)
    # Aligned as a device's memory is; the stand-in's own is not always.
    workspace = DeviceArray(gpu.allocate(size, 1).handle, (size,), None, np.dtype(np.uint8))
    forward, add, backward = norm.reference(), norm.reference("add"), norm.reference("backward")
    yield lambda: norm.forward(a, w), [forward(x, weight)]
    yield lambda: norm.forward(a, w, return_stats=True), forward(x, weight, return_stats=True)
    yield lambda: norm.forward(a, w, out=out[0], stream=7), [forward(x, weight)]
    yield lambda: norm.add(a, b, w, weight_offset=1.0), add(x, other, weight, weight_offset=1.0)
    yield lambda: norm.backward(b, a, w), backward(other, x, weight)
    yield lambda: norm.backward(b, a, w, dresidual=b), backward(other, x, weight, dresidual=other)
    yield (
        lambda: norm.backward(b, a, w, out=tuple(out), workspace=workspace, output_mask=(True, True, True)),
        backward(other, x, weight),
    )
    mask = (False, False, True)
    yield lambda: norm.backward(b, a, dresidual=b, output_mask=mask), backward(other, x, output_mask=mask)


def check(gpu, results, expected):
    results = results if isinstance(results, tuple) else (results,)
    for result, right in zip(results, expected, strict=True):
        assert (result is None) == (right is None)
        if isinstance(result, Interface):
            assert_same_bits(result.array, right)
        elif result is not None and not right.size:
            assert result.shape == right.shape and result.dtype == right.dtype
        elif result is not None:
            view = gpu.memory.view(result.pointer, result.shape, result.strides, result.dtype)
            assert_same_bits(np.array(view), right)


def test_neither_checked_nor_planned_again(norm, gpu, planned):
    for call, expected in calls(norm, gpu):
        check(gpu, call(), expected)
    assert len(planned) == 16
    planned.clear()
    for seed in (10, 20):  # at other addresses
        for call, expected in calls(norm, gpu, seed):
            check(gpu, call(), expected)
    assert not planned


def test_the_first_call_of_all(norm, gpu, monkeypatch):
    """It loads the backend and leaves what knows calls."""
    monkeypatch.setattr(_backend, "device_calls", None)
    for call, expected in calls(norm, gpu):
        check(gpu, call(), expected)
    assert _backend.device_calls is quick and quick._known


def test_calls_on_the_host_are_none_of_its_business(norm, gpu, planned):
    x, other, weight = inputs()
    for _ in range(2):
        assert_same_bits(norm.forward(list(x), weight), norm.forward(x, weight))
        norm.backward(other, x, weight)
    assert not quick._known and not gpu.launches()


def test_odd_rows_are_known_too(norm, gpu, planned):
    """Calls on rows of the other byte order or at odd addresses are remembered, apart from ordinary ones."""
    for seed in range(3):
        x, other, _ = inputs(seed)
        y, dx = norm.reference()(x), norm.reference("backward")(other, x, output_mask=MASK).dx
        for lay in (np.array, misaligned, byte_swapped):
            a, b = put(gpu, lay(x)), put(gpu, other)
            check(gpu, norm.forward(a), [y])
            check(gpu, norm.backward(b, a, output_mask=MASK), [dx, None, None])
        assert not gpu.launches("copy")
        assert len(planned) == (0 if seed else 12)
        planned.clear()


def test_layouts_tell_calls_apart(norm, gpu):
    """Each layout beside those that differ from it in one thing."""
    base = random((12, 48))
    weight = random(48)
    views = [
        base[:6, :24], base[:6, 4:28], base[:6, 1:25], base[::2, :24], base[5::-1, :24], base[:5, :24], base[:6, :23],
        base[:6, :48:2], base[:6, 23::-1], np.broadcast_to(base[0, :24], (6, 24)), base[:6, :24].astype(np.float64),
        base[:6, :24].astype(">f4"), base[:6, :24].reshape(2, 3, 24), random((6, 24), "float16"),
    ]  # fmt: skip
    for _ in range(2):
        for x in views:
            for other in (x, np.array(x, np.float32, order="C")):
                w = weight[: x.shape[-1]]
                values = np.array(x, x.dtype.newbyteorder("=")), np.array(other, other.dtype.newbyteorder("="))
                given = put(gpu, x), put(gpu, other), put(gpu, w)
                check(gpu, norm.add(*given), norm.reference("add")(*values, w))
                check(gpu, norm.backward(*given[::-1][1:], given[2]), norm.reference("backward")(*values[::-1], w))


def test_options_that_are_equal_and_mean_something_else(norm, gpu):
    x, _, weight = (put(gpu, array) for array in inputs(shape=(6, 6)))
    norm.forward(x, weight, axis=1, eps=1.0, weight_offset=1.0, round_before_weight=True)
    norm.backward(x, x, weight, axis=(1,), eps=1.0, output_mask=(True, True, False))
    for name, wrong in (("axis", True), ("axis", 1.0), ("eps", True), ("weight_offset", True)):
        with pytest.raises(TypeError, match=f"`{name}`"):
            norm.forward(x, weight, **{"axis": 1, "eps": 1.0, "weight_offset": 1.0, name: wrong})
    with pytest.raises(TypeError, match="`output_mask` must be three bools"):
        norm.backward(x, x, weight, axis=(1,), eps=1.0, output_mask=(1, 1, 0))
    with pytest.raises(TypeError, match="`axis`"):
        norm.backward(x, x, weight, axis=(True,), eps=1.0, output_mask=(True, True, False))
    with pytest.raises(TypeError, match="`axis`"):
        norm.forward(x, weight, axis=([1],))


def test_options_that_change(norm, gpu):
    """A list of axes is looked at each time."""
    x = random((2, 3, 4))
    axes = [-1]
    for wanted in ([-1], [-1, -2], [0, 1, 2]):
        axes[:] = wanted
        check(gpu, norm.forward(put(gpu, x), axis=axes), [norm.reference()(x, axis=tuple(wanted))])
    assert not quick._known


def test_outputs_that_overlap(norm, gpu):
    """The layouts are known to be right; where the arrays lie is not."""
    base = random((18, 24))
    x, weight = put(gpu, base[6:12]), put(gpu, random(24))
    for rows in (slice(0, 6), slice(12, 18)):
        norm.forward(x, weight, out=put(gpu, base[rows]))
        norm.backward(x, x, weight, out=(put(gpu, base[rows]), None, None))
    for start in (1, 5, 7, 11):
        with pytest.raises(ValueError, match="`out` must not overlap `x` in part"):
            norm.forward(x, weight, out=put(gpu, base[start : start + 6]))
        with pytest.raises(ValueError, match=r"`out\[0\]` must not overlap `dy` in part"):
            norm.backward(x, x, weight, out=(put(gpu, base[start : start + 6]), None, None))
    square = random((24, 24))
    out = put(gpu, square)
    norm.forward(put(gpu, random((24, 24)).T), out=out)
    with pytest.raises(ValueError, match="`out` must not overlap `x` in part"):
        norm.forward(put(gpu, square.T), out=out)
    norm.add(x, x, out=put(gpu, base[:6]), residual_out=put(gpu, base[12:18]))
    with pytest.raises(ValueError, match="`out` must not overlap `residual_out`"):
        norm.add(x, x, out=put(gpu, base[:6]), residual_out=put(gpu, base[1:7]))
    # Inputs may share what they like.
    norm.add(put(gpu, base[:6]), put(gpu, base[6:12]), out=out_of(gpu, x))
    check(
        gpu, norm.add(put(gpu, base[:6]), put(gpu, base[1:7]), out=out_of(gpu, x)),
        norm.reference("add")(base[:6], base[1:7]),
    )  # fmt: skip


def out_of(gpu, x):
    return put(gpu, np.full_like(x.array, np.nan))


def test_reversed_outputs(norm, gpu):
    """Two views of the same bytes that begin at either end of them are not the same."""
    base, other = random((6, 24)), random((6, 24), seed=1)
    norm.forward(put(gpu, base), out=put(gpu, other[::-1, ::-1]))
    with pytest.raises(ValueError, match="overlap"):
        norm.forward(put(gpu, base), out=put(gpu, base[::-1, ::-1]))


def test_in_place_again(norm, gpu, planned):
    """An output in the place of an input is known too, and is another call than one beside it."""
    for seed in range(3):
        for first in (False, True):
            x, residual, _ = inputs(seed)
            right = norm.reference("add")(x, residual)
            a, b = put(gpu, x), put(gpu, residual)
            norm.add(a, b, out=(a, b)[first], residual_out=(b, a)[first])
            assert_same_bits((x, residual)[first], right.y)
            assert_same_bits((residual, x)[first], right.residual_out)
            if not seed:
                assert planned
        if not seed:
            planned.clear()
    assert not planned


def test_inputs_that_interleave(norm, gpu, planned):
    """They may, and the call is still known, with outputs beside them or without."""
    base, weight = random((6, 16)), random(8)
    x, dresidual, w = put(gpu, base[:, :8]), put(gpu, base[:, 8:]), put(gpu, weight)
    for out in (None, (put(gpu, np.empty((6, 8), np.float32)), None, None)):
        planned.clear()
        for _ in range(3):
            found = norm.backward(x, x, w, dresidual=dresidual, out=out)
            check(gpu, found, norm.reference("backward")(base[:, :8], base[:, :8], weight, dresidual=base[:, 8:]))
        assert planned == ["plan_backward", "Gradients"]


def test_outputs_that_cannot_be_written(norm, gpu):
    x, weight = put(gpu, random(SHAPE)), put(gpu, random(24))
    y = random(SHAPE)
    norm.forward(x, weight, out=put(gpu, y))
    with pytest.raises(ValueError, match="`out` must be writable"):
        norm.forward(x, weight, out=put(gpu, y, readonly=True))


def test_new_outputs_at_odd_places(norm, gpu, monkeypatch):
    """Where an allocator puts results decides on the width of accesses too."""
    allocate = gpu.allocate
    places = [0, 4, 0, 8, 4]

    def allocate_oddly(size, stream):
        room = allocate(size + 16, stream)
        room.handle += places[0]
        return room

    monkeypatch.setattr("npnorm.cuda.driver.allocate", allocate_oddly)
    x, dy, weight = inputs()
    while places:
        # device.py looks that accesses are aligned, and no narrower than they could be.
        check(gpu, norm.forward(put(gpu, x)), [norm.reference()(x)])
        places.pop(0)


def test_devices(norm, gpu):
    """What is known of one device's arrays is not said of another's."""

    def array(number):
        pointer = device.address(gpu.memory.hold(random(SHAPE)))
        return DeviceArray(pointer, SHAPE, None, np.dtype(np.float32), device=number)

    for number in (0, 1, 0):
        gpu.events.clear()
        norm.forward(array(number), out=array(number))
        assert [event[1] for event in gpu.events if event[0] == "on"] == [number]
    with pytest.raises(ValueError, match="`out` must be on the CUDA device of `x`"):
        norm.forward(array(0), out=array(1))


@pytest.mark.parametrize("shape", [(0, 8), (3, 0)], ids=str)
def test_nothing_to_do_again(norm, gpu, planned, shape):
    x, weight = np.empty(shape, np.float32), random(shape[-1:])
    for _ in range(3):
        a, w, out = Interface(x), Interface(weight), Interface(np.empty_like(x))
        check(gpu, norm.forward(a, w, out=out, return_stats=True), norm.reference()(x, weight, return_stats=True))
        check(gpu, norm.backward(a, a, w), norm.reference("backward")(x, x, weight))
    assert len(planned) == 2 and not gpu.launches()


def test_sides(norm, gpu):
    x, _, weight = inputs()
    norm.forward(put(gpu, x), put(gpu, weight))
    with pytest.raises(TypeError, match="`weight` and `x` must be on the same side"):
        norm.forward(put(gpu, x), weight)
    with pytest.raises(TypeError, match="`x` and `dy` must be on the same side"):
        norm.backward(put(gpu, x), x)


def test_errors_come_in_their_order(norm, gpu, monkeypatch):
    """What is wrong with a later array is not said before what is wrong with an earlier one."""
    torch = device.install_torch(monkeypatch, gpu)
    bad = torch.Tensor(random(24))
    bad.requires_grad = True
    with pytest.raises(TypeError, match="`x` must have dtype"):
        norm.forward(torch.Tensor(np.zeros(SHAPE, np.int64)), bad)
    with pytest.raises(TypeError, match="`weight` must not require a gradient"):
        norm.forward(torch.Tensor(random(SHAPE)), bad)


def test_workspaces(norm, gpu):
    """One that is too small says so however often the call was made."""
    x, dy, weight = inputs()
    arrays = put(gpu, dy), put(gpu, x), put(gpu, weight)
    size = workspace_bytes(norm.backward, dy, x, weight)
    for length in (size, size - 16, size, size - 16):
        workspace = DeviceArray(gpu.allocate(size, 1).handle, (length,), None, np.dtype(np.uint8))
        if length == size:
            check(gpu, norm.backward(*arrays, workspace=workspace), norm.reference("backward")(dy, x, weight))
        else:
            with pytest.raises(ValueError, match=f"`workspace` must have at least {size} bytes"):
                norm.backward(*arrays, workspace=workspace)
    x_as_workspace = DeviceArray(arrays[1].__cuda_array_interface__["data"][0], (size,), None, np.dtype(np.uint8))
    with pytest.raises(ValueError, match="`workspace` must not overlap"):
        norm.backward(*arrays, workspace=x_as_workspace)


def test_streams_are_asked_for_each_time(norm, gpu, monkeypatch):
    """They are no part of what is known."""
    x, y = (gpu.memory.hold(random(SHAPE)) for _ in range(2))
    for stream, given, right, orders in ((5, None, 5, 0), (6, None, 6, 0), (6, 9, 9, 2), (None, None, 1, 0)):
        gpu.events.clear()
        norm.forward(Interface(x, stream), out=Interface(y), stream=given)
        assert gpu.launches()[0][-1] == right
        assert gpu.names().count("order") == orders
    torch = device.install_torch(monkeypatch, gpu)
    for stream in (3, 4):
        gpu.torch_stream = stream
        norm.forward(torch.Tensor(x), out=torch.Tensor(y))
        assert gpu.launches()[-1][-1] == stream and "order" not in gpu.names()[-4:]


def test_no_memory_is_held(norm, gpu):
    """What is known of a call keeps none of its arrays."""
    for _ in range(2):
        made = [put(gpu, array) for array in (*inputs(), random(SHAPE))]
        x, dy, weight, y = made
        norm.forward(x, weight, out=y)
        norm.backward(dy, x, weight, out=(y, None, None))
        dropped = [weakref.ref(array) for array in made]
        del made, x, dy, weight, y
        assert [array() for array in dropped] == [None] * 4


def test_results_are_of_the_library_of_x(norm, gpu, monkeypatch):
    """Which is no part of what is known either."""
    cupy = device.install_cupy(monkeypatch, gpu)
    x = gpu.memory.hold(random(SHAPE))
    norm.forward(Interface(x))
    kinds = [type(norm.forward(array)) for array in (Interface(x), cupy.ndarray(x), Interface(x))]
    assert kinds == [DeviceArray, cupy.ndarray, DeviceArray]
