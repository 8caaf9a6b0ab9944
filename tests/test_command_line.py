"""The command line: that what it compiles is all that is needed, and that it tells the truth."""

import json
import os
import platform
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import npnorm.cuda
from npnorm.__main__ import _parser, main
from npnorm._commands.operations import OPERATIONS
from npnorm._plan import Plan

PACKAGE = Path(npnorm.__file__).parents[1]


def python(*arguments, status=0, **environment):
    """Run a new interpreter and return what it wrote to stdout and stderr."""
    environment = {**os.environ, "PYTHONPATH": str(PACKAGE), **{k: str(v) for k, v in environment.items()}}
    it = subprocess.run(
        [sys.executable, *map(str, arguments)], env=environment, capture_output=True, text=True, timeout=300
    )
    assert it.returncode == status, it.stdout + it.stderr
    return it.stdout, it.stderr


def refusal(capsys, *arguments):
    """The message of arguments that are refused."""
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    return capsys.readouterr().err


# The parser
def test_no_command_prints_help(capsys):
    assert main([]) == 0
    out = capsys.readouterr().out
    assert all(command in out for command in ("compile", "info", "check"))


def test_help_does_not_import_numba():
    out, imported = python("-X", "importtime", "-m", "npnorm", "--help")
    assert "usage: npnorm" in out
    assert "npnorm._commands.operations" in imported
    assert not re.search(r"\| +(numba|llvmlite)$", imported, re.MULTILINE)


def test_unknown_names_are_refused_with_the_choices(capsys):
    message = refusal(capsys, "compile", "--operations", "batch_norm")
    assert "batch_norm" in message and all(name in message for name in OPERATIONS)
    message = refusal(capsys, "check", "--dtypes", "float8")
    assert "float8" in message and "choose from float16, bfloat16, float32, float64" in message
    assert "weight+bias" in refusal(capsys, "compile", "--parameters", "gamma")


def test_bfloat16_names_its_package(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    assert "pip install ml_dtypes" in refusal(capsys, "compile", "--dtypes", "bfloat16")


def test_a_wrong_number_of_threads_is_no_traceback():
    _, err = python("-m", "npnorm", "info", NPNORM_NUM_THREADS="many", status=2)
    assert "NPNORM_NUM_THREADS must be an integer" in err and "Traceback" not in err


# compile
def users_calls(operation, x, vector):
    """The calls that users make with the usual parameters."""
    dy = residual = x
    function = getattr(npnorm, operation)
    centered = "layer_norm" in operation
    layer = (npnorm.LayerNorm if centered else npnorm.RMSNorm)(x.shape[-1], dtype=x.dtype)
    bias = vector if centered else None
    statistic = np.ones((len(x), 1))
    saved = {"mean": statistic, "rstd": statistic} if centered else {"rstd": statistic}
    if operation.endswith("backward"):
        for statistics in ({}, saved):
            yield lambda: function(dy, x, vector, **statistics)  # noqa: B023
            yield lambda: layer.backward(dy, x, **statistics)  # noqa: B023
    elif operation.startswith("add"):
        yield lambda: function(x, residual, vector, bias)
        yield lambda: function(x, residual, vector, bias, return_stats=True)
    else:
        yield lambda: function(x, vector, bias, out=np.empty_like(x))
        yield lambda: layer(x, return_stats=True)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_compile_names_every_kernel_of_every_call(operation, dtype, monkeypatch, threads):
    """And no other. The kernels are stand-ins, which find every row extreme, or none."""
    from npnorm._commands.compile import labelled_kernels
    from npnorm.cpu import ahead, launch, quick, specialize

    asked = set()

    def stand_in(*key):
        asked.add(key)

        def run(*arguments):
            start, stop = arguments[-2:]
            return start if extreme_rows and key[1] is False else stop

        return SimpleNamespace(overloads={None: SimpleNamespace(entry_point=run)})

    monkeypatch.setattr(specialize, "build", stand_in)
    monkeypatch.setattr(launch, "STREAMED", 0)
    monkeypatch.setattr(ahead, "streaming_size", lambda: 0)
    threads(2)
    for shape in ((3, 8), (2**15, 8), (300, 1200), (3, 40000), (1, 300000)):
        x, vector = np.ones(shape, dtype), np.ones(shape[1], dtype)
        for extreme_rows in (False, True):  # noqa: B007  a stand-in looks at it
            monkeypatch.setattr(specialize, "_kernels", {})
            monkeypatch.setattr(quick, "_forward", {})
            monkeypatch.setattr(quick, "_backward", {})
            for call in users_calls(operation, x, vector):
                call()
    options = _parser().parse_args(["compile", "--operations", operation, "--dtypes", dtype])
    assert asked == set(labelled_kernels(options))


def kernels(*arguments):
    from npnorm._commands.compile import labelled_kernels

    return set(labelled_kernels(_parser().parse_args(["compile", *arguments])))


def plans(*arguments):
    return [key[0] for key in kernels(*arguments) if isinstance(key[0], Plan)]


def test_compile_options_choose_other_kernels():
    few = "--operations", "layer_norm", "add_rms_norm"
    usual = kernels(*few)
    assert kernels(*few, "--parameters", "usual", "none") > usual
    assert {plan.weight for plan in plans(*few, "--dtypes", "float16", "--weight-dtype", "float32")} == {"float32"}
    assert {plan.x for plan in plans(*few, "--dtypes", "float16", "float64")} == {"float16", "float64"}
    backward = "--operations", "layer_norm_backward"
    assert kernels(*backward, "--dresidual") > kernels(*backward)


PROBE = """
import numpy as np, npnorm
from npnorm.cpu import cache, launch
launch.STREAMED = min(launch.STREAMED, 2**20)
npnorm.set_num_threads(2)
for rows, cols in (3, 8), (2**15, 8), (500, 1000), (500, 2500), (3, 40000), (1, 300000):
    for scale in 1, 1e36:
        x = np.random.default_rng(0).standard_normal((rows, cols)).astype(np.float32) * np.float32(scale)
        weight = bias = np.ones(cols, np.float32)
        y, mean, rstd = npnorm.layer_norm(x, weight, bias, return_stats=True)
        npnorm.layer_norm(x, weight, bias)
        npnorm.layer_norm_backward(x, x, weight, mean=mean, rstd=rstd)
        npnorm.LayerNorm(cols).backward(x, x)
        npnorm.add_rms_norm(x, x, weight)
        npnorm.add_rms_norm(x, x, weight, return_stats=True)
print(dict(cache.outcomes))
"""


def test_after_compile_a_new_process_compiles_nothing(tmp_path):
    operations = ("layer_norm", "layer_norm_backward", "add_rms_norm")
    command = ("-m", "npnorm", "compile", "--operations", *operations, "--cache-dir")
    out, err = python(*command, tmp_path / "kernels")
    files = sorted((tmp_path / "kernels").iterdir())
    count = len(files)
    assert f"{count} kernels: {count} compiled, 0 found" in out
    assert f"Set at run time: NPNORM_CACHE_DIR={tmp_path / 'kernels'}" in out
    assert f"{count}/{count} add_rms_norm float32" in err.splitlines()

    out, _ = python("-W", "error", "-c", PROBE, NPNORM_CACHE_DIR=tmp_path / "kernels")
    assert out.strip() == str({"loaded": count})  # all that was compiled, and nothing saved
    assert sorted((tmp_path / "kernels").iterdir()) == files

    out, _ = python(*command, tmp_path / "kernels")
    assert f"{count} kernels: 0 compiled, {count} found" in out


@pytest.mark.skipif(platform.machine() != "x86_64", reason="names a CPU of x86-64")
def test_the_cpu_is_part_of_the_key(tmp_path):
    command = ("-m", "npnorm", "compile", "--operations", "rms_norm", "--cache-dir", tmp_path)
    older = {"NUMBA_CPU_NAME": "x86-64-v2", "NUMBA_CPU_FEATURES": "+sse4.2"}
    count = len(kernels("--operations", "rms_norm"))
    assert f"{count} compiled, 0 found" in python(*command)[0]
    out, _ = python(*command, **older)
    assert f"{count} compiled, 0 found" in out and "Set at run time: NUMBA_CPU_NAME=x86-64-v2" in out
    out, err = python(*command, **older)
    assert f"0 compiled, {count} found" in out and "this machine's CPU" not in err
    info = json.loads(python("-m", "npnorm", "info", "--json", NPNORM_CACHE_DIR=tmp_path, **older)[0])
    assert info["cpu"]["target"] == "x86-64-v2" and info["cpu"]["features"] == ["sse4.2"]
    assert info["cache"][0]["kernels"] == 2 * count


def test_a_cpu_without_its_features_is_this_machines(tmp_path, capsys, monkeypatch):
    from npnorm._commands import compile as command

    monkeypatch.setattr(command, "labelled_kernels", lambda options: {})
    monkeypatch.setenv("NPNORM_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("NUMBA_CPU_NAME", "x86-64-v3")
    monkeypatch.delenv("NUMBA_CPU_FEATURES", raising=False)
    assert main(["compile"]) == 0
    assert "set NUMBA_CPU_FEATURES, too" in capsys.readouterr().err


def test_compile_fails_where_nothing_can_be_kept(tmp_path, capsys, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("NPNORM_CACHE_DIR", "")  # undone after the test, whatever the command sets
    assert main(["compile", "--cache-dir", str(tmp_path / "file" / "folder")]) == 1
    assert f"cannot write to {tmp_path}" in capsys.readouterr().err


def test_compile_fails_when_a_kernel_is_not_saved(tmp_path, capsys, monkeypatch):
    from npnorm import _files

    def full(*_):
        raise OSError("no space left")

    monkeypatch.setattr(_files, "_write", full)
    monkeypatch.setattr(_files, "_warned", False)
    monkeypatch.setenv("NPNORM_CACHE_DIR", str(tmp_path))
    assert main(["compile", "--operations", "rms_norm"]) == 1
    out, err = capsys.readouterr()
    count = len(kernels("--operations", "rms_norm"))
    assert f"0 compiled, 0 found in the cache, {count} not saved" in out
    assert "no space left" in err


def test_progress_is_a_bar_on_a_terminal(capsys, monkeypatch):
    from npnorm._commands.operations import with_progress

    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    assert list(with_progress([("one", 1), ("two", 2)])) == [1, 2]
    err = capsys.readouterr().err
    assert f"\r[{'#' * 15}{' ' * 15}] 1/2 two" in err and "\n" not in err


# info
def test_info(tmp_path):
    (tmp_path / "npnorm-0.nbc").write_bytes(b"1234")
    (tmp_path / "other").write_bytes(b"1234")
    environment = {"NPNORM_CACHE_DIR": tmp_path, "NPNORM_NUM_THREADS": 3}
    found = json.loads(python("-m", "npnorm", "info", "--json", **environment)[0])
    assert found["versions"]["npnorm"] == npnorm.__version__
    assert found["versions"]["numpy"] == np.__version__
    assert found["threads"] == {"number": 3, "decided_by": "NPNORM_NUM_THREADS"}
    assert found["cache"] == [{"folder": str(tmp_path), "writable": True, "kernels": 1, "bytes": 4}]
    gpu = found["gpu"]
    assert bool(gpu["devices"]) is (gpu["problem"] is None)
    assert not (gpu["missing"] and gpu["devices"])


def test_info_names_devices(monkeypatch):
    from npnorm._commands.info import gpu, gpu_line

    h200, t4 = ("NVIDIA H200", (9, 0)), ("Tesla T4", (7, 5))
    monkeypatch.setattr("npnorm.cuda.driver.missing", lambda: [])
    monkeypatch.setattr("npnorm.cuda.driver.devices", lambda: [h200, t4, h200])
    assert gpu_line(gpu()) == "NVIDIA H200 (9.0), NVIDIA H200 (9.0)"
    monkeypatch.setattr("npnorm.cuda.driver.devices", lambda: [t4])
    assert gpu_line(gpu()) == "none usable: the driver finds no device of compute capability 8.0 or newer"


def test_info_for_readers(capsys):
    assert main(["info"]) == 0
    lines = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert lines["threads"].startswith(f"{npnorm.get_num_threads()}: ")
    assert lines["cache"].startswith(os.environ["NPNORM_CACHE_DIR"])
    assert lines["GPU"].startswith("none usable: ") is not npnorm.cuda.is_available()


def test_info_says_what_cannot_be_written(tmp_path):
    from npnorm.cpu.cache import is_writable

    (tmp_path / "file").touch()
    assert is_writable(tmp_path / "new" / "folder")
    assert not (tmp_path / "new").exists()
    assert not is_writable(tmp_path / "file") and not is_writable(tmp_path / "file" / "folder")


# check
def test_check_passes(capsys):
    operations = ["layer_norm", "layer_norm_backward", "add_rms_norm"]
    assert main(["check", "--operations", *operations, "--dtypes", "float32", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["passed"]
    assert [result["operation"] for result in found["results"]] == operations
    for result in found["results"]:
        assert 0 < result["error"] <= 1 and result["within"]
        assert [measured["shape"] for measured in result["times"]] == [[1, 768], [512, 768], [4096, 768]]
        assert all(measured["seconds"] > 0 for measured in result["times"])


def wrong(operation, change):
    """An operation whose first result is multiplied by `change`; dbias, of a backward."""
    right = getattr(npnorm, operation)

    def call(*arguments, **options):
        result = right(*arguments, **options)
        if operation.endswith("backward"):
            return result._replace(dbias=result.dbias * change)
        if operation.startswith("add"):
            return result._replace(residual_out=result.residual_out * change)
        return result * change

    return call


@pytest.mark.parametrize("operation", ["layer_norm", "layer_norm_backward", "add_rms_norm"])
@pytest.mark.parametrize("change", [1 + 1e-6, np.nan])
def test_check_finds_a_wrong_number(operation, change, capsys, monkeypatch):
    monkeypatch.setattr(npnorm, operation, wrong(operation, np.float32(change)))
    assert main(["check", "--operations", operation, "--dtypes", "float32"]) == 1
    out = capsys.readouterr().out
    assert "FAIL" in out and "larger than npnorm promises" in out
