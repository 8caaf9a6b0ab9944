"""These tests run in a process of their own, which tests/test_cuda_simulator.py starts."""

import os

collect_ignore_glob = [] if os.environ.get("NUMBA_ENABLE_CUDASIM") == "1" else ["*.py"]
