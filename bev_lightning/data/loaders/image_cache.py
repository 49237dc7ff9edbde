"""Cache of decoded images that the processes of a training share, in memory or in a file.

It stores pixels rather than the files' bytes, which the operating system caches already: decoding
is more than half of the cost of a sample. Pixels are stored as decoded, reduced to the resolution
that the network needs, because augmentation resamples them differently each time.

A record is written once, by one process at a time, and becomes valid with its last byte. There is
no eviction: an epoch reads every image once, so a full cache does best to keep what it has.
"""

import fcntl
import hashlib
import mmap
import os
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np

from bev_lightning.atomic_files import lock
from bev_lightning.data.samples.file_sources import choose_reduction
from bev_lightning.errors import InputError

if TYPE_CHECKING:
    from bev_lightning.data.loaders.protocol import Loader
    from bev_lightning.data.samples.frame import FrameSource

GIB = 2**30
_VERSION = 1
_HEADER_BYTES = 4096  # before the table of records
_PROBES = 8
_RECORD = np.dtype(
    [
        ("key", "u8"),
        ("modified_ns", "i8"),
        ("num_bytes", "i8"),
        ("height", "i4"),
        ("width", "i4"),
        ("reduction", "i4"),
        ("ready", "i4"),
    ]
)
Stamp = tuple[int, int]
CacheKind = Literal["none", "ram", "disk"]


class ImageCache:
    """Decoded images by path and reduction; an image whose file has changed is not found.

    Open it before the worker processes start, which share it with the process that opened it.

    Attributes:
        num_records: number of images that fit.
        hits, lookups: counters of this process.
    """

    def __init__(
        self, kind: Literal["ram", "disk"], limit_gib: float, record_bytes: int, folder: Path
    ) -> None:
        """Open or create the cache.

        Args:
            kind: "ram" lives as long as the training; "disk" is a file that all trainings on this
                machine share until it reboots.
            limit_gib: size; disk space is allocated at once, memory as it is filled.
            record_bytes: size of the largest image to store.
            folder: of the file.

        Raises:
            InputError: it does not fit in memory or on the disk, or not one image fits in it.
        """
        record_bytes = -(-record_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self.num_records = int(limit_gib * GIB - _HEADER_BYTES) // (record_bytes + _RECORD.itemsize)
        if self.num_records < 1:
            raise InputError(
                f"data.cache_gib={limit_gib:g} is too small for an image of "
                f"{record_bytes / 2**20:.1f} MiB; set data.cache_gib higher, or data.cache=none"
            )
        table_bytes = _RECORD.itemsize * self.num_records
        start = -(-(_HEADER_BYTES + table_bytes) // mmap.PAGESIZE) * mmap.PAGESIZE
        num_bytes = start + record_bytes * self.num_records
        self._file = _open_memory(num_bytes) if kind == "ram" else _open_file(folder, num_bytes)
        self._memory = np.frombuffer(mmap.mmap(self._file, num_bytes), np.uint8)
        self._table = self._memory[_HEADER_BYTES : _HEADER_BYTES + table_bytes].view(_RECORD)
        self._pixels = self._memory[start:].reshape(self.num_records, record_bytes)
        self._discard_stale(record_bytes)
        self.hits = self.lookups = 0

    def __del__(self) -> None:
        if hasattr(self, "_file"):
            os.close(self._file)

    def find(self, path: Path, reduction: int) -> np.ndarray | None:
        """Image ``(H, W, 3)`` uint8 in the cache's memory; None if it is not stored."""
        self.lookups += 1
        key = _hash(path)
        for index in self._candidates(key):
            record = self._table[index]
            if record["key"] == key and record["ready"]:
                stamp = int(record["modified_ns"]), int(record["num_bytes"])
                if record["reduction"] != reduction or stamp != self.stamp(path):
                    return None
                self.hits += 1
                shape = int(record["height"]), int(record["width"]), 3
                return self._pixels[index, : shape[0] * shape[1] * 3].reshape(shape)
        return None

    def store(self, path: Path, reduction: int, stamp: Stamp, pixels: np.ndarray) -> None:
        """Store an image if it fits.

        Args:
            stamp: of the file before it was read.
            pixels: ``(H, W, 3)`` uint8.
        """
        key, free = _hash(path), -1
        if pixels.nbytes > self._pixels.shape[1]:
            return
        for index in self._candidates(key):
            record = self._table[index]
            if record["ready"] and record["key"] == key:
                return
            if not record["ready"] and free < 0:
                free = index
        if free < 0:
            return
        try:
            # The kernel releases the lock when a process is killed.
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, free)
        except OSError:
            return  # another process writes it
        try:
            if not self._table[free]["ready"]:
                self._pixels[free, : pixels.nbytes] = pixels.reshape(-1)
                values = (key, *stamp, *pixels.shape[:2], reduction, 0)
                self._table[free] = values
                self._table["ready"][free] = 1
        finally:
            fcntl.lockf(self._file, fcntl.LOCK_UN, 1, free)

    def stamp(self, path: Path) -> Stamp | None:
        """Modification time and size, which identify a file's content; None if it is missing."""
        try:
            status = path.stat()
        except OSError:
            return None
        return status.st_mtime_ns, status.st_size

    def _candidates(self, key: int) -> list[int]:
        """Records that may hold a key (linear probing)."""
        return [(key + step) % self.num_records for step in range(min(_PROBES, self.num_records))]

    def _discard_stale(self, record_bytes: int) -> None:
        """Empty a cache of another version or record size, or from before the last reboot: it is
        not known how much of that had reached the disk."""
        identity = f"{_VERSION} {record_bytes} {_boot_id()}\0".encode()
        head = self._memory[: len(identity)]
        if head.tobytes() != identity:
            self._table["ready"] = 0
            head[:] = np.frombuffer(identity, np.uint8)


def open_image_cache(
    kind: CacheKind, limit_gib: float, folder: str | Path, frames: "FrameSource", loader: "Loader"
) -> ImageCache | None:
    """Open a cache for the images of some frames; None without cameras or for ``kind="none"``.

    Args:
        kind, limit_gib, folder: see :class:`ImageCache`.
        frames: the cameras of the first one determine the size of a record.
        loader: reads the images, at full or reduced resolution.
    """
    if kind == "none" or frames.inputs.camera is None:
        return None
    largest = 0
    for source in frames.frame(0, 0).images:
        (height, width), network = source.original_size, source.size
        scale = max(network[0] / height, network[1] / width)
        scale *= 1.0 if frames.augment is None else frames.augment.image_scale[1]
        scale *= 1.0 if source.camera_model is None else source.camera_model.zoom
        reduction = 1 if loader.full_decode else choose_reduction(scale)
        largest = max(largest, -(-height // reduction) * -(-width // reduction) * 3)
    return ImageCache(kind, limit_gib, largest, Path(folder))


def check_image_cache(kind: CacheKind, loader: "Loader | type[Loader]") -> None:
    """Raise InputError if decoded images are to be cached but the loader does not support it."""
    if kind != "none" and not loader.supports_image_cache:
        raise InputError(
            f"data.cache={kind} stores images as loader=zero_copy decodes them; use "
            f"loader=zero_copy or loader=auto, or data.cache=none"
        )


def _open_memory(num_bytes: int) -> int:
    info = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    free = int(info["MemAvailable"].split()[0]) * 1024
    if num_bytes > free:
        raise InputError(
            f"data.cache=ram with data.cache_gib={num_bytes / GIB:.3g} does not fit into the "
            f"{free / GIB:.1f} GiB of free memory; set data.cache_gib lower, or data.cache=disk"
        )
    file = os.memfd_create("bev_lightning")
    os.ftruncate(file, num_bytes)
    return file


def _open_file(folder: Path, num_bytes: int) -> int:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "pixels.cache"
    with lock(folder / "pixels.lock"):
        if path.exists() and path.stat().st_size != num_bytes:
            path.unlink()  # processes that have it open keep it
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            # All at once: writing to a mapped file on a full disk would kill the process.
            os.posix_fallocate(file, 0, num_bytes)
        except OSError as error:
            os.close(file)
            path.unlink(missing_ok=True)
            raise InputError(
                f"data.cache=disk with data.cache_gib={num_bytes / GIB:.3g} cannot be created at "
                f"{path} ({error.strerror}); set data.cache_gib lower, or paths.cache to another "
                f"disk"
            ) from None
    return file


def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _hash(path: Path) -> int:
    return int.from_bytes(hashlib.blake2b(os.fsencode(path), digest_size=8).digest(), "little")
