"""What stands between npnorm and the CUDA driver, and the cache of cubins; no GPU is needed."""

import os
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from device import Interface
from table import random

import npnorm
from npnorm import _files
from npnorm.cuda import cache, driver, is_available
from npnorm.cuda.cache import Cubin
from npnorm.cuda.copies import Copy
from npnorm.cuda.table import Launch

SPEC = Copy("copy", "float32", False, "float32", False, True)
OTHER = SPEC._replace(source_swapped=True)


# What is missing.


def fails(error, *pieces):
    with pytest.raises(error) as caught:
        npnorm.layer_norm(Interface(random((3, 8))))
    for piece in pieces:
        assert piece in str(caught.value)


@pytest.fixture
def uninitialised(monkeypatch):
    driver._initialised.cache_clear()
    monkeypatch.setattr(driver, "_owner", None)
    yield
    driver._initialised.cache_clear()


def test_without_the_extra(monkeypatch, uninitialised):
    monkeypatch.setattr(driver, "missing", lambda: ["numba_cuda", "cuda.core"])
    fails(ImportError, "npnorm's extra cu13 or cu12", "numba_cuda, cuda.core", "pip install 'npnorm[cu13]'")
    assert not is_available()


def test_what_is_missing(monkeypatch):
    found = driver.missing()
    assert set(found) <= set(driver.NEEDED)
    monkeypatch.setattr(driver, "NEEDED", ("numpy", "numpy.linalg", "no_such_module", "no_such.part"))
    assert driver.missing() == ["no_such_module", "no_such.part"]


def bindings(monkeypatch, initialise):
    """Modules in the place of cuda.core's and of the bindings."""
    success = SimpleNamespace(value=0, name="CUDA_SUCCESS")
    module = SimpleNamespace(cuInit=initialise, CUresult=SimpleNamespace(CUDA_SUCCESS=success))
    core = SimpleNamespace()
    parent = SimpleNamespace(core=core, bindings=SimpleNamespace(driver=module), __path__=[])
    for name, value in {
        "cuda": parent, "cuda.core": core, "cuda.bindings": parent.bindings, "cuda.bindings.driver": module
    }.items():  # fmt: skip
        monkeypatch.setitem(sys.modules, name, value)
    monkeypatch.setattr(driver, "missing", lambda: [])
    return module


def test_without_a_driver(monkeypatch, uninitialised):
    def initialise(flags):
        raise OSError("libcuda.so.1 is nowhere")

    bindings(monkeypatch, initialise)
    fails(RuntimeError, "npnorm's extra cu13 or cu12, and NVIDIA's driver", "libcuda.so.1 is nowhere")
    assert not is_available()


def test_without_a_device(monkeypatch, uninitialised):
    bindings(monkeypatch, lambda flags: (SimpleNamespace(value=100, name="CUDA_ERROR_NO_DEVICE"),))
    fails(RuntimeError, "CUDA cannot be initialised: CUDA_ERROR_NO_DEVICE", "pip install 'npnorm[cu13]'")


def test_after_a_fork(monkeypatch):
    """Only the process that has initialised CUDA can use it."""
    monkeypatch.setattr(driver, "_owner", os.getpid() + 1)
    fails(RuntimeError, "forked after CUDA was initialised", "spawn")


def test_a_real_fork():
    if not hasattr(os, "fork"):
        pytest.skip("there is no fork")
    script = """
import os
from npnorm.cuda import driver
driver._owner = os.getpid()
child = os.fork()
if child == 0:
    try:
        driver.current()
    except RuntimeError as error:
        os._exit(0 if "forked" in str(error) else 1)
    os._exit(2)
assert os.waitpid(child, 0)[1] == 0
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


def test_numpy_needs_none_of_it():
    """Calls on NumPy arrays import neither the backend nor what it needs, nor ask whether it is there."""
    script = """
import sys
import numba
import numpy as np
before = set(sys.modules)
import npnorm
x = np.ones((2, 3), np.float32)
npnorm.layer_norm(x)
npnorm.layer_norm([[1.0, 2.0]])
npnorm.rms_norm_backward(x, x, x[0])
npnorm.LayerNorm(3)(x)
try:
    npnorm.layer_norm(x, stream=1)
except ValueError:
    pass
new = {name for name in set(sys.modules) - before}
bad = [n for n in new if n.split(".")[0] in ("cuda", "numba_cuda", "cupy", "torch") or n.startswith("numba.cuda")]
bad += [n for n in new if n.startswith("npnorm.cuda")]
assert not bad, bad
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)


def test_nothing_waits_for_the_device():
    for path in Path(driver.__file__).parent.glob("*.py"):
        text = path.read_text()
        assert "ynchronize" not in text and ".sync(" not in text, path


# The driver.


class Context(int):
    """A context's handle."""


class Fake:
    """Bindings and cuda.core that note what they are told."""

    def __init__(self):
        self.calls = []
        self.current = [0]
        self.fail = None
        names = SimpleNamespace
        self.core = names(
            LEGACY_DEFAULT_STREAM="legacy",
            Stream=names(from_handle=self.from_handle),
            LaunchConfig=lambda **options: tuple(options.values()),
            launch=lambda *arguments: self.calls.append(("launch", *arguments)),
            DeviceMemoryResource=lambda device: names(
                allocate=lambda size, stream: self.calls.append(("allocate", device, size, stream))
            ),
            ObjectCode=names(from_cubin=self.from_cubin),
        )

    def from_handle(self, handle):
        self.calls.append(("stream", handle))
        return f"stream {handle}"

    def from_cubin(self, code):
        self.calls.append(("load", code))
        return SimpleNamespace(get_kernel=lambda name: SimpleNamespace(handle=f"{name} of {code.decode()}"))

    # Attributes named as in cuda.bindings.driver.
    CUresult = SimpleNamespace(CUDA_SUCCESS=SimpleNamespace(value=0, name="CUDA_SUCCESS"))
    CUevent_flags = SimpleNamespace(CU_EVENT_DISABLE_TIMING=2)
    CUpointer_attribute = SimpleNamespace(CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL=9)
    CUfunction_attribute = SimpleNamespace(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES=8)
    CUdevice_attribute = SimpleNamespace(
        CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR=75, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR=76
    )

    def __getattr__(self, name):
        if not name.startswith("cu"):
            raise AttributeError(name)

        def call(*arguments):
            self.calls.append((name, *arguments))
            if self.fail == name:
                return SimpleNamespace(value=1, name="CUDA_ERROR_INVALID_VALUE"), None
            result = getattr(self, f"_{name}", lambda *_: None)(*arguments)
            success = self.CUresult.CUDA_SUCCESS
            return (success,) if result is None else (success, result)

        return call

    def _cuCtxGetCurrent(self):
        return self.current[-1]

    def _cuDevicePrimaryCtxRetain(self, device):
        return 1000 + device

    def _cuCtxPushCurrent(self, context):
        self.current.append(context)

    def _cuCtxPopCurrent(self):
        return self.current.pop()

    def _cuCtxGetDevice(self):
        return self.current[-1] - 1000

    def _cuDeviceGet(self, number):
        return number

    def _cuDeviceGetCount(self):
        return 2

    def _cuDeviceGetName(self, length, number):
        return b"Device %d\0\0" % number

    def _cuDeviceGetAttribute(self, attribute, number):
        return 9 if attribute == 75 else number

    def _cuEventCreate(self, flags):
        return "event"

    def _cuPointerGetAttribute(self, attribute, pointer):
        return pointer % 10

    def named(self, name):
        return [call[1:] for call in self.calls if call[0] == name]


@pytest.fixture
def fake(monkeypatch):
    fake = Fake()
    monkeypatch.setattr(driver, "_initialised", lambda: SimpleNamespace(core=fake.core, driver=fake))
    for name in ("_launches", "_kernels", "_shared"):
        monkeypatch.setattr(driver, name, {})
    for name in ("_primary", "_memory", "_stream", "capability"):
        getattr(driver, name).cache_clear()
    monkeypatch.setattr(driver.kernels, "cubin", lambda spec, capability: Cubin("k", repr(capability).encode()))
    yield fake
    for name in ("_primary", "_memory", "_stream", "capability"):
        getattr(driver, name).cache_clear()


def test_current_device(fake):
    with driver.on(1):
        assert fake.current == [0, 1001]
        with driver.on(1):
            assert fake.current == [0, 1001]
        with driver.on(None):
            assert fake.current == [0, 1001], "whatever is current"
        with driver.on(0):
            assert driver.current() == 0
        assert driver.current() == 1
    assert fake.current == [0]
    with driver.on(None):
        assert driver.current() == 0, "the first, where none is current"
    with pytest.raises(KeyError), driver.on(1):
        raise KeyError
    assert fake.current == [0]
    assert len(fake.named("cuDevicePrimaryCtxRetain")) == 2


def test_order(fake):
    driver.order(5, 6)
    assert [call for call in fake.calls if call[0].startswith(("cuEvent", "cuStream"))] == [
        ("cuEventCreate", 2),
        ("cuEventRecord", "event", 5),
        ("cuStreamWaitEvent", 6, "event", 0),
        ("cuEventDestroy", "event"),
    ]
    fake.fail = "cuStreamWaitEvent"
    with pytest.raises(RuntimeError, match="the CUDA driver failed: CUDA_ERROR_INVALID_VALUE"):
        driver.order(5, 6)
    assert len(fake.named("cuEventDestroy")) == 2


def test_memory(fake):
    with driver.on(1):
        driver.allocate(100, 1)
        driver.allocate(200, 7)
    assert fake.named("allocate") == [(1, 100, "legacy"), (1, 200, "stream 7")]
    driver.fill(4096, 255, 16, 7)
    assert fake.named("cuMemsetD8Async") == [(4096, 255, 16, 7)]
    assert driver.device_of(4093) == 3
    fake.fail = "cuPointerGetAttribute"
    with pytest.raises(ValueError, match="`x` must be in the memory of a CUDA device; got 0x1000"):
        driver.device_of(4096)


@pytest.mark.parametrize("name, error", [("OUT_OF_MEMORY", MemoryError), ("ILLEGAL_ADDRESS", ValueError)])
def test_no_memory_is_left(fake, name, error):
    def allocate(size, stream):
        raise ValueError(f"CUDA_ERROR_{name}: as cuda.core says it")

    fake.core.DeviceMemoryResource = lambda device: SimpleNamespace(allocate=allocate)
    with driver.on(1), pytest.raises(error, match="device 1 has no 100 bytes left|CUDA_ERROR_ILLEGAL_ADDRESS"):
        driver.allocate(100, 1)


def test_launch(fake):
    """A kernel is loaded once for each device, and gets leave for as much shared memory as it needs."""
    small, large, larger = (Launch(SPEC, (4, 1, 1), (32, 1, 1), size) for size in (0, 50_000, 90_000))
    with driver.on(1):
        driver.launch(small, (1, 2.0), 1)
        driver.launch(small, (3, 4.0), 7)
        kernel = fake.named("launch")[0][2]
        assert fake.named("launch") == [
            ("legacy", ((4, 1, 1), (32, 1, 1), 0), kernel, 1, 2.0),
            ("stream 7", ((4, 1, 1), (32, 1, 1), 0), kernel, 3, 4.0),
        ]
        assert kernel.handle == "k of (9, 1)"
        assert not fake.named("cuKernelSetAttribute")
        for launch in (large, larger, large, larger):
            driver.launch(launch, (), 1)
        assert fake.named("cuKernelSetAttribute") == [(8, 50_000, kernel.handle, 1), (8, 90_000, kernel.handle, 1)]
        driver.launch(Launch(SPEC, (5, 1, 1), (32, 1, 1), 60_000), (), 1)
        assert len(fake.named("cuKernelSetAttribute")) == 2, "never less than it had"
        assert len(fake.named("load")) == 1
        driver.launch(Launch(OTHER, (4, 1, 1), (32, 1, 1), 0), (), 1)
        assert len(fake.named("load")) == 2
    with driver.on(0):
        driver.launch(small, (), 1)
    assert fake.named("load")[-1] == (b"(9, 0)",)


def test_streams_are_made_once(fake):
    """For each device, since an address may be another device's stream later on."""
    launch = Launch(SPEC, (4, 1, 1), (32, 1, 1), 0)
    for device, stream in ((0, 7), (0, 7), (1, 7), (0, 8), (0, 7), (0, 1)):
        with driver.on(device):
            driver.launch(launch, (), stream)
            driver.allocate(8, stream)
    assert fake.named("stream") == [(7,), (7,), (8,)]


def test_launches_are_forgotten(fake, monkeypatch):
    monkeypatch.setattr(driver, "MOST_LAUNCHES", 3)
    with driver.on(0):
        for blocks in range(1, 9):
            driver.launch(Launch(SPEC, (blocks, 1, 1), (32, 1, 1), 0), (), 1)
            assert len(driver._launches) <= 3
    assert len(fake.named("load")) == 1


def test_devices(fake, monkeypatch):
    assert driver.devices() == [("Device 0", (9, 0)), ("Device 1", (9, 1))]
    assert is_available()
    monkeypatch.setattr(driver, "devices", lambda: [("T4", (7, 5))])
    assert not is_available()


# The cache of cubins.


@pytest.fixture
def compiled(monkeypatch, tmp_path):
    """What has been compiled, and the folder it is kept in."""
    made = []

    def compile_(spec, capability):
        made.append((spec, capability))
        return Cubin(f"name_{len(made)}", b"code\0with zeros\0" + repr(spec).encode())

    monkeypatch.setattr(cache, "_compile", compile_)
    monkeypatch.setattr(_files, "_warned", False)
    monkeypatch.setenv("NPNORM_CACHE_DIR", str(tmp_path / "folder"))
    return SimpleNamespace(made=made, folder=tmp_path / "folder")


def test_kept_on_disk(compiled):
    first = cache.cubin(SPEC, (9, 0))
    assert cache.cubin(SPEC, (9, 0)) == first == Cubin("name_1", b"code\0with zeros\0" + repr(SPEC).encode())
    assert len(compiled.made) == 1
    assert list(cache.files(compiled.folder)) == [cache.file_name(SPEC, (9, 0))]
    assert cache.folders() == [compiled.folder]


def test_an_old_device(compiled):
    with pytest.raises(RuntimeError, match="need a device of compute capability 8.0 or newer; got one of 7.5"):
        cache.cubin(SPEC, (7, 5))
    assert not compiled.made


def test_names(compiled, monkeypatch):
    """A name for all that the code depends on."""
    names = {cache.file_name(spec, capability) for spec in (SPEC, OTHER) for capability in ((9, 0), (8, 0))}
    monkeypatch.setattr(cache, "versions", lambda: ("1.0",))
    names.add(cache.file_name(SPEC, (9, 0)))
    monkeypatch.setattr(cache, "_sources", lambda: "other sources")
    names.add(cache.file_name(SPEC, (9, 0)))
    assert len(names) == 6
    assert all(name.startswith("npnorm-") and name.endswith(".cubin") for name in names)


def test_names_last():
    """The same in another process, whatever the seed of its hashes."""
    script = (
        "from npnorm.cuda import cache; from npnorm.cuda.copies import Copy; "
        "print(cache.file_name(Copy('copy', 'float32', False, 'float32', False, True), (9, 0)))"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "5"}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == cache.file_name(SPEC, (9, 0))


@pytest.mark.parametrize("damage", [b"", b"short", None])
def test_damaged(compiled, damage):
    """Compiled anew with one warning, and mended."""
    first = cache.cubin(SPEC, (9, 0))
    file = compiled.folder / cache.file_name(SPEC, (9, 0))
    content = file.read_bytes()
    file.write_bytes(content[:-1] + b"!" if damage is None else damage)
    with pytest.warns(RuntimeWarning, match="is damaged and is compiled anew. Set NPNORM_CACHE_DIR"):
        assert cache.cubin(SPEC, (9, 0)).code == first.code
    assert len(compiled.made) == 2
    cache.cubin(SPEC, (9, 0))
    assert len(compiled.made) == 2


def test_another_kernels_file(compiled):
    """A whole file in another's place is damage too."""
    for spec in (SPEC, OTHER):
        cache.cubin(spec, (9, 0))
    places = [compiled.folder / cache.file_name(spec, (9, 0)) for spec in (SPEC, OTHER)]
    places[0].write_bytes(places[1].read_bytes())
    with pytest.warns(RuntimeWarning, match="damaged"):
        assert cache.cubin(SPEC, (9, 0)).code.endswith(repr(SPEC).encode())


def test_unwritable(compiled, tmp_path):
    """Compiled in memory, with one warning."""
    compiled.folder.touch()  # a file where the folder should be
    with pytest.warns(RuntimeWarning, match="one cannot be saved .* compiled in every process. Set NPNORM_CACHE_DIR"):
        assert cache.cubin(SPEC, (9, 0)).name == "name_1"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert cache.cubin(OTHER, (9, 0)).name == "name_2"


def test_the_usual_folders(monkeypatch):
    monkeypatch.delenv("NPNORM_CACHE_DIR")
    beside, of_user = cache.folders()
    assert beside == Path(cache.__file__).parent / "__pycache__"
    assert of_user.name == "npnorm"


def test_versions():
    assert cache.versions()[cache.PACKAGES.index("numba")] is not None
    assert np.array_equal(len(cache.versions()), len(cache.PACKAGES))
