"""What a data set holds, counted: the report of ``prepare``."""

from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from bev_lightning.data.index import Index
from bev_lightning.data.missing import find_missing


@dataclass(frozen=True)
class Files:
    """Files of one sensor: what the tables name, and how many of them are missing."""

    key_frames: int
    missing_key_frames: int
    sweeps: int
    missing_sweeps: int


@dataclass(frozen=True)
class Report:
    """Counts of one data set.

    Attributes:
        root, version, index: of the data set and its index file.
        num_scenes, num_samples, num_boxes: in all; boxes of the detection classes and others.
        samples_per_split: of every split that has scenes here.
        boxes_per_class: of the detection classes asked for, 0 included.
        num_other_boxes: boxes of categories or classes not asked for.
        num_zero_point_boxes: boxes of the classes without lidar and radar points, which neither
            train nor count.
        num_nan_velocities: boxes of the classes whose velocity is unknown, which do not train
            velocity.
        num_samples_without_boxes: samples without a box of the classes.
        files: per sensor.
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
    scenes_without_can_bus: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Plain containers."""
        return asdict(self)

    def to_text(self) -> str:
        """A table for people."""
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
        ]
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)


def make_report(index: Index, classes: tuple[str, ...]) -> Report:
    """Count one pass over the index and look for every file it names."""
    boxes: Counter[str] = Counter()
    zero_point = nan_velocity = without = 0
    paths: dict[str, tuple[set[str], set[str]]] = {}
    scenes = set()
    for token in index.tokens:
        sample = index.sample(token)
        scenes.add(sample.scene_token)
        notes = sample.annotations
        ours = np.array([name in classes for name in notes.detection], dtype=bool)
        boxes.update(name if mine else "" for name, mine in zip(notes.detection, ours, strict=True))
        zero_point += int((ours & (notes.num_lidar_pts + notes.num_radar_pts == 0)).sum())
        nan_velocity += int((ours & np.isnan(notes.velocity[:, :2]).any(axis=1)).sum())
        without += int(not ours.any())
        for channel, depth, path in zip(
            sample.readings.channel, sample.readings.depth, sample.readings.path, strict=True
        ):
            keys, sweeps = paths.setdefault(channel, (set(), set()))
            (sweeps if depth else keys).add(path)
    files = {}
    for channel, (keys, sweeps) in sorted(paths.items()):
        sweeps -= keys  # going back from one key frame, the next is met
        files[channel] = Files(
            key_frames=len(keys),
            missing_key_frames=len(find_missing(index.root, keys)),
            sweeps=len(sweeps),
            missing_sweeps=len(find_missing(index.root, sweeps)),
        )
    return Report(
        root=str(index.root),
        version=index.version,
        index=str(index.path),
        num_scenes=len(scenes),
        num_samples=len(index),
        num_boxes=sum(boxes.values()),
        samples_per_split={name: len(index.split(name)) for name in sorted(index.splits)},
        boxes_per_class={name: boxes[name] for name in classes},
        num_other_boxes=boxes[""],
        num_zero_point_boxes=zero_point,
        num_nan_velocities=nan_velocity,
        num_samples_without_boxes=without,
        files=files,
        scenes_without_can_bus=index.scenes_without_can_bus,
    )


def _name(scenes: tuple[str, ...]) -> str:
    shown = ", ".join(scenes[:5]) + (", ..." if len(scenes) > 5 else "")
    return f"{len(scenes)} ({shown})" if scenes else "0"


def _describe(files: Files) -> str:
    text = f"{files.key_frames} key frames"
    if files.missing_key_frames:
        text += f" ({files.missing_key_frames} missing)"
    text += f", {files.sweeps} sweeps"
    return text + (f" ({files.missing_sweeps} missing)" if files.missing_sweeps else "")
