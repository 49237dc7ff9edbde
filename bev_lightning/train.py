"""Trains a detector: ``python -m bev_lightning.train [GROUP=CHOICE ...] [KEY=VALUE ...]``."""

from typing import Any

from omegaconf import DictConfig

from bev_lightning.config import entry


@entry("train")
def main(cfg: DictConfig) -> float | None:
    """Train, validate, and leave checkpoints and score.json in the run directory; returns NDS."""
    import time
    from pathlib import Path

    from bev_lightning.assembly import (
        build_data,
        build_module,
        build_trainer,
        load_backbones,
        load_matching_weights,
        write_json,
    )
    from bev_lightning.callbacks.monitor import SpeedMonitor

    began = time.perf_counter()
    data, module, trainer = build_data(cfg), build_module(cfg), build_trainer(cfg)
    if cfg.resume is None:
        load_backbones(module)
    if cfg.init_from is not None:
        _report(load_matching_weights(module, cfg.init_from), cfg.init_from)
    trainer.fit(module, datamodule=data, ckpt_path=cfg.resume, weights_only=True)
    status = "interrupted" if trainer.interrupted else "finished"
    if status == "finished" and module.scored_step != trainer.global_step:
        # The last step was none of trainer.val_check_interval's.
        trainer.validate(module, datamodule=data, verbose=False, weights_only=True)
        _keep_if_best(trainer, module)
    if not trainer.is_global_zero:
        return None
    callbacks = trainer.callbacks  # type: ignore[attr-defined]
    speed = next((c for c in callbacks if isinstance(c, SpeedMonitor)), None)
    scores = module.scores.to_dict() if module.scores else {}
    write_json(
        Path(cfg.paths.run) / "score.json",
        {
            **scores,
            "steps": trainer.global_step,
            "samples_per_s": round(speed.samples_per_s * trainer.world_size, 2) if speed else None,
            "data_wait_share": round(speed.data_wait_share, 3) if speed else None,
            "wall_s": round(time.perf_counter() - began, 1),
            "status": status,
        },
    )
    if module.scores is None:
        return None
    print(module.scores)
    return module.scores.NDS


def _keep_if_best(trainer: Any, module: Any) -> None:
    """What ModelCheckpoint does for validations inside of the training."""
    best = trainer.checkpoint_callback
    if best is None or best.monitor != "val/NDS" or module.scores is None:
        return
    if best.best_model_score is None or module.scores.NDS > float(best.best_model_score):
        trainer.save_checkpoint(f"{best.dirpath}/best.ckpt")


def _report(names: dict[str, list[str]], checkpoint: Any) -> None:
    print(f"{checkpoint}: {len(names['loaded'])} weights loaded")
    for kind in ("reshaped", "missing", "unexpected"):
        if names[kind]:
            print(f"  {kind}: {', '.join(names[kind])}")


if __name__ == "__main__":
    main()
