"""The DALI loader against the plain one, on a tiny rig of files written here."""

import io
import os
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw

pytest.importorskip("nvidia.dali")

from nvidia.dali import fn
from nvidia.dali.pipeline import Pipeline

from bev_lightning.data.batch_stream import BatchStream
from bev_lightning.data.loaders.dali import (
    DaliLoader,
    EncodedImageSource,
    make_images,
    plan_pixels,
)
from bev_lightning.data.loaders.images import read_encoded, read_image
from bev_lightning.data.loaders.torch import TorchLoader
from bev_lightning.data.nuscenes.sample import Annotations, Readings, Sample
from bev_lightning.data.nuscenes.sensor_files import is_whole_jpeg
from bev_lightning.data.samplers import SceneSampler, TrainSampler
from bev_lightning.data.samples.file_sources import ImageSource
from bev_lightning.data.samples.frame import FrameSource
from bev_lightning.data.transforms.augment import Augment, image_transform
from bev_lightning.errors import InputError
from bev_lightning.structures import Batch, CameraInput, Inputs, LidarInput, RadarInput

# Mean absolute difference per image [0..255] and the largest on any channel of any pixel.
MEAN_TOLERANCE = 0.75
LARGEST_TOLERANCE = 8.0
REACH = (-20.0, -20.0, -3.0, 20.0, 20.0, 3.0)
SIZES = {"CAM_FRONT": (90, 160), "CAM_BACK": (100, 150)}
INPUTS = Inputs(
    camera=CameraInput(size=(32, 88), channels=tuple(SIZES)),
    lidar=LidarInput(range=REACH, sweeps=2, max_points=400),
    radar=RadarInput(
        range=REACH, channels=("RADAR_FRONT", "RADAR_BACK_LEFT"), sweeps=1, max_points=20
    ),
)
CLASSES = ("car", "pedestrian")
NUM_SAMPLES = 5


@pytest.fixture
def frames(tmp_path: Path) -> FrameSource:
    return make_frames(tmp_path, INPUTS, Augment(image_rotate_deg=(-5.4, 5.4)))


def test_batches_equal_the_plain_loaders(frames: FrameSource) -> None:
    sampler = TrainSampler(NUM_SAMPLES, batch_size=2, seed=3)
    batches = list(DaliLoader(num_workers=2).open(frames, sampler, 0, 5))
    expected = list(TorchLoader(num_workers=0).open(frames, sampler, 0, 5))
    assert len(batches) == len(expected) == 5
    assert {int(b.points.count[0]) == int(b.points.count[1]) for b in batches} == {False}  # padded
    for batch, other in zip(batches, expected, strict=True):
        assert_equal_batches(batch.validate(), other)


def test_images_stay_valid_while_others_are_made(frames: FrameSource) -> None:
    sampler = TrainSampler(NUM_SAMPLES, batch_size=1, shuffle=False)
    batches = DaliLoader(num_workers=0).open(frames, sampler, 0, 8)
    held = next(batches)
    before = held.cameras.images.clone(), held.points.features.clone()
    assert len(list(batches)) == 7
    assert torch.equal(held.cameras.images, before[0])
    assert torch.equal(held.points.features, before[1])


def test_a_loader_opened_later_goes_on_exactly_there(frames: FrameSource) -> None:
    sampler = TrainSampler(NUM_SAMPLES, batch_size=2, seed=1)
    loader = DaliLoader(num_workers=0)
    whole = list(loader.open(frames, sampler, 0, 7))
    rest = list(DaliLoader(num_workers=0, prefetch=3).open(frames, sampler, 4, 7))
    assert [b.sample_tokens for b in rest] == [b.sample_tokens for b in whole[4:]]
    for batch, other in zip(rest, whole[4:], strict=True):
        assert torch.equal(batch.cameras.images, other.cameras.images)
        assert torch.equal(batch.points.features, other.points.features)
        assert torch.equal(batch.radar.features, other.radar.features)
        assert torch.equal(batch.cameras.image_from_lidar, other.cameras.image_from_lidar)
    assert not torch.equal(rest[0].cameras.images, whole[0].cameras.images)


def test_the_stream_resumes_through_the_loader(frames: FrameSource) -> None:
    sampler = TrainSampler(NUM_SAMPLES, batch_size=1, seed=2)
    stream = BatchStream(DaliLoader(num_workers=0), frames, sampler, num_micro_steps=6)
    batches = iter(stream)
    seen = [next(batches).sample_tokens for _ in range(2)]
    batches.close()
    assert stream.micro_step == 2
    seen += [batch.sample_tokens for batch in stream]
    assert seen == [(frames.tokens[sampler.batch(m)[0][1]],) for m in range(6)]


def test_ragged_last_batches_are_short(frames: FrameSource) -> None:
    sampler = SceneSampler((NUM_SAMPLES,), batch_size=2)
    loader = DaliLoader(num_workers=0)
    batches = list(loader.open(frames, sampler, 0, len(sampler)))
    assert [batch.size for batch in batches] == [2, 2, 1]
    assert batches[-1].cameras.images.shape == (1, 2, 3, 32, 88)
    expected = list(TorchLoader().open(frames, sampler, 0, len(sampler)))
    assert_equal_batches(batches[-1], expected[-1])


def test_history_is_read_too(tmp_path: Path) -> None:
    frames = make_frames(tmp_path, replace(INPUTS, history=2), None)
    sampler = TrainSampler(NUM_SAMPLES, batch_size=2, shuffle=False)
    batch, other = (
        next(iter(loader.open(frames, sampler, 1, 2)))
        for loader in (DaliLoader(num_workers=0), TorchLoader())
    )
    assert [past.sample_tokens for past in batch.history] == [("s0", "s1"), ("s1", "s2")]
    assert_equal_batches(batch, other)
    for past, expected in zip(batch.history, other.history, strict=True):
        assert past.targets is None
        assert_equal_batches(past, expected)


@pytest.mark.parametrize(
    "inputs", [replace(INPUTS, camera=None), replace(INPUTS, lidar=None, radar=None)]
)
def test_sensors_left_out_are_absent(tmp_path: Path, inputs: Inputs) -> None:
    frames = make_frames(tmp_path, inputs, None)
    sampler = TrainSampler(NUM_SAMPLES, batch_size=2, shuffle=False)
    batch, other = (
        next(iter(loader.open(frames, sampler, 0, 1)))
        for loader in (DaliLoader(num_workers=0), TorchLoader())
    )
    assert (batch.cameras is None) == (inputs.camera is None)
    assert (batch.points is None) == (batch.radar is None) == (inputs.lidar is None)
    assert_equal_batches(batch, other)


def half(content: bytes) -> bytes:
    return content[: len(content) // 2]


DAMAGE = {
    "half a file": half,
    "empty": lambda content: b"",
    "text": lambda content: b"<html>404 not found</html>\n" * 20,
    "another size": lambda content: encode(np.zeros((40, 60, 3), np.uint8)),
    "header only": lambda content: content[:200],
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_image_is_named_when_its_batch_is_due(frames: FrameSource, damage: str) -> None:
    path = damaged_path(frames, 2)
    path.write_bytes(DAMAGE[damage](path.read_bytes()))
    sampler = TrainSampler(NUM_SAMPLES, batch_size=1, shuffle=False)
    batches = DaliLoader(num_workers=0).open(frames, sampler, 0, 5)
    assert [next(batches).sample_tokens for _ in range(2)] == [("s0",), ("s1",)]
    with pytest.raises(InputError, match="sample s2: ") as caught:
        next(batches)
    assert str(path) in str(caught.value)
    with pytest.raises(InputError) as plain:
        next(TorchLoader().open(frames, sampler, 2, 3))
    assert str(caught.value) == str(plain.value)


def test_an_image_that_vanished_is_named(frames: FrameSource) -> None:
    path = damaged_path(frames, 0)
    path.unlink()
    with pytest.raises(InputError, match=f"sample s0: .*{path.name}"):
        next(DaliLoader(num_workers=0).open(frames, TrainSampler(5, 1, shuffle=False), 0, 5))


@pytest.mark.parametrize(
    "content", [b"", b"\0" * 30, np.full((4, 5), np.nan, np.float32).tobytes()]
)
def test_a_damaged_cloud_is_named(frames: FrameSource, content: bytes) -> None:
    path = frames.frame(0, 1).lidar[1].path
    path.write_bytes(content)
    batches = DaliLoader(num_workers=0).open(frames, TrainSampler(5, 1, shuffle=False), 1, 5)
    with pytest.raises(InputError, match=f"sample s1: .*{path.name}"):
        next(batches)


def test_damage_in_the_middle_of_a_scan_is_treated_as_the_plain_loader_does(
    frames: FrameSource,
) -> None:
    """Only a full decode could see it, and PIL's passes it: both decoders make the same image."""
    path = damaged_path(frames, 0)
    content = bytearray(path.read_bytes())
    content[len(content) // 2 : len(content) // 2 + 20] = b"\x55" * 20
    path.write_bytes(bytes(content))
    sampler = TrainSampler(NUM_SAMPLES, batch_size=1, shuffle=False)
    batch, other = (
        next(loader.open(frames, sampler, 0, 1))
        for loader in (DaliLoader(num_workers=0), TorchLoader())
    )
    assert_equal_batches(batch, other)


@pytest.mark.parametrize("pil_can", [False, True])
def test_what_only_the_decoder_finds_is_named_too(
    frames: FrameSource, monkeypatch: pytest.MonkeyPatch, pil_can: bool
) -> None:
    path = damaged_path(frames, 1)
    path.write_bytes(half(path.read_bytes()))
    monkeypatch.setattr("bev_lightning.data.loaders.images.is_whole_jpeg", lambda *_: True)
    if pil_can:
        monkeypatch.setattr("bev_lightning.data.loaders.dali.read_image", lambda source: None)
    batches = DaliLoader(num_workers=0).open(frames, TrainSampler(5, 1, shuffle=False), 0, 5)
    next(batches)
    expected = r"an image of the samples s1, s2, s3," if pil_can else rf"sample s1: .*{path}"
    with pytest.raises(InputError, match=expected):
        next(batches)


def test_skip_replaces_as_the_plain_loader_does(tmp_path: Path) -> None:
    frames = make_frames(tmp_path, INPUTS, None, on_missing="skip")
    path = damaged_path(frames, 2)
    path.write_bytes(half(path.read_bytes()))
    sampler = TrainSampler(NUM_SAMPLES, batch_size=2, shuffle=False)
    loader, plain = DaliLoader(num_workers=0), TorchLoader()
    batches = list(loader.open(frames, sampler, 0, 2))
    expected = list(plain.open(frames, sampler, 0, 2))
    assert [batch.sample_tokens for batch in batches] == [("s0", "s1"), ("s3", "s3")]
    assert loader.stats.skipped == plain.stats.skipped
    assert set(loader.stats.skipped) == {"s2"}
    assert_equal_batches(batches[1], expected[1])


def test_an_error_in_a_worker_arrives_soon_and_leaves_nothing_behind(frames: FrameSource) -> None:
    path = damaged_path(frames, 1)
    path.write_bytes(half(path.read_bytes()))
    before = children()
    batches = DaliLoader(num_workers=1).open(frames, TrainSampler(5, 1, shuffle=False), 0, 5)
    next(batches)
    assert len(children() - before) >= 1
    began = time.monotonic()
    with pytest.raises(InputError, match="sample s1: "):
        next(batches)
    assert time.monotonic() - began < 5
    assert workers_left(before) == set()


def test_closing_early_ends_the_workers(frames: FrameSource) -> None:
    before = children()
    batches = DaliLoader(num_workers=1).open(frames, TrainSampler(5, 1), 0, 1000)
    batch = next(batches)
    batches.close()
    assert workers_left(before) == set()
    assert torch.isfinite(batch.cameras.images).all()


def test_a_killed_worker_is_an_error_and_no_hang(frames: FrameSource) -> None:
    before = children()
    batches = DaliLoader(num_workers=1).open(frames, TrainSampler(5, 1), 0, 1000)
    next(batches)
    (worker,) = children() - before
    began = time.monotonic()
    os.kill(worker, 9)
    with pytest.raises(InputError, match=r"samples s\d \(\d files, first /.*signal 9"):
        list(batches)
    assert time.monotonic() - began < 5
    assert workers_left(before) == set()


@pytest.mark.parametrize(
    ("resized", "corner", "flip", "angle"),
    [
        ((45, 80), (13, -4), False, 0.0),  # reaches beyond the file on both sides
        ((45, 80), (13, -4), True, 0.0),
        ((40, 100), (5, 7), True, 0.09),
        ((120, 213), (60, 61), False, -0.3),  # enlarged
        ((32, 88), (0, 0), False, 0.0),
    ],
)
def test_pixels_lie_where_the_matrix_maps_them(
    tmp_path: Path, resized: tuple[int, int], corner: tuple[int, int], flip: bool, angle: float
) -> None:
    """A bright dot's centre of mass, and the plan's two maps put together."""
    matrix = image_transform((90, 160), resized, corner, (32, 88), flip, angle)
    plan = plan_pixels(matrix, (90, 160), (32, 88))
    inside = np.linalg.inv(matrix) @ np.array([40.0, 15.0, 1.0])
    # the resize alone: region start maps to 0, its end to the resized size, in corner coordinates
    scale = plan.resized / (plan.region_end - plan.region_start)
    resized_yx = (inside[[1, 0]] + 0.5 - plan.region_start) * scale - 0.5
    warped = plan.resized_from_network @ np.array([40.0, 15.0, 1.0])
    np.testing.assert_allclose(warped[[1, 0]], resized_yx, atol=2e-3)
    if angle == 0:
        np.testing.assert_allclose(plan.resized_from_network[:2, :2], np.eye(2), atol=1e-6)
        np.testing.assert_allclose(plan.resized_from_network[:2, 2] % 1, 0, atol=1e-6)


def test_an_image_outside_the_network_leaves_black() -> None:
    plan = plan_pixels(
        image_transform((90, 160), (45, 80), (0, 500), (32, 88)), (90, 160), (32, 88)
    )
    assert plan.resized.tolist() == [1, 1]
    assert (plan.resized_from_network @ np.array([40.0, 15.0, 1.0]))[0] > 1000


def test_cheap_check_of_jpegs(tmp_path: Path) -> None:
    pixels = draw(np.random.default_rng(0), (20, 30))
    plain, progressive, grey = (
        encode(pixels),
        encode(pixels, progressive=True),
        encode(pixels[..., 0]),
    )
    for content in (plain, progressive, grey, plain + b"\0" * 100):
        assert is_whole_jpeg(content, (20, 30))
        assert not is_whole_jpeg(content, (30, 20))
    for cut in (0, 1, 2, 3, 20, len(plain) // 2, len(plain) - 2):
        assert not is_whole_jpeg(plain[:cut], (20, 30)), cut
    png = tmp_path / "really_a_png.jpg"
    Image.fromarray(pixels).save(png, "PNG")
    content = read_encoded(ImageSource(png, (20, 30), (20, 30), np.eye(3)))
    assert content.tobytes() == png.read_bytes()


def test_the_source_keeps_the_order_and_stops(frames: FrameSource) -> None:
    sampler = TrainSampler(NUM_SAMPLES, 2, shuffle=False)
    source = EncodedImageSource(frames, sampler, 3, 5, num_workers=0, prefetch=1, ahead=2)
    images, *plans = source()
    expected = [s.path.read_bytes() for i in (0, 1) for s in frames.frame(0, i).images]
    assert [image.tobytes() for image in images] == expected
    assert [len(column) for column in plans] == [4] * 4
    source()
    batches = [source.pending_clouds.get() for _ in range(2)]
    assert [batch.metadata.skipped for batch in batches] == [{}, {}]
    assert [batch.slot for batch in batches] == [0, 1]
    with pytest.raises(StopIteration):
        source()
    for batch in batches:
        source.pool.release(batch.slot)
    with pytest.raises(RuntimeError, match="free already"):
        source.pool.release(0)


def test_images_larger_than_a_slot_travel_beside_it(frames: FrameSource) -> None:
    path = frames.frame(0, 1).images[0].path
    path.write_bytes(path.read_bytes() + b"\0" * 100_000)
    sampler = TrainSampler(NUM_SAMPLES, 1, shuffle=False)
    source = EncodedImageSource(frames, sampler, 1, 2, num_workers=1, prefetch=1, ahead=1)
    images, *_ = source()
    source.close()
    assert images[0].tobytes() == path.read_bytes()
    assert list(source.pending_clouds.get().metadata.counts.oversized) == [(0, 0, 0)]


def test_a_large_image_of_a_replaced_sample_is_forgotten(tmp_path: Path) -> None:
    frames = make_frames(tmp_path, INPUTS, None, on_missing="skip")
    large, damaged = (image.path for image in frames.frame(0, 1).images)
    large.write_bytes(large.read_bytes() + b"\0" * 100_000)
    damaged.write_bytes(half(damaged.read_bytes()))
    sampler = TrainSampler(NUM_SAMPLES, 1, shuffle=False)
    source = EncodedImageSource(frames, sampler, 1, 2, num_workers=0, prefetch=1, ahead=1)
    images, *_ = source()
    source.close()
    expected = [image.path.read_bytes() for image in frames.frame(0, 2).images]
    assert [image.tobytes() for image in images] == expected


@pytest.mark.parametrize("num_workers", [0, 1])
def test_threads_give_the_same_batches(frames: FrameSource, num_workers: int) -> None:
    sampler = TrainSampler(NUM_SAMPLES, batch_size=2, seed=3)
    loader = DaliLoader(num_workers, image_queue=3, cloud_queue=2)
    expected = DaliLoader(0).open(frames, sampler, 0, 8)
    for batch, other in zip(loader.open(frames, sampler, 0, 8), expected, strict=True):
        assert_equal_batches(batch, other)
        assert torch.equal(batch.cameras.images, other.cameras.images)
        assert torch.equal(batch.points.features, other.points.features)


def test_threads_end_early_and_with_an_error(frames: FrameSource) -> None:
    before = children(), threading.active_count()
    batches = DaliLoader(1, image_queue=2, cloud_queue=1).open(frames, TrainSampler(5, 1), 0, 1000)
    next(batches)
    batches.close()
    path = damaged_path(frames, 1)
    path.write_bytes(half(path.read_bytes()))
    sampler = TrainSampler(5, 1, shuffle=False)
    batches = DaliLoader(1, image_queue=2, cloud_queue=1).open(frames, sampler, 0, 5)
    assert next(batches).sample_tokens == ("s0",)
    with pytest.raises(InputError, match="sample s1: "):
        next(batches)
    assert (workers_left(before[0]), threading.active_count()) == (set(), before[1])


def test_wrong_numbers_are_refused() -> None:
    with pytest.raises(InputError, match="loader.prefetch=0"):
        DaliLoader(prefetch=0)
    with pytest.raises(InputError, match="loader.image_queue=2 and loader.cloud_queue=0 must be"):
        DaliLoader(image_queue=2)


@pytest.mark.skipif("BEV_NUSCENES_DIR" not in os.environ, reason="BEV_NUSCENES_DIR is unset")
@pytest.mark.parametrize("rotation", [0.0, 4.0])
@pytest.mark.parametrize("scale", [0.16, 0.3, 0.5])
def test_real_images_at_realistic_scales(scale: float, rotation: float) -> None:
    path = sorted(Path(os.environ["BEV_NUSCENES_DIR"]).glob("samples/CAM_FRONT/*.jpg"))[-1]
    size = (int(250 * scale * 2), int(700 * scale * 2))
    resized = (round(900 * scale), round(1600 * scale))
    corner = (resized[0] - size[0], (resized[1] - size[1]) // 2)
    matrix = image_transform((900, 1600), resized, corner, size, True, np.radians(rotation))
    source = ImageSource(path, (900, 1600), size, matrix)
    image = run_pixels(source)
    difference = np.abs(image - read_image(source).astype(np.float32))
    assert difference.mean() < MEAN_TOLERANCE
    assert difference.max() < LARGEST_TOLERANCE


@pytest.mark.gpu
def test_cuda_gives_the_same_batches(frames: FrameSource) -> None:
    sampler = TrainSampler(NUM_SAMPLES, batch_size=2, seed=3)
    batches = list(DaliLoader(num_workers=2).open(frames, sampler, 0, 4))
    expected = list(TorchLoader(num_workers=0).open(frames, sampler, 0, 4))
    for batch, other in zip(batches, expected, strict=True):
        assert batch.cameras.images.is_cuda
        assert batch.points.features.is_cuda
        assert batch.timestamps.is_cuda
        assert_equal_batches(batch.to("cpu"), other)


def assert_equal_batches(batch: Batch, other: Batch) -> None:
    """All but pixels and sums of points to the bit."""
    assert batch.sample_tokens == other.sample_tokens
    assert batch.scene_tokens == other.scene_tokens
    for name in (
        "timestamps",
        "has_previous",
        "global_from_lidar",
        "global_from_ego",
        "lidar_from_previous_lidar",
        "can_bus",
    ):
        assert torch.equal(getattr(batch, name), getattr(other, name)), name
    assert (batch.targets is None) == (other.targets is None)
    if batch.targets is not None and other.targets is not None:
        for name in ("centre", "size", "yaw", "label", "valid"):
            assert torch.equal(getattr(batch.targets, name), getattr(other.targets, name)), name
    for name in ("points", "radar"):
        mine, theirs = getattr(batch, name), getattr(other, name)
        assert (mine is None) == (theirs is None)
        if mine is not None:
            assert torch.equal(mine.count, theirs.count)
            assert int(mine.count.min()) > 0
            torch.testing.assert_close(mine.features, theirs.features, atol=1e-4, rtol=1e-5)
    assert (batch.cameras is None) == (other.cameras is None)
    if batch.cameras is not None and other.cameras is not None:
        assert torch.equal(batch.cameras.image_from_lidar, other.cameras.image_from_lidar)
        std = torch.tensor(INPUTS.camera.std)[:, None, None]
        difference = ((batch.cameras.images - other.cameras.images) * std).abs()
        assert difference.mean(dim=(2, 3, 4)).max() < MEAN_TOLERANCE
        assert difference.max() < LARGEST_TOLERANCE


def run_pixels(source: ImageSource) -> np.ndarray:
    """``(H, W, 3)`` 0..255 of one image through the loader's own graph."""
    plan = plan_pixels(source.network_from_original, source.original_size, source.size)
    camera = CameraInput(source.size, ("CAM_FRONT",))
    arrays = [read_encoded(source), plan.region_start, plan.region_end, plan.resized]
    arrays.append(plan.resized_from_network)
    pipeline = Pipeline(batch_size=1, num_threads=1, device_id=None)
    with pipeline:
        nodes = [fn.external_source(Repeat(array)) for array in arrays]
        pipeline.set_outputs(make_images(nodes, camera, torch.device("cpu")))
    (images,) = pipeline.run()
    return np.array(images[0]).astype(np.float32)


class Repeat:
    def __init__(self, array: np.ndarray) -> None:
        self.array = array

    def __call__(self) -> list[np.ndarray]:
        return [self.array]


def damaged_path(frames: FrameSource, position: int) -> Path:
    return frames.frame(0, position).images[1].path


def children() -> set[int]:
    """Processes that this one started."""
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[1]) == os.getpid() and fields[0] != "Z":
                found.add(int(entry.name))
    return found


def command_line(process: int) -> bytes:
    try:
        return Path(f"/proc/{process}/cmdline").read_bytes()
    except OSError:
        return b""


def workers_left(before: set[int]) -> set[int]:
    """New processes after a moment's grace, without Python's resource tracker, which stays."""
    for _ in range(40):
        left = {p for p in children() - before if b"resource_tracker" not in command_line(p)}
        if not left:
            break
        time.sleep(0.05)
    return left


def make_frames(
    root: Path, inputs: Inputs, augment: Augment | None, on_missing: str = "error"
) -> FrameSource:
    rng = np.random.default_rng(7)
    samples = {f"s{number}": make_sample(root, number, rng) for number in range(NUM_SAMPLES)}
    # A bound method of a dict travels to the workers without this module.
    index = SimpleNamespace(root=root, sample=samples.__getitem__, has_distorted_images=False)
    return FrameSource(
        index, list(samples), inputs, CLASSES, augment, seed=5, on_missing=on_missing
    )


def make_sample(root: Path, number: int, rng: np.random.Generator) -> Sample:
    now = 1_000_000 * number
    rows = []

    def add(channel: str, depth: int, content: bytes, size: tuple[int, int] = (0, 0)) -> None:
        path = root / "samples" / channel / f"{number}_{depth}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        pose = np.r_[number + 0.1 * depth, 0.5, 0.0, np.cos(0.1 * depth), 0, 0, np.sin(0.1 * depth)]
        mount = np.r_[0.2, 0.1, 0.4, np.cos(0.3), np.sin(0.3), 0, 0]
        lens = np.array([[100.0, 0, 80], [0, 100, 45], [0, 0, 1]])
        time_us = now - 50_000 * depth
        rows.append((channel, depth, str(path.relative_to(root)), time_us, mount, pose, lens, size))

    for channel, size in SIZES.items():
        add(channel, 0, encode(draw(rng, size)), size)
    for depth in range(3 if number else 1):
        cloud = rng.uniform(-25, 25, (int(rng.integers(60, 200)), 5)).astype(np.float32)
        cloud[:, 2] /= 10
        add("LIDAR_TOP", depth, cloud.tobytes())
    for channel in ("RADAR_FRONT", "RADAR_BACK_LEFT"):
        for depth in range(2):
            add(channel, depth, encode_radar(rng, int(rng.integers(3, 9))))
    columns = list(zip(*rows, strict=True))
    readings = Readings(
        columns[0],
        np.array(columns[1]),
        columns[2],
        columns[2],
        np.array(columns[3]),
        np.stack(columns[4]),
        np.stack(columns[5]),
        np.stack(columns[6]),
        np.array(columns[7]),
        np.zeros(len(rows), np.int64),
        np.zeros((len(rows), 8)),
    )
    num = number + 1
    boxes = Annotations(
        ("",) * num,
        ("",) * num,
        ("",) * num,
        ("car", "pedestrian", "", "car", "pedestrian")[:num],
        ("",) * num,
        rng.uniform(-8, 8, (num, 3)),
        rng.uniform(1, 4, (num, 3)),
        np.tile([1.0, 0, 0, 0], (num, 1)),
        rng.uniform(-1, 1, (num, 3)),
        np.full(num, 5),
        np.zeros(num, np.int64),
        np.full(num, 4),
    )
    before, after = f"s{number - 1}" if number else "", f"s{number + 1}"
    after = after if number + 1 < NUM_SAMPLES else ""
    return Sample(
        f"s{number}", "scene", "scene-0001", now, before, after, readings, boxes, np.zeros(18), True
    )


def draw(rng: np.random.Generator, size: tuple[int, int]) -> np.ndarray:
    """``(H, W, 3)`` uint8 with smooth shades and sharp edges."""
    height, width = size
    image = Image.fromarray(rng.integers(0, 255, (5, 7, 3), np.uint8)).resize((width, height))
    canvas = ImageDraw.Draw(image)
    for _ in range(6):
        x, y = rng.uniform(0, width), rng.uniform(0, height)
        colour = tuple(int(v) for v in rng.integers(0, 255, 3))
        canvas.rectangle([x, y, x + width / 5, y + height / 6], fill=colour)
    return np.asarray(image)


def encode(pixels: np.ndarray, progressive: bool = False) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "JPEG", quality=90, progressive=progressive)
    return buffer.getvalue()


def encode_radar(rng: np.random.Generator, num: int) -> bytes:
    """nuScenes' radar layout."""
    kinds = dict.fromkeys(("x", "y", "z"), "f4") | {"dyn_prop": "i1", "id": "i2"}
    kinds |= dict.fromkeys(("rcs", "vx", "vy", "vx_comp", "vy_comp"), "f4")
    small = "is_quality_valid ambig_state x_rms y_rms invalid_state pdh0 vx_rms vy_rms"
    kinds |= dict.fromkeys(small.split(), "i1")
    returns = np.zeros(num, np.dtype([(name, f"<{kind}") for name, kind in kinds.items()]))
    for name in ("x", "y", "rcs", "vx_comp", "vy_comp"):
        returns[name] = rng.uniform(-8, 8, num)
    returns["ambig_state"] = 3
    header = (
        f"# .PCD v0.7 - Point Cloud Data file format\nVERSION 0.7\nFIELDS {' '.join(kinds)}\n"
        f"SIZE {' '.join(kind[1] for kind in kinds.values())}\n"
        f"TYPE {' '.join(kind[0].upper() for kind in kinds.values())}\n"
        f"COUNT {' '.join('1' for _ in kinds)}\nWIDTH {num}\nHEIGHT 1\nVIEWPOINT 0 0 0 1 0 0 0\n"
        f"POINTS {num}\nDATA binary\n"
    )
    return header.encode() + returns.tobytes()
