"""The ``torch.library`` operators of attention on a CPU, with gradients and FLOP counts."""

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula


@torch.library.custom_op("bev_lightning::attention", mutates_args=())
def attend(query: Tensor, key: Tensor, value: Tensor, dropout: float, seed: Tensor) -> Tensor:
    """Attention ``(B, H, Q, E)``; the dropout mask is a function of ``seed`` ``(1,)`` int64."""
    from bev_lightning.ops.attention import cpu

    out = cpu.attend(*_merge_heads(query, key, value), dropout=dropout, seed=int(seed))
    return out.view(*query.shape[:3], value.shape[3]).to(query.dtype)


@attend.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, dropout: float, seed: Tensor) -> Tensor:
    return query.new_empty(*query.shape[:3], value.shape[3])


@torch.library.custom_op("bev_lightning::attention_backward", mutates_args=())
def _attend_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    dropout: float,
    seed: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    from bev_lightning.ops.attention import cpu

    inputs = query, key, value
    merged = _merge_heads(grad, *inputs, out)
    grads = cpu.attend_backward(*merged, dropout=dropout, seed=int(seed))
    grad_query, grad_key, grad_value = (
        one.view(given.shape).to(given.dtype) for one, given in zip(grads, inputs, strict=True)
    )
    return grad_query, grad_key, grad_value


@_attend_backward.register_fake
def _(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    query, key, value, ctx.dropout, seed = inputs
    ctx.save_for_backward(query, key, value, output, seed)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    query, key, value, out, seed = ctx.saved_tensors
    grads = _attend_backward(grad, query, key, value, out, ctx.dropout, seed)
    return *grads, None, None


attend.register_autograd(_backward, setup_context=_setup_context)


@register_flop_formula(torch.ops.bev_lightning.attention)
def _count_flops(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    batch, heads, queries, channels = query
    return 2 * int(batch * heads * queries * key[2] * (channels + value[3]))


@register_flop_formula(torch.ops.bev_lightning.attention_backward)
def _count_backward_flops(grad: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    return 2 * _count_flops(query, key, value)  # as PyTorch counts it: without recomputation


def _merge_heads(*tensors: Tensor) -> list[Tensor]:
    """``(B, H, N, D)`` as contiguous ``(B * H, N, D)``, at least float32."""
    dtype = torch.promote_types(tensors[0].dtype, torch.float32)
    return [tensor.to(dtype).contiguous().flatten(0, 1) for tensor in tensors]
