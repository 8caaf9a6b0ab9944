"""One table of what the tests run over: norms, dtypes, shapes, which parameters are given."""

from typing import NamedTuple

import numpy as np

import npnorm

try:
    import ml_dtypes
except ImportError:
    HALVES = {"float16": np.dtype(np.float16)}
else:
    HALVES = {"float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16)}

DTYPES = {**HALVES, "float32": np.dtype(np.float32), "float64": np.dtype(np.float64)}

# Odd widths as well as even ones: one past and one short of every vector length, and rows that are
# summed in several blocks.
WIDTHS = (1, 7, 8, 129, 769, 4097)
WIDE = (40000, 70001)
ROWS = (0, 1, 3, 33, 100)

# Pairs (dtype of x, another dtype): every dtype appears on both sides.
MIXED = [
    (first, second)
    for first, second in [
        ("float32", "float16"),
        ("float32", "bfloat16"),
        ("float32", "float64"),
        ("float16", "float32"),
        ("bfloat16", "float32"),
        ("bfloat16", "float16"),
        ("float16", "float64"),
        ("float64", "float32"),
        ("float64", "bfloat16"),
    ]
    if first in DTYPES and second in DTYPES
]

# Enough of them for what multiplies the kernels to compile.
FEW_MIXED = [
    pair
    for pair in MIXED
    if pair
    in {
        ("float32", "bfloat16"),
        ("bfloat16", "float16"),
        ("float16", "float64"),
        ("float64", "float32"),
        ("float32", "float64"),
    }
]

PARAMETERS = {
    "plain": (False, False),
    "weight": (True, False),
    "bias": (False, True),
    "weight and bias": (True, True),
}


class Norm(NamedTuple):
    """A norm and the names of its public functions, looked up at each call."""

    name: str
    centered: bool
    eps: float
    layer_name: str

    @property
    def forward(self):
        return getattr(npnorm, self.name)

    @property
    def backward(self):
        return getattr(npnorm, f"{self.name}_backward")

    @property
    def jvp(self):
        return getattr(npnorm, f"{self.name}_jvp")

    @property
    def add(self):
        return getattr(npnorm, f"add_{self.name}")

    @property
    def layer(self):
        return getattr(npnorm, self.layer_name)

    def reference(self, kind=""):
        """The reference's function of the same name: kind is "", "add", "backward" or "jvp"."""
        name = {"": self.name, "add": f"add_{self.name}"}.get(kind, f"{self.name}_{kind}")
        return getattr(npnorm.reference, name)

    def saved(self, result):
        """The keywords that hand the statistics of a forward result to the backward."""
        return {key: getattr(result, key) for key in ("mean", "rstd") if hasattr(result, key)}


LAYER_NORM = Norm("layer_norm", True, 1e-5, "LayerNorm")
RMS_NORM = Norm("rms_norm", False, 1e-6, "RMSNorm")
NORMS = (LAYER_NORM, RMS_NORM)


def random(shape, dtype="float32", seed=0, scale=1.0, offset=0.0):
    """Normally distributed numbers, the same for the same arguments."""
    generator = np.random.default_rng([seed, *np.atleast_1d(shape).tolist()])
    values = generator.standard_normal(shape) * scale + offset
    return values.astype(DTYPES.get(dtype, dtype))


def parameters(shape, which, dtype="float32", seed=10, bias_dtype=None):
    """`weight` and `bias` as keywords, None where `which` (a key of PARAMETERS) leaves one out."""
    has_weight, has_bias = PARAMETERS[which]
    return {
        "weight": random(shape, dtype, seed, offset=0.5) if has_weight else None,
        "bias": random(shape, bias_dtype or dtype, seed + 1) if has_bias else None,
    }
