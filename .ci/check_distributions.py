"""Build the sdist and from it the wheel, look into both, and use the wheel where only its dependencies are.

Run from the repository by a Python that has the package `build`: ``make dist-check``.
"""

import email
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WORK = ROOT / "build" / "dist-check"

SMOKE_TEST = """
import importlib.metadata, pathlib, sys
import npnorm
assert "numba" not in sys.modules, "import npnorm alone imports Numba"
import numpy as np
assert pathlib.Path(npnorm.__file__).is_relative_to(sys.prefix), npnorm.__file__
assert importlib.metadata.version("npnorm") == npnorm.__version__
x = np.random.default_rng(0).standard_normal((5, 64), dtype=np.float32)
weight = np.ones(64, np.float32)
for name, arguments in {
    "layer_norm": (x, weight),
    "rms_norm_backward": (x, x, weight),
    "add_rms_norm": (x, x),
}.items():
    for got, right in zip(*(getattr(where, name)(*arguments) for where in (npnorm, npnorm.reference)), strict=True):
        np.testing.assert_allclose(got, right, rtol=1e-5, atol=1e-5)
np.testing.assert_allclose(npnorm.rms_norm_jvp(x, dx=x), npnorm.reference.rms_norm_jvp(x, dx=x), rtol=1e-5, atol=1e-9)
"""


def run(*command, cwd=ROOT):
    """What a command prints; its errors too, if it fails."""
    result = subprocess.run(list(map(str, command)), cwd=cwd, capture_output=True, text=True)
    check(result.returncode == 0, f"{command[1:5]} failed:\n{result.stdout}{result.stderr}")
    return result.stdout


def check(condition, message):
    if not condition:
        raise SystemExit(f"dist-check: {message}")


def sources():
    """The files that a wheel must have of the package."""
    return {str(path.relative_to(ROOT)) for path in (ROOT / "npnorm").rglob("*.py")} | {
        "npnorm/py.typed",
        "_npnorm_numba.py",
    }


def check_wheel(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (metadata,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        fields = email.message_from_string(archive.read(metadata).decode())
    information = metadata.removesuffix("METADATA")
    package = {name for name in names if not name.startswith(information)}
    check(package == sources(), f"the wheel differs from the package in {sorted(package ^ sources())}")
    for name in ("licenses/LICENSE", "entry_points.txt"):
        check(information + name in names, f"the wheel lacks {name}")
    needed = [one.split(";")[0].strip() for one in fields.get_all("Requires-Dist") if "extra" not in one]
    check(sorted(needed) == ["numba>=0.66", "numpy>=2.0"], f"the wheel needs {needed}")
    check(fields["License-Expression"] == "BSD-3-Clause", "the wheel names no license")


def check_sdist(sdist):
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    wanted = sources() | {"LICENSE", "README.md", "CHANGELOG.md", "Makefile", "pyproject.toml", "setup.cfg"}
    wanted |= {"tests/conftest.py", "docs/conf.py", "docs/index.md", "asv_bench/asv.conf.json"}
    check(wanted <= names, f"the sdist lacks {sorted(wanted - names)}")
    stray = [name for name in names if name.endswith((".pyc", ".nbc", ".nbi")) or name.startswith("build/")]
    check(not stray, f"the sdist has {stray}")


def main():
    shutil.rmtree(WORK, ignore_errors=True)
    run(sys.executable, "-m", "build", "--outdir", WORK, ROOT)
    (sdist,), (wheel,) = WORK.glob("*.tar.gz"), WORK.glob("*.whl")
    check_sdist(sdist)
    check_wheel(wheel)

    run(sys.executable, "-m", "venv", WORK / "venv")
    python = WORK / "venv" / ("Scripts" if os.name == "nt" else "bin") / "python"
    run(python, "-m", "pip", "install", "-qq", "--disable-pip-version-check", wheel)
    listed = run(python, "-m", "pip", "list", "--format=freeze")
    installed = {line.partition("==")[0] for line in listed.split()} - {"pip", "setuptools"}
    check(installed == {"npnorm", "numpy", "numba", "llvmlite"}, f"installed are {sorted(installed)}")
    run(python, "-I", "-W", "error", "-c", SMOKE_TEST, cwd=WORK)
    run(python, "-I", "-m", "npnorm", "info", cwd=WORK)
    print(f"{sdist.name} and {wheel.name} are right; the wheel works with {', '.join(listed.split())}")
    shutil.rmtree(WORK)


if __name__ == "__main__":
    main()
