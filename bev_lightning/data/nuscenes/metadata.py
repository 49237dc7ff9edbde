"""The small tables of nuScenes, and what the tokens in the large ones lead to."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from bev_lightning.data.camera_models import CAMERA_MODELS, MAX_COEFFICIENTS
from bev_lightning.data.nuscenes.json_tables import (
    check_camera_model,
    read_numbers,
    read_poses,
    read_table,
    refuse_lookup,
)
from bev_lightning.errors import InputError

_Value = TypeVar("_Value")
# What becomes part of a file's name: no separators, no way up.
_PLAIN_NAME = re.compile(r"[^/\\:\0]+")


@dataclass(frozen=True)
class Scene:
    """Samples ``start`` .. ``stop - 1`` of the index."""

    token: str
    name: str
    start: int
    stop: int


@dataclass(frozen=True)
class Catalogue:
    """Everything but readings, poses and boxes.

    A sample's number is its place in the index: scene by scene in the tables' order, forward in
    time.

    Attributes:
        scenes: in the tables' order, those with samples.
        samples: N records of sample.json.
        timestamps: ``(N,)`` int64 [microseconds].
        sample_of_token: numbers; -1 for samples that no scene leads to.
        calibration_of_token: rows of the next five.
        channel: ``(C,)`` int8, number of the channel that each calibration is of.
        ego_from_sensor: ``(C, 7)``.
        intrinsic: ``(C, 9)``, zero for other sensors than cameras.
        lens, distortion: ``(C,)`` int8 and ``(C, 8)``, as of :class:`Readings`.
        channels: names in alphabetical order.
        is_camera: ``(len(channels),)``.
        category_of_instance, attribute_of_token: numbers by token.
        categories, attributes: names.
    """

    scenes: tuple[Scene, ...]
    samples: tuple[dict[str, Any], ...]
    timestamps: np.ndarray
    sample_of_token: Mapping[str, int]
    calibration_of_token: Mapping[str, int]
    channel: np.ndarray
    ego_from_sensor: np.ndarray
    intrinsic: np.ndarray
    lens: np.ndarray
    distortion: np.ndarray
    channels: tuple[str, ...]
    is_camera: np.ndarray
    category_of_instance: Mapping[str, int]
    categories: tuple[str, ...]
    attribute_of_token: Mapping[str, int]
    attributes: tuple[str, ...]


def read_catalogue(folder: Path) -> Catalogue:
    """Read the small tables of a version's folder.

    Raises:
        InputError: a table is missing or broken, or a token leads nowhere.
    """
    scenes, samples, numbers = _order_samples(folder)
    sensors = {row["token"]: row for row in read_table(folder, "sensor", ("token", "channel"))}
    channels = tuple(sorted({str(sensor["channel"]) for sensor in sensors.values()}))
    calibrations = read_table(
        folder,
        "calibrated_sensor",
        ("token", "sensor_token", "translation", "rotation", "camera_intrinsic"),
    )
    names = [
        _look_up(sensors, row["sensor_token"], "calibrated_sensor")["channel"]
        for row in calibrations
    ]
    is_camera = np.array([name.startswith("CAM") for name in channels])
    lens, distortion = _read_lenses(calibrations)
    categories = read_table(folder, "category", ("token", "name"))
    category = {row["token"]: number for number, row in enumerate(categories)}
    attributes = read_table(folder, "attribute", ("token", "name"))
    return Catalogue(
        scenes=scenes,
        samples=samples,
        timestamps=np.array([sample["timestamp"] for sample in samples], np.int64),
        sample_of_token=numbers,
        calibration_of_token={row["token"]: number for number, row in enumerate(calibrations)},
        channel=np.array([channels.index(name) for name in names], np.int8),
        ego_from_sensor=read_poses("calibrated_sensor", calibrations),
        intrinsic=_read_intrinsics(calibrations, [name.startswith("CAM") for name in names]),
        lens=lens,
        distortion=distortion,
        channels=channels,
        is_camera=is_camera,
        category_of_instance={
            row["token"]: _look_up(category, row["category_token"], "instance")
            for row in read_table(folder, "instance", ("token", "category_token"))
        },
        categories=tuple(row["name"] for row in categories),
        attribute_of_token={row["token"]: number for number, row in enumerate(attributes)},
        attributes=tuple(row["name"] for row in attributes),
    )


def check_name(name: str, what: str) -> None:
    """Refuse what cannot be part of a file's name. Raises InputError."""
    if not _PLAIN_NAME.fullmatch(name) or name in (".", ".."):
        raise InputError(
            f"{what} {name!r} cannot be part of a file's name, as it has to be: mend it, or "
            f"download the metadata again"
        )


def _order_samples(
    folder: Path,
) -> tuple[tuple[Scene, ...], tuple[dict[str, Any], ...], dict[str, int]]:
    fields = ("token", "timestamp", "scene_token", "prev", "next")
    records = {row["token"]: row for row in read_table(folder, "sample", fields)}
    numbers = dict.fromkeys(records, -1)
    scenes: list[Scene] = []
    samples: list[dict[str, Any]] = []
    for row in read_table(folder, "scene", ("token", "name", "first_sample_token")):
        check_name(row["name"], "the scene")
        start, token = len(samples), row["first_sample_token"]
        while token:
            sample = _look_up(records, token, "sample")
            if numbers[token] >= 0:
                raise InputError(
                    f"the samples of {row['name']} in {folder / 'sample.json'} run in a circle, or "
                    f"into another scene, at {token}: download the metadata again"
                )
            numbers[token] = len(samples)
            samples.append(sample)
            token = sample["next"]
        if len(samples) > start:
            scenes.append(Scene(row["token"], row["name"], start, len(samples)))
    for sample in samples:
        if type(sample["timestamp"]) is not int:
            raise InputError(
                f"the record {sample['token']} of sample.json has timestamp = "
                f"{sample['timestamp']!r} where whole microseconds belong; download the metadata "
                f"again"
            )
    return tuple(scenes), tuple(samples), numbers


def _read_intrinsics(calibrations: list[dict[str, Any]], is_camera: list[bool]) -> np.ndarray:
    intrinsic = np.zeros((len(calibrations), 9))
    rows = np.flatnonzero(is_camera)
    cameras = [calibrations[row] for row in rows]
    matrices = read_numbers("calibrated_sensor", cameras, "camera_intrinsic", (3, 3))
    for record, matrix in zip(cameras, matrices, strict=True):
        if np.linalg.det(matrix) == 0:
            raise InputError(
                f"the record {record['token']} of calibrated_sensor.json has a camera_intrinsic "
                f"that no image can come from: {matrix.tolist()}; download the metadata again"
            )
    intrinsic[rows] = matrices.reshape(-1, 9)
    return intrinsic


def _read_lenses(calibrations: list[dict[str, Any]]) -> tuple[np.ndarray, np.ndarray]:
    """From the fields ``camera_model`` and, as nuImages calls it, ``camera_distortion``, which
    nuScenes' own tables do not have: its images are rectified."""
    lens = np.zeros(len(calibrations), np.int8)
    distortion = np.zeros((len(calibrations), MAX_COEFFICIENTS))
    for row, record in enumerate(calibrations):
        given = record.get("camera_distortion") or []
        if not given and not record.get("camera_model"):
            continue
        model = record.get("camera_model") or "brown_conrady"
        where = f"the record {record['token']} of calibrated_sensor.json"
        check_camera_model(model, len(given), where)
        lens[row] = list(CAMERA_MODELS).index(model)
        distortion[row, : len(given)] = read_numbers(
            "calibrated_sensor", [record], "camera_distortion", (len(given),)
        )
    return lens, distortion


def _look_up(rows: Mapping[str, _Value], token: str, table: str) -> _Value:
    try:
        return rows[token]
    except (KeyError, TypeError):
        raise refuse_lookup(table, token) from None
