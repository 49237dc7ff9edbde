"""Class-balanced grouping and sampling (CBGS, Zhu et al. 2019, section 3.1), and box counts."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from bev_lightning.data.nuscenes.sample import SampleIndex

_STREAM = 3  # of random numbers


@dataclass(frozen=True)
class BoxCounts:
    """Numbers of training boxes of N samples, by class.

    Attributes:
        classes: K names.
        num_boxes: ``(N, K)`` int64 boxes that train: of the class, with enough points.
        num_unknown_velocity: of those, how many have no velocity.
    """

    classes: tuple[str, ...]
    num_boxes: np.ndarray
    num_unknown_velocity: int

    def warnings(self) -> list[str]:
        """Warnings about classes without boxes and boxes without velocity."""
        total, messages = int(self.num_boxes.sum()), []
        if total == 0:
            samples = f"none of the {len(self.num_boxes)} training samples"
            return [f"{samples} has a box to train on: check data.classes and data.min_points"]
        counts = zip(self.classes, self.num_boxes.sum(0), strict=True)
        if absent := [name for name, num in counts if not num]:
            messages.append(f"no training sample has a box of {', '.join(absent)} to train on")
        if self.num_unknown_velocity:
            messages.append(
                f"training boxes without a known velocity, which is left out of their loss: "
                f"{self.num_unknown_velocity} of {total}"
            )
        return messages


def count_boxes(
    index: SampleIndex, tokens: Sequence[str], classes: Sequence[str], min_points: int
) -> BoxCounts:
    """Count the boxes of the samples that are trained on."""
    numbers = {name: label for label, name in enumerate(classes)}
    num_boxes = np.zeros((len(tokens), len(classes)), np.int64)
    unknown = 0
    for row, token in enumerate(tokens):
        boxes = index.sample(token).annotations
        label = np.array([numbers.get(name, -1) for name in boxes.class_name], np.int64)
        kept = (label >= 0) & (boxes.num_lidar_pts + boxes.num_radar_pts >= min_points)
        num_boxes[row] = np.bincount(label[kept], minlength=len(classes))
        unknown += int(np.isnan(boxes.velocity[kept, :2]).any(axis=1).sum())
    return BoxCounts(tuple(classes), num_boxes, unknown)


def balance(counts: BoxCounts, seed: int) -> list[int]:
    """Resample the samples so that all classes occur about equally often.

    For each class the same number of samples that contain it are drawn, with replacement: the
    average over all classes. As published, the result is longer than the split (4.4 times on
    nuScenes) and leaves out samples without boxes. Classes without samples are ignored; if there is
    no class at all, the split is unchanged.

    Returns:
        rows of the samples.
    """
    has = counts.num_boxes > 0
    present = [np.flatnonzero(column) for column in has.T if column.any()]
    if not present:
        return list(range(len(has)))
    share = max(1, sum(len(rows) for rows in present) // len(present))
    rng = np.random.default_rng([seed, 0, 0, _STREAM])
    return np.concatenate([rng.choice(rows, share) for rows in present]).tolist()
