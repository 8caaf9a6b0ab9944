"""Start-up, threads, processes, the cache and other CPUs: right results, no abort, no hang.

Most of it happens in processes of its own, each held to a time it can only miss by hanging.
"""

import gc
import os
import platform
import shutil
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from bounds import assert_same_bits
from table import NORMS, random

import npnorm
from npnorm.cpu import machine, work

PACKAGE = Path(npnorm.__file__).parent
TESTS = Path(__file__).parent
HANGS = 120  # seconds
has_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
on_x86 = pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="x86-64 only")

# Prints the warnings that calls gave, one a line; whatever is wrong raises.
PROBE = """
import warnings
import numpy as np
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import npnorm
    from npnorm import reference
    x = np.random.default_rng(0).standard_normal((40, 129))
    for dtype in DTYPES:
        rows = x.astype(dtype)
        for name in NORMS:
            for weights in ((), (rows[0],)):
                for _ in range(2):
                    y = getattr(npnorm, name)(rows, *weights)
                    expected = getattr(reference, name)(rows, *weights)
                    tolerance = 4 * np.finfo(dtype).eps
                    np.testing.assert_allclose(y, expected, rtol=tolerance, atol=tolerance)
for warning in caught:
    print(warning.category.__name__, str(warning.message).replace("\\n", " "))
"""


def probe(*dtypes, norms=("rms_norm",)):
    """PROBE for two kernels of each dtype: what is done with files of kernels does not depend on what is in them."""
    return PROBE.replace("DTYPES", repr(dtypes)).replace("NORMS", repr(norms))


SHORT_PROBE = probe("float32")


def python(code, *arguments, package=PACKAGE, **options):
    """Run code in a new interpreter and return what it printed. Environment: keywords in capitals."""
    changes = {name: options.pop(name) for name in list(options) if name.isupper()}
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(package.parent), str(TESTS)])}
    for name, value in changes.items():
        environment.pop(name, None)
        if value is not None:
            environment[name] = str(value)
    options.setdefault("cwd", TESTS)  # not the folder of the package, which would come first
    command = [sys.executable, *arguments, *(["-c", textwrap.dedent(code)] if code else [])]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=environment, start_new_session=True, **pipes, **options) as it:
        try:
            out, err = it.communicate(timeout=HANGS)
        except subprocess.TimeoutExpired:
            # With all its children: one of them is what hangs.
            getattr(os, "killpg", lambda pid, _: it.kill())(it.pid, 9)
            out, err = it.communicate()
            raise AssertionError(f"no end after {HANGS} s\n{out}\n{err}") from None
    assert it.returncode == 0, f"exit {it.returncode}\n{out}\n{err}"
    return out


# Start-up


def test_import_is_light():
    """Nothing heavy is imported, not even to find out what an array is."""
    python("""
        import sys
        import npnorm
        import numpy as np
        heavy = {"numba", "llvmlite", "cupy", "torch", "jax", "ml_dtypes", "scipy", "tensorflow", "logging"}
        assert not heavy & set(sys.modules), heavy & set(sys.modules)
        npnorm.LayerNorm(8), npnorm.RMSNorm(8)
        npnorm.reference.layer_norm(np.ones((2, 3)))
        try:
            npnorm.layer_norm(np.ones((2, 3)), np.ones(4))
        except ValueError:
            pass
        assert not heavy & set(sys.modules), heavy & set(sys.modules)
        npnorm.layer_norm(np.ones((2, 3), np.float16))
        assert not {"cupy", "torch", "jax", "ml_dtypes", "tensorflow"} & set(sys.modules)
    """)


def test_import_without_any_warning():
    assert python("import npnorm", "-W", "error", "-X", "dev") == ""


def test_the_reference_needs_no_numba():
    """The specification runs where Numba is missing or refuses to be imported."""
    python("""
        import sys
        sys.modules["numba"] = None
        import npnorm
        import numpy as np
        assert npnorm.reference.rms_norm(np.array([[3.0, -3.0]]), eps=0.0).tolist() == [[1.0, -1.0]]
    """)


def test_public_names():
    expected = {
        "layer_norm", "rms_norm", "layer_norm_backward", "rms_norm_backward", "add_layer_norm",
        "add_rms_norm", "LayerNorm", "RMSNorm", "reference", "set_num_threads", "get_num_threads",
    }  # fmt: skip
    assert expected <= set(npnorm.__all__)
    assert all(hasattr(npnorm, name) for name in npnorm.__all__)
    assert isinstance(npnorm.__version__, str)
    for name in expected - {"reference"}:
        assert getattr(npnorm, name).__doc__, f"{name} has no docstring"
        assert getattr(npnorm, name).__module__.startswith("npnorm")


# Threads


def jobs():
    """(norm, dy, x, weight) of many shapes and dtypes, some large enough for several threads."""
    shapes = [(3, 7), (100, 129), (1500, 769), (2, 70001), (5000, 33), (1, 5), (17, 4097)]
    for i, shape in enumerate(shapes * 2):
        for norm in NORMS:
            dtype = ("float32", "float64", "float16")[i % 3]
            yield norm, random(shape, dtype), random(shape, dtype, 1), random(shape[1], dtype, 2)


def run_job(job):
    norm, dy, x, weight = job
    result = norm.forward(x, weight, return_stats=True)
    return [*result, *norm.backward(dy, x, weight, **norm.saved(result))]


def test_many_threads_at_once(threads):
    """Different shapes at the same time, more callers than CPUs, the pool shared by all."""
    threads(3)
    work = list(jobs())
    expected = [run_job(job) for job in work]
    barrier = threading.Barrier(8)

    def caller(seed):
        barrier.wait()
        order = np.random.default_rng(seed).permutation(len(work))
        return [(i, run_job(work[i])) for i in order]

    with ThreadPoolExecutor(8) as executor:
        for results in executor.map(caller, range(8)):
            for i, result in results:
                for one, other in zip(result, expected[i], strict=True):
                    assert_same_bits(one, other)


def test_many_threads_at_the_very_first_call(tmp_path):
    """Compilation, the cache and the pool are started by eight threads at once."""
    python(
        """
        import threading
        import numpy as np
        import npnorm
        npnorm.set_num_threads(3)
        x = np.random.default_rng(0).standard_normal((2000, 257)).astype(np.float32)
        expected = npnorm.reference.layer_norm(x)
        results, barrier = [], threading.Barrier(8)
        def call():
            barrier.wait()
            results.append(npnorm.layer_norm(x))
        callers = [threading.Thread(target=call) for _ in range(8)]
        for caller in callers: caller.start()
        for caller in callers: caller.join()
        assert len(results) == 8
        for result in results:
            assert np.array_equal(result, results[0])
            np.testing.assert_allclose(result, expected, rtol=1e-6, atol=1e-6)
        """,
        NPNORM_CACHE_DIR=tmp_path,
    )


def test_changing_the_thread_count_while_calls_run(threads):
    x = random((3000, 257))
    expected = npnorm.layer_norm(x)
    stop = threading.Event()

    def change():
        count = 0
        while not stop.is_set():
            count += 1
            npnorm.set_num_threads(count % 5 + 1)

    changer = threading.Thread(target=change)
    changer.start()
    try:
        for _ in range(50):
            assert_same_bits(npnorm.layer_norm(x), expected)
    finally:
        stop.set()
        changer.join()


def test_threads_end_with_the_process():
    """Daemon or joined: an interpreter that used the pool exits, also from a caller's thread."""
    python("""
        import threading
        import numpy as np
        import npnorm
        npnorm.set_num_threads(4)
        x = np.ones((4000, 500), np.float32)
        caller = threading.Thread(target=lambda: npnorm.rms_norm(x))
        caller.start()
        npnorm.rms_norm(x)
    """)


@pytest.mark.parametrize("value", ["1", "3", "16"])
def test_thread_count_of_the_environment(value):
    code = "import npnorm; print(npnorm.get_num_threads())"
    assert python(code, NPNORM_NUM_THREADS=value).strip() == value


@pytest.mark.parametrize("value", ["0", "-1", "many", "1.5"])
def test_wrong_thread_count_of_the_environment(value):
    """Said when it is needed, by name; the import goes well."""
    python(
        """
        import numpy as np
        import npnorm
        for call in (npnorm.get_num_threads, lambda: npnorm.rms_norm(np.ones((4000, 1000)))):
            try:
                call()
            except ValueError as error:
                assert "NPNORM_NUM_THREADS" in str(error), error
            else:
                raise AssertionError("no error")
        npnorm.set_num_threads(2)
        npnorm.rms_norm(np.ones((4000, 1000)))
        """,
        NPNORM_NUM_THREADS=value,
    )


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no affinity")
def test_thread_count_honours_affinity():
    python(
        """
        import os
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        import npnorm
        assert npnorm.get_num_threads() == 1
        """,
        NPNORM_NUM_THREADS=None,
    )


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="no affinity")
@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"cpu.max": "max 100000\n"}, 64),
        ({"cpu.max": "150000 100000\n"}, 2),
        ({"cpu.max": "400000 100000\n"}, 4),
        ({"cpu.max": "1000 100000\n"}, 1),
        ({"cpu.max": "9900000 100000\n"}, 64),
        ({"cpu.cfs_quota_us": "-1\n", "cpu.cfs_period_us": "100000\n"}, 64),
        ({"cpu.cfs_quota_us": "300000\n", "cpu.cfs_period_us": "100000\n"}, 3),
        ({"cpu.max": "nonsense"}, 64),
        ({"cpu.max": ""}, 64),
        ({}, 64),
    ],
    ids=str,
)
def test_thread_count_honours_the_quota_of_a_container(files, expected):
    """control groups, version 2 and 1; a process of 64 CPUs."""
    python(
        f"""
        import builtins, io, os
        import npnorm
        files, real = {files!r}, open
        def fake(path, *arguments, **options):
            if isinstance(path, int) or not os.fspath(path).startswith(("/sys/", "/proc/self/cgroup")):
                return real(path, *arguments, **options)
            if os.path.basename(path) in files:
                return io.StringIO(files[os.path.basename(path)])
            if os.fspath(path) == "/proc/self/cgroup":
                return io.StringIO("0::/\\n")
            raise FileNotFoundError(path)
        os.sched_getaffinity = lambda pid: set(range(64))
        builtins.open = io.open = fake
        assert npnorm.get_num_threads() == {expected}, npnorm.get_num_threads()
        """,
        NPNORM_NUM_THREADS=None,
    )


# Processes

FORK = """
import os, sys, threading, time, warnings
import numpy as np
import npnorm
warnings.simplefilter("ignore", DeprecationWarning)  # of forking with threads

def in_child(function):
    child = os.fork()
    if child == 0:
        try:
            function()
            os._exit(0)
        except BaseException:
            import traceback
            traceback.print_exc()
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert status == 0, f"the child ended with {status}"

npnorm.set_num_threads(3)
x = np.random.default_rng(0).standard_normal((3000, 513)).astype(np.float32)
def check():
    assert np.array_equal(npnorm.layer_norm(x), expected)
    for one, other in zip(npnorm.layer_norm_backward(x, x, x[0]), gradients):
        assert np.array_equal(one, other)
    assert npnorm.get_num_threads() == 3
"""


@has_fork
def test_fork_after_use():
    """The pool of the parent does not exist in the child; the parent's goes on."""
    python(FORK + """
expected, gradients = npnorm.layer_norm(x), npnorm.layer_norm_backward(x, x, x[0])
for _ in range(5):
    in_child(check)
    check()
in_child(lambda: (check(), in_child(check), check()))
""")


@has_fork
def test_fork_before_use():
    python(FORK + """
def first():
    global expected, gradients
    expected, gradients = npnorm.layer_norm(x), npnorm.layer_norm_backward(x, x, x[0])
    check()
in_child(first)
first()
in_child(check)
""")


@has_fork
def test_fork_while_other_threads_call():
    """Locks that another thread holds at the fork must not stay locked in the child."""
    python(FORK + """
expected, gradients = npnorm.layer_norm(x), npnorm.layer_norm_backward(x, x, x[0])
stop = threading.Event()
def keep_calling():
    while not stop.is_set():
        check()
callers = [threading.Thread(target=keep_calling) for _ in range(3)]
for caller in callers: caller.start()
for _ in range(15):
    in_child(check)
stop.set()
for caller in callers: caller.join()
check()
""")


@has_fork
@pytest.mark.parametrize("delay", [0.1, 0.25, 0.5, 1.0, 2.5])
def test_fork_while_another_thread_starts_up(tmp_path, delay):
    """It imports Numba or compiles, under locks that no thread of the child would release."""
    python(
        f"""
        import faulthandler, os, threading, time, warnings
        import numpy as np
        import npnorm
        warnings.simplefilter("ignore", DeprecationWarning)
        x = np.random.default_rng(0).standard_normal((3000, 513)).astype(np.float32)
        def call():
            for dtype in (np.float32, np.float64, np.float16):
                npnorm.rms_norm(x.astype(dtype))
        caller = threading.Thread(target=call)
        caller.start()
        time.sleep({delay})
        child = os.fork()
        if child == 0:
            faulthandler.dump_traceback_later(40, exit=True)
            y = npnorm.rms_norm(x)
            np.testing.assert_allclose(y, npnorm.reference.rms_norm(x), rtol=1e-6)
            os._exit(0)
        caller.join()
        _, status = os.waitpid(child, 0)
        assert status == 0, f"the child ended with {{status}}"
        """,
        NPNORM_CACHE_DIR=tmp_path,
    )


PROCESSES = """
import concurrent.futures, multiprocessing, sys, warnings
import numpy as np
import npnorm

def task(seed):
    x = np.random.default_rng(seed).standard_normal((2000, 257)).astype(np.float32)
    y = npnorm.layer_norm(x, return_stats=True)
    return y.y.sum(dtype=np.float64), npnorm.layer_norm_backward(x, x, x[0], mean=y.mean, rstd=y.rstd).dweight

def check(results, expected):
    results = list(results)
    assert len(results) == len(expected)
    for (total, dweight), (other, other_dweight) in zip(results, expected):
        assert total == other and np.array_equal(dweight, other_dweight)

if __name__ == "__main__":
    warnings.simplefilter("ignore", DeprecationWarning)
    npnorm.set_num_threads(2)
    expected = [task(seed) for seed in range(6)]
"""


def script(tmp_path, body):
    """Run PROCESSES with this body from a file, which spawned processes can import."""
    path = tmp_path / "script.py"
    path.write_text(PROCESSES + textwrap.indent(textwrap.dedent(body), "    "))
    python(None, str(path))


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_multiprocessing(tmp_path, method):
    if method not in __import__("multiprocessing").get_all_start_methods():
        pytest.skip(f"no {method} here")
    script(
        tmp_path,
        f"""
        with multiprocessing.get_context("{method}").Pool(2) as pool:
            check(pool.map(task, range(6), 1), expected)
        """,
    )


def test_concurrent_futures(tmp_path):
    script(
        tmp_path,
        """
        with concurrent.futures.ThreadPoolExecutor(6) as executor:
            check(executor.map(task, range(6)), expected)
        with concurrent.futures.ProcessPoolExecutor(2) as executor:
            check(executor.map(task, range(6)), expected)
        """,
    )


@pytest.mark.parametrize("backend", ["loky", "threading", "multiprocessing"])
def test_joblib(tmp_path, backend):
    pytest.importorskip("joblib")
    script(
        tmp_path,
        f"""
        import joblib
        for _ in range(2):
            run = joblib.Parallel(n_jobs=2, backend="{backend}")
            check(run(joblib.delayed(task)(seed) for seed in range(6)), expected)
        """,
    )


def test_memory_maps_of_joblib(tmp_path):
    """Large arguments reach joblib's workers as read-only np.memmap."""
    joblib = pytest.importorskip("joblib")
    x = random((300, 129))
    joblib.dump(x, tmp_path / "x")
    mapped = joblib.load(tmp_path / "x", mmap_mode="r")
    assert isinstance(mapped, np.memmap)
    assert_same_bits(npnorm.layer_norm(mapped), npnorm.layer_norm(x))


def test_dask(tmp_path):
    array = pytest.importorskip("dask.array")
    x = random((300, 129))
    y = array.from_array(x, chunks=(50, 129)).map_blocks(npnorm.layer_norm)
    assert_same_bits(y.compute(), npnorm.layer_norm(x))


# The cache


def warnings_of(text):
    return [line for line in text.splitlines() if line]


def assert_one_warning(text):
    lines = warnings_of(text)
    assert len(lines) == 1, text
    assert lines[0].startswith("RuntimeWarning")
    assert "NPNORM_CACHE_DIR" in lines[0]


def files_of(folder):
    return sorted(path for path in folder.rglob("*") if path.is_file())


def test_cache_is_filled_and_used(tmp_path):
    """A folder that is missing is made; the next process compiles nothing."""
    folder = tmp_path / "not" / "there yet, and ünicode"
    calls = probe("float32", norms=("layer_norm", "rms_norm"))
    assert warnings_of(python(calls, NPNORM_CACHE_DIR=folder)) == []
    files = files_of(folder)
    assert files, "nothing was cached"
    before = [(path, path.stat().st_mtime_ns) for path in files]
    counting = """
        from numba.core import compiler
        compiler.Compiler.compile_extra = property(lambda self: 1 / 0)
        compiler.CompilerBase.compile_extra = property(lambda self: 1 / 0)
    """
    assert warnings_of(python(textwrap.dedent(counting) + calls, NPNORM_CACHE_DIR=folder)) == []
    assert [(path, path.stat().st_mtime_ns) for path in files_of(folder)] == before


def test_cache_folder_that_cannot_be_made(tmp_path):
    """Below a file; so not even root can."""
    (tmp_path / "file").write_text("")
    assert_one_warning(python(probe("float32", "float64"),
                              NPNORM_CACHE_DIR=tmp_path / "file" / "folder"))  # fmt: skip
    assert_one_warning(python(SHORT_PROBE, NPNORM_CACHE_DIR=tmp_path / "file"))


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="no user ids")
def test_read_only_cache_folder(tmp_path):
    folder = tmp_path / "frozen"
    folder.mkdir()
    folder.chmod(0o555)
    tmp_path.chmod(0o755)
    user = {}
    if os.geteuid() == 0:
        # Root writes everywhere: be nobody, if nobody can read this Python and this folder.
        user = {"user": 65534}
        try:
            python("import numpy, numba; open(__import__('os').environ['PYTHONPATH'].split(':')[0] + "
                   "'/npnorm/__init__.py').close()", **user)  # fmt: skip
        except (AssertionError, OSError):
            pytest.skip("root, and nobody cannot read this Python")
    assert_one_warning(python(SHORT_PROBE, NPNORM_CACHE_DIR=folder, **user))
    assert files_of(folder) == []


def test_full_disk(tmp_path):
    """No file can grow beyond 100 bytes: a partial file is not left behind, or does no harm."""
    pytest.importorskip("resource")
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))\n"
    assert_one_warning(python(limit + SHORT_PROBE, "-B", NPNORM_CACHE_DIR=tmp_path))
    assert warnings_of(python(SHORT_PROBE, NPNORM_CACHE_DIR=tmp_path)) == []


@pytest.fixture(scope="module")
def filled_cache(tmp_path_factory):
    folder = tmp_path_factory.mktemp("filled")
    python(SHORT_PROBE, NPNORM_CACHE_DIR=folder)
    return folder


def flip_bits(data, places):
    data = bytearray(data)
    for place in places:
        data[int(place * (len(data) - 1))] ^= 0x10
    return bytes(data)


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(lambda data: b"", id="empty"),
        pytest.param(lambda data: data[:1], id="one byte"),
        pytest.param(lambda data: data[: len(data) // 2], id="half"),
        pytest.param(lambda data: data[:-1], id="one byte short"),
        pytest.param(lambda data: data + b"more", id="longer"),
        pytest.param(lambda data: bytes(len(data)), id="zeros"),
        pytest.param(lambda data: b"not a kernel " * 100, id="text"),
        pytest.param(lambda data: flip_bits(data, [0.5]), id="a bit in the middle"),
        pytest.param(lambda data: flip_bits(data, np.linspace(0, 1, 97)), id="bits everywhere"),
    ],
)
def test_damaged_cache(tmp_path, filled_cache, damage):
    """Cut short by a killed worker, or worse: never wrong machine code, and the next start is well."""
    folder = tmp_path / "cache"
    shutil.copytree(filled_cache, folder)
    files = files_of(folder)
    for path in files:
        path.write_bytes(damage(path.read_bytes()))
    assert_one_warning(python(SHORT_PROBE, NPNORM_CACHE_DIR=folder))
    assert len(warnings_of(python(SHORT_PROBE, NPNORM_CACHE_DIR=folder))) <= 1


def test_cache_files_that_are_folders(tmp_path, filled_cache):
    folder = tmp_path / "cache"
    for path in files_of(filled_cache):
        (folder / path.relative_to(filled_cache)).mkdir(parents=True)
    assert_one_warning(python(SHORT_PROBE, NPNORM_CACHE_DIR=folder))


def test_another_kernels_file(tmp_path, filled_cache):
    """Files under each other's names: whole, and wrong."""
    folder = tmp_path / "cache"
    shutil.copytree(filled_cache, folder)
    files = files_of(folder)
    contents = [path.read_bytes() for path in files]
    for path, content in zip(files, contents[1:] + contents[:1], strict=True):
        path.write_bytes(content)
    assert len(warnings_of(python(SHORT_PROBE, NPNORM_CACHE_DIR=folder))) <= 1


def test_processes_that_fill_the_cache_together(tmp_path):
    def start(_):
        return python(SHORT_PROBE, NPNORM_CACHE_DIR=tmp_path)

    with ThreadPoolExecutor(3) as executor:
        assert all(warnings_of(text) == [] for text in executor.map(start, range(3)))
    assert warnings_of(python(SHORT_PROBE, NPNORM_CACHE_DIR=tmp_path)) == []


def copy_of_package(tmp_path):
    """A copy whose own cache folders cannot be made, since files stand in their place."""
    copy = tmp_path / "site" / "npnorm"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    for folder in [copy, *(path for path in copy.rglob("*") if path.is_dir())]:
        (folder / "__pycache__").write_text("in the way")
    return copy


@pytest.mark.skipif(sys.platform == "win32", reason="no HOME")
def test_no_folder_to_write_to(tmp_path):
    """A read-only installation and no home: as in many containers."""
    text = python(
        SHORT_PROBE, package=copy_of_package(tmp_path),
        NPNORM_CACHE_DIR=None, HOME="/dev/null", XDG_CACHE_HOME=None,
    )  # fmt: skip
    assert_one_warning(text)


@pytest.mark.skipif(sys.platform == "win32", reason="no HOME")
def test_a_read_only_installation_uses_the_home(tmp_path):
    home = tmp_path / "home"
    text = python(
        SHORT_PROBE, package=copy_of_package(tmp_path),
        NPNORM_CACHE_DIR=None, HOME=home, XDG_CACHE_HOME=None,
    )  # fmt: skip
    assert warnings_of(text) == []
    assert files_of(home / ".cache")


@pytest.mark.skipif(sys.platform == "win32", reason="no HOME")
def test_home_is_not_set(tmp_path):
    copy = tmp_path / "site" / "npnorm"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    text = python(
        SHORT_PROBE, package=copy, NPNORM_CACHE_DIR=None, HOME=None, XDG_CACHE_HOME=None, USER=None
    )
    assert warnings_of(text) == []


def test_the_cache_does_not_outlive_the_source(tmp_path):
    """An edited kernel module is compiled anew: the files of the old one are not looked at."""
    copy = tmp_path / "site" / "npnorm"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    folder = tmp_path / "cache"
    python(SHORT_PROBE, package=copy, NPNORM_CACHE_DIR=folder)
    before = files_of(folder)
    with (copy / "cpu" / "kernels.py").open("a") as file:
        file.write("\n# edited\n")
    python(SHORT_PROBE, package=copy, NPNORM_CACHE_DIR=folder)
    assert len(files_of(folder)) > len(before)


# Other CPUs

CHECK_HALVES = """
import warnings
warnings.simplefilter("ignore")  # of casts, from NumPy
from bounds import check_backward, check_forward
from table import HALVES, LAYER_NORM, random
from test_edges import check_conversions

for half in HALVES:
    check_conversions(half)
    x, dy, weight = random((9, 129), half), random((9, 129), half, 1), random(129, half, 2)
    check_forward(LAYER_NORM, LAYER_NORM.forward(x, weight), x, weight)
    check_backward(LAYER_NORM, LAYER_NORM.backward(dy, x, weight), dy, x, weight)
"""


@on_x86
@pytest.mark.parametrize("name", ["generic", "x86-64-v2"])
def test_other_cpus(tmp_path, name):
    """Without F16C, LLVM's own conversion of float16 calls a missing function and kills the process."""
    python(CHECK_HALVES, NUMBA_CPU_NAME=name, NPNORM_CACHE_DIR=tmp_path)


@on_x86
def test_the_cache_knows_the_cpu(tmp_path):
    """A folder shared by machines: kernels of one CPU are not run on another."""
    code = probe("float16")
    python(code, NPNORM_CACHE_DIR=tmp_path, NUMBA_CPU_NAME="x86-64-v3")
    before = files_of(tmp_path)
    python(code, NPNORM_CACHE_DIR=tmp_path, NUMBA_CPU_NAME="generic")
    assert len(files_of(tmp_path)) == 2 * len(before)


# The pool


JOBS = [(i,) for i in range(4)]


@pytest.fixture
def own_pool(monkeypatch):
    from npnorm.cpu import pool

    monkeypatch.setattr(pool, "_pool", pool._Pool())
    return pool


def test_a_thread_finds_work_whether_it_waits_or_sleeps(own_pool, monkeypatch):
    """And so does the caller its end. Without waiting, and with waiting only."""
    for rounds in (0, own_pool.ROUNDS, 10**8):
        monkeypatch.setattr(own_pool, "ROUNDS", rounds)
        for pause in (0.0, 1e-5, 1e-3, 2e-2):
            seen = {}

            def work(job, seen=seen):
                time.sleep(5e-3)
                seen[job] = threading.get_ident()

            own_pool.run(work, [(job,) for job in range(6)], 3)
            assert sorted(seen) == list(range(6))
            assert len(set(seen.values())) > 1
            time.sleep(pause)
        own_pool._pool.batches += 1  # those that wait for long look up, and sleep
        time.sleep(1e-2)


def test_no_thread_can_be_started(own_pool, monkeypatch):
    """A limit on processes, or an interpreter that ends: the caller does the work alone."""

    def start(self):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    done = []
    own_pool.run(done.append, JOBS, 4)
    assert sorted(done) == [0, 1, 2, 3]


def test_an_interrupt_waits_for_helpers(own_pool, monkeypatch):
    """Nothing is written any more when the exception reaches the caller."""
    begun, ended, caller = threading.Event(), [], threading.current_thread()

    def job(i):
        if threading.current_thread() is not caller:
            begun.set()
            time.sleep(0.3)
            ended.append(i)

    class Interrupted(own_pool._Batch):
        def work(self):
            if threading.current_thread() is caller:
                assert begun.wait(HANGS)
                raise KeyboardInterrupt
            super().work()

    monkeypatch.setattr(own_pool, "_Batch", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        own_pool.run(job, JOBS, 2)
    before = list(ended)
    time.sleep(0.4)
    assert before and ended == before


def test_an_error_keeps_no_arrays(own_pool):
    class Array:
        pass

    array = Array()
    alive = weakref.ref(array)

    def fail(i, array=array):
        raise ZeroDivisionError

    gc.disable()
    try:
        with pytest.raises(ZeroDivisionError):
            own_pool.run(fail, JOBS, 2)
        del fail, array
        for _ in range(100):  # helpers may still hold the batch for a moment
            if alive() is None:
                break
            time.sleep(0.01)
        assert alive() is None
    finally:
        gc.enable()


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no affinity")
def test_the_number_of_threads_follows_the_affinity():
    code = """
    import os, npnorm
    before = npnorm.get_num_threads()
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    print(before, npnorm.get_num_threads())
    """
    before, after = map(int, python(code, NPNORM_NUM_THREADS=None).split())
    assert before >= after == 1


def test_every_source_is_part_of_the_key(tmp_path):
    """An edit of any file of the backend compiles anew."""
    from npnorm.cpu import cache

    folder = Path(cache.__file__).parent
    copy = tmp_path / "cpu"
    shutil.copytree(folder, copy, ignore=shutil.ignore_patterns("__pycache__"))
    keys = set()
    for source in [None, *sorted(copy.glob("*.py"))]:
        if source is not None:
            source.write_text(source.read_text() + "# an edit\n")
        keys.add(cache.hash_of(copy))
    assert len(keys) == 1 + len(list(folder.glob("*.py")))


@pytest.mark.parametrize("setting", ["BOUNDSCHECK", "LOOP_VECTORIZE"])
def test_numbas_settings_are_part_of_the_key(monkeypatch, setting):
    import numba
    from numba.core.registry import cpu_target

    from npnorm.cpu.cache import KernelCache

    def name():
        return KernelCache("a kernel")._file_name("its types", cpu_target.target_context)

    before = name()
    assert name() == before
    monkeypatch.setattr(numba.config, setting, "another")
    assert name() != before


def test_the_python_build_is_part_of_the_key(monkeypatch):
    """Objects of a free-threaded build are larger: code for another one would read wrong memory."""
    from numba.core.registry import cpu_target

    from npnorm.cpu import cache

    names = set()
    for suffix in (".cpython-314-x86_64-linux-gnu.so", ".cpython-314t-x86_64-linux-gnu.so"):
        monkeypatch.setattr(cache, "EXTENSION_SUFFIXES", [suffix])
        names.add(cache.KernelCache("a kernel")._file_name("its types", cpu_target.target_context))
    assert len(names) == 2


@pytest.mark.parametrize(("size", "streamed"), [(2**25, 2**24), (504 * 2**20, 2**25), (0, 2**24)])
def test_outputs_go_past_a_cache_that_is_no_share_of_a_server(monkeypatch, size, streamed):
    """A virtual machine sees the whole last cache of its host, 504 MB, of which its cores get a small part."""
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(machine, "_read_size", lambda path: size)
    monkeypatch.setattr(machine, "glob", lambda pattern: ["size"])
    assert machine.streaming_size() == streamed


def test_pages_of_large_new_arrays_are_made_first(monkeypatch, threads):
    monkeypatch.setattr(work, "MAPPED", 3 * work.PAGE)
    for count in (1, 2):
        threads(count)
        small, large = (np.full((3, size), 7, np.uint8) for size in (work.PAGE - 1, 300 * work.PAGE + 5))
        work.touch(None, small, large)
        written = np.flatnonzero(large != 7)
        assert (small == 7).all() and (written == np.arange(0, large.size, work.PAGE)).all()
