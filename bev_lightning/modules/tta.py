"""Test-time augmentation: detects in mirrored and rotated scenes and merges the boxes."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product

import torch
from torch import Tensor

from bev_lightning.errors import InputError
from bev_lightning.ops.nms import circle_nms
from bev_lightning.structures import Batch, Boxes3D, Cameras, Points, Radar
from bev_lightning.structures.geometry import apply_transform, wrap_angle


@dataclass(frozen=True)
class TestTimeAugmentation:
    """The views of a scene, and how their boxes are merged.

    All combinations are used, always including the original scene. A view is a transform of the
    model frame, applied to points, radar and camera matrices alike, for any mix of sensors.

    Attributes:
        flip_x, flip_y: also mirror x, y.
        rotate_deg: also rotate about z by these angles [degrees], which should be within the
            training augmentation; objects rotated out of the range are missing in a view.
        reach: boxes of one class are the same object if their centres are closer than this share of
            their mean footprint, (length + width) / 2, clamped to 0.3 to 2 m.
    """

    __test__ = False  # pytest: not a test class

    flip_x: bool = True
    flip_y: bool = True
    rotate_deg: tuple[float, ...] = ()
    reach: float = 0.5

    def __post_init__(self) -> None:
        object.__setattr__(self, "rotate_deg", tuple(float(v) for v in self.rotate_deg))
        if not self.reach > 0:
            raise InputError(f"tta.reach={self.reach} must be positive, for example 0.5")

    def views(self) -> Tensor:
        """``(V, 4, 4)`` view_from_lidar; the identity first."""
        matrices = []
        signs_x, signs_y = ((1.0, -1.0) if flip else (1.0,) for flip in (self.flip_x, self.flip_y))
        for angle, x, y in product((0.0, *self.rotate_deg), signs_x, signs_y):
            cos, sin = math.cos(math.radians(angle)), math.sin(math.radians(angle))
            linear = [[x * cos, -x * sin, 0, 0], [y * sin, y * cos, 0, 0]]
            matrices.append([*linear, [0, 0, 1, 0], [0, 0, 0, 1]])
        return torch.tensor(matrices)


def view_batch(batch: Batch, view_from_lidar: Tensor) -> Batch:
    """Transform samples to another model frame, without targets and history.

    Computed in float32 or higher, regardless of autocast and TF32.

    Args:
        view_from_lidar: ``(4, 4)`` rotation about z, possibly with mirroring.
    """
    matrix = view_from_lidar.to(batch.global_from_lidar.device)
    # Matrix products in float64, and points as sums of scaled columns, to avoid TF32 rounding.
    wide = matrix.double()
    inverse = torch.linalg.inv(wide)
    cameras, points, radar = batch.cameras, batch.points, batch.radar
    previous = (wide @ batch.lidar_from_previous_lidar.double() @ inverse).float()
    if cameras is not None:
        turned = cameras.image_from_lidar.double() @ inverse
        cameras = Cameras(cameras.images, turned.float())
    if points is not None:
        points = Points(_move(points.features, matrix), points.count)
    if radar is not None:
        features = _move(radar.features, matrix)
        velocity = features[..., 4:5] * matrix[:2, 0] + features[..., 5:6] * matrix[:2, 1]
        features = torch.cat([features[..., :4], velocity, features[..., 6:]], dim=-1)
        radar = Radar(features, radar.count)
    return replace(
        batch,
        cameras=cameras,
        points=points,
        radar=radar,
        targets=None,
        history=(),
        global_from_lidar=batch.global_from_lidar @ inverse,
        lidar_from_previous_lidar=previous,
    )


def merge_views(views: Sequence[Boxes3D], reach: float) -> Boxes3D:
    """Merge detections ``(B, M)`` of V views, in one frame, to ``(B, V * M)``.

    The box with the highest score in a neighbourhood (same class, centres within its reach)
    represents it: its centre, size and velocity become the score-weighted means, its yaw the mean
    of those within 90 degrees of its own. Its score is the mean over the views of each view's best
    score there, 0 for a view without a box, so that objects found in few views get lower scores.
    Computed in float32, regardless of autocast and TF32.
    """
    views = [view.to(dtype=torch.float32) for view in views]
    columns = {
        name: torch.cat([getattr(view, name) for view in views], dim=1)
        for name in ("centre", "size", "yaw", "velocity", "label", "valid", "score")
    }
    boxes = Boxes3D(**columns)
    score = columns["score"] * boxes.valid
    radius = (reach * boxes.size[..., :2].mean(-1)).clamp(0.3, 2.0)
    keep = circle_nms(boxes.centre[..., :2], score, radius, boxes.label, boxes.valid)
    # Exact differences: the matrix-product formula is off by decimetres 50 m from the origin.
    xy = boxes.centre[..., :2]
    distance = torch.cdist(xy, xy, compute_mode="donot_use_mm_for_euclid_dist")
    near = distance <= radius.unsqueeze(-1)
    near &= boxes.label.unsqueeze(-1) == boxes.label.unsqueeze(-2)
    near &= keep.unsqueeze(-1) & boxes.valid.unsqueeze(-2)  # (B, kept, member)
    weight = near * score.unsqueeze(-2)
    total = weight.sum(-1, keepdim=True).clamp(min=1e-12)
    turned = wrap_angle(boxes.yaw.unsqueeze(-2) - boxes.yaw.unsqueeze(-1))
    agrees = weight * (turned.abs() <= math.pi / 2)
    turn = (agrees * turned).sum(-1) / agrees.sum(-1).clamp(min=1e-12)
    by_view = weight.unflatten(-1, (len(views), -1)).amax(-1)
    numbers = torch.cat([boxes.centre, boxes.size, boxes.velocity], dim=-1)
    mean = (weight.double() @ numbers.double()).float() / total
    return Boxes3D(
        centre=mean[..., :3],
        size=mean[..., 3:6],
        yaw=wrap_angle(boxes.yaw + turn),
        velocity=mean[..., 6:],
        label=boxes.label,
        valid=keep & (score > 0),
        score=by_view.mean(-1),
    )


def _move(features: Tensor, matrix: Tensor) -> Tensor:
    return torch.cat([apply_transform(matrix, features[..., :3]), features[..., 3:]], dim=-1)
