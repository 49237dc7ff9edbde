"""Writes one scene: sensor files and table rows."""

import json
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from bev_lightning.data.synthetic.camera import render_camera
from bev_lightning.data.synthetic.lidar import scan_lidar
from bev_lightning.data.synthetic.placement import build_scene
from bev_lightning.data.synthetic.radar import pack_returns, scan_radar
from bev_lightning.data.synthetic.rays import count_inside
from bev_lightning.data.synthetic.rig import (
    LIDAR,
    RADARS,
    VEHICLES,
    Array,
    Mount,
    build_rig,
    list_channels,
    modality_of,
    quaternion_from_rotation,
    rotation_from_euler,
)
from bev_lightning.data.synthetic.tables import (
    LOCATION,
    Row,
    make_token,
    visibility_token,
)

if TYPE_CHECKING:
    from bev_lightning.data.synthetic.dataset import SyntheticSpec

KEY_FRAME_US = 500_000
ANNOTATED_M = 60.0  # objects beyond this distance from the ego have no annotation
_EPOCH_US = 1_530_000_000_000_000
_SCENE_US = 1_000_000_000
_CAN_STEP_US = 20_404  # the pose messages of nuScenes come at 49 Hz
_GRAVITY = 9.81


def write_scene(
    root: Path, spec: "SyntheticSpec", name: str
) -> tuple[dict[str, list[Row]], tuple[Array, Array]]:
    """Write one scene under ``root``; its content depends on its seed and name alone.

    Returns:
        rows by table, and the edges of the road ``(S, 2)`` left and right, for the map mask.
    """
    return _SceneWriter(root, spec, name).write()


class _SceneWriter:
    def __init__(self, root: Path, spec: "SyntheticSpec", name: str) -> None:
        self.root, self.spec, self.name = root, spec, name
        self.ego_poses: list[Row] = []
        self.number = int(name.removeprefix("scene-"))
        self.vehicle = VEHICLES[self.number % len(VEHICLES)]
        self.rig = build_rig(self.vehicle, spec.image_size, spec.seed, spec.rig)
        self.rng = np.random.default_rng([spec.seed, self.number])
        self.scene = build_scene(self.rng, spec.frames_per_scene, spec.objects_per_scene)
        self.start_us = _EPOCH_US + _SCENE_US * self.number
        self.log = (
            f"{self.vehicle}-2018-06-26-{self.number // 60:02d}-{self.number % 60:02d}-00+0000"
        )
        self.chains: dict[str, list[Row]] = {channel: [] for channel in self.rig}
        num = len(self.scene.sizes)
        self.pixels = np.zeros((2, num), np.int64)  # seen, and coverable, in this key frame
        self.counts = np.zeros((2, num), np.int64)  # lidar points, radar points

    def token(self, *what: object) -> str:
        return make_token(self.spec.seed, self.name, *what)

    def seconds(self, time_us: int) -> float:
        return (time_us - self.start_us) * 1e-6

    def write(self) -> tuple[dict[str, list[Row]], tuple[Array, Array]]:
        scene, sweeps = self.scene, self.spec.sweeps_per_frame
        samples = [self.token("sample", k) for k in range(self.spec.frames_per_scene)]
        annotations: dict[int, list[Row]] = {}
        for k, sample in enumerate(samples):
            key_us = self.start_us + k * KEY_FRAME_US
            self.pixels[:], self.counts[:] = 0, 0
            for sweep in range(sweeps, -1, -1):
                time_us = key_us - sweep * KEY_FRAME_US // (sweeps + 1)
                for channel in (LIDAR, *RADARS) if sweep else self.rig:
                    self._record(channel, sample, time_us, is_key=sweep == 0)
            self._annotate(k, sample, key_us, annotations)
        objects = sorted(annotations.items())
        rows: dict[str, list[Row]] = {
            "ego_pose": self.ego_poses,
            "log": [
                {
                    "token": self.token("log"),
                    "logfile": self.log,
                    "vehicle": self.vehicle,
                    "date_captured": "2018-06-26",
                    "location": LOCATION,
                }
            ],
            "scene": [
                {
                    "token": self.token("scene"),
                    "log_token": self.token("log"),
                    "nbr_samples": len(samples),
                    "first_sample_token": samples[0],
                    "last_sample_token": samples[-1],
                    "name": self.name,
                    "description": "Synthetic: " + self._describe(),
                }
            ],
            "sample": _link(
                [
                    {
                        "token": token,
                        "timestamp": self.start_us + k * KEY_FRAME_US,
                        "scene_token": self.token("scene"),
                    }
                    for k, token in enumerate(samples)
                ]
            ),
            "instance": [
                {
                    "token": self.token("instance", n),
                    "category_token": make_token("category", scene.categories[n]),
                    "nbr_annotations": len(chain),
                    "first_annotation_token": chain[0]["token"],
                    "last_annotation_token": chain[-1]["token"],
                }
                for n, chain in objects
            ],
            "sample_annotation": [row for _, chain in objects for row in _link(chain)],
            "sample_data": [row for chain in self.chains.values() for row in _link(chain)],
            "calibrated_sensor": [
                self._calibration(channel, mount) for channel, mount in self.rig.items()
            ],
        }
        self._write_can_bus()
        return rows, (scene.road.line(11.4)[::8], scene.road.line(-7.8)[::8])

    def _record(self, channel: str, sample: str, time_us: int, is_key: bool) -> None:
        """Write one sensor file, and add its sample_data and ego_pose rows."""
        spec, mount, key_us = self.spec, self.rig[channel], time_us
        time_us += round(mount.delay_s * 1e6)
        time_s = self.seconds(time_us)
        ego_pose = self.scene.ego_pose(time_s)
        pose = ego_pose @ mount.ego_from_sensor
        modality = modality_of(channel)
        if modality == "camera":
            payload, suffix = self._encode_image(mount, pose, time_s), "jpg"
        elif modality == "lidar":
            points, _ = scan_lidar(
                self.scene, pose, time_s, spec.num_beams, spec.num_azimuths, self.rng
            )
            payload, suffix = points.tobytes(), "pcd.bin"
            if is_key:
                self._count(0, points[:, :3].astype(np.float64), pose, time_s)
        else:
            returns = scan_radar(self.scene, mount.ego_from_sensor, time_s, self.rng)
            payload, suffix = pack_returns(returns), "pcd"
            if is_key:
                xyz = np.stack([returns[axis] for axis in "xyz"], axis=1).astype(np.float64)
                self._count(1, xyz, pose, self.seconds(key_us))
        folder = "samples" if is_key else "sweeps"
        name = f"{folder}/{channel}/{self.log}__{channel}__{time_us}.{suffix}"
        (self.root / name).write_bytes(payload)
        token = self.token(channel, time_us)
        height, width = mount.image_size
        self.chains[channel].append(
            {
                "token": token,
                "sample_token": sample,
                "ego_pose_token": token,
                "calibrated_sensor_token": self.token("calibration", channel),
                "timestamp": time_us,
                "fileformat": "jpg" if modality == "camera" else "pcd",
                "is_key_frame": is_key,
                "height": height,
                "width": width,
                "filename": name,
            }
        )
        self.ego_poses.append(
            {
                "token": token,
                "timestamp": time_us,
                "rotation": quaternion_from_rotation(ego_pose[:3, :3]),
                "translation": ego_pose[:3, 3].tolist(),
            }
        )

    def _encode_image(self, mount: Mount, pose: Array, time_s: float) -> bytes:
        image, owner, totals = render_camera(self.scene, pose, mount, time_s)
        self.pixels[0] += np.bincount(owner[owner >= 0], minlength=len(totals))
        self.pixels[1] += totals
        buffer = BytesIO()
        Image.fromarray(image).save(buffer, "JPEG", quality=90)
        return buffer.getvalue()

    def _count(self, row: int, xyz: NDArray[np.float64], pose: Array, time_s: float) -> None:
        points = xyz @ pose[:3, :3].T + pose[:3, 3]
        self.counts[row] += count_inside(points, self.scene.object_poses(time_s), self.scene.sizes)

    def _annotate(
        self, frame: int, sample: str, time_us: int, annotations: dict[int, list[Row]]
    ) -> None:
        """Add a row of each object within reach at a key frame to the object's chain."""
        scene, time_s = self.scene, self.seconds(time_us)
        poses, ego = scene.object_poses(time_s), scene.ego_pose(time_s)[:2, 3]
        for n, (x, y, yaw) in enumerate(poses.tolist()):
            if not scene.categories[n] or np.hypot(x - ego[0], y - ego[1]) > ANNOTATED_M:
                continue
            seen, coverable = self.pixels[:, n]
            length, width, height = scene.sizes[n].tolist()
            attribute = scene.attributes[n]
            annotations.setdefault(n, []).append(
                {
                    "token": self.token("annotation", n, frame),
                    "sample_token": sample,
                    "instance_token": self.token("instance", n),
                    "visibility_token": visibility_token(seen / max(coverable, 1)),
                    "attribute_tokens": [make_token("attribute", attribute)] if attribute else [],
                    "translation": [x, y, height / 2],
                    "size": [width, length, height],
                    "rotation": quaternion_from_rotation(rotation_from_euler(0.0, 0.0, yaw)),
                    "num_lidar_pts": int(self.counts[0, n]),
                    "num_radar_pts": int(self.counts[1, n]),
                }
            )

    def _calibration(self, channel: str, mount: Mount) -> Row:
        row: Row = {
            "token": self.token("calibration", channel),
            "sensor_token": make_token("sensor", channel),
            "translation": mount.ego_from_sensor[:3, 3].tolist(),
            "rotation": quaternion_from_rotation(mount.ego_from_sensor[:3, :3]),
            "camera_intrinsic": [] if mount.intrinsic is None else mount.intrinsic.tolist(),
        }
        if mount.camera_model is not None:
            row["camera_model"] = mount.camera_model.name
            row["camera_distortion"] = list(mount.camera_model.distortion)
        return row

    def _describe(self) -> str:
        kinds = [kind.name for kind in self.scene.kinds if kind.name]
        return ", ".join(f"{kinds.count(name)} {name}" for name in dict.fromkeys(kinds))

    def _write_can_bus(self) -> None:
        """Write the pose messages of the CAN bus, on flat ground as in nuScenes."""
        scene, rng = self.scene, np.random.default_rng([self.spec.seed, self.number, 1])
        last_us = self.start_us + (self.spec.frames_per_scene - 1) * KEY_FRAME_US + 200_000
        messages = []
        for time_us in range(self.start_us - 100_000, last_us, _CAN_STEP_US):
            time_s = self.seconds(time_us)
            motion = scene.ego_motion(time_s)
            speed = float(np.hypot(motion[0], motion[1]))
            later = scene.ego_motion(time_s + 0.1)
            gain = (float(np.hypot(later[0], later[1])) - speed) / 0.1
            pose = scene.ego_pose(time_s)
            yaw = np.arctan2(pose[1, 0], pose[0, 0])
            accel = np.array([gain, speed * motion[2], _GRAVITY]) + rng.normal(0, 0.05, 3)
            turning = np.array([0.0, 0.0, motion[2]]) + rng.normal(0, 0.005, 3)
            messages.append(
                {
                    "accel": accel.tolist(),
                    "orientation": [float(np.cos(yaw / 2)), 0.0, 0.0, float(np.sin(yaw / 2))],
                    "pos": [float(pose[0, 3]), float(pose[1, 3]), 0.0],
                    "rotation_rate": turning.tolist(),
                    "utime": time_us,
                    "vel": [speed, 0.0, 0.0],
                }
            )
        (self.root / "can_bus" / f"{self.name}_pose.json").write_text(json.dumps(messages))


def _link(chain: list[Row]) -> list[Row]:
    """Set prev and next of chronological rows, and return them."""
    tokens = ["", *(row["token"] for row in chain), ""]
    for i, row in enumerate(chain):
        row["prev"], row["next"] = tokens[i], tokens[i + 2]
    return chain


def make_folders(root: Path, rig: str) -> None:
    """Create the folders that the scenes are written to."""
    for channel in list_channels(rig):
        (root / "samples" / channel).mkdir(parents=True)
        if modality_of(channel) != "camera":
            (root / "sweeps" / channel).mkdir(parents=True)
    (root / "can_bus").mkdir()
    (root / "maps").mkdir()
