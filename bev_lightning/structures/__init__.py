"""What every layer uses: transforms, the BEV grid, boxes and the batch. Depends on torch alone."""

from bev_lightning.structures.batch import Batch, Cameras, Points, Radar
from bev_lightning.structures.boxes import Boxes3D
from bev_lightning.structures.grid import BevGrid
from bev_lightning.structures.inputs import CameraInput, Inputs, LidarInput, RadarInput

__all__ = [
    "Batch",
    "BevGrid",
    "Boxes3D",
    "CameraInput",
    "Cameras",
    "Inputs",
    "LidarInput",
    "Points",
    "Radar",
    "RadarInput",
]
