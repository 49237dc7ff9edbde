"""FSDP2 as a Lightning strategy: weights, gradients and optimizer states are sharded."""

from collections.abc import Mapping
from typing import Any

import lightning as L
import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.strategies.strategy import Strategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard


class ShardedStrategy(ModelParallelStrategy):
    """Lightning's ModelParallelStrategy over one data-parallel axis of all processes.

    Three differences: it shards the module itself, so that modules need no code for it; a
    checkpoint is one ordinary file with full weights and optimizer states; and these are numbered
    in the order of the optimizer's groups, as torch does elsewhere, so that checkpoints are
    interchangeable with those of all other strategies.

    For a checkpoint everything is gathered in the host memory of process 0: 12 bytes per parameter
    with Adam. To resume, each process maps the file into memory.
    """

    def __init__(self, num_processes: int, **kwargs: Any) -> None:
        super().__init__(
            data_parallel_size=num_processes,
            tensor_parallel_size=1,
            save_distributed_checkpoint=False,
            **kwargs,
        )

    @property
    def lightning_restore_optimizer(self) -> bool:
        return True

    def setup(self, trainer: L.Trainer) -> None:
        assert self.model is not None and self.accelerator is not None
        self.accelerator.setup(trainer)
        self.model = self.precision_plugin.convert_module(self.model)
        self.model_to_device()
        shard(self.model, self.device_mesh["data_parallel"])
        self.barrier()
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Full weights on process 0, empty elsewhere."""
        assert self.model is not None
        return get_model_state_dict(self.model, options=_full_on_host())

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        assert self.model is not None
        options = StateDictOptions(full_state_dict=True, strict=strict)
        set_model_state_dict(self.model, dict(checkpoint["state_dict"]), options=options)

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Full optimizer state on process 0, empty elsewhere."""
        assert self.model is not None
        if isinstance(optimizer, LightningOptimizer):
            optimizer = optimizer.optimizer
        named = get_optimizer_state_dict(self.model, optimizer, options=_full_on_host())
        if not named:
            return {}
        return _rename(named, {name: i for i, name in enumerate(_names(self.model, optimizer))})

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        assert self.model is not None
        options = StateDictOptions(full_state_dict=True)
        states = checkpoint["optimizer_states"]
        for optimizer, state in zip(self.optimizers, states, strict=True):
            named = _rename(state, dict(enumerate(_names(self.model, optimizer))))
            set_optimizer_state_dict(self.model, optimizer, named, options=options)

    # One ordinary file through the checkpoint plugin, as under other strategies.
    save_checkpoint = Strategy.save_checkpoint
    load_checkpoint = Strategy.load_checkpoint


def shard(module: nn.Module, mesh: DeviceMesh) -> None:
    """Shard the parameters over the mesh, if not done yet.

    Each child of the network is gathered for its own forward and freed afterwards, so that only one
    is whole at a time; all other parameters are gathered with the module's forward.
    """
    if isinstance(module, FSDPModule):
        return
    for part in module.get_submodule("network").children():
        if any(True for _ in part.parameters()):
            fully_shard(part, mesh=mesh)
    fully_shard(module, mesh=mesh)


def _full_on_host() -> StateDictOptions:
    return StateDictOptions(full_state_dict=True, cpu_offload=True)


def _rename(state: Mapping[str, Any], names: Mapping[Any, Any]) -> dict[str, Any]:
    """An optimizer's state with its parameters renamed."""
    return {
        "state": {names[old]: value for old, value in state["state"].items()},
        "param_groups": [
            {**group, "params": [names[old] for old in group["params"]]}
            for group in state["param_groups"]
        ],
    }


def _names(module: nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    """Names of the optimizer's parameters in the order in which torch numbers them."""
    name = {parameter: name for name, parameter in module.named_parameters()}
    return [name[parameter] for group in optimizer.param_groups for parameter in group["params"]]
