"""A validation after the last optimizer step."""

from typing import Any

import lightning as L


class FinalValidation(L.Callback):
    """Validates after the last optimizer step, whatever ``val_check_interval`` is.

    It happens inside the fit, so that ModelCheckpoint compares it like any other validation.
    """

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        last_epoch = trainer.current_epoch + 1 == trainer.max_epochs
        if trainer.global_step == trainer.max_steps or (trainer.is_last_batch and last_epoch):
            trainer.should_stop = True  # Lightning validates before it stops early
