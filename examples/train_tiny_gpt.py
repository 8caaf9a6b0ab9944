"""Train a small character transformer in NumPy, with npnorm for its norms, forward and backward.

The model is a GPT of 4 layers of width 128. It learns to continue the help texts that come with
Python (`help("topics")`). After 800 steps, in less than two minutes on two cores, its loss on text
that it has not seen is below 1.6 nats per character; guessing costs 4.6. The script reads in the
order of the work: text, model (norms, sublayers, forward, backward), training, sampling.

    python train_tiny_gpt.py                           # Pre-LN, LayerNorm
    python train_tiny_gpt.py --norm rms --placement post
    python train_tiny_gpt.py --recompute               # less memory, more time, the same bits
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

import npnorm

ALPHABET = "\n" + "".join(map(chr, range(32, 127)))  # any other character becomes "?"


def load_text() -> str:
    """The help texts of the running Python, joined."""
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise FileNotFoundError("this Python lacks its help texts, the package `pydoc_data`") from None
    return "\n\n".join(topics[name] for name in sorted(topics))


def to_tokens(text: str) -> np.ndarray:
    numbers = {character: i for i, character in enumerate(ALPHABET)}
    return np.array([numbers.get(character, numbers["?"]) for character in text])


def to_text(tokens: Sequence[int]) -> str:
    return "".join(ALPHABET[token] for token in tokens)


@dataclass(frozen=True)
class Config:
    """What the model is, and how its gradient is computed."""

    norm: str = "layer"  # or "rms"
    placement: str = "pre"  # or "post"
    recompute: bool = False
    layers: int = 4
    width: int = 128
    heads: int = 4
    context: int = 64
    tokens: int = len(ALPHABET)
    dtype: Any = np.float32


class Parameters:
    """Named arrays that lie one after another in the vector `flat`."""

    def __init__(self, shapes: dict[str, tuple[int, ...]], dtype: Any) -> None:
        self.flat = np.zeros(sum(map(math.prod, shapes.values())), dtype)
        self.arrays = {}
        start = 0
        for name, shape in shapes.items():
            end = start + math.prod(shape)
            self.arrays[name] = self.flat[start:end].reshape(shape)
            start = end

    def __getitem__(self, name: str) -> np.ndarray:
        return self.arrays[name]


def parameter_shapes(config: Config) -> dict[str, tuple[int, ...]]:
    width = config.width
    shapes: dict[str, tuple[int, ...]] = {
        "embedding": (config.tokens, width),
        "positions": (config.context, width),
        "head": (width, config.tokens),
    }
    for i in range(0, 2 * config.layers, 2):
        shapes[f"{i}.qkv"] = (width, 3 * width)
        shapes[f"{i}.out"] = (width, width)
        shapes[f"{i + 1}.in"] = (width, 4 * width)
        shapes[f"{i + 1}.out"] = (4 * width, width)
    for i in range(2 * config.layers + 1):
        shapes[f"norm{i}.weight"] = (width,)
        if config.norm == "layer":
            shapes[f"norm{i}.bias"] = (width,)
    return shapes


@dataclass
class Trace:
    """What the forward pass keeps for the backward pass."""

    tokens: np.ndarray
    totals: list[np.ndarray]  # the input of each norm
    statistics: list[dict[str, np.ndarray]]  # its mean and rstd; with `recompute`, nothing
    inner: list[tuple]  # what each sublayer keeps; with `recompute`, nothing
    last: np.ndarray  # the result of the last norm


class Model:
    """A transformer whose sublayers, attention and MLP in turn, stand between norms.

    Norm 0 takes the embedding. Norm i + 1 takes the sum of sublayer i's result and a shortcut, and
    does the addition too: npnorm's `add_layer_norm` or `add_rms_norm`. The shortcut comes from
    before norm i in Pre-LN, from behind it in Post-LN; nothing else differs.
    """

    def __init__(self, config: Config, seed: int = 0) -> None:
        self.config = config
        shapes = parameter_shapes(config)
        self.parameters = Parameters(shapes, config.dtype)
        self.gradients = Parameters(shapes, config.dtype)
        self.sublayers = 2 * config.layers
        self.norm_seconds = 0.0  # the time spent in npnorm

        random = np.random.default_rng(seed)
        for name, array in self.parameters.arrays.items():
            if name.endswith(".weight"):
                array[...] = 1
            elif name in ("embedding", "positions"):
                array[...] = random.standard_normal(array.shape) / 2
            elif array.ndim == 2:
                array[...] = random.standard_normal(array.shape) / math.sqrt(len(array))
            if name.endswith(".out"):  # keeps the sum of all branches near the size of the embedding
                array /= math.sqrt(self.sublayers)

    # The norms

    def norm(self, i: int, x: np.ndarray, shortcut: np.ndarray | None = None) -> Any:
        """Norm i of `x`, or of ``x + shortcut``: the result, the sum, the statistics."""
        start = time.perf_counter()
        name = f"{self.config.norm}_norm" if shortcut is None else f"add_{self.config.norm}_norm"
        inputs = (x,) if shortcut is None else (x, shortcut)
        parameters = self.parameters.arrays
        result = getattr(npnorm, name)(
            *inputs, parameters[f"norm{i}.weight"], parameters.get(f"norm{i}.bias"), return_stats=True
        )._asdict()
        self.norm_seconds += time.perf_counter() - start
        return result.pop("y"), result.pop("residual_out", x), result

    def norm_backward(self, i: int, dy: np.ndarray, trace: Trace, dresidual: np.ndarray | None) -> np.ndarray:
        """The gradient that reaches the input of norm i; `dresidual` reaches it past the norm."""
        start = time.perf_counter()
        gradients = self.gradients.arrays
        dweight, dbias = gradients[f"norm{i}.weight"], gradients.get(f"norm{i}.bias")
        dx, _, _ = getattr(npnorm, f"{self.config.norm}_norm_backward")(
            dy,
            trace.totals[i],
            self.parameters[f"norm{i}.weight"],
            dresidual=dresidual,
            output_mask=(True, True, dbias is not None),
            out=(None, dweight, dbias),
            **trace.statistics[i],
        )
        self.norm_seconds += time.perf_counter() - start
        return dx

    # The sublayers: each gives its result and what its gradient needs

    def dense_backward(self, name: str, dy: np.ndarray, x: np.ndarray) -> np.ndarray:
        np.matmul(x.T, dy, out=self.gradients[name])
        return dy @ self.parameters[name].T

    def sublayer(self, i: int, x: np.ndarray, tokens: int) -> tuple[np.ndarray, tuple]:
        return self.mlp(i, x) if i % 2 else self.attention(i, x, tokens)

    def sublayer_backward(self, i: int, dy: np.ndarray, inner: tuple) -> np.ndarray:
        return self.mlp_backward(i, dy, *inner) if i % 2 else self.attention_backward(i, dy, *inner)

    def split(self, x: np.ndarray, tokens: int, parts: int) -> np.ndarray:
        """(texts * tokens, parts * width) -> a view (parts, texts, heads, tokens, width of a head)."""
        heads = self.config.heads
        return x.reshape(-1, tokens, parts, heads, self.config.width // heads).transpose(2, 0, 3, 1, 4)

    def attention(self, i: int, x: np.ndarray, tokens: int) -> tuple[np.ndarray, tuple]:
        qkv = x @ self.parameters[f"{i}.qkv"]
        query, key, value = self.split(qkv, tokens, 3)
        scores = query @ key.swapaxes(-1, -2)
        scores *= 1 / math.sqrt(query.shape[-1])
        scores += np.triu(np.full((tokens, tokens), -np.inf, x.dtype), 1)  # no look ahead
        probabilities = softmax(scores)
        context = np.empty_like(x)
        np.matmul(probabilities, value, out=self.split(context, tokens, 1)[0])
        return context @ self.parameters[f"{i}.out"], (x, qkv, probabilities, context)

    def attention_backward(
        self, i: int, dy: np.ndarray, x: np.ndarray, qkv: np.ndarray, probabilities: np.ndarray,
        context: np.ndarray,
    ) -> np.ndarray:  # fmt: skip
        tokens = probabilities.shape[-1]
        query, key, value = self.split(qkv, tokens, 3)
        dqkv = np.empty_like(qkv)
        dquery, dkey, dvalue = self.split(dqkv, tokens, 3)
        dcontext = self.split(self.dense_backward(f"{i}.out", dy, context), tokens, 1)[0]
        np.matmul(probabilities.swapaxes(-1, -2), dcontext, out=dvalue)
        dscores = dcontext @ value.swapaxes(-1, -2)
        # The softmax: dscores = p * (dp - sum(dp * p)), then the scale of the scores.
        dscores -= np.vecdot(dscores, probabilities)[..., np.newaxis]
        dscores *= probabilities
        dscores *= 1 / math.sqrt(query.shape[-1])
        np.matmul(dscores, key, out=dquery)
        np.matmul(dscores.swapaxes(-1, -2), query, out=dkey)
        return self.dense_backward(f"{i}.qkv", dqkv, x)

    def mlp(self, i: int, x: np.ndarray) -> tuple[np.ndarray, tuple]:
        wide = x @ self.parameters[f"{i}.in"]
        gate = sigmoid(wide)
        active = wide * gate  # SiLU
        return active @ self.parameters[f"{i}.out"], (x, wide, gate, active)

    def mlp_backward(
        self, i: int, dy: np.ndarray, x: np.ndarray, wide: np.ndarray, gate: np.ndarray, active: np.ndarray
    ) -> np.ndarray:
        dactive = self.dense_backward(f"{i}.out", dy, active)
        dactive *= gate * (1 + wide - active)
        return self.dense_backward(f"{i}.in", dactive, x)

    # The whole

    def forward(self, tokens: np.ndarray) -> tuple[np.ndarray, Trace]:
        """Logits of the next token at each place of (texts, tokens), and what `backward` needs."""
        recompute = self.config.recompute
        x = self.parameters["embedding"][tokens] + self.parameters["positions"][: tokens.shape[1]]
        y, total, statistics = self.norm(0, x.reshape(-1, self.config.width))
        trace = Trace(tokens, [total], [{} if recompute else statistics], [], y)
        for i in range(self.sublayers):
            branch, inner = self.sublayer(i, y, tokens.shape[1])
            shortcut = total if self.config.placement == "pre" else y
            y, total, statistics = self.norm(i + 1, branch, shortcut)
            trace.totals.append(total)
            trace.statistics.append({} if recompute else statistics)
            trace.inner.append(() if recompute else inner)
        trace.last = y
        return y @ self.parameters["head"], trace

    def backward(self, dlogits: np.ndarray, trace: Trace) -> None:
        """Fill `gradients`."""
        dy = self.dense_backward("head", dlogits, trace.last)
        dresidual = None
        for i in reversed(range(self.sublayers)):
            dtotal = self.norm_backward(i + 1, dy, trace, dresidual)
            dy = self.sublayer_backward(i, dtotal, self.kept_or_recomputed(i, trace))
            # The sum sends its gradient into the branch and along the shortcut: to the sum before
            # norm i, where the gradient through the norm joins it, or to the result of norm i.
            if self.config.placement == "pre":
                dresidual = dtotal
            else:
                dy += dtotal
        dx = self.norm_backward(0, dy, trace, dresidual)
        dx = dx.reshape(*trace.tokens.shape, -1)
        self.gradients["positions"][...] = 0
        self.gradients["positions"][: dx.shape[1]] = dx.sum(axis=0)
        self.gradients["embedding"][...] = 0
        np.add.at(self.gradients["embedding"], trace.tokens, dx)

    def kept_or_recomputed(self, i: int, trace: Trace) -> tuple:
        """What sublayer i keeps; with `recompute`, computed again from the input of norm i."""
        if not self.config.recompute:
            return trace.inner[i]
        y, _, _ = self.norm(i, trace.totals[i])
        return self.sublayer(i, y, trace.tokens.shape[1])[1]

    def loss(self, tokens: np.ndarray, targets: np.ndarray) -> float:
        """The mean cross-entropy of `targets` in nats per token."""
        logits, _ = self.forward(tokens)
        return cross_entropy(logits, targets)[0]

    def loss_and_gradients(self, tokens: np.ndarray, targets: np.ndarray) -> float:
        logits, trace = self.forward(tokens)
        loss, dlogits = cross_entropy(logits, targets)
        self.backward(dlogits, trace)
        return loss


def sigmoid(x: np.ndarray) -> np.ndarray:
    y = np.tanh(x / 2)  # never overflows
    y += 1
    y /= 2
    return y


def softmax(x: np.ndarray) -> np.ndarray:
    """Softmax over the last axis, written over `x`."""
    x -= x.max(axis=-1, keepdims=True)
    np.exp(x, out=x)
    x /= x.sum(axis=-1, keepdims=True)
    return x


def cross_entropy(logits: np.ndarray, targets: np.ndarray) -> tuple[float, np.ndarray]:
    """The mean cross-entropy and its gradient for the logits, which it is written over."""
    targets = targets.reshape(-1, 1)
    probabilities = softmax(logits)
    likelihood = np.take_along_axis(probabilities, targets, axis=1)
    loss = -np.log(likelihood, dtype=np.float64).mean()
    np.put_along_axis(probabilities, targets, likelihood - 1, axis=1)
    probabilities /= targets.size
    return float(loss), probabilities


class Adam:
    """Adam (Kingma & Ba, 2015) on the flat vectors, after a warm-up and with a cosine decay."""

    def __init__(self, model: Model, steps: int, rate: float = 3e-3, betas: tuple[float, float] = (0.9, 0.99)) -> None:
        self.parameters, self.gradients = model.parameters.flat, model.gradients.flat
        self.first, self.second = np.zeros_like(self.parameters), np.zeros_like(self.parameters)
        self.steps, self.rate, self.betas = steps, rate, betas
        self.step = 0

    def update(self) -> None:
        self.step += 1
        gradients = self.gradients
        gradients *= 1 / max(1.0, float(np.linalg.norm(gradients)))  # cut to length 1
        for moment, beta, value in zip(
            (self.first, self.second), self.betas, (gradients, gradients**2), strict=True
        ):
            moment *= beta
            moment += (1 - beta) * value
        first, second = (1 - beta**self.step for beta in self.betas)
        warm_up = min(1.0, self.step / 50)
        decay = 0.55 + 0.45 * math.cos(math.pi * self.step / self.steps)  # to a tenth
        change = np.sqrt(self.second / second)
        change += 1e-8
        np.divide(self.first, change, out=change)
        change *= self.rate * warm_up * decay / first
        self.parameters -= change


def batch(tokens: np.ndarray, starts: np.ndarray, context: int) -> tuple[np.ndarray, np.ndarray]:
    """Pieces of `tokens` of length `context`, and the same one token later."""
    places = starts[:, np.newaxis] + np.arange(context)
    return tokens[places], tokens[places + 1]


def train(model: Model, tokens: np.ndarray, steps: int, texts: int = 16, seed: int = 0) -> Iterator[float]:
    """Train on random pieces of `tokens`, `texts` of them per step; yield the loss of each step."""
    random = np.random.default_rng(seed)
    adam = Adam(model, steps)
    context = model.config.context
    for _ in range(steps):
        starts = random.integers(tokens.size - context, size=texts)
        yield model.loss_and_gradients(*batch(tokens, starts, context))
        adam.update()


def held_out_loss(model: Model, tokens: np.ndarray, texts: int = 64) -> float:
    """The loss on `texts` pieces spread evenly over `tokens`, 16 at a time."""
    starts = np.linspace(0, tokens.size - model.config.context - 1, texts).astype(int)
    losses = [model.loss(*batch(tokens, part, model.config.context)) for part in starts.reshape(-1, 16)]
    return float(np.mean(losses))


def sample(model: Model, prompt: str, length: int, temperature: float = 0.8, seed: int = 0) -> str:
    """Continue `prompt` by `length` characters, each drawn from what the model expects."""
    random = np.random.default_rng(seed)
    tokens = list(to_tokens(prompt))
    for _ in range(length):
        logits, _ = model.forward(np.array([tokens[-model.config.context :]]))
        tokens.append(int(random.choice(model.config.tokens, p=softmax(logits[-1].astype(float) / temperature))))
    return to_text(tokens)


def main(argv: Sequence[str] | None = None) -> int:
    """Train a tiny GPT on Python's help texts, then let it write."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--norm", choices=["layer", "rms"], default="layer")
    parser.add_argument("--placement", choices=["pre", "post"], default="pre")
    parser.add_argument("--recompute", action="store_true", help="compute activations again instead of keeping them")
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args(argv)
    if arguments.steps < 1:
        parser.error(f"`--steps` must be at least 1; got {arguments.steps}")
    try:
        tokens = to_tokens(load_text())
    except FileNotFoundError as error:
        parser.error(str(error))

    config = Config(arguments.norm, arguments.placement, arguments.recompute)
    model = Model(config, arguments.seed)
    held_out = tokens.size // 10
    print(f"{tokens.size:,} characters, {model.parameters.flat.size:,} parameters")
    model.loss_and_gradients(*batch(tokens, np.arange(16), config.context))  # compiles the norms
    model.norm_seconds = 0.0

    live = sys.stdout.isatty()
    start = time.perf_counter()
    losses = []
    for step, loss in enumerate(train(model, tokens[:-held_out], arguments.steps, seed=arguments.seed), 1):
        losses.append(loss)
        seconds = time.perf_counter() - start
        speed = step * 16 * config.context / seconds
        line = (
            f"step {step:4}  loss {np.mean(losses[-20:]):.3f}  {speed:6,.0f} tokens/s  "
            f"{model.norm_seconds / seconds:4.1%} in the norms"
        )
        last = step == arguments.steps
        if live:
            print(f"\r{line}", end="\n" if last else "", flush=True)
        elif step % 50 == 0 or last:
            print(line, flush=True)
    seconds = time.perf_counter() - start
    print(f"held-out loss {held_out_loss(model, tokens[-held_out:]):.3f} after {seconds:.0f} s\n")
    print(sample(model, "The ", 300, seed=arguments.seed))
    return 0


if __name__ == "__main__":
    sys.exit(main())
