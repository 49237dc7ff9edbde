"""The progress bar: micro-steps done and left, the loss, samples a second."""

import math
import sys
import time
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import TQDMProgressBar

from bev_lightning.callbacks.speed import count_columns


class ProgressBar(TQDMProgressBar):
    """A bar of all micro-steps of the run, with the loss and the rate of all processes.

    It is drawn at most every ``interval_s`` seconds: each drawing reads the loss, for which a GPU
    must be waited for. Into a file or a pipe, where every drawing is a line, it is drawn every
    ``file_interval_s`` seconds. Only the first process draws.

    Args:
        interval_s, file_interval_s: least time between two drawings [s].
    """

    BAR_FORMAT = "{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}{postfix}]"

    def __init__(self, interval_s: float = 0.5, file_interval_s: float = 20.0) -> None:
        super().__init__()
        self.interval_s = interval_s if sys.stdout.isatty() else file_interval_s
        self._drawn_at = -math.inf
        self._samples = 0.0
        self._seconds = 0.0
        self._mark = 0.0

    @property
    def train_description(self) -> str:
        return "train"

    @property
    def validation_description(self) -> str:
        return "validate"

    @property
    def total_train_batches(self) -> int | float:
        """Micro-steps of this epoch. (Lightning's own counts ``max_steps``, which are optimizer
        steps, as micro-steps, and forgets those done before a resume.)"""
        trainer = self.trainer
        if trainer.max_steps < 0:
            return trainer.num_training_batches
        done = trainer.fit_loop.epoch_loop.batch_progress.current.ready
        left = (trainer.max_steps - trainer.global_step) * trainer.accumulate_grad_batches
        return min(trainer.num_training_batches, done + left)

    def get_metrics(
        self, trainer: L.Trainer, pl_module: L.LightningModule
    ) -> dict[str, int | str | float | dict[str, float]]:
        shown: dict[str, int | str | float | dict[str, float]] = {}
        if "train/loss" in trainer.callback_metrics:
            shown["loss"] = f"{float(trainer.callback_metrics['train/loss']):.3f}"
        if self._seconds:
            shown["samples/s"] = f"{self._samples / self._seconds * count_columns(trainer):.1f}"
        if "val/NDS" in trainer.callback_metrics:
            shown["NDS"] = f"{float(trainer.callback_metrics['val/NDS']):.3f}"
        return shown

    def on_train_start(self, *args: Any) -> None:
        super().on_train_start(*args)
        self._samples, self._seconds, self._mark = 0.0, 0.0, 0.0

    def on_train_epoch_start(self, trainer: L.Trainer, *args: Any) -> None:
        super().on_train_epoch_start(trainer, *args)
        self.train_progress_bar.set_description(self.train_description)

    def on_train_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        now = time.perf_counter()
        if self._mark:
            # A running mean over about the last 20 steps.
            self._samples = self._samples * 0.95 + len(batch)
            self._seconds = self._seconds * 0.95 + now - self._mark
        self._mark = now
        if self._is_due(batch_idx + 1 == self.train_progress_bar.total):
            super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)

    def on_validation_batch_start(self, trainer: L.Trainer, *args: Any, **kwargs: Any) -> None:
        super().on_validation_batch_start(trainer, *args, **kwargs)
        self.val_progress_bar.set_description(self.validation_description, refresh=False)

    def on_validation_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        if self._is_due(batch_idx + 1 == self.val_progress_bar.total):
            super().on_validation_batch_end(
                trainer, pl_module, outputs, batch, batch_idx, dataloader_idx
            )

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        super().on_validation_end(trainer, pl_module)
        if self._mark:
            self._mark = time.perf_counter()

    def _is_due(self, last: bool) -> bool:
        now = time.monotonic()
        if not last and now - self._drawn_at < self.interval_s:
            return False
        self._drawn_at = now
        return True
