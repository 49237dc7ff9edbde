"""Plain PyTorch implementation of attention."""

from torch import Tensor
from torch.nn import functional as F


def attend_reference(
    query: Tensor, key: Tensor, value: Tensor, hidden: Tensor | None, dropout: float
) -> Tensor:
    """See :func:`bev_lightning.ops.attention.attention`."""
    mask = None if hidden is None else ~hidden
    return F.scaled_dot_product_attention(query, key, value, mask, dropout)
