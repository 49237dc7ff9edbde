"""Private APIs of other packages, all of which an upgrade may remove.

Nothing else in this package uses one. Imports are late: composing a configuration must not import
torch. tests/test_private_apis.py fails with the name of whatever an upgrade has removed.
"""

import atexit
from collections.abc import Callable, Sequence
from datetime import timedelta
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import argparse

    import lightning as L
    from omegaconf import DictConfig
    from torch import UntypedStorage
    from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
    from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
    from torch.nn.modules.batchnorm import _BatchNorm as _BatchNorm
    from torch.optim import Optimizer
    from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
    from torch.utils._pytree import tree_iter as tree_iter

# Classes and functions that `from bev_lightning.private_apis import NAME` imports on first use.
IMPORTS = {
    "_BatchNorm": "torch.nn.modules.batchnorm",  # the base class of every batch norm
    "FakeTensor": "torch._subclasses.fake_tensor",  # marks a memory forecast
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
    """Hydra's own parser, which separates its flags from overrides before Hydra runs."""
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


def set_collective_timeout(timeout: timedelta) -> None:
    """Timeout of the collectives of torch's process groups; only newer versions have it public."""
    import torch.distributed as dist

    set_timeout: Callable[[timedelta], None] | None = getattr(dist, "set_timeout", None)
    if set_timeout is None:
        set_timeout = require(dist.distributed_c10d, "_set_pg_timeout")
    set_timeout(timeout)


def rendezvous_store() -> Any:
    """The store through which the processes found each other: it works while collectives hang."""
    import torch.distributed as dist

    return require(dist.distributed_c10d, "_get_default_store")()


def unscale_by_scaler(optimizer: "Optimizer") -> None:
    """Keep a fused optimizer from unscaling float16 gradients itself.

    Lightning refuses to clip the gradients of an optimizer that can, in any mixed precision.
    """
    if hasattr(optimizer, "_step_supports_amp_scaling"):
        optimizer._step_supports_amp_scaling = False


def storage_key(storage: "UntypedStorage") -> int:
    """Identity of a storage; fake tensors have no data pointer."""
    return int(require(storage, "_cdata"))


def validation_is_due(trainer: "L.Trainer") -> bool:
    """Whether Lightning validates after the current batch; it decides after the callbacks run."""
    fetcher = require(trainer.fit_loop, "_data_fetcher")
    return bool(require(trainer.fit_loop.epoch_loop, "_should_check_val_fx")(fetcher))


def epoch_is_done(trainer: "L.Trainer") -> bool:
    """Whether the epoch, or the training, ends with the current batch."""
    return bool(require(trainer.fit_loop.epoch_loop, "_is_training_done"))


def link_deepspeed_states(optimizer: Any) -> None:
    """Show ZeRO stages 1 and 2 the moments of all parameter groups.

    DeepSpeed looks for them once, after the step of the first group, when the others have none.
    """
    if hasattr(optimizer, "_hp_optimizer_states_linked"):
        optimizer._hp_optimizer_states_linked = False
        require(optimizer, "_lazy_init_hp_params_optimizer_state")()
