"""A key frame as annotated (units and frames of nuScenes), and the interface to read them.

A reader of another data set implements :class:`SampleIndex`: the rest of the pipeline
reads a data set through it only.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from scipy.spatial.transform import Rotation

from bev_lightning.data.nuscenes.schema import EGO, LIDAR
from bev_lightning.structures import Boxes3D
from bev_lightning.structures.geometry import wrap_angle


@dataclass(frozen=True)
class Readings:
    """Metadata of S sensor files: those of the key frame, and earlier lidar and radar sweeps.

    Attributes:
        channel: S names such as CAM_FRONT.
        sweep: ``(S,)`` int64 number of sweeps back from the key frame, 0 for the key frame's.
        token: S sample_data tokens.
        path: S paths relative to the data root, with forward slashes.
        timestamp: ``(S,)`` int64 [microseconds].
        ego_from_sensor: ``(S, 7)`` float64 translation [m] and quaternion w, x, y, z.
        global_from_ego: ``(S, 7)`` likewise, at the reading's timestamp.
        intrinsic: ``(S, 3, 3)`` float64 camera matrix [pixels], zero for other sensors.
        size: ``(S, 2)`` int64 height, width [pixels], zero for other sensors.
        camera_model: ``(S,)`` int64 index of the camera model in ``CAMERA_MODELS``.
        distortion: ``(S, 8)`` float64 its coefficients, padded with zeros.
    """

    channel: tuple[str, ...]
    sweep: np.ndarray
    token: tuple[str, ...]
    path: tuple[str, ...]
    timestamp: np.ndarray
    ego_from_sensor: np.ndarray
    global_from_ego: np.ndarray
    intrinsic: np.ndarray
    size: np.ndarray
    camera_model: np.ndarray
    distortion: np.ndarray

    def find(self, channel: str) -> list[int]:
        """Rows of a channel, key frame first; empty where the rig has no such sensor."""
        rows = [row for row, name in enumerate(self.channel) if name == channel]
        return sorted(rows, key=lambda row: int(self.sweep[row]))


@dataclass(frozen=True)
class Annotations:
    """M annotated boxes in the GLOBAL frame.

    Attributes:
        token, instance: M tokens each.
        category: M category names, e.g. vehicle.car.
        class_name: M classes, e.g. car; empty for categories that have none.
        attribute: M attribute names, empty for none, ``SEVERAL_ATTRIBUTES`` for more than one.
        centre: ``(M, 3)`` float64 [m].
        size: ``(M, 3)`` float64 length, width, height [m].
        rotation: ``(M, 4)`` float64 quaternion w, x, y, z.
        velocity: ``(M, 3)`` float64 [m/s] as of the devkit's ``box_velocity``, NaN where unknown.
        num_lidar_pts, num_radar_pts: ``(M,)`` int64.
        visibility: ``(M,)`` int64, 1 (hardly) to 4 (fully visible), 0 where not given.
    """

    token: tuple[str, ...]
    instance: tuple[str, ...]
    category: tuple[str, ...]
    class_name: tuple[str, ...]
    attribute: tuple[str, ...]
    centre: np.ndarray
    size: np.ndarray
    rotation: np.ndarray
    velocity: np.ndarray
    num_lidar_pts: np.ndarray
    num_radar_pts: np.ndarray
    visibility: np.ndarray


@dataclass(frozen=True)
class Sample:
    """One key frame.

    Attributes:
        token, scene_token, scene_name: as in the tables.
        timestamp: [microseconds].
        previous, next: sample tokens, empty at the scene's ends.
        readings, annotations: sensor files and boxes.
        can_bus: ``(18,)`` float64 in the layout of the published BEVFormer, absolute pose: ego
            translation [m] 0:3, the w of the ego's quaternion four times 3:7 (the published code
            assigns a quaternion object to the slice, which numpy reads as its real part; the
            weights were trained so), acceleration [m/s^2] 7:10, rotation rate [rad/s] 10:13,
            velocity [m/s] 13:16, yaw [rad] in [0, 2 pi) 16 and in degrees 17.
        from_can_bus: whether 7:16 are measured; otherwise they are derived from the ego poses.
        reference: the channel whose frame is the model's, or ``ego``.
    """

    token: str
    scene_token: str
    scene_name: str
    timestamp: int
    previous: str
    next: str
    readings: Readings
    annotations: Annotations
    can_bus: np.ndarray
    from_can_bus: bool
    reference: str = LIDAR

    def find_reference(self) -> int:
        """Row of the reading whose time and ego pose define the model frame."""
        if self.reference != EGO:
            return self.readings.find(self.reference)[0]
        apart = np.abs(self.readings.timestamp - self.timestamp)
        return int(np.where(self.readings.sweep == 0, apart, np.inf).argmin())


class SampleIndex(Protocol):
    """Random access to the key frames of a data set.

    Fulfilled by :class:`bev_lightning.data.nuscenes.index.Index` for data in nuScenes format. It
    must pickle, since loader processes receive it.

    Attributes:
        root: folder that ``Readings.path`` is relative to.
        tokens: all sample tokens, scene by scene, forward in time.
        has_distorted_images: whether any image has to be undistorted.
        scenes_without_can_bus: names of scenes whose ``Sample.can_bus`` is not measured.
        path: file beside which derived files are stored and after which they are named, such as the
            ground-truth database; outside the root.
        stamp: changes when the data set does; derived files are then rebuilt.
    """

    @property
    def root(self) -> Path: ...
    @property
    def tokens(self) -> Sequence[str]: ...
    @property
    def has_distorted_images(self) -> bool: ...
    @property
    def scenes_without_can_bus(self) -> Sequence[str]: ...
    @property
    def path(self) -> Path: ...
    @property
    def stamp(self) -> str: ...

    def __contains__(self, token: object) -> bool: ...

    def sample(self, token: str) -> Sample:
        """Read a key frame. Raises KeyError for an unknown token."""
        ...

    def scene(self, token: str) -> str:
        """The scene token of a key frame. Raises KeyError for an unknown token."""
        ...

    def split(self, name: str) -> list[str]:
        """Sample tokens of a split, whole scenes. Raises InputError for an unknown split."""
        ...


def pose_to_transform(pose: np.ndarray) -> np.ndarray:
    """Transforms ``(..., 4, 4)`` float64 of translations and quaternions ``(..., 7)``."""
    transform = np.zeros((*pose.shape[:-1], 4, 4))
    quaternion = pose[..., [4, 5, 6, 3]]  # scipy's order: x, y, z, w
    transform[..., :3, :3] = (
        Rotation.from_quat(quaternion.reshape(-1, 4)).as_matrix().reshape(*pose.shape[:-1], 3, 3)
    )
    transform[..., :3, 3] = pose[..., :3]
    transform[..., 3, 3] = 1.0
    return transform


def global_from_sensor(readings: Readings, rows: list[int]) -> np.ndarray:
    """Transforms ``(len(rows), 4, 4)``, each with the ego pose at the reading's timestamp."""
    return pose_to_transform(readings.global_from_ego[rows]) @ pose_to_transform(
        readings.ego_from_sensor[rows]
    )


def global_from_lidar_of(sample: Sample) -> np.ndarray:
    """Pose ``(4, 4)`` float64 of the model frame without augmentation: LIDAR_TOP at the key frame,
    unless the rig has another reference."""
    row = sample.find_reference()
    if sample.reference == EGO:
        return pose_to_transform(sample.readings.global_from_ego[row])
    return global_from_sensor(sample.readings, [row])[0]


def can_bus_change(sample: Sample, previous: Sample | None) -> np.ndarray:
    """CAN bus input ``(18,)`` float64 of the published BEVFormer: :attr:`Sample.can_bus` with the
    translation 0:3 [m] and the yaw 17 [degrees] as change since the previous key frame, zero
    without one.

    The change of yaw is wrapped to (-180, 180]; the published code leaves 359 degrees where the ego
    turns through north.
    """
    values = sample.can_bus.copy()
    values[[0, 1, 2, 17]] = 0.0
    if previous is not None:
        values[:3] = sample.can_bus[:3] - previous.can_bus[:3]
        values[17] = 180.0 - (180.0 - (sample.can_bus[17] - previous.can_bus[17])) % 360.0
    return values


def boxes_of(
    annotations: Annotations,
    lidar_from_global: np.ndarray,
    classes: Sequence[str],
    min_points: int,
) -> Boxes3D:
    """All boxes ``(M,)`` in the model frame; those of no class or with fewer than ``min_points``
    lidar and radar points have the label -1.

    Args:
        lidar_from_global: ``(4, 4)``, BEV augmentation included.
        classes: names in the order of the labels.
    """
    label = np.array(
        [classes.index(name) if name in classes else -1 for name in annotations.class_name],
        dtype=np.int64,
    )
    label[annotations.num_lidar_pts + annotations.num_radar_pts < min_points] = -1
    linear = lidar_from_global[:3, :3]
    scale = abs(np.linalg.det(linear)) ** (1 / 3)
    poses = np.pad(annotations.rotation, ((0, 0), (3, 0)))
    heading = pose_to_transform(poses)[:, :3, 0] @ linear.T
    # As in the published code the vertical velocity is dropped BEFORE the rotation.
    velocity = annotations.velocity * (1, 1, 0) @ linear.T
    centre = annotations.centre @ linear.T + lidar_from_global[:3, 3]
    return Boxes3D(
        centre=torch.from_numpy(centre).float(),
        size=torch.from_numpy(annotations.size * scale).float(),
        yaw=wrap_angle(torch.from_numpy(np.arctan2(heading[:, 1], heading[:, 0]))).float(),
        velocity=torch.from_numpy(velocity[:, :2].copy()).float(),
        label=torch.from_numpy(label),
        valid=torch.ones(len(label), dtype=torch.bool),
    )
