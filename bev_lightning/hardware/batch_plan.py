"""Effective batch and learning-rate scaling."""

import math
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class BatchPlan:
    """The samples of one optimizer step: processes x batch size x accumulation.

    Attributes:
        num_processes: training processes over all nodes.
        batch_size: samples per process and micro-step.
        accumulation: micro-steps per optimizer step.
    """

    num_processes: int
    batch_size: int
    accumulation: int

    @property
    def effective_batch(self) -> int:
        """Samples behind one optimizer step."""
        return self.num_processes * self.batch_size * self.accumulation

    def scale_lr(self, lr: float, rule: str | None, base_batch: int | None) -> float:
        """Scale a learning rate that was tuned for ``base_batch`` samples per optimizer step.

        Args:
            lr: learning rate at ``base_batch`` samples.
            rule: ``linear``, ``sqrt``, or None to keep ``lr``.
            base_batch: samples per optimizer step; None keeps ``lr``.
        """
        if rule is None or base_batch is None:
            return lr
        ratio = self.effective_batch / base_batch
        return lr * (ratio if rule == "linear" else math.sqrt(ratio))

    def describe(self, lr: float, rule: str | None, base_batch: int | None) -> str:
        """Batch and learning rate in one line."""
        text = f"{self}; learning rate {self.scale_lr(lr, rule, base_batch):.4g}"
        if rule is not None and base_batch != self.effective_batch:
            ratio = f"{self.effective_batch}/{base_batch}"
            text += f" = {lr:.4g} x {ratio if rule == 'linear' else f'sqrt({ratio})'}"
            text += f" (the recipe is tuned for {base_batch} samples per step)"
        return text

    def split(self) -> list["BatchPlan"]:
        """All plans with the same effective batch on as many processes, largest batch first."""
        samples = self.batch_size * self.accumulation
        return [
            replace(self, batch_size=size, accumulation=samples // size)
            for size in range(samples, 0, -1)
            if samples % size == 0
        ]

    def __str__(self) -> str:
        return (
            f"{self.effective_batch} samples per optimizer step = {self.num_processes} "
            f"process{'' if self.num_processes == 1 else 'es'} x {self.batch_size} x "
            f"{self.accumulation} accumulated"
        )
