"""Boxes3D, the box format of the whole package; each head encodes and decodes its own."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from bev_lightning.structures.geometry import apply_transform, make_transform, wrap_angle


@dataclass(frozen=True)
class Boxes3D:
    """Upright boxes in the model frame, padded to a common count M.

    Attributes:
        centre: ``(..., M, 3)`` gravity centre x, y, z [m].
        size: ``(..., M, 3)`` length (along the heading), width, height [m].
        yaw: ``(..., M)`` [rad], 0 along +x, counter-clockwise, in (-pi, pi].
        velocity: ``(..., M, 2)`` along x and y [m/s]; NaN if unknown.
        label: ``(..., M)`` int64 index into the data set's classes.
        valid: ``(..., M)`` bool; False marks padding, whose other fields are meaningless.
        score: ``(..., M)`` in 0..1, or None for annotations.
    """

    centre: Tensor
    size: Tensor
    yaw: Tensor
    velocity: Tensor
    label: Tensor
    valid: Tensor
    score: Tensor | None = None

    @classmethod
    def empty(cls, *shape: int, device: torch.device | str | None = None) -> "Boxes3D":
        """Padding only: ``empty(B, M)`` or ``empty(0)`` for a sample without boxes."""
        return cls(
            centre=torch.zeros(*shape, 3, device=device),
            size=torch.ones(*shape, 3, device=device),
            yaw=torch.zeros(*shape, device=device),
            velocity=torch.zeros(*shape, 2, device=device),
            label=torch.zeros(*shape, dtype=torch.int64, device=device),
            valid=torch.zeros(*shape, dtype=torch.bool, device=device),
        )

    @classmethod
    def stack(cls, samples: Sequence["Boxes3D"]) -> "Boxes3D":
        """Boxes ``(M_b,)`` of several samples as ``(B, max M_b)``, padding the shorter ones."""
        longest = max(sample.num for sample in samples)
        padded = [sample.pad(longest) for sample in samples]
        columns: dict[str, Any] = {}
        for field in fields(cls):
            values = [getattr(sample, field.name) for sample in padded]
            columns[field.name] = None if values[0] is None else torch.stack(values)
        return replace(padded[0], **columns)

    @property
    def num(self) -> int:
        """M: boxes per sample, padding included."""
        return int(self.valid.shape[-1])

    def __getitem__(self, index: Any) -> "Boxes3D":
        """Index the leading dimensions: a sample ``boxes[b]``, or a mask over ``(..., M)``."""
        return self._map(lambda value: value[index])

    def to(self, *args: Any, **kwargs: Any) -> "Boxes3D":
        """Move or cast as :meth:`torch.Tensor.to` does; labels and masks keep their type."""
        device = self.centre.new_empty(0).to(*args, **kwargs).device
        return self._map(
            lambda value: (
                value.to(*args, **kwargs) if value.is_floating_point() else value.to(device)
            )
        )

    def pin_memory(self) -> "Boxes3D":
        return self._map(lambda value: value.pin_memory())

    def pad(self, num: int) -> "Boxes3D":
        """Append padding to ``num`` boxes. Raises ValueError if there are more already."""
        missing = num - self.num
        if missing < 0:
            raise ValueError(f"cannot pad {self.num} boxes to {num}")
        if missing == 0:
            return self
        tail = Boxes3D.empty(*self.valid.shape[:-1], missing, device=self.valid.device)
        columns: dict[str, Any] = {}
        for field in fields(self):
            value, end = getattr(self, field.name), getattr(tail, field.name)
            if field.name == "score" and value is not None:
                end = torch.zeros_like(tail.yaw)
            dim = len(self.valid.shape) - 1
            columns[field.name] = (
                None if value is None else torch.cat([value, end.to(value.dtype)], dim)
            )
        return replace(self, **columns)

    def transform(self, dst_from_src: Tensor) -> "Boxes3D":
        """The same boxes in another frame.

        Args:
            dst_from_src: ``(..., 4, 4)``, rotation about z with optional uniform scale or
                mirroring, and translation; leading dimensions as those of ``valid`` without M.

        Not affected by autocast.
        """
        linear = dst_from_src[..., :3, :3]
        scale = linear.det().abs().pow(1.0 / 3.0)
        turn = make_transform(linear, torch.zeros_like(linear[..., 0]))
        heading = torch.stack([self.yaw.cos(), self.yaw.sin(), torch.zeros_like(self.yaw)], dim=-1)
        heading = apply_transform(turn, heading)
        velocity = torch.cat([self.velocity, torch.zeros_like(self.velocity[..., :1])], dim=-1)
        return replace(
            self,
            centre=apply_transform(dst_from_src, self.centre),
            size=self.size * scale[..., None, None],
            yaw=wrap_angle(torch.atan2(heading[..., 1], heading[..., 0])),
            velocity=apply_transform(turn, velocity)[..., :2],
        )

    def corners(self) -> Tensor:
        """``(..., M, 8, 3)`` [m]: the bottom face's four corners (front left, front right, back
        right, back left), then the top face's in the same order."""
        unit = self.centre.new_tensor(
            [
                [x, y, z]
                for z in (-0.5, 0.5)
                for x, y in ((0.5, 0.5), (0.5, -0.5), (-0.5, -0.5), (-0.5, 0.5))
            ]
        )
        local = unit * self.size[..., None, :]
        cos, sin = self.yaw.cos()[..., None], self.yaw.sin()[..., None]
        rotated = torch.stack(
            [
                local[..., 0] * cos - local[..., 1] * sin,
                local[..., 0] * sin + local[..., 1] * cos,
                local[..., 2],
            ],
            dim=-1,
        )
        return rotated + self.centre[..., None, :]

    def _map(self, function: Callable[[Tensor], Tensor]) -> "Boxes3D":
        columns: dict[str, Any] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            columns[field.name] = None if value is None else function(value)
        return replace(self, **columns)
