"""The loader through shared memory: its batches, its slots, and what is left of it."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from bev_lightning.data.loaders.shared_memory import SharedMemoryLoader
from bev_lightning.data.loaders.torch import TorchLoader
from bev_lightning.data.nuscenes.index import open_index
from bev_lightning.data.samplers import TrainSampler
from bev_lightning.data.samples.frame import FrameSource
from bev_lightning.data.transforms.augment import Augment
from bev_lightning.errors import InputError
from bev_lightning.structures import Batch, CameraInput, Inputs, LidarInput, RadarInput

VERSION = "v1.0-mini"
RANGE = (-20.0, -20.0, -5.0, 20.0, 20.0, 5.0)
INPUTS = Inputs(
    CameraInput((32, 64), ("CAM_FRONT", "CAM_BACK")),
    LidarInput(RANGE, sweeps=2, max_points=700),
    RadarInput(RANGE, ("RADAR_FRONT", "RADAR_BACK_LEFT"), sweeps=1, max_points=20),
)
COLOURS = Augment(image_brightness=32, image_contrast=(0.5, 1.5), image_hue_deg=18, grid_mask=0.5)


@pytest.fixture
def frames(make_tree, tmp_path: Path):
    index = open_index(make_tree(), VERSION, tmp_path / "cache")

    def make(inputs: Inputs = INPUTS, **kwargs) -> FrameSource:
        return FrameSource(index, index.tokens, inputs, ("car", "pedestrian", "barrier"), **kwargs)

    return make


def assert_alike(one: Batch, two: Batch, largest_mean: float = 2.5) -> None:
    """Bit-equal but for pixels and what the order of float32 sums changes."""
    assert one.sample_tokens == two.sample_tokens
    for name in ("timestamps", "has_previous", "global_from_lidar", "lidar_from_previous_lidar"):
        assert torch.equal(getattr(one, name), getattr(two, name)), name
    if two.targets is not None:
        assert torch.equal(one.targets.centre, two.targets.centre)
        assert torch.equal(one.targets.label, two.targets.label)
    assert torch.equal(one.cameras.image_from_lidar, two.cameras.image_from_lidar)
    std = torch.tensor(INPUTS.camera.std)[:, None, None]
    difference = ((one.cameras.images - two.cameras.images) * std).abs()
    assert difference.mean(dim=(2, 3, 4)).max() < largest_mean
    for mine, theirs in ((one.points, two.points), (one.radar, two.radar)):
        assert torch.equal(mine.count, theirs.count) and int(mine.count.min()) > 0
        torch.testing.assert_close(mine.features, theirs.features, atol=1e-4, rtol=1e-5)


def equal(one: Batch, two: Batch) -> bool:
    return one.sample_tokens == two.sample_tokens and all(
        torch.equal(a, b)
        for a, b in (
            (one.cameras.images, two.cameras.images),
            (one.cameras.image_from_lidar, two.cameras.image_from_lidar),
            (one.points.features, two.points.features),
            (one.radar.features, two.radar.features),
            (one.targets.centre, two.targets.centre),
        )
    )


@pytest.mark.parametrize("augment", [Augment(), COLOURS])
def test_batches_are_the_plain_loaders(frames, augment: Augment) -> None:
    source = frames(replace(INPUTS, history=2), augment=augment, seed=3)
    sampler = TrainSampler(len(source), 2, seed=3)
    expected = TorchLoader().open(source, sampler, 0, 4)
    for batch, other in zip(
        SharedMemoryLoader(2).open(source, sampler, 0, 4), expected, strict=True
    ):
        assert_alike(batch.validate(), other, 4.0)  # contrast widens differences
        for past, same in zip(batch.history, other.history, strict=True):
            assert_alike(past, same, 4.0)
    assert len(batch.history) == 2


@pytest.mark.parametrize("num_workers", [1, 4])
def test_batches_do_not_depend_on_workers_or_the_first_micro_step(frames, num_workers) -> None:
    source = frames(augment=COLOURS, seed=4)
    sampler = TrainSampler(len(source), 2, seed=4)
    expected = list(SharedMemoryLoader().open(source, sampler, 0, 7))
    got = list(SharedMemoryLoader(num_workers, prefetch=1).open(source, sampler, 3, 7))
    assert len(got) == 4
    assert all(equal(a, b) for a, b in zip(got, expected[3:], strict=True))


def test_batches_that_are_kept_stay_as_they_are(frames) -> None:
    source = frames()
    sampler = TrainSampler(len(source), 1, shuffle=False)
    batches = SharedMemoryLoader(1, prefetch=1).open(source, sampler, 0, 5)
    kept, copies = [], []
    for batch in batches:
        kept.append(batch)
        copies.append((batch.points.features.clone(), batch.cameras.images.clone()))
    for one, (points, images) in zip(kept, copies, strict=True):
        assert torch.equal(one.points.features, points) and torch.equal(one.cameras.images, images)
    assert len({batch.points.features.data_ptr() for batch in kept}) == 5


def test_a_damaged_file_is_named_when_its_batch_is_due(frames) -> None:
    source = frames()
    path = source.frame(0, 2).images[1].path
    path.write_bytes(path.read_bytes()[:300])
    batches = SharedMemoryLoader(1).open(source, TrainSampler(5, 1, shuffle=False), 0, 5)
    assert [next(batches).sample_tokens[0] for _ in range(2)] == ["scene-0061_0", "scene-0061_1"]
    with pytest.raises(InputError, match=rf"^sample scene-0061_2: the image {path} "):
        next(batches)


def test_unreadable_samples_are_replaced_and_counted(frames) -> None:
    source = frames(on_missing="skip")
    source.frame(0, 2).lidar[0].path.write_bytes(np.full(10, np.nan, np.float32).tobytes())
    loader = SharedMemoryLoader(1)
    (batch,) = loader.open(source, TrainSampler(5, 5, shuffle=False), 0, 1)
    assert batch.sample_tokens[1:4] == ("scene-0061_1", "scene-0103_0", "scene-0103_0")
    assert "holds NaN or infinity in 2 of 2" in loader.stats.skipped["scene-0061_2"]


def children() -> set[int]:
    own = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
    return {int(pid) for pid in own}


@pytest.mark.parametrize("on_missing", ["error", "skip"])
def test_a_killed_worker_is_an_error_or_replaced(frames, on_missing: str) -> None:
    source = frames(on_missing=on_missing)
    sampler = TrainSampler(5, 1, shuffle=False)
    before, shared = children(), os.listdir("/dev/shm")
    batches = SharedMemoryLoader(1, prefetch=1).open(source, sampler, 0, 12)
    tokens = [next(batches).sample_tokens[0]]
    (worker,) = children() - before
    os.kill(worker, signal.SIGKILL)
    began = time.monotonic()
    if on_missing == "error":
        with pytest.raises(InputError, match=r"samples scene-\S+ \(\d files, first /.*signal 9"):
            list(batches)
    else:
        with pytest.warns(UserWarning, match="1 loader processes were killed"):
            tokens += [batch.sample_tokens[0] for batch in batches]
        assert tokens == [source.tokens[m % 5] for m in range(12)]
    assert time.monotonic() - began < 5
    assert children() == before
    assert os.listdir("/dev/shm") == shared


SCRIPT = """
import sys, time
from pathlib import Path
from bev_lightning.data.samples.frame import FrameSource
from bev_lightning.data.nuscenes.index import open_index
from bev_lightning.data.samplers import TrainSampler
from bev_lightning.data.loaders.shared_memory import SharedMemoryLoader
from bev_lightning.structures import Inputs, LidarInput
index = open_index(sys.argv[1], "v1.0-mini", sys.argv[2])
inputs = Inputs(lidar=LidarInput((-20., -20., -5., 20., 20., 5.)))
source = FrameSource(index, index.tokens, inputs, ("car",))
for batch in SharedMemoryLoader(2).open(source, TrainSampler(5, 1), 0, 100000):
    print(Path("/proc/self/task/%d/children" % __import__("os").getpid()).read_text(), flush=True)
    time.sleep(0.05)
"""


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGKILL])
def test_nothing_is_left_however_it_ends(make_tree, tmp_path: Path, end: signal.Signals) -> None:
    shared = set(os.listdir("/dev/shm"))
    command = [sys.executable, "-c", SCRIPT, str(make_tree()), str(tmp_path / "cache")]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    workers = process.stdout.readline().split()
    assert len(workers) == 2
    process.send_signal(end)
    process.communicate(timeout=20)
    for _ in range(100):
        alive = [pid for pid in workers if Path(f"/proc/{pid}").exists()]
        if not alive:
            break
        time.sleep(0.05)
    assert alive == []
    assert set(os.listdir("/dev/shm")) <= shared


@pytest.mark.gpu
@pytest.mark.parametrize("pin_memory", [False, True])
def test_cuda_gives_the_same_batches(frames, pin_memory: bool) -> None:
    source = frames(augment=COLOURS, seed=3)
    sampler = TrainSampler(len(source), 2, seed=3)
    expected = TorchLoader().open(source, sampler, 0, 12)
    loader = SharedMemoryLoader(2, pin_memory=pin_memory)
    for batch, other in zip(loader.open(source, sampler, 0, 12), expected, strict=True):
        assert batch.cameras.images.is_cuda and batch.points.features.is_cuda
        assert_alike(batch.to("cpu"), other, 4.0)
