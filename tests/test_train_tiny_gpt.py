"""The training example: its whole gradient, gradient checkpointing to the bit, falling loss, the command line."""

import builtins
import importlib.util
import re
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from bounds import assert_same_bits

import npnorm

PATH = Path(__file__).parents[1] / "examples" / "train_tiny_gpt.py"
NORMS, PLACEMENTS = ("layer", "rms"), ("pre", "post")


def load_script():
    spec = importlib.util.spec_from_file_location(PATH.stem, PATH)
    module = importlib.util.module_from_spec(spec)
    sys.modules[PATH.stem] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


example = load_script()


def tiny(**options):
    """A model small enough to differentiate by every parameter, and a batch shorter than its context."""
    config = example.Config(
        **options, layers=2, width=4, heads=2, context=5, tokens=7, dtype=np.float64
    )  # fmt: skip
    model = example.Model(config, seed=3)
    random = np.random.default_rng(4)
    model.parameters.flat += 0.3 * random.standard_normal(model.parameters.flat.size)
    return model, random.integers(7, size=(3, 4)), random.integers(7, size=(3, 4))


def small(**options):
    config = example.Config(**options, layers=3, width=64, heads=4, context=32)
    model = example.Model(config)
    return model, *example.batch(example.to_tokens(example.load_text()), np.arange(0, 800, 100), 32)


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("norm", NORMS)
def test_whole_gradient(norm, placement):
    """By finite differences of every parameter, with kept and with recomputed activations."""
    models = [tiny(norm=norm, placement=placement, recompute=recompute)[0] for recompute in (False, True)]
    model, tokens, targets = tiny(norm=norm, placement=placement)
    for each in models:
        each.gradients.flat[...] = np.nan  # all are to be written
        each.loss_and_gradients(tokens, targets)
    parameters, step = model.parameters.flat, 1e-5
    differences = np.empty_like(parameters)
    for i, value in enumerate(parameters):
        parameters[i] = value + step
        above = model.loss(tokens, targets)
        parameters[i] = value - step
        differences[i] = (above - model.loss(tokens, targets)) / (2 * step)
        parameters[i] = value
    assert np.abs(differences).max() > 0.1
    for each in models:
        np.testing.assert_allclose(each.gradients.flat, differences, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("norm", NORMS)
def test_recomputed_activations_give_the_same_bits(norm, placement):
    """After a few steps of training, too, all parameters are the same."""
    models = []
    for recompute in (False, True):
        model, tokens, _ = small(norm=norm, placement=placement, recompute=recompute)
        losses = list(example.train(model, tokens.reshape(-1), steps=4, texts=4))
        models.append((np.array(losses), model))
    (losses, kept), (same_losses, recomputed) = models
    assert_same_bits(same_losses, losses)
    assert_same_bits(recomputed.gradients.flat, kept.gradients.flat)
    assert_same_bits(recomputed.parameters.flat, kept.parameters.flat)


def test_recomputing_takes_less_memory():
    peaks = []
    for recompute in (False, True):
        model, tokens, targets = small(recompute=recompute)
        model.loss_and_gradients(tokens, targets)
        tracemalloc.start()
        model.loss_and_gradients(tokens, targets)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < peaks[0] / 2


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("norm", NORMS)
def test_norms_are_fused_with_their_sums(monkeypatch, norm, placement):
    """Every norm but the first adds; in Pre-LN every gradient but the last one's takes `dresidual`."""
    model, tokens, targets = small(norm=norm, placement=placement)
    calls = []

    def spy(name):
        function = getattr(npnorm, name)

        def spied(*arguments, **keywords):
            calls.append((name, keywords.get("dresidual") is not None, "rstd" in keywords))
            return function(*arguments, **keywords)

        return spied

    for name in (f"{norm}_norm", f"add_{norm}_norm", f"{norm}_norm_backward"):
        monkeypatch.setattr(npnorm, name, spy(name))
    model.loss_and_gradients(tokens, targets)
    forward = [(f"{norm}_norm", False, False)] + 6 * [(f"add_{norm}_norm", False, False)]
    backward = [(f"{norm}_norm_backward", False, True)]
    backward += 6 * [(f"{norm}_norm_backward", placement == "pre", True)]
    assert calls == forward + backward
    assert model.norm_seconds > 0


def test_no_place_sees_later_ones():
    model, tokens, _ = tiny()
    changed = tokens.copy()
    changed[:, 2:] = (changed[:, 2:] + 1) % 7
    first, second = (model.forward(t)[0].reshape(3, 4, 7) for t in (tokens, changed))
    np.testing.assert_allclose(first[:, :2], second[:, :2], rtol=1e-12)
    assert (np.abs(first[:, 2:] - second[:, 2:]).max(axis=-1) > 1e-3).all()


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("norm", NORMS)
def test_loss_falls(norm, placement):
    """Guessing costs log(96) = 4.6; the frequencies of the characters alone cost 3.1."""
    model, _, _ = small(norm=norm, placement=placement)
    tokens = example.to_tokens(example.load_text())
    losses = list(example.train(model, tokens, steps=150, texts=8))
    assert np.mean(losses[:3]) > 3.5
    assert np.mean(losses[-20:]) < 2.8
    assert example.held_out_loss(model, tokens) < 2.8


def test_characters():
    text = "Zero\n~ {}"
    assert example.to_text(example.to_tokens(text)) == text
    assert example.to_text(example.to_tokens("na\u00efve\tcaf\u00e9")) == "na?ve?caf?"
    assert len(example.load_text()) > 100_000


def run(capsys, *arguments):
    assert example.main(list(arguments)) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("options", [(), ("--norm", "rms", "--placement", "post", "--recompute")])
def test_command_line(capsys, options):
    printed = run(capsys, "--steps", "3", "--seed", "1", *options)
    first, progress, held_out, _, *text = printed.split("\n")
    assert re.fullmatch(r"[\d,]+ characters, 8\d\d,\d{3} parameters", first)
    assert re.fullmatch(r"step    3  loss \d\.\d{3}  [ \d,]+ tokens/s +\d+\.\d% in the norms", progress)
    assert re.fullmatch(r"held-out loss \d\.\d{3} after \d+ s", held_out)
    assert "\n".join(text).startswith("The ")
    assert len("\n".join(text)) == len("The ") + 300 + 1


def test_seed_decides():
    tokens = example.to_tokens(example.load_text())

    def text(seed):
        model = example.Model(example.Config(layers=1, width=64, context=32), seed)
        losses = list(example.train(model, tokens, steps=3, texts=4, seed=seed))
        return losses, example.sample(model, "The ", 20, seed=seed)

    first, second = (example.Model(example.Config(), seed).parameters.flat for seed in (1, 2))
    assert not np.isin(first[:1000], second[:1000]).any()
    assert text(1) == text(1)
    assert text(1)[0] != text(2)[0]
    assert text(1)[1] != text(2)[1]


def test_progress_line_is_live_on_a_terminal(capsys, monkeypatch):
    monkeypatch.setattr(example, "sample", lambda *arguments, **keywords: "")
    monkeypatch.setattr(type(sys.stdout), "isatty", lambda self: True)
    assert run(capsys, "--steps", "3").count("\rstep ") == 3


def fails(capsys, *arguments):
    with pytest.raises(SystemExit) as raised:
        example.main(list(arguments))
    assert raised.value.code == 2
    return capsys.readouterr().err


def test_steps_must_be_positive(capsys):
    assert "`--steps` must be at least 1; got 0" in fails(capsys, "--steps", "0")


def test_python_without_help_texts(capsys, monkeypatch):
    real = builtins.__import__

    def without(name, *arguments):
        if name.startswith("pydoc_data"):
            raise ImportError(name)
        return real(name, *arguments)

    monkeypatch.setattr(builtins, "__import__", without)
    assert "pydoc_data" in fails(capsys)
