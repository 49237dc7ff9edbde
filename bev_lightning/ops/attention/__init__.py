"""Attention with dropout of the attention weights (Vaswani et al. 2017, section 3.2.1)."""

import torch
from torch import Tensor
from torch.nn import functional as F

from bev_lightning.ops.attention.custom_op import attend
from bev_lightning.ops.backend import choose_backend


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    hidden: Tensor | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """``softmax(query key^T / sqrt(D)) value`` with dropout of the attention weights.

    Each weight is zeroed with probability ``dropout``; the others are divided by ``1 - dropout``.

    Without dropout, with ``hidden`` or on a GPU this is PyTorch's scaled_dot_product_attention. On
    a CPU PyTorch has no fused kernel with dropout: it draws a random number per weight and keeps
    weights, mask and product for the backward pass. The Numba kernel keeps nothing of that size: it
    derives the dropout mask from a hash of one random seed and recomputes the weights in the
    backward pass.

    Args:
        query: ``(B, H, Q, D)``.
        key: ``(B, H, K, D)``.
        value: ``(B, H, K, E)``.
        hidden: bool, broadcastable to ``(B, H, Q, K)``: True where a query must not attend to a
            key.
        dropout: 0 <= p < 1.

    Returns:
        ``(B, H, Q, E)`` in the dtype of ``query``; sums are taken in at least float32.
    """
    if hidden is not None or dropout == 0.0 or choose_backend(query.device) != "numba":
        mask = None if hidden is None else ~hidden
        return F.scaled_dot_product_attention(query, key, value, mask, dropout)
    seed = torch.randint(2**31 - 1, (1,), device=query.device)
    out: Tensor = attend(query, key, value, dropout, seed)
    return out
