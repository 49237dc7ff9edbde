"""CPU passes of :mod:`bev_lightning.ops.attention`, compiled on first use; a GPU never imports it.

What is dropped is a hash of seed, row and column (the finaliser of MurmurHash3), so that it needs
no memory and is the same forward, backward and at any number of threads.
"""

import numpy as np
import torch
from numba import njit
from torch import Tensor

from bev_lightning.ops.backend import share_out

# Weights of so many bytes exist at a time, which the cache holds, or those of a head a thread.
_CHUNK_BYTES = 4 * 2**20


def attend(query: Tensor, key: Tensor, value: Tensor, *, dropout: float, seed: int) -> Tensor:
    """``(H, Q, E)`` from ``(H, Q, D)``, ``(H, K, D)`` and ``(H, K, E)``; of one type."""
    out = query.new_empty(*query.shape[:2], value.shape[2])
    query = query * query.shape[-1] ** -0.5
    size, (room,) = _make_room(query, key, 1)
    for start in range(0, len(query), size):
        heads = slice(start, start + size)
        weights = _weigh(query[heads], key[heads], room)
        _pass(_drop, start, dropout, seed, weights)
        torch.bmm(weights, value[heads], out=out[heads])
    return out


def attend_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    *,
    dropout: float,
    seed: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value. The weights are made again, not kept."""
    grads = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
    # What the softmax takes back from each row: its weights times their gradients.
    taken = (grad * out).sum(-1)
    scale = query.shape[-1] ** -0.5
    query = query * scale
    size, (room, second_room) = _make_room(query, key, 2)
    for start in range(0, len(query), size):
        heads = slice(start, start + size)
        weights = _weigh(query[heads], key[heads], room)
        grad_weights = second_room[: len(weights)]
        torch.bmm(grad[heads], value[heads].transpose(1, 2), out=grad_weights)
        _pass(_drop_backward, start, dropout, seed, weights, grad_weights, taken[heads])
        torch.bmm(weights.transpose(1, 2), grad[heads], out=grads[2][heads])
        torch.bmm(grad_weights, key[heads], out=grads[0][heads])
        torch.bmm(grad_weights.transpose(1, 2), query[heads], out=grads[1][heads])
    grads[0].mul_(scale)
    return grads


def _make_room(query: Tensor, key: Tensor, count: int) -> tuple[int, list[Tensor]]:
    """How many heads are worked on at a time, and room for ``count`` times their weights."""
    shape = query.shape[1], key.shape[1]
    head_bytes = max(1, shape[0] * shape[1] * query.element_size())
    size = max(1, min(len(query), max(torch.get_num_threads(), _CHUNK_BYTES // head_bytes)))
    return size, [query.new_empty(size, *shape) for _ in range(count)]


def _weigh(query: Tensor, key: Tensor, room: Tensor) -> Tensor:
    """Weights ``(H, Q, K)`` without dropout, in ``room``."""
    weights = room[: len(query)]
    torch.bmm(query, key.transpose(1, 2), out=weights)
    return torch.softmax(weights, -1, out=weights)


def _pass(loop, first_head: int, dropout: float, seed: int, *arrays: Tensor) -> None:  # type: ignore[no-untyped-def]
    """Run ``loop`` over all rows of weights ``(H, Q, K)``, in place."""
    rows = [array.flatten(0, 1).numpy() for array in arrays]
    first_row = first_head * arrays[0].shape[1]
    limit = np.uint32(min(round(dropout * 2**32), 2**32 - 1))
    scale = rows[0].dtype.type(1 / (1 - dropout))
    share_out(loop, len(rows[0]), *rows, np.uint64(seed), first_row, limit, scale)


@njit(cache=True, nogil=True)
def _drop(first, last, weights, seed, first_row, limit, scale):  # type: ignore[no-untyped-def]
    for row in range(first, last):
        salt = _salt(seed, first_row + row)
        for column in range(weights.shape[1]):
            kept = scale if _hash(salt, column) >= limit else weights.dtype.type(0)
            weights[row, column] *= kept


@njit(cache=True, nogil=True)
def _drop_backward(  # type: ignore[no-untyped-def]
    first, last, weights, grad_weights, taken, seed, first_row, limit, scale
):
    """Weights become what was kept of them, their gradients those of the logits."""
    for row in range(first, last):
        salt, back = _salt(seed, first_row + row), taken[row]
        for column in range(weights.shape[1]):
            kept = scale if _hash(salt, column) >= limit else weights.dtype.type(0)
            weight = weights[row, column]
            weights[row, column] = weight * kept
            grad_weights[row, column] = weight * (grad_weights[row, column] * kept - back)


@njit(inline="always")
def _salt(seed, row):  # type: ignore[no-untyped-def]
    """32 bits of a row (the finaliser of SplitMix64)."""
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
