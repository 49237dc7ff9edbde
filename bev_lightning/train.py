"""Trains a detector: ``python -m bev_lightning.train [GROUP=CHOICE ...] [KEY=VALUE ...]``."""

from omegaconf import DictConfig

from bev_lightning.config.program import entry


@entry("train")
def main(cfg: DictConfig) -> float | None:
    """Train, validate, and leave checkpoints and score.json in the run directory; returns NDS.

    score.json also records a training that failed or was stopped, without scores.
    """
    import time
    from pathlib import Path

    from bev_lightning.callbacks.stop_signals import Stopped
    from bev_lightning.runtime.build import build_data, build_loaded_module, build_trainer
    from bev_lightning.runtime.training import (
        MemoryInputError,
        fit,
        print_plan,
        report_interrupt,
        report_stop,
        write_score,
    )

    start = time.perf_counter()
    status, trainer, module = "failed", None, None
    (Path(cfg.paths.run) / "stopped.json").unlink(missing_ok=True)
    try:
        data, trainer = build_data(cfg), build_trainer(cfg)
        module = build_loaded_module(cfg)
        print_plan(cfg)
        fit(trainer, module, data, cfg.resume)
        status = "finished"
    except Stopped as stop:
        # A signal, after the optimizer step was completed and saved.
        status = "interrupted"
        raise SystemExit(report_stop(cfg, trainer, stop.number)) from None
    except (KeyboardInterrupt, SystemExit) as end:
        # Lightning turns KeyboardInterrupt into SystemExit.
        if isinstance(end, SystemExit) and not (trainer and trainer.interrupted):
            raise
        status = "interrupted"
        raise SystemExit(report_interrupt(trainer)) from None
    except MemoryInputError:
        status = "out_of_memory"
        raise
    finally:
        write_score(cfg, trainer, module, status, time.perf_counter() - start)
    if not trainer.is_global_zero or module.scores is None:
        return None
    print(module.scores)
    return module.scores.NDS


if __name__ == "__main__":
    main()
