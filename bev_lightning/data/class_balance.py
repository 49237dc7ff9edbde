"""What the training samples hold, and how often each is seen: class-balanced grouping and sampling
(CBGS, Zhu et al. 2019, section 3.1)."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from bev_lightning.data.nuscenes.sample import SampleIndex

_STREAM = 3  # of random numbers


@dataclass(frozen=True)
class BoxCounts:
    """The targets of N samples, by class.

    Attributes:
        classes: K names.
        num_boxes: ``(N, K)`` int64 boxes that train: of the class, with enough points.
        num_unknown_velocity: of those, how many have no velocity.
    """

    classes: tuple[str, ...]
    num_boxes: np.ndarray
    num_unknown_velocity: int

    def sentences(self) -> list[str]:
        """What one should know before training on it, a sentence each; none if all is well."""
        total, said = int(self.num_boxes.sum()), []
        if total == 0:
            said.append(
                f"none of the {len(self.num_boxes)} training samples has a box to train on: the "
                f"model learns background alone (see data.classes, data.min_points)"
            )
            return said
        absent = [
            name for name, num in zip(self.classes, self.num_boxes.sum(0), strict=True) if not num
        ]
        if absent:
            said.append(f"no training sample has a box of {', '.join(absent)} to train on")
        if self.num_unknown_velocity:
            said.append(
                f"training boxes without a known velocity, which is left out of their loss: "
                f"{self.num_unknown_velocity} of {total}"
            )
        return said


def count_boxes(
    index: SampleIndex, tokens: Sequence[str], classes: Sequence[str], min_points: int
) -> BoxCounts:
    """Count what the samples hold, one pass over the index."""
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
    """Rows of the samples, drawn so that each class is met as often as the others.

    For each class as many samples that hold it are drawn, with replacement, as all classes have on
    average; a sample counts once for every class in it. The result is longer than the split (4.4
    times on nuScenes) and leaves out samples without boxes, as published. Classes that no sample
    holds take no part; where there are none at all, the split stays as it is.
    """
    has = counts.num_boxes > 0
    present = [np.flatnonzero(column) for column in has.T if column.any()]
    if not present:
        return list(range(len(has)))
    share = max(1, sum(len(rows) for rows in present) // len(present))
    rng = np.random.default_rng([seed, 0, 0, _STREAM])
    return np.concatenate([rng.choice(rows, share) for rows in present]).tolist()
