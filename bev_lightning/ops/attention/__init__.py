"""Attention with dropout of its weights (Vaswani et al. 2017, section 3.2.1)."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.flop_counter import register_flop_formula

from bev_lightning.ops.backend import choose


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    hidden: Tensor | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """``softmax(query key^T / sqrt(D)) value``, each weight zeroed with probability ``dropout`` and
    those that stay divided by ``1 - dropout``.

    On a GPU, without dropout and with ``hidden`` this is PyTorch's. On a CPU PyTorch has no kernel
    with dropout: it draws every weight's number one by one and keeps weights, mask and product for
    the backward pass. Here nothing of the weights' size is kept: what is dropped is a hash of one
    number from PyTorch's generator, and the backward pass makes the weights again.

    Args:
        query: ``(B, H, Q, D)``.
        key: ``(B, H, K, D)``.
        value: ``(B, H, K, E)``.
        hidden: bool, of a shape that expands to ``(B, H, Q, K)``: True where a query must not see a
            key.
        dropout: 0 <= p < 1.

    Returns:
        ``(B, H, Q, E)`` in the type of ``query``; sums are taken in float32 at least.
    """
    if hidden is not None or dropout == 0.0 or choose(query.device) != "numba":
        mask = None if hidden is None else ~hidden
        return F.scaled_dot_product_attention(query, key, value, mask, dropout)
    seed = torch.randint(2**31 - 1, (1,), device=query.device)
    out: Tensor = _attend(query, key, value, dropout, seed)
    return out


@torch.library.custom_op("bev_lightning::attention", mutates_args=())
def _attend(query: Tensor, key: Tensor, value: Tensor, dropout: float, seed: Tensor) -> Tensor:
    from bev_lightning.ops.attention.cpu import attend

    out = attend(*_heads(query, key, value), dropout=dropout, seed=int(seed))
    return out.view(*query.shape[:3], value.shape[3]).to(query.dtype)


@_attend.register_fake
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
    from bev_lightning.ops.attention.cpu import attend_backward

    inputs = query, key, value
    wide = _heads(grad, *inputs, out)
    grads = attend_backward(*wide, dropout=dropout, seed=int(seed))
    first, second, third = (
        one.view(given.shape).to(given.dtype) for one, given in zip(grads, inputs, strict=True)
    )
    return first, second, third


@_attend_backward.register_fake
def _(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    dropout: float,
    seed: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    return query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    query, key, value, ctx.dropout, seed = inputs
    ctx.save_for_backward(query, key, value, output, seed)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    query, key, value, out, seed = ctx.saved_tensors
    grads = _attend_backward(grad, query, key, value, out, ctx.dropout, seed)
    return *grads, None, None


_attend.register_autograd(_backward, setup_context=_setup_context)


@register_flop_formula(torch.ops.bev_lightning.attention)
def _count(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    batch, heads, queries, channels = query
    return 2 * int(batch * heads * queries * key[2] * (channels + value[3]))


@register_flop_formula(torch.ops.bev_lightning.attention_backward)
def _count_backward(grad: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    return 2 * _count(query, key, value)  # of what has to be multiplied, without what is made again


def _heads(*tensors: Tensor) -> list[Tensor]:
    """``(B, H, N, D)`` as contiguous ``(B * H, N, D)``, float32 at least."""
    wide = torch.promote_types(tensors[0].dtype, torch.float32)
    return [tensor.to(wide).contiguous().flatten(0, 1) for tensor in tensors]
