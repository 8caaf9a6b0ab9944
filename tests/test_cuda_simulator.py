"""The CUDA kernels, in a process in which Numba simulates a GPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent / "cuda_simulator"


@pytest.mark.parametrize("file", sorted(path.name for path in FOLDER.glob("test_*.py")))
def test_kernels(file):
    environment = {**os.environ, "NUMBA_ENABLE_CUDASIM": "1"}
    for name in ("PYTEST_XDIST_WORKER", "PYTEST_ADDOPTS", "PYTEST_CURRENT_TEST"):
        environment.pop(name, None)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "-p", "no:cacheprovider", str(FOLDER / file)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=FOLDER.parents[1])
    assert done.returncode == 0, done.stdout + done.stderr
