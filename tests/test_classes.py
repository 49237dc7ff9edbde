"""The table of classes equals the devkit's, and invalid class names are reported."""

import pytest

from bev_lightning.classes import (
    ATTRIBUTES,
    CLASS_OF_CATEGORY,
    DETECTION_CLASSES,
    MOVING_ATTRIBUTE,
    STILL_ATTRIBUTE,
    check_classes,
    map_detection_names,
)
from bev_lightning.data.synthetic.shapes import KINDS
from bev_lightning.data.synthetic.tables import _CATEGORIES
from bev_lightning.errors import InputError

OWN = {"vehicle.car": "vehicle", "vehicle.truck": "vehicle", "human.pedestrian.adult": "person"}


@pytest.mark.devkit
def test_the_tables_equal_the_devkits() -> None:
    from nuscenes.eval.detection.constants import ATTRIBUTE_NAMES, DETECTION_NAMES
    from nuscenes.eval.detection.utils import (
        category_to_detection_name,
        detection_name_to_rel_attributes,
    )

    assert set(DETECTION_CLASSES) == set(DETECTION_NAMES)
    assert len(DETECTION_CLASSES) == len(DETECTION_NAMES)
    assert sorted(ATTRIBUTES) == sorted(ATTRIBUTE_NAMES)
    for category in {*_CATEGORIES, *CLASS_OF_CATEGORY, "vehicle", ""}:
        assert CLASS_OF_CATEGORY.get(category) == category_to_detection_name(category)
    for name in DETECTION_CLASSES:
        expected = detection_name_to_rel_attributes(name)
        assert (name in MOVING_ATTRIBUTE) == (name in STILL_ATTRIBUTE) == bool(expected)
        if expected:
            assert {MOVING_ATTRIBUTE[name], STILL_ATTRIBUTE[name]} <= set(expected)


def test_the_synthetic_objects_are_of_these_classes() -> None:
    for kind in KINDS:
        for category in kind.categories:
            assert CLASS_OF_CATEGORY.get(category, "") == kind.name


@pytest.mark.parametrize(
    ("classes", "class_of_category", "message"),
    [
        ([], None, r"data.classes=\[\] is empty or names a class twice"),
        (["car", "car"], None, "is empty or names a class twice: name each class once"),
        (["car", "tram"], None, "holds tram: use car, truck, .* in data.class_of_category"),
        (["person", "car"], OWN, "holds car, to which .* choose from vehicle, person"),
    ],
)
def test_invalid_classes_are_reported(classes, class_of_category, message) -> None:
    with pytest.raises(InputError, match=message):
        check_classes(classes, class_of_category)


def test_any_names_are_classes() -> None:
    check_classes(["pedestrian", "car"])
    check_classes(["person", "vehicle"], OWN)


def test_own_classes_are_evaluated_as_detection_classes() -> None:
    assert map_detection_names(["car", "person"]) == {"car": "car"}
    names = map_detection_names(["person", "vehicle", "bus"], {"person": "pedestrian"})
    assert names == {"person": "pedestrian", "bus": "bus"}
    for wrong in ({"person": "human"}, {"robot": "car"}):
        with pytest.raises(InputError, match="must map a class of"):
            map_detection_names(["person"], wrong)
