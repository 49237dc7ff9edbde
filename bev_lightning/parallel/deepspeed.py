"""DeepSpeed's ZeRO as a Lightning strategy whose checkpoints are ordinary files."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DeepSpeedStrategy
from lightning.pytorch.strategies.strategy import Strategy
from torch import Tensor, nn

from bev_lightning.private_apis import link_deepspeed_states


class ZeroStrategy(DeepSpeedStrategy):
    """Lightning's DeepSpeedStrategy with ordinary checkpoints: process 0 writes one file with full
    float32 weights and optimizer states, interchangeable with those of all other strategies.

    Parameters are gathered on every process one by one, so that a checkpoint takes 12 bytes per
    parameter of host memory and one collective for each.

    Args:
        stage: 1 shards the optimizer states, 2 the gradients too, 3 the weights too.
        offload_optimizer: keep the optimizer states and the optimizer's step on the host.
        offload_parameters: keep the weights on the host, with stage 3.
    """

    def __init__(
        self, stage: int, offload_optimizer: bool, offload_parameters: bool, **kwargs: Any
    ) -> None:
        super().__init__(
            stage=stage,
            offload_optimizer=offload_optimizer,
            offload_parameters=offload_parameters,
            **kwargs,
        )
        assert isinstance(self.config, dict)
        # The configured optimizer runs on the host too.
        self.config["zero_force_ds_cpu_optimizer"] = False
        self._groups: list[list[nn.Parameter]] = []

    # Weights are restored before DeepSpeed shards them, optimizer states after.
    restore_checkpoint_after_setup = False
    lightning_restore_optimizer = True

    def _setup_model_and_optimizer(self, model: nn.Module, optimizer: Any, *args: Any) -> Any:
        # DeepSpeed replaces the groups' parameters by flat tensors.
        self._groups = [list(group["params"]) for group in optimizer.param_groups]
        return super()._setup_model_and_optimizer(model, optimizer, *args)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        assert self.lightning_module is not None
        return gather_weights(self.lightning_module)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        Strategy.load_model_state_dict(self, checkpoint, strict)

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        return gather_optimizer_state(optimizer, self._groups)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            scatter_optimizer_state(optimizer, self._groups, state)

    save_checkpoint = Strategy.save_checkpoint
    load_checkpoint = Strategy.load_checkpoint


def gather_weights(module: nn.Module) -> dict[str, Tensor]:
    """Full float32 state dict, on the host, of a module that DeepSpeed trains."""
    from deepspeed.runtime.zero import GatheredParameters
    from deepspeed.utils import safe_get_full_fp32_param

    state = {name: value.detach().cpu() for name, value in module.named_buffers()}
    for name, parameter in module.named_parameters():
        whole = safe_get_full_fp32_param(parameter) if parameter.requires_grad else None
        if whole is None:
            with GatheredParameters([parameter]):
                whole = parameter.detach().float()
        state[name] = whole.detach().cpu().clone()
    return {name: state[name] for name in module.state_dict()}


def gather_optimizer_state(
    optimizer: Any, groups: Sequence[Sequence[nn.Parameter]]
) -> dict[str, Any]:
    """Full optimizer state in torch's format.

    Args:
        optimizer: DeepSpeed's wrapper of a torch optimizer.
        groups: the torch optimizer's parameters before DeepSpeed replaced them.
    """
    from deepspeed.utils import safe_get_full_optimizer_state

    inner = optimizer.optimizer
    if inner.state:
        link_deepspeed_states(optimizer)
    kept: dict[str, Any] = next(iter(inner.state.values()), {})
    step = kept.get("step")
    moments = [key for key, value in kept.items() if torch.is_tensor(value) and value.ndim]
    state: dict[int, dict[str, Any]] = {}
    described, number = [], 0
    for group, own in zip(groups, inner.param_groups, strict=True):
        first = number
        for parameter in group:
            if step is not None:
                state[number] = {"step": torch.as_tensor(step).detach().cpu().clone()}
                for key in moments:
                    whole = safe_get_full_optimizer_state(parameter, key)
                    state[number][key] = whole.detach().cpu().clone()
            number += 1
        settings = {key: value for key, value in own.items() if key != "params"}
        described.append({**settings, "params": list(range(first, number))})
    return {"state": state, "param_groups": described}


def scatter_optimizer_state(
    optimizer: Any, groups: Sequence[Sequence[nn.Parameter]], state: Mapping[str, Any]
) -> None:
    """Load a full optimizer state, from :func:`gather_optimizer_state` or torch's optimizer."""
    from deepspeed.utils import safe_set_full_optimizer_state, safe_set_local_optimizer_state

    inner = optimizer.optimizer
    for own, stored in zip(inner.param_groups, state["param_groups"], strict=True):
        own.update({key: value for key, value in stored.items() if key != "params"})
    if not state["state"]:
        return
    example = next(iter(state["state"].values()))
    moments = [key for key, value in example.items() if torch.is_tensor(value) and value.ndim]
    is_stage_3 = hasattr(optimizer, "fp32_partitioned_groups_flat")
    flat = (
        optimizer.fp32_partitioned_groups_flat
        if is_stage_3
        else optimizer.single_partition_of_fp32_groups
    )
    for piece in flat:
        zeros = {key: torch.zeros_like(piece) for key in moments}
        inner.state[piece] = {"step": example["step"].clone().to(piece.device), **zeros}
    link_deepspeed_states(optimizer)
    rank, number = dist.get_rank(), 0
    for group in groups:
        for parameter in group:
            for key in moments:
                value = state["state"][number][key].to(flat[0].device)
                if is_stage_3:
                    size = parameter.ds_tensor.numel()  # type: ignore[attr-defined]
                    own = value.flatten()[rank * size : (rank + 1) * size]
                    own = nn.functional.pad(own, (0, size - own.numel()))
                    safe_set_local_optimizer_state(parameter, own, key)
                else:
                    safe_set_full_optimizer_state(parameter, value, key)
            number += 1
