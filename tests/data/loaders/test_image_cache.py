"""Decoded images in memory and on disk."""

import errno
import multiprocessing
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from bev_lightning.data.batch_stream import BatchStream
from bev_lightning.data.loaders import image_cache
from bev_lightning.data.loaders.image_cache import ImageCache, open_image_cache
from bev_lightning.data.loaders.shared_memory import SharedMemoryLoader
from bev_lightning.data.nuscenes.index import open_index
from bev_lightning.data.samplers import TrainSampler
from bev_lightning.data.samples.file_sources import choose_reduction
from bev_lightning.data.samples.frame import FrameSource
from bev_lightning.data.transforms.augment import Augment
from bev_lightning.errors import InputError
from bev_lightning.structures import CameraInput, Inputs

MIB = 1 / 1024  # GiB


def write(path: Path, content: str = "x") -> Path:
    path.write_text(content)
    return path


def image(value: int, size: tuple[int, int] = (4, 6)) -> np.ndarray:
    return np.full((*size, 3), value, np.uint8)


def store(cache: ImageCache, path: Path, pixels: np.ndarray, reduction: int = 2) -> None:
    stamp = cache.stamp(path)
    assert stamp is not None
    cache.store(path, reduction, stamp, pixels)


@pytest.mark.parametrize("kind", ["ram", "disk"])
def test_a_stored_image_is_found_until_its_file_changes(tmp_path: Path, kind) -> None:
    cache = ImageCache(kind, MIB, 100, tmp_path / "cache")
    a, b = write(tmp_path / "a"), write(tmp_path / "b")
    assert cache.find(a, 2) is None
    store(cache, a, image(7))
    store(cache, b, image(9, (3, 5)))
    assert np.array_equal(cache.find(a, 2), image(7))
    assert np.array_equal(cache.find(b, 2), image(9, (3, 5)))
    assert cache.find(a, 4) is None  # of another reduction
    assert (cache.hits, cache.lookups) == (2, 4)
    write(a, "longer")
    assert cache.find(a, 2) is None
    store(cache, write(tmp_path / "large"), image(1, (100, 100)))  # does not fit a record
    assert cache.find(tmp_path / "large", 2) is None


def test_a_full_cache_keeps_what_it_has(tmp_path: Path) -> None:
    cache = ImageCache("ram", 5 * 4200 / 2**30, 100, tmp_path)
    paths = [write(tmp_path / str(i)) for i in range(12)]
    for value, path in enumerate(paths):
        store(cache, path, image(value))
    found = [cache.find(path, 2) for path in paths]
    assert sum(pixels is not None for pixels in found) == cache.num_records == 4
    assert all(p is None or (p == value).all() for value, p in enumerate(found))


def test_the_disk_keeps_it_for_the_next_run_but_not_over_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "a")
    store(ImageCache("disk", MIB, 100, tmp_path), path, image(3))
    assert ImageCache("disk", MIB, 100, tmp_path).find(path, 2) is not None
    assert ImageCache("disk", MIB, 9000, tmp_path).find(path, 2) is None  # other records
    store(ImageCache("disk", MIB, 100, tmp_path), path, image(3))
    monkeypatch.setattr(image_cache, "_boot_id", lambda: "another")
    assert ImageCache("disk", MIB, 100, tmp_path).find(path, 2) is None


def test_a_record_another_process_writes_is_left_to_it(tmp_path: Path) -> None:
    cache = ImageCache("ram", 2 * 4200 / 2**30, 100, tmp_path)
    assert cache.num_records == 1
    path = write(tmp_path / "a")
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()

    def hold() -> None:
        image_cache.fcntl.lockf(cache._file, image_cache.fcntl.LOCK_EX, 1, 0)
        theirs.send(None)
        theirs.recv()

    process = context.Process(target=hold)
    process.start()
    ours.recv()
    store(cache, path, image(5))
    assert cache.find(path, 2) is None
    process.kill()  # the lock goes with it
    process.join()
    store(cache, path, image(5))
    assert np.array_equal(cache.find(path, 2), image(5))


def test_a_cache_without_space_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match=r"data.cache_gib=0 is too small for an image"):
        ImageCache("ram", 0, 100, tmp_path)
    with pytest.raises(InputError, match=r"data.cache=ram .*=1e\+06 does not fit into the"):
        ImageCache("ram", 1e6, 100, tmp_path)

    def full(*args: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(InputError, match=r"data.cache=disk .*No space left on device"):
        ImageCache("disk", MIB, 100, tmp_path)
    assert not (tmp_path / "pixels.cache").exists()


def test_reductions() -> None:
    scales = (0.1, 0.14, 0.2, 0.3, 0.44, 0.55, 0.58, 1.2)
    assert [choose_reduction(scale) for scale in scales] == [8, 8, 4, 2, 2, 2, 1, 1]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_cached_images_are_the_decoded_ones(make_tree, tmp_path: Path, num_workers: int) -> None:
    index = open_index(make_tree(), "v1.0-mini", tmp_path / "cache")
    inputs = Inputs(CameraInput((32, 64), ("CAM_FRONT", "CAM_BACK")))
    source = FrameSource(index, index.tokens, inputs, ("car",), augment=Augment())
    sampler = TrainSampler(len(source), 1)
    expected = list(SharedMemoryLoader().open(source, sampler, 0, 10))
    loader = SharedMemoryLoader(num_workers)
    image_cache = open_image_cache("ram", 10 * MIB, tmp_path, source, loader)
    for start in (0, 5):
        batches = loader.open(source, sampler, start, start + 5, image_cache)
        for micro_step, batch in enumerate(batches, start):
            assert torch.equal(batch.cameras.images, expected[micro_step].cameras.images)
    assert (loader.stats.cache_hits, loader.stats.cache_lookups) == (10, 20)
    assert BatchStream(loader, source, sampler, 10).cache_hit_rate == 0.5
    assert BatchStream(SharedMemoryLoader(), source, sampler, 10).cache_hit_rate is None
