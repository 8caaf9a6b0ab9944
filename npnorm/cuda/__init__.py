"""npnorm on NVIDIA GPUs. Device arrays given to npnorm's functions come here by themselves."""

from .arrays import DeviceArray
from .driver import is_available
from .workspace import workspace_bytes

__all__ = ["DeviceArray", "is_available", "workspace_bytes"]
