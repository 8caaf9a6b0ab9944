"""What is not arithmetic: arrays of more than 2^31 elements, streams, graphs, the libraries' own arrays."""

import sys
import time
from importlib.util import find_spec

import bounds
import numpy as np
from gpu_arrays import Placed
from gpu_machine import LEGACY
from gpu_speed import filled
from table import DTYPES, LAYER_NORM, RMS_NORM, random

import npnorm
from npnorm._results import NormGradients
from npnorm.cuda import DeviceArray, workspace_bytes


def large(machine):
    """Contiguous arrays of more than 2^31 elements: some rows beside a small batch of them, sums beside exact ones."""
    cols, dtype = 4096, DTYPES["bfloat16"]
    rows = (2**31 // cols if machine.elements == 2**26 else 512) + 1003
    repeated = 256  # rows, after which the numbers begin anew
    (x, block), (dy, dblock) = (filled(machine, dtype, rows * cols, seed) for seed in (1, 2))
    out = machine.allocate(rows * cols * dtype.itemsize)
    weight, bias = (Placed(machine, (cols,), dtype, "contiguous", random(cols, "bfloat16", seed)) for seed in (3, 4))
    sums = [Placed(machine, (cols,), dtype) for _ in range(2)]

    def matrix(pointer, first=0, count=rows):
        return DeviceArray(pointer + first * cols * dtype.itemsize, (count, cols), None, dtype, device=0)

    def downloaded(pointer, first, count):
        data = machine.download(pointer + first * cols * dtype.itemsize, count * cols * dtype.itemsize)
        return data.view(dtype).reshape(count, cols)

    def repetition(block, first, count):
        return block.reshape(repeated, cols)[np.arange(first, first + count) % repeated]

    def backward(first, count, where, gradients):
        npnorm.layer_norm_backward(
            matrix(dy, first, count), matrix(x, first, count), weight.array, out=(where, *gradients),
            output_mask=(True, *2 * (gradients[0] is not None,)),
        )  # fmt: skip

    picked = [(0, 3), (rows // 2, 3), (rows - 3, 3)]
    try:
        for name in ("y", "dx"):
            machine.fill(out, 0xFF, rows * cols * dtype.itemsize)
            if name == "y":
                npnorm.layer_norm(matrix(x), weight.array, bias.array, out=matrix(out))
            else:
                backward(0, rows, matrix(out), [each.array for each in sums])
            machine.synchronize()
            found = [downloaded(out, *place) for place in picked]
            for (first, count), values in zip(picked, found, strict=True):
                small = Placed(machine, (count, cols), dtype)
                if name == "y":
                    npnorm.layer_norm(matrix(x, first, count), weight.array, bias.array, out=small.array)
                else:
                    backward(first, count, small.array, (None, None))
                machine.synchronize()
                if machine.judged:
                    bounds.assert_same_bits(values, small.read(), f"{name}, rows from {first}")
                    of_x, of_dy = (repetition(each, first, count) for each in (block, dblock))
                    if name == "y":
                        bounds.check_forward(LAYER_NORM, values, of_x, weight.read(False), bias.read(False))
                    else:
                        gradients = NormGradients(values, None, None)
                        bounds.check_backward(LAYER_NORM, gradients, of_dy, of_x, weight.read(False))
                small.free()
        if machine.judged:
            _check_sums(block, dblock, rows, repeated, cols, sums)
    finally:
        machine.synchronize()
        for pointer in (x, dy, out):
            machine.free(pointer)
    return {"rows": rows, "cols": cols, "elements": rows * cols}


@np.errstate(all="ignore")
def _check_sums(block, dblock, rows, repeated, cols, sums):
    """dweight and dbias of numbers that are repeated: sums of one block, times how often it is there."""
    exact = bounds.normalize(bounds.as_rows(block.reshape(repeated, cols), -1), True, LAYER_NORM.eps)
    dy = bounds.as_rows(dblock.reshape(repeated, cols), -1)
    times = np.full((repeated, 1), rows // repeated, bounds.LONG)
    times[: rows % repeated] += 1
    for placed, terms, bound, what in (
        (sums[0], dy * exact.normalized, bounds.dweight_bound(dy, exact), "dweight"),
        (sums[1], dy, bounds.dbias_bound(dy), "dbias"),
    ):
        bounds.check_sum(placed.read(), times * terms, lambda name, bound=bound: times * bound(name), what)


def streams(machine):
    """Work follows what x's stream has, and is followed by what it gets; the host never waits."""
    shape, dtype = (512, 4096), DTYPES["float32"]
    values = random(shape, "float32")
    source, plain = Placed(machine, shape, dtype, "contiguous", values), Placed(machine, shape, dtype)
    npnorm.rms_norm(source.array, out=plain.array)
    machine.synchronize()
    right = plain.read()
    if machine.judged:
        bounds.check_forward(RMS_NORM, right, values)
    first, second = machine.stream(), machine.stream()
    pause = 0.02

    # x is written on a stream that is late; the call is on another.
    x, y = Placed(machine, shape, dtype), Placed(machine, shape, dtype)
    late = x.array
    late.stream = first
    npnorm.rms_norm(late, out=y.array, stream=second)  # loads the kernel
    machine.synchronize()
    y = Placed(machine, shape, dtype)
    machine.delay(pause, first)
    machine.copy(late.pointer, source.array.pointer, values.nbytes, first)
    done = machine.event()
    machine.record(done, first)
    start = time.perf_counter()
    npnorm.rms_norm(late, out=y.array, stream=second)
    host = time.perf_counter() - start
    waited = machine.has_happened(done)
    machine.synchronize()
    if machine.judged:
        bounds.assert_same_bits(y.read(), right, "x of a late stream")
    if machine.real:
        assert not waited, f"the call has waited for the device ({1e3 * host:.1f} ms)"

    # The call's stream is late; x is overwritten on its own.
    y = Placed(machine, shape, dtype)
    machine.delay(pause, second)
    npnorm.rms_norm(late, out=y.array, stream=second)
    machine.fill(late.pointer, 0xFF, values.nbytes, first)
    machine.synchronize()
    if machine.judged:
        bounds.assert_same_bits(y.read(), right, "x overwritten behind a late call")
    return {"host_us_of_a_call_that_is_queued": round(1e6 * host, 1)}


def graphs(machine):
    """A forward and a backward call in a graph, replayed on new numbers."""
    shape, dtype = (300, 1024), DTYPES["bfloat16"]
    arrays = {name: random(shape, "bfloat16", seed) for seed, name in enumerate(("x", "dy", "new"))}
    stream = machine.stream()
    x, dy = (Placed(machine, shape, dtype, "contiguous", arrays[name]) for name in ("x", "dy"))
    vectors = [random(1024, "bfloat16", seed) for seed in (5, 6)]
    weight, bias = (Placed(machine, shape[1:], dtype, "contiguous", vector) for vector in vectors)

    def calls(outputs, stream):
        y, dx, dweight, dbias = (each.array for each in outputs)
        out = {"out": (dx, dweight, dbias)}
        size = workspace_bytes(npnorm.layer_norm_backward, dy.array, x.array, weight.array, **out)
        room = DeviceArray(machine.allocate(size), (size,), None, np.dtype(np.uint8), device=0)

        def call():
            npnorm.layer_norm(x.array, weight.array, bias.array, out=y, stream=stream)
            npnorm.layer_norm_backward(dy.array, x.array, weight.array, **out, workspace=room, stream=stream)

        return call

    def outputs():
        return [Placed(machine, size, dtype) for size in (shape, shape, shape[1:], shape[1:])]

    graphed, plain = outputs(), outputs()
    call = calls(graphed, stream)
    call()  # loads the kernels
    machine.synchronize()
    replay = machine.capture(stream, call)
    for values in (arrays["x"], arrays["new"]):
        machine.upload(x.array.pointer, values)
        for each in graphed:
            machine.fill(each.array.pointer, 0xFF, each.array.nbytes)
        machine.synchronize()
        replay()
        calls(plain, LEGACY)()
        machine.synchronize()
        if machine.judged:
            found = [each.read() for each in plain]
            for name, got, right in zip(("y", "dx", "dweight", "dbias"), graphed, found, strict=True):
                bounds.assert_same_bits(got.read(), right, f"{name} of a graph")
            y, *gradients = found
            bounds.check_forward(LAYER_NORM, y, values, *vectors)
            bounds.check_backward(LAYER_NORM, NormGradients(*gradients), arrays["dy"], values, vectors[0])
    return {"replays": 2}


def libraries(machine):
    """Arrays of each library that is installed: results are of the same library, with the same bits."""
    found = {}
    for name, check in (("torch", _torch), ("cupy", _cupy), ("numba", _numba)):
        if not machine.real or find_spec({"numba": "numba_cuda"}.get(name, name)) is None:
            found[name] = "not installed" if machine.real else "not simulated"
            continue
        try:
            found[name] = check(machine)
        except Exception as error:
            found[name] = f"FAILED: {type(error).__name__}: {error}"[:500]
    return found


def _right(machine, x, weight):
    """The results for arrays of no library."""
    y = Placed(machine, x.shape, x.dtype)
    placed = [Placed(machine, each.shape, each.dtype, "contiguous", each) for each in (x, weight)]
    npnorm.layer_norm(*(each.array for each in placed), out=y.array)
    machine.synchronize()
    found = y.read()
    if machine.judged:
        bounds.check_forward(LAYER_NORM, found, x, weight)
    return found


def _torch(machine):
    import torch

    x, weight = random((40, 1000), "bfloat16"), random(1000, "bfloat16", 1)
    right = _right(machine, x, weight)
    tensors = [torch.from_numpy(each.view(np.int16)).view(torch.bfloat16).cuda() for each in (x, weight)]

    def compare(y, what):
        assert isinstance(y, torch.Tensor) and y.dtype == torch.bfloat16 and y.is_cuda, type(y)
        bounds.assert_same_bits(y.view(torch.int16).cpu().numpy().view(x.dtype), right, what)

    compare(npnorm.layer_norm(*tensors), "on the default stream")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        compare(npnorm.layer_norm(*tensors), "on a stream of its own")
    out = torch.empty_like(tensors[0])
    assert npnorm.layer_norm(*tensors, out=out) is out
    compare(out, "out=")
    try:
        npnorm.layer_norm(tensors[0], np.ones(1000, np.float32))
    except TypeError:
        return f"passed, {torch.__version__}"
    raise AssertionError("a weight in host memory has raised no TypeError")


def _cupy(machine):
    import cupy

    x, weight = random((40, 1000)), random(1000, seed=1)
    y = npnorm.layer_norm(cupy.asarray(x), cupy.asarray(weight))
    assert isinstance(y, cupy.ndarray), type(y)
    bounds.assert_same_bits(cupy.asnumpy(y), _right(machine, x, weight), "cupy")
    return f"passed, {cupy.__version__}"


def _numba(machine):
    from numba import cuda

    x, weight = random((40, 1000)), random(1000, seed=1)
    y = npnorm.layer_norm(cuda.to_device(x), cuda.to_device(weight))
    assert type(y).__name__ == "DeviceNDArray", type(y)
    bounds.assert_same_bits(y.copy_to_host(), _right(machine, x, weight), "numba")
    return f"passed, {sys.modules['numba'].__version__}"
