"""Counts scenes, boxes and files of a data set, and finds corrupt files."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from bev_lightning.data.nuscenes.sensor_files import find_fault
from bev_lightning.data.process_pool import map_in_processes
from bev_lightning.data.resumable_jobs import read_part
from bev_lightning.progress import track

if TYPE_CHECKING:  # the index imports torch, which processes that check files do not need
    from bev_lightning.data.nuscenes.index import Index

_SHOWN = 5
# A process takes about a second to start.
_LEAST_BATCHES_PER_PROCESS = 4


@dataclass
class Files:
    """Numbers of files of one sensor: in the tables, missing and corrupt."""

    key_frames: int = 0
    missing_key_frames: int = 0
    corrupt_key_frames: int = 0
    sweeps: int = 0
    missing_sweeps: int = 0
    corrupt_sweeps: int = 0


@dataclass
class Counts:
    """Sums over samples.

    Attributes:
        numbers: by the attributes of :class:`Report`, such as ``num_samples``.
        boxes: of each class; of all other boxes under the empty name.
        files: by channel, with the attributes of :class:`Files`.
        corrupt: reason by path.
    """

    numbers: Counter[str] = field(default_factory=Counter)
    boxes: Counter[str] = field(default_factory=Counter)
    files: dict[str, Counter[str]] = field(default_factory=dict)
    corrupt: dict[str, str] = field(default_factory=dict)

    def add(self, part: "Counts") -> None:
        self.numbers.update(part.numbers)
        self.boxes.update(part.boxes)
        for channel, files in part.files.items():
            self.files.setdefault(channel, Counter()).update(files)
        self.corrupt |= part.corrupt


@dataclass(frozen=True)
class Report:
    """Counts of one data set.

    Attributes:
        root, version, index: of the data set and its index file.
        num_scenes, num_samples, num_boxes: totals; boxes of any category.
        samples_per_split: of every split that has scenes here.
        boxes_per_class: boxes of each class of the model.
        num_other_boxes: boxes of other classes or of none.
        num_zero_point_boxes: boxes of the classes without lidar and radar points, which are
            neither trained on nor evaluated.
        num_nan_velocities: boxes of the classes with unknown velocity, which is not trained on.
        num_samples_without_boxes: samples without a box of the classes.
        files: per sensor.
        corrupt_files: reason by path: empty, truncated, or not of the size in the tables.
        scenes_without_can_bus: scenes whose ego motion comes from the ego poses.
    """

    root: str
    version: str
    index: str
    num_scenes: int
    num_samples: int
    num_boxes: int
    samples_per_split: dict[str, int]
    boxes_per_class: dict[str, int]
    num_other_boxes: int
    num_zero_point_boxes: int
    num_nan_velocities: int
    num_samples_without_boxes: int
    files: dict[str, Files]
    corrupt_files: dict[str, str]
    scenes_without_can_bus: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Plain containers."""
        return asdict(self)

    def to_text(self) -> str:
        """A text table."""
        corrupt = [f"{path}: {reason}" for path, reason in self.corrupt_files.items()]
        rows = [
            ("data set", f"{self.version} at {self.root}"),
            ("scenes", str(self.num_scenes)),
            ("samples", str(self.num_samples)),
            *((f"  {split}", str(num)) for split, num in self.samples_per_split.items()),
            ("boxes", str(self.num_boxes)),
            *((f"  {name}", str(num)) for name, num in self.boxes_per_class.items()),
            ("  other categories", str(self.num_other_boxes)),
            ("boxes without points", str(self.num_zero_point_boxes)),
            ("boxes of unknown velocity", str(self.num_nan_velocities)),
            ("samples without boxes", str(self.num_samples_without_boxes)),
            ("scenes without CAN bus", _name(self.scenes_without_can_bus)),
            *((f"files of {channel}", _describe(files)) for channel, files in self.files.items()),
            ("corrupt files", str(len(corrupt))),
            *(("", line) for line in corrupt[:_SHOWN]),
            *([("", "...")] if len(corrupt) > _SHOWN else []),
        ]
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)


def make_report(index: "Index", classes: Sequence[str], num_workers: int = 0) -> Report:
    """Count scenes, boxes and files, and check every file that the index refers to."""
    count = partial(
        _count, index.path, index.root, index.channels, index.category_classes, tuple(classes)
    )
    counts, numbers = Counts(), range(index.num_batches)
    num_workers = min(num_workers, index.num_batches // _LEAST_BATCHES_PER_PROCESS)
    parts = map_in_processes(count, numbers, num_workers)
    for part in track(parts, "checking files", index.num_batches, "part"):
        counts.add(part)
    return Report(
        root=str(index.root),
        version=index.version,
        index=str(index.path),
        num_scenes=counts.numbers["num_scenes"],
        num_samples=counts.numbers["num_samples"],
        num_boxes=counts.boxes.total(),
        samples_per_split={name: len(index.split(name)) for name in sorted(index.splits)},
        boxes_per_class={name: counts.boxes[name] for name in classes},
        num_other_boxes=counts.boxes[""],
        num_zero_point_boxes=counts.numbers["num_zero_point_boxes"],
        num_nan_velocities=counts.numbers["num_nan_velocities"],
        num_samples_without_boxes=counts.numbers["num_samples_without_boxes"],
        files={channel: Files(**files) for channel, files in sorted(counts.files.items())},
        corrupt_files=counts.corrupt,
        scenes_without_can_bus=index.scenes_without_can_bus,
    )


def _count(
    path: Path,
    root: Path,
    channels: Sequence[str],
    category_classes: Sequence[str],
    classes: Sequence[str],
    number: int,
) -> Counts:
    """Count a record batch of the index, column by column."""
    batch = read_part(path)[number]
    counts = Counts()
    names = np.array([name if name in classes else "" for name in category_classes], object)
    class_of_box = names[_values(batch, "annotations.category")]
    counted = (class_of_box != "").astype(bool)
    counts.boxes.update(class_of_box.tolist())
    points = _values(batch, "annotations.num_lidar_pts", "annotations.num_radar_pts")
    velocity = batch.column("annotations.velocity").values.values.to_numpy().reshape(-1, 3)
    starts = batch.column("annotations.category").offsets.to_numpy()
    own = np.concatenate([[0], np.cumsum(counted)])
    counts.numbers.update(
        num_scenes=len(batch.column("scene_token").unique()),
        num_samples=batch.num_rows,
        num_zero_point_boxes=int((counted & (points == 0)).sum()),
        num_nan_velocities=int((counted & np.isnan(velocity[:, :2]).any(axis=1)).sum()),
        num_samples_without_boxes=int((own[starts[1:]] == own[starts[:-1]]).sum()),
    )

    counts.files = {channel: Counter() for channel in channels}
    paths = batch.column("readings.path").values.to_pylist()
    sizes = batch.column("readings.size").values.values.to_numpy().reshape(-1, 2).tolist()
    sensors = _values(batch, "readings.channel").tolist()
    sweep = _values(batch, "readings.sweep") > 0
    seen: set[str] = set()
    # Key frames first: the previous key frame is also among the sweeps of the next.
    for row in np.argsort(sweep, kind="stable").tolist():
        if paths[row] in seen:
            continue
        seen.add(paths[row])
        files, kind = counts.files[channels[sensors[row]]], "sweeps" if sweep[row] else "key_frames"
        height, width = sizes[row]
        fault = find_fault(root / paths[row], (height, width))
        files[kind] += 1
        if fault == "missing":
            files[f"missing_{kind}"] += 1
        elif fault:
            files[f"corrupt_{kind}"] += 1
            counts.corrupt[paths[row]] = fault
    return counts


def _values(batch: pa.RecordBatch, *names: str) -> np.ndarray:
    """The flattened values of list columns; of several columns the sum."""
    return np.sum([batch.column(name).values.to_numpy() for name in names], axis=0)


def _name(scenes: tuple[str, ...]) -> str:
    shown = ", ".join(scenes[:_SHOWN]) + (", ..." if len(scenes) > _SHOWN else "")
    return f"{len(scenes)} ({shown})" if scenes else "0"


def _describe(files: Files) -> str:
    texts = []
    for kind in ("key_frames", "sweeps"):
        faults = {fault: getattr(files, f"{fault}_{kind}") for fault in ("missing", "corrupt")}
        found = ", ".join(f"{num} {fault}" for fault, num in faults.items() if num)
        text = f"{getattr(files, kind)} {kind.replace('_', ' ')}"
        texts.append(f"{text} ({found})" if found else text)
    return ", ".join(texts)
