"""torch.compile of a whole network or of its dense regions, and its requirements."""

import shutil
from typing import Any, Literal

from bev_lightning.errors import InputError


def compile_network(network: Any, scope: Literal["model", "regions"], **options: Any) -> None:
    """Compile a network in place; compilation runs at the first call, state-dict keys stay.

    Args:
        network: for ``regions``, one that implements
            :class:`bev_lightning.models.protocol.SupportsRegionalCompile`.
        scope: ``model`` compiles the network's forward as a whole, with graph breaks where a
            length depends on the data (voxels, kept points); ``regions`` compiles each dense region
            separately, without a graph break.
        options: of :meth:`torch.nn.Module.compile`.
    """
    for module in [network] if scope == "model" else network.dense_regions():
        module.compile(**options)


def check_compiler(on_cuda: bool, capability: float | None) -> None:
    """Check that this machine has what torch.compile builds its kernels with.

    Raises:
        InputError: no C++ compiler for a CPU, or a GPU that Triton does not support.
    """
    if on_cuda and (capability or 0) < 7.0:
        raise InputError(
            f"compile needs GPUs of compute capability 7.0 or more and this one has {capability}; "
            f"use compile=off"
        )
    if not on_cuda and not any(shutil.which(name) for name in ("g++", "c++", "clang++", "cl")):
        raise InputError(
            "compile on a CPU needs a C++ compiler and none is installed; install g++, or use "
            "compile=off"
        )
