"""The plain loader: values, broken files, workers."""

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from bev_lightning.data.loaders.clouds import read_points, read_radar
from bev_lightning.data.loaders.images import normalise_images, read_image
from bev_lightning.data.loaders.torch import TorchLoader, assemble
from bev_lightning.data.nuscenes.index import open_index
from bev_lightning.data.nuscenes.sensor_files import read_lidar_file, read_radar_file
from bev_lightning.data.samplers import TrainSampler
from bev_lightning.data.samples.file_sources import ImageSource, LidarSource, RadarSource
from bev_lightning.data.samples.frame import FrameSource
from bev_lightning.data.transforms.augment import Augment
from bev_lightning.errors import InputError
from bev_lightning.structures import Batch, CameraInput, Inputs, LidarInput, RadarInput

VERSION = "v1.0-mini"
CLASSES = ("car", "pedestrian", "barrier")
RANGE = (-20.0, -20.0, -5.0, 20.0, 20.0, 5.0)
INPUTS = Inputs(
    CameraInput((32, 64), ("CAM_FRONT", "CAM_BACK")),
    LidarInput(RANGE, sweeps=2),
    RadarInput(RANGE, ("RADAR_FRONT", "RADAR_BACK_LEFT"), sweeps=1),
)


@pytest.fixture
def frames(make_tree, tmp_path: Path):
    index = open_index(make_tree(empty=[("scene-0061", 1)]), VERSION, tmp_path / "cache")

    def make(inputs: Inputs = INPUTS, split: str | None = None, **kwargs) -> FrameSource:
        return FrameSource(
            index, index.tokens if split is None else index.split(split), inputs, CLASSES, **kwargs
        )

    return make


def smooth_image(path: Path) -> np.ndarray:
    rng = np.random.default_rng(0)
    small = Image.fromarray(rng.integers(0, 256, (9, 16, 3), dtype=np.uint8))
    image = small.resize((1600, 900), Image.Resampling.BICUBIC)
    image.save(path)
    return np.asarray(image)


@pytest.mark.parametrize("epoch", range(4))
def test_pixels_lie_where_the_matrix_maps_them(frames, tmp_path: Path, epoch: int) -> None:
    original = smooth_image(tmp_path / "smooth.png").astype(np.float64)
    from bev_lightning.data.transforms.augment import random_image_transform

    rng = np.random.default_rng(epoch)
    network_from_original = random_image_transform(Augment(), rng, (900, 1600), (64, 176))
    source = ImageSource(tmp_path / "smooth.png", (900, 1600), (64, 176), network_from_original)
    image = read_image(source).astype(np.float64)
    v, u = np.mgrid[:64, :176]
    where = np.stack([u.ravel(), v.ravel(), np.ones(u.size)])
    x, y, _ = np.linalg.inv(network_from_original) @ where
    inside = (x > 5) & (x < 1594) & (y > 5) & (y < 894)
    nearest = original[y[inside].round().astype(int), x[inside].round().astype(int)]
    difference = np.abs(image.reshape(-1, 3)[inside] - nearest)
    assert inside.mean() > 0.8 and difference.mean() < 1.5 and np.quantile(difference, 0.99) < 8
    outside = (x < -5) | (x > 1605) | (y > 905)
    assert image.reshape(-1, 3)[outside].sum() == 0


def test_normalise() -> None:
    camera = CameraInput((1, 2), mean=(1, 2, 3), std=(1, 2, 4))
    images = np.array([[[[1, 2, 3], [2, 4, 7]]]], dtype=np.uint8)
    assert normalise_images(images, camera).tolist() == [[[[0, 1]], [[0, 1]], [[0, 1]]]]


def lidar_source(path: Path, points: list, age: float, shift: float) -> LidarSource:
    path.write_bytes(np.array(points, np.float32).tobytes())
    matrix = np.eye(4)
    matrix[0, 3] = shift
    return LidarSource(path, matrix, age)


def test_points_are_moved_filtered_aged_and_capped(tmp_path: Path) -> None:
    key = [[2, 0, 0, 7, 1], [0.5, -0.5, 0, 8, 1], [30, 0, 0, 9, 1], [0.5, 3, 1, 10, 1]]
    sources = (
        lidar_source(tmp_path / "a", key, 0.0, 0.0),
        lidar_source(tmp_path / "b", [[3, 0, 0, 1, 0], [19, 0, 0, 2, 0]], 0.1, -2.0),
    )
    points = read_points(sources, LidarInput(RANGE))
    expected = [[2, 0, 0, 7, 0], [0.5, 3, 1, 10, 0], [1, 0, 0, 1, 0.1], [17, 0, 0, 2, 0.1]]
    np.testing.assert_allclose(points, np.float32(expected))
    assert points.dtype == np.float32
    assert read_points(sources, LidarInput(RANGE, max_points=3)).tolist() == points[:3].tolist()
    assert read_points(sources, LidarInput((90, 90, 0, 91, 91, 1))).shape == (0, 5)


def test_sweeps_equal_the_devkit(frames, open_devkit) -> None:
    from nuscenes.utils.data_classes import LidarPointCloud

    source = frames(replace(INPUTS, lidar=LidarInput((-1e3,) * 3 + (1e3,) * 3, sweeps=3)))
    tables = open_devkit(source.index.root, VERSION)
    sample = tables.get("sample", "scene-0061_1")
    cloud, ages = LidarPointCloud.from_file_multisweep(
        tables, sample, "LIDAR_TOP", "LIDAR_TOP", nsweeps=4
    )
    ours = read_points(source.frame(0, 1).lidar, source.inputs.lidar)
    assert len(ours) == cloud.points.shape[1] > 700
    np.testing.assert_allclose(ours[:, :4], cloud.points.T, atol=2e-3)
    np.testing.assert_allclose(ours[:, 4], ages[0], atol=1e-5)


def test_radar_equals_the_devkit_and_turns_velocities(frames) -> None:
    from nuscenes.utils.data_classes import RadarPointCloud

    source = frames().frame(0, 1).radar
    returns = read_radar(source[:2], RadarInput((-1e3,) * 3 + (1e3,) * 3))
    theirs = RadarPointCloud.from_file(str(source[0].path)).points
    assert returns.shape == (4, 8) and theirs.shape[1] == 2
    front = returns[returns[:, 7] == 0]
    # RADAR_FRONT looks along the ego's x, which is LIDAR_TOP's y; 2.4 m ahead of it, 12 ms (0.12 m)
    # earlier.
    np.testing.assert_allclose(front[:, 1], theirs[0] + 2.4 - 0.12, atol=1e-4)
    np.testing.assert_allclose(front[:, 0], -theirs[1], atol=1e-4)
    np.testing.assert_allclose(front[:, 3], theirs[5])
    np.testing.assert_allclose(front[:, 4:6], [[0, 2], [0, 2]], atol=1e-5)
    np.testing.assert_allclose(returns[returns[:, 7] == 1][:, 4:6], [[-2, 0], [-2, 0]], atol=1e-5)
    np.testing.assert_allclose(returns[:, 6], 0.012, atol=1e-6)


def test_radar_files_empty_and_broken(tmp_path: Path, frames) -> None:
    path = frames().frame(0, 0).radar[0].path
    content = path.read_bytes()
    assert len(read_radar_file(path)) == 4
    nan = np.frombuffer(
        content, read_radar_file(path).dtype, 4, content.index(b"DATA binary\n") + 12
    ).copy()
    nan["x"][0] = np.nan
    head = content[: content.index(b"DATA binary\n") + 12]
    path.write_bytes(head + nan.tobytes())
    assert len(read_radar_file(path)) == 0
    path.write_bytes(head.replace(b"WIDTH 4", b"WIDTH 0"))
    assert len(read_radar_file(path)) == 0
    for broken in (
        content[: len(head) + 20],
        b"",
        b"DATA binary\n",
        head.replace(b"TYPE F", b"TYPE Q"),
    ):
        path.write_bytes(broken)
        with pytest.raises(InputError, match=rf"radar file .*{path.name} \({len(broken)} bytes\)"):
            read_radar((RadarSource(path, np.eye(4), 0.0, 0),), INPUTS.radar)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (lambda whole: whole[: 20 * 100 + 8], r"\(2008 bytes\) is cut"),
        (lambda whole: b"", r"\(0 bytes\) is empty"),
        (
            lambda whole: np.float32([[1, 2, np.nan, 0, 0], [1, 2, np.inf, 0, 0]]).tobytes(),
            "in 2 of 2 points",
        ),
    ],
)
def test_broken_lidar_names_path_size_and_sample(frames, content, message: str) -> None:
    source = frames(Inputs(lidar=LidarInput(RANGE, sweeps=0)))
    path = source.frame(0, 2).lidar[0].path
    path.write_bytes(content(path.read_bytes()))
    with pytest.raises(
        InputError, match=rf"sample scene-0061_2: the lidar file {path} .*{message}"
    ):
        assemble(source.frame(0, 2), source.inputs)


@pytest.mark.parametrize("kind", ["half", "empty", "text", "gone", "small"])
def test_broken_images_name_path_and_sample_in_every_worker_setting(frames, kind: str) -> None:
    source = frames(Inputs(camera=INPUTS.camera))
    path = source.frame(0, 2).images[1].path
    whole = path.read_bytes()
    if kind == "gone":
        path.unlink()
    elif kind == "small":
        Image.new("RGB", (80, 45)).save(path)
    else:
        path.write_bytes(
            {"half": whole[: len(whole) // 2], "empty": b"", "text": b"not a picture"}[kind]
        )
    with pytest.raises(InputError, match=rf"^sample scene-0061_2: the image {path} ") as error:
        list(
            TorchLoader(num_workers=1 if kind == "half" else 0).open(
                source, TrainSampler(5, 1), 0, 5
            )
        )
    assert "Traceback" not in str(error.value) and "\n" not in str(error.value)


def equal(one: Batch, two: Batch) -> bool:
    return (
        one.sample_tokens == two.sample_tokens
        and torch.equal(one.cameras.images, two.cameras.images)
        and torch.equal(one.cameras.image_from_lidar, two.cameras.image_from_lidar)
        and torch.equal(one.points.features, two.points.features)
        and torch.equal(one.radar.features, two.radar.features)
        and torch.equal(one.targets.centre, two.targets.centre)
    )


@pytest.mark.parametrize("num_workers", [1, 2])
def test_batches_do_not_depend_on_workers(frames, num_workers: int) -> None:
    source = frames(augment=Augment(), seed=4)
    sampler = TrainSampler(len(source), 2, seed=4)
    expected = list(TorchLoader().open(source, sampler, 1, 5))
    loader = TorchLoader(num_workers, prefetch=1)
    got = list(loader.open(source, sampler, 1, 5))
    assert len(got) == 4 and all(equal(a, b) for a, b in zip(got, expected, strict=True))
    for batch in got:
        batch.validate()
        assert (
            batch.cameras.images.shape == (2, 2, 3, 32, 64) and batch.points.features.shape[2] == 5
        )


def test_loading_leaves_the_random_numbers_alone(frames) -> None:
    source = frames()
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    list(TorchLoader(num_workers=1).open(source, TrainSampler(5, 1), 0, 1))
    assert torch.equal(torch.rand(1), expected)


def test_unreadable_samples_are_replaced_and_counted(frames) -> None:
    source = frames(on_missing="skip")
    path = source.frame(0, 2).lidar[0].path
    path.write_bytes(b"")
    for num_workers in (0, 1):
        loader = TorchLoader(num_workers)
        batches = list(loader.open(source, TrainSampler(5, 5, shuffle=False), 0, 1))
        assert batches[0].sample_tokens[1:4] == ("scene-0061_1", "scene-0103_0", "scene-0103_0")
        assert list(loader.stats.skipped) == ["scene-0061_2"]
        assert "(0 bytes) is empty" in loader.stats.skipped["scene-0061_2"]
    for position in range(5):
        source.frame(0, position).lidar[0].path.write_bytes(b"")
    with pytest.raises(InputError, match="none of the 5 samples can be read"):
        next(TorchLoader().open(source, TrainSampler(5, 1), 0, 1))


def test_history_and_empty_samples_stack(frames) -> None:
    source = frames(replace(INPUTS, history=2))
    batch = next(TorchLoader().open(source, TrainSampler(5, 5, shuffle=False), 0, 1))
    batch.validate()
    assert len(batch.history) == 2 and batch.history[1].sample_tokens[2] == "scene-0061_1"
    assert batch.targets.valid.sum(dim=1).tolist() == [2, 0, 2, 2, 2]
    assert torch.equal(batch.history[0].cameras.images[0], batch.cameras.images[0])


@pytest.mark.skipif("BEV_NUSCENES_DIR" not in os.environ, reason="BEV_NUSCENES_DIR is not set")
def test_real_frames_load(tmp_path: Path) -> None:
    index = open_index(os.environ["BEV_NUSCENES_DIR"], VERSION, tmp_path / "cache")
    inputs = Inputs(CameraInput((128, 352)), LidarInput((-54, -54, -5, 54, 54, 3), sweeps=0))
    source = FrameSource(index, index.split("real_lidar"), inputs, CLASSES)
    batch = next(TorchLoader().open(source, TrainSampler(2, 2, shuffle=False), 0, 1)).validate()
    assert batch.cameras.images.shape == (2, 6, 3, 128, 352)
    assert batch.points.count.tolist() == [
        len(read_points(source.frame(0, i).lidar, inputs.lidar)) for i in (0, 1)
    ]
    assert all(20_000 < count < 34_720 for count in batch.points.count.tolist())
    assert read_lidar_file(source.frame(0, 0).lidar[0].path).shape == (34_688, 5)
    assert abs(batch.cameras.images.mean().item()) < 1.0 and batch.cameras.images.std().item() > 0.5
