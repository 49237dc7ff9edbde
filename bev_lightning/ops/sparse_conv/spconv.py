"""Sparse convolution by the optional spconv library, with the same rulebooks and weights.

spconv's ``Native`` algorithm takes lists of pairs, which are made from the rulebook's table. Its
outputs are in the same rows, so that a model can switch between the two at any time. Factors are
float32 or float16, as under autocast; bfloat16, which spconv does not support, is widened. How
float16 is accumulated is up to spconv.
"""

import functools
import importlib.util
import warnings
from typing import Any

import torch
from torch import Tensor

from bev_lightning.errors import InputError

INSTALL = "pip install spconv-cu126 (or the wheel of your CUDA: spconv-cu121, spconv-cu124)"


def is_installed() -> bool:
    """Whether spconv is installed."""
    return importlib.util.find_spec("spconv") is not None


def check_installed(key: str) -> None:
    """Check that spconv is installed.

    Args:
        key: configuration key that selects it, for the message.

    Raises:
        InputError: it is not installed.
    """
    if not is_installed():
        raise InputError(
            f"{key}=spconv needs spconv, which is not installed: {INSTALL}, or {key}=own"
        )


def list_pairs(sources: Tensor) -> tuple[Tensor, Tensor]:
    """Convert a rulebook's table to spconv's lists of pairs.

    Args:
        sources: ``(K, num_outputs)`` int32, -1 for none.

    Returns:
        ``(2, K, num_outputs)`` int32 rows of inputs and of outputs, existing pairs first, and
        ``(K,)`` int32 number of pairs at each offset.
    """
    exists = sources >= 0
    outputs = torch.argsort(~exists, dim=1, stable=True)
    pairs = torch.stack([sources.gather(1, outputs), outputs.int()])
    return pairs, exists.sum(1, dtype=torch.int32)


def convolve(features: Tensor, weight: Tensor, bias: Tensor | None, sources: Tensor) -> Tensor:
    """:func:`bev_lightning.ops.sparse_conv.sparse_conv` with ``weight`` ``(K, Cin, Cout)``."""
    if features.dtype == torch.bfloat16:
        wide = convolve(features.float(), weight.float(), bias, sources)
        return wide.to(torch.bfloat16)
    result: Tensor = _Convolution.apply(features, weight, sources)
    return result if bias is None else (result + bias).to(result.dtype)


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, features: Tensor, weight: Tensor, sources: Tensor) -> Tensor:
        ops, algorithm = _load()
        features, filters = features.contiguous(), weight.permute(2, 0, 1).contiguous()
        pairs, counts = list_pairs(sources)
        ctx.save_for_backward(features, filters, pairs, counts)
        if not pairs.shape[2] or not len(features):
            return features.new_zeros(pairs.shape[2], weight.shape[2])
        result: Tensor = ops.indice_conv(
            features, _shape(filters), pairs, counts, pairs.shape[2], algo=algorithm
        )
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        ops, algorithm = _load()
        features, filters, pairs, counts = ctx.saved_tensors
        if not pairs.shape[2] or not len(features):
            return torch.zeros_like(features), torch.zeros_like(filters).permute(1, 2, 0), None
        to_features, to_filters = ops.indice_conv_backward(
            features, _shape(filters), grad.contiguous(), pairs, counts, algo=algorithm
        )
        return to_features, to_filters.view_as(filters).permute(1, 2, 0), None


def _shape(filters: Tensor) -> Tensor:
    """``(Cout, K, Cin)`` with three kernel axes, of which spconv uses only the product."""
    return filters[:, :, None, None, :]


@functools.cache
def _load() -> tuple[Any, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", FutureWarning
        )  # raised by torch for deprecated calls in spconv
        from spconv.core import ConvAlgo
        from spconv.pytorch import ops
    return ops, ConvAlgo.Native
