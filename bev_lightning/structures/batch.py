"""Typed batch that the data pipeline gives to the models.

Model frame: the LIDAR_TOP sensor at the key frame's time, as nuScenes defines it (x right, y
forward, z up), after BEV augmentation, if any.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from bev_lightning.structures.boxes import Boxes3D

_T = TypeVar("_T")


@dataclass(frozen=True)
class Cameras:
    """Images of N cameras and their projections.

    Attributes:
        images: ``(B, N, 3, H, W)`` float32 RGB, normalised.
        image_from_lidar: ``(B, N, 4, 4)`` float32, image and BEV augmentation included.
    """

    images: Tensor
    image_from_lidar: Tensor


@dataclass(frozen=True)
class Points:
    """Lidar points in the model frame, padded to the longest cloud.

    Attributes:
        features: ``(B, P, 5)`` float32 x, y, z [m], intensity 0..255 as stored, age [s] (0 for the
            key frame, positive for older sweeps); rows from ``count`` on are padding.
        count: ``(B,)`` int64 points of each sample.
    """

    features: Tensor
    count: Tensor


@dataclass(frozen=True)
class Radar:
    """Radar returns in the model frame, padded to the most returns.

    Attributes:
        features: ``(B, P, 8)`` float32 x, y, z [m], RCS [dBsm], ego-motion-compensated velocity
            along x and y [m/s], age [s], index of the radar; rows from ``count`` on are padding.
        count: ``(B,)`` int64 returns of each sample.
    """

    features: Tensor
    count: Tensor


@dataclass(frozen=True)
class Batch:
    """B samples: sensor data, poses and, in training, annotated boxes.

    Data of sensors that the model does not read is None.

    Attributes:
        sample_tokens, scene_tokens: nuScenes tokens of the B samples.
        timestamps: ``(B,)`` int64 [microseconds] of the key frames.
        global_from_lidar, global_from_ego: ``(B, 4, 4)`` float64 (global coordinates reach
            kilometres).
        lidar_from_previous_lidar: ``(B, 4, 4)`` float32, previous key frame of the scene to this
            one; identity at a scene's first frame.
        has_previous: ``(B,)`` bool, False at a scene's first frame.
        cameras, points, radar: sensor data.
        targets: annotated boxes in the model frame; None in evaluation.
        can_bus: ``(B, 18)`` float32 in the layout of the published BEVFormer, or None: translation
            [m] (0:3) and yaw [degrees] (17) as changes since the previous frame, yaw [rad] (16)
            absolute, all of the EGO.
        history: the previous key frames, oldest first, each a Batch of the same size without
            targets.
    """

    sample_tokens: tuple[str, ...]
    scene_tokens: tuple[str, ...]
    timestamps: Tensor
    global_from_lidar: Tensor
    global_from_ego: Tensor
    lidar_from_previous_lidar: Tensor
    has_previous: Tensor
    cameras: Cameras | None = None
    points: Points | None = None
    radar: Radar | None = None
    targets: Boxes3D | None = None
    can_bus: Tensor | None = None
    history: tuple["Batch", ...] = ()

    @property
    def size(self) -> int:
        """B."""
        return len(self.sample_tokens)

    def __len__(self) -> int:
        return self.size

    def to(self, *args: Any, **kwargs: Any) -> "Batch":
        """Move to a device. Pass no dtype: poses are float64, and integers keep their type."""
        return _map_tensors(self, lambda value: value.to(*args, **kwargs))

    def rows(self, rows: Sequence[int]) -> "Batch":
        """Some samples, with their history; of a range (of step 1) without copies."""
        index = (
            slice(rows.start, rows.stop)
            if isinstance(rows, range)
            else torch.tensor(rows, device=self.timestamps.device)
        )
        return _map_tensors(self, lambda value: value[index])._with_tokens(rows)

    def _with_tokens(self, rows: Sequence[int]) -> "Batch":
        return replace(
            self,
            sample_tokens=tuple(self.sample_tokens[row] for row in rows),
            scene_tokens=tuple(self.scene_tokens[row] for row in rows),
            history=tuple(frame._with_tokens(rows) for frame in self.history),
        )

    def pin_memory(self) -> "Batch":
        """Page-locked copies for asynchronous transfer; without CUDA the batch itself."""
        return _map_tensors(self, lambda v: v.pin_memory()) if torch.cuda.is_available() else self

    def record_stream(self, stream: torch.cuda.Stream) -> None:
        """Mark all tensors as used by a CUDA stream other than the one that allocated them."""

        def record(value: Tensor) -> Tensor:
            value.record_stream(stream)
            return value

        _map_tensors(self, record)

    @classmethod
    def stack(cls, samples: Sequence["Batch"]) -> "Batch":
        """Concatenate batches; points, radar returns and boxes are padded to the longest."""
        if not samples:
            raise ValueError("cannot stack an empty sequence of batches")
        first = samples[0]
        if any(len(sample.history) != len(first.history) for sample in samples):
            raise ValueError("cannot stack batches with histories of different lengths")

        def gather(name: str) -> Any:
            values = [getattr(sample, name) for sample in samples]
            missing = [value is None for value in values]
            if all(missing):
                return None
            if any(missing):
                tokens = [s.sample_tokens for s, gone in zip(samples, missing, strict=True) if gone]
                raise ValueError(f"samples {tokens} have no {name} while others of the batch do")
            if isinstance(values[0], Tensor):
                return torch.cat(values)
            if isinstance(values[0], Cameras):
                return Cameras(
                    *(torch.cat([getattr(v, f.name) for v in values]) for f in fields(Cameras))
                )
            if isinstance(values[0], Boxes3D):
                return Boxes3D.stack(
                    [boxes[b] for boxes in values for b in range(len(boxes.valid))]
                )
            longest = max(value.features.shape[1] for value in values)
            padded = [
                torch.nn.functional.pad(v.features, (0, 0, 0, longest - v.features.shape[1]))
                for v in values
            ]
            return type(values[0])(torch.cat(padded), torch.cat([v.count for v in values]))

        columns = {
            field.name: gather(field.name)
            for field in fields(cls)
            if field.name not in ("sample_tokens", "scene_tokens", "history")
        }
        return cls(
            sample_tokens=tuple(token for sample in samples for token in sample.sample_tokens),
            scene_tokens=tuple(token for sample in samples for token in sample.scene_tokens),
            history=tuple(
                cls.stack(frames) for frames in zip(*(s.history for s in samples), strict=True)
            ),
            **columns,
        )

    def validate(self) -> "Batch":
        """Check shapes, types and finite values; returns self.

        Raises:
            ValueError: names the field, its wrong content and the samples.
        """
        size, real, tokens = self.size, torch.float32, ", ".join(self.sample_tokens)

        def check(
            name: str, value: Tensor, shape: tuple[int | None, ...], dtype: torch.dtype
        ) -> None:
            fits = value.ndim == len(shape) and all(
                want is None or want == got for want, got in zip(shape, value.shape, strict=True)
            )
            if not fits or value.dtype != dtype:
                want = "(" + ", ".join("*" if s is None else str(s) for s in shape) + ")"
                raise ValueError(
                    f"Batch.{name} is {tuple(value.shape)} {value.dtype}, expected {want} {dtype} "
                    f"(samples {tokens})"
                )
            if value.is_floating_point() and not bool(torch.isfinite(value).all()):
                rows = zip(self.sample_tokens, value, strict=True)
                bad = ", ".join(token for token, row in rows if not torch.isfinite(row).all())
                raise ValueError(f"Batch.{name} holds NaN or infinity in the samples {bad}")

        check("timestamps", self.timestamps, (size,), torch.int64)
        check("global_from_lidar", self.global_from_lidar, (size, 4, 4), torch.float64)
        check("global_from_ego", self.global_from_ego, (size, 4, 4), torch.float64)
        check("lidar_from_previous_lidar", self.lidar_from_previous_lidar, (size, 4, 4), real)
        check("has_previous", self.has_previous, (size,), torch.bool)
        if self.cameras is not None:
            images, image_from_lidar = self.cameras.images, self.cameras.image_from_lidar
            num = images.shape[1] if images.ndim == 5 else None
            check("cameras.images", images, (size, None, 3, None, None), real)
            check("cameras.image_from_lidar", image_from_lidar, (size, num, 4, 4), real)
        for name, cloud, width in (("points", self.points, 5), ("radar", self.radar, 8)):
            if cloud is not None:
                check(f"{name}.features", cloud.features, (size, None, width), real)
                check(f"{name}.count", cloud.count, (size,), torch.int64)
                if bool((cloud.count > cloud.features.shape[1]).any()):
                    raise ValueError(
                        f"Batch.{name}.count {cloud.count.tolist()} exceeds the "
                        f"{cloud.features.shape[1]} rows"
                    )
        if self.targets is not None:
            boxes = self.targets
            check("targets.valid", boxes.valid, (size, None), torch.bool)
            check("targets.label", boxes.label, (size, boxes.num), torch.int64)
            for name, value, width in (("centre", boxes.centre, 3), ("size", boxes.size, 3)):
                check(f"targets.{name}", value, (size, boxes.num, width), real)
            check("targets.yaw", boxes.yaw, (size, boxes.num), real)
            if bool((boxes.size[boxes.valid] <= 0).any()):
                raise ValueError(f"Batch.targets.size is not positive (samples {tokens})")
        if self.can_bus is not None:
            check("can_bus", self.can_bus, (size, 18), real)
        for frame in self.history:
            frame.validate()
        return self


def _map_tensors(value: _T, function: Callable[[Tensor], Tensor]) -> _T:
    """A copy of a nested dataclass with the function applied to every tensor in it."""
    if isinstance(value, Tensor):
        return function(value)  # type: ignore[return-value]
    if isinstance(value, tuple):
        return tuple(_map_tensors(item, function) for item in value)  # type: ignore[return-value]
    if isinstance(value, (Cameras, Points, Radar, Boxes3D, Batch)):
        changed = {f.name: _map_tensors(getattr(value, f.name), function) for f in fields(value)}
        return replace(value, **changed)
    return value
