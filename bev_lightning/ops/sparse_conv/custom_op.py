"""The ``torch.library`` operators of sparse convolution, its gradients and its rulebooks."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from bev_lightning.ops.backend import accumulation_dtype, choose_backend, load_kernels
from bev_lightning.ops.sparse_conv.reference import (
    pair_neighbours_reference,
    pair_strided_reference,
)


@torch.library.custom_op("bev_lightning::sparse_conv", mutates_args=())
def convolve(
    features: Tensor, weight: Tensor, bias: Tensor | None, sources: Tensor, targets: Tensor | None
) -> Tensor:
    """Convolution ``(num_outputs, Cout)`` with ``weight`` ``(K, Cin, Cout)``."""
    bias = None if bias is None else bias.to(accumulation_dtype(features)).contiguous()
    inputs = features.contiguous(), weight.contiguous(), bias, sources.contiguous()
    out: Tensor = load_kernels(__package__, features.device).convolve(*inputs)
    return out


@convolve.register_fake
def _(features: Tensor, weight: Tensor, bias: Any, sources: Tensor, targets: Any) -> Tensor:
    return features.new_empty(sources.shape[1], weight.shape[2])


@torch.library.custom_op("bev_lightning::sparse_conv_weight", mutates_args=())
def _weight_gradient(features: Tensor, grad: Tensor, sources: Tensor) -> Tensor:
    """``out[k] = sum over o: features[sources[k, o]].T @ grad[o]``, ``(K, Cin, Cout)``."""
    inputs = features.contiguous(), grad.contiguous(), sources.contiguous()
    out: Tensor = load_kernels(__package__, features.device).weight_gradient(*inputs)
    return out


@_weight_gradient.register_fake
def _(features: Tensor, grad: Tensor, sources: Tensor) -> Tensor:
    return features.new_empty(sources.shape[0], features.shape[1], grad.shape[1])


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    features, weight, bias, sources, targets = inputs
    ctx.bias_dtype = None if bias is None else bias.dtype
    ctx.save_for_backward(features, weight, sources, targets)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    features, weight, sources, targets = ctx.saved_tensors
    needs_features, needs_weight, needs_bias, _, _ = ctx.needs_input_grad
    grad_features = None
    if needs_features and targets is None:
        # Submanifold: if o reads i at offset d, then i reads o at -d.
        grad_features = convolve(grad, weight.flip(0).transpose(1, 2), None, sources, None)
    elif needs_features:
        grad_features = convolve(grad, weight.transpose(1, 2), None, targets, sources)
    return (
        grad_features,
        _weight_gradient(features, grad, sources) if needs_weight else None,
        grad.sum(0, dtype=accumulation_dtype(grad)).to(ctx.bias_dtype) if needs_bias else None,
        None,
        None,
    )


convolve.register_autograd(_backward, setup_context=_setup_context)


@torch.library.custom_op("bev_lightning::pair_neighbours", mutates_args=())
def pair_neighbours(coords: Tensor, shape: Sequence[int], kernel: Sequence[int]) -> Tensor:
    """``sources`` of a submanifold rulebook."""
    if choose_backend(coords.device) == "numba":
        from bev_lightning.ops.sparse_conv import cpu

        return cpu.pair_neighbours(coords, shape, kernel)
    return pair_neighbours_reference(coords, shape, kernel)


@pair_neighbours.register_fake
def _(coords: Tensor, shape: Sequence[int], kernel: Sequence[int]) -> Tensor:
    num_offsets = kernel[0] * kernel[1] * kernel[2]
    return coords.new_empty((num_offsets, coords.shape[0]), dtype=torch.int32)


@torch.library.custom_op("bev_lightning::pair_strided", mutates_args=())
def pair_strided(
    coords: Tensor,
    out_shape: Sequence[int],
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
) -> tuple[Tensor, Tensor, Tensor]:
    """``sources`` and ``targets`` of a strided rulebook and the outputs' flat coordinates."""
    if choose_backend(coords.device) == "numba":
        from bev_lightning.ops.sparse_conv import cpu

        return cpu.pair_strided(coords, out_shape, kernel, stride, padding)
    return pair_strided_reference(coords, out_shape, kernel, stride, padding)


@pair_strided.register_fake
def _(
    coords: Tensor, out_shape: Any, kernel: Sequence[int], stride: Any, padding: Any
) -> tuple[Tensor, Tensor, Tensor]:
    num_outputs = torch.library.get_ctx().new_dynamic_size()
    num_offsets = kernel[0] * kernel[1] * kernel[2]
    return (
        coords.new_empty((num_offsets, num_outputs), dtype=torch.int32),
        coords.new_empty((num_offsets, coords.shape[0]), dtype=torch.int32),
        coords.new_empty(num_outputs),
    )
