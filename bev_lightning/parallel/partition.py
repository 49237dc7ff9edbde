"""Splits a network into pipeline stages; the network itself lists its parts."""

from collections.abc import Sequence

from bev_lightning.errors import InputError
from bev_lightning.models.protocol import (
    ModelPartition,
    PipelinePart,
    RowParallel,
    SupportsPipeline,
)
from bev_lightning.modules.detection import DetectionModule


def partition_model(module: DetectionModule, row_parallel: RowParallel) -> ModelPartition:
    """The parts of a module's network, see :class:`SupportsPipeline`.

    Raises:
        InputError: the network does not implement ``pipeline_parts`` or cannot be split so.
    """
    if not isinstance(module.network, SupportsPipeline):
        raise InputError(
            f"strategy=pipeline and hybrid need {type(module.network).__name__}.pipeline_parts; "
            "implement it as bev_lightning.models.protocol.SupportsPipeline describes, or use "
            "strategy=ddp or fsdp"
        )
    return module.pipeline_parts(row_parallel)


def split_stages(
    partition: ModelPartition, num_stages: int, cuts: Sequence[str] | None = None
) -> list[list[PipelinePart]]:
    """The parts of each pipeline stage.

    Args:
        cuts: parts that begin a stage; None takes the first of ``partition.cuts``.

    Raises:
        InputError: the network has too few parts, or no such part.
    """
    names = [part.name for part in partition.parts]
    if cuts is None:
        most = len(partition.cuts) + 1
        if num_stages > most:
            raise InputError(
                f"strategy.pipeline={num_stages} and this model has {most} parts "
                f"({', '.join(names)}); set strategy.pipeline={most} or less"
            )
        cuts = partition.cuts[: num_stages - 1]
    unknown = [name for name in cuts if name not in partition.cuts]
    if unknown or len(set(cuts)) != num_stages - 1:
        raise InputError(
            f"strategy.cuts={list(cuts)} must name {num_stages - 1} of this model's parts "
            f"{', '.join(partition.cuts)}; change it, or set strategy.cuts=null"
        )
    stages: list[list[PipelinePart]] = [[]]
    for part in partition.parts:
        if part.name in cuts:
            stages.append([])
        stages[-1].append(part)
    return stages
