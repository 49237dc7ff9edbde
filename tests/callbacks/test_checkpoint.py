"""Which files a training leaves, and of which step each of them is."""

from pathlib import Path

import lightning as L
import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel

from bev_lightning.callbacks.checkpoint import AtomicCheckpointIO, StepCheckpoint, list_steps
from bev_lightning.errors import InputError


class Counting(StepCheckpoint):
    """Notes the step and the batch at which each file was written."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.written: list[tuple[int, int]] = []

    def _save_if_due(self, trainer: L.Trainer) -> None:
        if self._due:
            self.written.append((trainer.global_step, trainer.fit_loop.epoch_loop.batch_idx))
        super()._save_if_due(trainer)


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
        plugins=[AtomicCheckpointIO()],
    )
    trainer.fit(BoringModel(), ckpt_path=resume, weights_only=True)
    assert trainer.global_step == steps
    return saver


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("*.ckpt"))


def global_step(path: Path) -> int:
    return torch.load(path, weights_only=True)["global_step"]


def test_files_are_of_moments_between_optimizer_steps(tmp_path: Path) -> None:
    saver = fit(tmp_path, 7, every_n_train_steps=3, keep_every_n_train_steps=2, keep_last=1)
    kept = ["step_000002.ckpt", "step_000004.ckpt", "step_000006.ckpt", "step_000007.ckpt"]
    assert names(tmp_path) == ["last.ckpt", *kept]
    # Two batches a step, counted from 0; the last one at the end of the training.
    assert saver.written == [(2, 3), (3, 5), (4, 7), (6, 11), (7, 13)]
    assert global_step(tmp_path / "last.ckpt") == 7 and saver.last == tmp_path / "last.ckpt"
    assert [global_step(path) for path in list_steps(tmp_path)] == [2, 4, 6, 7]

    # A resume at a step that is saved does not save it again in the middle of the next.
    again = fit(tmp_path / "on", 6, tmp_path / "step_000004.ckpt", every_n_train_steps=2)
    assert again.written == [(6, 11)] and names(tmp_path / "on") == ["last.ckpt", kept[2]]
    # A training that goes on from an earlier step leaves the later files alone.
    fit(tmp_path, 5, tmp_path / "step_000004.ckpt", every_n_train_steps=1, keep_last=1)
    assert names(tmp_path) == ["last.ckpt", "step_000005.ckpt", *kept[2:]]
    assert global_step(tmp_path / "last.ckpt") == 5


def test_a_name_stands_for_a_whole_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    io, path = AtomicCheckpointIO(), tmp_path / "step_000001.ckpt"
    io.save_checkpoint({"weights": torch.arange(1000.0)}, path)

    def tear(content, file) -> None:
        file.write(path.read_bytes()[:700])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", tear)
    for name in ("step_000001.ckpt", "step_2.ckpt"):
        with pytest.raises(InputError, match=r"could not be written \(No space left .*; free disk"):
            io.save_checkpoint({}, tmp_path / name)
    assert names(tmp_path) == ["step_000001.ckpt"]
    assert torch.load(path, weights_only=True)["weights"].sum() == 499500


@pytest.mark.parametrize("name", ["every_n_train_steps", "keep_every_n_train_steps", "keep_last"])
def test_refuses_no_step(tmp_path: Path, name: str) -> None:
    with pytest.raises(InputError, match=f"callbacks.steps.{name}=-1 must be a whole number"):
        StepCheckpoint(str(tmp_path), **{name: -1})
