"""Finds the samples whose sensor files are missing."""

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from bev_lightning.data.nuscenes.sample import SampleIndex
from bev_lightning.errors import InputError
from bev_lightning.structures import Inputs


def find_missing(root: Path, paths: Iterable[str]) -> set[str]:
    """The paths, relative to the root, that do not exist. Lists each folder once."""
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


def filter_missing(
    index: SampleIndex, tokens: Sequence[str], inputs: Inputs, on_missing: str
) -> tuple[tuple[str, ...], dict[str, str]]:
    """Check that every file that the inputs need exists.

    Returns:
        the tokens whose files all exist, and for each other token the reason.

    Raises:
        InputError: a file is missing and ``on_missing`` is "error", or no sample is left.
    """
    num_sweeps: dict[str, int] = {}  # by channel
    if inputs.camera is not None:
        num_sweeps |= dict.fromkeys(inputs.camera.channels, 0)
    if inputs.lidar is not None:
        num_sweeps[inputs.lidar.channel] = inputs.lidar.sweeps
    if inputs.radar is not None:
        num_sweeps |= dict.fromkeys(inputs.radar.channels, inputs.radar.sweeps)
    needs: dict[str, list[str]] = {}
    dropped: dict[str, str] = {}
    for token in tokens:
        sample = index.sample(token)
        needs[token] = []
        for channel, sweeps in num_sweeps.items():
            rows = sample.readings.find(channel)[: sweeps + 1]
            if not rows or sample.readings.sweep[rows[0]] != 0:
                dropped[token] = (
                    f"sample {token} ({sample.scene_name}) has no {channel} record in the tables "
                    f"of {index.root}"
                )
            needs[token] += [sample.readings.path[row] for row in rows]
    missing = find_missing(index.root, [path for paths in needs.values() for path in paths])
    for token, paths in needs.items():
        gone = [path for path in paths if path in missing]
        if gone:
            dropped[token] = f"sample {token} needs {index.root / gone[0]}, which is missing"
    if dropped and on_missing == "error":
        raise InputError(
            f"{next(iter(dropped.values()))} ({len(dropped)} of {len(tokens)} samples lack "
            f"files): download them, read fewer sensors or sweeps, or set data.on_missing=skip"
        )
    kept = tuple(token for token in tokens if token not in dropped)
    if not kept:
        reason = f", for instance {next(iter(dropped.values()))}" if dropped else ""
        raise InputError(f"no sample is left of {len(tokens)} under {index.root}{reason}")
    return kept, dropped
