"""Bird's-eye-view 3D object detection on nuScenes: PyTorch Lightning, Hydra, DALI.

``load`` and ``Run`` are the Python API; they are imported on first use, so that
``import bev_lightning`` stays light.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bev_lightning.runtime.api import Run, load

__all__ = ["Run", "__version__", "load"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name in ("Run", "load"):
        return getattr(import_module("bev_lightning.runtime.api"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), "Run", "load"])
