"""Logs training speed, data wait, learning rate, gradient norm and memory."""

import time
from collections.abc import Iterable
from typing import Any

import lightning as L
import torch
from torch import Tensor

GIB = 1024.0**3


class SpeedMonitor(L.Callback):
    """Log speed, data wait, learning rate, gradient norm and GPU memory at logging steps.

    - ``speed/samples_per_s``: samples of all processes per second since the last logging step,
      without validation.
    - ``speed/data_wait_share``: share of that time, 0..1, that this process waited for its next
      batch (``seconds_waited`` of the training iterable).
    - ``train/lr``: learning rate of the first group of parameters.
    - ``train/grad_norm``: 2-norm of all gradients of the step, before clipping.
    - ``train/loss_scale``, ``train/skipped_steps``: with float16, the scale of the loss and the
      optimizer steps skipped so far because a gradient overflowed.
    - ``gpu/memory_gib``: peak memory of the tensors on this process's GPU so far [GiB].

    Times are the host's. It runs ahead of a GPU by a few steps at most, so that rates over several
    steps are right without synchronisation.
    """

    def __init__(self) -> None:
        self.samples = 0
        self.seconds = 0.0
        self.seconds_waited = 0.0
        self.cpu_seconds = 0.0
        self._logged = (0, 0.0, 0.0)
        self._mark = 0.0
        self._cpu_mark = 0.0
        self._waited_before = 0.0
        self._num_columns = 1

    @property
    def samples_per_s(self) -> float:
        """Samples of all processes per second over the training without its first step; 0 before
        the second step."""
        return self.samples / self.seconds * self._num_columns if self.seconds else 0.0

    @property
    def cpu_ms_per_sample(self) -> float:
        """CPU time of this process per sample [ms], all threads, without loader processes; on a
        shared machine it varies less than wall time."""
        return 1e3 * self.cpu_seconds / self.samples if self.samples else 0.0

    @property
    def data_wait_share(self) -> float:
        """Share of the training time, 0..1, spent waiting for data, without the first step."""
        return self.seconds_waited / self.seconds if self.seconds else 0.0

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.samples, self.seconds, self.seconds_waited, self.cpu_seconds = 0, 0.0, 0.0, 0.0
        self._logged = (0, 0.0, 0.0)
        self._mark = 0.0
        self._num_columns = count_columns(trainer)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._mark:  # a validation is no part of a step
            self._mark, self._cpu_mark = time.perf_counter(), time.process_time()

    def on_before_optimizer_step(
        self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Any
    ) -> None:
        if _logs_at(trainer, trainer.global_step + 1):
            norm = gradient_norm(pl_module.parameters())
            pl_module.log("train/grad_norm", norm, batch_size=1)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        now, cpu = time.perf_counter(), time.process_time()
        waited = getattr(trainer.train_dataloader, "seconds_waited", 0.0)
        if self._mark:  # the first step warms up caches and kernels: not counted
            self.samples += len(batch)
            self.seconds += now - self._mark
            self.cpu_seconds += cpu - self._cpu_mark
            self.seconds_waited += waited - self._waited_before
        self._mark, self._cpu_mark, self._waited_before = now, cpu, waited

        stepped = (batch_idx + 1) % trainer.accumulate_grad_batches == 0
        if stepped and _logs_at(trainer, trainer.global_step):
            self._log(trainer, pl_module)

    def _log(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        totals = self.samples, self.seconds, self.seconds_waited
        samples, seconds, waited = (a - b for a, b in zip(totals, self._logged, strict=True))
        self._logged = totals
        values: dict[str, float] = {}
        for optimizer in trainer.optimizers[:1]:
            values["train/lr"] = optimizer.param_groups[0]["lr"]
        if seconds > 0:
            values["speed/samples_per_s"] = samples / seconds * self._num_columns
            values["speed/data_wait_share"] = min(waited / seconds, 1.0)
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        if scaler is not None:
            values["train/loss_scale"] = scaler.get_scale()
            values["train/skipped_steps"] = float(scaler.num_skipped)
        hit_rate = getattr(trainer.train_dataloader, "cache_hit_rate", None)
        if hit_rate is not None:
            values["data/cache_hit_rate"] = hit_rate
        if pl_module.device.type == "cuda":
            values["gpu/memory_gib"] = torch.cuda.max_memory_allocated(pl_module.device) / GIB
        pl_module.log_dict(values, batch_size=1)


def count_columns(trainer: L.Trainer) -> int:
    """Number of data-parallel replicas of a running trainer: processes, or pipelines of them."""
    arguments = trainer.distributed_sampler_kwargs
    return int(arguments["num_replicas"]) if arguments else 1


def _logs_at(trainer: L.Trainer, step: int) -> bool:
    every: int = trainer.log_every_n_steps  # type: ignore[attr-defined]
    return every > 0 and step % every == 0


def gradient_norm(parameters: Iterable[Tensor]) -> Tensor:
    """2-norm ``()`` over all gradients, on their device; 0 without gradients."""
    return torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
