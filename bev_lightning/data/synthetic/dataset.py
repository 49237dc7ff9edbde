"""Generates a synthetic data set in nuScenes format.

The devkit, the index and the evaluator read it like nuScenes. Scenes have names of the official
splits, so that the official evaluator scores them.
"""

import json
import logging
import os
import shutil
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from PIL import Image, ImageDraw

from bev_lightning.atomic_files import lock
from bev_lightning.data.process_pool import map_in_processes
from bev_lightning.data.synthetic.rig import CAMERAS, Array
from bev_lightning.data.synthetic.scene import draw_strip
from bev_lightning.data.synthetic.tables import fixed_tables, make_token, official_scenes
from bev_lightning.data.synthetic.writer import make_folders, write_scene
from bev_lightning.errors import InputError
from bev_lightning.progress import Progress

log = logging.getLogger(__name__)

MARKER = "synthetic.json"
FORMAT = 1  # increment it when the same spec gives other data: existing data is then regenerated
_MASK_CELL_M = 0.1


@dataclass(frozen=True)
class SyntheticSpec:
    """Size, seed and sensors of a synthetic data set.

    Attributes:
        version: ``v1.0-trainval`` or ``v1.0-mini``: the table folder and the splits.
        num_train_scenes, num_val_scenes: number of scenes, the first ones of the official splits.
        frames_per_scene: key frames, 0.5 s apart.
        seed: of all random numbers; a scene does not depend on the number of other scenes.
        image_size: height, width of the images [pixels].
        num_beams, num_azimuths: of the lidar, from -25 to +5 degrees and per turn.
        sweeps_per_frame: lidar and radar sweeps between two key frames, and before the first.
        objects_per_scene: annotated objects of all ten classes.
        rig: ``nuscenes``, or ``fisheye``: eight cameras of three models and two sizes.

    Raises:
        InputError: a field is out of its range.
    """

    version: str = "v1.0-trainval"
    num_train_scenes: int = 40
    num_val_scenes: int = 4
    frames_per_scene: int = 20
    seed: int = 0
    image_size: tuple[int, int] = (225, 400)
    num_beams: int = 32
    num_azimuths: int = 400
    sweeps_per_frame: int = 2
    objects_per_scene: int = 64
    rig: str = "nuscenes"

    def __post_init__(self) -> None:
        if self.version not in ("v1.0-trainval", "v1.0-mini"):
            raise InputError(
                f"data.synthetic.version={self.version} is unknown: use v1.0-trainval or v1.0-mini"
            )
        if self.rig not in CAMERAS:
            raise InputError(
                f"data.synthetic.rig={self.rig} is unknown: use {' or '.join(CAMERAS)}"
            )
        height, width = self.image_size  # a list when it comes from a config
        object.__setattr__(self, "image_size", (int(height), int(width)))
        train, val = official_scenes(self.version)
        ranges = {
            "num_train_scenes": (0, len(train)),
            "num_val_scenes": (0, len(val)),
            "frames_per_scene": (1, 200),
            "seed": (0, 2**31),
            "num_beams": (1, 256),
            "num_azimuths": (4, 8192),
            "sweeps_per_frame": (0, 9),
            "objects_per_scene": (10, 200),
        }
        for name, (low, high) in ranges.items():
            value = getattr(self, name)
            if not low <= value <= high:
                raise InputError(
                    f"data.synthetic.{name}={value} is out of range: choose {low} to {high} for "
                    f"{self.version}"
                )
        if self.num_train_scenes + self.num_val_scenes == 0 or min(self.image_size) < 8:
            raise InputError(
                f"data.synthetic has {len(self.scenes)} scenes and image_size="
                f"{list(self.image_size)}: choose at least one scene and 8 pixels"
            )

    @property
    def scenes(self) -> tuple[str, ...]:
        """Names of the scenes, train first."""
        train, val = official_scenes(self.version)
        return (*train[: self.num_train_scenes], *val[: self.num_val_scenes])


def generate(root: Path, spec: SyntheticSpec, num_workers: int = 0) -> None:
    """Generate the data set at ``root``, unless it exists.

    It is written beside ``root`` and moved there when it is complete, so a killed run leaves no
    partial data set. Concurrent calls for the same root wait for the first one.

    Args:
        root: folder of the data set. One of another spec is regenerated, with a warning.
        spec: size, seed and sensors.
        num_workers: processes; 0 for all cores. The result does not depend on it.

    Raises:
        InputError: ``root`` holds files that this function did not write.
    """
    root = Path(root).expanduser().resolve()
    if _is_current(root, spec):
        return
    with lock(root.parent / f".{root.name}.lock", "paths.data"):
        if _is_current(root, spec):  # another process generated it meanwhile
            return
        if root.exists() and any(root.iterdir()):
            log.warning("%s holds synthetic data of another spec: regenerating it", root)
        # Under the lock, a folder of this name is left from a killed run.
        for stale in root.parent.glob(f".{root.name}.partial*"):
            shutil.rmtree(stale)
        partial = root.parent / f".{root.name}.partial"
        make_folders(partial, spec.rig)
        _write_tree(partial, spec, num_workers)
        (partial / MARKER).write_text(json.dumps(_marker(spec), indent=1))
        if root.exists():
            old = root.parent / f".{root.name}.partial-old"
            os.replace(root, old)
            os.replace(partial, root)
            shutil.rmtree(old)
        else:
            os.replace(partial, root)


def _marker(spec: SyntheticSpec) -> dict[str, object]:
    return {"format": FORMAT, "spec": {**asdict(spec), "image_size": list(spec.image_size)}}


def _is_current(root: Path, spec: SyntheticSpec) -> bool:
    """Whether ``root`` is the data set of a spec. Raises InputError where it holds other files."""
    if not root.exists():
        return False
    if not root.is_dir() or not (root / MARKER).is_file():
        if root.is_dir() and not any(root.iterdir()):
            return False
        raise InputError(
            f"{root} is not synthetic data (it has no {MARKER}) and is not overwritten: choose "
            "another paths.data, or data=nuscenes for real data"
        )
    try:
        found = json.loads((root / MARKER).read_text())
    except ValueError:
        return False
    # Data sets from before there were other rigs have the first one.
    found.setdefault("spec", {}).setdefault("rig", "nuscenes")
    return bool(found == _marker(spec))


def _write_tree(root: Path, spec: SyntheticSpec, num_workers: int) -> None:
    tables, roads = fixed_tables(spec.rig), []
    write = partial(write_scene, root, spec)
    num_workers = num_workers or len(os.sched_getaffinity(0))
    num_frames = len(spec.scenes) * spec.frames_per_scene
    with Progress("synthetic data", num_frames, "frame", delay_s=1) as progress:
        for scene, road in map_in_processes(write, spec.scenes, num_workers):
            for name, rows in scene.items():
                tables.setdefault(name, []).extend(rows)
            roads.append(road)
            progress.update(spec.frames_per_scene)
    mask = make_token("map", spec.seed, spec.version)
    _write_mask(root / "maps" / f"{mask}.png", roads)
    tables["map"] = [
        {
            "token": mask,
            "category": "semantic_prior",
            "filename": f"maps/{mask}.png",
            "log_tokens": [row["token"] for row in tables["log"]],
        }
    ]
    (root / spec.version).mkdir()
    for name, rows in tables.items():
        (root / spec.version / f"{name}.json").write_text(json.dumps(rows))


def _write_mask(path: Path, roads: list[tuple[Array, Array]]) -> None:
    """Write the map mask: 255 on the roads of all scenes; 0.1 m a pixel, origin at bottom left.

    Roads are their left and right edges ``(S, 2)`` [m].
    """
    extent = max(float(edge.max()) for road in roads for edge in road) + 10.0
    side = int(extent / _MASK_CELL_M)
    image = Image.new("L", (side, side), 0)
    draw = ImageDraw.Draw(image)
    for road in roads:
        draw_strip(draw, [edge / _MASK_CELL_M * (1, -1) + (0, side) for edge in road], fill=255)
    image.save(path, compress_level=1)
