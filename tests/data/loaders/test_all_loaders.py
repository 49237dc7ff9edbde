"""All loaders, any number of workers and ranks: the same samples, the same augmentation."""

from pathlib import Path

import pytest
import torch

from bev_lightning.data.batch_stream import BatchStream
from bev_lightning.data.loaders.protocol import Loader
from bev_lightning.data.loaders.shared_memory import SharedMemoryLoader
from bev_lightning.data.loaders.torch import TorchLoader
from bev_lightning.data.nuscenes.index import open_index
from bev_lightning.data.samplers import TrainSampler
from bev_lightning.data.samples.frame import FrameSource
from bev_lightning.data.transforms.augment import Augment
from bev_lightning.structures import CameraInput, Inputs, LidarInput

INPUTS = Inputs(
    CameraInput((32, 64), ("CAM_FRONT", "CAM_BACK")), LidarInput((-20, -20, -5, 20, 20, 5), 1, 900)
)


@pytest.fixture
def frames(make_tree, tmp_path: Path) -> FrameSource:
    index = open_index(make_tree(), "v1.0-mini", tmp_path / "cache")
    return FrameSource(index, index.tokens, INPUTS, ("car", "pedestrian"), Augment(), seed=6)


def make(name: str, num_workers: int) -> Loader:
    if name == "torch":
        return TorchLoader(num_workers)
    if name == "zero_copy":
        return SharedMemoryLoader(num_workers)
    pytest.importorskip("nvidia.dali")
    from bev_lightning.data.loaders.dali import DaliLoader

    queues = (3, 2) if name == "dali_prefetch" else (0, 0)
    return DaliLoader(num_workers, 2, False, *queues)


def read(
    loader: Loader, frames: FrameSource, rank: int = 0, ranks: int = 1
) -> list[tuple[str, torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Token, both kinds of matrices and points' count of two epochs' samples."""
    sampler = TrainSampler(len(frames), 4 // ranks, rank, ranks, seed=6)
    rows = []
    for batch in loader.open(frames, sampler, 0, 2 * len(sampler)):
        batch = batch.to("cpu")
        for b, token in enumerate(batch.sample_tokens):
            matrices = batch.cameras.image_from_lidar[b], batch.global_from_lidar[b]
            rows.append((token, *matrices, batch.points.count[b]))
    return rows


def same(one: list, two: list) -> bool:
    return len(one) == len(two) and all(
        a[0] == b[0] and all(torch.equal(x, y) for x, y in zip(a[1:], b[1:], strict=True))
        for a, b in zip(one, two, strict=True)
    )


def test_one_global_order_and_augmentation(frames: FrameSource) -> None:
    expected = read(make("torch", 0), frames)
    assert len(expected) == 16 and len({row[0] for row in expected}) == 5
    assert len({float(row[1][0, 0, 0]) for row in expected}) == 10  # by epoch and position
    for name in ("torch", "dali", "dali_prefetch", "zero_copy"):
        for num_workers in (0, 1, 4):
            assert same(read(make(name, num_workers), frames), expected), (name, num_workers)
        ranks = [read(make(name, 0), frames, rank, 2) for rank in range(2)]
        dealt = [row for pair in zip(*ranks, strict=True) for row in pair]
        assert same(dealt, expected), name


@pytest.mark.parametrize("name", ["torch", "dali", "dali_prefetch", "zero_copy"])
def test_a_stop_in_the_middle_replays_what_was_made_ahead(frames: FrameSource, name: str) -> None:
    sampler = TrainSampler(len(frames), 1, seed=2)
    expected = [
        (batch.sample_tokens, batch.cameras.images.cpu())
        for batch in BatchStream(make(name, 0), frames, sampler, 8)
    ]
    stream = BatchStream(make(name, 1), frames, sampler, 8)
    batches = iter(stream)
    for _ in range(3):
        next(batches)
    state = stream.state_dict()
    batches.close()
    resumed = BatchStream(make(name, 1), frames, sampler, 8)
    resumed.load_state_dict(state)
    got = [(batch.sample_tokens, batch.cameras.images.cpu()) for batch in resumed]
    assert [tokens for tokens, _ in got] == [tokens for tokens, _ in expected[3:]]
    assert all(torch.equal(a[1], b[1]) for a, b in zip(got, expected[3:], strict=True))
