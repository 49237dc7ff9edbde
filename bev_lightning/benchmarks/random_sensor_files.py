"""Random sensor files with the sizes and decoding costs of nuScenes."""

from dataclasses import dataclass
from pathlib import Path

import cv2
import numpy as np

from bev_lightning.data.nuscenes.sample import LIDAR, Annotations, Readings, Sample

_IMAGE_SIZE, _POINTS_PER_SWEEP, _SWEEP_US = (900, 1600), 34_720, 50_000
_MOUNT = np.array([0.0, 0.0, 1.8, 1.0, 0.0, 0.0, 0.0])
_INTRINSIC = np.array([[1260.0, 0.0, 800.0], [0.0, 1260.0, 450.0], [0.0, 0.0, 1.0]])


@dataclass(frozen=True)
class Recordings:
    """The part of a sample index that a :class:`FrameSource` reads.

    Attributes:
        root: folder of the files.
        samples: by token.
        has_distorted_images: whether images have to be undistorted.
    """

    root: Path
    samples: dict[str, Sample]
    has_distorted_images: bool = False

    def sample(self, token: str) -> Sample:
        return self.samples[token]


def make_recordings(
    root: Path, num_samples: int, cameras: tuple[str, ...], sweeps: int
) -> Recordings:
    """Write JPEGs of 1600x900 and about 180 KB, and lidar files of 34,720 points.

    Args:
        root: folder of the files.
        num_samples: key frames.
        cameras: channels.
        sweeps: lidar sweeps before each key frame, in addition to its own file.
    """
    rng = np.random.default_rng(0)
    scene = _draw_scene(rng)
    samples = {}
    for number in range(num_samples):
        rows: list[tuple[str, int, str]] = []
        for camera, channel in enumerate(cameras):
            path = f"{channel}_{number}.jpg"
            image = np.roll(scene, (37 * number, 211 * camera + 53 * number), axis=(0, 1))
            _, content = cv2.imencode(".jpg", image, [cv2.IMWRITE_JPEG_QUALITY, 90])
            (root / path).write_bytes(content.tobytes())
            rows.append((channel, 0, path))
        for depth in range(sweeps + 1):
            path = f"{LIDAR}_{number}_{depth}.bin"
            (root / path).write_bytes(_make_sweep(rng).tobytes())
            rows.append((LIDAR, depth, path))
        samples[f"sample{number}"] = _make_sample(f"sample{number}", rows)
    return Recordings(root, samples)


def _draw_scene(rng: np.random.Generator) -> np.ndarray:
    """Noise image ``(H, W, 3)`` uint8 whose amplitude falls with frequency, as in photographs."""
    height, width = _IMAGE_SIZE
    scene = np.full((height, width, 3), 110, np.float32)
    for level in range(1, 9):
        size = max(2, width >> level), max(2, height >> level)
        noise = rng.standard_normal((size[1], size[0], 3), np.float32)
        scene += 1.35 * 1.5**level * cv2.resize(noise, (width, height))
    return scene.clip(0, 255).astype(np.uint8)


def _make_sweep(rng: np.random.Generator) -> np.ndarray:
    """Points ``(P, 5)`` float32: most are near the sensor, some on the car itself."""
    angle = rng.uniform(-np.pi, np.pi, _POINTS_PER_SWEEP)
    distance = rng.exponential(14.0, _POINTS_PER_SWEEP) + 0.5
    points = np.empty((_POINTS_PER_SWEEP, 5), np.float32)
    points[:, 0], points[:, 1] = distance * np.cos(angle), distance * np.sin(angle)
    points[:, 2] = rng.normal(-1.0, 0.8, _POINTS_PER_SWEEP)
    points[:, 3] = rng.integers(0, 256, _POINTS_PER_SWEEP)
    points[:, 4] = np.arange(_POINTS_PER_SWEEP) % 32
    return points


def _make_sample(token: str, rows: list[tuple[str, int, str]]) -> Sample:
    channels, depths, paths = zip(*rows, strict=True)
    num, now = len(rows), 1_600_000_000_000_000
    poses = np.tile(np.r_[np.zeros(3), 1.0, np.zeros(3)], (num, 1))
    poses[:, 0] = -0.5 * np.array(depths)
    is_camera = np.array([channel != LIDAR for channel in channels])
    readings = Readings(
        channels,
        np.array(depths),
        paths,
        paths,
        now - _SWEEP_US * np.array(depths),
        np.tile(_MOUNT, (num, 1)),
        poses,
        np.where(is_camera[:, None, None], _INTRINSIC, 0.0),
        np.where(is_camera[:, None], _IMAGE_SIZE, 0),
        np.zeros(num, np.int64),
        np.zeros((num, 8)),
    )
    nothing, counts = np.zeros((0, 3)), [np.zeros(0, np.int64)] * 3
    boxes = Annotations((), (), (), (), (), nothing, nothing, np.zeros((0, 4)), nothing, *counts)
    return Sample(token, "scene", "scene-0001", now, "", "", readings, boxes, np.zeros(18), True)
