import io
import re
import sys
from pathlib import Path

import lightning as L
import pytest
import torch
from torch import Tensor, nn

from bev_lightning.callbacks.progress import ProgressBar


class Module(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = (batch @ self.weight).mean() + 1.25
        self.log("train/loss", loss.detach())
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val/NDS", 0.5)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def fit(folder: Path, bar: ProgressBar, **options: object) -> L.Trainer:
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        logger=False,
        callbacks=[bar],
        enable_checkpointing=False,
        enable_model_summary=False,
        default_root_dir=folder,
        check_val_every_n_epoch=None,
        num_sanity_val_steps=0,
        **options,
    )
    data = torch.utils.data.DataLoader(torch.ones(12, 3), batch_size=2)
    trainer.fit(Module(), data, data)
    return trainer


def test_the_bar_shows_micro_steps_loss_and_rate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stdout", stream)
    fit(
        tmp_path,
        ProgressBar(interval_s=0.0, file_interval_s=0.0),
        max_steps=3,
        max_epochs=-1,
        accumulate_grad_batches=2,
        val_check_interval=6,
    )
    text = stream.getvalue()
    for step in range(1, 7):
        assert f" {step}/6 [" in text  # three optimizer steps of two micro-steps
    assert re.search(r"train: 100%\|.*\| 6/6 \[.*loss=1.250, samples/s=\d+\.\d, NDS=0.500\]", text)
    assert "v_num" not in text
    assert "validate: 100%" in text and "DataLoader" not in text.split("validate: 100%")[1]


def test_the_bar_is_rarely_drawn_into_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stdout", stream)
    fit(tmp_path, ProgressBar(), max_steps=6, max_epochs=-1, val_check_interval=6)
    assert " 1/6 [" in stream.getvalue()
    assert " 6/6 [" in stream.getvalue()
    assert not re.search(r" [2-5]/6 \[", stream.getvalue())


def test_the_total_follows_a_resume(tmp_path: Path) -> None:
    bar = ProgressBar()
    trainer = fit(tmp_path, bar, max_steps=2, max_epochs=-1, limit_val_batches=0)
    trainer.fit_loop.epoch_loop.max_steps = 5
    # Two of five steps are done, in micro-steps 1 and 2 of an epoch of six.
    assert (trainer.global_step, bar.total_train_batches) == (2, 5)
    trainer.fit_loop.epoch_loop.max_steps = 50
    assert bar.total_train_batches == 6


def test_other_ranks_are_silent(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bar = ProgressBar()
    trainer = L.Trainer(accelerator="cpu", logger=False, barebones=True)
    monkey = type("Rank1", (), {"is_global_zero": False})()
    bar.setup(monkey, Module(), "fit")
    assert bar.is_disabled
    bar._trainer = trainer
    bar.on_train_start(trainer, None)
    assert bar.train_progress_bar.disable
    assert capsys.readouterr().out == ""
