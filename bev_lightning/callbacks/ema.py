"""Exponential moving average (EMA) of the weights, for validation and checkpoints."""

from typing import Any

import lightning as L
import torch.distributed as dist
from torch import Tensor
from torch.optim.swa_utils import get_ema_multi_avg_fn

from bev_lightning.errors import InputError

TRAINED = "ema_trained_weights"
"""Checkpoint key of the trained weights; ``state_dict`` holds the average."""


class EMA(L.Callback):
    """Keeps ``average = d * average + (1 - d) * weights``, updated after each optimizer step.

    After n steps d is ``min(decay, (1 + n) / (10 + n))``, so that a short training does not depend
    on its initial weights. Validation runs with the average, and a checkpoint's ``state_dict`` is
    the average, so that evaluate, predict and init_from load what was validated. The trained
    weights are saved beside it, and ``resume`` restores both bit for bit.

    Floating-point buffers, above all batch-norm statistics, are averaged like weights: those of the
    trained weights would not match the average's activations. Other buffers (counters) are copied.
    With several processes the buffers of rank 0 are used: they are broadcast before a validation,
    and only rank 0 saves.

    For strategies with complete weights in every process: single device and ddp.

    (Lightning's WeightAveraging overwrites the trained weights with the average at the end of the
    training, before the last checkpoint, so that extending a training is not exact; its first
    update copies the weights, and its EMA averages integer counters.)

    Args:
        decay: d after many steps; the last ``0.7 / (1 - decay)`` steps have half of the weight.
    """

    def __init__(self, decay: float = 0.9998) -> None:
        if not 0 < decay < 1:
            raise InputError(
                f"callbacks.ema.decay={decay} must lie between 0 and 1, for example 0.9998"
            )
        self.decay = decay
        self.num_steps = 0
        self.average: dict[str, Tensor] = {}
        self._trained: dict[str, Tensor] = {}

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not self.average:
            self.average = _copy(pl_module.state_dict())
        device = pl_module.device
        self.average = {name: value.to(device) for name, value in self.average.items()}

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, *args: Any
    ) -> None:
        if trainer.global_step <= self.num_steps:
            return  # gradients are still being accumulated
        self.num_steps = trainer.global_step
        decay = min(self.decay, (1 + self.num_steps) / (10 + self.num_steps))
        state = pl_module.state_dict()
        real = [name for name, value in self.average.items() if value.is_floating_point()]
        get_ema_multi_avg_fn(decay)(
            [self.average[name] for name in real], [state[name] for name in real], None
        )
        for name in self.average.keys() - set(real):
            self.average[name].copy_(state[name])

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not self.average or self._trained:
            return
        if dist.is_initialized():
            # Weights are the same in all processes; batch-norm statistics are not.
            for name, _ in pl_module.named_buffers():
                if name in self.average:
                    dist.broadcast(self.average[name], src=0)
        self._trained = _copy(pl_module.state_dict())
        pl_module.load_state_dict(self.average)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._restore_trained(pl_module)

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, *args: Any) -> None:
        self._restore_trained(pl_module)

    def on_save_checkpoint(
        self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        if self.average:
            checkpoint[TRAINED] = self._trained or checkpoint["state_dict"]
            checkpoint["state_dict"] = dict(self.average)

    def on_load_checkpoint(
        self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        # The module has loaded the checkpoint's state_dict, the average, by now. Without EMA in the
        # checkpoint the average starts at its weights.
        self.average = _copy(checkpoint["state_dict"])
        if TRAINED in checkpoint:
            pl_module.load_state_dict(checkpoint[TRAINED])

    def state_dict(self) -> dict[str, Any]:
        return {"num_steps": self.num_steps}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.num_steps = state_dict["num_steps"]

    def _restore_trained(self, pl_module: L.LightningModule) -> None:
        if self._trained:
            pl_module.load_state_dict(self._trained)
            self._trained = {}


def _copy(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in state.items()}
