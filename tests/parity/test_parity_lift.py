"""The view transforms against outputs of the official BEVFusion code (fixture D).

The official BEV maps are (X, Y): ours are transposed for the comparison.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from parity_files import needs_parity_files, parity_folders, read_tensors
from safetensors.torch import load_file
from torch import Tensor

from bev_lightning.checkpointing.official import convert_module
from bev_lightning.models.lift import LiftSplat, depth_map
from bev_lightning.ops.bev_pool import bev_pool, build_pool_index
from bev_lightning.structures import BevGrid, Cameras, Points
from bev_lightning.structures.geometry import make_transform

pytestmark = needs_parity_files
FOLDERS = parity_folders("D_*")
CASES = [
    (folder, module)
    for folder in FOLDERS
    for module in json.loads((folder / "config.json").read_text())["modules"]
]
# Outputs that do not depend on the module; the others are named <module>/<output>.
SHARED = ("geom", "geom_cell_idx", "points_modified_in_place_shift0")
OPTIONAL = ("sparse_depth_map", "frustum_feats_sample0_cam0")
OWN = ("out", "bev_pooled", "grad_img")
case = pytest.mark.parametrize(
    ("folder", "module"), CASES, ids=[f"{folder.name}-{module}" for folder, module in CASES]
)


def make_lift(folder: Path, module: str) -> LiftSplat:
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())["modules"][module]
    x, y, z = config["xbound"], config["ybound"], config["zbound"]
    lift = LiftSplat(
        config["in_channels"],
        config["out_channels"],
        BevGrid((x[0], y[0], z[0], x[1], y[1], z[1]), (x[2], y[2])),
        tuple(config["dbound"]),
        downsample=config["downsample"],
        lidar_depth=config["type"] == "DepthLSSTransform",
        stride=config["image_size"][0] // config["feature_size"][0],
    )
    state = load_file(folder / "weights.safetensors")
    prefix = f"{module}/encoders.camera.vtransform."
    lift.load_state_dict(convert_module(lift, state, prefix), strict=True)
    return lift.eval()


def make_inputs(folder: Path, module: str) -> tuple[Tensor, Cameras, Points]:
    """Features, cameras with both augmentations in their matrices, and padded points."""
    config = json.loads((folder / "config.json").read_text())["modules"][module]
    inputs = read_tensors(folder, "inputs.npz")
    augmentation = inputs["img_aug_matrix"].double()
    pixel_map = torch.eye(3, dtype=torch.float64).repeat(*augmentation.shape[:2], 1, 1)
    pixel_map[..., :2, :2] = augmentation[..., :2, :2]
    pixel_map[..., :2, 2] = augmentation[..., :2, 3]
    original_from_augmented = inputs["lidar_aug_matrix"].double().inverse()[:, None]
    image_from_lidar = (
        make_transform(pixel_map, torch.zeros_like(pixel_map[..., 0]))
        @ inputs["lidar2image"].double()
        @ original_from_augmented
    )
    features = inputs["img_feat"].clone()
    images = torch.zeros(*features.shape[:2], 3, *config["image_size"])
    clouds = [inputs[f"points{b}"] for b in range(len(features))]
    points = Points(
        torch.nn.utils.rnn.pad_sequence(clouds, batch_first=True, padding_value=5.0),
        torch.tensor([len(cloud) for cloud in clouds]),
    )
    return features, Cameras(images, image_from_lidar.float()), points


def official_cells(folder: Path, lift: LiftSplat) -> Tensor:
    """The stored x, y, z cells as ours: ``j * X + i``, -1 outside."""
    height, width = lift.pool_grid.shape
    i, j, k = read_tensors(folder, "outputs.npz")["geom_cell_idx"].int().unbind(-1)
    inside = (i >= 0) & (i < width) & (j >= 0) & (j < height) & (k == 0)
    return torch.where(inside, j * width + i, -1)


def unknown(names: Mapping[str, Any], modules: list[str]) -> list[str]:
    known = {*SHARED, *(f"{m}/{o}" for m in modules for o in OWN + OPTIONAL)}
    return sorted(set(names) - known)


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_every_output_is_known(folder: Path) -> None:
    modules = list(json.loads((folder / "config.json").read_text())["modules"])
    outputs = read_tensors(folder, "outputs.npz")
    assert unknown(outputs, modules) == []
    assert unknown(outputs | {"geom2": outputs["geom"]}, modules) == ["geom2"]
    missing = {*SHARED, *(f"{m}/{o}" for m in modules for o in OWN)} - set(outputs)
    assert missing == set()


@case
def test_frustum_and_cells(folder: Path, module: str) -> None:
    lift = make_lift(folder, module)
    features, cameras, _ = make_inputs(folder, module)
    size = (features.shape[-2], features.shape[-1])
    outputs = read_tensors(folder, "outputs.npz")
    torch.testing.assert_close(lift.frustum(cameras, size), outputs["geom"], rtol=1e-4, atol=1e-4)
    # A point within a rounding error of a border may fall on either side of it.
    moved = lift.cells(cameras, size) != official_cells(folder, lift)
    low = torch.tensor(lift.pool_grid.range[:3])
    extent = lift.pool_grid.range[5] - lift.pool_grid.range[2]
    cell = torch.tensor([*lift.pool_grid.cell, extent])
    position = (outputs["geom"] - low) / cell
    at_border = ((position - position.round()).abs() < 1e-4).any(-1)
    assert not (moved & ~at_border).any()


@case
def test_depth_map_and_points_left_alone(folder: Path, module: str) -> None:
    lift = make_lift(folder, module)
    features, cameras, points = make_inputs(folder, module)
    before = points.features.clone()
    with torch.no_grad():
        lift(features, cameras, points)
    # The official code shifts the caller's points by this much; ours leaves them as they are.
    shift = read_tensors(folder, "outputs.npz")["points_modified_in_place_shift0"]
    translation = read_tensors(folder, "inputs.npz")["lidar_aug_matrix"][0, :3, 3]
    torch.testing.assert_close(shift, translation.abs().max(), rtol=1e-4, atol=1e-5)
    assert torch.equal(points.features, before)
    wanted = read_tensors(folder, "outputs.npz").get(f"{module}/sparse_depth_map")
    assert (wanted is not None) == (lift.depth_encoder is not None)
    if wanted is not None:
        drawn = depth_map(cameras, points)
        assert torch.equal(drawn > 0, wanted[:, :, 0] > 0)
        torch.testing.assert_close(drawn, wanted[:, :, 0], rtol=1e-4, atol=1e-4)


@case
def test_pooling(folder: Path, module: str) -> None:
    lift = make_lift(folder, module)
    features, cameras, points = make_inputs(folder, module)
    outputs = read_tensors(folder, "outputs.npz")
    with torch.no_grad():
        logits, context = lift.predict_depth(features, cameras, points)
    depth = logits.softmax(dim=2)
    lifted = depth[0, 0].unsqueeze(-1) * context[0, 0].permute(1, 2, 0)
    name = f"{module}/frustum_feats_sample0_cam0"
    if name in outputs:
        torch.testing.assert_close(lifted, outputs[name], rtol=1e-4, atol=1e-5)
    index = build_pool_index(official_cells(folder, lift), lift.pool_grid.shape)
    pooled = bev_pool(depth, context, index)
    wanted = outputs[f"{module}/bev_pooled"].transpose(-1, -2)
    torch.testing.assert_close(pooled, wanted, rtol=1e-4, atol=1e-4)


@case
def test_bev_map_and_gradient(folder: Path, module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lift = make_lift(folder, module)
    features, cameras, points = make_inputs(folder, module)
    outputs = read_tensors(folder, "outputs.npz")
    features.requires_grad_()
    # Our own cells are compared above; these leave no doubt about points at a border.
    monkeypatch.setattr(lift, "cells", lambda *_: official_cells(folder, lift))
    bev, logits = lift(features, cameras, points)
    assert logits.shape[2] == lift.num_depths
    official = bev.transpose(-1, -2)
    torch.testing.assert_close(official, outputs[f"{module}/out"], rtol=1e-4, atol=1e-4)
    assert bev.shape[-2:] == lift.grid.shape
    weight = torch.randn(official.shape, generator=torch.Generator().manual_seed(9))
    (official * weight).sum().backward()
    torch.testing.assert_close(features.grad, outputs[f"{module}/grad_img"], rtol=1e-3, atol=1e-4)
