"""Counts the FLOPs of a block of code."""

from typing import Any

from torch.utils.flop_counter import flop_registry

from bev_lightning.private_apis import TorchDispatchMode


class FlopCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Dispatch mode that counts the FLOPs of all operators with a formula in torch's registry.

    torch's FlopCounterMode also tracks modules, and fails on modules called without gradient.

    Attributes:
        total: FLOPs so far.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.total = 0.0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        formula = flop_registry.get(func._overloadpacket)
        if formula is not None:
            self.total += formula(*args, **(kwargs or {}), out_val=result)
        return result
