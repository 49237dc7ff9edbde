"""Image backbones and necks: images to a list of feature maps, finest first.

ResNet with deformable convolutions as BEVFormer uses it, and two feature pyramids. The Swin
transformer is in :mod:`bev_lightning.models.swin`. The attribute ``out_channels`` of a backbone
holds the widths of its maps.
"""

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.models.resnet import BasicBlock, Bottleneck
from torchvision.ops import deform_conv2d

from bev_lightning.errors import InputError
from bev_lightning.models.gradient_checkpointing import checkpoint_block

_RESNETS: dict[int, tuple[type[BasicBlock] | type[Bottleneck], tuple[int, int, int, int]]] = {
    18: (BasicBlock, (2, 2, 2, 2)),
    34: (BasicBlock, (3, 4, 6, 3)),
    50: (Bottleneck, (3, 4, 6, 3)),
    101: (Bottleneck, (3, 4, 23, 3)),
}


class ResNet(nn.Module):
    """ResNet (He et al. 2016) of torchvision's blocks with any width, up to the last of
    ``out_stages``.

    torchvision's own class has one width, always four stages and none of the options below.
    Parameters have torchvision's names, which are mmdetection's too.

    Args:
        depth: 18, 34, 50 or 101.
        width: channels of the stem and of the first stage's inner convolutions; 64 as published.
        out_stages: stages to return, counted from 0; stage k has the stride ``4 * 2**k``.
        caffe_style: put the stride of a bottleneck on its first convolution, as in Detectron's
            Caffe models and BEVFormer, instead of on the 3x3 one.
        deformable_stages: stages whose 3x3 convolutions are deformable (bottlenecks only).
        frozen_stages: the stem and this many stages are not trained and keep their statistics; 0
            freezes the stem alone, -1 nothing.
        norm_eval: batch norms use their running statistics in training too.
        norm_frozen: the affine parameters of all batch norms are not trained.
        gradient_checkpointing: recompute each block in the backward pass instead of storing it.
        pretrained: weights that a training starts from, see
            :func:`bev_lightning.checkpointing.pretrained.load_backbone`; loaded by the train verb.
    """

    def __init__(
        self,
        depth: int = 50,
        width: int = 64,
        out_stages: Sequence[int] = (1, 2, 3),
        caffe_style: bool = False,
        deformable_stages: Sequence[int] = (),
        frozen_stages: int = -1,
        norm_eval: bool = False,
        norm_frozen: bool = False,
        gradient_checkpointing: bool = False,
        pretrained: str | None = None,
    ) -> None:
        super().__init__()
        self.pretrained = pretrained
        if depth not in _RESNETS:
            raise InputError(f"ResNet depth {depth} is unknown; use one of {sorted(_RESNETS)}")
        block, num_blocks = _RESNETS[depth]
        if deformable_stages and block is BasicBlock:
            raise InputError(
                f"ResNet-{depth} has no bottlenecks for deformable_stages; use depth 50 or 101, or "
                "deformable_stages=[]"
            )
        self.out_stages = tuple(out_stages)
        self.caffe_style = caffe_style
        self.frozen_stages = frozen_stages
        self.norm_eval = norm_eval
        self.gradient_checkpointing = gradient_checkpointing
        self.conv1 = nn.Conv2d(3, width, 7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        channels = width
        stage_channels = []
        for stage in range(max(self.out_stages) + 1):
            planes = width * 2**stage
            blocks = []
            for i in range(num_blocks[stage]):
                stride = 2 if stage > 0 and i == 0 else 1
                shortcut = None
                if stride > 1 or channels != planes * block.expansion:
                    shortcut = nn.Sequential(
                        nn.Conv2d(channels, planes * block.expansion, 1, stride, bias=False),
                        nn.BatchNorm2d(planes * block.expansion),
                    )
                built = block(channels, planes, stride, shortcut)
                if caffe_style and isinstance(built, Bottleneck):
                    built.conv1.stride, built.conv2.stride = (stride, stride), (1, 1)
                if stage in deformable_stages:
                    stride = built.conv2.stride[0]
                    built.conv2 = DeformableConv2d(planes, planes, stride)
                blocks.append(built)
                channels = planes * block.expansion
            self.add_module(f"layer{stage + 1}", nn.Sequential(*blocks))
            stage_channels.append(channels)
        self.out_channels = tuple(stage_channels[stage] for stage in self.out_stages)
        self._initialise()
        if norm_frozen:
            for norm in self._norms():
                norm.requires_grad_(False)
        if frozen_stages >= 0:
            for part in self._frozen_parts():
                part.requires_grad_(False)
        self.train()

    def forward(self, images: Tensor) -> list[Tensor]:
        """Images ``(M, 3, H, W)`` to maps ``(M, C_k, H / s_k, W / s_k)`` of ``out_stages``."""
        x = F.relu(self.bn1(self.conv1(images)), inplace=True)
        x = F.max_pool2d(x, 3, stride=2, padding=1)
        maps = []
        for stage in range(max(self.out_stages) + 1):
            for block in self.get_submodule(f"layer{stage + 1}").children():
                recompute = self.gradient_checkpointing and torch.is_grad_enabled()
                x = checkpoint_block(block, x) if recompute else block(x)
            if stage in self.out_stages:
                maps.append(x)
        return maps

    def train(self, mode: bool = True) -> "ResNet":
        """Training mode, except for norms whose statistics are kept."""
        super().train(mode)
        if mode and self.norm_eval:
            for norm in self._norms():
                norm.eval()
        if mode and self.frozen_stages >= 0:
            for part in self._frozen_parts():
                part.eval()
        return self

    def _norms(self) -> Iterator[nn.Module]:
        return (module for module in self.modules() if isinstance(module, nn.BatchNorm2d))

    def _frozen_parts(self) -> Iterator[nn.Module]:
        yield from (self.conv1, self.bn1)
        for stage in range(min(self.frozen_stages, max(self.out_stages) + 1)):
            yield self.get_submodule(f"layer{stage + 1}")

    def _initialise(self) -> None:
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        for module in self.modules():
            # A residual block starts as its shortcut (Goyal et al. 2017, section 5.1).
            if isinstance(module, BasicBlock):
                nn.init.zeros_(module.bn2.weight)
            elif isinstance(module, Bottleneck):
                nn.init.zeros_(module.bn3.weight)
            elif isinstance(module, DeformableConv2d):
                module.initialise()


class DeformableConv2d(nn.Module):
    """Modulated deformable 3x3 convolution (Zhu et al. 2019, DCNv2) that predicts its own offsets.

    ``conv_offset`` gives 18 offsets (dy, dx of each tap, interleaved) and 9 masks before the
    sigmoid. Offsets are in pixels, so everything is computed in float32 under autocast.
    """

    def __init__(self, in_channels: int, out_channels: int, stride: int = 1) -> None:
        super().__init__()
        self.stride = stride
        self.weight = nn.Parameter(torch.empty(out_channels, in_channels, 3, 3))
        self.conv_offset = nn.Conv2d(in_channels, 27, 3, stride=stride, padding=1)
        self.initialise()

    def initialise(self) -> None:
        """Zero offsets and masks of 0.5, as published."""
        nn.init.kaiming_normal_(self.weight, mode="fan_out", nonlinearity="relu")
        nn.init.zeros_(self.conv_offset.weight)
        nn.init.zeros_(self.conv_offset.bias)  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> Tensor:
        """``(M, C, H, W)`` to ``(M, C', H / stride, W / stride)``."""
        with torch.autocast(x.device.type, enabled=False):
            weight = self.weight.float()
            predicted = F.conv2d(
                x.float(),
                self.conv_offset.weight.float(),
                self.conv_offset.bias.float(),  # type: ignore[union-attr]
                stride=self.stride,
                padding=1,
            )
            offset, mask = predicted.split((18, 9), dim=1)
            out = deform_conv2d(
                x.float(),
                offset,
                weight,
                stride=(self.stride, self.stride),
                padding=(1, 1),
                mask=mask.sigmoid(),
            )
        return out.to(x.dtype)


class FPN(nn.Module):
    """Feature pyramid (Lin et al. 2017) in mmdetection's form.

    Args:
        in_channels: widths of the input maps, finest first.
        out_channels: width of every output map.
        num_outs: output maps; those beyond the inputs come from stride-2 convolutions, the first on
            the coarsest output itself, each further one on the ReLU of the map before it (the
            actual effect of the published ``relu_before_extra_convs``).
    """

    def __init__(self, in_channels: Sequence[int], out_channels: int, num_outs: int) -> None:
        super().__init__()
        num_inputs = len(in_channels)
        if num_outs < num_inputs:
            raise InputError(f"FPN num_outs {num_outs} is below its {num_inputs} inputs; raise it")
        self.out_channels = (out_channels,) * num_outs
        self.lateral_convs = nn.ModuleList(nn.Conv2d(c, out_channels, 1) for c in in_channels)
        self.fpn_convs = nn.ModuleList(
            nn.Conv2d(out_channels, out_channels, 3, stride=1 if k < num_inputs else 2, padding=1)
            for k in range(num_outs)
        )
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.xavier_uniform_(module.weight)
                nn.init.zeros_(module.bias)  # type: ignore[arg-type]

    def forward(self, maps: Sequence[Tensor]) -> list[Tensor]:
        """Maps ``(M, C_k, h_k, w_k)`` to ``num_outs`` maps ``(M, out_channels, ...)``."""
        laterals = [conv(x) for conv, x in zip(self.lateral_convs, maps, strict=True)]
        for k in range(len(laterals) - 1, 0, -1):
            coarse = F.interpolate(laterals[k], size=laterals[k - 1].shape[-2:], mode="nearest")
            laterals[k - 1] = laterals[k - 1] + coarse
        outs = [conv(x) for conv, x in zip(self.fpn_convs, laterals, strict=False)]
        for k in range(len(laterals), len(self.fpn_convs)):
            source = outs[-1] if k == len(laterals) else F.relu(outs[-1])
            outs.append(self.fpn_convs[k](source))
        return outs


class LiftFPN(nn.Module):
    """The pyramid of MIT BEVFusion (``GeneralizedLSSFPN``): each map is concatenated with the
    refined coarser one, upsampled bilinearly, then 1x1 and 3x3 convolutions.

    Returns one map fewer than it gets; the lift takes the first, the finest.

    Args:
        in_channels: widths of the input maps, finest first; at least two.
        out_channels: width of every output map.
    """

    def __init__(self, in_channels: Sequence[int], out_channels: int) -> None:
        super().__init__()
        if len(in_channels) < 2:
            raise InputError(f"LiftFPN needs at least two maps, got widths {tuple(in_channels)}")
        num_outs = len(in_channels) - 1
        self.out_channels = (out_channels,) * num_outs
        coarser = [out_channels] * (num_outs - 1) + [in_channels[-1]]
        self.lateral_convs = nn.ModuleList(
            conv_norm_relu(in_channels[k] + coarser[k], out_channels, 1) for k in range(num_outs)
        )
        self.fpn_convs = nn.ModuleList(
            conv_norm_relu(out_channels, out_channels, 3) for _ in range(num_outs)
        )

    def forward(self, maps: Sequence[Tensor]) -> list[Tensor]:
        """Maps ``(M, C_k, h_k, w_k)`` to maps ``(M, out_channels, h_k, w_k)``, all but the last."""
        outs = list(maps)
        for k in range(len(outs) - 2, -1, -1):
            coarse = F.interpolate(
                outs[k + 1], size=outs[k].shape[-2:], mode="bilinear", align_corners=False
            )
            outs[k] = self.fpn_convs[k](self.lateral_convs[k](torch.cat([outs[k], coarse], dim=1)))
        return outs[:-1]


def conv_norm_relu(
    in_channels: int, out_channels: int, kernel: int, stride: int = 1, bias: bool = False
) -> nn.Sequential:
    """Convolution with padding for the same size (divided by the stride), batch norm, ReLU."""
    return nn.Sequential(
        nn.Conv2d(in_channels, out_channels, kernel, stride, kernel // 2, bias=bias),
        nn.BatchNorm2d(out_channels),
        nn.ReLU(inplace=True),
    )


class MapSize:
    """Computes height and width of an image branch's first map from the image size, with a copy of
    the branch on the meta device.

    Args:
        parts: modules that map images ``(M, 3, H, W)`` to maps, one after the other.
    """

    def __init__(self, *parts: nn.Module) -> None:
        branch = nn.Sequential(*parts)
        # deepcopy takes these tensors instead of copying the values.
        blank: dict[int, Any] = {
            id(t): torch.empty_like(t, device="meta") for t in branch.buffers()
        }
        for weight in branch.parameters():
            blank[id(weight)] = nn.Parameter(torch.empty_like(weight, device="meta"))
        self._branch = copy.deepcopy(branch, blank).eval()
        self._known: dict[tuple[int, int], tuple[int, int]] = {}

    def __call__(self, height: int, width: int) -> tuple[int, int]:
        """For images of H x W."""
        if (height, width) not in self._known:
            with torch.no_grad():
                first = self._branch(torch.empty(1, 3, height, width, device="meta"))[0]
            self._known[height, width] = (int(first.shape[-2]), int(first.shape[-1]))
        return self._known[height, width]
