"""One stage of the chain, and the schedule that takes micro-batches through all stages."""

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

    Every process of the pipeline holds the step's batch, so that a stage reads from it what it
    needs (points, annotations) and only features travel. Shapes that travel are found out once, by
    a forward pass of one micro-batch without gradient, which each process makes on its own.

    Args:
        stages: the parts of every stage, this process's being ``stages[group.rank()]``.
        loss: predictions and their micro-batch to weighted terms.
        schedule: ``gpipe`` or ``1f1b``.
        num_micro: micro-batches of a step.
        group: the pipeline's processes in the order of the stages.
        autocast: around the forward pass; the backward pass is outside of it.
        example: a micro-batch of the shapes to come.
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
        borders = _probe(stages, autocast, example, device)
        self.stage = _Stage(stages[number], loss if number == last else None, autocast, device)
        stage = PipelineStage(
            self.stage,
            number,
            len(stages),
            device,
            input_args=borders[number],
            output_args=borders[number + 1],
            group=group,
        )
        # The gradients are divided with the loss: the schedule would divide those that were
        # accumulated before once more.
        self.schedule = SCHEDULES[schedule](
            stage, num_micro, loss_fn=self._scaled_loss, scale_grads=False
        )
        self._scale: Tensor | float = 1.0

    def step(self, micro: Sequence[Batch], scale: Tensor | float) -> dict[str, Tensor]:
        """Add the gradients of ``scale`` times the sum of all micro-batches' losses to the
        parameters; on the last stage the terms' means over the micro-batches, empty elsewhere."""
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
    """What the schedule calls; it owns no parameter, so that none is registered twice."""

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
        # What travels takes a gradient even where all before it is frozen: the stages expect one.
        self.anchor = torch.zeros((), device=device, requires_grad=True)

    def forward(self, *values: Tensor, number: Tensor) -> Tensor | tuple[Tensor, ...]:
        batch = self.micro[int(number)]
        with self.autocast():
            result: Any = tuple(_Enter.apply(value) for value in values)
            for part in self.parts:
                result = part.run(batch, *result)
            if self.loss is None:
                return tuple(_Leave.apply(value, self.anchor) for value in result)
            terms = self.loss(result, batch)
        self.terms.append({name: value.detach() for name, value in terms.items()})
        return torch.stack(list(terms.values()))


class _Enter(torch.autograd.Function):
    """The identity, whose gradient is contiguous: what travels back must be."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.contiguous()


class _Leave(torch.autograd.Function):
    """A contiguous copy or the value itself, which depends on an anchor with a gradient of 0."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, anchor: Tensor) -> Tensor:
        return value.contiguous().view_as(value)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def _probe(
    stages: Sequence[Sequence[PipelinePart]],
    autocast: Autocast,
    example: Batch,
    device: torch.device,
) -> list[tuple[Tensor, ...]]:
    """What enters each stage and what leaves the last one, as tensors without content."""
    values: tuple[Tensor, ...] = ()
    borders: list[tuple[Tensor, ...]] = [()]
    owners = [module for parts in stages[:-1] for part in parts for module in part.modules]
    training = [module for owner in owners for module in owner.modules() if module.training]
    for module in training:
        module.training = False  # statistics stay as they are
    try:
        with torch.no_grad(), autocast():
            for parts in stages[:-1]:
                for part in parts:
                    values = part.run(example, *values)
                borders.append(
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
    return [*borders, (torch.empty(1, device="meta", requires_grad=True),)]
