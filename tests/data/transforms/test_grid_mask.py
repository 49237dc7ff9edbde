"""GridMask: its squares, its draws, and that both loaders lay it over the same pixels."""

from pathlib import Path

import numpy as np
import pytest
import torch

from bev_lightning.data.loaders.torch import TorchLoader
from bev_lightning.data.nuscenes.index import open_index
from bev_lightning.data.samplers import TrainSampler
from bev_lightning.data.samples.frame import FrameSource
from bev_lightning.data.transforms.augment import Augment
from bev_lightning.data.transforms.grid_mask import GridMask, random_grid_mask
from bev_lightning.structures import CameraInput, Inputs

INPUTS = Inputs(CameraInput((32, 64), ("CAM_FRONT", "CAM_BACK")), history=1)
ALWAYS = Augment(grid_mask=1.0, image_rotate_deg=(0, 0))


def test_squares_between_stripes_are_hidden() -> None:
    visible = GridMask(4, 1, (1, 2)).visible((6, 8))
    assert visible.int().tolist() == [
        [0, 0, 1, 0, 0, 0, 1, 0],
        [1, 1, 1, 1, 1, 1, 1, 1],
        [0, 0, 1, 0, 0, 0, 1, 0],
        [0, 0, 1, 0, 0, 0, 1, 0],
        [0, 0, 1, 0, 0, 0, 1, 0],
        [1, 1, 1, 1, 1, 1, 1, 1],
    ]
    images = torch.ones(2, 3, 6, 8)
    GridMask(4, 1, (1, 2)).hide(images)
    assert torch.equal(images, visible.float().expand(2, 3, 6, 8))


def test_draws_hide_about_a_quarter_and_follow_the_seed() -> None:
    masks = [random_grid_mask(ALWAYS, (64, 96), (0, epoch, 3)) for epoch in range(200)]
    hidden = np.mean([1 - m.visible((64, 96)).float().mean().item() for m in masks])
    assert hidden == pytest.approx(0.25, abs=0.04)  # ratio 0.5: half of the rows and of the columns
    assert all(2 <= m.period < 64 and 1 <= m.stripe < m.period for m in masks)
    assert masks[5] == random_grid_mask(ALWAYS, (64, 96), (0, 5, 3))
    assert masks[5] != random_grid_mask(ALWAYS, (64, 96), (0, 5, 4))
    often = [random_grid_mask(Augment(grid_mask=0.7), (64, 96), (1, e, 0)) for e in range(400)]
    assert sum(m is not None for m in often) / 400 == pytest.approx(0.7, abs=0.07)
    assert random_grid_mask(Augment(), (64, 96), (0, 0, 0)) is None
    with pytest.raises(ValueError, match="probability"):
        Augment(grid_mask=1.5)


def test_both_loaders_hide_the_same_pixels_of_the_current_frame(make_tree, tmp_path: Path) -> None:
    index = open_index(make_tree(), "v1.0-mini", tmp_path / "cache")

    def open_batch(loader, augment: Augment):
        frames = FrameSource(index, index.split("mini_train"), INPUTS, ("car",), augment=augment)
        frames = frames.with_tokens(frames.tokens[1:])
        return frames, next(loader.open(frames, TrainSampler(2, 2, shuffle=False), 0, 1))

    frames, masked = open_batch(TorchLoader(), ALWAYS)
    _, plain = open_batch(TorchLoader(), Augment(image_rotate_deg=(0, 0)))
    for sample in range(2):
        mask = frames.frame(0, sample).mask
        expected = plain.cameras.images[sample] * mask.visible((32, 64))
        assert torch.equal(masked.cameras.images[sample], expected)
    assert torch.equal(masked.cameras.image_from_lidar, plain.cameras.image_from_lidar)
    assert torch.equal(masked.history[0].cameras.images, plain.history[0].cameras.images)

    pytest.importorskip("nvidia.dali")
    from bev_lightning.data.loaders.dali import DaliLoader

    _, other = open_batch(DaliLoader(num_workers=0), ALWAYS)
    assert torch.equal(other.cameras.images == 0, masked.cameras.images == 0)
    assert (other.history[0].cameras.images == 0).float().mean() < 0.02
