"""BEVFusion: sensors fused in the bird's-eye view (Liu et al., ICRA 2023)."""

from collections.abc import Sequence
from typing import TypeVar

from torch import Tensor, nn

from bev_lightning.errors import InputError
from bev_lightning.models.lift import CameraBranch
from bev_lightning.models.protocol import ModelPartition, PipelinePart, RowParallel, check_rows
from bev_lightning.structures import Batch, Boxes3D, Cameras
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

    official_formats: tuple[str, ...] = ("mit", "mmdetection3d")

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
        depth_logits = None
        if self.camera is not None:
            bev, depth_logits = self.camera(self.cameras_of(batch), batch.points)
            maps.append(bev)
        maps += self.range_maps(batch)
        return self.detect(self.fuse(maps), batch, depth_logits)

    def cameras_of(self, batch: Batch) -> Cameras:
        """The cameras of a batch.

        Raises:
            InputError: it has none.
        """
        return _present(batch.cameras, "cameras", batch)

    def range_maps(self, batch: Batch) -> list[Tensor]:
        """BEV maps of the lidar and radar branches, as far as the model has them."""
        maps: list[Tensor] = []
        if self.lidar is not None:
            maps.append(self.lidar(_present(batch.points, "points", batch)))
        if self.radar is not None:
            maps.append(self.radar(_present(batch.radar, "radar", batch)))
        return maps

    def fuse(self, maps: Sequence[Tensor]) -> Tensor:
        """Fuse the sensors' maps and run the BEV backbone and neck."""
        bev = maps[0] if self.fuser is None else self.fuser(maps)
        fused: Tensor = self.neck(self.backbone(bev))
        return fused

    def detect(
        self, bev: Tensor, batch: Batch, depth_logits: Tensor | None
    ) -> BEVFusionPredictions:
        """Detections on the fused map, and the depth logits with their targets."""
        detections = self.head(bev)
        if not self.supervise_depth:
            return BEVFusionPredictions(detections)
        assert self.camera is not None and depth_logits is not None
        points = _present(batch.points, "points", batch)
        target = self.camera.depth_targets(self.cameras_of(batch), points)
        return BEVFusionPredictions(detections, depth_logits, target)

    def dense_regions(self) -> list[nn.Module]:
        """The image branch up to the lift, and all parts on the BEV map; not those on points,
        voxels and the lift's index lists."""
        camera = [] if self.camera is None else [self.camera.backbone, self.camera.neck]
        fuser = [] if self.fuser is None else [self.fuser]
        return [*camera, *fuser, self.backbone, self.neck, self.head]

    def pipeline_parts(self, row_parallel: RowParallel) -> ModelPartition:
        """See :class:`bev_lightning.models.protocol.SupportsPipeline`; the processes share the
        lift's pooling."""
        camera, supervised = self.camera, self.supervise_depth
        if row_parallel.size > 1:
            if camera is None:
                raise InputError(
                    f"strategy.model={row_parallel.size} splits the cameras' BEV transform and "
                    "this model has no camera; set strategy.model=1"
                )
            key = "model.network.camera.lift.grid"
            check_rows(row_parallel, camera.lift.pool_grid.shape[0], key)

        def images(batch: Batch) -> tuple[Tensor, ...]:
            assert camera is not None
            return (camera.extract(self.cameras_of(batch)),)

        def transform(batch: Batch, *features: Tensor) -> tuple[Tensor, ...]:
            maps = self.range_maps(batch)
            if camera is None:
                return tuple(maps)
            cameras = self.cameras_of(batch)
            bev, logits = camera.lift(features[0], cameras, batch.points, row_parallel)
            return (bev, *maps, logits) if supervised else (bev, *maps)

        def fusion(batch: Batch, *values: Tensor) -> tuple[Tensor, ...]:
            maps, logits = (values[:-1], values[-1:]) if supervised else (values, ())
            return (self.fuse(maps), *logits)

        def head(batch: Batch, bev: Tensor, *logits: Tensor) -> BEVFusionPredictions:
            return self.detect(bev, batch, logits[0] if logits else None)

        branches = tuple(branch for branch in (self.lidar, self.radar) if branch is not None)
        fusers = () if self.fuser is None else (self.fuser,)
        parts = [
            PipelinePart(
                "transform", transform, branches if camera is None else (camera.lift, *branches)
            ),
            PipelinePart("fusion", fusion, (*fusers, self.backbone, self.neck)),
            PipelinePart("head", head, (self.head,)),
        ]
        if camera is None:
            return ModelPartition(parts, ("fusion", "head"))
        first = PipelinePart("images", images, (camera.backbone, camera.neck))
        return ModelPartition([first, *parts], ("transform", "fusion", "head"))

    def decode(self, predictions: BEVFusionPredictions) -> Boxes3D:
        boxes: Boxes3D = self.head.decode(predictions.detections)  # type: ignore[operator]
        return boxes


def _present(value: _T | None, name: str, batch: Batch) -> _T:
    if value is None:
        raise InputError(
            f"the network reads {name} but the samples {', '.join(batch.sample_tokens)} have "
            "none; add the sensor to model.inputs"
        )
    return value
