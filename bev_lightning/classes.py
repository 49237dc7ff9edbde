"""Classes and attributes of the nuScenes detection task, and checks of a user's own class names.

Imports no torch.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from bev_lightning.errors import InputError

DETECTION_CLASSES = (
    "car",
    "truck",
    "construction_vehicle",
    "bus",
    "trailer",
    "barrier",
    "motorcycle",
    "bicycle",
    "pedestrian",
    "traffic_cone",
)
"""Detection classes in the default order of labels."""

CLASS_OF_CATEGORY: Mapping[str, str] = MappingProxyType(
    {
        "vehicle.car": "car",
        "vehicle.truck": "truck",
        "vehicle.construction": "construction_vehicle",
        "vehicle.bus.bendy": "bus",
        "vehicle.bus.rigid": "bus",
        "vehicle.trailer": "trailer",
        "movable_object.barrier": "barrier",
        "vehicle.motorcycle": "motorcycle",
        "vehicle.bicycle": "bicycle",
        "human.pedestrian.adult": "pedestrian",
        "human.pedestrian.child": "pedestrian",
        "human.pedestrian.construction_worker": "pedestrian",
        "human.pedestrian.police_officer": "pedestrian",
        "movable_object.trafficcone": "traffic_cone",
    }
)
"""Detection class of each nuScenes category; other categories belong to none."""

BICYCLE_RACK = "static_object.bicycle_rack"
"""Category of the racks in which the metric ignores bicycles and motorcycles."""

ATTRIBUTES = (
    "vehicle.moving",
    "vehicle.stopped",
    "vehicle.parked",
    "cycle.with_rider",
    "cycle.without_rider",
    "pedestrian.sitting_lying_down",
    "pedestrian.standing",
    "pedestrian.moving",
)

_VEHICLES = ("car", "truck", "construction_vehicle", "bus", "trailer")
_CYCLES = ("motorcycle", "bicycle")
MOVING_ATTRIBUTE: Mapping[str, str] = MappingProxyType(
    dict.fromkeys(_VEHICLES, "vehicle.moving")
    | dict.fromkeys(_CYCLES, "cycle.with_rider")
    | {"pedestrian": "pedestrian.moving"}
)
STILL_ATTRIBUTE: Mapping[str, str] = MappingProxyType(
    dict.fromkeys(_VEHICLES, "vehicle.parked")
    | dict.fromkeys(_CYCLES, "cycle.without_rider")
    | {"bus": "vehicle.stopped", "pedestrian": "pedestrian.standing"}
)
"""Attribute that mmdetection3d 0.17 predicts for a moving and for a still object of each class."""


def check_classes(
    classes: Sequence[str], class_of_category: Mapping[str, str] | None = None
) -> None:
    """Check the class names of a model.

    Args:
        classes: names in the order of the labels.
        class_of_category: class of each annotated category; None: :data:`CLASS_OF_CATEGORY`.

    Raises:
        InputError: there is no class, a name repeats, or no category belongs to it.
    """
    if not classes or len(set(classes)) < len(classes):
        raise InputError(
            f"data.classes={list(classes)} is empty or names a class twice: name each class once"
        )
    known = CLASS_OF_CATEGORY if class_of_category is None else class_of_category
    unknown = [str(name) for name in classes if name not in known.values()]
    if unknown and class_of_category is None:
        raise InputError(
            f"data.classes holds {', '.join(unknown)}: use {', '.join(DETECTION_CLASSES)}, or map "
            f"categories to own classes in data.class_of_category"
        )
    if unknown:
        raise InputError(
            f"data.classes holds {', '.join(unknown)}, to which data.class_of_category maps no "
            f"category: add a category, or choose from {', '.join(dict.fromkeys(known.values()))}"
        )


def map_detection_names(
    classes: Sequence[str], detection_names: Mapping[str, str] | None = None
) -> dict[str, str]:
    """The nuScenes detection class that each class is evaluated as.

    Args:
        classes: names of a model's classes.
        detection_names: detection class of own classes; a nuScenes name maps to itself.

    Returns:
        detection class by class; without the classes that have none.

    Raises:
        InputError: a class or a detection class is unknown.
    """
    given = dict(detection_names or {})
    for name, detection in given.items():
        if name not in classes or detection not in DETECTION_CLASSES:
            raise InputError(
                f"model.evaluator.detection_names.{name}={detection} must map a class of "
                f"data.classes={list(classes)} to one of {', '.join(DETECTION_CLASSES)}"
            )
    names = {name: given.get(name, name) for name in classes}
    return {name: value for name, value in names.items() if value in DETECTION_CLASSES}
