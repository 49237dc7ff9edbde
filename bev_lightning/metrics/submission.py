"""Converts boxes to the nuScenes submission format, and reads and writes submission files.

The format is that of https://www.nuscenes.org/object-detection; conversion and attribute rule are
those of ``NuScenesDataset._format_bbox`` in mmdetection3d 0.17, on which the published models were
scored.
"""

import json
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.spatial.transform import Rotation
from torch import Tensor

from bev_lightning.atomic_files import replace_file
from bev_lightning.checks import is_number
from bev_lightning.classes import ATTRIBUTES, DETECTION_CLASSES, MOVING_ATTRIBUTE, STILL_ATTRIBUTE
from bev_lightning.errors import InputError
from bev_lightning.structures.boxes import Boxes3D

logger = logging.getLogger(__name__)

Entry = dict[str, Any]
Entries = dict[str, list[Entry]]

MAX_BOXES_PER_SAMPLE = 500
"""The devkit refuses a submission with more boxes in a sample."""

MOVING_SPEED = 0.2
"""Speed [m/s] above which the published rule calls an object moving."""

_LENGTHS = {"translation": 3, "size": 3, "rotation": 4, "velocity": 2}


@dataclass(frozen=True)
class Refused:
    """Numbers of boxes that the official evaluation does not accept.

    Attributes:
        invalid: boxes with NaN, infinity or a size of zero or less.
        over_limit: boxes beyond the 500 of highest score of their sample.
    """

    invalid: int = 0
    over_limit: int = 0


def attribute_of(name: str, speed: float) -> str:
    """Attribute by class and speed [m/s], as published; empty for classes that have none."""
    return (MOVING_ATTRIBUTE if speed > MOVING_SPEED else STILL_ATTRIBUTE).get(name, "")


def to_entries(
    boxes: Boxes3D,
    global_from_lidar: Tensor,
    sample_tokens: Sequence[str],
    classes: Sequence[str],
    detection_names: Mapping[str, str] | None = None,
) -> Entries:
    """Convert boxes of the model frame to nuScenes detection entries, one list for each sample.

    Padding is left out; nothing else is: pass the result through :func:`clean` before it is scored
    by other code. An unknown velocity (NaN) is written as zero, as the published code does;
    annotations, which have no score, get the score 1.

    Args:
        boxes: ``(B, M)`` in the model frame, the label indexing ``classes``.
        global_from_lidar: ``(B, 4, 4)`` float64, the inverse of any BEV augmentation included; a
            uniform scale or a mirroring in it is undone on sizes and headings too.
        sample_tokens: nuScenes tokens of the B samples.
        classes: names in the order of the labels; entries contain them as ``detection_name``.
        detection_names: nuScenes detection class of own classes, for their attributes.
    """
    boxes = boxes.to("cpu")
    pose = global_from_lidar.detach().to("cpu", torch.float64)
    linear, origin = pose[:, :3, :3], pose[:, :3, 3]
    scale = linear.det().abs().pow(1.0 / 3.0)
    unit = linear / scale[:, None, None]

    centre = boxes.centre.detach().double() @ linear.transpose(1, 2) + origin[:, None]
    size = boxes.size.detach().double()[..., [1, 0, 2]] * scale[:, None, None]
    yaw = boxes.yaw.detach().double()
    ahead = torch.stack([yaw.cos(), yaw.sin(), torch.zeros_like(yaw)], -1) @ unit.transpose(1, 2)
    up = unit[:, None, :, 2].expand_as(ahead)
    # left = up x ahead keeps the box axes right-handed where the transform mirrors.
    axes = torch.stack([ahead, torch.linalg.cross(up, ahead), up], dim=-1)
    rotation = _rotation_to_quaternion(axes)
    velocity = boxes.velocity.detach().double()
    velocity = torch.cat([velocity, torch.zeros_like(velocity[..., :1])], -1)
    velocity = velocity @ linear.transpose(1, 2)
    velocity = velocity.nan_to_num(nan=0.0, posinf=math.inf, neginf=-math.inf)[..., :2]
    speed = velocity.norm(dim=-1)
    score = torch.ones_like(yaw) if boxes.score is None else boxes.score.detach().double()

    results: Entries = {}
    aliases = detection_names or {}
    for b, token in enumerate(sample_tokens):
        keep = boxes.valid[b].nonzero().squeeze(-1)
        names = [classes[label] for label in boxes.label[b, keep].tolist()]
        columns = (centre, size, rotation, velocity, score, speed)
        rows = zip(names, *(column[b, keep].tolist() for column in columns), strict=True)
        results[token] = [
            {
                "sample_token": token,
                "translation": box_centre,
                "size": box_size,
                "rotation": box_rotation,
                "velocity": box_velocity,
                "detection_name": name,
                "detection_score": box_score,
                "attribute_name": attribute_of(aliases.get(name, name), box_speed),
            }
            for name, box_centre, box_size, box_rotation, box_velocity, box_score, box_speed in rows
        ]
    return results


def clean(results: Mapping[str, Sequence[Entry]]) -> tuple[Entries, Refused]:
    """Remove boxes that the official evaluation does not accept, with a warning.

    These are boxes with NaN, infinity or a size of zero or less; of the others all but the 500 with
    the highest score of each sample. The order stays.
    """
    cleaned: Entries = {}
    invalid: list[str] = []  # the sample of each box
    over_limit: list[str] = []
    for token, entries in results.items():
        kept = [entry for entry in entries if _is_valid(entry)]
        invalid += [token] * (len(entries) - len(kept))
        if len(kept) > MAX_BOXES_PER_SAMPLE:
            over_limit += [token] * (len(kept) - MAX_BOXES_PER_SAMPLE)
            order = sorted(range(len(kept)), key=lambda i: kept[i]["detection_score"], reverse=True)
            kept = [kept[i] for i in sorted(order[:MAX_BOXES_PER_SAMPLE])]
        cleaned[token] = kept
    if invalid:
        _warn_once(
            f"{len(invalid)} predicted boxes hold NaN or infinity or have no extent and were left "
            f"out (first in sample {invalid[0]})"
        )
    if over_limit:
        _warn_once(
            f"{len(over_limit)} predicted boxes were left out: nuScenes allows "
            f"{MAX_BOXES_PER_SAMPLE} boxes a sample and those of highest score were kept "
            f"(first in sample {over_limit[0]})"
        )
    return cleaned, Refused(len(invalid), len(over_limit))


def write_submission(
    path: Path, results: Mapping[str, Sequence[Entry]], meta: Mapping[str, bool]
) -> Path:
    """Write the submission JSON after :func:`clean`, atomically.

    Args:
        path: file to write; its folder is created.
        results: sample token -> entries, an empty list for samples without predictions.
        meta: ``use_camera``, ``use_lidar``, ``use_radar``, ``use_map``, ``use_external``; those
            left out are written as false.
    """
    cleaned, _ = clean(results)
    names = ("use_camera", "use_lidar", "use_radar", "use_map", "use_external")
    content = {"meta": {name: bool(meta.get(name, False)) for name in names}, "results": cleaned}
    path.parent.mkdir(parents=True, exist_ok=True)
    with replace_file(path, "paths.run") as file:
        file.write(json.dumps(content, allow_nan=False).encode())
    return path


def read_submission(path: Path, classes: Sequence[str] = ()) -> Entries:
    """Read a nuScenes submission file; NaN and infinity are left to :func:`clean`.

    Args:
        path: the JSON file.
        classes: own class names that it may contain.

    Raises:
        InputError: the file is missing or no submission, or a box lacks a field or has an invalid
            value.
    """
    try:
        results: Entries = json.loads(path.read_text())["results"]
        rows = [(token, entry) for token, entries in results.items() for entry in entries]
    except OSError as error:
        raise InputError(
            f"{path} cannot be read ({error.strerror}); give a submission file"
        ) from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(
            f"{path} is no nuScenes submission ({type(error).__name__}: {error}); it must be JSON "
            'with "meta" and "results"'
        ) from None
    for token, entry in rows:
        if fault := _find_fault(token, entry, (*DETECTION_CLASSES, *classes)):
            raise InputError(
                f"{path} has a box in sample {token} {fault}; write it in the nuScenes detection "
                "format"
            )
    return results


def _find_fault(token: str, entry: Any, classes: Sequence[str]) -> str:
    """The first invalid field of a box, as text; empty if all are valid."""
    if not isinstance(entry, dict):
        return f"that is {json.dumps(entry)[:40]} and no object"
    known = ("sample_token", *_LENGTHS, "detection_score", "detection_name", "attribute_name")
    if missing := [field for field in known if field not in entry]:
        return f"without {', '.join(missing)}"
    if entry["sample_token"] != token:
        return f"whose sample_token is {entry['sample_token']!r}"
    for field, length in _LENGTHS.items():
        value = entry[field]
        if not isinstance(value, list) or len(value) != length or not all(map(is_number, value)):
            return f"whose {field} is {json.dumps(value)[:60]} and not {length} numbers"
    if not is_number(entry["detection_score"]):
        return f"whose detection_score is {entry['detection_score']!r} and no number"
    if entry["detection_name"] not in classes:
        return f"whose detection_name is {entry['detection_name']!r}, which is no nuScenes class"
    if entry["attribute_name"] not in ("", *ATTRIBUTES):
        return f"whose attribute_name is {entry['attribute_name']!r}, which nuScenes does not have"
    return ""


def _is_valid(entry: Entry) -> bool:
    numbers = [entry["detection_score"], *(x for field in _LENGTHS for x in entry[field])]
    return all(map(math.isfinite, numbers)) and min(entry["size"]) > 0


@lru_cache(maxsize=64)
def _warn_once(message: str) -> None:
    logger.warning(message)


def _rotation_to_quaternion(rotation: Tensor) -> Tensor:
    """Unit quaternions ``(..., 4)`` w, x, y, z of proper rotations ``(..., 3, 3)``; NaN of NaN."""
    matrices = rotation.reshape(-1, 3, 3).numpy()
    finite = np.isfinite(matrices).all(axis=(1, 2))
    quaternion = np.full((len(matrices), 4), np.nan)
    quaternion[finite] = Rotation.from_matrix(matrices[finite]).as_quat()[:, [3, 0, 1, 2]]
    return torch.from_numpy(quaternion).view(*rotation.shape[:-2], 4)
