"""``python -m bev_lightning.prepare data=nuscenes data.root=R data.version=V``: make the index of a
data set, with ``data/paste=published`` the ground-truth database to paste too, and report what they
hold.

Training makes both itself where they are absent; this shows first what there is.
"""

from omegaconf import DictConfig

from bev_lightning.config import entry


@entry("prepare")
def main(cfg: DictConfig) -> None:
    """Make the data set (``data=synthetic``) and its index, print the report and write
    prepare.json."""
    import json
    import time
    from pathlib import Path

    from bev_lightning.assembly import build_data
    from bev_lightning.data.index import build_index
    from bev_lightning.data.report import make_report

    began = time.perf_counter()
    # Whole, so that what the model reads and how it is loaded are checked as a run would.
    data = build_data(cfg)
    data.prepare_data()
    made = time.perf_counter()
    index = build_index(data.root, data.version, data.cache_dir, data.num_workers)
    report = make_report(index, data.classes)
    counted = time.perf_counter()
    print(report.to_text())
    result = {**report.to_json(), "seconds": {"prepare": made - began, "report": counted - made}}
    if data.paste is not None:
        objects = data.open_ground_truth(index)
        counts = objects.counts(data.classes, data.paste.min_points)
        found = ", ".join(f"{name} {num}" for name, num in counts.items())
        print(f"objects to paste, of {objects.sweeps} sweeps and the key frame: {found}")
        result["objects"] = {"path": str(objects.path), "sweeps": objects.sweeps, "num": counts}
    path = Path(cfg.paths.run) / "prepare.json"
    path.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
