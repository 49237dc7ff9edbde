"""Runs a training, explains its failures and writes its score.json."""

import signal
import sys
import time
from pathlib import Path
from typing import Any, TypeVar

import lightning as L
from omegaconf import DictConfig

from bev_lightning.callbacks.checkpoint import StepCheckpoint
from bev_lightning.callbacks.health import FiniteLoss
from bev_lightning.callbacks.speed import SpeedMonitor
from bev_lightning.callbacks.stragglers import StragglerMonitor
from bev_lightning.config.resolve import plan_batch
from bev_lightning.config.run_directory import write_json
from bev_lightning.errors import InputError
from bev_lightning.hardware.cluster import find_launcher, is_rank_zero, requeue_slurm_job
from bev_lightning.hardware.out_of_memory import (
    MemoryUse,
    explain_memory,
    is_out_of_memory,
    measure_peak_mib,
)
from bev_lightning.runtime.memory_forecast import make_plan

_Callback = TypeVar("_Callback", bound=L.Callback)


class MemoryInputError(InputError):
    """A step does not fit into the memory of its device."""


def print_plan(cfg: DictConfig) -> None:
    """Print the batch and the learning rate, on a GPU also the forecast of its memory."""
    if not is_rank_zero():
        return
    optim = cfg.optim
    print(plan_batch(cfg).describe(optim.lr, optim.get("scale_lr"), optim.get("base_batch")))
    if cfg.trainer.accelerator == "gpu":
        # Takes seconds, and may save hours that would end out of memory.
        print(make_plan(cfg, compare=False).to_line())


def fit(trainer: L.Trainer, module: Any, data: L.LightningDataModule, resume: Any) -> None:
    """Train, with a validation after the last step.

    Raises:
        MemoryInputError: lists the contents of the memory and what to change.
        InputError: another process failed or is late.
    """
    try:
        trainer.fit(module, datamodule=data, ckpt_path=resume, weights_only=True)
    except (RuntimeError, MemoryError) as error:
        if is_out_of_memory(error):
            raise MemoryInputError(_explain_memory(trainer, module, error)) from error
        monitor = find_callback(trainer, StragglerMonitor)
        sentence = monitor.explain(error) if monitor and trainer.world_size > 1 else None
        if sentence is None:
            raise
        raise InputError(sentence) from error
    if hasattr(trainer.precision_plugin, "describe") and trainer.is_global_zero:
        print(trainer.precision_plugin.describe())


def write_score(
    cfg: DictConfig, trainer: L.Trainer | None, module: Any, status: str, wall_s: float
) -> None:
    """Write score.json, on rank 0."""
    if is_rank_zero():
        score = summarize(trainer, module, status)
        score["effective_batch"] = plan_batch(cfg).effective_batch
        score["wall_s"] = round(wall_s, 1)
        write_json(Path(cfg.paths.run) / "score.json", score)


def summarize(trainer: L.Trainer | None, module: Any, status: str) -> dict[str, Any]:
    """score.json without time and batch; scores are those of a finished training only."""
    speed = find_callback(trainer, SpeedMonitor)
    plugin = trainer.precision_plugin if trainer else None
    loss = getattr(module, "train_loss", None)
    optim = getattr(module, "optim", None)
    peak = measure_peak_mib()
    scores = module.scores.to_dict() if status == "finished" and module.scores else {}
    return {
        **scores,
        "steps": trainer.global_step if trainer else 0,
        "samples_per_s": round(speed.samples_per_s, 2) if speed else None,
        "cpu_ms_per_sample": round(speed.cpu_ms_per_sample, 2) if speed else None,
        "data_wait_share": round(speed.data_wait_share, 3) if speed else None,
        "peak_mib": None if peak is None else round(peak),
        # Of the last micro-step. JSON has no NaN.
        "loss": float(loss) if loss is not None and loss.isfinite() else None,
        "learning_rate": optim.lr if optim else None,
        "skipped_steps": getattr(getattr(plugin, "scaler", None), "num_skipped", 0),
        "fp8_flop_share": getattr(plugin, "flop_share", None),
        "status": status,
    }


def report_stop(cfg: DictConfig, trainer: L.Trainer | None, number: int) -> int:
    """After a stop signal: print how to resume, write stopped.json, requeue a SLURM job; the exit
    code."""
    name = signal.Signals(number).name
    if not is_rank_zero():
        # Lightning ends the first process with a child process that fails.
        return 128 + number if find_launcher() else 0
    print(_describe_stop(trainer, f" by {name}"), file=sys.stderr, flush=True)
    marker = {
        "signal": name,
        "step": trainer.global_step if trainer else 0,
        "resume": str(Path(cfg.paths.run) / "checkpoints" / "last.ckpt"),
        "stopped": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }
    write_json(Path(cfg.paths.run) / "stopped.json", marker)
    if name == cfg.cluster.requeue_signal:
        requeue_slurm_job()
    return 128 + number


def report_interrupt(trainer: L.Trainer | None) -> int:
    """After Ctrl-C that did not wait for the optimizer step: print how to resume; the exit code."""
    if is_rank_zero():
        print(_describe_stop(trainer), file=sys.stderr, flush=True)
    return 130


def find_callback(trainer: L.Trainer | None, kind: type[_Callback]) -> _Callback | None:
    """The trainer's first callback of a class, or None."""
    callbacks = trainer.callbacks if trainer else []  # type: ignore[attr-defined]
    return next((callback for callback in callbacks if isinstance(callback, kind)), None)


def _explain_memory(trainer: L.Trainer, module: Any, error: BaseException) -> str:
    finite = find_callback(trainer, FiniteLoss)
    tokens, validates = (finite.sample_tokens, finite.validates) if finite else ((), False)
    memory = MemoryUse.measure(module, trainer.optimizers)
    module.zero_grad()  # makes room for writing the message
    return explain_memory(str(error), memory, tokens, validates)


def _describe_stop(trainer: L.Trainer | None, by: str = "") -> str:
    saver = find_callback(trainer, StepCheckpoint)
    step = trainer.global_step if trainer else 0
    message = f"bev_lightning.train: interrupted{by} at step {step}; "
    if saver is None or saver.last is None:
        return message + "no checkpoint has been written yet"
    return message + f"continue with resume={saver.last}"
