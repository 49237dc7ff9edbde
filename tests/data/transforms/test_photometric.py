"""Photometric distortion: its colours, its draws, and that both loaders apply the same."""

import colorsys
from pathlib import Path

import numpy as np
import pytest
import torch

from bev_lightning.data.loaders.torch import TorchLoader
from bev_lightning.data.nuscenes.index import open_index
from bev_lightning.data.samplers import TrainSampler
from bev_lightning.data.samples.frame import FrameSource
from bev_lightning.data.transforms.augment import Augment
from bev_lightning.data.transforms.photometric import (
    ColourChange,
    apply_colour_changes,
    random_colour_changes,
    shift_hue,
)
from bev_lightning.errors import InputError
from bev_lightning.structures import CameraInput, Inputs

CAMERA = CameraInput((32, 64), ("CAM_FRONT", "CAM_BACK"))
INPUTS = Inputs(CAMERA, history=1)
PUBLISHED = {
    "image_brightness": 32.0,
    "image_contrast": (0.5, 1.5),
    "image_saturation": (0.5, 1.5),
    "image_hue_deg": 18.0,
    "image_swap_channels": True,
}
STILL = {"image_rotate_deg": (0, 0)}


def random_image() -> torch.Tensor:
    return torch.rand(3, 5, 7, generator=torch.Generator().manual_seed(0)) * 255


@pytest.mark.parametrize("degrees", [-170.0, -18.0, 5.0, 90.0])
def test_hue_and_saturation_are_those_of_hsv(degrees: float) -> None:
    image = random_image()
    image[:, 0, 0] = 100.0  # grey has no hue
    found = ColourChange(saturation=0.7, hue_deg=degrees).apply(image)
    for pixel, turned in zip(image.flatten(1).T, found.flatten(1).T, strict=True):
        hue, saturation, value = colorsys.rgb_to_hsv(*(pixel / 255).tolist())
        wanted = colorsys.hsv_to_rgb((hue + degrees / 360) % 1, 0.7 * saturation, value)
        assert (turned / 255).tolist() == pytest.approx(wanted, abs=1e-4)
    torch.testing.assert_close(shift_hue(image, 360.0), image, atol=1e-2, rtol=0)


def test_order_of_the_steps() -> None:
    image = random_image()
    bright = ColourChange(brightness=-300.0, contrast=2.0).apply(image)
    torch.testing.assert_close(bright, (image - 300) * 2)  # nothing is cut off
    swapped = ColourChange(channels=(2, 0, 1)).apply(image)
    assert torch.equal(swapped, image[[2, 0, 1]])
    twice = torch.stack([image, image])
    mean = torch.tensor(CAMERA.mean).view(3, 1, 1)
    std = torch.tensor(CAMERA.std).view(3, 1, 1)
    images = (twice - mean) / std
    apply_colour_changes([ColourChange(), ColourChange(brightness=10.0)], images, CAMERA)
    torch.testing.assert_close(images[0], (image - mean) / std)
    torch.testing.assert_close(images[1] * std + mean, image + 10, atol=1e-3, rtol=0)


def test_draws_follow_the_seed_and_their_ranges() -> None:
    augment = Augment(**PUBLISHED)
    drawn = [random_colour_changes(augment, 2, 6, (0, epoch, 3)) for epoch in range(100)]
    changes = [change for frames in drawn for frame in frames for change in frame]
    assert len(set(changes)) > 1000
    for name, still, low, high in (
        ("brightness", 0.0, -32, 32),
        ("contrast", 1.0, 0.5, 1.5),
        ("saturation", 1.0, 0.5, 1.5),
        ("hue_deg", 0.0, -18, 18),
    ):
        values = np.array([getattr(change, name) for change in changes])
        assert np.mean(values != still) == pytest.approx(0.5, abs=0.05)
        assert low <= values.min() < low + 2 and high - 2 < values.max() <= high
    assert np.mean([change.contrast_first for change in changes]) == pytest.approx(0.5, abs=0.05)
    orders = {change.channels for change in changes}
    assert len(orders) == 6
    swapped = np.mean([change.channels != (0, 1, 2) for change in changes])
    assert swapped == pytest.approx(0.5 * 5 / 6, abs=0.05)
    assert drawn[4] == random_colour_changes(augment, 2, 6, (0, 4, 3))
    assert drawn[4][:1] == random_colour_changes(augment, 1, 6, (0, 4, 3))  # whatever the queue
    assert drawn[4] != random_colour_changes(augment, 2, 6, (0, 4, 2))
    assert random_colour_changes(Augment(), 2, 6, (0, 4, 3)) == [(), ()]
    only_hue = random_colour_changes(Augment(image_hue_deg=18.0), 1, 50, (0, 0, 0))[0]
    assert {(c.brightness, c.contrast, c.saturation, c.channels) for c in only_hue} == {
        (0.0, 1.0, 1.0, (0, 1, 2))
    }
    with pytest.raises(InputError, match="must not be negative"):
        Augment(image_brightness=-1.0)
    with pytest.raises(InputError, match="put the smaller number first"):
        Augment(image_contrast=(1.5, 0.5))


def test_both_loaders_give_the_same_colours(make_tree, tmp_path: Path) -> None:
    index = open_index(make_tree(), "v1.0-mini", tmp_path / "cache")

    def open_batch(loader, augment: Augment):
        frames = FrameSource(index, index.split("mini_train"), INPUTS, ("car",), augment=augment)
        frames = frames.with_tokens(frames.tokens[1:])
        return frames, next(loader.open(frames, TrainSampler(2, 2, shuffle=False), 0, 1))

    coloured, masked = Augment(**STILL, **PUBLISHED), Augment(**STILL, **PUBLISHED, grid_mask=1.0)
    frames, distorted = open_batch(TorchLoader(), coloured)
    _, plain = open_batch(TorchLoader(), Augment(**STILL))
    for sample in range(2):
        frame = frames.frame(0, sample)
        assert frame.colours != frame.history[0].colours and len(frame.colours) == 2
        for moment, found, expected in (
            (frame, distorted, plain),
            (frame.history[0], distorted.history[0], plain.history[0]),
        ):
            images = expected.cameras.images[sample].clone()
            apply_colour_changes(moment.colours, images, CAMERA)
            assert torch.equal(found.cameras.images[sample], images)
            assert not torch.equal(images, expected.cameras.images[sample])
    assert torch.equal(distorted.cameras.image_from_lidar, plain.cameras.image_from_lidar)
    assert torch.equal(distorted.targets.centre, plain.targets.centre)
    # Squares are hidden last: they are 0 whatever the colours.
    frames, hidden = open_batch(TorchLoader(), masked)
    mask = frames.frame(0, 0).mask.visible((32, 64))
    assert torch.equal(hidden.cameras.images[0], distorted.cameras.images[0] * mask)

    pytest.importorskip("nvidia.dali")
    from bev_lightning.data.loaders.dali import DaliLoader

    _, other = open_batch(DaliLoader(num_workers=0), coloured)
    for one, two in ((other, distorted), (other.history[0], distorted.history[0])):
        difference = (one.cameras.images - two.cameras.images).abs() * max(CAMERA.std)
        assert difference.mean() < 4.0  # of 255; the loaders' resizing differs
