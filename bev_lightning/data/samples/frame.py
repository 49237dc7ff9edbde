"""Describes one sample: the files to read, their transforms, and all that needs no file.

A loader turns a :class:`Frame` into a batch of one: it reads the files, applies the transforms of
the frame, and fills ``cameras``, ``points`` and ``radar`` of ``Frame.batch``. Geometry and
augmentation are computed here alone, so every loader agrees on them.
"""

from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import Literal, TypeVar

import numpy as np
import torch
from torch import Tensor

from bev_lightning.data.nuscenes.missing_files import filter_missing
from bev_lightning.data.nuscenes.sample import (
    Sample,
    SampleIndex,
    boxes_of,
    can_bus_change,
    global_from_lidar_of,
    global_from_sensor,
    pose_to_transform,
)
from bev_lightning.data.nuscenes.sensor_rig import SensorRig
from bev_lightning.data.samples.file_sources import ImageSource, LidarSource, RadarSource
from bev_lightning.data.transforms.augment import (
    Augment,
    eval_image_transform,
    random_bev_transform,
    random_history_steps,
    random_image_transform,
)
from bev_lightning.data.transforms.grid_mask import GridMask, random_grid_mask
from bev_lightning.data.transforms.gt_sampling import GTSampler, SampledObjects, join_boxes
from bev_lightning.data.transforms.photometric import ColourChange, random_colour_changes
from bev_lightning.errors import InputError
from bev_lightning.structures import Batch, Boxes3D, Inputs

_T = TypeVar("_T")


@dataclass(frozen=True)
class Frame:
    """One sample, before its files are read.

    Attributes:
        sample_token: nuScenes token.
        images: in the order of ``CameraInput.channels``; empty without cameras.
        lidar: key frame first, then sweeps back in time; empty without lidar.
        radar: empty without radar.
        image_from_lidar: ``(1, N, 4, 4)`` float32, image and BEV augmentation included, or None.
        batch: of size 1 with all but ``cameras``, ``points``, ``radar`` and ``history`` filled.
        history: the previous key frames of the scene, oldest first, without targets, under the same
            augmentation.
        pasted: objects of other scenes (GT sampling) whose points the loader adds to the lidar's;
            their boxes are already targets.
        mask: hides parts of the images; None for no mask.
        colours: photometric distortion of each image; empty for none.
    """

    sample_token: str
    images: tuple[ImageSource, ...]
    lidar: tuple[LidarSource, ...]
    radar: tuple[RadarSource, ...]
    image_from_lidar: Tensor | None
    batch: Batch
    history: tuple["Frame", ...] = ()
    pasted: SampledObjects | None = None
    mask: GridMask | None = None
    colours: tuple[ColourChange, ...] = ()


@dataclass(eq=False, repr=False)
class FrameSource:
    """Builds the frames of a list of samples, with augmentation, GT sampling and temporal queues.

    :meth:`frame` is a pure function of (seed, epoch, position): any worker, any rank and a resumed
    run build the same frame, in any order. A position is an index into :attr:`tokens`.

    Temporal queues: with ``Inputs.history`` = n, ``Frame.history`` always holds n frames: the
    previous n key frames, or n of the last n + 1 with ``Augment.history_drop``. Where the scene has
    fewer with all files present, the oldest is repeated (the frame itself, without targets, where
    there is none). The oldest entry always has ``has_previous`` False, and so has the frame itself
    where it has no predecessor. A temporal model that resets wherever ``has_previous`` is False
    thus sees exactly the frames there are, never those of another scene, and batches stack.

    Attributes:
        index: the data set.
        tokens: samples of a split, each scene contiguous; those with missing files are left out.
        inputs: sensors that the model reads; files of other sensors may be missing.
        classes: names in the order of ``Boxes3D.label``.
        augment: training augmentation; None for the fixed resize and crop of evaluation.
        seed: of the augmentation.
        on_missing: refuse samples with missing files ("error"), or leave them out ("skip").
        with_targets: False leaves ``Batch.targets`` None.
        min_points: lidar and radar points (as annotated) that a box needs to be a target; the
            nuScenes metric ignores boxes without points too.
        target_range: x, y, z minima and maxima [m]; targets whose centre is outside its x and y
            limits after augmentation are removed (z is not limited). By default the range of the
            lidar, else of the radar, else no limit.
        gt_sampler: adds objects of other scenes; None for none.
        rig: camera models that the index does not give.
        dropped: by token, why each sample with missing files was left out (``on_missing="skip"``).
        has_distorted_images: whether any camera is not a plain pinhole.

    Raises:
        InputError: a file is missing and on_missing is "error", or no sample is left.
    """

    index: SampleIndex
    tokens: Sequence[str]
    inputs: Inputs
    classes: Sequence[str]
    augment: Augment | None = None
    seed: int = 0
    on_missing: Literal["error", "skip"] = "error"
    with_targets: bool = True
    min_points: int = 1
    target_range: Sequence[float] | None = None
    gt_sampler: GTSampler | None = None
    rig: SensorRig = field(default_factory=SensorRig)

    def __post_init__(self) -> None:
        sensor = self.inputs.lidar or self.inputs.radar
        if self.target_range is None and sensor is not None:
            self.target_range = sensor.range
        self.tokens, self.dropped = filter_missing(
            self.index, self.tokens, self.inputs, self.on_missing
        )
        self.has_distorted_images = self.index.has_distorted_images or bool(self.rig.camera_models)
        self._kept = frozenset(self.tokens)

    def __len__(self) -> int:
        return len(self.tokens)

    def scene_sizes(self) -> tuple[int, ...]:
        """Number of samples of each scene, in order."""
        return tuple(len(list(group)) for _, group in groupby(self.tokens, self.index.scene))

    def with_tokens(self, tokens: Sequence[str]) -> "FrameSource":
        """A copy with other positions: samples reordered, left out or repeated.

        A repeated sample is augmented differently at each of its positions.
        """
        changed = copy(self)
        changed.tokens = tuple(tokens)
        return changed

    def read_or_replace(
        self, epoch: int, position: int, read: Callable[[Frame], _T]
    ) -> tuple[_T, dict[str, str]]:
        """Read the frame at a position; with ``on_missing="skip"`` else the next readable one.

        The replacement depends on the files alone, so that all workers and ranks choose the same.

        Args:
            read: reads the files of a frame; raises InputError if it cannot.

        Returns:
            what ``read`` returns, and why each skipped sample could not be read, by token.

        Raises:
            InputError: a file cannot be used and the policy is "error", or no sample can be read.
        """
        skipped: dict[str, str] = {}
        for step in range(len(self)):
            frame = self.frame(epoch, (position + step) % len(self))
            try:
                return read(frame), skipped
            except InputError as error:
                if self.on_missing == "error":
                    raise
                skipped[frame.sample_token] = str(error)
        raise InputError(
            f"none of the {len(self)} samples can be read, for instance "
            f"{next(iter(skipped.values()))}"
        )

    def frame(self, epoch: int, position: int) -> Frame:
        """Build the frame at a position in an epoch."""
        rng = np.random.default_rng([self.seed, epoch, position])
        augmented_from_lidar = (
            np.eye(4) if self.augment is None else random_bev_transform(self.augment, rng)
        )
        sample = self.index.sample(self.tokens[position])
        maps = self._image_transforms(sample, rng)
        seed = (self.seed, epoch, position)
        chain = self._queue(sample, random_history_steps(self.augment, self.inputs.history, seed))
        before = chain[-2] if len(chain) > 1 else None
        if not self.inputs.history and sample.previous in self._kept:
            before = self.index.sample(sample.previous)  # no queue, but the ego motion is an input
        current = self._build(sample, before, augmented_from_lidar, maps, self.with_targets)
        if self.gt_sampler is not None:
            present = self._annotated(sample, augmented_from_lidar @ _lidar_from_global(sample))
            pasted = self.gt_sampler.sample(epoch, position, present, augmented_from_lidar)
            if pasted is not None:
                current = replace(current, pasted=pasted, batch=self._with_boxes(current, pasted))
        past = [
            self._build(member, previous, augmented_from_lidar, maps, with_targets=False)
            for previous, member in zip([None, *chain[:-1]], chain[:-1], strict=False)
        ]
        if not past:
            past = [replace(current, batch=replace(current.batch, targets=None))]
        if self.augment is not None and self.inputs.camera is not None:
            camera, num_frames = self.inputs.camera, len(past) + 1
            mask = random_grid_mask(self.augment, camera.size, seed)
            colours = random_colour_changes(self.augment, num_frames, len(camera.channels), seed)
            current = replace(current, mask=mask, colours=colours[0])
            past = [
                replace(member, colours=changes)
                for member, changes in zip(past, reversed(colours[1:]), strict=True)
            ]
        past = [past[0]] * (self.inputs.history - len(past)) + past
        return replace(current, history=tuple(past[: self.inputs.history]))

    def _queue(self, sample: Sample, steps: set[int]) -> list[Sample]:
        """The existing samples that lie so many key frames back, oldest first, then the sample."""
        queue, member = [sample], sample
        for step in range(1, max(steps, default=0) + 1):
            if member.previous not in self._kept:
                break
            member = self.index.sample(member.previous)
            if step in steps:
                queue.insert(0, member)
        return queue

    def _image_transforms(self, sample: Sample, rng: np.random.Generator) -> list[np.ndarray]:
        """``network_from_original`` of each camera, shared by the frames of a temporal queue."""
        camera = self.inputs.camera
        if camera is None:
            return []
        maps = []
        for channel in camera.channels:
            height, width = sample.readings.size[sample.readings.find(channel)[0]].tolist()
            if self.augment is None:
                maps.append(eval_image_transform((height, width), camera.size, camera.scale))
            else:
                maps.append(random_image_transform(self.augment, rng, (height, width), camera.size))
        return maps

    def _build(
        self,
        sample: Sample,
        previous: Sample | None,
        augmented_from_lidar: np.ndarray,
        maps: list[np.ndarray],
        with_targets: bool,
    ) -> Frame:
        # "lidar" is the augmented model frame from here on.
        lidar_from_global = augmented_from_lidar @ _lidar_from_global(sample)
        images, image_from_lidar = self._images(sample, lidar_from_global, maps)
        lidar_from_previous = np.eye(4)
        if previous is not None:
            lidar_from_previous = (
                lidar_from_global
                @ global_from_lidar_of(previous)
                @ np.linalg.inv(augmented_from_lidar)
            )
        reference = sample.find_reference()
        batch = Batch(
            sample_tokens=(sample.token,),
            scene_tokens=(sample.scene_token,),
            timestamps=torch.tensor([sample.timestamp], dtype=torch.int64),
            global_from_lidar=_tensor(np.linalg.inv(lidar_from_global), torch.float64),
            global_from_ego=_tensor(
                pose_to_transform(sample.readings.global_from_ego[reference]), torch.float64
            ),
            lidar_from_previous_lidar=_tensor(lidar_from_previous),
            has_previous=torch.tensor([previous is not None]),
            targets=self._targets(sample, lidar_from_global) if with_targets else None,
            can_bus=_tensor(can_bus_change(sample, previous)),
        )
        return Frame(
            sample_token=sample.token,
            images=images,
            lidar=self._lidar(sample, lidar_from_global),
            radar=self._radar(sample, lidar_from_global),
            image_from_lidar=image_from_lidar,
            batch=batch,
        )

    def _images(
        self, sample: Sample, lidar_from_global: np.ndarray, maps: list[np.ndarray]
    ) -> tuple[tuple[ImageSource, ...], Tensor | None]:
        camera = self.inputs.camera
        if camera is None:
            return (), None
        readings, sources = sample.readings, []
        rows = [readings.find(channel)[0] for channel in camera.channels]
        intrinsics = readings.intrinsic[rows]
        for number, (row, network_from_original) in enumerate(zip(rows, maps, strict=True)):
            height, width = readings.size[row].tolist()
            path = self.index.root / readings.path[row]
            camera_model = self.rig.camera_model(camera.channels[number], readings, row)
            if camera_model is not None:
                intrinsics[number] = camera_model.view
            source = ImageSource(
                path, (height, width), camera.size, network_from_original, camera_model
            )
            sources.append(source)
        global_from_camera = global_from_sensor(readings, rows)
        image_from_camera = np.tile(np.eye(4), (len(rows), 1, 1))
        image_from_camera[:, :3, :3] = np.stack(maps) @ intrinsics
        camera_from_lidar = np.linalg.inv(lidar_from_global @ global_from_camera)
        return tuple(sources), _tensor(image_from_camera @ camera_from_lidar)

    def _lidar(self, sample: Sample, lidar_from_global: np.ndarray) -> tuple[LidarSource, ...]:
        lidar = self.inputs.lidar
        if lidar is None:
            return ()
        rows = sample.readings.find(lidar.channel)[: lidar.sweeps + 1]
        files = self._files(sample, rows, rows[0], lidar_from_global)
        return tuple(LidarSource(*file) for file in files)

    def _radar(self, sample: Sample, lidar_from_global: np.ndarray) -> tuple[RadarSource, ...]:
        radar = self.inputs.radar
        if radar is None:
            return ()
        readings = sample.readings
        found = [
            (int(readings.sweep[row]), sensor, row)
            for sensor, channel in enumerate(radar.channels)
            for row in readings.find(channel)[: radar.sweeps + 1]
        ]
        found.sort()
        rows = [row for *_, row in found]
        files = self._files(sample, rows, sample.find_reference(), lidar_from_global)
        return tuple(
            RadarSource(*file, sensor) for file, (_, sensor, _) in zip(files, found, strict=True)
        )

    def _files(
        self, sample: Sample, rows: list[int], key_row: int, lidar_from_global: np.ndarray
    ) -> Iterator[tuple[Path, np.ndarray, float]]:
        """Path, ``lidar_from_sensor`` and age [s] before the row ``key_row`` of readings."""
        readings = sample.readings
        matrices = lidar_from_global @ global_from_sensor(readings, rows)
        for row, matrix in zip(rows, matrices, strict=True):
            age = float(readings.timestamp[key_row] - readings.timestamp[row]) * 1e-6
            yield self.index.root / readings.path[row], matrix, age

    def _targets(self, sample: Sample, lidar_from_global: np.ndarray) -> Boxes3D:
        """``(1, M)`` boxes in the augmented model frame, filtered by class, points and range."""
        boxes = self._annotated(sample, lidar_from_global)
        return Boxes3D.stack([self._in_range(boxes[boxes.label >= 0])])

    def _with_boxes(self, frame: Frame, pasted: SampledObjects) -> Batch:
        targets = frame.batch.targets
        if targets is None:
            return frame.batch
        boxes = join_boxes(targets[0], self._in_range(pasted.boxes))
        return replace(frame.batch, targets=Boxes3D.stack([boxes]))

    def _in_range(self, boxes: Boxes3D) -> Boxes3D:
        if self.target_range is None:
            return boxes
        low, high = boxes.centre.new_tensor(self.target_range).view(2, 3)[:, :2]
        return boxes[((boxes.centre[:, :2] >= low) & (boxes.centre[:, :2] < high)).all(dim=-1)]

    def _annotated(self, sample: Sample, lidar_from_global: np.ndarray) -> Boxes3D:
        return boxes_of(sample.annotations, lidar_from_global, self.classes, self.min_points)


def _lidar_from_global(sample: Sample) -> np.ndarray:
    return np.linalg.inv(global_from_lidar_of(sample))


def _tensor(matrix: np.ndarray, dtype: torch.dtype = torch.float32) -> Tensor:
    """A batch of one: ``(...)`` to ``(1, ...)``."""
    return torch.from_numpy(np.ascontiguousarray(matrix)).to(dtype)[None]
