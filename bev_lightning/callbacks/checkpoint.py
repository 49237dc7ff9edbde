"""Checkpoints by optimizer steps: the last one, and some that stay."""

from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Checkpoint

from bev_lightning.errors import InputError


class StepCheckpoint(Checkpoint):
    """``last.ckpt``, overwritten every few optimizer steps and at the end of the training, and
    ``step_000100.ckpt``, which stay.

    Lightning's ModelCheckpoint writes its last.ckpt only along with a new best, and right after a
    resume in the middle of an accumulation. Here every file is of a moment between two optimizer
    steps, where no gradient is half summed up.

    Args:
        dirpath: folder of the files.
        every_n_train_steps: optimizer steps between two writings of last.ckpt.
        keep_every_n_train_steps: optimizer steps between two files that stay; None for none.

    Attributes:
        last: the newest file of this training; None before there is one.
    """

    def __init__(
        self,
        dirpath: str,
        every_n_train_steps: int = 500,
        keep_every_n_train_steps: int | None = None,
    ) -> None:
        for name, value in (
            ("every_n_train_steps", every_n_train_steps),
            ("keep_every_n_train_steps", keep_every_n_train_steps or 1),
        ):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise InputError(
                    f"callbacks.steps.{name}={value} must be a whole number of at least 1; set "
                    f"callbacks.steps.{name} anew"
                )
        self.dirpath = Path(dirpath)
        self.every_n_train_steps = every_n_train_steps
        self.keep_every_n_train_steps = keep_every_n_train_steps
        self.last: Path | None = None
        self._seen = 0
        self._saved = -1

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._seen, self._saved = trainer.global_step, -1

    def on_train_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        step = trainer.global_step
        if step == self._seen:
            return  # gradients are still being accumulated
        self._seen = step
        if self.keep_every_n_train_steps and step % self.keep_every_n_train_steps == 0:
            self._save(trainer, f"step_{step:06d}.ckpt")
        if step % self.every_n_train_steps == 0:
            self._save(trainer, "last.ckpt")
            self._saved = step

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.global_step != self._saved:
            self._save(trainer, "last.ckpt")
            self._saved = trainer.global_step

    def _save(self, trainer: L.Trainer, name: str) -> None:
        if trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        self.last = self.dirpath / name
        trainer.save_checkpoint(self.last, weights_only=False)
