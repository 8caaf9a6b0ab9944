"""What is public is documented. The options in setup.cfg make pytest run the examples themselves."""

import inspect
import re
from pathlib import Path

import pytest

import npnorm

FUNCTIONS = [
    "layer_norm", "rms_norm", "layer_norm_backward", "rms_norm_backward", "add_layer_norm", "add_rms_norm",
    "layer_norm_jvp", "rms_norm_jvp",
]  # fmt: skip


@pytest.mark.parametrize("name", FUNCTIONS)
def test_docstrings_name_every_parameter(name):
    """numpydoc: Parameters, Returns, Raises, Notes and Examples; no parameter without a word."""
    function = getattr(npnorm, name)
    text = inspect.getdoc(function)
    for section in ("Parameters", "Returns", "Raises", "Examples"):
        assert re.search(rf"^{section}\n-+$", text, re.MULTILINE), f"{name} has no {section}"
    for parameter in inspect.signature(function).parameters:
        assert re.search(rf"^(\w+, )*{parameter}(, \w+)*( : .+)?\n    \S", text, re.MULTILINE), parameter


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_have_examples(name):
    for where in (npnorm, npnorm.reference):
        assert ">>> " in inspect.getdoc(getattr(where, name))


def test_dir_shows_what_is_public():
    assert set(npnorm.__all__) <= set(dir(npnorm))
    assert not any(name.startswith("_") for name in npnorm.__all__)


DRAWINGS = sorted((Path(__file__).parents[1] / "docs" / "images").glob("*.svg"))


@pytest.mark.parametrize("drawing", DRAWINGS, ids=lambda path: path.stem)
def test_drawings_are_shown_and_suit_dark_pages(drawing):
    """Drawn with asv_bench/figures.py: no background, ink that follows the page, letters not too small for a phone."""
    docs = drawing.parents[1]
    pages = [*docs.glob("*.md"), *docs.glob("_generated/*.md")]
    assert any(f"images/{drawing.name})" in page.read_text(encoding="utf-8") for page in pages)
    text = drawing.read_text(encoding="utf-8")
    assert "prefers-color-scheme: dark" in text
    assert not re.search(r"(?<!, )#30343b(?!; --)", text)
    assert float(re.search(r'width="([\d.]+)pt"', text)[1]) < 360
