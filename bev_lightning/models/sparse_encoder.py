"""Sparse 3-D encoder of BEVFusion's lidar branch: voxels to a BEV map (SECOND, Yan et al. 2018).

Module and parameter names are those of MIT BEVFusion. Weights are ``(kz, ky, kx, Cin, Cout)``; its
checkpoints hold ``(kx, ky, kz, Cin, Cout)``.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from bev_lightning.errors import InputError
from bev_lightning.models.pillars import RowNorm
from bev_lightning.ops.sparse_conv import (
    Rulebook,
    Size3,
    build_strided_rulebook,
    build_submanifold_rulebook,
    sparse_conv,
)
from bev_lightning.ops.sparse_conv.spconv import check_installed, is_installed
from bev_lightning.private_apis import _BatchNorm

# The last convolution, which halves the height once more.
_OUT_KERNEL, _OUT_STRIDE, _OUT_PADDING = (3, 1, 1), (2, 1, 1), (0, 0, 0)

# Voxels per sample before each stage and after the last convolution, measured on ten nuScenes
# sweeps with voxels of 0.075 m, of which training keeps at most 120,000.
TYPICAL_NUM_VOXELS = (120_000, 90_000, 60_000, 30_000, 20_000)


@dataclass(frozen=True)
class StagePlan:
    """Voxel coordinates and rulebooks of a stage.

    Attributes:
        submanifold: rulebook of all submanifold convolutions of the stage.
        downsample: rulebook of the strided convolution that ends the stage; None in the last one.
        coords: ``(V, 4)`` sample, z, y, x of the output voxels.
        shape: extent of their grid along z, y, x.
    """

    submanifold: Rulebook
    downsample: Rulebook | None
    coords: Tensor
    shape: Size3


@dataclass(frozen=True)
class EncoderPlan:
    """Everything that depends on the voxels' coordinates alone, built once per batch.

    Attributes:
        stages: one plan per stage.
        output: rulebook of the last convolution.
        coords: ``(V, 4)`` sample, z, y, x of the encoder's output voxels.
        shape: extent of their grid along z, y, x.
        batch_size: B.
    """

    stages: tuple[StagePlan, ...]
    output: Rulebook
    coords: Tensor
    shape: Size3
    batch_size: int


class SparseConv3d(nn.Module):
    """Sparse convolution without bias, submanifold or strided depending on the rulebook."""

    def __init__(self, in_channels: int, out_channels: int, kernel: Size3 = (3, 3, 3)) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(*kernel, in_channels, out_channels))
        # Kaiming's uniform bound of torch's dense convolutions, sqrt(1 / fan in).
        bound = (kernel[0] * kernel[1] * kernel[2] * in_channels) ** -0.5
        nn.init.uniform_(self.weight, -bound, bound)

    def forward(self, features: Tensor, rulebook: Rulebook) -> Tensor:
        """``(V, in_channels)`` to ``(rulebook.num_outputs, out_channels)``."""
        return sparse_conv(features, self.weight, rulebook)


class SparseConvBlock(nn.Sequential):
    """Convolution, norm, ReLU."""

    def __init__(self, in_channels: int, out_channels: int, kernel: Size3 = (3, 3, 3)) -> None:
        super().__init__(
            SparseConv3d(in_channels, out_channels, kernel),
            RowNorm(out_channels, eps=1e-3, momentum=0.01),
            nn.ReLU(inplace=True),
        )

    def forward(  # type: ignore[override]
        self, features: Tensor, rulebook: Rulebook
    ) -> Tensor:
        conv, norm, relu = self
        result: Tensor = relu(_normalise(conv, norm, features, rulebook))
        return result


class SparseBasicBlock(nn.Module):
    """Residual block of two submanifold convolutions."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1 = SparseConv3d(channels, channels)
        self.bn1 = RowNorm(channels, eps=1e-3, momentum=0.01)
        self.conv2 = SparseConv3d(channels, channels)
        self.bn2 = RowNorm(channels, eps=1e-3, momentum=0.01)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, features: Tensor, rulebook: Rulebook) -> Tensor:
        hidden = self.relu(_normalise(self.conv1, self.bn1, features, rulebook))
        result: Tensor = self.relu(_normalise(self.conv2, self.bn2, hidden, rulebook) + features)
        return result


def _normalise(conv: nn.Module, norm: nn.Module, features: Tensor, rulebook: Rulebook) -> Tensor:
    """``norm(conv(features))``; in evaluation the norm is folded into the convolution's weights."""
    assert isinstance(conv, SparseConv3d)
    assert isinstance(norm, _BatchNorm)
    mean, variance = norm.running_mean, norm.running_var
    if norm.training or mean is None or variance is None:
        result: Tensor = norm(conv(features, rulebook))
        return result
    factor = norm.weight * (variance + norm.eps).rsqrt()
    return sparse_conv(features, conv.weight * factor, rulebook, norm.bias - mean * factor)


class SparseStage(nn.Sequential):
    """Residual blocks, and a strided convolution where ``down_channels`` is given."""

    def __init__(self, channels: Sequence[int], down_channels: int | None) -> None:
        blocks: list[nn.Module] = [SparseBasicBlock(width) for width in channels]
        if down_channels is not None:
            blocks.append(SparseConvBlock(channels[-1], down_channels))
        super().__init__(*blocks)

    def forward(  # type: ignore[override]
        self, features: Tensor, plan: StagePlan
    ) -> Tensor:
        for block in self:
            if isinstance(block, SparseConvBlock):
                assert plan.downsample is not None
                features = block(features, plan.downsample)
            else:
                features = block(features, plan.submanifold)
        return features


class SparseEncoder(nn.Module):
    """Submanifold residual stages, each but the last ending with a convolution of stride 2; then
    one of stride 2 along z alone, and the height folded into the channels.

    The defaults are published: 1440 x 1440 x 41 voxels to a map of 180 x 180.

    Args:
        in_channels: features of a voxel.
        shape: extent of the voxel grid along z, y, x; the published one has one layer more along z
            than the voxeliser's grid.
        base_channels: channels of the first convolution.
        stage_channels: per stage the channels of its residual blocks; in each stage but the last
            the final entry is the strided convolution's instead.
        down_paddings: per stage but the last, the padding of its strided convolution along z, y, x.
        out_channels: channels of the last convolution.
        backend: ``own``; ``spconv`` computes with that library, with the same weights and rows;
            ``auto``: spconv on CUDA if installed. Under torch.compile it is always ``own``.

    Raises:
        InputError: the backend is unknown or not installed.
    """

    def __init__(
        self,
        in_channels: int = 5,
        shape: Size3 = (41, 1440, 1440),
        base_channels: int = 16,
        stage_channels: Sequence[Sequence[int]] = (
            (16, 16, 32),
            (32, 32, 64),
            (64, 64, 128),
            (128, 128),
        ),
        down_paddings: Sequence[Sequence[int]] = ((1, 1, 1), (1, 1, 1), (0, 1, 1)),
        out_channels: int = 128,
        backend: str = "own",
    ) -> None:
        super().__init__()
        if backend not in ("auto", "own", "spconv"):
            raise InputError(
                f"model.network.lidar.encoder.backend={backend} is unknown: use auto, own or spconv"
            )
        if backend == "spconv":
            check_installed("model.network.lidar.encoder.backend")
        self.backend = backend
        if len(down_paddings) != len(stage_channels) - 1:
            raise ValueError(
                f"SparseEncoder takes one padding for each of its {len(stage_channels) - 1} "
                f"strided convolutions, got {len(down_paddings)}"
            )
        depth, height, width = shape
        self.shape: Size3 = (depth, height, width)
        self.down_paddings: tuple[Size3, ...] = tuple((z, y, x) for z, y, x in down_paddings)
        self.conv_input = SparseConvBlock(in_channels, base_channels)
        self.encoder_layers = nn.ModuleDict()
        width_in = base_channels
        for number, channels in enumerate(stage_channels, start=1):
            last = number == len(stage_channels)
            blocks = channels if last else channels[:-1]
            if any(width != width_in for width in blocks):
                raise ValueError(
                    f"stage {number} receives {width_in} channels, which its residual blocks keep, "
                    f"got {tuple(channels)}"
                )
            stage = SparseStage(blocks, None if last else channels[-1])
            self.encoder_layers[f"encoder_layer{number}"] = stage
            width_in = channels[-1]
        self.conv_out = SparseConvBlock(width_in, out_channels, _OUT_KERNEL)
        layers, rows, columns = self.shape
        for pad_z, pad_y, pad_x in self.down_paddings:
            layers = (layers + 2 * pad_z - 3) // 2 + 1
            rows = (rows + 2 * pad_y - 3) // 2 + 1
            columns = (columns + 2 * pad_x - 3) // 2 + 1
        layers = (layers - _OUT_KERNEL[0]) // _OUT_STRIDE[0] + 1
        if layers < 1:
            raise ValueError(
                f"SparseEncoder: a grid of {depth} layers is too low for the strides; enlarge shape"
            )
        self.out_shape: Size3 = (layers, rows, columns)
        self.out_channels = out_channels * layers

    @torch.no_grad()
    def plan(self, coords: Tensor, batch_size: int) -> EncoderPlan:
        """Build the rulebooks for voxels at ``coords`` ``(V, 4)`` sample, z, y, x."""
        shape = self.shape
        stages = []
        # spconv cannot run on the fake tensors of a memory forecast.
        spconv = self.backend == "spconv" or (
            self.backend == "auto" and coords.is_cuda and is_installed()
        )
        spconv = spconv and type(coords) is Tensor and not torch.compiler.is_compiling()
        for padding in (*self.down_paddings, None):
            submanifold = build_submanifold_rulebook(coords, shape, (3, 3, 3))
            submanifold = replace(submanifold, spconv=spconv)
            downsample = None
            if padding is not None:
                downsample, coords, shape = build_strided_rulebook(
                    coords, shape, (3, 3, 3), (2, 2, 2), padding
                )
                downsample = replace(downsample, spconv=spconv)
            stages.append(StagePlan(submanifold, downsample, coords, shape))
        output, coords, shape = build_strided_rulebook(
            coords, shape, _OUT_KERNEL, _OUT_STRIDE, _OUT_PADDING
        )
        output = replace(output, spconv=spconv)
        return EncoderPlan(tuple(stages), output, coords, shape, batch_size)

    def typical_plan(self, batch_size: int) -> EncoderPlan:
        """Rulebooks without values for :data:`TYPICAL_NUM_VOXELS`, to forecast memory with."""

        def rulebook(num_offsets: int, num_outputs: int, num_inputs: int | None = None) -> Rulebook:
            sources = torch.empty(num_offsets, num_outputs, dtype=torch.int32)
            if num_inputs is None:
                return Rulebook(sources)
            return Rulebook(sources, torch.empty(num_offsets, num_inputs, dtype=torch.int32))

        counts = [batch_size * num for num in TYPICAL_NUM_VOXELS]
        last = len(self.encoder_layers) - 1
        stages = tuple(
            StagePlan(
                rulebook(27, counts[i]),
                None if i == last else rulebook(27, counts[i + 1], counts[i]),
                torch.empty(counts[i + 1], 4, dtype=torch.int64),
                self.shape,
            )
            for i in range(last + 1)
        )
        output = rulebook(3, counts[-1], counts[-2])
        coords = torch.empty(counts[-1], 4, dtype=torch.int64)
        return EncoderPlan(stages, output, coords, self.out_shape, batch_size)

    def forward(self, features: Tensor, plan: EncoderPlan) -> Tensor:
        """Encode voxels.

        Args:
            features: ``(V, in_channels)`` in the order of the plan's first coordinates.
            plan: from :meth:`plan`.

        Returns:
            ``(B, out_channels, Y, X)``; channel ``c * Z + z`` is channel c at the height z.
        """
        # The first convolution shares the rulebook of the first stage.
        features = self.conv_input(features, plan.stages[0].submanifold)
        for stage, stage_plan in zip(self.encoder_layers.values(), plan.stages, strict=True):
            features = stage(features, stage_plan)
        features = self.conv_out(features, plan.output)
        dense = features.new_zeros(plan.batch_size, *plan.shape, features.shape[1])
        dense = dense.index_put(tuple(plan.coords.unbind(1)), features)
        return dense.permute(0, 4, 1, 2, 3).flatten(1, 2)
