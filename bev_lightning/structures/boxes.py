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
        return _combine([sample.pad(longest) for sample in samples], torch.stack)

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

    def pad(self, num: int) -> "Boxes3D":
        """Append padding to ``num`` boxes. Raises ValueError if there are more already."""
        missing = num - self.num
        if missing < 0:
            raise ValueError(f"cannot pad {self.num} boxes to {num}")
        if missing == 0:
            return self
        tail = Boxes3D.empty(*self.valid.shape[:-1], missing, device=self.valid.device)
        if self.score is not None:
            tail = replace(tail, score=torch.zeros_like(tail.yaw))
        dim = self.valid.ndim - 1
        return _combine([self, tail], lambda pair: torch.cat([pair[0], pair[1].to(pair[0])], dim))

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
        x, y, z = local.unbind(-1)
        rotated = torch.stack([x * cos - y * sin, x * sin + y * cos, z], dim=-1)
        return rotated + self.centre[..., None, :]

    def _map(self, function: Callable[[Tensor], Tensor]) -> "Boxes3D":
        return _combine([self], lambda values: function(values[0]))


def _combine(boxes: list[Boxes3D], function: Callable[[list[Tensor]], Tensor]) -> Boxes3D:
    """Apply a function to each field's tensors, unless they are None."""
    columns: dict[str, Any] = {}
    for field in fields(Boxes3D):
        values = [getattr(one, field.name) for one in boxes]
        columns[field.name] = None if values[0] is None else function(values)
    return replace(boxes[0], **columns)
