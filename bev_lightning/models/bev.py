"""BEV fuser, backbone and neck.

Module and parameter names are those of MIT BEVFusion, so that its checkpoints map one to one.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn


class ConvFuser(nn.Sequential):
    """Fuses the sensors' BEV maps: concatenation, 3x3 convolution, norm, ReLU (Liu et al. 2023).

    Args:
        in_channels: channels of each sensor's map, in order.
        out_channels: channels of the fused map.
    """

    def __init__(self, in_channels: Sequence[int], out_channels: int) -> None:
        super().__init__(
            nn.Conv2d(sum(in_channels), out_channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(out_channels),
            nn.ReLU(inplace=True),
        )
        self.in_channels = tuple(in_channels)
        self.out_channels = out_channels

    def forward(self, maps: Sequence[Tensor]) -> Tensor:
        """Maps ``(B, C_i, Y, X)`` to ``(B, out_channels, Y, X)``.

        Raises:
            ValueError: the maps have other channels than the fuser was built for.
        """
        channels = tuple(bev.shape[1] for bev in maps)
        if channels != self.in_channels:
            raise ValueError(f"ConvFuser takes maps of {self.in_channels} channels, got {channels}")
        fused = torch.cat(list(maps), dim=1)
        for layer in self:
            fused = layer(fused)
        return fused


class SECOND(nn.Module):
    """Convolutional BEV backbone (SECOND, Yan et al. 2018): stages of 3x3 convolutions.

    Args:
        in_channels: channels of the BEV map.
        out_channels: channels of each stage.
        layer_nums: convolutions of each stage after its first.
        layer_strides: stride of each stage's first convolution.
        norm_momentum: of the batch norms; the published value.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: Sequence[int] = (128, 256),
        layer_nums: Sequence[int] = (5, 5),
        layer_strides: Sequence[int] = (1, 2),
        norm_momentum: float = 0.01,
    ) -> None:
        super().__init__()
        if not len(out_channels) == len(layer_nums) == len(layer_strides):
            raise ValueError(
                f"SECOND takes one entry per stage, got out_channels {tuple(out_channels)}, "
                f"layer_nums {tuple(layer_nums)}, layer_strides {tuple(layer_strides)}"
            )
        self.blocks = nn.ModuleList()
        for channels, layers, stride in zip(out_channels, layer_nums, layer_strides, strict=True):
            block: list[nn.Module] = []
            for layer in range(layers + 1):
                block += [
                    nn.Conv2d(
                        in_channels, channels, 3, stride if layer == 0 else 1, padding=1, bias=False
                    ),
                    nn.BatchNorm2d(channels, eps=1e-3, momentum=norm_momentum),
                    nn.ReLU(inplace=True),
                ]
                in_channels = channels
            self.blocks.append(nn.Sequential(*block))
        self.out_channels = tuple(out_channels)

    def forward(self, bev: Tensor) -> tuple[Tensor, ...]:
        """``(B, in_channels, Y, X)`` to one map per stage ``(B, out_channels[i], Y_i, X_i)``."""
        outputs = []
        for block in self.blocks:
            bev = block(bev)
            outputs.append(bev)
        return tuple(outputs)


class SECONDFPN(nn.Module):
    """Resizes the stages of :class:`SECOND` to one size and concatenates them.

    Args:
        in_channels: channels of each stage.
        out_channels: channels of each stage after resizing.
        upsample_strides: factor of each stage; below 1, such as 1/2, a strided convolution
            downsamples.
        norm_momentum: of the batch norms; the published value.
    """

    def __init__(
        self,
        in_channels: Sequence[int] = (128, 256),
        out_channels: Sequence[int] = (256, 256),
        upsample_strides: Sequence[float] = (1, 2),
        norm_momentum: float = 0.01,
    ) -> None:
        super().__init__()
        if not len(in_channels) == len(out_channels) == len(upsample_strides):
            raise ValueError(
                f"SECONDFPN takes one entry per stage, got in_channels {tuple(in_channels)}, "
                f"out_channels {tuple(out_channels)}, upsample_strides {tuple(upsample_strides)}"
            )
        self.deblocks = nn.ModuleList()
        for inside, outside, factor in zip(
            in_channels, out_channels, upsample_strides, strict=True
        ):
            resize: nn.Module
            if factor > 1:
                resize = nn.ConvTranspose2d(inside, outside, int(factor), int(factor), bias=False)
            else:
                stride = round(1 / factor)
                resize = nn.Conv2d(inside, outside, stride, stride, bias=False)
            norm = nn.BatchNorm2d(outside, eps=1e-3, momentum=norm_momentum)
            self.deblocks.append(nn.Sequential(resize, norm, nn.ReLU(inplace=True)))
        self.out_channels = sum(out_channels)

    def forward(self, maps: Sequence[Tensor]) -> Tensor:
        """Stages ``(B, in_channels[i], Y_i, X_i)`` to ``(B, sum(out_channels), Y, X)``."""
        if len(maps) != len(self.deblocks):
            raise ValueError(f"SECONDFPN takes {len(self.deblocks)} maps, got {len(maps)}")
        return torch.cat([block(m) for block, m in zip(self.deblocks, maps, strict=True)], dim=1)
