"""The parallel plan of our networks: the chain from a batch to predictions, and where it is cut.

It stands beside the models, which know nothing of it: a part calls their methods. What is
model-parallel is the BEV transform: the M processes of the group share out the rows of the BEV
map of all their samples, after they have told one another the image features.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bev_lightning.errors import InputError
from bev_lightning.models.bev_encoder import PreviousBev
from bev_lightning.models.bevformer import BEVFormer
from bev_lightning.models.bevfusion import BEVFusion
from bev_lightning.models.lift import LiftSplat
from bev_lightning.modules.bevformer import BEVFormerModule
from bev_lightning.modules.detection import DetectionModule
from bev_lightning.ops.bev_pool import bev_pool, build_pool_index
from bev_lightning.parallel.collectives import gather_rows, gather_samples, rows_to_samples
from bev_lightning.structures import Batch
from bev_lightning.structures.predictions import BEVFormerPredictions, BEVFusionPredictions


@dataclass(frozen=True)
class Part:
    """One link of the chain.

    Attributes:
        name: what ``strategy.cuts`` calls it.
        run: from a batch and what the part before returned to a tuple of floating-point tensors;
            the last part to predictions.
        modules: whose statistics it moves.
    """

    name: str
    run: Callable[..., Any]
    modules: tuple[nn.Module, ...]


@dataclass(frozen=True)
class Chain:
    """Attributes:
    parts: from the batch to the predictions.
    cuts: parts before which the chain may be cut, the first one first.
    """

    parts: list[Part]
    cuts: tuple[str, ...]

    def split(self, num_stages: int, cuts: Sequence[str] | None = None) -> list[list[Part]]:
        """The parts of each pipeline stage.

        Args:
            cuts: parts that begin a stage; None takes the first of ``self.cuts``.

        Raises:
            InputError: the chain has not that many places to cut, or no such part.
        """
        if cuts is None:
            if num_stages - 1 > len(self.cuts):
                raise InputError(
                    f"strategy.pipeline={num_stages} and this model has {len(self.cuts) + 1} parts "
                    f"({', '.join(part.name for part in self.parts)}); set strategy.pipeline="
                    f"{len(self.cuts) + 1} or less"
                )
            cuts = self.cuts[: num_stages - 1]
        unknown = [name for name in cuts if name not in self.cuts]
        if unknown or len(set(cuts)) != num_stages - 1:
            raise InputError(
                f"strategy.cuts={list(cuts)} must name {num_stages - 1} of this model's parts "
                f"{', '.join(self.cuts)}; set strategy.cuts anew, or strategy.cuts=null"
            )
        stages: list[list[Part]] = [[]]
        for part in self.parts:
            if part.name in cuts:
                stages.append([])
            stages[-1].append(part)
        return stages


def partition_model(module: DetectionModule, group: dist.ProcessGroup) -> Chain:
    """The chain of a model, with the BEV transform shared out over the group.

    Raises:
        InputError: the model is none that can be cut, or its transform none that can be shared.
    """
    network = module.network
    if isinstance(network, BEVFusion):
        return _plan_bevfusion(network, group)
    if isinstance(network, BEVFormer) and isinstance(module, BEVFormerModule):
        return _plan_bevformer(module, network, group)
    raise InputError(
        f"strategy=pipeline and hybrid cut BEVFusion and BEVFormer, not {type(network).__name__}; "
        "use strategy=ddp or fsdp"
    )


def _plan_bevfusion(network: BEVFusion, group: dist.ProcessGroup) -> Chain:
    camera, supervised = network.camera, network.supervise_depth
    if group.size() > 1:
        if camera is None:
            raise InputError(
                f"strategy.model={group.size()} shares out the cameras' BEV transform and this "
                "model has no camera; set strategy.model=1"
            )
        _check_rows(camera.lift.pool_grid.shape[0], group, "model.network.camera.lift.grid")

    def images(batch: Batch) -> tuple[Tensor, ...]:
        assert camera is not None
        return (camera.extract(network.cameras_of(batch)),)

    def transform(batch: Batch, *features: Tensor) -> tuple[Tensor, ...]:
        maps = network.range_maps(batch)
        if camera is None:
            return tuple(maps)
        bev, logits = _lift(camera.lift, features[0], batch, group)
        return (bev, *maps, logits) if supervised else (bev, *maps)

    def fusion(batch: Batch, *values: Tensor) -> tuple[Tensor, ...]:
        maps, logits = (values[:-1], values[-1:]) if supervised else (values, ())
        return (network.fuse(maps), *logits)

    def head(batch: Batch, bev: Tensor, *logits: Tensor) -> BEVFusionPredictions:
        return network.detect(bev, batch, logits[0] if logits else None)

    branches = tuple(part for part in (network.lidar, network.radar) if part is not None)
    fusers = () if network.fuser is None else (network.fuser,)
    parts = [
        Part("transform", transform, branches if camera is None else (camera.lift, *branches)),
        Part("fusion", fusion, (*fusers, network.backbone, network.neck)),
        Part("head", head, (network.head,)),
    ]
    if camera is None:
        return Chain(parts, ("fusion", "head"))
    parts.insert(0, Part("images", images, (camera.backbone, camera.neck)))
    return Chain(parts, ("transform", "fusion", "head"))


def _plan_bevformer(module: BEVFormerModule, network: BEVFormer, group: dist.ProcessGroup) -> Chain:
    if group.size() > 1:
        _check_rows(network.encoder.grid.shape[0], group, "model.network.encoder.grid")

    def images(batch: Batch) -> tuple[Tensor, ...]:
        return tuple(network.backbone(network.images_of([batch])))

    def neck(batch: Batch, *maps: Tensor) -> tuple[Tensor, ...]:
        return tuple(network.levels_of([batch], network.neck(maps))[0])

    def transform(batch: Batch, *maps: Tensor) -> tuple[Tensor, ...]:
        # The earlier frames take no gradient, so that this stage sees them alone.
        previous = module.remember(batch) if module.inputs.history else None
        seen = maps[:1] if network.perspective is not None else ()
        if group.size() == 1:
            return (network.encode(batch, maps, previous), *seen)
        return (_encode(network, batch, maps, previous, group), *seen)

    def head(batch: Batch, bev: Tensor, *seen: Tensor) -> BEVFormerPredictions:
        predictions = network.detect(bev, batch.targets)
        return network.supervise(predictions, batch, seen[0]) if seen else predictions

    heads = tuple(h for h in (network.head, network.perspective) if h is not None)

    parts = [
        Part("images", images, (network.backbone,)),
        Part("neck", neck, (network.neck,)),
        Part("transform", transform, (network.encoder,)),
        Part("head", head, heads),
    ]
    return Chain(parts, ("transform", "head", "neck"))


def _lift(
    lift: LiftSplat, features: Tensor, batch: Batch, group: dist.ProcessGroup
) -> tuple[Tensor, Tensor]:
    """BEV map ``(B, C, Y, X)`` and depth logits: each process pools a strip of rows for the samples
    of all."""
    cameras, points = batch.cameras, batch.points
    assert cameras is not None
    if group.size() == 1:
        lifted: tuple[Tensor, Tensor] = lift(features, cameras, points)
        return lifted
    logits, context = lift.predict_depth(features, cameras, points)
    depth = logits.float().softmax(dim=2)
    matrices = gather_samples(cameras.image_from_lidar, group)
    size = (features.shape[-2], features.shape[-1])
    cells = lift.cells(replace(cameras, image_from_lidar=matrices), size)
    height, width = lift.pool_grid.shape
    num = height // group.size() * width
    cells = cells - group.rank() * num
    cells = torch.where((cells >= 0) & (cells < num), cells, -1)
    index = build_pool_index(cells, (height // group.size(), width))
    pooled = bev_pool(gather_samples(depth, group), gather_samples(context, group), index)
    bev: Tensor = lift.downsample(rows_to_samples(pooled, group, dim=2))
    return bev, logits


def _encode(
    network: BEVFormer,
    batch: Batch,
    maps: Sequence[Tensor],
    previous: PreviousBev | None,
    group: dist.ProcessGroup,
) -> Tensor:
    """BEV map ``(B, C, Y, X)``: each process attends with the queries of a strip of rows for the
    samples of all, and tells the others what became of them after each layer, because the next
    one's temporal attention looks anywhere."""
    encoder, cameras = network.encoder, batch.cameras
    assert cameras is not None
    num = encoder.grid.shape[0] // group.size() * encoder.grid.shape[1]
    scene = encoder.prepare(
        [gather_samples(features, group) for features in maps],
        gather_samples(cameras.image_from_lidar, group),
        network.padded_size(cameras),
        None if batch.can_bus is None else gather_samples(batch.can_bus, group),
        gather_samples(batch.lidar_from_previous_lidar, group),
        None
        if previous is None
        else PreviousBev(
            gather_samples(previous.bev, group), gather_samples(previous.valid, group)
        ),
        slice(group.rank() * num, (group.rank() + 1) * num),
    )
    query = scene.first
    for number in range(len(encoder.layers)):
        if number:
            query = gather_rows(query, group)
        query = encoder.attend(number, scene, query)
    query = rows_to_samples(query, group, dim=1)
    return query.transpose(1, 2).reshape(batch.size, -1, *encoder.grid.shape)


def _check_rows(rows: int, group: dist.ProcessGroup, key: str) -> None:
    if rows % group.size():
        raise InputError(
            f"strategy.model={group.size()} shares out the {rows} rows of {key}, which it does not "
            "divide; set strategy.model to a divisor"
        )
