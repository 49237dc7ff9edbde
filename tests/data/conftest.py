"""A small nuScenes tree, written by hand: known geometry, tiny files."""

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from PIL import Image

CAMERAS = ("CAM_FRONT", "CAM_BACK")
RADARS = ("RADAR_FRONT", "RADAR_BACK_LEFT")
IMAGE = (90, 160)
YAW = 0.3  # heading of the ego, which drives at 10 m/s
PCD = (
    "# .PCD v0.7 - Point Cloud Data file format\nVERSION 0.7\nFIELDS x y z dyn_prop id rcs vx vy "
    "vx_comp vy_comp "
    "is_quality_valid ambig_state x_rms y_rms invalid_state pdh0 vx_rms vy_rms\n"
    "SIZE 4 4 4 1 2 4 4 4 4 4 1 1 1 1 1 1 1 1\nTYPE F F F I I F F F F F I I I I I I I I\n"
    "COUNT 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1\nWIDTH {n}\nHEIGHT 1\nVIEWPOINT 0 0 0 1 0 0 "
    "0\nPOINTS {n}\n"
    "DATA binary\n"
)
RADAR_LAYOUT = np.dtype(
    [(n, "<f4") for n in ("x", "y", "z")]
    + [("dyn_prop", "i1"), ("id", "<i2")]
    + [(n, "<f4") for n in ("rcs", "vx", "vy", "vx_comp", "vy_comp")]
    + [
        (n, "i1")
        for n in "is_quality_valid ambig_state x_rms y_rms invalid_state pdh0 vx_rms vy_rms".split()  # noqa: SIM905
    ]
)
Scenes = Sequence[tuple[str, int]]


def quaternion(axis: Sequence[float], angle: float) -> list[float]:
    return [math.cos(angle / 2), *(math.sin(angle / 2) * v for v in axis)]


def write_radar(path: Path, returns: np.ndarray) -> None:
    path.write_bytes(PCD.format(n=len(returns)).encode() + returns.tobytes() + b"\n")


def write_tree(
    root: Path,
    scenes: Scenes = (("scene-0061", 3), ("scene-0103", 2)),
    version: str = "v1.0-mini",
    sweeps: int = 2,
    can_bus: Sequence[str] = (),
    empty: Sequence[tuple[str, int]] = (),
    radar: bool = True,
) -> Path:
    """Per key frame, 0.5 s apart: a car 12 m ahead that drives with the ego, a pedestrian who
    stands, a barrier without points, an animal. Samples in ``empty`` (scene, number) have no
    annotation."""
    rng = np.random.default_rng(0)
    table: dict[str, list[dict]] = {
        name: []
        for name in (
            "instance",
            "ego_pose",
            "scene",
            "sample",
            "sample_data",
            "sample_annotation",
            "calibrated_sensor",
        )
    }
    names = ("vehicle.car", "human.pedestrian.adult", "movable_object.barrier", "animal")
    table["category"] = [
        {"token": f"cat{i}", "name": n, "description": ""} for i, n in enumerate(names)
    ]
    table["attribute"] = [{"token": "moving", "name": "vehicle.moving", "description": ""}]
    table["visibility"] = [{"token": str(i), "level": "", "description": ""} for i in range(1, 5)]
    table["log"] = [
        {
            "token": "log",
            "logfile": "",
            "vehicle": "",
            "date_captured": "",
            "location": "boston-seaport",
        }
    ]
    table["map"] = [
        {"token": "map", "log_tokens": ["log"], "category": "", "filename": "maps/absent.png"}
    ]
    camera_turn = {"CAM_FRONT": 0.0, "CAM_BACK": math.pi}
    sensors = {"LIDAR_TOP": ("lidar", [1.0, 0.0, 1.8], quaternion((0, 0, 1), -math.pi / 2))}
    for channel in CAMERAS:  # optical axis forward, turned about z
        cos, sin = math.cos(camera_turn[channel] / 2), math.sin(camera_turn[channel] / 2)
        base = np.array([0.5, -0.5, 0.5, -0.5])
        w, x, y, z = base
        turned = [cos * w - sin * z, cos * x - sin * y, cos * y + sin * x, cos * z + sin * w]
        sensors[channel] = ("camera", [1.5 * cos**2, 0.1, 1.5], turned)
    if radar:
        sensors["RADAR_FRONT"] = ("radar", [3.4, 0.0, 0.5], quaternion((0, 0, 1), 0.0))
        sensors["RADAR_BACK_LEFT"] = ("radar", [-0.6, 0.6, 0.5], quaternion((0, 0, 1), math.pi / 2))
    table["sensor"] = [
        {"token": f"s_{c}", "channel": c, "modality": m} for c, (m, *_) in sensors.items()
    ]
    for channel, (kind, translation, rotation) in sensors.items():
        intrinsic = (
            [[130.0, 0.0, 80.0], [0.0, 130.0, 45.0], [0.0, 0.0, 1.0]] if kind == "camera" else []
        )
        table["calibrated_sensor"].append(
            {
                "token": f"c_{channel}",
                "sensor_token": f"s_{channel}",
                "translation": translation,
                "rotation": list(rotation),
                "camera_intrinsic": intrinsic,
            }
        )
        for kind_of_folder in ("samples", "sweeps"):
            (root / kind_of_folder / channel).mkdir(parents=True, exist_ok=True)
    for number, (scene, num) in enumerate(scenes):
        start = 1_600_000_000_000_000 + number * 100_000_000
        tokens = [f"{scene}_{k}" for k in range(num)]
        table["scene"].append(
            {
                "token": scene,
                "log_token": "log",
                "nbr_samples": num,
                "first_sample_token": tokens[0],
                "last_sample_token": tokens[-1],
                "name": scene,
                "description": "",
            }
        )
        last = dict.fromkeys(sensors, "")
        tracks: dict[str, list[dict]] = {name: [] for name in names}
        for k, token in enumerate(tokens):
            time = start + k * 500_000
            table["sample"].append(
                {
                    "token": token,
                    "timestamp": time,
                    "scene_token": scene,
                    "prev": tokens[k - 1] if k else "",
                    "next": tokens[k + 1] if k + 1 < num else "",
                }
            )
            for channel, (kind, *_) in sensors.items():
                steps = range(0 if kind == "camera" or not k else sweeps, -1, -1)
                for back in steps:  # sweeps before the key frame, then the key frame
                    when = time - back * 50_000 + (0 if channel == "LIDAR_TOP" else -12_000)
                    name = f"{token}_{channel}_{back}"
                    suffix = {"camera": "jpg", "lidar": "pcd.bin", "radar": "pcd"}[kind]
                    filename = f"{'sweeps' if back else 'samples'}/{channel}/{name}.{suffix}"
                    metres = 10.0 * (when - start) * 1e-6
                    table["ego_pose"].append(
                        {
                            "token": name,
                            "timestamp": when,
                            "rotation": quaternion((0, 0, 1), YAW),
                            "translation": [
                                600 + metres * math.cos(YAW),
                                1600 + metres * math.sin(YAW),
                                0.0,
                            ],
                        }
                    )
                    table["sample_data"].append(
                        {
                            "token": name,
                            "sample_token": token,
                            "ego_pose_token": name,
                            "calibrated_sensor_token": f"c_{channel}",
                            "timestamp": when,
                            "fileformat": suffix,
                            "is_key_frame": back == 0,
                            "height": IMAGE[0] if kind == "camera" else 0,
                            "width": IMAGE[1] if kind == "camera" else 0,
                            "filename": filename,
                            "prev": last[channel],
                            "next": "",
                        }
                    )
                    if last[channel]:
                        next(r for r in table["sample_data"] if r["token"] == last[channel])[
                            "next"
                        ] = name
                    last[channel] = name
                    _write_file(root / filename, kind, rng)
            if (scene, k) in empty:
                continue
            metres = 10.0 * (time - start) * 1e-6
            ahead = np.array([math.cos(YAW), math.sin(YAW), 0.0])
            origin = np.array([600.0, 1600.0, 0.0])
            positions = (
                origin + (metres + 12) * ahead + (0, 0, 0.8),
                origin + (5, 9, 0.9),
                origin + (8, -6, 0.5),
            )
            for i, position in enumerate((*positions, origin + (20, 0, 0.3))):
                record = {
                    "token": f"{token}_ann{i}",
                    "sample_token": token,
                    "instance_token": f"{scene}_{i}",
                    "visibility_token": "4",
                    "attribute_tokens": ["moving"] if i == 0 else [],
                    "translation": [float(v) for v in position],
                    "size": [1.9, 4.5, 1.6],
                    "rotation": quaternion((0, 0, 1), YAW if i == 0 else 1.0),
                    "prev": "",
                    "next": "",
                    "num_lidar_pts": 0 if i == 2 else 5,
                    "num_radar_pts": 0,
                }
                if tracks[names[i]]:
                    record["prev"] = tracks[names[i]][-1]["token"]
                    tracks[names[i]][-1]["next"] = record["token"]
                tracks[names[i]].append(record)
                table["sample_annotation"].append(record)
        for i, track in enumerate(tracks.values()):
            if track:
                table["instance"].append(
                    {
                        "token": f"{scene}_{i}",
                        "category_token": f"cat{i}",
                        "nbr_annotations": len(track),
                        "first_annotation_token": track[0]["token"],
                        "last_annotation_token": track[-1]["token"],
                    }
                )
        if scene in can_bus:
            (root / "can_bus").mkdir(exist_ok=True)
            messages = [
                {
                    "accel": [0.1, 0.2, 9.8],
                    "orientation": quaternion((0, 0, 1), YAW),
                    "pos": [0, 0, 0],
                    "rotation_rate": [0.0, 0.0, 0.01 * m],
                    "utime": start - 10_000 + 20_000 * m,
                    "vel": [10.0, 0.0, 0.0],
                }
                for m in range(60)
            ]
            (root / "can_bus" / f"{scene}_pose.json").write_text(json.dumps(messages))
    (root / version).mkdir(parents=True, exist_ok=True)
    for name, records in table.items():
        (root / version / f"{name}.json").write_text(json.dumps(records))
    return root


def _write_file(path: Path, kind: str, rng: np.random.Generator) -> None:
    if kind == "camera":
        pixels = Image.fromarray(rng.integers(0, 256, (9, 16, 3), dtype=np.uint8)).resize(
            IMAGE[::-1]
        )
        pixels.save(path, quality=95)
    elif kind == "lidar":
        points = rng.uniform((-30, -30, -3, 0, 0), (30, 30, 2, 255, 31), (200, 5)).astype(
            np.float32
        )
        path.write_bytes(points.tobytes())
    else:
        returns = np.zeros(4, RADAR_LAYOUT)
        returns["x"], returns["y"], returns["rcs"] = (5, 10, 15, 20), (1, -1, 2, 0), (1, 2, 3, 4)
        returns["vx_comp"], returns["ambig_state"] = 2.0, (3, 3, 1, 3)
        returns["invalid_state"] = (0, 0, 0, 4)
        write_radar(path, returns)


@pytest.fixture
def make_tree(tmp_path: Path) -> Callable[..., Path]:
    """``make_tree(**kwargs)`` writes a tree below tmp_path/tree and returns its root."""
    return lambda **kwargs: write_tree(tmp_path / "tree", **kwargs)


def _open_devkit(root: Path, version: str = "v1.0-mini") -> Any:
    from nuscenes import NuScenes

    with patch("nuscenes.nuscenes.MapMask"):  # the trees have no maps
        return NuScenes(version, str(root), verbose=False)


@pytest.fixture
def open_devkit() -> Callable[..., Any]:
    """``open_devkit(root, version)`` is the official reader."""
    return _open_devkit
