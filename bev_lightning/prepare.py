"""Builds the index of a data set and reports its contents.

``python -m bev_lightning.prepare data=nuscenes data.root=R data.version=V``; with
``data/gt_sampling=published`` it builds the ground-truth database too. Training builds both where
they are absent. A killed run resumes when it is started again.
"""

from omegaconf import DictConfig

from bev_lightning.config.program import entry
from bev_lightning.config.run_directory import write_json


@entry("prepare")
def main(cfg: DictConfig) -> None:
    """Build the index (and the data set of ``data=synthetic``), print a report and write
    prepare.json."""
    import time
    from pathlib import Path

    from bev_lightning.data.nuscenes.index import Index
    from bev_lightning.data.nuscenes.report import make_report
    from bev_lightning.runtime.build import build_data

    # The complete datamodule, so that a run's checks of inputs and loader are made here too.
    data = build_data(cfg)
    times = [time.perf_counter()]
    index = data.open_index()
    times.append(time.perf_counter())
    objects = data.open_gt_database(index) if data.gt_sampling is not None else None
    times.append(time.perf_counter())
    # A data set of another format has no report.
    nuscenes = index if isinstance(index, Index) else None
    report = None if nuscenes is None else make_report(nuscenes, data.classes, data.num_workers)
    times.append(time.perf_counter())

    seconds = {
        name: round(end - start, 3)
        for name, start, end in zip(
            ("index", "ground_truth", "report"), times[:-1], times[1:], strict=True
        )
    }
    print(f"{len(index.tokens)} samples" if report is None else report.to_text())
    print("seconds: " + ", ".join(f"{name} {spent:.1f}" for name, spent in seconds.items()))
    result = {**({} if report is None else report.to_json()), "seconds": seconds}
    if objects is not None and data.gt_sampling is not None:
        counts = objects.counts(data.classes, data.gt_sampling.min_points)
        found = ", ".join(f"{name} {num}" for name, num in counts.items())
        print(f"objects to paste, of {objects.sweeps} sweeps and the key frame: {found}")
        result["ground_truth"] = {
            "path": str(objects.path),
            "sweeps": objects.sweeps,
            "num": counts,
        }
    write_json(Path(cfg.paths.run) / "prepare.json", result)


if __name__ == "__main__":
    main()
