"""Work in parts that a kill does not undo: each part is a file until the whole is made of them."""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa

from bev_lightning.data.atomic_files import replace_file
from bev_lightning.data.process_pool import map_in_processes
from bev_lightning.progress import Progress

_Job = TypeVar("_Job")
# A process takes about a second to start.
_LEAST_PARTS_PER_PROCESS = 4


def open_parts(path: Path, stamp: str, alone: bool) -> Path:
    """The folder where the parts of a file are kept until it is whole.

    Args:
        path: the file that is being made.
        stamp: of what it is made from; parts of any other are removed.
        alone: whether no other process makes the file at this time. Where that is not known, the
            folder is this process's own, and is not found again after a kill.
    """
    every = path.with_suffix(".parts")
    if not alone:
        every.mkdir(parents=True, exist_ok=True)
        return Path(tempfile.mkdtemp(dir=every))
    folder = every / stamp[:16]
    for other in every.glob("*"):
        if other != folder:
            shutil.rmtree(other)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def close_parts(folder: Path, whole: Path, path: Path) -> None:
    """Put the whole file in its place and remove the parts that it was made of."""
    os.replace(whole, path)
    shutil.rmtree(folder)
    with contextlib.suppress(OSError):  # another process may be at work beside
        folder.parent.rmdir()


def make_parts(
    function: Callable[[_Job], pa.RecordBatch],
    jobs: Mapping[Path, _Job],
    num_workers: int,
    what: str,
) -> None:
    """Write the result of each job to its Arrow file, unless the file is there.

    Files appear whole or not at all: after a kill what was finished is kept.

    Args:
        function: the same batch for the same job whenever it is called.
        jobs: by file.
        num_workers: processes.
        what: is being done, for the progress bar.
    """
    missing = [(path, job) for path, job in jobs.items() if not path.exists()]
    done = len(jobs) - len(missing)
    num_workers = min(num_workers, len(missing) // _LEAST_PARTS_PER_PROCESS)
    with Progress(what, len(jobs), "part", initial=done, delay_s=1) as progress:
        for _ in map_in_processes(partial(_make_part, function), missing, num_workers):
            progress.update()


def write_part(path: Path, batches: Sequence[pa.RecordBatch]) -> None:
    """An Arrow file, whole or not at all."""
    with replace_file(path) as file, pa.ipc.new_file(file, batches[0].schema) as writer:
        for batch in batches:
            writer.write_batch(batch)


def read_part(path: Path) -> list[pa.RecordBatch]:
    """The memory-mapped batches of an Arrow file."""
    reader = pa.ipc.open_file(pa.memory_map(str(path)))
    return [reader.get_batch(number) for number in range(reader.num_record_batches)]


def _make_part(function: Callable[[Any], pa.RecordBatch], job: tuple[Path, Any]) -> None:
    path, what = job
    write_part(path, [function(what)])
