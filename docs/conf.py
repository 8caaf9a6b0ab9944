"""Sphinx configuration: ``sphinx-build -W -b html docs docs/_build/html``."""

import os
import re
import shutil
import sys
from pathlib import Path

sys.path.insert(0, os.path.abspath(".."))
os.environ["NUMBA_ENABLE_CUDASIM"] = "1"  # so that npnorm.cuda.device can be imported without numba-cuda

import npnorm  # noqa: E402

project = "npnorm"
author = "npnorm developers"
version = release = npnorm.__version__

extensions = [
    "myst_parser",
    "numpydoc",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.mathjax",
]
exclude_patterns = ["_build", "_generated", "scripts"]
myst_enable_extensions = ["dollarmath", "amsmath"]
myst_heading_anchors = 3

autodoc_typehints = "none"
autodoc_preserve_defaults = True
numpydoc_show_class_members = False
default_role = "code"

html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["npnorm.css"]
html_title = f"npnorm {version}"
html_show_copyright = False

# The graphs of `make bench-history`, where it was run before: a part of the site, and linked to.
HISTORY = Path(__file__).resolve().parents[1] / "asv_bench" / "html"
if (HISTORY / "index.html").exists():
    tags.add("history")  # noqa: F821  (Sphinx puts it here)


def close_examples(app, page, source):
    """Drop the blank line that ends each example: doctest needs it, a reader does not."""
    source[0] = re.sub("\n\n```\n(?!````)", "\n```\n", source[0])


def add_history(app, error):
    if app.tags.has("history") and app.builder.format == "html" and not error:
        shutil.copytree(HISTORY, Path(app.outdir) / "history", dirs_exist_ok=True)


def setup(app):
    app.connect("source-read", close_examples)
    app.connect("build-finished", add_history)
