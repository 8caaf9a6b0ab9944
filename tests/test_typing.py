"""What a type checker sees: a user's script, checked as a user would."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import typing_of_results

import npnorm

PACKAGE = Path(npnorm.__file__).parent


def test_the_package_says_that_it_has_types():
    assert (PACKAGE / "py.typed").is_file()


@pytest.mark.skipif(importlib.util.find_spec("mypy") is None, reason="mypy is not installed")
def test_the_script_passes_strictly(tmp_path):
    """Without this project's configuration; the other files of the package are read and not reported."""
    command = [sys.executable, "-m", "mypy", "--strict", "--config-file=", f"--cache-dir={tmp_path}",
               "--follow-imports=silent", typing_of_results.__file__]  # fmt: skip
    environment = {**os.environ, "MYPYPATH": str(PACKAGE.parent)}
    result = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
