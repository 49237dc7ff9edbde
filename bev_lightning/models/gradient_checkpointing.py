"""Gradient checkpointing of one block."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from bev_lightning.private_apis import _BatchNorm


def checkpoint_block(block: nn.Module, x: Tensor) -> Tensor:
    """Run a block and store only its input; works under DDP (non-reentrant).

    The block runs again in the backward pass, where batch norms must not update their running
    statistics a second time.
    """

    def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return nullcontext(), _keep_statistics(block)

    function: Callable[..., Tensor] = checkpoint
    return function(block, x, use_reentrant=False, context_fn=contexts)


@contextmanager
def _keep_statistics(block: nn.Module) -> Iterator[None]:
    norms = [m for m in block.modules() if isinstance(m, _BatchNorm)]
    saved = [norm.momentum for norm in norms]
    counts = [n.num_batches_tracked for n in norms if n.num_batches_tracked is not None]
    before = [count.clone() for count in counts]
    for norm in norms:
        norm.momentum = 0.0
    try:
        yield
    finally:
        for norm, momentum in zip(norms, saved, strict=True):
            norm.momentum = momentum
        for count, value in zip(counts, before, strict=True):
            count.copy_(value)
