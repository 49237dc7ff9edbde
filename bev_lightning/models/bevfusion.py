"""BEVFusion: every sensor to one bird's-eye view, fused there (Liu et al., ICRA 2023)."""

from typing import TypeVar

from torch import Tensor, nn

from bev_lightning.errors import InputError
from bev_lightning.models.lift import CameraBranch
from bev_lightning.structures import Batch, Boxes3D
from bev_lightning.structures.predictions import BEVFusionPredictions

_T = TypeVar("_T")


class BEVFusion(nn.Module):
    """Camera, lidar and radar branches, a fuser, a BEV backbone with its neck, and a head.

    Args:
        camera: ``(Cameras, Points | None) -> (bev, depth logits | None)``.
        lidar: ``Points -> bev``.
        radar: ``Radar -> bev``.
        fuser: ``[bev, ...] -> bev`` in the order camera, lidar, radar; None with a single branch.
        backbone, neck: BEV backbone ``bev -> [maps]`` and neck ``[maps] -> bev``.
        head: a detection head with ``forward`` and ``decode``.
        supervise_depth: compare the camera's depth distribution with the lidar's depth in training.

    All BEV maps are ``(B, C, Y, X)`` on one grid up to the backbone.
    """

    def __init__(
        self,
        backbone: nn.Module,
        neck: nn.Module,
        head: nn.Module,
        camera: CameraBranch | None = None,
        lidar: nn.Module | None = None,
        radar: nn.Module | None = None,
        fuser: nn.Module | None = None,
        supervise_depth: bool = False,
    ) -> None:
        super().__init__()
        given = {"camera": camera, "lidar": lidar, "radar": radar}
        branches = [name for name, branch in given.items() if branch is not None]
        if not branches:
            raise InputError(
                "BEVFusion needs at least one of model.network.camera, lidar and radar"
            )
        if len(branches) > 1 and fuser is None:
            raise InputError(f"BEVFusion with {' + '.join(branches)} needs model.network.fuser")
        if supervise_depth and (camera is None or lidar is None):
            raise InputError("model.network.supervise_depth needs the camera and the lidar branch")
        self.camera, self.lidar, self.radar = camera, lidar, radar
        self.fuser = fuser
        self.backbone, self.neck, self.head = backbone, neck, head
        self.supervise_depth = supervise_depth

    def forward(self, batch: Batch) -> BEVFusionPredictions:
        maps: list[Tensor] = []
        depth_logits = depth_target = None
        if self.camera is not None:
            cameras = _present(batch.cameras, "cameras", batch)
            bev, depth_logits = self.camera(cameras, batch.points)
            maps.append(bev)
            if self.supervise_depth:
                depth_target = self.camera.depth_targets(
                    cameras, _present(batch.points, "points", batch), depth_logits
                )
        if self.lidar is not None:
            maps.append(self.lidar(_present(batch.points, "points", batch)))
        if self.radar is not None:
            maps.append(self.radar(_present(batch.radar, "radar", batch)))
        fused = maps[0] if self.fuser is None else self.fuser(maps)
        detections = self.head(self.neck(self.backbone(fused)))
        return BEVFusionPredictions(
            detections, depth_logits if self.supervise_depth else None, depth_target
        )

    def decode(self, predictions: BEVFusionPredictions) -> Boxes3D:
        boxes: Boxes3D = self.head.decode(predictions.detections)  # type: ignore[operator]
        return boxes


def _present(value: _T | None, name: str, batch: Batch) -> _T:
    if value is None:
        raise InputError(
            f"the network reads {name} but the samples {', '.join(batch.sample_tokens)} bring "
            f"none; add the sensor to model.inputs"
        )
    return value
