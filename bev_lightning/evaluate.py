"""Scores a checkpoint, or a submission: ``python -m bev_lightning.evaluate ckpt=FILE [KEY=VALUE ...]``."""

from omegaconf import DictConfig

from bev_lightning.config import entry


@entry("evaluate")
def main(cfg: DictConfig) -> float | None:
    """Score ``data.val_split`` with the nuScenes metric; returns NDS.

    The run directory receives score.json and, from a checkpoint, the submission it comes from.
    """
    from pathlib import Path

    from bev_lightning.assembly import (
        build_data,
        build_module,
        build_trainer,
        load_weights,
        warn_of_other_sweeps,
        write_json,
    )
    from bev_lightning.objectives.submission import read_submission, write_submission

    run = Path(cfg.paths.run)
    data, module = build_data(cfg), build_module(cfg)
    if cfg.results is not None:
        data.prepare_data()
        data.setup("predict")
        assert module.evaluator is not None
        scores = module.evaluator.evaluate(read_submission(Path(cfg.results)), data.predict_tokens)
    else:
        load_weights(module, cfg.ckpt)
        warn_of_other_sweeps(module, cfg.ckpt)
        trainer = build_trainer(cfg)
        trainer.validate(module, datamodule=data, verbose=False, weights_only=True)
        if not trainer.is_global_zero or module.scores is None:
            return None
        scores = module.scores
        write_submission(run / "submission.json", module.results, module.inputs.modalities)
    source = {"ckpt": cfg.ckpt, "results": cfg.results}
    write_json(run / "score.json", {**scores.to_dict(), **source, "status": "finished"})
    print(scores)
    return scores.NDS


if __name__ == "__main__":
    main()
