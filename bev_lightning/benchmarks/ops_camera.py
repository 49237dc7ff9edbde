"""Benchmarks of the camera branch's operators: BEV pooling, deformable attention and attention."""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from bev_lightning.benchmarks.op_timing import Forward, measure_backward
from bev_lightning.benchmarks.report import Row
from bev_lightning.models.lift import LiftSplat
from bev_lightning.ops.attention import attention
from bev_lightning.ops.backend import use_reference
from bev_lightning.ops.bev_pool import bev_pool, build_pool_index
from bev_lightning.ops.deform_attention import multi_scale_deformable_attention
from bev_lightning.structures import BevGrid, Cameras
from bev_lightning.structures.geometry import project


def measure_bev_pool(
    device: torch.device, image_size: tuple[int, int], channels: int, cell_m: float, repeats: int
) -> list[Row]:
    """Rows of BEVFusion's pooling as published: six cameras, 118 depths, 360 x 360 cells.

    In the group ``fixed rig`` everything that depends only on the calibration is precomputed, in
    ``new calibration`` sorting the points by cell is part of the timed step.
    """
    bins, size = (1.0, 60.0, 0.5), (image_size[0] // 8, image_size[1] // 8)
    grid = BevGrid((-54.0, -54.0, -10.0, 54.0, 54.0, 10.0), (cell_m, cell_m))
    with torch.device(device), torch.random.fork_rng([]):
        torch.manual_seed(0)
        cameras = Cameras(torch.empty(1, 6, 3, *image_size), make_rig(image_size, 0.235))
        cells = LiftSplat(1, 1, grid, bins).cells(cameras, size)
        depth = torch.randn(cells.shape).softmax(2).requires_grad_()
        features = torch.randn(1, 6, channels, *size, requires_grad=True)
        grad = torch.randn(1, channels, *grid.shape)
    order, lengths = _sort_points(cells, grid.shape)
    index = build_pool_index(cells, grid.shape)

    def pool() -> Tensor:
        return bev_pool(depth, features, index)

    fixed: dict[str, Forward] = {
        "cumsum trick": lambda: _pool_by_cumsum(depth, features, order, lengths, grid.shape),
        "reference (index_add_)": use_reference()(pool),
        "bev_pool": pool,
    }
    fresh: dict[str, Forward] = {
        "cumsum trick": lambda: _pool_by_cumsum(
            depth, features, *_sort_points(cells, grid.shape), grid.shape
        ),
        "bev_pool": lambda: bev_pool(depth, features, build_pool_index(cells, grid.shape)),
    }
    num_points, num_inside = cells.numel(), int(index.starts[-1])
    counted = {
        # Depth (twice), its gradient, index, cells; features (twice), their gradient; out and grad.
        "least_mib": (24.0 * num_points + 12 * features.numel() + 8 * grad.numel()) / 2**20,
        "gflop": 6e-9 * num_inside * channels,
    }
    leaves = [depth, features]
    return [
        *measure_backward("BEV pooling, fixed rig", fixed, leaves, grad, repeats, counted),
        *measure_backward("BEV pooling, new calibration", fresh, leaves, grad, repeats, counted),
    ]


def measure_deform_attention(device: torch.device, sides: Sequence[int], repeats: int) -> list[Row]:
    """Rows of BEVFormer's deformable attentions, 8 heads of 32 channels.

    Temporal: each query to a BEV map of the queries' size with 4 points. Spatial: 50 x 50 queries
    to six images with 8 points.
    """
    rows = []
    for side in sides:
        with torch.device(device), torch.random.fork_rng([]):
            torch.manual_seed(0)
            shapes = [(side, side)]
            value = torch.randn(1, side * side, 8, 32, requires_grad=True)
            centres = torch.cartesian_prod(torch.arange(side), torch.arange(side)).flip(-1)
            centres = (centres.view(1, -1, 1, 1, 1, 2) + 0.5) / side
            locations = (centres + make_offsets(side * side, 4) / side).requires_grad_()
            weights = torch.rand(1, side * side, 8, 1, 4).softmax(-1).requires_grad_()
            grad = torch.randn(1, side * side, 256)
        leaves = [value, locations, weights]
        rows += measure_backward(
            f"deformable attention, {side} x {side} queries",
            {
                "grid_sample as published": partial(
                    _attend_as_published, value, shapes, *leaves[1:]
                ),
                **_attentions(shapes, leaves),
            },
            leaves,
            grad,
            repeats,
            _count(leaves, grad, num_read=weights.numel()),
        )
    return rows + _measure_spatial(device, min(sides), repeats)


def _measure_spatial(device: torch.device, side: int, repeats: int) -> list[Row]:
    """Spatial attention to the images of BEVFormer-tiny, 480 x 800 at stride 32."""
    with torch.device(device), torch.random.fork_rng([]):
        torch.manual_seed(0)
        shapes = [(15, 25)]
        spread = (torch.arange(side) + 0.5) * (102.4 / side) - 51.2
        xyz = torch.cartesian_prod(spread, spread, torch.linspace(-4.5, 2.5, 4))
        pixels, depth = project(make_rig((480, 800), 0.5), xyz)
        anchors = (pixels / torch.tensor([800.0, 480.0])).view(1, 6, side * side, 4, 2)
        in_front = depth.view(anchors.shape[:-1]) > 1e-5
        seen = (in_front & ((anchors > 0) & (anchors < 1)).all(-1)).any(-1)
        value = torch.randn(6, 375, 8, 32, requires_grad=True)
        scale = torch.tensor([25.0, 15.0])
        offsets = (make_offsets(side * side, 8) / scale).requires_grad_()
        weights = torch.rand(1, side * side, 8, 1, 8).softmax(-1).requires_grad_()
        grad = torch.randn(1, side * side, 256)
    leaves = [value, offsets, weights]
    visible = find_visible_queries(seen)

    functions: dict[str, Forward] = {
        "grid_sample of the visible queries": lambda: _attend_gathered(
            leaves, shapes, anchors, seen, visible
        ),
        **_attentions(shapes, leaves, anchors, seen),
    }
    num_read = int(seen.sum()) * weights[0, 0].numel()
    return measure_backward(
        f"deformable attention, {side} x {side} queries to 6 images",
        functions,
        leaves,
        grad,
        repeats,
        _count(leaves, grad, num_read),
    )


def measure_attention(
    device: torch.device, queries: tuple[int, int], cells: int, repeats: int
) -> list[Row]:
    """Rows of attention with a dropout of 0.1.

    BEVFormer's self-attention (8 heads of 32 channels) and BEVFusion's attention of queries to all
    cells of its map (8 heads of 16).
    """
    rows = []
    for count, keys, width in ((queries[0], queries[0], 32), (queries[1], cells, 16)):
        with torch.device(device), torch.random.fork_rng([]):
            torch.manual_seed(0)
            leaves = [
                torch.randn(1, 8, number, width, requires_grad=True)
                for number in (count, keys, keys)
            ]
            grad = torch.randn(1, 8, count, width)

        def attend(leaves: Sequence[Tensor] = leaves) -> Tensor:
            return attention(*leaves, dropout=0.1)

        numbers = 3 * sum(leaf.numel() for leaf in leaves) + 2 * grad.numel()
        rows += measure_backward(
            f"attention with dropout, {count} queries to {keys}",
            {
                "reference (scaled_dot_product)": use_reference()(attend),
                "attention": attend,
            },
            leaves,
            grad,
            repeats,
            {"least_mib": 4.0 * numbers / 2**20, "gflop": 96e-9 * count * keys * width},
        )
    return rows


def make_rig(image_size: tuple[int, int], horizon: float) -> Tensor:
    """``image_from_lidar`` ``(1, 6, 4, 4)`` of six cameras with 65 degrees field of view each.

    Args:
        image_size: height, width [px].
        horizon: height of the horizon in the image, 0 (top) to 1.
    """
    height, width = image_size
    focal = 0.79 * width
    intrinsic = torch.tensor(
        [[focal, 0.0, width / 2], [0.0, focal, horizon * height], [0.0, 0.0, 1.0]]
    )
    matrices = []
    for k in range(6):
        c, s = math.cos(k * math.pi / 3), math.sin(k * math.pi / 3)
        pose = torch.tensor([[s, -c, 0.0, 0.0], [0.0, 0.0, -1.0, -0.3], [c, s, 0.0, -0.6]])
        matrices.append(torch.cat([intrinsic @ pose, torch.tensor([[0.0, 0.0, 0.0, 1.0]])]))
    return torch.stack(matrices).unsqueeze(0)


def make_offsets(num_queries: int, num_points: int) -> Tensor:
    """Sampling offsets ``(1, Q, 8, 1, P, 2)`` [cells] like those of an untrained model.

    Each head has its own direction and point k is k + 1 cells away, with half a cell of noise.
    """
    angle = torch.arange(8) * (math.pi / 4)
    direction = torch.stack([angle.cos(), angle.sin()], dim=-1).view(8, 1, 1, 2)
    offsets = direction * (torch.arange(num_points) % 4 + 1.0).view(-1, 1)
    return offsets + 0.5 * torch.randn(1, num_queries, 8, 1, num_points, 2)


def _attentions(
    shapes: Sequence[tuple[int, int]], leaves: Sequence[Tensor], *views: Tensor
) -> dict[str, Forward]:
    value, locations, weights = leaves

    def attend() -> Tensor:
        return multi_scale_deformable_attention(value, shapes, locations, weights, *views)

    return {
        "reference (grid_sample)": use_reference()(attend),
        "deformable attention": attend,
    }


def _count(leaves: Sequence[Tensor], grad: Tensor, num_read: int) -> dict[str, float]:
    """Bytes and FLOPs: inputs are read twice, everything else once; 4 corners per point."""
    numbers = 3 * sum(leaf.numel() for leaf in leaves) + 2 * grad.numel()
    return {"least_mib": 4.0 * numbers / 2**20, "gflop": 6e-9 * 4 * num_read * 32}


def _sort_points(cells: Tensor, shape: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Points inside the grid, sorted by cell, and the cell of each."""
    batch = cells.shape[0]
    sample = torch.arange(batch, device=cells.device).view(-1, 1, 1, 1, 1)
    rank = (cells + sample * (shape[0] * shape[1])).flatten()
    kept = (cells.flatten() >= 0).nonzero().squeeze(1)
    rank, order = rank[kept].sort()
    return kept[order], rank


def _pool_by_cumsum(
    depth: Tensor, features: Tensor, order: Tensor, rank: Tensor, shape: tuple[int, int]
) -> Tensor:
    """Lift, Splat, Shoot's pooling (section 4.2): differences of a cumsum over sorted points."""
    channels = features.shape[2]
    lifted = depth.unsqueeze(-1) * features.movedim(2, -1).unsqueeze(2)
    sums = _CumsumPool.apply(lifted.flatten(0, -2)[order], rank)
    out = sums.new_zeros(len(depth) * shape[0] * shape[1], channels)
    out = out.index_put((rank.unique_consecutive(),), sums)
    return out.view(len(depth), *shape, channels).permute(0, 3, 1, 2)


class _CumsumPool(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, rank: Tensor) -> Tensor:
        last = torch.ones_like(rank, dtype=torch.bool)
        last[:-1] = rank[1:] != rank[:-1]
        sums = rows.cumsum(0)[last]
        ctx.save_for_backward(last)
        return torch.cat([sums[:1], sums[1:] - sums[:-1]])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (last,) = ctx.saved_tensors
        run = last.cumsum(0)
        return grad[torch.where(last, run - 1, run)], None


def find_visible_queries(seen: Tensor) -> Tensor:
    """Queries ``(N, V)`` that each view of one sample sees, padded with query 0."""
    return pad_sequence([row.nonzero().squeeze(1) for row in seen[0]], batch_first=True)


def _attend_gathered(
    leaves: Sequence[Tensor],
    shapes: Sequence[tuple[int, int]],
    anchors: Tensor,
    seen: Tensor,
    rows: Tensor,
) -> Tensor:
    """BEVFormer's spatial attention as published, over padded lists of visible queries."""
    value, offsets, weights = leaves
    view = torch.arange(len(rows), device=rows.device).unsqueeze(1)
    positions = anchors[0, view, rows].repeat(1, 1, offsets.shape[-2] // anchors.shape[-2], 1)
    positions = positions.clamp(-1e4, 1e4)[:, :, None, None] + offsets[0][rows]
    attended = _attend_as_published(value, shapes, positions, weights[0][rows])
    # Mask the padding: it repeats query 0, which may also be visible.
    length = seen[0].sum(-1, keepdim=True)
    valid = torch.arange(rows.shape[1], device=rows.device) < length
    attended = (attended * valid.unsqueeze(-1)).flatten(0, 1)
    out = attended.new_zeros(offsets.shape[1], attended.shape[-1])
    return out.index_add(0, rows.flatten(), attended).unsqueeze(0)


def _attend_as_published(
    value: Tensor, shapes: Sequence[tuple[int, int]], locations: Tensor, weights: Tensor
) -> Tensor:
    """Deformable DETR's published PyTorch fallback: stack the samples of all levels, then sum."""
    batch, queries, heads = weights.shape[:3]
    samples = []
    start = 0
    for level, (height, width) in enumerate(shapes):
        cells = value[:, start : start + height * width].flatten(2).transpose(1, 2)
        start += height * width
        grid = 2 * locations[:, :, :, level].transpose(1, 2).flatten(0, 1) - 1
        maps = cells.reshape(batch * heads, -1, height, width)
        samples.append(F.grid_sample(maps, grid, align_corners=False))
    weight = weights.transpose(1, 2).reshape(batch * heads, 1, queries, -1)
    summed = (torch.stack(samples, dim=-2).flatten(-2) * weight).sum(-1)
    return summed.view(batch, -1, queries).transpose(1, 2).contiguous()
