"""Annotated boxes of a sample as a metric reads them."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class GroundTruth:
    """M annotated boxes of a sample in the GLOBAL frame.

    Attributes:
        ego_position: ``(3,)`` float64 [m]; the metric measures the range of boxes from here.
        class_name: M names as in ``data.classes``; not only the classes that a model predicts.
        attribute: M attribute names, empty where there is none.
        centre: ``(M, 3)`` float64 [m].
        size: ``(M, 3)`` float64 length, width, height [m].
        rotation: ``(M, 4)`` float64 quaternion w, x, y, z.
        velocity: ``(M, 2)`` float64 [m/s], NaN where unknown.
        num_points: ``(M,)`` int64 lidar and radar points.
        rack_centre, rack_size, rack_rotation: likewise of R bicycle racks; bicycles and motorcycles
            in them are not evaluated.
    """

    ego_position: NDArray[np.float64]
    class_name: tuple[str, ...]
    attribute: tuple[str, ...]
    centre: NDArray[np.float64]
    size: NDArray[np.float64]
    rotation: NDArray[np.float64]
    velocity: NDArray[np.float64]
    num_points: NDArray[np.int64]
    rack_centre: NDArray[np.float64]
    rack_size: NDArray[np.float64]
    rack_rotation: NDArray[np.float64]
