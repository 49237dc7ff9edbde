"""Schema of the index file, shared by its writer and its reader. Imports no torch."""

import pyarrow as pa

from bev_lightning.data.distortion import MAX_COEFFICIENTS

SCHEMA_VERSION = 5
LIDAR = "LIDAR_TOP"
EGO = "ego"  # instead of a channel: the vehicle frame
MAX_SWEEPS = 10
SEVERAL_ATTRIBUTES = "several"  # the attribute of a box that has more than one

_REAL, _TEXT = pa.float64(), pa.string()
_POSE = pa.list_(_REAL, 7)
PARTS = {
    "readings": {
        "channel": pa.int8(),
        "sweep": pa.int8(),
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
        "camera_model": pa.int8(),
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
"""List columns of a sample, with an item for each reading, each calibration that its readings use
(``readings.calibration`` indexes these) and each box. Channels, categories and attributes are
indices into the names in the metadata (attributes: -1 for none, -2 for several),
camera models into ``distortion.CAMERA_MODELS``."""
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
"""One row per sample, scene by scene, forward in time; each record batch holds whole scenes. The
schema metadata ``bev_lightning`` is JSON: versions, splits and names."""
