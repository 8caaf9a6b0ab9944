"""npnorm's entry point for Numba, which every user of Numba imports where npnorm is installed.

It stands beside the package since `import npnorm` takes 14 ms. Until someone imports npnorm there is
nothing to register, and npnorm registers itself if it is imported after Numba.
"""

import sys


def init() -> None:
    """Register npnorm's functions with Numba if npnorm has been imported."""
    npnorm = sys.modules.get("npnorm")
    # Absent while another thread imports npnorm, which will see that Numba is there.
    register = getattr(npnorm, "register_numba", None)
    if register is not None:
        register()
