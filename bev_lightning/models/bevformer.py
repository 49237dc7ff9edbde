"""BEVFormer: cameras and the previous bird's-eye view to the current one (Li et al., ECCV 2022)."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bev_lightning.errors import InputError
from bev_lightning.models.bev_encoder import BEVEncoder, PreviousBev
from bev_lightning.models.image import MapSize
from bev_lightning.models.protocol import ModelPartition, PipelinePart, RowParallel, check_rows
from bev_lightning.structures import Batch, Boxes3D, Cameras
from bev_lightning.structures.predictions import BEVFormerPredictions


class BEVFormer(nn.Module):
    """Image backbone and neck, BEV encoder, and a set-prediction head.

    Without ``previous`` each frame is processed alone;
    :class:`bev_lightning.modules.bevformer.BEVFormerModule` passes the previous BEV map.

    Args:
        backbone: images ``(M, 3, H, W)`` to maps.
        neck: maps to L maps of the encoder's width.
        encoder: see :class:`BEVEncoder`.
        head: see :class:`bev_lightning.models.bevformer_head.BEVFormerHead`.
        pad_multiple: images are padded with zeros on the right and at the bottom to a multiple of
            this [pixels]; 1 pads nothing.
        perspective: supervises the image branch in training, see
            :class:`bev_lightning.models.perspective.PerspectiveHead`; None as published.
    """

    official_formats: tuple[str, ...] = ("bevformer",)

    def __init__(
        self,
        backbone: nn.Module,
        neck: nn.Module,
        encoder: BEVEncoder,
        head: nn.Module,
        pad_multiple: int = 1,
        perspective: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.backbone, self.neck, self.encoder, self.head = backbone, neck, encoder, head
        self.pad_multiple = pad_multiple
        self.perspective = perspective
        self._map_size = None if perspective is None else MapSize(backbone, neck)

    @property
    def reads_can_bus(self) -> bool:
        """Whether detections depend on the CAN bus vector."""
        return self.encoder.motion == "can_bus" or self.encoder.can_bus_mlp is not None

    def forward(self, batch: Batch, previous: PreviousBev | None = None) -> BEVFormerPredictions:
        maps = self.extract([batch])[0]
        bev = self.encode(batch, maps, previous)
        if not self.training:
            return self.detect(bev)
        return self.supervise(self.detect(bev, batch.targets), batch, maps[0])

    def supervise(
        self, predictions: BEVFormerPredictions, batch: Batch, features: Tensor
    ) -> BEVFormerPredictions:
        """Adds the perspective head's predictions from the first image level ``(B, N, C, h, w)``,
        if there is such a head."""
        if self.perspective is None:
            return predictions
        cameras = _cameras(batch)
        detections = self.perspective(features, cameras.image_from_lidar, self.padded_size(cameras))
        return replace(predictions, perspective=detections)

    def dense_regions(self) -> list[nn.Module]:
        """The image branch, and each layer of encoder and head with its prediction branches; layers
        of one kind share the compiled code."""
        head = [self.head.layers, self.head.class_branches, self.head.box_branches]
        layers = [part for parts in (self.encoder.layers, *head) for part in parts]  # type: ignore[union-attr]
        return [self.backbone, self.neck, *layers]

    def padded_size(self, cameras: Cameras) -> tuple[int, int]:
        """Height and width of the padded images [pixels]."""
        height, width = cameras.images.shape[-2:]
        return height + -height % self.pad_multiple, width + -width % self.pad_multiple

    def map_size(self, cameras: Cameras) -> tuple[int, int]:
        """Height and width of the first feature map, the input of ``perspective``."""
        assert self._map_size is not None
        return self._map_size(*self.padded_size(cameras))

    def extract(self, frames: Sequence[Batch]) -> list[list[Tensor]]:
        """Feature maps of frames of one size, in one pass: for each frame L maps
        ``(B, N, C, h, w)``."""
        return self.levels_of(frames, self.neck(self.backbone(self.images_of(frames))))

    def images_of(self, frames: Sequence[Batch]) -> Tensor:
        """The padded images ``(M, 3, H, W)`` of all cameras of the frames."""
        images = torch.cat([_cameras(frame).images for frame in frames])
        height, width = images.shape[-2:]
        right, bottom = -width % self.pad_multiple, -height % self.pad_multiple
        return F.pad(images.flatten(0, 1), (0, right, 0, bottom))

    def levels_of(self, frames: Sequence[Batch], maps: Sequence[Tensor]) -> list[list[Tensor]]:
        """Maps ``(M, C, h, w)`` of all images by frame: L maps ``(B, N, C, h, w)`` each."""
        num_cameras = _cameras(frames[0]).images.shape[1]
        sizes = [frame.size for frame in frames]
        per_frame = [m.unflatten(0, (-1, num_cameras)).split(sizes) for m in maps]
        return [list(levels) for levels in zip(*per_frame, strict=True)]

    def encode(
        self,
        batch: Batch,
        maps: Sequence[Tensor],
        previous: PreviousBev | None = None,
        row_parallel: RowParallel | None = None,
    ) -> Tensor:
        """BEV map ``(B, C, Y, X)`` of a frame's feature maps; see :class:`BEVEncoder`."""
        cameras = _cameras(batch)
        bev: Tensor = self.encoder(
            maps,
            cameras.image_from_lidar,
            self.padded_size(cameras),
            batch.can_bus,
            batch.lidar_from_previous_lidar,
            previous,
            row_parallel,
        )
        return bev

    def detect(self, bev: Tensor, targets: Boxes3D | None = None) -> BEVFormerPredictions:
        """Detections on a BEV map; annotations serve denoising only."""
        predictions: BEVFormerPredictions = self.head(bev, targets)
        return predictions

    def pipeline_parts(
        self,
        row_parallel: RowParallel,
        previous_bev: Callable[[Batch], PreviousBev | None] | None = None,
    ) -> ModelPartition:
        """See :class:`bev_lightning.models.protocol.SupportsPipeline`; the processes share the
        encoder's queries.

        Args:
            previous_bev: the previous frame's map, from a batch's history.
        """
        check_rows(row_parallel, self.encoder.grid.shape[0], "model.network.encoder.grid")

        def images(batch: Batch) -> tuple[Tensor, ...]:
            return tuple(self.backbone(self.images_of([batch])))

        def neck(batch: Batch, *maps: Tensor) -> tuple[Tensor, ...]:
            return tuple(self.levels_of([batch], self.neck(maps))[0])

        def transform(batch: Batch, *maps: Tensor) -> tuple[Tensor, ...]:
            # The earlier frames take no gradient: only this stage computes them.
            previous = None if previous_bev is None else previous_bev(batch)
            seen = maps[:1] if self.perspective is not None else ()
            return (self.encode(batch, maps, previous, row_parallel), *seen)

        def head(batch: Batch, bev: Tensor, *seen: Tensor) -> BEVFormerPredictions:
            predictions = self.detect(bev, batch.targets)
            return self.supervise(predictions, batch, seen[0]) if seen else predictions

        heads = tuple(head for head in (self.head, self.perspective) if head is not None)
        parts = [
            PipelinePart("images", images, (self.backbone,)),
            PipelinePart("neck", neck, (self.neck,)),
            PipelinePart("transform", transform, (self.encoder,)),
            PipelinePart("head", head, heads),
        ]
        return ModelPartition(parts, ("transform", "head", "neck"))

    def decode(self, predictions: BEVFormerPredictions) -> Boxes3D:
        boxes: Boxes3D = self.head.decode(predictions)  # type: ignore[operator]
        return boxes


def _cameras(batch: Batch) -> Cameras:
    if batch.cameras is None:
        raise InputError(
            f"BEVFormer reads cameras but the samples {', '.join(batch.sample_tokens)} have none; "
            "add them to model.inputs"
        )
    return batch.cameras
