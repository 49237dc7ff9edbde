"""Checks of data settings that need no torch: for constructors and for validating a config."""

from collections.abc import Sequence
from pathlib import Path

from bev_lightning.errors import InputError


def check_data_root(root: Path | str, version: str) -> Path:
    """Canonical path of a data root.

    Raises:
        InputError: it is absent, or the version's tables are.
    """
    resolved = Path(root).expanduser().resolve()
    if not resolved.is_dir():
        raise InputError(
            f"data.root={root} does not exist; set data.root to the folder of {version}/ and "
            "samples/, or use data=synthetic"
        )
    if not (resolved / version / "sample.json").is_file():
        found = sorted(path.parent.name for path in resolved.glob("*/sample.json"))
        fix = f"set data.version={' or '.join(found)}" if found else "set data.root to a data set"
        raise InputError(f"data.root={root} has no tables {version}/*.json; {fix}")
    return resolved


def check_cache_dir(cache_dir: Path | str, root: Path | str) -> None:
    """Raise InputError if indexes would be written into the data root."""
    cache = Path(cache_dir).expanduser().resolve()
    if cache.is_relative_to(Path(root).expanduser().resolve()):
        raise InputError(
            f"paths.cache={cache_dir} lies inside data.root={root}, which is only read; set "
            "paths.cache to a folder outside of it"
        )


def check_gt_sampling(sensors: Sequence[str], history: int) -> None:
    """Check that objects can be pasted for a model: it reads the lidar and nothing else.

    A pasted object is in the points but neither in the images nor among the radar's returns, so a
    fusion would learn to distrust them; the published fusion stage trains without pasting too.

    Args:
        sensors: of the model: ``camera``, ``lidar``, ``radar``.
        history: earlier key frames that the model reads.

    Raises:
        InputError: the model reads no lidar, another sensor, or earlier key frames.
    """
    others = [name for name in sensors if name != "lidar"]
    if others:
        found = f"reads {' and '.join(others)} too"
    elif history:
        found = f"reads {history} earlier key frames"
    elif "lidar" not in sensors:
        found = "reads no lidar"
    else:
        return
    raise InputError(
        f"data/gt_sampling pastes objects into the lidar points only and this model {found}; use "
        "data/gt_sampling with a model that reads only the lidar, or set data.gt_sampling=null"
    )
