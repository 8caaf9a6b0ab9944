"""PyTorch, what it compiles with Triton, and Liger, where they are installed: calls on sets of tensors of their own."""

from functools import cache, partial
from importlib.util import find_spec

SETS = 3
EPS = 1e-5
DEVICE = "cuda"


def has_torch():
    """Whether PyTorch is installed and sees a GPU."""
    if find_spec("torch") is None:
        return False
    import torch

    return torch.cuda.is_available()


@cache
def _tensors(format_, elements):
    """x, dy and their like for every set, random."""
    import torch

    dtype = getattr(torch, format_)
    return [
        tuple(torch.empty(elements, dtype=dtype, device=DEVICE).normal_() for _ in range(2)) for _ in range(SETS)
    ]


def free():
    """Let go of all tensors."""
    import torch

    _tensors.cache_clear()
    torch.cuda.empty_cache()


def _arrays(format_, rows, cols, elements):
    import torch

    dtype = getattr(torch, format_)
    weight, bias = (torch.randn(cols, device=DEVICE).to(dtype) for _ in range(2))
    sets = _tensors(format_, elements)
    return [tuple(t[: rows * cols].view(rows, cols) for t in pair) for pair in sets], weight, bias


def calls(elements, compiled=False):
    """A function that names the peers of an operation, each with a maker of its calls."""

    def peers(operation, format_, rows, cols):
        arguments = operation, format_, rows, cols, max(elements, rows * cols)
        if compiled:
            yield "torch.compile (Triton)", partial(_compiled, *arguments)
            return
        yield "PyTorch", partial(_torch, *arguments)
        if find_spec("liger_kernel") is not None:
            yield "Liger", partial(_liger, *arguments)

    return peers


def no_calls(operation, format_, rows, cols):
    """The peers where there are none."""
    return ()


def _torch(operation, format_, rows, cols, elements):
    """Forward as users call it, backward by the operators themselves, so that no autograd is timed."""
    import torch
    from torch.nn import functional

    sets, weight, bias = _arrays(format_, rows, cols, elements)
    aten, centered = torch.ops.aten, operation.startswith("layer")
    if operation == "layer_norm":
        return [partial(functional.layer_norm, x, (cols,), weight, bias, EPS) for x, _ in sets]
    if operation == "rms_norm":
        return [partial(functional.rms_norm, x, (cols,), weight, EPS) for x, _ in sets]
    found = []
    for x, dy in sets:
        if centered:
            _, mean, rstd = aten.native_layer_norm.default(x, [cols], weight, bias, EPS)
            arguments = dy, x, [cols], mean, rstd, weight, bias, [True] * 3
            found.append(partial(aten.native_layer_norm_backward.default, *arguments))
        else:  # PyTorch 2.9 and later
            _, rstd = aten._fused_rms_norm.default(x, [cols], weight, EPS)
            found.append(partial(aten._fused_rms_norm_backward.default, dy, x, [cols], rstd, weight, [True] * 2))
    return found


def _by_autograd(function, sets, parameters):
    """Gradients of x and the parameters, through graphs that are kept."""
    import torch

    parameters = [parameter.detach().requires_grad_() for parameter in parameters]
    found = []
    for x, dy in sets:
        x = x.detach().requires_grad_()
        found.append(partial(torch.autograd.grad, function(x, *parameters), [x, *parameters], dy, retain_graph=True))
    return found


def _compiled(operation, format_, rows, cols, elements):
    import torch
    from torch.nn.functional import layer_norm, rms_norm

    sets, weight, bias = _arrays(format_, rows, cols, elements)
    if operation.startswith("layer"):
        parameters = [weight, bias]
        function = torch.compile(lambda x, w, b: layer_norm(x, (cols,), w, b, EPS), dynamic=False)
    else:
        parameters = [weight]
        function = torch.compile(lambda x, w: rms_norm(x, (cols,), w, EPS), dynamic=False)
    if not operation.endswith("backward"):
        return [partial(function, x, *parameters) for x, _ in sets]
    # Compiled gradients may reuse what was kept for them, so graphs cannot be run twice with donated buffers.
    import torch._functorch.config as config

    config.donated_buffer = False
    return _by_autograd(function, sets, parameters)


def _liger(operation, format_, rows, cols, elements):
    sets, weight, bias = _arrays(format_, rows, cols, elements)
    if operation.startswith("layer"):
        from liger_kernel.ops.layer_norm import LigerLayerNormFunction

        parameters = [weight, bias]

        def function(x, w, b):
            return LigerLayerNormFunction.apply(x, w, b, EPS)

    else:
        from liger_kernel.ops.rms_norm import LigerRMSNormFunction

        parameters = [weight]

        def function(x, w):
            return LigerRMSNormFunction.apply(x, w, EPS, 0.0, "llama", False)

    if not operation.endswith("backward"):
        return [partial(function, x, *parameters) for x, _ in sets]
    return _by_autograd(function, sets, parameters)


def npnorm_on_tensors(operation, format_, rows, cols):
    """npnorm's own calls on tensors, for their cost on the host: with outputs given, and made."""
    import torch

    import npnorm

    sets, weight, bias = _arrays(format_, rows, cols, rows * cols)
    x, dy = sets[0]
    centered = operation.startswith("layer")
    function = getattr(npnorm, operation)
    if operation in ("layer_norm", "rms_norm"):
        fresh = partial(function, x, *((weight, bias) if centered else (weight,)), eps=EPS)
        return {"npnorm, tensors, out=": partial(fresh, out=torch.empty_like(x)), "npnorm, tensors": fresh}
    kept = torch.ones((rows, 1), dtype=torch.float64, device=DEVICE)
    given = {"rstd": kept, **({"mean": kept} if centered else {})}
    return {"npnorm, tensors": partial(function, dy, x, weight, **given, eps=EPS, output_mask=(True, True, centered))}
