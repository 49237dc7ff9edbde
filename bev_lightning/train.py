"""Trains a detector: ``python -m bev_lightning.train [GROUP=CHOICE ...] [KEY=VALUE ...]``."""

import sys
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig

from bev_lightning.config.program import entry
from bev_lightning.config.run_directory import write_json

if TYPE_CHECKING:
    import lightning as L


@entry("train")
def main(cfg: DictConfig) -> float | None:
    """Train, validate, and leave checkpoints and score.json in the run directory; returns NDS.

    score.json also tells of a training that failed or was interrupted, without scores.
    """
    import time
    from pathlib import Path

    from lightning.pytorch.utilities.rank_zero import rank_zero_only

    from bev_lightning.callbacks.health import is_out_of_memory
    from bev_lightning.callbacks.stop_signals import Stopped
    from bev_lightning.config.resolve import plan_batch
    from bev_lightning.errors import InputError
    from bev_lightning.runtime.build import (
        build_data,
        build_module,
        build_trainer,
        check_resume,
        load_backbones,
        load_matching_weights,
        prepare_execution,
    )
    from bev_lightning.runtime.memory_forecast import make_plan

    first = not getattr(rank_zero_only, "rank", 0)
    began = time.perf_counter()
    trainer, module, status = None, None, "failed"
    try:
        (Path(cfg.paths.run) / "stopped.json").unlink(missing_ok=True)
        data, module, trainer = build_data(cfg), build_module(cfg), build_trainer(cfg)
        if cfg.resume is not None:
            check_resume(module, cfg.resume)
        else:
            load_backbones(module)
        if cfg.init_from is not None:
            names = load_matching_weights(module, cfg.init_from)
            if first:
                _report(names, cfg.init_from)
        prepare_execution(module, cfg)
        if first:
            optim = cfg.optim
            print(
                plan_batch(cfg).describe(optim.lr, optim.get("scale_lr"), optim.get("base_batch"))
            )
            if cfg.trainer.accelerator == "gpu":
                # Some seconds, before hours that may end for want of memory.
                print(make_plan(cfg, compare=False).to_line())
        fit(trainer, module, data, cfg.resume)
        status = "finished"
    except Stopped as stop:
        status = "interrupted"
        raise SystemExit(_close_stopped(cfg, trainer, stop.number)) from None
    except InputError as error:
        if isinstance(error.__cause__, BaseException) and is_out_of_memory(error.__cause__):
            status = "out_of_memory"
        raise
    except (KeyboardInterrupt, SystemExit) as end:
        # Lightning makes a SystemExit of Ctrl-C.
        if isinstance(end, SystemExit) and not (trainer and trainer.interrupted):
            raise
        status = "interrupted"
        if first:
            print(_tell_interrupt(trainer), file=sys.stderr, flush=True)
        raise SystemExit(130) from None
    finally:
        if first:
            result = summarize(trainer, module, status)
            result["effective_batch"] = plan_batch(cfg).effective_batch
            result["wall_s"] = round(time.perf_counter() - began, 1)
            write_json(Path(cfg.paths.run) / "score.json", result)
    if not trainer.is_global_zero or module.scores is None:
        return None
    print(module.scores)
    return module.scores.NDS


def fit(trainer: "L.Trainer", module: Any, data: "L.LightningDataModule", resume: Any) -> None:
    """Train, and validate what no validation of the training has seen.

    Raises:
        InputError: the device has not the memory, or another process is gone or late; says what to
            do.
    """
    from bev_lightning.callbacks.health import (
        FiniteLoss,
        MemoryUse,
        explain_memory,
        is_out_of_memory,
    )
    from bev_lightning.callbacks.stragglers import StragglerMonitor
    from bev_lightning.errors import InputError

    try:
        trainer.fit(module, datamodule=data, ckpt_path=resume, weights_only=True)
        if module.scored_step != trainer.global_step:
            # The last step was none of trainer.val_check_interval's.
            trainer.validate(module, datamodule=data, verbose=False, weights_only=True)
            _keep_if_best(trainer, module)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            processes = _find(trainer, StragglerMonitor)
            sentence = processes.explain(error) if processes and trainer.world_size > 1 else None
            if sentence is None:
                raise
            raise InputError(sentence) from error
        watch = _find(trainer, FiniteLoss)
        tokens, validates = (watch.sample_tokens, watch.validates) if watch else ((), False)
        memory = MemoryUse.measure(module, trainer.optimizers)
        module.zero_grad()  # so that the words below can be written
        raise InputError(explain_memory(str(error), memory, tokens, validates)) from error
    if hasattr(trainer.precision_plugin, "describe") and trainer.is_global_zero:
        print(trainer.precision_plugin.describe())


def summarize(trainer: "L.Trainer | None", module: Any, status: str) -> dict[str, Any]:
    """What score.json says but time and batch: scores of a finished training alone."""
    from bev_lightning.callbacks.health import measure_peak_mib
    from bev_lightning.callbacks.speed import SpeedMonitor

    speed = _find(trainer, SpeedMonitor)
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


def _close_stopped(cfg: DictConfig, trainer: "L.Trainer | None", number: int) -> int:
    """What is left to do and to say after a signal has ended the training; the exit code."""
    import signal
    import time
    from pathlib import Path

    from bev_lightning.hardware.cluster import find_launcher, is_rank_zero, requeue_slurm_job

    name = signal.Signals(number).name
    if not is_rank_zero():
        # Lightning ends the first process with a child that fails.
        return 128 + number if find_launcher() else 0
    print(_tell_interrupt(trainer, f" by {name}"), file=sys.stderr, flush=True)
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


def _tell_interrupt(trainer: "L.Trainer | None", by: str = "") -> str:
    from bev_lightning.callbacks.checkpoint import StepCheckpoint

    saver = _find(trainer, StepCheckpoint)
    step = trainer.global_step if trainer else 0
    said = f"bev_lightning.train: interrupted{by} at step {step}; "
    if saver is None or saver.last is None:
        return said + "no checkpoint has been written yet"
    return said + f"go on with resume={saver.last}"


def _keep_if_best(trainer: "L.Trainer", module: Any) -> None:
    """What ModelCheckpoint does for validations inside of the training."""
    from lightning.pytorch.callbacks import ModelCheckpoint

    best = _find(trainer, ModelCheckpoint)
    if best is None or best.monitor != "val/NDS" or module.scores is None:
        return
    if best.best_model_score is None or module.scores.NDS > float(best.best_model_score):
        trainer.save_checkpoint(f"{best.dirpath}/best.ckpt", weights_only=False)


def _find(trainer: "L.Trainer | None", kind: type) -> Any:
    """The trainer's first callback of a kind, or None."""
    callbacks = trainer.callbacks if trainer else []  # type: ignore[attr-defined]
    return next((callback for callback in callbacks if isinstance(callback, kind)), None)


def _report(names: dict[str, list[str]], checkpoint: Any) -> None:
    print(f"{checkpoint}: {len(names['loaded'])} weights loaded")
    for kind in ("reshaped", "missing", "unexpected"):
        if names[kind]:
            print(f"  {kind}: {', '.join(names[kind])}")


if __name__ == "__main__":
    main()
