"""The index: what the tables say about each key frame, in one memory-mapped Arrow file.

It lies under the cache, never in the data root, and is made anew when the tables changed. It opens
in milliseconds and is shared by all workers and ranks through the page cache: a sample is decoded
when it is asked for.
"""

import hashlib
import json
import os
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from bev_lightning.data.atomic_files import lock, replace_file
from bev_lightning.data.nuscenes.index_rows import Joined, join_poses, join_scenes
from bev_lightning.data.nuscenes.json_tables import cut_table
from bev_lightning.data.nuscenes.large_tables import (
    FIELDS,
    name_detections,
    read_piece,
    read_splits,
)
from bev_lightning.data.nuscenes.metadata import check_name, read_catalogue
from bev_lightning.data.nuscenes.sample import Annotations, Readings, Sample
from bev_lightning.data.nuscenes.schema import LIDAR, PARTS, SCHEMA, SCHEMA_VERSION
from bev_lightning.data.resumable_jobs import close_parts, make_parts, open_parts, read_part
from bev_lightning.errors import InputError

_PIECE_BYTES = 16 << 20
_SCENES_PER_PART = 16
_TABLES = (
    "attribute",
    "calibrated_sensor",
    "category",
    "ego_pose",
    "instance",
    "sample",
    "sample_annotation",
    "sample_data",
    "scene",
    "sensor",
    "splits",
)


class Index:
    """An open index.

    Attributes:
        path: the Arrow file.
        root: the data root that the paths are relative to.
        version: of the tables, e.g. v1.0-mini.
        stamp: changes when what it was made from does.
        reference: the channel whose frame is the model's, or ``ego``.
        splits: scene names of each split that has scenes here.
        scenes_without_can_bus: names, in the tables' order.
        has_lenses: whether an image has to be undistorted.
        channels, detections: names that numbers in the file stand for: of the sensors, and of each
            category in the detection task.
        tokens: sample tokens, scene by scene, forward in time.
        num_batches: of the file, with whole scenes in each.
    """

    def __init__(self, path: Path, root: Path) -> None:
        self.path = path
        self.root = root
        reader = pa.ipc.open_file(pa.memory_map(str(path)))
        notes = json.loads(reader.schema.metadata[b"bev_lightning"])
        self.stamp: str = notes["stamp"]
        self.version: str = notes["version"]
        if notes["schema"] != SCHEMA_VERSION:
            raise InputError(
                f"the index {path} has schema {notes['schema']} and this program reads "
                f"{SCHEMA_VERSION}: python -m bev_lightning.prepare data.root={root} "
                f"data.version={self.version} paths.cache={path.parent} makes it anew"
            )
        self.splits = {name: tuple(scenes) for name, scenes in notes["splits"].items()}
        self.scenes_without_can_bus = tuple(notes["scenes_without_can_bus"])
        self.reference: str = notes["reference"]
        self.has_lenses: bool = notes["has_lenses"]
        self.channels = tuple(notes["channels"])
        self.detections = tuple(notes["detections"])
        self.num_batches: int = reader.num_record_batches
        self._categories: list[str] = notes["categories"]
        self._attributes: list[str] = [*notes["attributes"], ""]  # -1 is none
        self._batches = [reader.get_batch(number) for number in range(self.num_batches)]
        self._starts = np.cumsum([0] + [batch.num_rows for batch in self._batches])
        self._lists: dict[int, dict[str, dict[str, Any]]] = {}
        self.tokens = [
            token for batch in self._batches for token in batch.column("token").to_pylist()
        ]
        self._rows = {token: row for row, token in enumerate(self.tokens)}

    def __reduce__(self) -> tuple[type["Index"], tuple[Path, Path]]:
        return Index, (self.path, self.root)  # workers map the file themselves

    def __len__(self) -> int:
        return len(self.tokens)

    def __contains__(self, token: object) -> bool:
        return token in self._rows

    def sample(self, token: str) -> Sample:
        """One key frame. Raises KeyError for a token that is not here."""
        number, row = self._find(token)
        batch, lists = self._batches[number], self._open_lists(number)
        texts = ("token", "scene_token", "scene_name", "previous", "next")
        return Sample(
            **{name: batch.column(name)[row].as_py() for name in texts},
            timestamp=batch.column("timestamp")[row].as_py(),
            from_can_bus=batch.column("from_can_bus")[row].as_py(),
            readings=self._readings(
                _take(lists["readings"], row), _take(lists["calibrations"], row)
            ),
            annotations=self._annotations(_take(lists["annotations"], row)),
            can_bus=batch.column("can_bus").values.to_numpy()[18 * row : 18 * row + 18].copy(),
            reference=self.reference,
        )

    def scene(self, token: str) -> str:
        """The scene token of a key frame. Raises KeyError for a token that is not here."""
        number, row = self._find(token)
        scene: str = self._batches[number].column("scene_token")[row].as_py()
        return scene

    def split(self, name: str) -> list[str]:
        """Sample tokens of a split: official, mini or custom, in the order of :attr:`tokens`.

        Raises:
            InputError: no scene of that split is here; names the splits that have some.
        """
        if name not in self.splits:
            raise InputError(
                f"no scene of the split '{name}' is in {self.version} of {self.root}; it has "
                f"scenes of: {', '.join(sorted(self.splits)) or 'none'} (or list scene names in "
                f"splits.json in the version folder)"
            )
        scenes = set(self.splits[name])
        names = [n for batch in self._batches for n in batch.column("scene_name").to_pylist()]
        return [token for token, scene in zip(self.tokens, names, strict=True) if scene in scenes]

    def _find(self, token: str) -> tuple[int, int]:
        row = self._rows[token]
        number = int(np.searchsorted(self._starts, row, side="right")) - 1
        return number, row - int(self._starts[number])

    def _open_lists(self, number: int) -> dict[str, dict[str, Any]]:
        """The list columns of a batch: numbers as arrays and texts as Arrow's, over the mapped
        file, and ``offsets`` for all columns of a part."""
        if number not in self._lists:
            batch = self._batches[number]
            self._lists[number] = {
                part: {
                    "offsets": batch.column(f"{part}.{next(iter(kinds))}").offsets.to_numpy(),
                    **{
                        name: _to_array(batch.column(f"{part}.{name}").values, kind)
                        for name, kind in kinds.items()
                    },
                }
                for part, kinds in PARTS.items()
            }
        return self._lists[number]

    def _readings(self, values: dict[str, Any], calibrations: dict[str, Any]) -> Readings:
        which = values["calibration"]
        return Readings(
            channel=tuple(self.channels[number] for number in values["channel"].tolist()),
            depth=values["depth"].astype(np.int64),
            token=values["token"],
            path=values["path"],
            timestamp=values["timestamp"],
            ego_from_sensor=calibrations["ego_from_sensor"][which],
            global_from_ego=values["global_from_ego"],
            intrinsic=calibrations["intrinsic"][which].reshape(-1, 3, 3),
            size=values["size"].astype(np.int64),
            lens=calibrations["lens"][which].astype(np.int64),
            distortion=calibrations["distortion"][which],
        )

    def _annotations(self, values: dict[str, Any]) -> Annotations:
        category = values["category"].tolist()
        return Annotations(
            token=values["token"],
            instance=values["instance"],
            category=tuple(self._categories[number] for number in category),
            detection=tuple(self.detections[number] for number in category),
            attribute=tuple(self._attributes[number] for number in values["attribute"].tolist()),
            centre=values["centre"],
            size=values["size"],
            rotation=values["rotation"],
            velocity=values["velocity"],
            num_lidar_pts=values["num_lidar_pts"].astype(np.int64),
            num_radar_pts=values["num_radar_pts"].astype(np.int64),
            visibility=values["visibility"].astype(np.int64),
        )


def build_index(
    root: Path | str,
    version: str,
    cache_dir: Path | str,
    num_workers: int = 0,
    renew: bool = False,
    reference: str = LIDAR,
) -> Index:
    """Open the index of a data root, making it first where it is absent or the tables have changed.

    Several processes may call this at once: one makes it, the others wait. It is made in parts;
    after a kill, the parts that were finished are not made again.

    Args:
        root: data root in any spelling; all spellings lead to one index.
        version: folder of the tables, e.g. v1.0-trainval.
        cache_dir: where indexes live; never inside the root.
        num_workers: processes that read the tables.
        renew: make an index of another schema anew instead of refusing it.
        reference: the channel whose frame is the model's, or ``ego``.

    Raises:
        InputError: the root or the version is not there, the tables are broken, or the index is of
        another schema.
    """
    root = resolve_root(root, version)
    cache = Path(cache_dir).expanduser().resolve()
    if cache == root or root in cache.parents:
        raise InputError(
            f"paths.cache {cache} lies inside data.root {root}: choose a folder outside it"
        )
    path = index_path(root, version, cache)
    stamp = stamp_tables(root, version, num_workers, reference)
    index = _open_current(path, root, stamp, renew)
    if index is not None:
        return index
    with lock(path.with_suffix(".lock")) as alone:
        # another process may have made it meanwhile
        index = _open_current(path, root, stamp, renew)
        if index is None:
            _write_index(path, root, version, stamp, num_workers, reference, alone)
            index = Index(path, root)
    return index


def resolve_root(root: Path | str, version: str) -> Path:
    """The one spelling of a data root. Raises InputError where it or the version's tables are
    absent."""
    check_name(version, "data.version")
    resolved = Path(root).expanduser().resolve()
    if not resolved.is_dir():
        raise InputError(
            f"data.root={root} is not a folder: give the folder that holds samples/ and {version}/"
        )
    if not (resolved / version / "sample.json").is_file():
        found = sorted(p.parent.name for p in resolved.glob("*/sample.json"))
        raise InputError(
            f"data.root={root} holds no tables {version}/*.json; versions there: "
            f"{', '.join(found) or 'none'}; set data.version"
        )
    return resolved


def index_path(root: Path, version: str, cache: Path) -> Path:
    """Where the index of a resolved root lies."""
    key = hashlib.sha256(f"{root}\n{version}".encode()).hexdigest()[:12]
    return cache / f"{root.name}-{version}-{key}-index.arrow"


def stamp_tables(root: Path, version: str, num_workers: int = 0, reference: str = LIDAR) -> str:
    """A short text that changes when a table that is read or a CAN bus pose file does (size or time
    of change), or the reference."""
    tables = (root / version / f"{name}.json" for name in _TABLES)
    paths = [path for path in tables if path.exists()]
    paths += sorted((root / "can_bus").glob("*_pose.json"))
    with ThreadPoolExecutor(max(1, num_workers)) as pool:
        stats = list(pool.map(os.stat, paths))
    lines = [reference] + [
        f"{path.relative_to(root)} {stat.st_size} {stat.st_mtime_ns}"
        for path, stat in zip(paths, stats, strict=True)
    ]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _open_current(path: Path, root: Path, stamp: str, renew: bool) -> Index | None:
    try:
        index = Index(path, root)
    except (FileNotFoundError, NotADirectoryError, pa.ArrowInvalid, KeyError, TypeError):
        return None  # absent, or not an index: it is made anew
    except InputError:
        if renew:
            return None
        raise
    return index if index.stamp == stamp else None


def _write_index(
    path: Path,
    root: Path,
    version: str,
    stamp: str,
    num_workers: int,
    reference: str,
    alone: bool,
) -> None:
    folder, parts = root / version, open_parts(path, stamp, alone)
    catalogue = read_catalogue(folder)
    if not catalogue.scenes:
        raise InputError(f"the tables in {folder} hold no sample: download the metadata again")
    splits, detections = (
        read_splits(folder, catalogue.scenes),
        name_detections(catalogue.categories),
    )
    pieces = {
        table: {
            parts / f"{table}-{number}.arrow": piece
            for number, piece in enumerate(cut_table(folder, table, _PIECE_BYTES))
        }
        for table in FIELDS
    }
    if not pieces["sample_data"]:
        raise InputError(f"{folder / 'sample_data.json'} is empty: download the metadata again")
    jobs = {part: piece for table in pieces.values() for part, piece in table.items()}
    make_parts(partial(read_piece, catalogue), jobs, num_workers, "reading tables")
    poses = parts / "poses.arrow"
    if not poses.exists():
        join_poses(poses, list(pieces["ego_pose"]), list(pieces["sample_data"]))
    joined = Joined(
        catalogue,
        tuple(pieces["sample_data"]),
        tuple(pieces["sample_annotation"]),
        poses,
        root / "can_bus",
        reference,
    )
    starts = range(0, len(catalogue.scenes), _SCENES_PER_PART)
    scenes = {
        parts / f"scenes-{start}.arrow": (start, start + _SCENES_PER_PART) for start in starts
    }
    make_parts(partial(join_scenes, joined), scenes, num_workers, "joining scenes")

    measured: dict[str, bool] = {}
    for part in scenes:  # one at a time: mapped pages are memory too
        names, found = (read_part(part)[0].column(n) for n in ("scene_name", "from_can_bus"))
        measured.update(zip(names.to_pylist(), found.to_pylist(), strict=True))
    notes = {
        "schema": SCHEMA_VERSION,
        "stamp": stamp,
        "version": version,
        "reference": reference,
        "splits": splits,
        "scenes_without_can_bus": [name for name, found in measured.items() if not found],
        "has_lenses": bool(catalogue.lens.any()),
        "channels": catalogue.channels,
        "categories": catalogue.categories,
        "detections": detections,
        "attributes": catalogue.attributes,
    }
    if stamp_tables(root, version, num_workers, reference) != stamp:
        raise InputError(f"the tables in {folder} changed while they were read: start again")
    schema = SCHEMA.with_metadata({"bev_lightning": json.dumps(notes)})
    whole = parts / "index.arrow"
    with replace_file(whole) as file, pa.ipc.new_file(file, schema) as writer:
        for part in scenes:
            writer.write_batch(read_part(part)[0].replace_schema_metadata(schema.metadata))
    close_parts(parts, whole, path)


def _take(lists: dict[str, Any], row: int) -> dict[str, Any]:
    start, stop = lists["offsets"][row : row + 2].tolist()
    taken = {name: values[start:stop] for name, values in lists.items() if name != "offsets"}
    return {
        name: tuple(values.to_pylist()) if isinstance(values, pa.Array) else values
        for name, values in taken.items()
    }


def _to_array(values: pa.Array, kind: pa.DataType) -> pa.Array | np.ndarray:
    if pa.types.is_string(kind):
        return values
    if pa.types.is_fixed_size_list(kind):
        return values.values.to_numpy().reshape(-1, kind.list_size)
    return values.to_numpy()
