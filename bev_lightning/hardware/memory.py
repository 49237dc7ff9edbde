"""Peak memory of a training step, by kind, without the memory: shapes alone decide it."""

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

KINDS = ("parameters", "gradients", "optimizer", "activations", "temporaries")
_MIB = 2**20


@dataclass(frozen=True)
class Peak:
    """Memory at the moment when a step takes most of it [MiB].

    Attributes:
        parameters: with buffers.
        gradients: of the parameters.
        optimizer: what it remembers of each parameter.
        activations: what the forward pass made and the backward pass has not freed, the batch
            included.
        temporaries: what the backward pass and the optimizer made for themselves.
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
    """Follows every storage from the operator that makes it until it is freed.

    ``torch.distributed._tools.MemTracker`` does so too, with a statistic for each module: for the
    published models, with their thousands of modules, it takes minutes.

    Use as a context around the step; fake tensors are as good as real ones.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.current = dict.fromkeys(KINDS, 0)
        self.peak = dict(self.current)
        self._peak_total = 0
        self._kind_of: dict[int, str] = {}
        self._new = "activations"

    def hold(self, kind: str, tensors: Iterable[Tensor]) -> None:
        """Count tensors under a kind; those known under another one change to it."""
        for tensor in tensors:
            self._count(tensor, kind, moves=True)
        self._note_peak()

    @contextmanager
    def making(self, kind: str) -> Iterator[None]:
        """What is made inside counts under a kind."""
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
        self._note_peak()
        return result

    def _count(self, tensor: Tensor, kind: str, moves: bool = False) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
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

    def _note_peak(self) -> None:
        total = sum(self.current.values())
        if total > self._peak_total:
            self._peak_total, self.peak = total, dict(self.current)


def measure_step(
    module: nn.Module,
    make_optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer],
    batch_tensors: Iterable[Tensor],
    loss: Callable[[], Tensor],
) -> Peak:
    """Peak of one optimizer step when the optimizer has its memory already.

    Args:
        make_optimizer: of the parameters that are trained.
        batch_tensors: what the batch holds.
        loss: the forward pass.
    """
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    optimizer = make_optimizer(trained)
    for parameter in trained:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()  # makes what it remembers
    optimizer.zero_grad(set_to_none=True)
    tracker = StorageTracker()
    tracker.hold("parameters", [*module.parameters(), *module.buffers()])
    states = optimizer.state.values()
    tracker.hold("optimizer", (v for state in states for v in state.values() if torch.is_tensor(v)))
    tracker.hold("activations", batch_tensors)
    hooks = [
        parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
            lambda parameter: tracker.hold("gradients", [parameter.grad])
        )
        for parameter in trained
    ]
    with tracker:
        total = loss()
        with tracker.making("temporaries"):
            total.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    for hook in hooks:
        hook.remove()
    return Peak(**{kind: tracker.peak[kind] / _MIB for kind in KINDS})
