"""The index: what the tables say about each key frame, in one memory-mapped Arrow file.

It lies under the cache, never in the data root, and is made anew when the tables changed. It opens
in milliseconds and is shared by all workers and ranks through the page cache.
"""

import hashlib
import json
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pyarrow as pa

from bev_lightning.data.cache import lock, replace_file
from bev_lightning.data.sample import Annotations, Readings, Sample
from bev_lightning.errors import InputError

SCHEMA_VERSION = 1
_ROWS_PER_BATCH = 1024
_TEXT, _WHOLE, _REAL = pa.string(), pa.int64(), pa.float64()
_READING_TEXT = ("channel", "token", "path")
_READING_ARRAYS = {
    "depth": (_WHOLE, ()),
    "timestamp": (_WHOLE, ()),
    "ego_from_sensor": (_REAL, (7,)),
    "global_from_ego": (_REAL, (7,)),
    "intrinsic": (_REAL, (3, 3)),
    "size": (_WHOLE, (2,)),
}
_ANNOTATION_TEXT = ("token", "instance", "category", "detection", "attribute")
_ANNOTATION_ARRAYS = {
    "centre": (_REAL, (3,)),
    "size": (_REAL, (3,)),
    "rotation": (_REAL, (4,)),
    "velocity": (_REAL, (3,)),
    "num_lidar_pts": (_WHOLE, ()),
    "num_radar_pts": (_WHOLE, ()),
    "visibility": (_WHOLE, ()),
}
_PARTS = (
    ("readings", _READING_TEXT, _READING_ARRAYS),
    ("annotations", _ANNOTATION_TEXT, _ANNOTATION_ARRAYS),
)
_SAMPLE_TEXT = ("token", "scene_token", "scene_name", "previous", "next")


class Index:
    """An open index.

    Attributes:
        path: the Arrow file.
        root: the data root that the paths are relative to.
        version: of the tables, e.g. v1.0-mini.
        splits: scene names of each split that has scenes here.
        scenes_without_can_bus: names, in the tables' order.
        tokens: sample tokens, scene by scene, forward in time.
    """

    def __init__(self, path: Path, root: Path) -> None:
        self.path = path
        self.root = root
        reader = pa.ipc.open_file(pa.memory_map(str(path)))
        notes = json.loads(reader.schema.metadata[b"bev_lightning"])
        self.schema_version: int = notes["schema"]
        self.stamp: str = notes["stamp"]
        self.version: str = notes["version"]
        if self.schema_version != SCHEMA_VERSION:
            raise InputError(
                f"the index {path} has schema {self.schema_version}, this program reads "
                f"{SCHEMA_VERSION}: "
                f"remove the file and run python -m bev_lightning.prepare again"
            )
        self.splits = {name: tuple(scenes) for name, scenes in notes["splits"].items()}
        self.scenes_without_can_bus = tuple(notes["scenes_without_can_bus"])
        self._batches = [reader.get_batch(number) for number in range(reader.num_record_batches)]
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
        number, row = divmod(self._rows[token], _ROWS_PER_BATCH)
        batch = self._batches[number]
        parts = {}
        for part, texts, arrays in _PARTS:
            lists = {name: batch.column(f"{part}.{name}") for name in (*texts, *arrays)}
            values: dict[str, object] = {}
            for name, column in lists.items():
                start, stop = column.offsets[row].as_py(), column.offsets[row + 1].as_py()
                rows = column.values.slice(start, stop - start)
                if name in texts:
                    values[name] = tuple(rows.to_pylist())
                    continue
                shape = arrays[name][1]
                flat = rows.flatten() if shape else rows
                values[name] = flat.to_numpy(zero_copy_only=False).reshape(stop - start, *shape)
            parts[part] = values
        return Sample(
            **{
                name: batch.column(name)[row].as_py()
                for name in (*_SAMPLE_TEXT, "timestamp", "from_can_bus")
            },
            readings=Readings(**parts["readings"]),  # type: ignore[arg-type]
            annotations=Annotations(**parts["annotations"]),  # type: ignore[arg-type]
            can_bus=np.array(batch.column("can_bus")[row].as_py()),
        )

    def scene(self, token: str) -> str:
        """The scene token of a key frame. Raises KeyError for a token that is not here."""
        number, row = divmod(self._rows[token], _ROWS_PER_BATCH)
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
                f"scenes of: "
                f"{', '.join(sorted(self.splits)) or 'none'} (or list scene names in splits.json "
                f"in the version "
                f"folder)"
            )
        scenes = set(self.splits[name])
        names = [n for batch in self._batches for n in batch.column("scene_name").to_pylist()]
        return [token for token, scene in zip(self.tokens, names, strict=True) if scene in scenes]


def build_index(
    root: Path | str, version: str, cache_dir: Path | str, num_workers: int = 0
) -> Index:
    """Open the index of a data root, making it first where it is absent or the tables have changed.

    Several processes may call this at once: one makes it, the others wait.

    Args:
        root: data root in any spelling; all spellings lead to one index.
        version: folder of the tables, e.g. v1.0-trainval.
        cache_dir: where indexes live; never inside the root.
        num_workers: threads that look at the CAN bus files for changes.

    Raises:
        InputError: the root or the version is not there, or the tables are broken.
    """
    root = resolve_root(root, version)
    cache = Path(cache_dir).expanduser().resolve()
    if cache == root or root in cache.parents:
        raise InputError(
            f"paths.cache {cache} lies inside data.root {root}: choose a folder outside it"
        )
    path = index_path(root, version, cache)
    stamp = stamp_tables(root, version, num_workers)
    index = _open_current(path, root, stamp)
    if index is not None:
        return index
    cache.mkdir(parents=True, exist_ok=True)
    with lock(path.with_suffix(".lock")):
        index = _open_current(path, root, stamp)  # another process may have made it meanwhile
        if index is None:
            _write_index(path, root, version, stamp)
            index = Index(path, root)
    return index


def resolve_root(root: Path | str, version: str) -> Path:
    """The one spelling of a data root. Raises InputError where it or the version's tables are
    absent."""
    resolved = Path(root).expanduser().resolve()
    if not resolved.is_dir():
        raise InputError(
            f"data.root={root} is not a folder: give the folder that holds samples/ and {version}/"
        )
    if not (resolved / version / "sample.json").is_file():
        found = sorted(p.parent.name for p in resolved.glob("*/sample.json"))
        raise InputError(
            f"data.root={root} holds no tables {version}/*.json; versions there: "
            f"{', '.join(found) or 'none'}; "
            f"set data.version"
        )
    return resolved


def index_path(root: Path, version: str, cache: Path) -> Path:
    """Where the index of a resolved root lies."""
    key = hashlib.sha256(f"{root}\n{version}".encode()).hexdigest()[:12]
    return cache / f"{root.name}-{version}-{key}.arrow"


def stamp_tables(root: Path, version: str, num_workers: int = 0) -> str:
    """A short text that changes when a table or a CAN bus pose file does (size or time of
    change)."""
    paths = sorted((root / version).glob("*.json")) + sorted((root / "can_bus").glob("*_pose.json"))
    with ThreadPoolExecutor(max(1, num_workers)) as pool:
        stats = list(pool.map(os.stat, paths))
    lines = [
        f"{path.relative_to(root)} {stat.st_size} {stat.st_mtime_ns}"
        for path, stat in zip(paths, stats, strict=True)
    ]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def find_missing(root: Path, paths: Iterable[str]) -> set[str]:
    """Which of the paths, relative to the root, have no file. Lists each folder once."""
    folders: dict[str, frozenset[str]] = {}
    missing = set()
    for path in paths:
        folder, _, name = path.rpartition("/")
        if folder not in folders:
            try:
                folders[folder] = frozenset(os.listdir(root / folder))
            except OSError:
                folders[folder] = frozenset()
        if name not in folders[folder]:
            missing.add(path)
    return missing


def _open_current(path: Path, root: Path, stamp: str) -> Index | None:
    try:
        index = Index(path, root)
    except (FileNotFoundError, pa.ArrowInvalid, KeyError, TypeError, InputError):
        return None  # absent, not an index, or of another schema: it is made anew
    return index if index.stamp == stamp else None


def _write_index(path: Path, root: Path, version: str, stamp: str) -> None:
    from bev_lightning.data.tables import Tables, read_samples, read_splits

    tables = Tables(root, version)
    samples = list(read_samples(tables, root / "can_bus"))
    measured = {sample.scene_name: sample.from_can_bus for sample in samples}
    notes = {
        "schema": SCHEMA_VERSION,
        "stamp": stamp,
        "version": version,
        "splits": read_splits(tables),
        "scenes_without_can_bus": [name for name, found in measured.items() if not found],
    }
    batches = [
        _to_record_batch(samples[start : start + _ROWS_PER_BATCH])
        for start in range(0, len(samples), _ROWS_PER_BATCH)
    ]
    if not batches:
        raise InputError(
            f"the tables in {root / version} hold no sample: download the metadata again"
        )
    schema = batches[0].schema.with_metadata({"bev_lightning": json.dumps(notes)})
    with replace_file(path) as file, pa.ipc.new_file(file, schema) as writer:
        for batch in batches:
            writer.write_batch(batch.replace_schema_metadata(schema.metadata))


def _to_record_batch(samples: list[Sample]) -> pa.RecordBatch:
    columns: dict[str, pa.Array] = {
        name: pa.array([getattr(sample, name) for sample in samples], _TEXT)
        for name in _SAMPLE_TEXT
    }
    columns["timestamp"] = pa.array([sample.timestamp for sample in samples], _WHOLE)
    columns["from_can_bus"] = pa.array([sample.from_can_bus for sample in samples], pa.bool_())
    columns["can_bus"] = _fixed(np.stack([sample.can_bus for sample in samples]), _REAL)
    for part, texts, arrays in _PARTS:
        parts = [getattr(sample, part) for sample in samples]
        offsets = pa.array(np.cumsum([0] + [len(p.token) for p in parts]), pa.int32())
        for name in texts:
            values = pa.array([value for p in parts for value in getattr(p, name)], _TEXT)
            columns[f"{part}.{name}"] = pa.ListArray.from_arrays(offsets, values)
        for name, (kind, _) in arrays.items():
            joined = np.concatenate([getattr(p, name) for p in parts])
            columns[f"{part}.{name}"] = pa.ListArray.from_arrays(offsets, _fixed(joined, kind))
    return pa.RecordBatch.from_pydict(columns)


def _fixed(values: np.ndarray, kind: pa.DataType) -> pa.Array:
    """``(N,)`` as a plain array, ``(N, ...)`` as fixed-size lists."""
    flat = pa.array(np.ascontiguousarray(values).reshape(-1), kind)
    if values.ndim == 1:
        return flat
    return pa.FixedSizeListArray.from_arrays(flat, int(np.prod(values.shape[1:])))
