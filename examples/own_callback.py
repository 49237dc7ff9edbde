"""A callback of your own: writes the loss of each step to a text file."""

from pathlib import Path
from typing import Any

import lightning as L


class LossFile(L.Callback):
    """One line for each micro-step."""

    def __init__(self, file: str) -> None:
        self.file = Path(file)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, *_: Any
    ) -> None:
        """Append step and loss."""
        with self.file.open("a") as file:
            file.write(f"{trainer.global_step} {float(outputs['loss']):.4f}\n")
