"""The ground-truth database: boxes of the training scenes with the lidar points inside.

One memory-mapped Arrow file beside the index. :mod:`bev_lightning.data.build_gt_database` writes
it, :mod:`bev_lightning.data.transforms.gt_sampling` samples from it.
"""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch

from bev_lightning.classes import DETECTION_CLASSES
from bev_lightning.errors import InputError
from bev_lightning.structures import Boxes3D, LidarInput

SCHEMA_VERSION = 1
SCHEMA = pa.schema(
    [
        ("sample", pa.string()),
        ("label", pa.int8()),
        ("box", pa.list_(pa.float32(), 9)),
        ("num_points", pa.int32()),
        ("points", pa.list_(pa.float32())),
    ]
)
"""Sample token, index into the database's classes, ``[x, y, z, length, width, height, yaw, vx,
vy]`` and points ``[x, y, z, intensity, age]`` one after the other, all in the model frame of that
sample without augmentation."""


class GroundTruthDatabase:
    """An open ground-truth database of N objects.

    Attributes:
        path: the Arrow file.
        classes: class names that ``label`` indexes.
        sweeps: lidar sweeps before the key frame whose points it holds.
        min_distance: that of the :class:`LidarInput` it was built for [m].
        stamp: hash of its sources; another stamp means that it is out of date.
        label: ``(N,)`` index of each object into ``classes``.
        num_points: ``(N,)`` lidar points of each object.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        reader = pa.ipc.open_file(pa.memory_map(str(path)))
        notes = json.loads(reader.schema.metadata[b"bev_lightning"])
        if notes["schema"] != SCHEMA_VERSION:
            raise InputError(
                f"the ground-truth database {path} has schema {notes['schema']}, not "
                f"{SCHEMA_VERSION}: start again to rebuild it"
            )
        self.classes: tuple[str, ...] = tuple(notes.get("classes", DETECTION_CLASSES))
        self.stamp: str = notes["stamp"]
        self.sweeps: int = notes["sweeps"]
        self.min_distance: float = notes["min_distance"]
        self._table = reader.read_all()
        self.label = self._table["label"].to_numpy()
        self.num_points = self._table["num_points"].to_numpy()

    def __reduce__(self) -> tuple[type["GroundTruthDatabase"], tuple[Path]]:
        return GroundTruthDatabase, (self.path,)  # each worker maps the file itself

    def __len__(self) -> int:
        return len(self.label)

    def check(self, lidar: LidarInput) -> None:
        """Check that a lidar input has points like those of the objects.

        Raises:
            InputError: the number of sweeps or the minimum distance differs.
        """
        for name in ("sweeps", "min_distance"):
            here, wanted = getattr(self, name), getattr(lidar, name)
            if here != wanted:
                raise InputError(
                    f"the ground-truth database {self.path} was built with {name}={here} and the "
                    f"model reads {name}={wanted}: set model.inputs.lidar.{name}={here}, or remove "
                    f"the file to rebuild it"
                )

    def rows(self, name: str, min_points: int) -> np.ndarray:
        """Rows ``(n,)`` int32 of the objects of a class with at least so many points."""
        if name not in self.classes:
            return np.zeros(0, np.int32)
        wanted = self.label == self.classes.index(name)
        return np.flatnonzero(wanted & (self.num_points >= min_points)).astype(np.int32)

    def counts(self, classes: Sequence[str], min_points: int) -> dict[str, int]:
        """Number of objects of each class with at least so many points."""
        return {name: len(self.rows(name, min_points)) for name in classes}

    def boxes(self, rows: Sequence[int] | np.ndarray, classes: Sequence[str]) -> Boxes3D:
        """Boxes ``(K,)``, each in its own sample's model frame; labels index ``classes``."""
        column = self._table["box"]
        values = [column[int(row)].values.to_numpy() for row in rows]
        label = [list(classes).index(self.classes[self.label[row]]) for row in rows]
        box = torch.from_numpy(np.array(values, np.float32).reshape(-1, 9))
        return Boxes3D(
            centre=box[:, :3],
            size=box[:, 3:6],
            yaw=box[:, 6],
            velocity=box[:, 7:],
            label=torch.tensor(label, dtype=torch.int64),
            valid=torch.ones(len(rows), dtype=torch.bool),
        )

    def points(self, row: int) -> np.ndarray:
        """Points ``(P, 5)`` float32 in the model frame of the object's own sample; read-only."""
        points: np.ndarray = self._table["points"][row].values.to_numpy().reshape(-1, 5)
        return points

    def sample(self, row: int) -> str:
        """Token of the sample that an object comes from."""
        return str(self._table["sample"][row])
