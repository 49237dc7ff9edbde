"""Atomic writes and inter-process locks."""

import contextlib
import errno
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from bev_lightning.errors import InputError


@contextlib.contextmanager
def replace_file(path: Path, key: str = "paths.cache") -> Iterator[IO[bytes]]:
    """Open a file for writing that replaces ``path`` atomically when the block succeeds.

    It is a temporary file in the same folder, so that no reader sees an incomplete file.

    Args:
        key: config key of the folder, for the error message.

    Raises:
        InputError: the disk is full or the folder cannot be written to.
    """
    temporary = None
    try:
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".tmp")
        with os.fdopen(handle, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException as error:
        if temporary is not None:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary)
        if isinstance(error, OSError) and (temporary is None or error.errno == errno.ENOSPC):
            raise InputError(
                f"{path} cannot be written ({error.strerror}): free space, or set {key} to a "
                f"folder that can be written to"
            ) from None
        raise


@contextlib.contextmanager
def lock(path: Path, key: str = "paths.cache") -> Iterator[bool]:
    """Hold an inter-process lock; creates the folder where it is absent.

    The lock is released even when the process is killed.

    Args:
        key: as of :func:`replace_file`.

    Yields:
        whether the lock is held. Where the file system cannot lock, all processes proceed: the
        atomic rename keeps the file intact, and the work is merely done more than once.

    Raises:
        InputError: the folder cannot be written to.
    """
    with contextlib.ExitStack() as stack:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            file = stack.enter_context(open(path, "w"))
        except OSError as error:
            raise InputError(
                f"{path} cannot be written ({error.strerror}): set {key} to a folder that can be "
                f"written to"
            ) from None
        try:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX)
            held = True
        except (ImportError, OSError):
            held = False
        yield held
