"""Writes a run directory: the configuration, and what reproduces the run."""

import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from bev_lightning import __version__
from bev_lightning.atomic_files import replace_file
from bev_lightning.config.resolve import plan_batch, scale_lr
from bev_lightning.errors import InputError
from bev_lightning.hardware.machine import Machine

_PACKAGES = ("torch", "lightning", "hydra-core", "nvidia-dali-cuda130", "nuscenes-devkit", "numpy")


def write_run_directory(
    run_dir: Path,
    cfg: DictConfig,
    resolved: DictConfig,
    machine: Machine,
    overrides: Sequence[str],
) -> None:
    """Write config.yaml (as composed), resolved.yaml (without ``auto``) and run.json.

    ``resume=auto`` finds the run by its overrides.
    """
    OmegaConf.save(cfg, run_dir / "config.yaml")
    OmegaConf.save(resolved, run_dir / "resolved.yaml")
    description: dict[str, Any] = {
        "command": shlex.join([sys.executable, *sys.orig_argv[1:]]),
        "argv": sys.argv[1:],
        "overrides": list(overrides),
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "git": _git_revision(),
        "python": sys.version.split()[0],
        "versions": {"bev_lightning": __version__} | {name: _version(name) for name in _PACKAGES},
        "machine": machine.to_dict(),
    }
    if resolved.verb == "train":
        batch = plan_batch(resolved)
        rates = {"effective_batch": batch.effective_batch, "learning_rate": scale_lr(resolved)}
        description["batch"] = asdict(batch) | rates
    write_json(run_dir / "run.json", description)


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a result of the run atomically, indented; NaN and infinity are refused."""
    text = json.dumps(content, indent=2, allow_nan=False) + "\n"
    with replace_file(path, "paths.run") as file:
        file.write(text.encode())


def check_writable(key: str, path: Path) -> None:
    """Raise InputError for a directory, named by a config key, that cannot be created."""
    parent = next(one for one in (path, *path.absolute().parents) if one.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise InputError(
            f"{key}={path} cannot be created: {parent} is no folder that this user may write to; "
            f"choose another"
        )


def read_nds(run_dir: Path) -> float | None:
    """NDS from a run's score.json; None without one."""
    try:
        return float(json.loads((run_dir / "score.json").read_text())["NDS"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def shorten_path(path: Path) -> Path:
    """The path relative to the current directory where it lies below it."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def _git_revision() -> dict[str, Any] | None:
    """Revision of the checkout this package runs from; None outside of one."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None
    # All tags are excluded: the full hash, with a mark behind it if tracked files changed.
    describe = ["describe", "--always", "--abbrev=40", "--exclude=*", "--dirty"]
    try:
        found = subprocess.run(
            ["git", "-C", str(root), *describe], capture_output=True, text=True, check=True
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
    return {"revision": found.removesuffix("-dirty"), "changed": found.endswith("-dirty")}


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
