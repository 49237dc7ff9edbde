"""torch.compile, of a whole network or of its dense regions."""

import shutil
from typing import TYPE_CHECKING, Any, Literal, Protocol, cast

from bev_lightning.errors import InputError

if TYPE_CHECKING:  # rules import this file, and they are read before torch is
    from torch import nn


class Detector(Protocol):
    """A network that can say which of its parts are dense."""

    def dense_regions(self) -> "list[nn.Module]":
        """Parts that hold most of the arithmetic, whose shapes are the same at every step and that
        compile without a graph break."""
        ...


def compile_network(
    network: "nn.Module", scope: Literal["model", "regions"], **options: Any
) -> None:
    """Compile in place at the first call; the names in the state dict stay.

    Args:
        network: a :class:`Detector`.
        scope: ``model`` compiles the network's forward as a whole, with graph breaks where a
            length depends on the data (voxels, kept points); ``regions`` each dense region on its
            own, without a break.
        options: of :meth:`torch.nn.Module.compile`.
    """
    if scope == "model":
        network.compile(**options)
        return
    for region in cast(Detector, network).dense_regions():
        region.compile(**options)


def check_compiler(on_cuda: bool, capability: float | None) -> None:
    """Refuse to compile where this machine lacks what torch.compile builds its kernels with.

    Raises:
        InputError: no C++ compiler for a CPU, or a card that Triton does not know.
    """
    if on_cuda and (capability or 0) < 7.0:
        raise InputError(
            f"compile needs CUDA cards of compute capability 7.0 or more and this one has "
            f"{capability}; use compile=off"
        )
    if not on_cuda and not any(shutil.which(name) for name in ("g++", "c++", "clang++", "cl")):
        raise InputError(
            "compile on a CPU needs a C++ compiler and none is installed; install g++, or use "
            "compile=off"
        )
