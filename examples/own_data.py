"""Data of your own: an index that leaves out every second frame of each scene.

A reader of another format returns its own SampleIndex from open_index in the same way.
"""

from typing import Any

from bev_lightning.data.datamodule import DetectionDataModule
from bev_lightning.data.nuscenes.sample import SampleIndex


class EverySecondFrame:
    """A SampleIndex on top of another; what it does not change is passed on."""

    def __init__(self, index: SampleIndex) -> None:
        self.index = index

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "index":  # while it is being unpickled
            raise AttributeError(name)
        return getattr(self.index, name)

    def __contains__(self, token: object) -> bool:
        return token in self.index

    def split(self, name: str) -> list[str]:
        """Sample tokens of a split, whole scenes, every second frame."""
        kept: list[str] = []
        position, scene = 0, ""
        for token in self.index.split(name):
            position = position + 1 if self.index.scene(token) == scene else 0
            scene = self.index.scene(token)
            if position % 2 == 0:
                kept.append(token)
        return kept


class HalfDataModule(DetectionDataModule):
    """Trains and evaluates on half of the frames."""

    def open_index(self) -> SampleIndex:
        """The data set's index, thinned out."""
        return EverySecondFrame(super().open_index())
