import re
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

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


def fit(
    folder: Path, bar: ProgressBar, ckpt_path: Path | None = None, **options: object
) -> L.Trainer:
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
    trainer.fit(Module(), data, data, ckpt_path=ckpt_path, weights_only=True)
    return trainer


def test_a_file_gets_steps_loss_speed_and_score(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fit(
        tmp_path,
        ProgressBar(interval_s=0.0),
        max_steps=3,
        max_epochs=-1,
        accumulate_grad_batches=2,
        val_check_interval=6,
    )
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("train:")]
    # Optimizer steps of two micro-steps each.
    steps = [int(re.search(r"step (\d)/3", line)[1]) for line in lines]  # type: ignore[index]
    assert steps == [0, 1, 1, 2, 2, 3, 3]
    assert re.search(r"step 2/3 \(66 %\), loss 1.250, \d+\.\d samples/s, 00:00 left", lines[4])
    assert re.search(r"step 3/3 \(100 %\), loss 1.250, .* samples/s, NDS 0.500, in 00:0", lines[6])


def test_a_file_gets_few_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fit(tmp_path, ProgressBar(), max_steps=6, max_epochs=-1, val_check_interval=6)
    lines = [line.split(",")[0] for line in capsys.readouterr().err.splitlines()]
    shown = [line for line in lines if line.startswith(("train:", "validate:"))]
    assert shown == [
        "train: step 1/6 (16 %)",
        "validate: batch 1/6 (16 %)",
        "validate: batch 6/6 (100 %)",
        "train: step 6/6 (100 %)",
    ]


def test_a_terminal_shows_one_bar_at_a_time(run_on_terminal: Callable) -> None:
    output, lines = run_on_terminal(
        "import sys, tempfile, pathlib, warnings, logging\n"
        "warnings.filterwarnings('ignore')\n"
        "logging.getLogger('lightning').setLevel(logging.ERROR)\n"
        f"sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "from test_progress import fit, ProgressBar\n"
        "folder = pathlib.Path(tempfile.mkdtemp())\n"
        "fit(folder, ProgressBar(0.0), max_steps=6, max_epochs=-1, val_check_interval=3)\n"
        "print('done')\n"
    )
    assert "validate: 100%" in output and "train:  50%" in output
    lines = [line for line in lines if "train" in line or "validate" in line]
    assert len(lines) == 1 and lines[0].startswith("train: 100%") and "NDS 0.500" in lines[0]
    assert "v_num" not in output and "DataLoader" not in output


def test_the_total_follows_a_resume(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer = fit(tmp_path, ProgressBar(), max_steps=2, max_epochs=-1, limit_val_batches=0)
    trainer.save_checkpoint(tmp_path / "two.ckpt")
    capsys.readouterr()
    fit(tmp_path, ProgressBar(), ckpt_path=tmp_path / "two.ckpt", max_steps=5, max_epochs=-1)
    lines = capsys.readouterr().err.splitlines()
    assert any(line.startswith("train: step 3/5 (60 %)") for line in lines)


def test_other_ranks_are_silent(capsys: pytest.CaptureFixture[str]) -> None:
    bar = ProgressBar()
    assert bar.is_enabled
    trainer = Mock(is_global_zero=False, estimated_stepping_batches=4, global_step=0)
    bar.setup(trainer, Module(), "fit")
    assert bar.is_disabled
    bar.on_train_start(trainer, Module())
    trainer.global_step = 1
    bar.on_train_batch_end(trainer, Module(), None, [0], 0)
    bar.on_train_end(trainer, Module())
    assert capsys.readouterr().err == ""
