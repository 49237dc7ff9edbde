"""Helpers of several test modules: small configurations, runs of a verb, a loader of batches.

``pythonpath = tests`` in setup.cfg makes it importable. Fixtures are in ``conftest.py``.
"""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from bev_lightning.structures import Batch

TINY_DATA = [
    "data=synthetic_mini",
    "data.synthetic.num_train_scenes=1",
    "data.synthetic.num_val_scenes=1",
    "data.synthetic.frames_per_scene=2",
    "data.synthetic.num_azimuths=90",
    "loader=torch",
    "loader.num_workers=0",
    "hardware=cpu",
]
"""Overrides: two scenes of two frames, read without further processes."""

TINY_LIDAR_MODEL = [
    "model=bevfusion_lidar_toy",
    "model.inputs.lidar.range=[-25.6,-25.6,-5.0,25.6,25.6,3.0]",
    "model.network.lidar.out_channels=8",
    "model.network.backbone={in_channels:8,out_channels:[8,8,8],layer_nums:[1,1,1]}",
    "model.network.neck={in_channels:[8,8,8],out_channels:[8,8,8]}",
    "model.network.head={in_channels:24,channels:8,num_boxes:20}",
]
"""Overrides: a lidar detector that trains in milliseconds a step."""


def run_verb(
    folder: Path, verb: str, *overrides: str, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run ``python -m bev_lightning.VERB`` in a folder, on one thread."""
    return subprocess.run(
        [sys.executable, "-m", f"bev_lightning.{verb}", *overrides],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )


def run_directory(folder: Path, process: subprocess.CompletedProcess[str]) -> Path:
    """Run directory of a verb that succeeded, from its last line ``Results: ...``."""
    assert process.returncode == 0, process.stdout[-1500:] + process.stderr[-3000:]
    last = process.stdout.strip().splitlines()[-1]
    assert last.startswith("Results: "), last
    return folder / last.removeprefix("Results: ")


def call_main(main: Callable[[], Any], verb: str, *overrides: str) -> int:
    """Exit code of a verb's ``main()`` that is called in this process."""
    argv, sys.argv = sys.argv, [verb, *overrides]
    try:
        main()
    except SystemExit as end:
        return int(end.code or 0)
    finally:
        sys.argv = argv
    return 0


class BatchLoader:
    """A dataloader over fixed batches; Lightning would take a list for several dataloaders."""

    def __init__(self, batches: Sequence[Batch]) -> None:
        self.batches = batches

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Batch]:
        return iter(self.batches)
