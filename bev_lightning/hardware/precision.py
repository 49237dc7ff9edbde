"""Float16 and FP8 for Lightning's Trainer, where its own plugins fall short, and TF32."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal

import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

# What the products of FP8 hardware ask of both sides of a weight.
FP8_MULTIPLE = 16


def set_tf32(allowed: bool) -> None:
    """Let float32 products and convolutions of CUDA cards round their inputs to TF32 (10 bits of
    mantissa, capability 8.0 and up), or keep them from it. Geometry never takes part: its products
    are sums of elements (:func:`bev_lightning.structures.geometry.apply_transform`)."""
    torch.set_float32_matmul_precision("high" if allowed else "highest")
    torch.backends.cudnn.allow_tf32 = allowed


class LossScaler(torch.amp.GradScaler):
    """Torch's scaler, which also counts the steps it skips and may hold its scale.

    Args:
        device: ``cuda`` or ``cpu``.
        static_scale: the scale of all steps; None starts at 4096, halves it at an overflow and
            doubles it after 2000 steps without one. (From torch's own start, 65536, detectors lose
            their first steps.)

    Attributes:
        num_skipped: optimizer steps left out because a gradient was infinite or NaN.
    """

    def __init__(self, device: str, static_scale: float | None = None) -> None:
        super().__init__(device, init_scale=4096.0 if static_scale is None else static_scale)
        self.static_scale = static_scale
        self.num_skipped = 0

    def update(self, new_scale: float | Tensor | None = None) -> None:
        found = [
            flag
            for state in self._per_optimizer_states.values()
            for flag in state["found_inf_per_device"].values()
        ]
        # The scaler's own step has waited for these flags already.
        self.num_skipped += int(any(float(flag) for flag in found))
        super().update(self.static_scale if new_scale is None else new_scale)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "num_skipped": self.num_skipped}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.num_skipped = int(state_dict.get("num_skipped", 0))
        if self.static_scale is not None:
            state_dict = {**state_dict, "scale": self.static_scale}
        super().load_state_dict(state_dict)


class Float16(MixedPrecision):
    """float16 under autocast with a loss scale, on CUDA and, for tests, on a CPU, where Lightning's
    own ``16-mixed`` silently runs bfloat16.

    Args:
        device: ``cuda`` or ``cpu``.
        loss_scale: ``dynamic``, or the scale of all steps, such as 512.
    """

    scaler: LossScaler

    def __init__(self, device: str, loss_scale: float | Literal["dynamic"] = "dynamic") -> None:
        static = None if loss_scale == "dynamic" else float(loss_scale)
        super().__init__("16-mixed", device, LossScaler(device, static))
        if device == "cpu":
            rank_zero_warn(
                "precision=16 on a CPU is for tests: its convolutions are tens of times slower "
                "than those of precision=32"
            )


class Float8(MixedPrecision):
    """FP8 products in the Linear layers whose sizes allow it (torchao); around them bfloat16 under
    autocast on CUDA, float32 on a CPU, whose bfloat16 convolutions are slow.

    Weights stay float32 parameters under their names: inputs, weights and gradients are rounded to
    8 bits on the way into each product. Layers inside ``nn.MultiheadAttention`` are left alone, for
    it reads their weights without calling them.

    Args:
        device: ``cuda`` or ``cpu``.
        recipe: one scale for a whole tensor, or one for each row: finer and slower.
        emulate: round to 8 bits but multiply in the wider type, which runs anywhere.

    Attributes:
        num_converted, num_linears: layers in FP8, and all Linear layers.
        flop_share: share of the FLOPs of a forward pass that run in FP8, 0..1; None before the
            first training step. Of operators that torch's counter knows: products, convolutions and
            attention.
    """

    def __init__(
        self,
        device: str,
        recipe: Literal["tensorwise", "rowwise"] = "tensorwise",
        emulate: bool = False,
    ) -> None:
        super().__init__("bf16-mixed", device)
        self.recipe, self.emulate = recipe, emulate
        self.num_converted = self.num_linears = 0
        self.flop_share: float | None = None
        self._converted: list[nn.Module] = []
        self._hooked = False

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Exchange the layers in place. A second call finds nothing left to exchange."""
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
        from torchao.float8.float8_linear import Float8Linear

        # The gradient of a weight is a product over all tokens, whose number is arbitrary: padded.
        config = replace(
            Float8LinearConfig.from_recipe_name(self.recipe),
            emulate=self.emulate,
            pad_inner_dim=True,
        )
        convert_to_float8_training(module, module_filter_fn=fits_fp8, config=config)
        linears = [part for part in module.modules() if isinstance(part, nn.Linear)]
        self._converted = [part for part in linears if isinstance(part, Float8Linear)]
        self.num_linears, self.num_converted = len(linears), len(self._converted)
        if not self._converted:
            rank_zero_warn(
                "precision=fp8 finds no Linear layer in this model whose sizes are multiples of "
                f"{FP8_MULTIPLE}: nothing runs in FP8; use precision=bf16"
            )
        if self.recipe == "rowwise" and not self._hooked:
            # A scale for each row knows rows in their order alone.
            for layer in self._converted:
                layer.register_forward_pre_hook(_straighten)
            self._hooked = True
        return module

    @contextmanager
    def forward_context(self) -> Iterator[None]:
        if self.device == "cpu":
            yield
            return
        with super().forward_context():
            yield

    @contextmanager
    def train_step_context(self) -> Iterator[None]:
        """As everywhere; the first step also counts FLOPs."""
        with super().train_step_context():
            if self.flop_share is not None:
                yield
                return
            with _FlopCounter(self._converted) as counter:
                yield
            self.flop_share = counter.fp8 / max(1.0, counter.all)

    def describe(self) -> str:
        """What runs in FP8, in one line."""
        share = "" if self.flop_share is None else f", {self.flop_share:.1%} of the forward FLOPs"
        how = "emulated" if self.emulate else self.recipe
        return f"FP8 ({how}): {self.num_converted} of {self.num_linears} Linear layers{share}"


def fits_fp8(module: nn.Module, name: str) -> bool:
    """Whether FP8 hardware can multiply with a layer; a subclass may be called by nobody."""
    return (
        type(module) is nn.Linear
        and module.in_features % FP8_MULTIPLE == 0
        and module.out_features % FP8_MULTIPLE == 0
    )


def _straighten(layer: nn.Module, inputs: tuple[Tensor]) -> tuple[Tensor]:
    return (inputs[0].contiguous(),)


class _FlopCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """FLOPs of all operators that torch knows a formula for, inside of its block. (Torch's own
    counter follows modules too, and stumbles over those called without gradient.)

    Attributes:
        all, fp8: the sum, and what of it ran in the ``converted`` layers.
    """

    def __init__(self, converted: list[nn.Module]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.all = self.fp8 = 0.0
        self._before = 0.0
        self._hooks = [layer.register_forward_pre_hook(self._enter) for layer in converted]
        self._hooks += [layer.register_forward_hook(self._leave) for layer in converted]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        formula = flop_registry.get(func._overloadpacket)
        if formula is not None:
            self.all += formula(*args, **(kwargs or {}), out_val=result)
        return result

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        for hook in self._hooks:
            hook.remove()

    def _enter(self, layer: nn.Module, inputs: Any) -> None:
        self._before = self.all

    def _leave(self, layer: nn.Module, inputs: Any, output: Tensor) -> None:
        # Whatever the product of 8-bit tensors consists of, it counts once.
        own = 2.0 * output.numel() * inputs[0].shape[-1]
        self.all, self.fp8 = self._before + own, self.fp8 + own
