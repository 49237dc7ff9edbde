"""GT sampling (copy-paste augmentation): adds objects of other scenes to a lidar sample.

Boxes and points come from the ground-truth database (SECOND, Yan et al. 2018, section 3.4.1), as in
the lidar stage of BEVFusion.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace

import numpy as np
import torch

from bev_lightning.classes import DETECTION_CLASSES
from bev_lightning.data.checks import check_gt_sampling
from bev_lightning.data.transforms.gt_database import GroundTruthDatabase
from bev_lightning.errors import InputError
from bev_lightning.structures import Boxes3D, Inputs, LidarInput

_STREAM = 1  # separate random stream: GT sampling does not change the other augmentation


@dataclass(frozen=True)
class GTSampling:
    """Settings of GT sampling.

    Attributes:
        per_class: number of boxes that a sample is filled up to, by class; nuScenes classes that
            are not trained are ignored.
        min_points: fewest lidar points of an object.
        stop_epoch: first epoch (0-based) without GT sampling, so that training ends on real scenes;
            None never stops. The published fade (TransFusion, BEVFusion) is 15 of 20 epochs.
    """

    per_class: Mapping[str, int] = field(default_factory=dict)
    min_points: int = 5
    stop_epoch: int | None = None

    def __post_init__(self) -> None:
        if self.min_points < 1 or any(number < 0 for number in self.per_class.values()):
            raise InputError(
                f"data.gt_sampling.min_points={self.min_points} must be 1 or more, and per_class="
                f"{dict(self.per_class)} 0 or more"
            )

    def check(self, inputs: Inputs, classes: Sequence[str]) -> LidarInput:
        """Check that a model can be trained with GT sampling, and return its lidar input.

        The checks of the sensors are those of :func:`check_gt_sampling`.

        Raises:
            InputError: the model reads another sensor or earlier key frames, or ``per_class`` has
                an unknown class.
        """
        unknown = self.per_class.keys() - {*classes, *DETECTION_CLASSES}
        if unknown:
            raise InputError(
                f"data.gt_sampling.per_class has unknown classes {', '.join(sorted(unknown))}: "
                f"choose from {', '.join(classes)}"
            )
        sensors = [name for name in ("camera", "lidar", "radar") if getattr(inputs, name)]
        check_gt_sampling(sensors, inputs.history)
        assert inputs.lidar is not None
        return inputs.lidar


@dataclass(frozen=True)
class SampledObjects:
    """Objects to add to one sample; the loader reads their points with the sample's.

    Attributes:
        boxes: ``(K,)`` in the augmented model frame.
        database, rows: the database with their points, and their rows in it.
        augmented_from_lidar: ``(4, 4)`` float64 BEV augmentation of the sample.
    """

    boxes: Boxes3D
    database: GroundTruthDatabase
    rows: tuple[int, ...]
    augmented_from_lidar: np.ndarray

    def add_points(self, points: np.ndarray, lidar: LidarInput) -> np.ndarray:
        """Points of the objects, then those of the scene that lie outside the objects' boxes.

        Args:
            points: ``(P, 5)`` of the augmented scene.
            lidar: range and maximum number of points.
        """
        low, high = np.array(lidar.range, np.float32).reshape(2, 3)
        matrix = self.augmented_from_lidar.astype(np.float32)
        parts = []
        for row in self.rows:
            own = self.database.points(row).copy()
            own[:, :3] = own[:, :3] @ matrix[:3, :3].T + matrix[:3, 3]
            parts.append(own[((own[:, :3] >= low) & (own[:, :3] < high)).all(axis=1)])
        hidden = np.zeros(len(points), dtype=bool)
        for box in range(self.boxes.num):
            hidden[points_inside(points, self.boxes, box)] = True
        return np.concatenate([*parts, points[~hidden]])[: lidar.max_points]


class GTSampler:
    """Samples objects to add to a sample, as a pure function of (seed, epoch, position).

    Attributes:
        absent: classes of ``per_class`` without objects in the database.
    """

    def __init__(
        self,
        gt_sampling: GTSampling,
        database: GroundTruthDatabase,
        classes: Sequence[str],
        seed: int,
    ) -> None:
        self.gt_sampling = gt_sampling
        self.database = database
        self.classes = tuple(classes)
        self.seed = seed
        sources = [
            (label, wanted, database.rows(name, gt_sampling.min_points))
            for label, name in enumerate(self.classes)
            if (wanted := gt_sampling.per_class.get(name, 0))
        ]
        self.absent = tuple(self.classes[label] for label, _, rows in sources if not len(rows))
        self._sources = [source for source in sources if len(source[2])]

    def sample(
        self, epoch: int, position: int, present: Boxes3D, augmented_from_lidar: np.ndarray
    ) -> SampledObjects | None:
        """Fill each class up to its number of boxes, without collisions.

        As published, an object keeps its position relative to the car, and one that would overlap
        another box in bird's-eye view is left out.

        Args:
            present: ``(M,)`` all annotated boxes of the sample in the augmented frame; boxes that
                are no targets have the label -1 and are obstacles only.
            augmented_from_lidar: ``(4, 4)`` BEV augmentation.

        Returns:
            None where nothing is added.
        """
        if self.gt_sampling.stop_epoch is not None and epoch >= self.gt_sampling.stop_epoch:
            return None
        rng = np.random.default_rng([self.seed, epoch, position, _STREAM])
        rows: list[int] = []
        for label, wanted, found in self._sources:
            missing = wanted - int((present.label == label).sum())
            if missing > 0:
                rows += rng.choice(found, min(missing, len(found)), replace=False).tolist()
        if not rows:
            return None
        matrix = torch.from_numpy(augmented_from_lidar).float()
        boxes = self.database.boxes(rows, self.classes).transform(matrix)
        taken = bev_overlaps(boxes, present).any(axis=1)
        among = bev_overlaps(boxes, boxes)
        kept: list[int] = []
        for i in range(len(rows)):
            if not taken[i] and not among[i, kept].any():
                kept.append(i)
        if not kept:
            return None
        return SampledObjects(
            boxes[torch.tensor(kept)],
            self.database,
            tuple(rows[i] for i in kept),
            augmented_from_lidar,
        )


def join_boxes(first: Boxes3D, second: Boxes3D) -> Boxes3D:
    """Concatenate ``(M,)`` and ``(K,)`` boxes without scores to ``(M + K,)``."""
    return replace(
        first,
        **{
            column.name: torch.cat([getattr(first, column.name), getattr(second, column.name)])
            for column in fields(first)
            if column.name != "score"
        },
    )


def points_inside(points: np.ndarray, boxes: Boxes3D, box: int) -> np.ndarray:
    """Indices of the points ``(P, 3 or more)`` inside one of the boxes ``(M,)``."""
    centre = boxes.centre[box].numpy()
    half = boxes.size[box].numpy() / 2
    yaw = float(boxes.yaw[box])
    radius = float(np.hypot(half[0], half[1]))
    x, y = points[:, 0] - centre[0], points[:, 1] - centre[1]
    near = np.flatnonzero((np.abs(x) <= radius) & (np.abs(y) <= radius))
    cos, sin = np.cos(yaw), np.sin(yaw)
    along = x[near] * cos + y[near] * sin
    across = y[near] * cos - x[near] * sin
    above = points[near, 2] - centre[2]
    inside = (np.abs(along) <= half[0]) & (np.abs(across) <= half[1]) & (np.abs(above) <= half[2])
    return near[inside]


def bev_overlaps(one: Boxes3D, other: Boxes3D) -> np.ndarray:
    """Whether boxes ``(M,)`` and ``(K,)`` overlap in bird's-eye view, ``(M, K)`` bool.

    Separating axes: two rectangles are apart if and only if they are so along the direction of one
    of their sides.
    """
    a, b = (boxes.corners()[:, :4, :2].double().numpy() for boxes in (one, other))
    return ~(_apart(a, b) | _apart(b, a).T)


def _apart(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Whether rectangles ``(M, 4, 2)`` and ``(K, 4, 2)`` are apart along a side of the former."""
    sides = np.stack([a[:, 1] - a[:, 0], a[:, 3] - a[:, 0]], axis=1)  # (M, 2, 2)
    own = np.einsum("msd,mcd->msc", sides, a)[:, :, None]  # (M, 2, 1, 4)
    others = np.einsum("msd,kcd->mskc", sides, b)
    before = others.max(-1) <= own.min(-1)
    behind = others.min(-1) >= own.max(-1)
    return (before | behind).any(axis=1)
