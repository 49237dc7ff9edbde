"""Lightning callback that times the parts of training steps."""

import time
from contextlib import ExitStack
from typing import Any

import lightning as L
import numpy as np
import torch

from bev_lightning.benchmarks.report import Row
from bev_lightning.benchmarks.timing import PeakMemory
from bev_lightning.modules.detection import DetectionModule
from bev_lightning.ops.backend import use_reference
from bev_lightning.structures import Batch

PARTS = ("data", "forward", "loss", "backward", "optimizer")


class StepTimer(L.Callback):
    """Alternates steps with reference and fast operators and times them.

    A step starts at the end of the previous one and ends when the weights are updated. Its parts
    are ``data`` (waiting for the batch and copying it to the device), ``forward``, ``loss``
    (including matching), ``backward`` and ``optimizer`` (including clipping).

    Args:
        module: its loss is wrapped, to mark the end of the forward pass.
        on_cuda: synchronise between the parts in every second step.

    Attributes:
        num_kinds: number of kinds of steps, which alternate.
        batch: the last batch, on its device.
    """

    def __init__(self, module: DetectionModule, on_cuda: bool) -> None:
        self.on_cuda = on_cuda
        # Reference before fast; on CUDA the whole step before its parts.
        self.kinds = [(name, split) for name in ("reference", "fast") for split in (False, True)]
        if not on_cuda:
            self.kinds = [kind for kind in self.kinds if kind[1]]
        self.num_kinds = len(self.kinds)
        self.batch: Batch | None = None
        self._marks: list[list[tuple[float, float]]] = []
        self._peaks_mib: list[float | None] = []
        self._switch = ExitStack()
        self._memory = PeakMemory()
        self._loss = module.loss
        module.loss = self._timed_loss  # type: ignore[assignment]

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._begin()

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, batch: Any, _: int) -> None:
        self.batch = batch
        self._mark()

    def on_after_backward(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._mark()

    def on_train_batch_end(self, *_: Any) -> None:
        self._mark(last=True)
        self._switch.close()
        self._peaks_mib.append(self._memory.read())
        self._begin()

    def on_train_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        self._switch.close()
        self._marks.pop()
        pl_module.loss = self._loss

    def rows(self) -> list[Row]:
        """Median times with reference operators, then with fast ones; each part's in ``more``."""
        result = []
        for name in ("reference", "fast"):
            steps = self._steps_of(name, split=not self.on_cuda)
            marks = 1e3 * np.array(self._marks[steps])
            ms, cpu_ms = np.median(marks[:, -1] - marks[:, 0], axis=0).tolist()
            peak_mib = max((p for p in self._peaks_mib[steps] if p is not None), default=None)
            split = 1e3 * np.array(self._marks[self._steps_of(name, split=True)])
            parts = np.median(np.diff(split[..., 0], axis=1), axis=0).tolist()
            row = Row(name, "step", ms, None if self.on_cuda else cpu_ms, peak_mib=peak_mib)
            row.more.update({f"{part}_ms": t for part, t in zip(PARTS, parts, strict=True)})
            result.append(row)
        return result

    def _steps_of(self, name: str, split: bool) -> slice:
        """The steps of a kind except its first, which is a warm-up."""
        return slice(self.kinds.index((name, split)) + self.num_kinds, None, self.num_kinds)

    def _begin(self) -> None:
        name, self._splits = self.kinds[len(self._marks) % self.num_kinds]
        self._marks.append([])
        self._memory.reset()
        if name == "reference":
            self._switch.enter_context(use_reference())
        self._mark(last=True)

    def _timed_loss(self, predictions: Any, targets: Any) -> Any:
        self._mark()
        terms = self._loss(predictions, targets)
        self._mark()
        return terms

    def _mark(self, last: bool = False) -> None:
        if self.on_cuda and (last or self._splits):
            torch.cuda.synchronize()
        self._marks[-1].append((time.perf_counter(), time.process_time()))
