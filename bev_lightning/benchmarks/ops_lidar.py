"""Benchmarks of the lidar branch's operators: voxelisation, sparse convolution and NMS."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from bev_lightning.benchmarks.op_timing import measure_backward, measure_forward
from bev_lightning.benchmarks.report import Row
from bev_lightning.ops.backend import use_reference
from bev_lightning.ops.nms import circle_nms
from bev_lightning.ops.sparse_conv import (
    Rulebook,
    build_strided_rulebook,
    build_submanifold_rulebook,
    sparse_conv,
)
from bev_lightning.ops.sparse_conv.spconv import is_installed
from bev_lightning.ops.voxelize import assign_cells, voxelize_hard

# BEVFusion's lidar branch as published.
_RANGE = (-54.0, -54.0, -5.0, 54.0, 54.0, 3.0)
_CELL = (0.075, 0.075, 0.2)
_SHAPE = (41, 1440, 1440)
_MAX_POINTS, _MAX_VOXELS = 10, 120_000


def make_scan(num_points: int) -> Tensor:
    """Simulated points ``(1, num_points, 5)`` of ten sweeps of a 32-beam lidar among walls.

    The lidar is 1.8 m above the ground and moves half a metre per sweep; ranges have 2 cm of noise.
    """
    generator = torch.Generator().manual_seed(0)
    steps = math.ceil(num_points / 320)
    sweep, beam, step = torch.meshgrid(
        torch.arange(10.0),
        torch.linspace(-0.53, 0.17, 32),
        torch.arange(float(steps)),
        indexing="ij",
    )
    azimuth = step * (2 * math.pi / steps)
    wall = 22 + 10 * (3 * azimuth).sin() + 6 * (11 * azimuth).sin() + 3 * (29 * azimuth).sign()
    ground = torch.where(beam < 0, -1.8 / beam.tan(), 1e6)
    reach = torch.minimum(wall, ground) + 0.02 * torch.randn(sweep.shape, generator=generator)
    x, y = reach * azimuth.cos() - 0.5 * sweep, reach * azimuth.sin()
    points = torch.stack([x, y, reach * beam.tan(), beam, sweep * 0.05], dim=-1)
    return points.flatten(0, 2)[:num_points].unsqueeze(0)


def measure_voxelize(device: torch.device, num_points: int, repeats: int) -> list[Row]:
    """Rows of hard voxelisation with voxels of 0.075 m."""
    points = make_scan(num_points).to(device)
    count = torch.tensor([num_points], device=device)
    arguments = (points, count, _RANGE, _CELL, _MAX_POINTS, _MAX_VOXELS)

    def number_by_unique() -> object:
        return torch.unique(
            assign_cells(points, count, _RANGE, _CELL), return_inverse=True, return_counts=True
        )

    others: dict[str, Callable[[], object]] = {}
    if is_installed():
        from spconv.pytorch.utils import PointToVoxel

        generator = PointToVoxel(_CELL, _RANGE, 5, _MAX_VOXELS, _MAX_POINTS, device)
        others["spconv's generator"] = lambda: generator(points[0])
    num_voxels = len(voxelize_hard(*arguments)[1])
    # The points, and the points, coordinates and count of each voxel.
    numbers = points.numel() + num_voxels * (_MAX_POINTS * 5 + 2 * 5)
    return measure_forward(
        f"voxelisation, {num_points} points",
        {
            "reference (sort)": use_reference()(lambda: voxelize_hard(*arguments)),
            "torch.unique, cells only": number_by_unique,
            **others,
            "voxelize_hard": lambda: voxelize_hard(*arguments),
        },
        repeats,
        {"least_mib": 4.0 * numbers / 2**20},
    )


def measure_sparse_conv(device: torch.device, num_points: int, repeats: int) -> list[Row]:
    """Rows of the rulebook and of the submanifold convolutions of the published encoder."""
    points, count = make_scan(num_points).to(device), torch.tensor([num_points], device=device)
    coords = voxelize_hard(points, count, _RANGE, _CELL, _MAX_POINTS, _MAX_VOXELS)[1]
    shape, rows = _SHAPE, []
    for channels, padding in ((16, (1, 1, 1)), (32, (1, 1, 1)), (64, (0, 1, 1)), (128, None)):

        def build(coords: Tensor = coords, shape: tuple[int, int, int] = shape) -> Rulebook:
            return build_submanifold_rulebook(coords, shape, (3, 3, 3))

        if channels == 16:
            functions = {"reference (search)": use_reference()(build), "rulebook": build}
            group = f"rulebook, {len(coords)} voxels"
            rows += measure_forward(
                group, functions, repeats, {"least_mib": 140.0 * len(coords) / 2**20}
            )
        rows += _measure_stage(build(), channels, device, repeats)
        if padding is not None:
            _, coords, shape = build_strided_rulebook(coords, shape, (3, 3, 3), (2, 2, 2), padding)
    return rows


def _measure_stage(
    rulebook: Rulebook, channels: int, device: torch.device, repeats: int
) -> list[Row]:
    num_voxels = rulebook.sources.shape[1]
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        features = torch.randn(num_voxels, channels).to(device).requires_grad_()
        weight = torch.randn(3, 3, 3, channels, channels).to(device).requires_grad_()
        grad = torch.randn(num_voxels, channels).to(device)
    targets = [(row >= 0).nonzero().squeeze(1) for row in rulebook.sources]
    sources = [row[o].long() for row, o in zip(rulebook.sources, targets, strict=True)]

    def add_pairs() -> Tensor:
        out = torch.zeros_like(grad)
        for i, o, matrix in zip(sources, targets, weight.flatten(0, 2), strict=True):
            out = out.index_add(0, o, features[i] @ matrix)
        return out

    def convolve() -> Tensor:
        return sparse_conv(features, weight, rulebook)

    num_pairs = sum(map(len, targets))
    numbers = 3 * (features.numel() + weight.numel()) + 2 * grad.numel()
    return measure_backward(
        f"sparse convolution, {num_voxels} voxels, {channels} channels",
        {
            "gather, multiply, index_add": add_pairs,
            "reference": use_reference()(convolve),
            "sparse_conv": convolve,
        },
        [features, weight],
        grad,
        repeats,
        {
            # The table is read three times.
            "least_mib": 4.0 * (numbers + 3 * rulebook.sources.numel()) / 2**20,
            "gflop": 6e-9 * num_pairs * channels**2,
        },
    )


def measure_nms(device: torch.device, num_boxes: int, repeats: int) -> list[Row]:
    """Rows of non-maximum suppression of boxes in ten classes, five around each object."""
    generator = torch.Generator().manual_seed(0)
    objects = 100 * torch.rand(num_boxes // 5 + 1, 2, generator=generator)
    noise = 0.5 * torch.randn(num_boxes, 2, generator=generator)
    centre = (objects.repeat(5, 1)[:num_boxes] + noise).to(device)
    score = torch.rand(num_boxes, generator=generator).to(device)
    group = torch.randint(0, 10, (num_boxes,), generator=generator).to(device)

    def suppress() -> Tensor:
        return circle_nms(centre, score, 1.0, group)

    functions: dict[str, Callable[[], object]] = {
        "reference (all pairs)": use_reference()(suppress),
        "circle_nms": suppress,
    }
    return measure_forward(f"circle_nms, {num_boxes} boxes", functions, repeats, {})
