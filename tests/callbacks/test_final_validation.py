"""A validation after the last optimizer step."""

from pathlib import Path

import lightning as L
import pytest
from lightning.pytorch.demos.boring_classes import BoringModel

from bev_lightning.callbacks.final_validation import FinalValidation


class Recorder(L.Callback):
    def __init__(self) -> None:
        self.steps: list[int] = []

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.steps.append(trainer.global_step)


@pytest.mark.parametrize(
    ("length", "every", "accumulation", "steps"),
    [
        ({"max_steps": 5}, 2, 1, [2, 4, 5]),
        ({"max_steps": 4}, 2, 1, [2, 4]),
        ({"max_steps": 3}, 2, 2, [2, 3]),
        ({"max_steps": 3}, 10, 1, [3]),
        ({"max_epochs": 1}, 5, 1, [5, 7]),
    ],
)
def test_the_last_step_is_validated_once(
    tmp_path: Path, length: dict[str, int], every: int, accumulation: int, steps: list[int]
) -> None:
    recorder = Recorder()
    trainer = L.Trainer(
        accelerator="cpu",
        callbacks=[FinalValidation(), recorder],
        accumulate_grad_batches=accumulation,
        val_check_interval=every * accumulation,
        check_val_every_n_epoch=None,
        limit_train_batches=7,
        limit_val_batches=1,
        num_sanity_val_steps=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
        **length,
    )
    trainer.fit(BoringModel())
    assert recorder.steps == steps
