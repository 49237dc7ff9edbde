"""Recognises and explains a step that ran out of memory."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor


@dataclass(frozen=True)
class MemoryUse:
    """Peak memory of this process so far, by kind [GiB].

    On CUDA that of torch's allocator, on a CPU the resident memory of the whole process.

    Attributes:
        parameters, gradients, optimizer: of the module and its optimizers.
        rest: activations and, on a CPU, data and program; None if the peak is unknown.
    """

    parameters: float
    gradients: float
    optimizer: float
    rest: float | None

    @classmethod
    def measure(
        cls, module: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer]
    ) -> "MemoryUse":
        own: list[Tensor] = list(module.parameters())
        values = (v for o in optimizers for state in o.state.values() for v in state.values())
        states = [value for value in values if isinstance(value, Tensor)]
        kinds = (own, [p.grad for p in own if p.grad is not None], states)
        sizes = [sum(value.nbytes for value in kind) / 2**30 for kind in kinds]
        peak = measure_peak_mib()
        rest = None if peak is None else max(0.0, peak / 1024 - sum(sizes))
        return cls(sizes[0], sizes[1], sizes[2], rest)

    def __str__(self) -> str:
        text = (
            f"parameters {self.parameters:.2f}, gradients {self.gradients:.2f}, optimizer "
            f"{self.optimizer:.2f}"
        )
        return text if self.rest is None else f"{text}, activations and the rest {self.rest:.2f}"


def measure_peak_mib() -> float | None:
    """Peak memory of this process so far [MiB]: on CUDA in torch's allocator, else resident; None
    if the system does not report it."""
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
    reason: str, memory: MemoryUse, sample_tokens: Sequence[str], validates: bool = False
) -> str:
    """One sentence for a step that did not fit into the memory of its device.

    Args:
        reason: torch's message.
        memory: of the process.
        sample_tokens: of the step, if they are known.
        validates: whether it is a validation step.
    """
    fixes = ["use precision=bf16"]
    if validates:
        fixes.insert(0, "lower data.val_batch_size")
    else:
        fixes.insert(0, "set gradient_checkpointing=true on the model's backbone or encoder")
        if len(sample_tokens) != 1:
            lower = "use auto_batch=true, which lowers data.batch_size and raises the accumulation"
            fixes.insert(0, f"{lower} to keep the effective batch")
    of = f" at the samples {', '.join(sample_tokens)}" if sample_tokens else ""
    first = reason.strip().splitlines()[0] if reason.strip() else "no size given"
    # Torch's later sentences are about its allocator.
    short = ". ".join(first.split(". ")[:2]).rstrip(".")
    return f"the device ran out of memory{of} ({short}; in GiB: {memory}); {', then '.join(fixes)}"
