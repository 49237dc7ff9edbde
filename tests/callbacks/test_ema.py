"""The averaged weights: their values, what validates, what is saved, what a resume goes on with."""

from pathlib import Path

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader

from bev_lightning.callbacks.ema import EMA, TRAINED
from bev_lightning.errors import InputError


class Small(L.LightningModule):
    """Regression through a batch norm; its validation score depends on weights and statistics."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 1))
        self.trace: list[dict] = []

    def training_step(self, batch, number: int) -> torch.Tensor:
        return (self.net(batch) - batch.sum(1, keepdim=True)).square().mean()

    def on_train_batch_end(self, outputs, batch, number: int) -> None:
        if number % 2:  # a step every other batch
            self.trace.append({k: v.clone() for k, v in self.state_dict().items()})

    def validation_step(self, batch, number: int) -> None:
        self.log("val/score", self.net(batch).sum())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), 0.05)


def batches() -> DataLoader:
    # All batches alike: a plain DataLoader starts anew after a resume.
    values = torch.randn(4, 4, generator=torch.Generator().manual_seed(1)).repeat(12, 1)
    return DataLoader(values, batch_size=4)


def fit(folder: Path, module: Small, ema: EMA, steps: int) -> L.Trainer:
    saver = ModelCheckpoint(
        folder, filename="best", monitor="val/score", save_last=True, enable_version_counter=False
    )
    trainer = L.Trainer(
        accelerator="cpu",
        max_steps=steps,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        check_val_every_n_epoch=None,
        val_check_interval=2,
        callbacks=[saver, ema],
        accumulate_grad_batches=2,
    )
    checkpoint = folder / "resume.ckpt"
    trainer.fit(
        module,
        batches(),
        batches(),
        ckpt_path=checkpoint if checkpoint.exists() else None,
        weights_only=True,
    )
    return trainer


def test_average_is_the_formula_and_what_validates_is_what_is_saved(tmp_path: Path) -> None:
    module, ema = Small(), EMA(decay=0.5)
    first = {k: v.clone() for k, v in module.state_dict().items()}
    trainer = fit(tmp_path, module, ema, steps=4)
    expected = first
    assert len(module.trace) == 4 == ema.num_steps
    for n, state in enumerate(module.trace, start=1):
        decay = min(0.5, (1 + n) / (10 + n))
        expected = {
            name: decay * expected[name] + (1 - decay) * value
            if value.is_floating_point()
            else value
            for name, value in state.items()
        }
    for name, value in expected.items():
        torch.testing.assert_close(ema.average[name], value)
    assert not torch.equal(module.net[0].weight, ema.average["net.0.weight"])

    content = torch.load(tmp_path / "last.ckpt", weights_only=True)
    assert torch.equal(content["state_dict"]["net.0.weight"], ema.average["net.0.weight"])
    assert torch.equal(content[TRAINED]["net.0.weight"], module.net[0].weight)

    # The logged score comes again from the file alone.
    logged = float(trainer.callback_metrics["val/score"])
    loaded = Small()
    loaded.load_state_dict(content["state_dict"])
    [again] = L.Trainer(
        accelerator="cpu", logger=False, enable_progress_bar=False, enable_checkpointing=False
    ).validate(loaded, batches(), verbose=False)
    assert again["val/score"] == logged
    # A validation after the training runs on the average too, and leaves the weights.
    [after] = trainer.validate(module, batches(), verbose=False)
    assert after["val/score"] == logged
    assert torch.equal(content[TRAINED]["net.0.weight"], module.net[0].weight)


def test_a_resumed_training_equals_an_undisturbed_one(tmp_path: Path) -> None:
    (tmp_path / "whole").mkdir()
    (tmp_path / "parts").mkdir()
    whole, whole_ema = Small(), EMA(decay=0.9)
    fit(tmp_path / "whole", whole, whole_ema, steps=6)
    fit(tmp_path / "parts", Small(), EMA(decay=0.9), steps=2)
    (tmp_path / "parts" / "last.ckpt").rename(tmp_path / "parts" / "resume.ckpt")
    part, part_ema = Small(), EMA(decay=0.9)
    fit(tmp_path / "parts", part, part_ema, steps=6)
    assert part_ema.num_steps == 6
    for name, value in whole.state_dict().items():
        assert torch.equal(value, part.state_dict()[name]), name
        assert torch.equal(whole_ema.average[name], part_ema.average[name]), name


def test_a_checkpoint_without_average_starts_one(tmp_path: Path) -> None:
    module = Small()
    content = {"state_dict": {k: v.clone() + 1 for k, v in module.state_dict().items()}}
    ema = EMA()
    ema.on_load_checkpoint(None, module, content)
    assert torch.equal(ema.average["net.0.bias"], content["state_dict"]["net.0.bias"])


def test_weights_return_after_an_interrupted_validation() -> None:
    module, ema = Small(), EMA()
    ema.average = {k: torch.zeros_like(v) for k, v in module.state_dict().items()}
    before = module.net[0].weight.clone()
    ema.on_validation_start(None, module)
    assert not module.net[0].weight.any()
    ema.on_exception(None, module, KeyboardInterrupt())
    assert torch.equal(module.net[0].weight, before)


def test_nonsense_is_refused() -> None:
    with pytest.raises(InputError, match="decay=1.0"):
        EMA(decay=1.0)
