"""A signal ends a training at the end of its optimizer step, with a checkpoint."""

import os
import signal
from pathlib import Path

import lightning as L
import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel

from bev_lightning.callbacks.checkpoint import AtomicCheckpointIO, StepCheckpoint
from bev_lightning.callbacks.stop_signals import Stopped, StopRequest
from bev_lightning.errors import InputError


class Sender(L.Callback):
    """Sends this process a signal in the middle of an accumulation, or in a validation."""

    def __init__(self, number: int, batch: int | None = None, twice: bool = False) -> None:
        self.number = number
        self.batch = batch
        self.twice = twice

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx: int) -> None:
        if batch_idx == self.batch:
            os.kill(os.getpid(), self.number)
            if self.twice:
                os.kill(os.getpid(), self.number)

    def on_validation_batch_start(self, trainer, *args, **kwargs) -> None:
        if self.batch is None:
            os.kill(os.getpid(), self.number)


def fit(folder: Path, sender: Sender) -> L.Trainer:
    saver = StepCheckpoint(str(folder), 100, stop_signals=("SIGINT", "SIGTERM", "SIGUSR1"))
    trainer = L.Trainer(
        accelerator="cpu",
        max_steps=12,
        accumulate_grad_batches=2,
        val_check_interval=6,
        check_val_every_n_epoch=None,
        limit_val_batches=2,
        num_sanity_val_steps=0,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[sender, saver],
        plugins=[AtomicCheckpointIO()],
    )
    trainer.fit(BoringModel())
    return trainer


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1", "SIGINT"])
def test_the_optimizer_step_ends_and_is_saved(tmp_path: Path, name: str) -> None:
    number = signal.Signals[name]
    before = signal.getsignal(number)
    with pytest.raises(Stopped, match=name) as stopped:
        fit(tmp_path, Sender(number, batch=4))
    assert stopped.value.number == number
    content = torch.load(tmp_path / "last.ckpt", weights_only=True)
    assert content["global_step"] == 3
    assert not list(tmp_path.glob(".*"))
    assert signal.getsignal(number) == before


def test_a_validation_is_finished_first(tmp_path: Path) -> None:
    with pytest.raises(Stopped):
        fit(tmp_path, Sender(signal.SIGTERM))
    # The one at step 3 was under way; the stop is noticed at the step after it.
    assert torch.load(tmp_path / "last.ckpt", weights_only=True)["global_step"] == 4


def test_the_second_interrupt_does_not_wait(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(SystemExit):  # what Lightning makes of a KeyboardInterrupt
        fit(tmp_path, Sender(signal.SIGINT, batch=4, twice=True))
    assert not list(tmp_path.glob("*.ckpt"))
    signal.signal(signal.SIGINT, before)


def test_unknown_signals_are_refused() -> None:
    with pytest.raises(InputError, match="stop_signals holds SIGFOO, which is no signal"):
        StopRequest(["SIGTERM", "SIGFOO"])
