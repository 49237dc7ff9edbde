import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import lightning as L
import pytest
import torch
from torch import Tensor, nn

from bev_lightning.callbacks import speed as monitor
from bev_lightning.callbacks.speed import SpeedMonitor, gradient_norm


class Clock:
    """Time that passes only where the test says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class Stream:
    """Batches of two samples; each takes 5 ms to come, the first a second."""

    def __init__(self, num: int, clock: Clock) -> None:
        self.num, self.clock = num, clock
        self.seconds_waited = 0.0

    def __len__(self) -> int:
        return self.num

    def __iter__(self) -> Iterator[Tensor]:
        for i in range(self.num):
            wait = 0.005 if i else 1.0
            self.clock.sleep(wait)
            self.seconds_waited += wait
            yield torch.ones(2, 3)


class Module(L.LightningModule):
    """Loss = 3 w . x, so that every micro-step adds a gradient of known norm. A step
    takes 15 ms."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3))
        self.clock = clock

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.clock.sleep(0.015)
        return 3.0 * (batch @ self.weight).mean()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.clock.sleep(7.0)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Recorder(L.pytorch.loggers.logger.Logger):
    """Keeps what is logged: step -> values."""

    name, version = "recorder", "0"

    def __init__(self) -> None:
        super().__init__()
        self.rows: dict[int, dict[str, float]] = {}

    def log_metrics(self, metrics: dict[str, float], step: int) -> None:
        self.rows.setdefault(step, {}).update(metrics)

    def log_hyperparams(self, *args: object, **kwargs: object) -> None: ...


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(
        monitor,
        "time",
        SimpleNamespace(perf_counter=clock.perf_counter, process_time=time.process_time),
    )
    return clock


def fit(folder: Path, clock: Clock, **options: object) -> tuple[Recorder, SpeedMonitor]:
    """Eight micro-steps, a validation after every fourth."""
    recorder, speed = Recorder(), SpeedMonitor()
    options = {"val_check_interval": 4, "limit_val_batches": 1, "log_every_n_steps": 2, **options}
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        check_val_every_n_epoch=None,
        logger=recorder,
        callbacks=[speed],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        **options,
    )
    trainer.fit(Module(clock), Stream(8, clock), Stream(1, clock))
    return recorder, speed


def test_rates_are_of_training_alone(tmp_path: Path, clock: Clock) -> None:
    recorder, speed = fit(tmp_path, clock)
    rows = {step: row for step, row in recorder.rows.items() if "speed/samples_per_s" in row}
    assert sorted(rows) == [1, 3, 5, 7]  # Lightning counts logged steps from 0
    for row in rows.values():
        assert row["speed/samples_per_s"] == pytest.approx(2 / 0.020)
        assert row["speed/data_wait_share"] == pytest.approx(0.25)
        assert "gpu/memory_gib" not in row
    assert speed.samples == 14  # the slow first step is left out
    assert speed.samples_per_s == pytest.approx(100.0)
    assert speed.data_wait_share == pytest.approx(0.25)


def test_gradient_norm_is_taken_before_clipping_and_of_the_accumulated_gradient(
    tmp_path: Path, clock: Clock
) -> None:
    recorder, _ = fit(tmp_path, clock, accumulate_grad_batches=2, gradient_clip_val=0.5)
    logged = {s: r["train/grad_norm"] for s, r in recorder.rows.items() if "train/grad_norm" in r}
    want = 3.0 * 3.0**0.5  # the mean of two equal micro-steps
    assert logged == {1: pytest.approx(want), 3: pytest.approx(want)}
    assert [s for s, r in recorder.rows.items() if "speed/samples_per_s" in r] == [1, 3]


def test_gpu_memory_is_logged_in_gib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(monitor.torch.cuda, "max_memory_allocated", lambda device: 3 * 2**29)
    logged: dict[str, float] = {}

    class OnGpu:
        device = torch.device("cuda", 0)

        def log_dict(self, values: dict[str, float], batch_size: int) -> None:
            logged.update(values)

    SpeedMonitor()._log(L.Trainer(accelerator="cpu", logger=False, barebones=True), OnGpu())
    assert logged == {"gpu/memory_gib": 1.5}


def test_gradient_norm_over_several_parameters() -> None:
    parameters = [
        nn.Parameter(torch.zeros(2)),
        nn.Parameter(torch.zeros(1)),
        nn.Parameter(torch.zeros(5)),
    ]
    assert gradient_norm(parameters).item() == 0.0
    parameters[0].grad = torch.tensor([3.0, 0.0])
    parameters[1].grad = torch.tensor([-4.0])
    assert gradient_norm(parameters).item() == pytest.approx(5.0)
