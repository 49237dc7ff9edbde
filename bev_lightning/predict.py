"""Predicts without scoring: ``python -m bev_lightning.predict ckpt=FILE [KEY=VALUE ...]``."""

from omegaconf import DictConfig

from bev_lightning.config.program import entry


@entry("predict")
def main(cfg: DictConfig) -> None:
    """Predict ``data.val_split`` (which needs no annotations) and write the nuScenes submission.

    ``trainer.limit_val_batches`` limits it, as it does a validation.
    """
    from pathlib import Path

    from bev_lightning.metrics.submission import write_submission
    from bev_lightning.runtime.build import build_data, build_loaded_module, build_trainer

    module = build_loaded_module(cfg)
    trainer = build_trainer(cfg, limit_predict_batches=cfg.trainer.limit_val_batches)
    trainer.predict(module, datamodule=build_data(cfg), return_predictions=False, weights_only=True)
    if trainer.is_global_zero:
        write_submission(
            Path(cfg.paths.run) / "submission.json", module.results, module.inputs.modalities
        )


if __name__ == "__main__":
    main()
