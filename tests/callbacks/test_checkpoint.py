"""Which files a training leaves, and of which step each of them is."""

from pathlib import Path

import lightning as L
import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel

from bev_lightning.callbacks.checkpoint import StepCheckpoint
from bev_lightning.errors import InputError


class Counting(StepCheckpoint):
    """Notes the batch after which each file was written."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.written: list[tuple[str, int]] = []

    def _save(self, trainer: L.Trainer, name: str) -> None:
        super()._save(trainer, name)
        self.written.append((name, trainer.fit_loop.epoch_loop.batch_idx))


def fit(folder: Path, steps: int, resume: Path | None = None, **options) -> Counting:
    saver = Counting(str(folder), **options)
    trainer = L.Trainer(
        accelerator="cpu",
        max_steps=steps,
        accumulate_grad_batches=2,
        limit_val_batches=0,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[saver],
    )
    trainer.fit(BoringModel(), ckpt_path=resume, weights_only=True)
    assert trainer.global_step == steps
    return saver


def step_of(path: Path) -> int:
    return torch.load(path, weights_only=True)["global_step"]


def test_files_are_of_moments_between_optimizer_steps(tmp_path: Path) -> None:
    saver = fit(tmp_path, 5, every_n_train_steps=3, keep_every_n_train_steps=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "last.ckpt",
        "step_000002.ckpt",
        "step_000004.ckpt",
    ]
    # Two batches a step, counted from 0; the last one at the end of the training.
    assert saver.written == [
        ("step_000002.ckpt", 3),
        ("last.ckpt", 5),
        ("step_000004.ckpt", 7),
        ("last.ckpt", 9),
    ]
    assert step_of(tmp_path / "last.ckpt") == 5 and step_of(tmp_path / "step_000004.ckpt") == 4
    assert saver.last == tmp_path / "last.ckpt"

    # A resume at a step that is saved does not save it again in the middle of the next.
    again = fit(tmp_path / "on", 6, tmp_path / "step_000004.ckpt", every_n_train_steps=2)
    assert [batch % 2 for _, batch in again.written] == [1]
    assert step_of(tmp_path / "on" / "last.ckpt") == 6


@pytest.mark.parametrize("name", ["every_n_train_steps", "keep_every_n_train_steps"])
def test_refuses_no_step(tmp_path: Path, name: str) -> None:
    with pytest.raises(InputError, match=f"callbacks.steps.{name}=-1 must be a whole number"):
        StepCheckpoint(str(tmp_path), **{name: -1})
