"""Opens the index: all key frames of a nuScenes data set in one memory-mapped Arrow file.

The file lies in the cache folder, never in the data root, and is rebuilt when the tables or its
schema change. It opens in milliseconds; workers and ranks share it through the page cache, and a
sample is decoded on access.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from bev_lightning.atomic_files import lock
from bev_lightning.classes import CLASS_OF_CATEGORY
from bev_lightning.data.checks import check_cache_dir, check_data_root
from bev_lightning.data.nuscenes.build_index import stamp_tables, write_index
from bev_lightning.data.nuscenes.json_tables import check_name
from bev_lightning.data.nuscenes.sample import Annotations, Readings, Sample
from bev_lightning.data.nuscenes.schema import LIDAR, PARTS, SCHEMA_VERSION, SEVERAL_ATTRIBUTES
from bev_lightning.errors import InputError


class Index:
    """Random access to the key frames of an index file; a :class:`SampleIndex`.

    Attributes:
        path: the Arrow file.
        root: the data root that the paths are relative to.
        version: folder of the tables, e.g. v1.0-mini.
        source_stamp: hash of the tables, see :func:`stamp_tables`.
        stamp: hash of the tables and of ``class_of_category``.
        reference: the channel whose frame is the model's, or ``ego``.
        splits: scene names of each split that has scenes here.
        scenes_without_can_bus: names, in the tables' order.
        has_distorted_images: whether any image has to be undistorted.
        channels: sensor names; the file stores their numbers.
        category_classes: class of each category; empty for categories that have none.
        tokens: sample tokens, scene by scene, forward in time.
        num_batches: record batches of the file; each holds whole scenes.
    """

    def __init__(
        self, path: Path, root: Path, class_of_category: Mapping[str, str] | None = None
    ) -> None:
        """Open an index file.

        Args:
            path: the Arrow file.
            root: the data root.
            class_of_category: class of each category; None: the nuScenes detection classes.

        Raises:
            InputError: the file has another schema.
        """
        self.path = path
        self.root = root
        self.class_of_category = class_of_category and dict(class_of_category)
        reader = pa.ipc.open_file(pa.memory_map(str(path)))
        notes = json.loads(reader.schema.metadata[b"bev_lightning"])
        if notes["schema"] != SCHEMA_VERSION:
            raise InputError(
                f"the index {path} has schema {notes['schema']} and this program reads "
                f"{SCHEMA_VERSION}: start again to rebuild it"
            )
        self.source_stamp: str = notes["stamp"]
        self.stamp = self.source_stamp
        if self.class_of_category is not None:
            mapping = json.dumps(self.class_of_category, sort_keys=True)
            self.stamp = hashlib.sha256(f"{self.stamp} {mapping}".encode()).hexdigest()
        self.version: str = notes["version"]
        self.splits = {name: tuple(scenes) for name, scenes in notes["splits"].items()}
        self.scenes_without_can_bus = tuple(notes["scenes_without_can_bus"])
        self.reference: str = notes["reference"]
        self.has_distorted_images: bool = notes["has_distorted_images"]
        self.channels = tuple(notes["channels"])
        self.num_batches: int = reader.num_record_batches
        self._categories: list[str] = notes["categories"]
        known = CLASS_OF_CATEGORY if class_of_category is None else class_of_category
        self.category_classes = tuple(known.get(name, "") for name in self._categories)
        # The last items are those of the numbers -2 and -1.
        self._attributes: list[str] = [*notes["attributes"], SEVERAL_ATTRIBUTES, ""]
        self._batches = [reader.get_batch(number) for number in range(self.num_batches)]
        self._starts = np.cumsum([0] + [batch.num_rows for batch in self._batches])
        self._lists: dict[int, dict[str, dict[str, Any]]] = {}
        self.tokens = [
            token for batch in self._batches for token in batch.column("token").to_pylist()
        ]
        self._rows = {token: row for row, token in enumerate(self.tokens)}

    def __reduce__(self) -> tuple[type["Index"], tuple[Any, ...]]:
        return Index, (self.path, self.root, self.class_of_category)  # each process maps the file

    def __len__(self) -> int:
        return len(self.tokens)

    def __contains__(self, token: object) -> bool:
        return token in self._rows

    def sample(self, token: str) -> Sample:
        """Decode a key frame. Raises KeyError for an unknown token."""
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
        """The scene token of a key frame. Raises KeyError for an unknown token."""
        number, row = self._find(token)
        scene: str = self._batches[number].column("scene_token")[row].as_py()
        return scene

    def split(self, name: str) -> list[str]:
        """Sample tokens of a split: official, mini or custom, in the order of :attr:`tokens`.

        Raises:
            InputError: the split has no scene here.
        """
        if name not in self.splits:
            raise InputError(
                f"{self.version} of {self.root} has no scene of the split '{name}': use one of "
                f"{', '.join(sorted(self.splits)) or 'none'}, or list its scenes in "
                f"{self.version}/splits.json"
            )
        scenes = set(self.splits[name])
        names = [n for batch in self._batches for n in batch.column("scene_name").to_pylist()]
        return [token for token, scene in zip(self.tokens, names, strict=True) if scene in scenes]

    def _find(self, token: str) -> tuple[int, int]:
        row = self._rows[token]
        number = int(np.searchsorted(self._starts, row, side="right")) - 1
        return number, row - int(self._starts[number])

    def _open_lists(self, number: int) -> dict[str, dict[str, Any]]:
        """List columns of a record batch without copies: numbers as numpy, strings as Arrow arrays,
        and the ``offsets`` of each part."""
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
        used = values.pop("calibration")
        columns = {name: column[used] for name, column in calibrations.items()}
        columns["intrinsic"] = columns["intrinsic"].reshape(-1, 3, 3)
        values["channel"] = tuple(self.channels[number] for number in values["channel"].tolist())
        return Readings(**values, **columns)

    def _annotations(self, values: dict[str, Any]) -> Annotations:
        category, attribute = values["category"].tolist(), values["attribute"].tolist()
        values["category"] = tuple(self._categories[number] for number in category)
        values["class_name"] = tuple(self.category_classes[number] for number in category)
        values["attribute"] = tuple(self._attributes[number] for number in attribute)
        return Annotations(**values)


def open_index(
    root: Path | str,
    version: str,
    cache_dir: Path | str,
    num_workers: int = 0,
    reference: str = LIDAR,
    class_of_category: Mapping[str, str] | None = None,
) -> Index:
    """Open the index of a data root; build it first if it is absent or outdated.

    Several processes may call this at once: one builds, the others wait. A killed build continues
    with the parts that are finished.

    Args:
        root: data root; all spellings of a path share one index.
        version: folder of the tables, e.g. v1.0-trainval.
        cache_dir: folder of the index files, outside the root.
        num_workers: processes that read the tables.
        reference: the channel whose frame is the model's, or ``ego``.
        class_of_category: as of :class:`Index`.

    Raises:
        InputError: the root or the version is absent, or the tables are broken.
    """
    check_name(version, "data.version")
    root = check_data_root(root, version)
    check_cache_dir(cache_dir, root)
    cache = Path(cache_dir).expanduser().resolve()
    path = index_path(root, version, cache, reference)
    stamp = stamp_tables(root, version, num_workers, reference)
    index = _open_current(path, root, stamp, class_of_category)
    if index is not None:
        return index
    with lock(path.with_suffix(".lock")) as holds_lock:
        # another process may have built it meanwhile
        index = _open_current(path, root, stamp, class_of_category)
        if index is None:
            write_index(path, root, version, stamp, num_workers, reference, holds_lock)
            index = Index(path, root, class_of_category)
    return index


def index_path(root: Path, version: str, cache: Path, reference: str = LIDAR) -> Path:
    """Path of the index file of a resolved root; each model frame has its own."""
    parts = [str(root), version] + ([reference] if reference != LIDAR else [])
    key = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12]
    return cache / f"{root.name}-{version}-{key}-index.arrow"


def _open_current(
    path: Path, root: Path, stamp: str, class_of_category: Mapping[str, str] | None
) -> Index | None:
    try:
        index = Index(path, root, class_of_category)
    except (OSError, pa.ArrowInvalid, KeyError, TypeError, InputError):
        return None  # absent, not an index, or of another schema
    return index if index.source_stamp == stamp else None


def _take(lists: dict[str, Any], row: int) -> dict[str, Any]:
    """The items of a sample: strings as a tuple, integers as int64."""
    start, stop = lists["offsets"][row : row + 2].tolist()
    taken: dict[str, Any] = {}
    for name, values in lists.items():
        if isinstance(values, pa.Array):
            taken[name] = tuple(values[start:stop].to_pylist())
        elif name != "offsets":
            dtype = np.int64 if values.dtype.kind == "i" else values.dtype
            taken[name] = values[start:stop].astype(dtype, copy=False)
    return taken


def _to_array(values: pa.Array, kind: pa.DataType) -> pa.Array | np.ndarray:
    if pa.types.is_string(kind):
        return values
    if pa.types.is_fixed_size_list(kind):
        return values.values.to_numpy().reshape(-1, kind.list_size)
    return values.to_numpy()
