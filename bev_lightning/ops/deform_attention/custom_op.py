"""The ``torch.library`` operators of deformable attention and their gradients."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from bev_lightning.ops.backend import accumulation_dtype, choose_backend


@torch.library.custom_op("bev_lightning::deform_attention", mutates_args=())
def attend(
    value: Tensor,
    sizes: Sequence[int],
    locations: Tensor,
    weights: Tensor,
    anchors: Tensor,
    seen: Tensor,
) -> Tensor:
    """``(B, Q, H * D)``; ``sizes`` are height and width of each level in turn."""
    inputs = _widen(value, locations, weights, anchors)
    if choose_backend(value.device) == "triton":
        from bev_lightning.ops.deform_attention import triton

        return triton.attend(value.contiguous(), sizes, *inputs[1:], seen.contiguous())
    from bev_lightning.ops.deform_attention import cpu

    return cpu.attend(inputs[0], sizes, *inputs[1:], seen.contiguous()).to(value.dtype)


@attend.register_fake
def _(
    value: Tensor,
    sizes: Sequence[int],
    locations: Tensor,
    weights: Tensor,
    anchors: Tensor,
    seen: Tensor,
) -> Tensor:
    return value.new_empty(weights.shape[0], weights.shape[1], value.shape[2] * value.shape[3])


@torch.library.custom_op("bev_lightning::deform_attention_backward", mutates_args=())
def _attend_backward(
    grad: Tensor,
    value: Tensor,
    sizes: Sequence[int],
    locations: Tensor,
    weights: Tensor,
    anchors: Tensor,
    seen: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    inputs = _widen(value, locations, weights, anchors)
    grad = grad.reshape(*grad.shape[:2], *value.shape[2:]).contiguous()
    if choose_backend(value.device) == "triton":
        from bev_lightning.ops.deform_attention import triton

        results = triton.attend_backward(
            grad, value.contiguous(), sizes, *inputs[1:], seen.contiguous()
        )
    else:
        from bev_lightning.ops.deform_attention import cpu

        results = cpu.attend_backward(
            grad.to(inputs[0].dtype), inputs[0], sizes, *inputs[1:], seen.contiguous()
        )
    grad_value, grad_locations, grad_weights = results
    return (
        grad_value.to(value.dtype),
        grad_locations.to(locations.dtype),
        grad_weights.to(weights.dtype),
    )


@_attend_backward.register_fake
def _(
    grad: Tensor,
    value: Tensor,
    sizes: Sequence[int],
    locations: Tensor,
    weights: Tensor,
    anchors: Tensor,
    seen: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    return (
        value.new_empty(value.shape),
        locations.new_empty(locations.shape),
        weights.new_empty(weights.shape),
    )


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.sizes = inputs[1]
    ctx.save_for_backward(inputs[0], *inputs[2:])


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    value, *others = ctx.saved_tensors
    grads = _attend_backward(grad, value, ctx.sizes, *others)
    return grads[0], None, grads[1], grads[2], None, None


attend.register_autograd(_backward, setup_context=_setup_context)


def _widen(
    value: Tensor, locations: Tensor, weights: Tensor, anchors: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The inputs contiguous and in the accumulation dtype; Triton reads ``value`` as it is."""
    dtype = accumulation_dtype(value)
    return (
        value if choose_backend(value.device) == "triton" else value.to(dtype).contiguous(),
        locations.to(dtype).contiguous(),
        weights.to(dtype).contiguous(),
        anchors.to(dtype).contiguous(),
    )
