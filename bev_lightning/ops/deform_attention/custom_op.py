"""The ``torch.library`` operators of deformable attention and their gradients."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from bev_lightning.ops.backend import accumulation_dtype, load_kernels


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
    out: Tensor = load_kernels(__package__, value.device).attend(sizes, *inputs, seen.contiguous())
    return out.to(value.dtype)


@attend.register_fake
def _(value: Tensor, sizes: Any, locations: Tensor, weights: Tensor, *_: Any) -> Tensor:
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
    kernels = load_kernels(__package__, value.device)
    grads = kernels.attend_backward(sizes, grad, *inputs, seen.contiguous())
    return grads[0].to(value.dtype), grads[1].to(locations.dtype), grads[2].to(weights.dtype)


@_attend_backward.register_fake
def _(
    grad: Tensor, value: Tensor, sizes: Any, locations: Tensor, weights: Tensor, *_: Any
) -> tuple[Tensor, ...]:
    return tuple(given.new_empty(given.shape) for given in (value, locations, weights))


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.sizes = inputs[1]
    ctx.save_for_backward(inputs[0], *inputs[2:])


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    value, *others = ctx.saved_tensors
    grads = _attend_backward(grad, value, ctx.sizes, *others)
    return grads[0], None, grads[1], grads[2], None, None


attend.register_autograd(_backward, setup_context=_setup_context)


def _widen(value: Tensor, *others: Tensor) -> list[Tensor]:
    """The inputs contiguous, all but ``value`` in the accumulation dtype."""
    dtype = accumulation_dtype(value)
    return [value.contiguous(), *(other.to(dtype).contiguous() for other in others)]
