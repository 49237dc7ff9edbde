"""Random batches with the shapes and geometry of nuScenes."""

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from bev_lightning.data.synthetic.rig import LIDAR, build_rig
from bev_lightning.data.transforms.augment import eval_image_transform
from bev_lightning.structures import Batch, Boxes3D, Cameras, Inputs, Points, Radar

# Sizes of a nuScenes key frame and its sweeps; walls around the lidar.
_IMAGE_SIZE, _POINTS_PER_SWEEP, _RETURNS_PER_SWEEP, _NUM_WALLS = (900, 1600), 34_000, 125, 72
_NUM_RINGS, _LIDAR_HEIGHT_M, _STEP_M, _KEY_FRAMES_PER_S = 32, 1.84, 2.5, 2


def make_batch(
    inputs: Inputs, num_classes: int, size: int = 1, num_boxes: int = 40, seed: int = 0
) -> Batch:
    """A random batch as a loader would yield it, with the sizes and camera geometry of nuScenes.

    Args:
        inputs: inputs of the model, including history.
        num_classes: number of classes of the labels.
        size: samples B.
        num_boxes: annotations M per sample.
        seed: of the random numbers.
    """
    rng = np.random.default_rng(seed)
    newest = _make_frame(inputs, size, rng)
    history = tuple(_make_frame(inputs, size, rng) for _ in range(inputs.history))
    targets = _make_boxes(num_boxes, num_classes, size, rng)
    return replace(newest, targets=targets, history=history).validate()


def _make_frame(inputs: Inputs, size: int, rng: np.random.Generator) -> Batch:
    """One frame of a car driving straight ahead."""
    rig = build_rig("s001", _IMAGE_SIZE, seed=0)
    ego_from_lidar = rig[LIDAR].ego_from_sensor
    cameras = points = radar = None
    if inputs.camera is not None:
        image = eval_image_transform(_IMAGE_SIZE, inputs.camera.size, inputs.camera.scale)
        matrices = []
        for channel in inputs.camera.channels:
            image_from_camera = np.eye(4)
            image_from_camera[:3, :3] = image @ rig[channel].intrinsic
            camera_from_ego = np.linalg.inv(rig[channel].ego_from_sensor)
            matrices.append(image_from_camera @ camera_from_ego @ ego_from_lidar)
        shape = (size, len(matrices), 3, *inputs.camera.size)
        images = _float(rng.standard_normal(shape, dtype=np.float32))
        cameras = Cameras(images, _float(np.stack(matrices)).repeat(size, 1, 1, 1))
    if inputs.lidar is not None:
        count = min(inputs.lidar.max_points, _POINTS_PER_SWEEP * (inputs.lidar.sweeps + 1))
        clouds = np.stack([_make_points(count, inputs.lidar.range, rng) for _ in range(size)])
        points = Points(_float(clouds), torch.full((size,), count))
    if inputs.radar is not None:
        num = _RETURNS_PER_SWEEP * (inputs.radar.sweeps + 1) * len(inputs.radar.channels)
        count = min(inputs.radar.max_points, num)
        low, high = np.split(np.array(inputs.radar.range), 2)
        xyz = rng.uniform(low, high, (size, count, 3))
        more = rng.standard_normal((size, count, 4))
        sensor = rng.integers(len(inputs.radar.channels), size=(size, count, 1))
        radar = Radar(_float(np.concatenate([xyz, more, sensor], -1)), torch.full((size,), count))
    motion = torch.eye(4)
    motion[1, 3] = -_STEP_M
    pose = torch.eye(4, dtype=torch.float64).repeat(size, 1, 1)
    can_bus = torch.zeros(size, 18)
    can_bus[:, 0], can_bus[:, 7] = _STEP_M, _STEP_M * _KEY_FRAMES_PER_S
    return Batch(
        sample_tokens=tuple(f"noise-{row}" for row in range(size)),
        scene_tokens=tuple(f"noise-{row}" for row in range(size)),
        timestamps=torch.zeros(size, dtype=torch.int64),
        global_from_lidar=pose,
        global_from_ego=pose @ torch.from_numpy(np.linalg.inv(ego_from_lidar)),
        lidar_from_previous_lidar=motion.repeat(size, 1, 1),
        has_previous=torch.ones(size, dtype=torch.bool),
        cameras=cameras,
        points=points,
        radar=radar,
        can_bus=can_bus,
    )


def _make_points(count: int, range_m: tuple[float, ...], rng: np.random.Generator) -> np.ndarray:
    """Lidar points ``(count, 5)`` on the ground and on walls at random distances.

    Like real ones they are dense close to the lidar and sparse far away.
    """
    azimuth = rng.uniform(0, 2 * np.pi, count)
    elevation = np.deg2rad(np.linspace(-30, 10, _NUM_RINGS))[rng.integers(_NUM_RINGS, size=count)]
    walls = rng.uniform(5, min(range_m[3:5]), _NUM_WALLS)
    distance = walls[(azimuth / (2 * np.pi) * _NUM_WALLS).astype(int) % _NUM_WALLS]
    ground = _LIDAR_HEIGHT_M / np.maximum(np.tan(-elevation), 1e-3)
    distance = np.minimum(distance, ground) + rng.normal(0, 0.05, count)
    z = distance * np.tan(elevation)
    rows = [distance * np.cos(azimuth), distance * np.sin(azimuth), z.clip(range_m[2], range_m[5])]
    return np.stack([*rows, rng.uniform(0, 255, count), rng.uniform(0, 0.5, count)], axis=-1)


def _make_boxes(num: int, num_classes: int, size: int, rng: np.random.Generator) -> Boxes3D:
    centre = rng.uniform((-45, -45, -2), (45, 45, 0), (size, num, 3))
    extent = rng.uniform((1, 0.5, 1), (6, 2.5, 2.5), (size, num, 3))
    return Boxes3D(
        centre=_float(centre),
        size=_float(extent),
        yaw=_float(rng.uniform(-np.pi, np.pi, (size, num))),
        velocity=_float(rng.normal(0, 3, (size, num, 2))),
        label=torch.from_numpy(rng.integers(num_classes, size=(size, num))),
        valid=torch.ones(size, num, dtype=torch.bool),
    )


def _float(values: np.ndarray) -> Tensor:
    return torch.from_numpy(values.astype(np.float32))
