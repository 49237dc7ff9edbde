"""Measures the peak memory of a training step by kind, on real or fake tensors."""

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from bev_lightning.private_apis import TorchDispatchMode, storage_key, tree_iter

KINDS = ("parameters", "gradients", "optimizer", "activations", "temporaries")
_MIB = 2**20


@dataclass(frozen=True)
class Peak:
    """Memory by kind at the moment of a step's peak [MiB].

    Attributes:
        parameters: parameters and buffers.
        gradients: gradients of the parameters.
        optimizer: optimizer state.
        activations: tensors of the forward pass that the backward pass has not freed, and the
            batch.
        temporaries: other tensors made by the backward pass and the optimizer.
    """

    parameters: float
    gradients: float
    optimizer: float
    activations: float
    temporaries: float

    @property
    def total(self) -> float:
        return float(sum(getattr(self, kind) for kind in KINDS))

    def to_json(self) -> dict[str, float]:
        return {kind: round(getattr(self, kind), 1) for kind in (*KINDS, "total")}


class StorageTracker(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Dispatch mode that tracks every storage from its creation until it is freed.

    Use it as a context manager around a step, with real or fake tensors.
    ``torch.distributed._tools.MemTracker`` also keeps statistics per module, which takes minutes
    for the published models with their thousands of modules.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.current = dict.fromkeys(KINDS, 0)
        self.peak = dict(self.current)
        self._peak_total = 0
        self._kind_of: dict[int, str] = {}
        self._new = "activations"

    def track(self, kind: str, tensors: Iterable[Tensor]) -> None:
        """Count tensors under a kind; tensors already counted under another kind move to it."""
        for tensor in tensors:
            self._count(tensor, kind, moves=True)
        self._update_peak()

    @contextmanager
    def attribute_new(self, kind: str) -> Iterator[None]:
        """Count tensors created inside under a kind."""
        before, self._new = self._new, kind
        try:
            yield
        finally:
            self._new = before

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in tree_iter(result):
            if isinstance(value, Tensor):
                self._count(value, self._new)
        self._update_peak()
        return result

    def _count(self, tensor: Tensor, kind: str, moves: bool = False) -> None:
        storage = tensor.untyped_storage()
        key = storage_key(storage)
        known = self._kind_of.get(key)
        if known is None:
            self._kind_of[key] = kind
            self.current[kind] += storage.nbytes()
            weakref.finalize(storage, self._free, key, storage.nbytes())
        elif moves and known != kind:
            self._kind_of[key] = kind
            self.current[known] -= storage.nbytes()
            self.current[kind] += storage.nbytes()

    def _free(self, key: int, num_bytes: int) -> None:
        self.current[self._kind_of.pop(key)] -= num_bytes

    def _update_peak(self) -> None:
        total = sum(self.current.values())
        if total > self._peak_total:
            self._peak_total, self.peak = total, dict(self.current)


def measure_step(
    module: nn.Module,
    make_optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer],
    batch_tensors: Iterable[Tensor],
    loss: Callable[[], Tensor],
) -> Peak:
    """Peak memory of one optimizer step, after the optimizer has allocated its state.

    Args:
        module: whose parameters are trained.
        make_optimizer: builds the optimizer from the trainable parameters.
        batch_tensors: tensors of the batch.
        loss: runs the forward pass and returns the scalar loss.
    """
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    optimizer = make_optimizer(trained)
    for parameter in trained:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()  # allocates the optimizer state
    optimizer.zero_grad(set_to_none=True)
    tracker = StorageTracker()
    tracker.track("parameters", [*module.parameters(), *module.buffers()])
    states = optimizer.state.values()
    tracker.track(
        "optimizer", (v for state in states for v in state.values() if torch.is_tensor(v))
    )
    tracker.track("activations", batch_tensors)
    hooks = [
        parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
            lambda parameter: tracker.track("gradients", [parameter.grad])
        )
        for parameter in trained
    ]
    with tracker:
        total = loss()
        with tracker.attribute_new("temporaries"):
            total.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    for hook in hooks:
        hook.remove()
    return Peak(**{kind: tracker.peak[kind] / _MIB for kind in KINDS})
