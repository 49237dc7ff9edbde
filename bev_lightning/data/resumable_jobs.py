"""Builds a file from parts, each in a separate file, so that a killed build can be resumed."""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa

from bev_lightning.atomic_files import replace_file
from bev_lightning.data.process_pool import map_in_processes
from bev_lightning.progress import Progress

_Job = TypeVar("_Job")
# A process takes about a second to start.
_LEAST_PARTS_PER_PROCESS = 4


def open_parts(path: Path, stamp: str, holds_lock: bool) -> Path:
    """Open the folder of the parts of a file that is being built.

    Args:
        path: the file to build.
        stamp: hash of its sources; parts of other sources are removed.
        holds_lock: whether no other process builds the file now. Otherwise the folder is private to
            this process and not reused after a kill.
    """
    root = path.with_suffix(".parts")
    if not holds_lock:
        root.mkdir(parents=True, exist_ok=True)
        return Path(tempfile.mkdtemp(dir=root))
    folder = root / stamp[:16]
    for other in root.glob("*"):
        if other != folder:
            shutil.rmtree(other)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def close_parts(parts: Sequence[Path], schema: pa.Schema, whole: Path, path: Path) -> None:
    """Write the first batch of each part to one file and remove the folder of the parts.

    Args:
        parts: Arrow files.
        schema: of the file, metadata included.
        whole: where in the folder of the parts the file is written.
        path: what it is renamed to when it is complete.
    """
    with replace_file(whole) as file, pa.ipc.new_file(file, schema) as writer:
        for part in parts:  # one at a time: mapped pages count as memory too
            writer.write_batch(read_part(part)[0].replace_schema_metadata(schema.metadata))
    os.replace(whole, path)
    shutil.rmtree(whole.parent)
    with contextlib.suppress(OSError):  # another process may still use it
        whole.parent.parent.rmdir()


def make_parts(
    function: Callable[[_Job], pa.RecordBatch],
    jobs: Mapping[Path, _Job],
    num_workers: int,
    what: str,
) -> None:
    """Write the result of each job to its Arrow file, unless the file exists.

    Files are written atomically: after a kill, finished parts are kept.

    Args:
        function: maps a job to a record batch, deterministically.
        jobs: by file.
        what: label of the progress bar.
    """
    missing = [(path, job) for path, job in jobs.items() if not path.exists()]
    done = len(jobs) - len(missing)
    num_workers = min(num_workers, len(missing) // _LEAST_PARTS_PER_PROCESS)
    with Progress(what, len(jobs), "part", initial=done, delay_s=1) as progress:
        for _ in map_in_processes(partial(_make_part, function), missing, num_workers):
            progress.update()


def write_part(path: Path, batches: Sequence[pa.RecordBatch]) -> None:
    """Write an Arrow file atomically."""
    with replace_file(path) as file, pa.ipc.new_file(file, batches[0].schema) as writer:
        for batch in batches:
            writer.write_batch(batch)


def read_part(path: Path) -> list[pa.RecordBatch]:
    """Memory-map the record batches of an Arrow file."""
    reader = pa.ipc.open_file(pa.memory_map(str(path)))
    return [reader.get_batch(number) for number in range(reader.num_record_batches)]


def _make_part(function: Callable[[Any], pa.RecordBatch], job: tuple[Path, Any]) -> None:
    path, argument = job
    write_part(path, [function(argument)])
