"""Progress of training, validation and prediction, with loss and speed."""

import time
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import ProgressBar as LightningProgressBar

from bev_lightning.callbacks.speed import count_columns
from bev_lightning.progress import Progress


class ProgressBar(LightningProgressBar):
    """Shows optimizer steps done and left, the loss, samples a second and the last score.

    See :class:`bev_lightning.progress.Progress`. The loss is read only when it is shown, because a
    GPU must be waited for. Only the first process shows anything.

    Args:
        interval_s: least time between two updates [s]; None for half a second on a terminal and a
            minute elsewhere.
    """

    def __init__(self, interval_s: float | None = None) -> None:
        super().__init__()
        self.interval_s = interval_s
        self._enabled = True
        self._training: Progress | None = None
        self._evaluation: Progress | None = None
        self._samples = 0.0
        self._seconds = 0.0
        self._last_batch_end = 0.0

    def enable(self) -> None:
        self._enabled = True

    def disable(self) -> None:
        self._enabled = False

    @property
    def is_enabled(self) -> bool:
        return self._enabled

    @property
    def is_disabled(self) -> bool:
        return not self._enabled

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if not trainer.is_global_zero:
            self.disable()

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._samples, self._seconds, self._last_batch_end = 0.0, 0.0, 0.0
        self._training = self._start(
            "train", trainer.estimated_stepping_batches, "step", trainer.global_step, leave=True
        )

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        now = time.perf_counter()
        if self._last_batch_end:
            # A running mean over about the last 20 micro-steps.
            self._samples = self._samples * 0.95 + len(batch)
            self._seconds = self._seconds * 0.95 + now - self._last_batch_end
        self._last_batch_end = now
        if self._training is not None:
            count = trainer.global_step - self._training.done
            self._training.update(count, lambda: self._describe(trainer))

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._close()

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        sanity = trainer.sanity_checking
        batches = trainer.num_sanity_val_batches if sanity else trainer.num_val_batches
        self._start_evaluation("validate", batches)

    def on_validation_batch_end(self, *args: Any, **kwargs: Any) -> None:
        if self._evaluation is not None:
            self._evaluation.update()

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._end_evaluation()
        if self._last_batch_end:
            self._last_batch_end = time.perf_counter()  # a validation is no training step

    def on_predict_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._start_evaluation("predict", trainer.num_predict_batches)

    on_predict_batch_end = on_validation_batch_end

    def on_predict_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._end_evaluation()

    def on_exception(self, *args: Any) -> None:
        self._close()

    def print(self, *args: Any, **kwargs: Any) -> None:
        for progress in (self._training, self._evaluation):
            if progress is not None:
                progress.hide()
        print(*args, **kwargs)

    def _start(
        self, name: str, total: float, unit: str, initial: int = 0, leave: bool = False
    ) -> Progress:
        interval_s, enabled = self.interval_s, self._enabled
        return Progress(name, total, unit, initial, 0.0, leave, interval_s, enabled)

    def _start_evaluation(self, name: str, batches: Any) -> None:
        if self._training is not None:
            self._training.hide()
        total = sum(batches) if isinstance(batches, list) else batches
        self._evaluation = self._start(name, total, "batch")

    def _end_evaluation(self) -> None:
        if self._evaluation is not None:
            self._evaluation.close()
            self._evaluation = None

    def _close(self) -> None:
        self._end_evaluation()
        if self._training is not None:
            self._training.close()
            self._training = None

    def _describe(self, trainer: L.Trainer) -> str:
        metrics, parts = trainer.callback_metrics, []
        if "train/loss" in metrics:
            parts.append(f"loss {float(metrics['train/loss']):.3f}")
        if self._seconds:
            rate = self._samples / self._seconds * count_columns(trainer)
            parts.append(f"{rate:.1f} samples/s")
        if "val/NDS" in metrics:
            parts.append(f"NDS {float(metrics['val/NDS']):.3f}")
        return ", ".join(parts)
