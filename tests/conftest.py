"""Every run of the tests compiles its kernels into a folder of its own, which its workers share."""

import gc
import itertools
import os
import shutil
import tempfile

import pytest

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


def kernels_of(nodeid):
    """What the tests of one worker have in common: a launch on CUDA; a norm and a dtype, mostly float32 where they name
    none; else nothing but themselves."""
    test, _, values = nodeid.removesuffix("]").partition("[")
    if "cuda_compile" in test:
        return values.split("-(")[0] or nodeid
    norm, dtype = (
        next((value for value in values.split("-") if value in known), None)
        for known in (("layer_norm", "rms_norm"), ("float16", "bfloat16", "float32", "float64"))
    )
    return nodeid if norm is None else f"{norm} {dtype or 'float32'}"


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
