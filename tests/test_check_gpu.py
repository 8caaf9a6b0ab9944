"""The check for machines with a GPU, tried out on host memory; and on faults, which it must find."""

import ast
import inspect
import json
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import device
import pytest

from npnorm.cuda import cache, driver, quick

FOLDER = Path(__file__).parent / "gpu"
PROGRAM = FOLDER / "check_gpu.py"

FEW = "RMS bf16|LN f64|add LN f32|D = 7|rows apart, odd|columns apart|beyond 2^31 elements|constant"


def test_a_dry_run(tmp_path):
    figures, tables = tmp_path / "gpu.json", tmp_path / "gpu.md"
    command = [*(sys.executable, PROGRAM, "--dry-run", "--cases", FEW), *("--json", figures, "--markdown", tables)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(figures.read_text())
    assert found["passed"] and found["dry_run"]
    for name in ("ceilings", "correctness", "streams", "graphs", "large", "launch cost", "speed"):
        assert found["sections"][name]["status"].startswith("passed"), name
    assert len(found["sections"]["correctness"]["cases"]) == FEW.count("|") + 1
    assert "| LayerNorm" in tables.read_text() and "**RMSNorm backward, float32**" in tables.read_text()


def test_time_that_is_up():
    command = [sys.executable, PROGRAM, "--dry-run", "--budget", "0"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0 and "not complete: versions" in done.stdout, done.stdout + done.stderr


def test_a_device_that_is_lost(tmp_path):
    """As after an access to a wrong address, all calls fail in the process; the rest runs in another."""
    figures = tmp_path / "gpu.json"
    program = f"""
import sys
sys.path.insert(0, {str(FOLDER)!r})
import check_gpu, gpu_machine
def synchronize(self):
    raise RuntimeError("the device is lost")
def launch(*_):
    gpu_machine.Simulated.synchronize = synchronize
    raise RuntimeError("a wrong address")
class Lost(gpu_machine.Simulated):
    def __init__(self):
        super().__init__()
        gpu_machine.driver.launch = launch
gpu_machine.Simulated = Lost
sys.exit(check_gpu.main())
"""
    options = ["--dry-run", "--only", "versions", "correctness", "graphs", "--cases", "LN f64|D = 7|constant"]
    done = subprocess.run([sys.executable, "-c", program, *options, "--json", figures], capture_output=True, text=True)
    assert done.returncode == 1 and "FAILED: correctness\n" in done.stdout, done.stdout + done.stderr
    sections = json.loads(figures.read_text())["sections"]
    first, *others = sections["correctness"]["cases"].values()
    assert first.startswith("FAILED: RuntimeError: ") and len(others) == 2
    assert all(outcome.startswith("largest error") for outcome in others)
    assert sections["graphs"]["status"] == "passed"


def test_compute_sanitizer(tmp_path, monkeypatch):
    """What it says by its status and its last line, in the words of a stand-in."""
    monkeypatch.syspath_prepend(str(FOLDER))
    import gpu_sanitizer

    program = tmp_path / "compute-sanitizer"
    program.write_text("""#!/bin/sh
case "$2" in
memcheck) echo "========= ERROR SUMMARY: 0 errors" ;;
racecheck) echo "========= RACECHECK SUMMARY: 2 hazards displayed" ; exit 99 ;;
initcheck) echo "========= Error: Device not supported" ; exit 1 ;;
synccheck) exec sleep 20 ;;
esac
""")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(gpu_sanitizer, "LONGEST", 1)
    check = SimpleNamespace(
        machine=SimpleNamespace(real=True), left=lambda: 100, options=SimpleNamespace(cubins=None, no_peers=True)
    )
    found = {}
    assert gpu_sanitizer.sanitizer(check, found) == "FAILED: racecheck"
    assert found["memcheck"] == "passed: ========= ERROR SUMMARY: 0 errors"
    assert found["racecheck"].startswith("FAILED with status 99")
    assert found["initcheck"] == "skipped: it does not work on this machine"
    assert found["synccheck"] == "skipped: it takes too long"


def test_calls_of_npnorm_fit():
    """Of the functions that only a real GPU has the check call, each takes the arguments that it is given."""
    modules = {"driver": driver, "cache": cache, "quick": quick}
    found = set()
    for file in sorted(FOLDER.glob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            match node:
                case ast.Call(func=ast.Attribute(value=ast.Name(id=module), attr=name)) if module in modules:
                    keywords = {keyword.arg: None for keyword in node.keywords}
                    inspect.signature(getattr(modules[module], name)).bind(*node.args, **keywords)
                    found.add(name)
    assert {"_cuda", "_done", "_primary", "_stream", "_sources"} <= found


def test_copies_by_a_kernel(monkeypatch):
    """The real one, with a library that notes what it is to launch: 16 KiB a block, on the legacy stream."""
    monkeypatch.syspath_prepend(str(FOLDER))
    import gpu_machine

    launched = []
    core = SimpleNamespace(
        LEGACY_DEFAULT_STREAM="legacy", LaunchConfig=SimpleNamespace, launch=lambda *given: launched.append(given)
    )
    monkeypatch.setattr(driver, "_cuda", lambda: SimpleNamespace(core=core, driver=None))
    monkeypatch.setattr(driver, "_stream", driver._stream.__wrapped__)  # which remembers nothing
    gpu = gpu_machine.Gpu.__new__(gpu_machine.Gpu)
    gpu.core, gpu.copier = core, "copier"
    gpu.copy_by_kernel(2**20, 2**30, 5 * 2**14)
    config = SimpleNamespace(grid=(5, 1, 1), block=(256, 1, 1))
    assert launched == [("legacy", config, "copier", 2**30, 2**20)]


@pytest.fixture
def check(monkeypatch):
    """`check(name)`: one of the correctness cases on a simulated device, whose driver the test may change."""
    monkeypatch.syspath_prepend(str(FOLDER))
    import gpu_cases
    import gpu_machine

    monkeypatch.setattr(quick, "_known", {})
    for name in device.FUNCTIONS:  # restored at the end
        monkeypatch.setattr(driver, name, getattr(driver, name))
    machine = gpu_machine.Simulated()
    cases = {case.name: case for case in gpu_cases.CASES}

    def run(name):
        return gpu_cases.check(machine, cases[name])

    run.machine = machine
    return run


def test_kernels_compiled_ahead(check, monkeypatch, tmp_path):
    """Those of the sections and cases that are named."""
    import check_gpu
    import gpu_cubins

    few = set(gpu_cubins.planned(["correctness"], "D = 7"))
    more = set(gpu_cubins.planned(["correctness", "graphs"], "D = 7|D = 64"))
    assert few < more and len(more) < 20
    with pytest.raises(ValueError, match=r"there are no cases \['D = 8'\]"):
        gpu_cubins.planned(None, "D = 8")
    assert gpu_cubins.SECTIONS.keys() < check_gpu.SECTIONS.keys()
    monkeypatch.setenv("NPNORM_CACHE_DIR", "")
    options = SimpleNamespace(only=["ceilings"], cases=None, capability="9.0", jobs=1)
    assert gpu_cubins.build_cubins(tmp_path, options) == 0
    assert json.loads((tmp_path / "manifest.json").read_text())["kernels"] == 0


def test_a_build_that_is_interrupted(check, monkeypatch, tmp_path):
    """What it has made so far can be used; a folder that is none of its own is named."""
    import gpu_cubins

    def kernels(build, specs, capabilities):
        yield "first", None
        yield "second", "an error"
        yield "third", None
        raise KeyboardInterrupt

    pool = SimpleNamespace(map=kernels)
    monkeypatch.setenv("NPNORM_CACHE_DIR", "")
    monkeypatch.setattr(cache, "versions", cache.versions)  # restored at the end
    monkeypatch.setattr(gpu_cubins, "planned", lambda only, cases: [None] * 5)
    monkeypatch.setattr(gpu_cubins, "ProcessPoolExecutor", lambda *_, **__: nullcontext(pool))
    options = SimpleNamespace(only=None, cases=None, capability="9.0", jobs=1)
    with pytest.raises(KeyboardInterrupt):
        gpu_cubins.build_cubins(tmp_path, options)
    assert gpu_cubins.take_cubins(tmp_path) == "2 of 5 kernels for 9.0"
    for folder in (tmp_path / "none", tmp_path / "manifest.json"):
        with pytest.raises(ValueError, match="^--cubins must name a folder that --build-cubins has made; got .*"):
            gpu_cubins.take_cubins(folder)


def beyond_the_end(self, what, arguments):
    """Two bytes behind the last row of y."""
    y, rows, cols, step = arguments[5], *arguments[8:10], arguments[-3]
    if y and what.spec.kind == "forward":
        self._bytes(y + 2 * ((rows - 1) * max(step, cols) + cols), 2)[...] = 1


def into_x(self, what, arguments):
    """x itself."""
    self._bytes(arguments[0], 1)[...] ^= 1


def a_little_off(self, what, arguments):
    """One number of y."""
    if what.spec.kind == "forward" and arguments[5]:
        self._bytes(arguments[5], 2)[...] = 0x11


def nothing_written(self, what, arguments):
    """One number of y left as it was."""
    if what.spec.kind == "forward" and arguments[5]:
        self._bytes(arguments[5] + 8, 2)[...] = 0xFF


def by_the_batch(self, what, arguments):
    """The last bit of y, in small batches."""
    if what.spec.kind == "forward" and arguments[5] and arguments[8] < 4:
        self._bytes(arguments[5], 1)[...] ^= 1


def by_chance(self, what, arguments):
    """The last bit of dweight, every other time."""
    if what.spec.kind == "total" and arguments[6]:
        self.count = getattr(self, "count", 0) + 1
        self._bytes(arguments[6], 1)[...] ^= self.count % 2


@pytest.mark.parametrize(
    "fault, message",
    [
        (beyond_the_end, "beside an output"), (into_x, "an input"), (a_little_off, "out of bounds"),
        (nothing_written, "out of bounds"), (by_the_batch, "in a batch of few rows"), (by_chance, "dweight, again"),
    ],
)  # fmt: skip
def test_faults_are_found(check, monkeypatch, fault, message):
    right = driver.launch

    def wrong(what, arguments, stream):
        right(what, arguments, stream)
        fault(check.machine, what, arguments)

    assert 0 < check("RMS bf16") <= 1
    monkeypatch.setattr(driver, "launch", wrong)
    with pytest.raises(AssertionError, match=message):
        check("RMS bf16")


@pytest.mark.parametrize(
    "section, forward, message",
    [
        ("streams", True, "^y "), ("graphs", True, "^y "), ("graphs", False, "^dx "), ("large", True, "^y "),
        ("large", False, "^dx "),
    ],
)  # fmt: skip
def test_kernels_that_do_nothing(check, monkeypatch, section, forward, message):
    """Results that are equal because nobody wrote them are found by what is right."""
    import gpu_behaviour

    right = driver.launch

    def launch(what, arguments, stream):
        if (what.spec.kind == "forward") is not forward:
            right(what, arguments, stream)

    monkeypatch.setattr(driver, "launch", launch)
    with pytest.raises(AssertionError, match=message):
        getattr(gpu_behaviour, section)(check.machine)


def test_libraries_beside_what_is_right(check, monkeypatch):
    import gpu_behaviour
    import gpu_cubins

    arrays = list(gpu_cubins._library_arrays())
    for each in arrays:
        gpu_behaviour._right(check.machine, *each)
    monkeypatch.setattr(driver, "launch", lambda *_: None)
    with pytest.raises(AssertionError, match="^y "):
        gpu_behaviour._right(check.machine, *arrays[0])
