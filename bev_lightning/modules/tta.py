"""Test-time augmentation: a scene is seen mirrored and turned too, and the detections merged."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from bev_lightning.errors import InputError
from bev_lightning.ops.nms import circle_nms
from bev_lightning.structures import Batch, Boxes3D, Cameras, Points, Radar
from bev_lightning.structures.geometry import apply_transform, wrap_angle


@dataclass(frozen=True)
class TestTimeAugmentation:
    """Which views of a scene are detected in, and how their boxes become one set.

    All combinations are made; the scene as it is is always among them. A view is a change of the
    model frame, so points, radar and camera matrices turn together, for any mix of sensors.

    Attributes:
        flip_x, flip_y: also with negated x, negated y.
        rotate_deg: also turned about z by these angles [degrees], which should lie within what the
            model was trained with; what a view turns out of the range is missing in it.
        reach: boxes of one class whose centres lie closer than this share of their mean footprint,
            (length + width) / 2, but 0.3 to 2 m, are the same object.
    """

    __test__ = False  # not a test, whatever its name

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
        for angle in (0.0, *self.rotate_deg):
            cos, sin = math.cos(math.radians(angle)), math.sin(math.radians(angle))
            for x in (1.0, -1.0) if self.flip_x else (1.0,):
                for y in (1.0, -1.0) if self.flip_y else (1.0,):
                    matrices.append(
                        [
                            [x * cos, -x * sin, 0, 0],
                            [y * sin, y * cos, 0, 0],
                            [0, 0, 1, 0],
                            [0, 0, 0, 1],
                        ]
                    )
        return torch.tensor(matrices)


def view_batch(batch: Batch, view_from_lidar: Tensor) -> Batch:
    """The same samples in another model frame, without targets and earlier frames; in float32
    whatever autocast and TF32 say.

    Args:
        view_from_lidar: ``(4, 4)`` rotation about z, with or without a mirror.
    """
    matrix = view_from_lidar.to(batch.global_from_lidar.device)
    # Products of matrices in float64, of points as sums of columns: neither rounds them.
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
    """Detections ``(B, M)`` of each view, in one frame, to ``(B, V * M)`` merged ones.

    The strongest box of a neighbourhood (same class, centres within its reach) stands for it: its
    centre, size and velocity become the means of the neighbourhood weighted by score, its yaw the
    mean of those within 90 degrees of its own. Its score is the mean over the views of the best
    score each has there, 0 for a view that sees nothing: what one view alone sees sinks. In float32
    whatever autocast and TF32 say.
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
    # By differences: squares and a product lose decimetres of a distance 50 m from the origin.
    distance = torch.cdist(
        boxes.centre[..., :2],
        boxes.centre[..., :2],
        compute_mode="donot_use_mm_for_euclid_dist",
    )
    near = (distance <= radius.unsqueeze(-1)) & (
        boxes.label.unsqueeze(-1) == boxes.label.unsqueeze(-2)
    )
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
