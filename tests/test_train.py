"""What the training verb reports of a run."""

from pathlib import Path
from types import MappingProxyType

import lightning as L
import pytest

from bev_lightning.callbacks.speed import SpeedMonitor, count_columns
from bev_lightning.parallel.hybrid import HybridStrategy
from bev_lightning.runtime.training import summarize


def test_a_run_that_was_refused_before_its_processes_met_is_reported(tmp_path: Path) -> None:
    strategy = HybridStrategy(1, 2, 1, "1f1b", 2)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        callbacks=[SpeedMonitor()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        default_root_dir=tmp_path,
    )
    reported = summarize(trainer, None, "failed")
    assert (
        reported["status"] == "failed"
        and reported["samples_per_s"] == 0.0
        and reported["steps"] == 0
    )


def test_a_pipeline_of_two_processes_reads_each_sample_once() -> None:
    class Trainer:
        distributed_sampler_kwargs = MappingProxyType({"num_replicas": 3, "rank": 1})
        world_size = 6

    speed = SpeedMonitor()
    speed.on_train_start(Trainer(), None)  # type: ignore[arg-type]
    speed.samples, speed.seconds = 8, 2.0
    assert speed.samples_per_s == pytest.approx(3 * 8 / 2.0)
    assert count_columns(Trainer()) == 3  # type: ignore[arg-type]
