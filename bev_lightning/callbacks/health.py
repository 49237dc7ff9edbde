"""Stops a training that has gone wrong, and says where."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor

from bev_lightning.errors import InputError


class FiniteLoss(L.Callback):
    """Stop with the loss term, the step and the samples where a loss is NaN or infinite.

    A step's flags are read when the next step has been queued, so that the check never makes the
    host wait for the device; it is at most one step late.

    Attributes:
        sample_tokens: of the batch at work.
        validates: it is one of a validation.
    """

    def __init__(self) -> None:
        self.sample_tokens: tuple[str, ...] = ()
        self.validates = False
        self._pending: tuple[int, tuple[str, ...], tuple[str, ...], Tensor] | None = None
        self._arrived: torch.cuda.Event | None = None

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self.sample_tokens, self.validates = batch.sample_tokens, False

    def on_validation_batch_start(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        self.sample_tokens, self.validates = batch.sample_tokens, True

    def on_train_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        self._check()
        terms: dict[str, Tensor] = outputs["terms"]
        finite = torch.isfinite(torch.stack([value.float() for value in terms.values()]))
        flags = finite.to("cpu", non_blocking=True)
        self._pending = (batch_idx, outputs["sample_tokens"], tuple(terms), flags)
        if not finite.is_cuda:
            self._check()
            return
        self._arrived = torch.cuda.Event()
        self._arrived.record()

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._check()

    def _check(self) -> None:
        if self._pending is None:
            return
        batch_idx, tokens, names, flags = self._pending
        self._pending = None
        if self._arrived is not None:
            # Nothing else promises it: a step need not wait for the device anywhere.
            self._arrived.synchronize()
        broken = [name for name, finite in zip(names, flags.tolist(), strict=True) if not finite]
        if broken:
            raise InputError(
                f"the loss {' and '.join(broken)} is not finite at micro-step {batch_idx} "
                f"(samples {', '.join(tokens)}); lower optim.lr, set trainer.gradient_clip_val, or "
                "use precision=32 to see whether the precision is to blame"
            )


@dataclass(frozen=True)
class MemoryUse:
    """What a process held at its worst so far, by kind [GiB]. On CUDA that of torch's allocator, on
    a CPU the process's, which includes the program itself.

    Attributes:
        parameters, gradients, optimizer: of the module and its optimizers.
        rest: activations and, on a CPU, data and program; None where the peak is not known.
    """

    parameters: float
    gradients: float
    optimizer: float
    rest: float | None

    @classmethod
    def measure(
        cls, module: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer]
    ) -> "MemoryUse":
        own = list(module.parameters())
        states = [
            value
            for optimizer in optimizers
            for state in optimizer.state.values()
            for value in state.values()
            if isinstance(value, Tensor)
        ]
        kinds = (own, [p.grad for p in own if p.grad is not None], states)
        sizes = [sum(v.numel() * v.element_size() for v in kind) / 2**30 for kind in kinds]
        peak = measure_peak_mib()
        rest = None if peak is None else max(0.0, peak / 1024 - sum(sizes))
        return cls(sizes[0], sizes[1], sizes[2], rest)

    def __str__(self) -> str:
        said = (
            f"parameters {self.parameters:.2f}, gradients {self.gradients:.2f}, optimizer "
            f"{self.optimizer:.2f}"
        )
        return said if self.rest is None else f"{said}, activations and the rest {self.rest:.2f}"


def measure_peak_mib() -> float | None:
    """The most memory that this process has held so far [MiB]: on CUDA in torch's allocator, else
    resident; None where the system does not say."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**20
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM:")), None)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether torch found no memory, on a device or on the host."""
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or (
        isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
    )


def explain_memory(
    reason: str,
    memory: MemoryUse,
    sample_tokens: Sequence[str],
    validates: bool = False,
) -> str:
    """One sentence for a step that did not fit into the memory of its device.

    Args:
        reason: what torch says.
        memory: of the process.
        sample_tokens: of the step, where they are known.
        validates: it is a step of a validation.
    """
    mends = [
        "set gradient_checkpointing=true on the model's backbone or encoder",
        "use precision=bf16",
    ]
    if validates:
        mends = ["lower data.val_batch_size", mends[1]]
    elif len(sample_tokens) != 1:
        mends.insert(
            0,
            "use auto_batch=true, which lowers data.batch_size and raises the accumulation to keep "
            "the effective batch",
        )
    of = f" at the samples {', '.join(sample_tokens)}" if sample_tokens else ""
    first = reason.strip().splitlines()[0] if reason.strip() else "no size given"
    # Torch goes on about its allocator.
    said = ". ".join(first.split(". ")[:2]).rstrip(".")
    return f"the device ran out of memory{of} ({said}; in GiB: {memory}); {', then '.join(mends)}"


class SameWeights(L.Callback):
    """Stop at the end of a training whose processes do not hold the same weights, to the last bit.

    Parameters are compared. Buffers are not: between two steps each process has batch-norm
    statistics of its own, of which validations and checkpoints take those of the first.
    """

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not isinstance(trainer.strategy, DDPStrategy) or trainer.world_size == 1:
            return  # other strategies split the weights
        weights = torch.nn.utils.parameters_to_vector(pl_module.parameters()).detach()
        first = trainer.strategy.broadcast(weights.cpu(), src=0)
        own = (weights.cpu() != first).sum()
        # Of all processes, so that all of them stop.
        differ = int(trainer.strategy.reduce(own.to(pl_module.device), reduce_op="max"))
        if differ:
            raise RuntimeError(
                f"up to {differ} of {weights.numel()} weights of a process differ from those of "
                "process 0, so the processes trained different models; keep what changes weights "
                "outside of the optimizer (a callback, a hook) the same on all processes, and "
                "train again from the last checkpoint: it holds process 0's"
            )
        if trainer.is_global_zero:
            print(f"The weights of all {trainer.world_size} processes are equal.")
