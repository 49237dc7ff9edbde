"""Private APIs of other packages, all of which an upgrade may remove.

Nothing else in this package uses one. Imports are late: composing a configuration must not import
torch. tests/test_private_apis.py fails with the name of whatever an upgrade has removed.
"""

import atexit
from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import argparse

    from omegaconf import DictConfig
    from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
    from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
    from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
    from torch.utils._pytree import tree_iter as tree_iter

# Classes and functions that `from bev_lightning.private_apis import NAME` imports on first use.
IMPORTS = {
    "FakeTensor": "torch._subclasses.fake_tensor",  # tells a memory forecast from a real step
    "FakeTensorMode": "torch._subclasses.fake_tensor",  # runs a step without memory
    "TorchDispatchMode": "torch.utils._python_dispatch",  # sees every operator call
    "tree_iter": "torch.utils._pytree",  # yields the tensors in nested results
}


def __getattr__(name: str) -> Any:
    if name not in IMPORTS:
        raise AttributeError(f"module {__name__} has no attribute {name}")
    return require(import_module(IMPORTS[name]), name)


def require(owner: Any, name: str) -> Any:
    """The private attribute of a foreign object.

    Raises:
        AttributeError: names what is gone, and this file.
    """
    try:
        return getattr(owner, name)
    except AttributeError:
        described = getattr(owner, "__name__", None) or type(owner).__qualname__
        raise AttributeError(
            f"{described}.{name} is gone after an upgrade; adapt bev_lightning/private_apis.py"
        ) from None


def hydra_argument_parser() -> "argparse.ArgumentParser":
    """Hydra's own parser: the only way to tell its flags from overrides before it runs."""
    from hydra._internal.utils import get_args_parser

    return get_args_parser()


def split_sweep(overrides: Sequence[Any]) -> list[list[str]]:
    """The overrides of each job of a basic sweep, from parsed overrides, before it runs."""
    from hydra._internal.core_plugins.basic_sweeper import BasicSweeper

    return [list(job) for job in BasicSweeper.split_arguments(list(overrides), None)[0]]


def config_key(node: "DictConfig") -> str:
    """The dotted key of a config node below its root, for messages."""
    return str(require(node, "_get_full_key")(None))


def run_exit_functions() -> None:
    """Run what is registered with ``atexit``, for a process that ends without Python's shutdown."""
    require(atexit, "_run_exitfuncs")()
