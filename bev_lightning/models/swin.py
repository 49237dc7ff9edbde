"""Swin transformer (Liu et al. 2021), the image backbone of MIT BEVFusion."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.ops import StochasticDepth

from bev_lightning.errors import InputError
from bev_lightning.models.gradient_checkpointing import checkpoint_block


class Swin(nn.Module):
    """Swin transformer on images of any size, as mmdetection 2 computes it.

    It differs from torchvision's in two ways that change numbers: the windows are shifted even
    where a map is not larger than one window, and patch merging orders its channels as
    :func:`torch.nn.functional.pixel_unshuffle` does.

    Args:
        width: channels of the first stage; 96 for Swin-T.
        depths, num_heads: blocks and attention heads of each stage.
        window: edge of the attention windows [tokens].
        drop_path: stochastic depth: probability to skip the last block's branches in training,
            rising linearly from 0 at the first block.
        out_stages: stages to return, counted from 0; stage k has the stride ``4 * 2**k``.
        gradient_checkpointing: recompute each block in the backward pass instead of storing it.
        pretrained: weights that a training starts from, see
            :func:`bev_lightning.checkpointing.pretrained.load_backbone`; loaded by the train verb.
    """

    def __init__(
        self,
        width: int = 96,
        depths: Sequence[int] = (2, 2, 6, 2),
        num_heads: Sequence[int] = (3, 6, 12, 24),
        window: int = 7,
        drop_path: float = 0.2,
        out_stages: Sequence[int] = (1, 2, 3),
        gradient_checkpointing: bool = False,
        pretrained: str | None = None,
    ) -> None:
        super().__init__()
        self.pretrained = pretrained
        if len(depths) != len(num_heads):
            raise InputError(
                f"Swin has {len(depths)} depths but {len(num_heads)} num_heads; give one a stage"
            )
        self.out_stages = tuple(out_stages)
        self.gradient_checkpointing = gradient_checkpointing
        self.patch_embed = nn.Conv2d(3, width, 4, stride=4)
        self.patch_norm = nn.LayerNorm(width)
        num_stages = max(self.out_stages) + 1
        rates = [drop_path * i / max(sum(depths) - 1, 1) for i in range(sum(depths))]
        self.stages = nn.ModuleList()
        self.downsamples = nn.ModuleList()
        for stage in range(num_stages):
            first = sum(depths[:stage])
            self.stages.append(
                nn.ModuleList(
                    SwinBlock(
                        width * 2**stage,
                        num_heads[stage],
                        window,
                        window // 2 if i % 2 else 0,
                        rates[first + i],
                    )
                    for i in range(depths[stage])
                )
            )
            if stage + 1 < num_stages:
                self.downsamples.append(PatchMerging(width * 2**stage))
        self.out_channels = tuple(width * 2**stage for stage in self.out_stages)
        self.norms = nn.ModuleList(nn.LayerNorm(channels) for channels in self.out_channels)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.trunc_normal_(module.weight, std=0.02)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)

    def forward(self, images: Tensor) -> list[Tensor]:
        """Images ``(M, 3, H, W)`` to maps ``(M, C_k, ceil(H / s_k), ceil(W / s_k))``."""
        height, width = images.shape[-2:]
        images = F.pad(images, (0, -width % 4, 0, -height % 4))
        x = self.patch_norm(self.patch_embed(images).permute(0, 2, 3, 1))
        maps = []
        recompute = self.gradient_checkpointing and torch.is_grad_enabled()
        for stage, blocks in enumerate(self.stages):
            for block in blocks:  # type: ignore[attr-defined]
                x = checkpoint_block(block, x) if recompute else block(x)
            if stage in self.out_stages:
                norm = self.norms[self.out_stages.index(stage)]
                maps.append(norm(x).permute(0, 3, 1, 2).contiguous())
            if stage < len(self.downsamples):
                x = self.downsamples[stage](x)
        return maps


class SwinBlock(nn.Module):
    """Pre-norm attention in windows, shifted or not, then an MLP, each with its residual."""

    def __init__(
        self,
        channels: int,
        num_heads: int,
        window: int,
        shift: int,
        drop_path: float,
    ) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(channels)
        self.attention = WindowAttention(channels, num_heads, window, shift)
        self.norm2 = nn.LayerNorm(channels)
        self.mlp = nn.Sequential(
            nn.Linear(channels, 4 * channels), nn.GELU(), nn.Linear(4 * channels, channels)
        )
        self.drop_path = StochasticDepth(drop_path, "row")

    def forward(self, x: Tensor) -> Tensor:
        """``(M, h, w, C)`` to the same shape."""
        x = x + self.drop_path(self.attention(self.norm1(x)))
        x = x + self.drop_path(self.mlp(self.norm2(x)))
        return x


class WindowAttention(nn.Module):
    """Multi-head self-attention within windows, with a learnt bias by relative position.

    A map that the windows do not divide is padded with zeros at the bottom and right; the padding
    is attended to like other tokens, as published.
    """

    relative_position_index: Tensor

    def __init__(self, channels: int, num_heads: int, window: int, shift: int) -> None:
        super().__init__()
        self.num_heads, self.window, self.shift = num_heads, window, shift
        self.qkv = nn.Linear(channels, 3 * channels)
        self.proj = nn.Linear(channels, channels)
        self.relative_position_bias_table = nn.Parameter(
            nn.init.trunc_normal_(torch.empty((2 * window - 1) ** 2, num_heads), std=0.02)
        )
        row, column = torch.meshgrid(torch.arange(window), torch.arange(window), indexing="ij")
        delta_row = row.flatten()[:, None] - row.flatten() + window - 1
        delta_column = column.flatten()[:, None] - column.flatten() + window - 1
        index = delta_row * (2 * window - 1) + delta_column
        self.register_buffer("relative_position_index", index, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """``(M, h, w, C)`` to the same shape."""
        batch, height, width, channels = x.shape
        window, shift = self.window, self.shift
        x = F.pad(x, (0, 0, 0, -width % window, 0, -height % window))
        padded_height, padded_width = x.shape[1:3]
        if shift:
            x = x.roll((-shift, -shift), dims=(1, 2))
        rows, columns = padded_height // window, padded_width // window
        x = x.view(batch, rows, window, columns, window, channels).transpose(2, 3)
        x = x.reshape(-1, window * window, channels)
        qkv = self.qkv(x).unflatten(2, (3, self.num_heads, channels // self.num_heads))
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        bias = self.relative_position_bias_table[self.relative_position_index].permute(2, 0, 1)
        if shift:
            mask = self._shift_mask(rows, columns, x.device)
            bias = bias + mask.repeat(batch, 1, 1).unsqueeze(1)
        x = F.scaled_dot_product_attention(query, key, value, attn_mask=bias.to(query.dtype))
        x = self.proj(x.transpose(1, 2).flatten(2))
        x = x.view(batch, rows, columns, window, window, channels).transpose(2, 3)
        x = x.reshape(batch, padded_height, padded_width, channels)
        if shift:
            x = x.roll((shift, shift), dims=(1, 2))
        return x[:, :height, :width]

    def _shift_mask(self, rows: int, columns: int, device: torch.device) -> Tensor:
        """``(rows * columns, window^2, window^2)``: -100 between tokens of a window that the shift
        joined from opposite ends of the map, else 0."""
        window = self.window
        part_of_row = self._parts(rows * window, device)
        part_of_column = self._parts(columns * window, device)
        part = part_of_row[:, None] * 3 + part_of_column
        part = part.view(rows, window, columns, window).transpose(1, 2).reshape(-1, window**2)
        return torch.where(part[:, :, None] == part[:, None], 0.0, -100.0)

    def _parts(self, length: int, device: torch.device) -> Tensor:
        position = torch.arange(length, device=device)
        return (position >= length - self.window).int() + (position >= length - self.shift).int()


class PatchMerging(nn.Module):
    """Halve a map: each 2x2 tokens to one of twice the channels."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4 * channels)
        self.reduction = nn.Linear(4 * channels, 2 * channels, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """``(M, h, w, C)`` to ``(M, ceil(h / 2), ceil(w / 2), 2 C)``."""
        height, width = x.shape[1:3]
        x = F.pad(x.permute(0, 3, 1, 2), (0, width % 2, 0, height % 2))
        x = F.pixel_unshuffle(x, 2).permute(0, 2, 3, 1)
        return self.reduction(self.norm(x))
