"""The lidar branch, the fuser and the BEV backbone against outputs of the official BEVFusion code
(fixture E).

The official maps are (X, Y) and its voxels (sample, x, y, z): ours are transposed for the
comparison.
"""

import json
import re
from collections.abc import Collection
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from parity_files import needs_parity_files, parity_folders, read_tensors
from safetensors.torch import load_file
from torch import Tensor, nn

from bev_lightning.checkpointing.official import convert_module
from bev_lightning.models.bev import SECOND, SECONDFPN, ConvFuser
from bev_lightning.models.lidar import LidarVoxelBranch, MeanVoxels
from bev_lightning.models.sparse_encoder import SparseEncoder
from bev_lightning.ops.voxelize import voxelize_hard
from bev_lightning.structures import Points

pytestmark = needs_parity_files
FOLDERS = parity_folders("E_*")
folders = pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
TO_XYZ = [0, 3, 2, 1]
# The prefixes of the official names, and where their modules stand in `Parts`.
PREFIXES = {
    "encoders.lidar.backbone.": 0,
    "fuser.": 1,
    "decoder.backbone.": 2,
    "decoder.neck.": 3,
}
Parts = tuple[SparseEncoder, ConvFuser, SECOND, SECONDFPN]
NORMS = ["bn1.weight", "bn1.bias", "bn2.weight", "bn2.bias"]
BLOCK = ["conv1.weight", "conv2.weight", *NORMS]
MODULE = ["0.weight", "1.weight", "1.bias"]


@cache
def read_config(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return config


def close(got: Tensor, want: Tensor) -> None:
    """Within the tolerance of features; unlike ``diff > tol`` it fails on NaN."""
    torch.testing.assert_close(got.detach(), want.to(got.dtype), atol=1e-3, rtol=1e-4)


def close_gradient(got: Tensor, want: Tensor) -> None:
    """Within 1e-3 of the array's maximum."""
    assert got.shape == want.shape
    assert bool((got - want).abs().max() <= 1e-3 * want.abs().max())


def make_voxels(folder: Path) -> MeanVoxels:
    config = read_config(folder)["voxelize"]
    return MeanVoxels(
        tuple(config["point_cloud_range"]),
        tuple(config["voxel_size"]),
        config["max_num_points"],
        tuple(config["max_voxels"]),
    ).eval()


def make_parts(folder: Path) -> Parts:
    config = read_config(folder)
    lidar, second, neck = config["backbone"], config["decoder_backbone"], config["decoder_neck"]
    assert lidar["block_type"] == "basicblock" and lidar["order"] == ["conv", "norm", "act"]
    # Of a stage's paddings only its strided convolution's counts: a number, or x, y, z.
    closing = [stage[-1] for stage in lidar["encoder_paddings"][:-1]]
    paddings = [[p] * 3 if isinstance(p, int) else p[::-1] for p in closing]
    parts = (
        SparseEncoder(
            lidar["in_channels"],
            tuple(lidar["sparse_shape"][::-1]),
            lidar["base_channels"],
            lidar["encoder_channels"],
            paddings,
            lidar["output_channels"],
        ),
        ConvFuser(config["fuser"]["in_channels"], config["fuser"]["out_channels"]),
        SECOND(
            second["in_channels"],
            second["out_channels"],
            second["layer_nums"],
            second["layer_strides"],
            second["norm_cfg"]["momentum"],
        ),
        SECONDFPN(
            neck["in_channels"],
            neck["out_channels"],
            neck["upsample_strides"],
            neck["norm_cfg"]["momentum"],
        ),
    )
    state = load_file(folder / "weights.safetensors")
    for prefix, number in PREFIXES.items():
        part = parts[number]
        part.load_state_dict(convert_module(part, state, prefix), strict=True)
        parts[number].eval()
    return parts


@cache
def make_points(folder: Path) -> Points:
    inputs = read_tensors(folder, "inputs.npz")
    clouds = [inputs[f"points{b}"] for b in range(len(inputs["camera_bev"]))]
    features = nn.utils.rnn.pad_sequence(clouds, batch_first=True, padding_value=0.3)
    return Points(features, torch.tensor([len(cloud) for cloud in clouds]))


@cache
def run(folder: Path) -> tuple[dict[str, Tensor], Parts]:
    """Every feature map under its official name, in our layout, with gradients behind it."""
    parts = make_parts(folder)
    encoder, fuser, backbone, neck = parts
    features, coords = make_voxels(folder)(make_points(folder))
    maps = {"voxel_feats": features.requires_grad_()}
    inputs = read_tensors(folder, "inputs.npz")
    plan = encoder.plan(coords, len(inputs["camera_bev"]))
    modules = {"conv_input": encoder.conv_input, **encoder.encoder_layers}
    hooks = [
        module.register_forward_hook(lambda _m, _i, out, name=name: maps.update({name: out}))
        for name, module in modules.items()
    ]
    maps["sparse_encoder/out"] = encoder(features, plan)
    for hook in hooks:
        hook.remove()
    camera = inputs["camera_bev"].transpose(-1, -2)
    maps["fuser/out"] = fuser([camera, maps["sparse_encoder/out"]])
    for number, level in enumerate(backbone(maps["fuser/out"])):
        maps[f"second/out{number}"] = level
    levels = [maps[f"second/out{number}"] for number in range(len(backbone.blocks))]
    maps["secondfpn/out"] = neck(levels)
    out = maps["secondfpn/out"].transpose(-1, -2)
    (out * torch.randn(out.shape, generator=torch.Generator().manual_seed(9))).sum().backward()
    return maps, parts


def parameter(parts: Parts, name: str) -> nn.Parameter:
    prefix = next(prefix for prefix in PREFIXES if name.startswith(prefix))
    return parts[PREFIXES[prefix]].get_parameter(name.removeprefix(prefix))


def known_names(folder: Path) -> set[str]:
    """All outputs that a fixture with this config and these inputs holds, in their official
    names."""
    config = read_config(folder)
    names = {"batched/feats", "batched/coords_bxyz", "batched/sizes", "grad/voxel_feats"}
    for kind in ("train", "test"):
        for sample in range(len(read_tensors(folder, "inputs.npz")["camera_bev"])):
            for value in ("voxels", "coords_xyz", "num_points"):
                names.add(f"voxelize_{kind}/sample{sample}/{value}")
    names |= {"sparse_encoder/out", "fuser/out", "secondfpn/out"}
    names |= {f"second/out{i}" for i in range(len(config["decoder_backbone"]["out_channels"]))}
    lidar = "encoders.lidar.backbone."
    parameters = [f"{part}.{name}" for part in ("conv_input", "conv_out") for name in MODULE]
    names |= {f"sparse_encoder/conv_input/{v}" for v in ("features_sorted", "indices_bxyz_sorted")}
    stages = config["backbone"]["encoder_channels"]
    for number, channels in enumerate(stages, start=1):
        for value in ("features_sorted", "indices_bxyz_sorted", "spatial_shape"):
            names.add(f"sparse_encoder/encoder_layer{number}/{value}")
        for block in range(len(channels)):
            strided = block == len(channels) - 1 and number < len(stages)
            parameters += [
                f"encoder_layers.encoder_layer{number}.{block}.{name}"
                for name in (MODULE if strided else BLOCK)
            ]
    names |= {f"gradnorm/{lidar}{name}" for name in parameters}
    return names | {f"grad/{lidar}conv_input.0.weight"}


def unknown(folder: Path, names: Collection[str]) -> list[str]:
    return sorted(set(names) - known_names(folder))


@folders
def test_every_output_is_known(folder: Path) -> None:
    outputs = read_tensors(folder, "outputs.npz")
    assert unknown(folder, outputs) == []
    assert unknown(folder, [*outputs, "second/out9"]) == ["second/out9"]
    assert known_names(folder) - set(outputs) == set()


@folders
@pytest.mark.parametrize("kind", ["train", "test"])
def test_hard_voxels(folder: Path, kind: str) -> None:
    outputs, points, voxels = (
        read_tensors(folder, "outputs.npz"),
        make_points(folder),
        make_voxels(folder),
    )
    cap = voxels.max_voxels[0 if kind == "train" else 1]
    arguments = (voxels.range, voxels.voxel, voxels.max_points, cap)
    features, coords, num_points = voxelize_hard(points.features, points.count, *arguments)
    for sample in range(len(points.count)):
        own = coords[:, 0] == sample
        stored = f"voxelize_{kind}/sample{sample}"
        assert torch.equal(features[own], outputs[f"{stored}/voxels"])
        assert torch.equal(coords[own][:, [3, 2, 1]], outputs[f"{stored}/coords_xyz"].long())
        assert torch.equal(num_points[own], outputs[f"{stored}/num_points"].long())


@folders
def test_mean_voxels(folder: Path) -> None:
    outputs, points, voxels = (
        read_tensors(folder, "outputs.npz"),
        make_points(folder),
        make_voxels(folder),
    )
    features, coords = voxels(points)
    assert torch.equal(coords[:, TO_XYZ], outputs["batched/coords_bxyz"].long())
    torch.testing.assert_close(features, outputs["batched/feats"], atol=1e-5, rtol=1e-6)
    arguments = (voxels.range, voxels.voxel, voxels.max_points, voxels.max_voxels[1])
    sizes = voxelize_hard(points.features, points.count, *arguments)[2]
    assert torch.equal(sizes, outputs["batched/sizes"].long())


@folders
def test_sparse_stages(folder: Path) -> None:
    outputs, (maps, parts) = read_tensors(folder, "outputs.npz"), run(folder)
    coords = make_voxels(folder)(make_points(folder))[1]
    plan = parts[0].plan(coords, len(make_points(folder).count))
    locations = {"conv_input": coords}
    for number, stage in enumerate(plan.stages, start=1):
        locations[f"encoder_layer{number}"] = stage.coords
        shape = outputs[f"sparse_encoder/encoder_layer{number}/spatial_shape"]
        assert shape.tolist() == list(stage.shape[::-1])
    for name, location in locations.items():
        b, x, y, z = location[:, TO_XYZ].unbind(1)
        order = np.lexsort((z, y, x, b))
        stored = f"sparse_encoder/{name}"
        assert torch.equal(
            location[order][:, TO_XYZ], outputs[f"{stored}/indices_bxyz_sorted"].long()
        )
        close(maps[name][order], outputs[f"{stored}/features_sorted"])


@folders
def test_bev_maps(folder: Path) -> None:
    outputs, (maps, parts) = read_tensors(folder, "outputs.npz"), run(folder)
    for name in sorted(maps):
        if "/" in name:
            close(maps[name].transpose(-1, -2), outputs[name])
    bev = maps["sparse_encoder/out"]
    assert bev.shape[-2:] == parts[0].out_shape[1:] and bev.shape[1] == parts[0].out_channels
    branch = LidarVoxelBranch(make_voxels(folder), parts[0])
    assert torch.equal(branch(make_points(folder)), bev)


@folders
def test_gradients(folder: Path) -> None:
    outputs, (maps, parts) = read_tensors(folder, "outputs.npz"), run(folder)
    close_gradient(maps["voxel_feats"].grad, outputs["grad/voxel_feats"])
    for name, want in outputs.items():
        if name.startswith("gradnorm/"):
            gradient = parameter(parts, name.removeprefix("gradnorm/")).grad
            torch.testing.assert_close(gradient.norm(), want, atol=1e-5, rtol=1e-3)
        elif re.match(r"grad/\w+\.", name):
            gradient = parameter(parts, name.removeprefix("grad/")).grad
            close_gradient(gradient.permute(2, 1, 0, 3, 4), want)
