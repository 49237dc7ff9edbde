"""How the index lies on the disk, and the words that both who writes and who reads it need."""

import pyarrow as pa

from bev_lightning.data.camera_models import MAX_COEFFICIENTS

SCHEMA_VERSION = 3
LIDAR = "LIDAR_TOP"
EGO = "ego"  # in place of a channel: the car's own frame
MAX_SWEEPS = 10

_REAL, _TEXT = pa.float64(), pa.string()
_POSE = pa.list_(_REAL, 7)
PARTS = {
    "readings": {
        "channel": pa.int8(),
        "depth": pa.int8(),
        "token": _TEXT,
        "path": _TEXT,
        "timestamp": pa.int64(),
        "calibration": pa.int16(),
        "global_from_ego": _POSE,
        "size": pa.list_(pa.int32(), 2),
    },
    "calibrations": {
        "ego_from_sensor": _POSE,
        "intrinsic": pa.list_(_REAL, 9),
        "lens": pa.int8(),
        "distortion": pa.list_(_REAL, MAX_COEFFICIENTS),
    },
    "annotations": {
        "token": _TEXT,
        "instance": _TEXT,
        "category": pa.int16(),
        "attribute": pa.int16(),
        "centre": pa.list_(_REAL, 3),
        "size": pa.list_(_REAL, 3),
        "rotation": pa.list_(_REAL, 4),
        "velocity": pa.list_(_REAL, 3),
        "num_lidar_pts": pa.int32(),
        "num_radar_pts": pa.int32(),
        "visibility": pa.int8(),
    },
}
"""Lists of a sample: a row for each reading, for each calibration that its readings were made with
(``readings.calibration`` counts these), for each box. Channels, categories and attributes are
numbers into lists of names among the notes, lenses into ``camera_models.CAMERA_MODELS``."""
SCHEMA = pa.schema(
    [
        *((name, _TEXT) for name in ("token", "scene_token", "scene_name", "previous", "next")),
        ("timestamp", pa.int64()),
        ("from_can_bus", pa.bool_()),
        ("can_bus", pa.list_(_REAL, 18)),
        *(
            (f"{part}.{name}", pa.list_(kind))
            for part, kinds in PARTS.items()
            for name, kind in kinds.items()
        ),
    ]
)
"""One row a sample, scene by scene, forward in time; whole scenes in each record batch. The
metadata ``bev_lightning`` of the schema are the notes, JSON."""
