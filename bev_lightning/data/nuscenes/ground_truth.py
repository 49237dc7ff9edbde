"""Reads the ground truth of the metric from an index."""

from collections.abc import Collection, Iterable, Sequence

import numpy as np

from bev_lightning.classes import BICYCLE_RACK
from bev_lightning.data.nuscenes.index import Index
from bev_lightning.data.nuscenes.sample import Sample, SampleIndex
from bev_lightning.data.nuscenes.schema import LIDAR, SEVERAL_ATTRIBUTES
from bev_lightning.errors import InputError
from bev_lightning.structures.ground_truth import GroundTruth

_FULL_SPLITS = ("train", "val", "test", "train_detect", "train_track")
_MINI_SPLITS = ("mini_train", "mini_val")


def read_ground_truth(index: SampleIndex, tokens: Sequence[str]) -> dict[str, GroundTruth]:
    """Read the annotated boxes that have a class, by sample token.

    Raises:
        InputError: a token is not in the index, or a box has more than one attribute.
    """
    unknown = [token for token in tokens if token not in index]
    if unknown:
        raise InputError(
            f"{len(unknown)} of the {len(tokens)} samples to evaluate on, such as {unknown[0]}, "
            f"are not in the tables of {index.root}: set data.root and data.version to theirs"
        )
    return {token: _read_sample(index.sample(token)) for token in dict.fromkeys(tokens)}


def check_predicted(index: SampleIndex, predicted: Iterable[str], evaluated: Sequence[str]) -> None:
    """Check that only evaluated samples are predicted; names the splits of both otherwise.

    Raises:
        InputError: a predicted sample is not evaluated.
    """
    predicted, expected = list(predicted), set(evaluated)
    others = [token for token in predicted if token not in expected]
    if others:
        raise InputError(
            f"{len(others)} of the {len(predicted)} predicted samples are not evaluated: the "
            f"predictions are of {_describe(index, others)}, the evaluation is on "
            f"{_describe(index, evaluated)}; predict and evaluate the same data.val_split"
        )


def _read_sample(sample: Sample) -> GroundTruth:
    boxes = sample.annotations
    rows = [row for row, name in enumerate(boxes.class_name) if name]
    racks = [row for row, name in enumerate(boxes.category) if name == BICYCLE_RACK]
    for row in rows:
        if boxes.attribute[row] == SEVERAL_ATTRIBUTES:
            raise InputError(
                f"annotation {boxes.token[row]} has several attributes where the nuScenes metric "
                f"allows one: fix its attribute_tokens in sample_annotation.json"
            )
    # The devkit measures from the ego pose of the lidar; a rig without one has another reference.
    readings = sample.readings
    lidar = [row for row in readings.find(LIDAR) if readings.sweep[row] == 0]
    ego_pose = readings.global_from_ego[lidar[0] if lidar else sample.find_reference()]
    return GroundTruth(
        ego_position=np.array(ego_pose[:3]),
        class_name=tuple(boxes.class_name[row] for row in rows),
        attribute=tuple(boxes.attribute[row] for row in rows),
        centre=boxes.centre[rows],
        size=boxes.size[rows],
        rotation=boxes.rotation[rows],
        velocity=boxes.velocity[rows, :2],
        num_points=(boxes.num_lidar_pts + boxes.num_radar_pts)[rows],
        rack_centre=boxes.centre[racks],
        rack_size=boxes.size[racks],
        rack_rotation=boxes.rotation[racks],
    )


def _describe(index: SampleIndex, tokens: Collection[str]) -> str:
    """Name of the smallest split that holds the scenes of the samples, or the scenes themselves."""
    unknown = sum(token not in index for token in tokens)
    if unknown:
        return f"{unknown} samples that {index.root} does not have"
    scenes = {index.sample(token).scene_name for token in tokens}
    if isinstance(index, Index):
        skipped = _FULL_SPLITS if index.version.endswith("mini") else _MINI_SPLITS
        splits = {name: s for name, s in index.splits.items() if name not in skipped}
        holding = [name for name, members in splits.items() if scenes <= set(members)]
        if holding:
            return min(holding, key=lambda name: len(splits[name]))
    listed = sorted(scenes)
    more = f" and {len(listed) - 3} more scenes" if len(listed) > 3 else ""
    return ", ".join(listed[:3]) + more
