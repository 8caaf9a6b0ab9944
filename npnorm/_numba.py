"""npnorm's functions made known to Numba, for users' own compiled code. Nothing here imports kernels, nor Numba."""

import inspect
from collections.abc import Callable
from typing import Any

from . import _api

# All is said: left out, options are inherited from the user's function, fastmath among them.
OPTIONS: Any = {
    "nogil": True, "error_model": "numpy", "fastmath": False, "forceinline": False, "boundscheck": False
}  # fmt: skip
"""The options of all that is compiled into users' code."""

ON_DEVICES = {"stream", "workspace"}
"""Parameters for arrays on a CUDA device, of which compiled code has none."""

_registered = False


def register_numba() -> None:
    """Let Numba compile npnorm's functions into users' code.

    An installed npnorm registers itself when Numba first compiles something; so does any that is imported
    after Numba. This is for one that is neither installed nor imported after Numba. It imports Numba; to
    call it twice does no harm.

    Examples
    --------
    >>> import npnorm
    >>> npnorm.register_numba()
    """
    global _registered
    if _registered:
        return
    from numba.extending import overload

    _registered = True
    for name in (name for name in _api.__all__ if not name.endswith("_jvp")):
        function = getattr(_api, name)
        overload(function, prefer_literal=True, jit_options=OPTIONS)(_typed(function))


def _typed(function: Callable[..., Any]) -> Callable[..., Any]:
    """What Numba asks for an implementation, by the types of a call: kernels are imported when it does."""

    def typed(*given: Any, **options: Any) -> Callable[..., Any]:
        from .cpu.inside.overloads import implementation

        arguments = signature.bind(*given, **options)
        arguments.apply_defaults()
        made: Callable[..., Any] = implementation(function.__name__, arguments.arguments)
        return made

    # Numba knows no keyword-only parameters.
    signature = inspect.Signature(
        [
            inspect.Parameter(p.name, p.POSITIONAL_OR_KEYWORD, default=p.default)
            for p in inspect.signature(function).parameters.values()
            if p.name not in ON_DEVICES
        ]
    )
    typed.__signature__ = signature  # type: ignore[attr-defined]
    return typed
