"""Scores a checkpoint or a submission: ``python -m bev_lightning.evaluate ckpt=FILE [KEY=V]``."""

from omegaconf import DictConfig

from bev_lightning.config.program import entry
from bev_lightning.config.run_directory import write_json


@entry("evaluate")
def main(cfg: DictConfig) -> float | None:
    """Score ``data.val_split`` with the nuScenes metric; returns NDS.

    Writes score.json and, from a checkpoint, submission.json to the run directory. Scoring a
    submission (``results=FILE``) needs neither a model nor sensor files.
    """
    import time
    from pathlib import Path

    from bev_lightning.data.nuscenes.ground_truth import check_predicted
    from bev_lightning.metrics.submission import read_submission, write_submission
    from bev_lightning.runtime.build import (
        build_data,
        build_evaluator,
        build_loaded_module,
        build_trainer,
        read_steps,
    )

    began = time.perf_counter()
    run = Path(cfg.paths.run)
    data = build_data(cfg)
    steps, samples_per_s = None, None
    if cfg.results is not None:
        results = read_submission(Path(cfg.results), data.classes)
        index = data.open_index()
        tokens = index.split(cfg.data.val_split)
        check_predicted(index, results, tokens)
        scores = build_evaluator(cfg).evaluate(results, data.ground_truth(tokens))
    else:
        module = build_loaded_module(cfg)
        trainer = build_trainer(cfg)
        trainer.validate(module, datamodule=data, verbose=False, weights_only=True)
        if not trainer.is_global_zero or module.scores is None:
            return None
        scores = module.scores
        steps, samples_per_s = read_steps(cfg.ckpt), round(module.samples_per_s, 2)
        write_submission(run / "submission.json", module.results, module.inputs.modalities)
    write_json(
        run / "score.json",
        {
            **scores.to_dict(),
            "ckpt": cfg.ckpt,
            "results": cfg.results,
            "steps": steps,
            "samples_per_s": samples_per_s,
            "wall_s": round(time.perf_counter() - began, 1),
            "status": "finished",
        },
    )
    print(scores)
    return scores.NDS


if __name__ == "__main__":
    main()
