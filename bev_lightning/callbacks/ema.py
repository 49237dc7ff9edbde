"""An exponential moving average of the weights, which validates and is saved in their stead."""

from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from torch import Tensor

from bev_lightning.errors import InputError

TRAINED = "ema_trained_weights"
"""Key of a checkpoint under which the weights as trained lie; ``state_dict`` holds the average."""


class EMA(L.Callback):
    """After each optimizer step ``average = d * average + (1 - d) * weights``.

    With n steps done d is ``min(decay, (1 + n) / (10 + n))``, so that a short training is not held
    to its first weights. Validation runs on the average; a checkpoint's ``state_dict`` IS the
    average, so whoever loads it (evaluate, predict, init_from) gets what was validated. The weights
    as trained lie beside it, and ``resume`` goes on with both, bit for bit.

    Floating-point buffers, the statistics of batch norms above all, are averaged like weights: the
    statistics of the weights as trained would not fit the average's activations. Other buffers
    (counters) are copied. Where several processes train, the buffers of the first count: they are
    sent to the others before a validation, and only the first saves.

    For strategies that keep whole weights in every process: single device and ddp.

    Args:
        decay: d after many steps; half of the average's weight lies on the last
            ``0.7 / (1 - decay)`` steps.
    """

    def __init__(self, decay: float = 0.9998) -> None:
        if not 0 < decay < 1:
            raise InputError(
                f"callbacks.ema.decay={decay} must lie between 0 and 1, for example 0.9998"
            )
        self.decay = decay
        self.num_steps = 0
        self.average: dict[str, Tensor] = {}
        self._aside: dict[str, Tensor] = {}

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not self.average:
            self.average = _copy(pl_module.state_dict())
        device = pl_module.device
        self.average = {name: value.to(device) for name, value in self.average.items()}

    def on_train_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        if trainer.global_step <= self.num_steps:
            return  # gradients are still being accumulated
        self.num_steps = trainer.global_step
        decay = min(self.decay, (1 + self.num_steps) / (10 + self.num_steps))
        state = pl_module.state_dict()
        real = [name for name, value in self.average.items() if value.is_floating_point()]
        torch._foreach_lerp_(
            [self.average[name] for name in real], [state[name] for name in real], 1 - decay
        )
        for name in self.average.keys() - set(real):
            self.average[name].copy_(state[name])

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not self.average or self._aside:
            return
        if dist.is_initialized():
            # Weights are the same everywhere; statistics are each process's own.
            for name, _ in pl_module.named_buffers():
                if name in self.average:
                    dist.broadcast(self.average[name], src=0)
        self._aside = _copy(pl_module.state_dict())
        pl_module.load_state_dict(self.average)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._put_back(pl_module)

    def on_exception(
        self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException
    ) -> None:
        self._put_back(pl_module)

    def on_save_checkpoint(
        self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        if self.average:
            checkpoint[TRAINED] = self._aside or checkpoint["state_dict"]
            checkpoint["state_dict"] = dict(self.average)

    def on_load_checkpoint(
        self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        # The module has the checkpoint's state_dict by now, which is the average. A checkpoint of a
        # training without one starts it at its weights.
        self.average = _copy(checkpoint["state_dict"])
        if TRAINED in checkpoint:
            pl_module.load_state_dict(checkpoint[TRAINED])

    def state_dict(self) -> dict[str, Any]:
        return {"num_steps": self.num_steps}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.num_steps = state_dict["num_steps"]

    def _put_back(self, pl_module: L.LightningModule) -> None:
        if self._aside:
            pl_module.load_state_dict(self._aside)
            self._aside = {}


def _copy(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in state.items()}
