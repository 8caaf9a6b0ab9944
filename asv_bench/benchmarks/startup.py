"""Start-up. Each sample is a new Python process."""

from .common import cell

ARRAYS = """
    import npnorm, numpy
    x, weight = numpy.ones((1, 8), numpy.float32), numpy.ones(8, numpy.float32)
"""
EMPTY_CACHE = """
    import os, tempfile
    folder = tempfile.TemporaryDirectory()
    os.environ["NPNORM_CACHE_DIR"] = folder.name
"""


class Startup:
    rounds = 1
    number = 1
    repeat = (5, 10, 5.0)

    def setup(self):
        # One call, so that the kernel is in the cache on disk.
        cell("rms_norm", "float32", "1x8")

    def timeraw_import_numpy(self):
        return "import numpy"

    def timeraw_import_npnorm(self):
        return "import npnorm"

    def timeraw_first_call(self):
        return "npnorm.rms_norm(x, weight)", ARRAYS

    def timeraw_first_call_ever(self):
        return "npnorm.rms_norm(x, weight)", EMPTY_CACHE + ARRAYS

    def timeraw_import_and_first_call(self):
        return ARRAYS + "    npnorm.rms_norm(x, weight)"
