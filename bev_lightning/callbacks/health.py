"""Stops a training whose loss is not finite or whose processes hold different weights."""

from typing import Any

import lightning as L
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor

from bev_lightning.errors import InputError


class FiniteLoss(L.Callback):
    """Stop when a loss is NaN or infinite, naming the loss term, the step and the samples.

    A step's flags are read after the next step has been queued, so that the check never makes the
    host wait for the device; it is at most one step late.

    Attributes:
        sample_tokens: of the current batch.
        validates: whether it belongs to a validation.
    """

    def __init__(self) -> None:
        self.sample_tokens: tuple[str, ...] = ()
        self.validates = False
        self._pending: tuple[int, tuple[str, ...], tuple[str, ...], Tensor] | None = None
        self._arrived: torch.cuda.Event | None = None

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        self.sample_tokens, self.validates = batch.sample_tokens, False

    def on_validation_batch_start(
        self, trainer: L.Trainer, pl_module: Any, batch: Any, *args: Any
    ) -> None:
        self.sample_tokens, self.validates = batch.sample_tokens, True

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._check()
        terms: dict[str, Tensor] = outputs["terms"]
        finite = torch.isfinite(torch.stack([value.float() for value in terms.values()]))
        flags = finite.to("cpu", non_blocking=True)
        self._pending = (batch_idx, outputs["sample_tokens"], tuple(terms), flags)
        if finite.is_cuda:
            self._arrived = torch.cuda.Event()
            self._arrived.record()
        else:
            self._check()

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._check()

    def _check(self) -> None:
        if self._pending is None:
            return
        batch_idx, tokens, names, flags = self._pending
        self._pending = None
        if self._arrived is not None:
            # The copy is asynchronous, and a step need not wait for the device anywhere else.
            self._arrived.synchronize()
        broken = [name for name, finite in zip(names, flags.tolist(), strict=True) if not finite]
        if broken:
            raise InputError(
                f"the loss {' and '.join(broken)} is not finite at micro-step {batch_idx} "
                f"(samples {', '.join(tokens)}); lower optim.lr, set trainer.gradient_clip_val, or "
                "try precision=32"
            )


class SameWeights(L.Callback):
    """Check at the end of a DDP training that all processes hold bit-identical weights.

    Buffers are not compared: each process has its own batch-norm statistics; validation and
    checkpoints use those of rank 0.
    """

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not isinstance(trainer.strategy, DDPStrategy) or trainer.world_size == 1:
            return  # other strategies shard the weights
        weights = torch.nn.utils.parameters_to_vector(pl_module.parameters()).detach()
        first = trainer.strategy.broadcast(weights.cpu(), src=0)
        own = (weights.cpu() != first).sum()
        # Reduced over all processes, so that all of them stop.
        differ = int(trainer.strategy.reduce(own.to(pl_module.device), reduce_op="max"))
        if differ:
            raise RuntimeError(
                f"up to {differ} of {weights.numel()} weights differ from process 0's; make every "
                "callback or hook that changes weights do the same on all processes, and resume "
                "from process 0's last checkpoint"
            )
        if trainer.is_global_zero:
            print(f"The weights of all {trainer.world_size} processes are equal.")
