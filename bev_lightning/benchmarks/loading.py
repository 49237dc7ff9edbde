"""``bench=loading``: times the loaders, the parts of a sample, and the transport of tensors.

Each loader runs as in a training, with its worker processes; the batches are discarded. CPU time is
that of all processes together, measured after the loader has started. The loaders take turns.
"""

import contextlib
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import torch
from omegaconf import DictConfig
from torch.utils.data import DataLoader

from bev_lightning.benchmarks.random_sensor_files import make_recordings
from bev_lightning.benchmarks.report import Row, with_ratios
from bev_lightning.benchmarks.timing import time_all
from bev_lightning.data.loaders.clouds import read_points, read_points_into
from bev_lightning.data.loaders.image_cache import open_image_cache
from bev_lightning.data.loaders.images import normalise_images, read_image, read_image_into
from bev_lightning.data.loaders.protocol import Loader
from bev_lightning.data.loaders.shared_memory import SharedMemoryLoader
from bev_lightning.data.loaders.slot_batch import normalise
from bev_lightning.data.loaders.torch import TorchLoader
from bev_lightning.data.loaders.worker_pool import SlotPool, WorkerPool
from bev_lightning.data.samplers import TrainSampler
from bev_lightning.data.samples.frame import FrameSource
from bev_lightning.data.transforms.augment import Augment
from bev_lightning.runtime.build import build_data
from bev_lightning.structures import CameraInput, Inputs, LidarInput

_INPUTS = Inputs(
    CameraInput((256, 704)), LidarInput((-54.0, -54.0, -5.0, 54.0, 54.0, 3.0), sweeps=9)
)


def measure_loading(
    cfg: DictConfig,
    repeats: int,
    batch_size: int,
    num_batches: int,
    num_samples: int,
    num_workers: int,
) -> tuple[list[Row], list[str]]:
    """Rows of the loaders, of the parts of a sample, and of the transport between processes.

    Arguments: see ``conf/bench/loading.yaml``.
    """
    with tempfile.TemporaryDirectory() as folder:
        if cfg.data.synthetic is None:
            data = build_data(cfg)
            data.setup("fit")
            data.train_dataloader()
            assert data.stream is not None
            frames, described = data.stream.frames, str(cfg.data.root)
        else:
            assert _INPUTS.camera is not None and _INPUTS.lidar is not None
            recordings = make_recordings(
                Path(folder), num_samples, _INPUTS.camera.channels, _INPUTS.lidar.sweeps
            )
            frames = FrameSource(
                recordings,  # type: ignore[arg-type]
                list(recordings.samples),
                _INPUTS,
                ("car",),
                Augment(),
            )
            sizes = [p.stat().st_size for p in Path(folder).glob("*.jpg")]
            described = f"{num_samples} random samples, JPEGs of {sum(sizes) / len(sizes):.0f} B"
        parts, floor_ms = _measure_parts(frames, repeats)
        loaders = _measure_loaders(frames, repeats, batch_size, num_batches, num_workers, floor_ms)
        rows = [*loaders, *parts, *_measure_transport(frames, repeats)]
    columns = (
        f"Loaders: ms per batch of {batch_size} from {num_workers} workers; cpu_ms per sample and "
        f"peak_mib of all processes together. Data: {described}."
    )
    notes = [
        columns,
        "floor_share: CPU time of the reduced JPEG decode and the file reads alone / this.",
        "difference: mean absolute difference from the images of loader=torch, of 255.",
    ]
    return with_ratios(rows), notes


@dataclass
class _Timings:
    wall_ms: list[float] = field(default_factory=list)
    cpu_ms: list[float] = field(default_factory=list)
    peak_mib: list[float] = field(default_factory=list)

    def add(self, items: Iterator[Any], num_untimed: int, num: int) -> None:
        """Time ``num`` items, after some untimed ones."""
        for _ in range(num_untimed):
            next(items)
        wall, cpu = time.perf_counter(), _cpu_s()
        for _ in range(num):
            next(items)
        self.wall_ms.append((time.perf_counter() - wall) * 1e3 / num)
        self.cpu_ms.append((_cpu_s() - cpu) * 1e3 / num)


def _measure_loaders(
    frames: FrameSource,
    repeats: int,
    batch_size: int,
    num_batches: int,
    num_workers: int,
    floor_ms: float,
) -> list[Row]:
    from bev_lightning.data.loaders.dali import DaliLoader

    loaders: dict[str, Loader] = {
        "torch": TorchLoader(num_workers),
        "dali": DaliLoader(num_workers),
        "dali_prefetch": DaliLoader(num_workers, image_queue=8, cloud_queue=4),
        "zero_copy": SharedMemoryLoader(num_workers),
        "zero_copy, full_decode": SharedMemoryLoader(num_workers, full_decode=True),
        "zero_copy, cache=ram": SharedMemoryLoader(num_workers),
    }
    limit_gib = 0.01 * len(frames) + 0.01
    image_cache = open_image_cache("ram", limit_gib, "", frames, loaders["zero_copy"])
    sampler = TrainSampler(len(frames), batch_size)
    for _ in loaders["zero_copy, cache=ram"].open(frames, sampler, 0, len(sampler), image_cache):
        pass
    timings = {name: _Timings() for name in loaders}
    for repeat in range(repeats):
        for name, loader in loaders.items():
            start, cache = repeat * num_batches, image_cache if "cache" in name else None
            with contextlib.closing(
                loader.open(frames, sampler, start, start + 1000, cache)
            ) as batches:
                timings[name].add(batches, 2, num_batches)
                timings[name].peak_mib.append(_memory_mib())
    rows = []
    for name, one in timings.items():
        ms, cpu_ms = statistics.median(one.wall_ms), statistics.median(one.cpu_ms) / batch_size
        more: dict[str, float | str | None] = {"floor_share": floor_ms / cpu_ms}
        if torch.cuda.is_available():
            more["gpu_mib"] = torch.cuda.max_memory_allocated() / 2**20
        hit_rate = loaders[name].stats.cache_hit_rate
        if hit_rate is not None:
            more["cache_hit_rate"] = hit_rate
        speed = 1e3 * batch_size / ms
        rows.append(Row(name, "loader", ms, cpu_ms, speed, max(one.peak_mib), more=more))
    return rows


def _measure_parts(frames: FrameSource, repeats: int) -> tuple[list[Row], float]:
    """Rows of reading a sample's images and points, and the CPU time of I/O and decode [ms]."""
    threads, cv2_threads = torch.get_num_threads(), cv2.getNumThreads()
    torch.set_num_threads(1)
    cv2.setNumThreads(1)
    frame, inputs = frames.frame(0, 0), frames.inputs
    rows, floor_ms = [], 0.0
    if inputs.camera is not None:
        camera, sources = inputs.camera, frame.images
        out = np.empty((len(sources), *camera.size, 3), np.uint8)

        def read_fast(full: bool) -> torch.Tensor:
            for source, image in zip(sources, out, strict=True):
                read_image_into(source, image, full)
            return normalise(torch.from_numpy(out), camera)

        def decode() -> None:
            for source in sources:
                flags = cv2.IMREAD_REDUCED_COLOR_2 | cv2.IMREAD_IGNORE_ORIENTATION
                cv2.imdecode(np.frombuffer(source.path.read_bytes(), np.uint8), flags)

        ways: dict[str, Callable[[], object]] = {
            "PIL, numpy": lambda: normalise_images(
                np.stack([read_image(source) for source in sources]), camera
            ),
            "one map, full decode": lambda: read_fast(True),
            "one map": lambda: read_fast(False),
            "floor: read and decode": decode,
        }
        plain = np.stack([read_image(source) for source in sources]).astype(np.float32)
        rows += _time_parts(f"images of {len(sources)} cameras", ways, repeats)
        for row, full in ((rows[1], True), (rows[2], False)):
            read_fast(full)
            row.more["difference"] = float(np.abs(out - plain).mean())
        floor_ms += rows[-1].cpu_ms or 0.0
    if inputs.lidar is not None:
        lidar, cloud = inputs.lidar, np.empty((inputs.lidar.max_points, 5), np.float32)
        ways = {
            "numpy": lambda: read_points(frame.lidar, lidar),
            "one pass": lambda: read_points_into(frame.lidar, lidar, cloud),
            "floor: read": lambda: [source.path.read_bytes() for source in frame.lidar],
        }
        rows += _time_parts(f"{len(frame.lidar)} lidar sweeps", ways, repeats)
        floor_ms += rows[-1].cpu_ms or 0.0
    torch.set_num_threads(threads)
    cv2.setNumThreads(cv2_threads)
    return rows, floor_ms


def _time_parts(group: str, ways: dict[str, Callable[[], object]], repeats: int) -> list[Row]:
    timings = time_all(ways, repeats)
    return [Row(name, group, time.ms, time.cpu_ms) for name, time in timings.items()]


def _measure_transport(frames: FrameSource, repeats: int, num: int = 40) -> list[Row]:
    """Rows of sending a sample's images from a worker to this process."""
    if frames.inputs.camera is None:
        return []
    height, width = frames.inputs.camera.size
    pixels = np.zeros((len(frames.inputs.camera.channels), height, width, 3), np.uint8)
    floats = torch.zeros(1, pixels.shape[0], 3, height, width)

    def load(tensor: torch.Tensor) -> Iterator[Any]:
        # Cloned in the worker, because sending a tensor moves it to shared memory.
        dataset: Any = [tensor] * (2 * num)
        clone: Any = torch.clone
        return iter(DataLoader(dataset, None, num_workers=1, collate_fn=clone))

    def pass_slots() -> Iterator[Any]:
        pool = SlotPool(4, pixels.nbytes)
        workers = WorkerPool(partial(_fill, pool, pixels), range(2 * num), 1, pool)
        try:
            for slot, _ in workers:
                yield pool.memory(slot)
                pool.release(slot)
        finally:
            workers.close()

    ways: dict[str, Callable[[], Iterator[Any]]] = {
        "DataLoader, float32": lambda: load(floats),
        "DataLoader, uint8": lambda: load(torch.from_numpy(pixels)),
        "slot, uint8": pass_slots,
    }
    timings = {name: _Timings() for name in ways}
    for _ in range(repeats):
        for name, way in ways.items():
            timings[name].add(way(), 8, num)
    group, median = "worker to main process", statistics.median
    return [Row(name, group, median(t.wall_ms), median(t.cpu_ms)) for name, t in timings.items()]


def _fill(pool: SlotPool, pixels: np.ndarray, job: int, slot: int) -> None:
    pool.memory(slot)[: pixels.nbytes] = pixels.reshape(-1)


def _cpu_s() -> float:
    """CPU time of this process and its descendants [s], with the resolution of schedstat."""
    threads = (one for pid in _processes() for one in Path(f"/proc/{pid}/task").iterdir())
    return sum(int((one / "schedstat").read_text().split()[0]) for one in threads) * 1e-9


def _memory_mib() -> float:
    """Memory of this process and its descendants [MiB]; shared memory counts once."""
    texts = (Path(f"/proc/{process}/smaps_rollup").read_text() for process in _processes())
    return sum(int(text.split("\nPss:")[1].split()[0]) for text in texts) / 1024


def _processes() -> list[int]:
    found = [os.getpid()]
    for process in found:
        for thread in Path(f"/proc/{process}/task").iterdir():
            found += [int(pid) for pid in (thread / "children").read_text().split()]
    return found
