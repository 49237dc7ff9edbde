"""Scores a checkpoint: ``python -m bev_lightning.evaluate ckpt=FILE [KEY=VALUE ...]``."""

from omegaconf import DictConfig

from bev_lightning.config import entry


@entry("evaluate")
def main(cfg: DictConfig) -> float | None:
    """Predict ``data.val_split``, write the nuScenes submission and its score; returns NDS."""
    from pathlib import Path

    from bev_lightning.assembly import (
        build_data,
        build_module,
        build_trainer,
        load_weights,
        write_json,
    )
    from bev_lightning.objectives.submission import write_submission

    module = build_module(cfg)
    load_weights(module, cfg.ckpt)
    trainer = build_trainer(cfg)
    trainer.validate(module, datamodule=build_data(cfg), verbose=False)
    if not trainer.is_global_zero or module.scores is None:
        return None
    run = Path(cfg.paths.run)
    write_submission(run / "submission.json", module.results, module.inputs.modalities)
    write_json(
        run / "score.json", {**module.scores.to_dict(), "ckpt": cfg.ckpt, "status": "finished"}
    )
    print(module.scores)
    return module.scores.NDS


if __name__ == "__main__":
    main()
