"""Every run of the tests compiles its kernels into a folder of its own, which its workers share."""

import os
import shutil
import tempfile

import pytest

FOLDER = "NPNORM_CACHE_DIR"


def pytest_configure(config):
    # pytest-xdist starts its workers later: they inherit the variable.
    if FOLDER not in os.environ:
        config.cache_folder = os.environ[FOLDER] = tempfile.mkdtemp(prefix="npnorm-tests-")


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
