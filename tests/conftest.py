"""Every run of the tests compiles its kernels into a folder of its own, which its workers share."""

import gc
import itertools
import os
import shutil
import tempfile

import pytest
from workers import kernels_of

FOLDER = "NPNORM_CACHE_DIR"


def pytest_configure(config):
    gc.set_threshold(500_000)
    # pytest-xdist starts its workers later: they inherit the variable.
    if getattr(config.option, "numprocesses", None):
        # Training took 37 s in each of two workers, and 5 alone: threads of OpenBLAS that wait keep others from work.
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    if FOLDER not in os.environ:
        config.cache_folder = os.environ[FOLDER] = tempfile.mkdtemp(prefix="npnorm-tests-")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Tests of the same kernels run in one worker, since each process compiles anew what kernels have in common."""
    from xdist.scheduler import LoadScopeScheduling

    class ByKernels(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            return kernels_of(nodeid)

    return ByKernels(config, log)


_ended = itertools.count(1)


def pytest_runtest_teardown():
    """Compilers keep many small objects, and to look through them all for garbage took 0.27 of the time of all tests:
    what has lived for some tests is not looked at again."""
    if next(_ended) % 20 == 0:
        gc.collect()
        gc.freeze()


def pytest_unconfigure(config):
    if hasattr(config, "cache_folder"):
        shutil.rmtree(config.cache_folder, ignore_errors=True)
        os.environ.pop(FOLDER, None)


@pytest.fixture
def threads():
    """`npnorm.set_num_threads`, undone after the test."""
    import npnorm

    before = npnorm.get_num_threads()
    yield npnorm.set_num_threads
    npnorm.set_num_threads(before)
