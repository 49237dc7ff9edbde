"""Runs a pipeline stage under a schedule of torch.distributed.pipelining."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from bev_lightning.models.protocol import PipelinePart
from bev_lightning.structures import Batch

SCHEDULES = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}

Autocast = Callable[[], AbstractContextManager[Any]]


class PipelineRunner:
    """Runs forward and backward passes of a stage for all micro-batches of a step.

    Every process of the pipeline has the step's batch, so that a stage reads its inputs (points,
    annotations) from it and only features are sent. Their shapes are found once, by a forward pass
    of one micro-batch without gradient in each process.

    Args:
        stages: the parts of every stage; this process runs ``stages[group.rank()]``.
        loss: maps predictions and their micro-batch to weighted terms.
        schedule: ``gpipe`` or ``1f1b``.
        num_micro: micro-batches per step.
        group: the pipeline's processes in the order of the stages.
        autocast: context of the forward pass, without the backward pass.
        example: a micro-batch with the shapes of all others.
    """

    def __init__(
        self,
        stages: Sequence[Sequence[PipelinePart]],
        loss: Callable[[Any, Batch], dict[str, Tensor]],
        schedule: str,
        num_micro: int,
        group: dist.ProcessGroup,
        autocast: Autocast,
        example: Batch,
        device: torch.device,
    ) -> None:
        number, last = group.rank(), len(stages) - 1
        boundaries = _infer_shapes(stages, autocast, example, device)
        self.stage = _Stage(stages[number], loss if number == last else None, autocast, device)
        stage = PipelineStage(
            self.stage,
            number,
            len(stages),
            device,
            input_args=boundaries[number],
            output_args=boundaries[number + 1],
            group=group,
        )
        # The loss is scaled instead of the gradients: the schedule would scale previously
        # accumulated ones again.
        self.schedule = SCHEDULES[schedule](
            stage, num_micro, loss_fn=self._scaled_loss, scale_grads=False
        )
        self._scale: Tensor | float = 1.0

    def step(self, micro: Sequence[Batch], scale: Tensor | float) -> dict[str, Tensor]:
        """Accumulate the gradients of ``scale`` times the sum of all micro-batches' losses.

        Returns:
            On the last stage the terms' means over the micro-batches, elsewhere empty.
        """
        self.stage.micro, self._scale = list(micro), scale
        self.stage.terms.clear()
        numbers = torch.arange(len(micro))
        self.schedule.step(target=numbers, number=numbers)
        terms, self.stage.micro = self.stage.terms, []
        if not terms:
            return {}
        return {name: torch.stack([one[name] for one in terms]).mean() for name in terms[0]}

    def _scaled_loss(self, terms: Tensor, _: Tensor) -> Tensor:
        return terms.sum() * self._scale


class _Stage(nn.Module):
    """The module that the schedule calls; without parameters, so that none is registered twice."""

    def __init__(
        self,
        parts: Sequence[PipelinePart],
        loss: Callable[[Any, Batch], dict[str, Tensor]] | None,
        autocast: Autocast,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.parts, self.loss, self.autocast = parts, loss, autocast
        self.micro: list[Batch] = []
        self.terms: list[dict[str, Tensor]] = []
        # Sent tensors need a gradient even if everything before them is frozen.
        self.anchor = torch.zeros((), device=device, requires_grad=True)

    def forward(self, *values: Tensor, number: Tensor) -> Tensor | tuple[Tensor, ...]:
        batch = self.micro[int(number)]
        with self.autocast():
            result: Any = tuple(_ContiguousGrad.apply(value) for value in values)
            for part in self.parts:
                result = part.run(batch, *result)
            if self.loss is None:
                return tuple(_ContiguousOutput.apply(value, self.anchor) for value in result)
            terms = self.loss(result, batch)
        self.terms.append({name: value.detach() for name, value in terms.items()})
        return torch.stack(list(terms.values()))


class _ContiguousGrad(torch.autograd.Function):
    """The identity with a contiguous gradient, as sending it requires."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.contiguous()


class _ContiguousOutput(torch.autograd.Function):
    """The value, contiguous, with a dependence on an anchor that gets no gradient."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, anchor: Tensor) -> Tensor:
        return value.contiguous().view_as(value)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def _infer_shapes(
    stages: Sequence[Sequence[PipelinePart]],
    autocast: Autocast,
    example: Batch,
    device: torch.device,
) -> list[tuple[Tensor, ...]]:
    """Inputs of each stage and outputs of the last one, as meta tensors."""
    values: tuple[Tensor, ...] = ()
    boundaries: list[tuple[Tensor, ...]] = [()]
    owners = [module for parts in stages[:-1] for part in parts for module in part.modules]
    training = [module for owner in owners for module in owner.modules() if module.training]
    for module in training:
        module.training = False  # keeps the statistics
    try:
        with torch.no_grad(), autocast():
            for parts in stages[:-1]:
                for part in parts:
                    values = part.run(example, *values)
                boundaries.append(
                    tuple(
                        torch.empty(
                            value.shape, dtype=value.dtype, device="meta", requires_grad=True
                        )
                        for value in values
                    )
                )
    finally:
        for module in training:
            module.training = True
    return [*boundaries, (torch.empty(1, device="meta", requires_grad=True),)]
