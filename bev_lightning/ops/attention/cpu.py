"""Numba CPU kernels of attention with dropout, compiled on first use.

Whether a weight is dropped is a hash of seed, row and column (the finaliser of MurmurHash3): it
needs no memory and is the same in forward and backward and for any number of threads.
"""

import numpy as np
import torch
from numba import njit
from torch import Tensor

from bev_lightning.ops.parallel_for import parallel_for

# Bytes of attention weights that exist at a time, which fit in the cache; at least one head per
# thread.
_CHUNK_BYTES = 4 * 2**20


def attend(query: Tensor, key: Tensor, value: Tensor, *, dropout: float, seed: int) -> Tensor:
    """``(H, Q, E)`` from query ``(H, Q, D)``, key ``(H, K, D)`` and value ``(H, K, E)``."""
    out = query.new_empty(*query.shape[:2], value.shape[2])
    query = query * query.shape[-1] ** -0.5
    size, (buffer,) = _make_buffers(query, key, 1)
    for start in range(0, len(query), size):
        heads = slice(start, start + size)
        weights = _softmax_weights(query[heads], key[heads], buffer)
        _run_over_rows(_drop, start, dropout, seed, weights)
        torch.bmm(weights, value[heads], out=out[heads])
    return out


def attend_backward(*tensors: Tensor, dropout: float, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value, from grad, query, key, value and output."""
    grad, query, key, value, out = tensors
    grads = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
    # Of the softmax's gradient, per row: sum of weights times their gradients.
    row_dot = (grad * out).sum(-1)
    scale = query.shape[-1] ** -0.5
    query = query * scale
    size, (buffer, grad_buffer) = _make_buffers(query, key, 2)
    for start in range(0, len(query), size):
        heads = slice(start, start + size)
        weights = _softmax_weights(query[heads], key[heads], buffer)
        grad_weights = grad_buffer[: len(weights)]
        torch.bmm(grad[heads], value[heads].transpose(1, 2), out=grad_weights)
        _run_over_rows(_drop_backward, start, dropout, seed, weights, grad_weights, row_dot[heads])
        torch.bmm(weights.transpose(1, 2), grad[heads], out=grads[2][heads])
        torch.bmm(grad_weights, key[heads], out=grads[0][heads])
        torch.bmm(grad_weights.transpose(1, 2), query[heads], out=grads[1][heads])
    grads[0].mul_(scale)
    return grads


def _make_buffers(query: Tensor, key: Tensor, count: int) -> tuple[int, list[Tensor]]:
    """Number of heads processed at a time, and ``count`` buffers for their weights."""
    shape = query.shape[1], key.shape[1]
    head_bytes = max(1, shape[0] * shape[1] * query.element_size())
    size = max(1, min(len(query), max(torch.get_num_threads(), _CHUNK_BYTES // head_bytes)))
    return size, [query.new_empty(size, *shape) for _ in range(count)]


def _softmax_weights(query: Tensor, key: Tensor, buffer: Tensor) -> Tensor:
    """Attention weights ``(H, Q, K)`` without dropout, written to ``buffer``."""
    weights = buffer[: len(query)]
    torch.bmm(query, key.transpose(1, 2), out=weights)
    return torch.softmax(weights, -1, out=weights)


def _run_over_rows(loop, first_head: int, dropout: float, seed: int, *arrays: Tensor) -> None:  # type: ignore[no-untyped-def]
    """Run ``loop`` over all rows of ``(H, Q, K)`` arrays, which it modifies."""
    rows = [array.flatten(0, 1) for array in arrays]
    first_row = first_head * arrays[0].shape[1]
    limit = np.uint32(min(round(dropout * 2**32), 2**32 - 1))
    scale = rows[0].numpy().dtype.type(1 / (1 - dropout))
    parallel_for(loop, len(rows[0]), *rows, np.uint64(seed), first_row, limit, scale)


@njit(cache=True, nogil=True)
def _drop(first, last, weights, seed, first_row, limit, scale):  # type: ignore[no-untyped-def]
    for row in range(first, last):
        salt = _salt(seed, first_row + row)
        for column in range(weights.shape[1]):
            kept = scale if _hash(salt, column) >= limit else weights.dtype.type(0)
            weights[row, column] *= kept


@njit(cache=True, nogil=True)
def _drop_backward(  # type: ignore[no-untyped-def]
    first, last, weights, grad_weights, row_dot, seed, first_row, limit, scale
):
    """Apply dropout to the weights and turn their gradients into those of the logits."""
    for row in range(first, last):
        salt, dot = _salt(seed, first_row + row), row_dot[row]
        for column in range(weights.shape[1]):
            kept = scale if _hash(salt, column) >= limit else weights.dtype.type(0)
            weight = weights[row, column]
            weights[row, column] = weight * kept
            grad_weights[row, column] = weight * (grad_weights[row, column] * kept - dot)


@njit(inline="always")
def _salt(seed, row):  # type: ignore[no-untyped-def]
    """32 random bits for a row (the finaliser of SplitMix64)."""
    x = np.uint64(seed + np.uint64(row) * np.uint64(0x9E3779B97F4A7C15))
    x = np.uint64((x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9))
    x = np.uint64((x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB))
    return np.uint32((x ^ (x >> np.uint64(31))) >> np.uint64(32))


@njit(inline="always")
def _hash(salt, column):  # type: ignore[no-untyped-def]
    x = np.uint32(salt ^ np.uint32(column))
    x = np.uint32((x ^ (x >> np.uint32(16))) * np.uint32(0x85EBCA6B))
    x = np.uint32((x ^ (x >> np.uint32(13))) * np.uint32(0xC2B2AE35))
    return np.uint32(x ^ (x >> np.uint32(16)))
