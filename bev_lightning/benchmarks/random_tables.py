"""Random nuScenes tables of any size, without sensor files, for ``bench=prepare``."""

import json
import math
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

VERSION = "v1.0-trainval"
TRAINVAL_SAMPLES, TRAINVAL_SCENES = 34149, 850
_CAMERAS = ("FRONT", "FRONT_LEFT", "FRONT_RIGHT", "BACK", "BACK_LEFT", "BACK_RIGHT")
_RADARS = ("FRONT", "FRONT_LEFT", "FRONT_RIGHT", "BACK_LEFT", "BACK_RIGHT")
# Channel, kind, recordings per key frame: 12, 20 and about 13 per second.
_SENSORS = (
    *((f"CAM_{name}", "camera", 6) for name in _CAMERAS),
    ("LIDAR_TOP", "lidar", 10),
    *((f"RADAR_{name}", "radar", 6 + number % 2) for number, name in enumerate(_RADARS)),
)
_SUFFIX = {"camera": "jpg", "lidar": "pcd.bin", "radar": "pcd"}
_CATEGORIES = (
    "vehicle.car",
    "vehicle.truck",
    "vehicle.bus.rigid",
    "human.pedestrian.adult",
    "movable_object.barrier",
    "movable_object.trafficcone",
    "vehicle.bicycle",
    "animal",
)
_ATTRIBUTES = ("vehicle.moving", "vehicle.parked", "pedestrian.standing")
_TRACKS = 50  # objects per scene, each annotated in three quarters of its frames on average
_STEP_US = 500_000  # between key frames
_SPREAD = 0x9E3779B97F4A7C15F39CC0605CEDC835  # odd: a permutation of the 128-bit numbers


def write_tables(root: Path, scenes: list[str], num_samples: int) -> dict[str, int]:
    """Write the tables of some scenes, formatted like the published ones.

    Objects appear, move, turn and disappear; key frames are half a second apart; records are in the
    order of the scenes. The same arguments give the same bytes.

    Args:
        root: folder to create, with the tables and an empty map.
        scenes: names.
        num_samples: key frames, spread evenly over the scenes.

    Returns:
        The number of records of each large table.
    """
    folder = root / VERSION
    folder.mkdir(parents=True)
    (root / "maps").mkdir()
    Image.new("L", (1, 1)).save(root / "maps" / "empty.png")
    _write_small(folder, len(scenes))
    names = ("sample", "scene", "instance", "ego_pose", "sample_data", "sample_annotation")
    counts = dict.fromkeys(names, 0)
    with ExitStack() as stack:
        files = {n: stack.enter_context(open(folder / f"{n}.json", "w")) for n in names}
        for number, name in enumerate(scenes):
            length = num_samples * (number + 1) // len(scenes) - num_samples * number // len(scenes)
            for table, record in _scene(number, name, length):
                files[table].write(",\n" if counts[table] else "[\n")
                files[table].write(record)
                counts[table] += 1
        for table, file in files.items():
            file.write("\n]" if counts[table] else "[]")
    return {name: counts[name] for name in ("sample", "sample_data", "sample_annotation")}


def _write_small(folder: Path, num_scenes: int) -> None:
    kinds = {channel: kind for channel, kind, _ in _SENSORS}
    tables: dict[str, list[dict[str, Any]]] = {
        "category": [{"token": _token("c", i), "name": n} for i, n in enumerate(_CATEGORIES)],
        "attribute": [{"token": _token("a", i), "name": n} for i, n in enumerate(_ATTRIBUTES)],
        "visibility": [{"token": str(i), "level": ""} for i in range(1, 5)],
        "log": [{"token": _token("l", 0), "location": "singapore-onenorth"}],
        "map": [{"token": _token("m", 0), "filename": "maps/empty.png"}],
        "sensor": [
            {"token": _token("s", i), "channel": channel, "modality": kind}
            for i, (channel, kind) in enumerate(kinds.items())
        ],
    }
    tables["map"][0]["log_tokens"] = [_token("l", 0)]
    # Each scene has its own calibration.
    tables["calibrated_sensor"] = [
        {
            "token": _token("k", scene * len(_SENSORS) + i),
            "sensor_token": _token("s", i),
            "translation": [1.0 + 0.1 * i, 0.01 * (scene % 10), 1.5],
            "rotation": _yaw_quaternion(0.5 * i),
            "camera_intrinsic": [[1266.4, 0.0, 816.3], [0.0, 1266.4, 491.5], [0.0, 0.0, 1.0]]
            if kind == "camera"
            else [],
        }
        for scene in range(num_scenes)
        for i, (_, kind, _) in enumerate(_SENSORS)
    ]
    for name, records in tables.items():
        (folder / f"{name}.json").write_text(json.dumps(records, indent=0))


def _scene(scene: int, name: str, length: int) -> Iterator[tuple[str, str]]:
    """Records of a scene as (table name, JSON text)."""
    samples = [_token("t", scene * 1000 + k) for k in range(length)]
    start = 1_530_000_000_000_000 + scene * 100_000_000
    yield _record(
        "scene",
        token=_token("z", scene),
        name=name,
        nbr_samples=length,
        first_sample_token=samples[0],
        last_sample_token=samples[-1],
        log_token=_token("l", 0),
    )
    for k, token in enumerate(samples):
        yield _record(
            "sample",
            token=token,
            timestamp=start + k * _STEP_US,
            prev=samples[k - 1] if k else "",
            next=samples[k + 1] if k + 1 < length else "",
            scene_token=_token("z", scene),
        )
    for lane in range(len(_SENSORS)):
        yield from _readings(scene, lane, samples, start)
    yield from _boxes(scene, samples)


def _readings(scene: int, lane: int, samples: list[str], start: int) -> Iterator[tuple[str, str]]:
    channel, kind, rate = _SENSORS[lane]
    num = (len(samples) - 1) * rate + 1
    tokens = [_token("d", (scene * len(_SENSORS) + lane) * 100_000 + i) for i in range(num)]
    calibration = _token("k", scene * len(_SENSORS) + lane)
    height, width = (900, 1600) if kind == "camera" else (0, 0)
    for i, token in enumerate(tokens):
        key = i % rate == 0
        time = start + i * _STEP_US // rate - 1000 * lane
        metres = 5e-6 * (time - start)
        pose = (
            f'{{\n"token": "{token}",\n"timestamp": {time},\n"rotation": [\n'
            f"{', '.join(map(repr, _yaw_quaternion(0.01 * metres)))}\n],\n"
            f'"translation": [\n{400 + metres!r},\n{1100 - 0.3 * metres!r},\n0.0\n]\n}}'
        )
        yield "ego_pose", pose
        folder = "samples" if key else "sweeps"
        reading = (
            f'{{\n"token": "{token}",\n"sample_token": "{samples[-(-i // rate)]}",\n'
            f'"ego_pose_token": "{token}",\n"calibrated_sensor_token": "{calibration}",\n'
            f'"timestamp": {time},\n"fileformat": "{_SUFFIX[kind][:3]}",\n'
            f'"is_key_frame": {"true" if key else "false"},\n"height": {height},\n'
            f'"width": {width},\n"filename": "{folder}/{channel}/'
            f'n015-2018-07-24-11-22-45+0800__{channel}__{time}.{_SUFFIX[kind]}",\n'
            f'"prev": "{tokens[i - 1] if i else ""}",\n'
            f'"next": "{tokens[i + 1] if i + 1 < num else ""}"\n}}'
        )
        yield "sample_data", reading


def _boxes(scene: int, samples: list[str]) -> Iterator[tuple[str, str]]:
    rng = np.random.default_rng([7, scene])
    length = len(samples)
    for track in range(_TRACKS):
        instance, number = _token("i", scene * 1000 + track), track % len(_CATEGORIES)
        first, last = 0, length - 1
        if track % 2:
            first, last = sorted(rng.integers(0, length, 2).tolist())
        tokens = [_token("b", (scene * 1000 + track) * 1000 + k) for k in range(first, last + 1)]
        yield _record(
            "instance",
            token=instance,
            category_token=_token("c", number),
            nbr_annotations=len(tokens),
            first_annotation_token=tokens[0],
            last_annotation_token=tokens[-1],
        )
        x, y = rng.uniform(-50, 50, 2) + (400, 1100)
        speed, yaw = rng.uniform(0, 10), rng.uniform(-3, 3)
        attribute = f'"{_token("a", track % len(_ATTRIBUTES))}"' if number < 4 else ""
        points = rng.integers(0, 40, (len(tokens), 2)).tolist()
        for i, token in enumerate(tokens):
            far = 0.5 * speed * i
            box = (
                f'{{\n"token": "{token}",\n"sample_token": "{samples[first + i]}",\n'
                f'"instance_token": "{instance}",\n"visibility_token": "{1 + i % 4}",\n'
                f'"attribute_tokens": [\n{attribute}\n],\n"translation": [\n'
                f"{x + far * math.cos(yaw)!r},\n{y + far * math.sin(yaw)!r},\n0.9\n],\n"
                f'"size": [\n1.9,\n{4 + 0.1 * number!r},\n1.6\n],\n"rotation": [\n'
                f"{', '.join(map(repr, _yaw_quaternion(yaw)))}\n],\n"
                f'"prev": "{tokens[i - 1] if i else ""}",\n'
                f'"next": "{tokens[i + 1] if i + 1 < len(tokens) else ""}",\n'
                f'"num_lidar_pts": {points[i][0]},\n"num_radar_pts": {points[i][1] // 10}\n}}'
            )
            yield "sample_annotation", box


def _record(table: str, **fields: object) -> tuple[str, str]:
    return table, json.dumps(fields, indent=0)


def _token(kind: str, number: int) -> str:
    """A unique token of 32 pseudo-random hexadecimal digits."""
    return f"{(ord(kind) * 2**40 + number + 1) * _SPREAD % 2**128:032x}"


def _yaw_quaternion(angle: float) -> list[float]:
    return [math.cos(angle / 2), 0.0, 0.0, math.sin(angle / 2)]
