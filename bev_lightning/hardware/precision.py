"""Lightning precision plugins for float16 (also on a CPU) and FP8, and the TF32 switch."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any, Literal

import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn

from bev_lightning.hardware.flops import FlopCounter

# FP8 matrix products need both sides of a weight to be a multiple of it.
FP8_MULTIPLE = 16


def set_tf32(allowed: bool) -> None:
    """Allow or forbid TF32 in float32 matrix products and convolutions on CUDA.

    TF32 rounds their inputs to 10 bits of mantissa (compute capability 8.0 and up). Geometry is not
    affected: :func:`bev_lightning.structures.geometry.apply_transform` uses no matrix product.
    """
    torch.set_float32_matmul_precision("high" if allowed else "highest")
    torch.backends.cudnn.allow_tf32 = allowed


class LossScaler(torch.amp.GradScaler):
    """torch's GradScaler with a count of skipped steps and an optional static scale.

    Args:
        device: ``cuda`` or ``cpu``.
        static_scale: constant scale; None starts at 4096, halves the scale at an overflow and
            doubles it after 2000 steps without one. (With torch's default start of 65536, detectors
            skip their first steps.)

    Attributes:
        num_skipped: optimizer steps skipped because a gradient was infinite or NaN.
    """

    def __init__(self, device: str, static_scale: float | None = None) -> None:
        super().__init__(device, init_scale=4096.0 if static_scale is None else static_scale)
        self.static_scale = static_scale
        self.num_skipped = 0

    def update(self, new_scale: float | Tensor | None = None) -> None:
        # The scaler's step has already copied these flags to the host.
        states = self._per_optimizer_states.values()
        self.num_skipped += any(any(s["found_inf_per_device"].values()) for s in states)
        super().update(self.static_scale if new_scale is None else new_scale)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "num_skipped": self.num_skipped}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.num_skipped = int(state_dict.get("num_skipped", 0))
        if self.static_scale is not None:
            state_dict = {**state_dict, "scale": self.static_scale}
        super().load_state_dict(state_dict)


class Float16(MixedPrecision):
    """float16 autocast with loss scaling, on CUDA and, for tests, on a CPU.

    On a CPU, Lightning's ``16-mixed`` silently runs bfloat16.

    Args:
        device: ``cuda`` or ``cpu``.
        loss_scale: ``dynamic``, or a constant such as 512.
    """

    scaler: LossScaler

    def __init__(self, device: str, loss_scale: float | Literal["dynamic"] = "dynamic") -> None:
        static = None if loss_scale == "dynamic" else float(loss_scale)
        super().__init__("16-mixed", device, LossScaler(device, static))
        if device == "cpu":
            rank_zero_warn(
                "precision=16 on a CPU is for tests: its convolutions are tens of times slower "
                "than with precision=32"
            )


class Float8(MixedPrecision):
    """FP8 matrix products in Linear layers (torchao), bfloat16 autocast for the rest.

    Converts the Linear layers for which :func:`fits_fp8` holds. On a CPU the rest runs in float32,
    because its bfloat16 convolutions are slow. Weights stay float32 parameters with the same
    names: inputs, weights and gradients are rounded to 8 bits before each product. Layers inside
    ``nn.MultiheadAttention`` are not converted, because it uses their weights without calling them.

    Args:
        device: ``cuda`` or ``cpu``.
        recipe: one scale per tensor, or one per row (more accurate and slower).
        emulate: round to 8 bits but multiply in the wider type, which runs on any device.

    Attributes:
        num_converted: Linear layers in FP8.
        num_linears: all Linear layers.
        flop_share: share of a forward pass's FLOPs in FP8, 0..1; None before the first training
            step. Counts matrix products, convolutions and attention.
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
        """Convert the layers in place; converting twice changes nothing more."""
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
        from torchao.float8.float8_linear import Float8Linear

        # The weight gradient is a product over all tokens, of any number: pad it.
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
            # Row-wise scaling needs contiguous rows.
            for layer in self._converted:
                layer.register_forward_pre_hook(_make_contiguous)
            self._hooked = True
        return module

    @contextmanager
    def forward_context(self) -> Iterator[None]:
        with nullcontext() if self.device == "cpu" else super().forward_context():
            yield

    @contextmanager
    def train_step_context(self) -> Iterator[None]:
        """Autocast as in every step; the first step also counts FLOPs."""
        with super().train_step_context():
            if self.flop_share is not None:
                yield
                return
            with _Float8FlopCounter(self._converted) as counter:
                yield
            self.flop_share = counter.fp8 / max(1.0, counter.total)

    def describe(self) -> str:
        """The FP8 coverage in one line."""
        share = "" if self.flop_share is None else f", {self.flop_share:.1%} of the forward FLOPs"
        how = "emulated" if self.emulate else self.recipe
        return f"FP8 ({how}): {self.num_converted} of {self.num_linears} Linear layers{share}"


def fits_fp8(module: nn.Module, name: str) -> bool:
    """Whether to convert a layer: a plain ``nn.Linear`` whose sizes FP8 hardware supports.

    Subclasses are excluded: ``nn.MultiheadAttention`` uses the weight of one without calling it.
    """
    return (
        type(module) is nn.Linear
        and module.in_features % FP8_MULTIPLE == 0
        and module.out_features % FP8_MULTIPLE == 0
    )


def _make_contiguous(layer: nn.Module, inputs: tuple[Tensor]) -> tuple[Tensor]:
    return (inputs[0].contiguous(),)


class _Float8FlopCounter(FlopCounter):
    """Counts FLOPs in total and in the converted layers.

    Attributes:
        fp8: FLOPs of the ``converted`` layers.
    """

    def __init__(self, converted: list[nn.Module]) -> None:
        super().__init__()
        self.fp8 = 0.0
        self._before = 0.0
        self._hooks = [layer.register_forward_pre_hook(self._enter) for layer in converted]
        self._hooks += [layer.register_forward_hook(self._leave) for layer in converted]

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        for hook in self._hooks:
            hook.remove()

    def _enter(self, layer: nn.Module, inputs: Any) -> None:
        self._before = self.total

    def _leave(self, layer: nn.Module, inputs: Any, output: Tensor) -> None:
        # Count the layer as one product, whatever operators the 8-bit product consists of.
        own = 2.0 * output.numel() * inputs[0].shape[-1]
        self.total, self.fp8 = self._before + own, self.fp8 + own
