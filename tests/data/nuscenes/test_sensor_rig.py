"""Rigs of other sensors than nuScenes': lenses, sizes, numbers of cameras, reference frames."""

import json
from dataclasses import replace
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch

from bev_lightning.data.batch_stream import EvaluationStream
from bev_lightning.data.camera_models import CameraModel
from bev_lightning.data.loaders.dali import DaliLoader, undistort_on_device
from bev_lightning.data.loaders.images import undistort
from bev_lightning.data.loaders.shared_memory import SharedMemoryLoader
from bev_lightning.data.loaders.torch import TorchLoader
from bev_lightning.data.nuscenes.index import open_index
from bev_lightning.data.nuscenes.sensor_rig import SensorRig
from bev_lightning.data.samplers import SceneSampler
from bev_lightning.data.samples.file_sources import ImageSource
from bev_lightning.data.samples.frame import FrameSource
from bev_lightning.data.synthetic.dataset import SyntheticSpec, generate
from bev_lightning.data.synthetic.rig import CAMERAS
from bev_lightning.data.transforms.augment import Augment
from bev_lightning.errors import InputError
from bev_lightning.structures import CameraInput, Inputs, LidarInput

VERSION = "v1.0-mini"
SIZE = (96, 256)
ALL = CAMERAS["fisheye"]


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("fisheye") / "tree"
    spec = SyntheticSpec(
        VERSION,
        num_train_scenes=1,
        num_val_scenes=0,
        frames_per_scene=2,
        num_azimuths=60,
        sweeps_per_frame=0,
        objects_per_scene=20,
        rig="fisheye",
    )
    generate(root, spec, num_workers=1)
    return root


def make_frames(tree: Path, channels: tuple[str, ...] = ALL, **given: object) -> FrameSource:
    rig = SensorRig(cameras=channels)
    index = open_index(tree, VERSION, tree.parent / "cache", reference=rig.reference)
    inputs = Inputs(camera=CameraInput(SIZE, channels, mean=(0.0,) * 3, std=(1.0,) * 3))
    return FrameSource(index, index.tokens, inputs, ("car",), **{"rig": rig, **given})


def paint_dots(tree: Path, frames: FrameSource, epoch: int) -> dict[int, np.ndarray]:
    """Put dots into the files where the tables' own lenses see points around the car.

    Returns:
        the points ``(M, 3)`` in the model frame, by camera; those that the network's image shows
        well within it, and apart.
    """
    frame = frames.frame(epoch, 0)
    assert frame.image_from_lidar is not None
    sample = frames.index.sample(frames.tokens[0])
    rng, kept = np.random.default_rng(1), {}
    for view, source in enumerate(frame.images):
        channel = frames.inputs.camera.channels[view]
        row = sample.readings.find(channel)[0]
        lens = frames.rig.camera_model(channel, sample.readings, row) or CameraModel(
            "pinhole", tuple(sample.readings.intrinsic[row].ravel().tolist())
        )
        # Points of this camera's view, wherever that is after augmentation.
        seen = frame.image_from_lidar[0, view].double().numpy()
        pixels = rng.uniform((6, 6), (SIZE[1] - 6, SIZE[0] - 6), (60, 2))
        depth = rng.uniform(4, 30, (60, 1))
        rays = np.concatenate([pixels * depth, depth, np.ones((60, 1))], axis=1)
        points = (np.linalg.inv(seen) @ rays.T).T
        camera = _camera_from_model(frame, view, lens, source) @ points.T
        where = lens.project(torch.from_numpy(camera[:3].T.copy())).numpy()
        height, width = source.original_size
        inside = ((where > 4) & (where < (width - 5, height - 5))).all(axis=1)
        chosen: list[int] = []
        for number in np.flatnonzero(inside):
            if all(np.abs(pixels[number] - pixels[other]).max() > 24 for other in chosen):
                chosen.append(int(number))
        grid = np.stack(np.meshgrid(np.arange(width), np.arange(height)), axis=-1)
        image = np.zeros((height, width), np.float64)
        for number in chosen:
            image += 250 * np.exp(-((grid - where[number]) ** 2).sum(-1) / (2 * 1.5**2))
        coloured = np.repeat(image.clip(0, 255).astype(np.uint8)[..., None], 3, axis=-1)
        cv2.imwrite(str(source.path), coloured, [cv2.IMWRITE_JPEG_QUALITY, 100])
        kept[view] = points[chosen, :3]
    return kept


def _camera_from_model(frame, view: int, lens: CameraModel, source: ImageSource) -> np.ndarray:  # type: ignore[no-untyped-def]
    """``(4, 4)``: what is left of the network's matrix without its image."""
    image = np.eye(4)
    image[:3, :3] = source.network_from_original @ lens.view
    matrix: np.ndarray = np.linalg.inv(image) @ frame.image_from_lidar[0, view].double().numpy()
    return matrix


@pytest.mark.parametrize("loader", ["torch", "dali", "dali_prefetch", "zero_copy"])
@pytest.mark.parametrize("augmented", [False, True])
def test_every_loader_shows_points_where_the_matrices_put_them(
    tree: Path, tmp_path: Path, loader: str, augmented: bool
) -> None:
    """Below half a pixel, through fisheyes, wide lenses and a pinhole in one rig."""
    augment = Augment(image_scale=(0.95, 1.2)) if augmented else None
    turned = {"CAM_LEFT_FISHEYE": {"yaw_deg": -20, "pitch_deg": 25, "zoom": 0.8}}
    frames = make_frames(tree, augment=augment, rig=SensorRig(cameras=ALL, camera_models=turned))
    before = {one.path: one.path.read_bytes() for one in frames.frame(0, 0).images}
    try:
        points = paint_dots(tree, frames, epoch=0)
        made = {
            "torch": lambda: TorchLoader(num_workers=0),
            "dali": lambda: DaliLoader(num_workers=0),
            "dali_prefetch": lambda: DaliLoader(num_workers=1, image_queue=2, cloud_queue=1),
            "zero_copy": lambda: SharedMemoryLoader(num_workers=0),
        }[loader]()
        batch = next(iter(EvaluationStream(made, frames, SceneSampler((1,), 1, 0, 1))))
    finally:
        for path, content in before.items():
            path.write_bytes(content)
    assert batch.cameras.images.shape == (1, 8, 3, *SIZE)
    checked, worst = 0, 0.0
    for view, wanted in points.items():
        image = batch.cameras.images[0, view, 0].numpy()
        seen = batch.cameras.image_from_lidar[0, view].double().numpy()
        for point in wanted:
            u, v, depth, _ = seen @ np.r_[point, 1.0]
            u, v = u / depth, v / depth
            left, top = round(u) - 5, round(v) - 5
            patch = image[top : top + 11, left : left + 11].clip(20) - 20
            assert patch.max() > 20, (view, u, v)
            rows, columns = np.mgrid[top : top + patch.shape[0], left : left + patch.shape[1]]
            error = (
                (columns * patch).sum() / patch.sum() - u,
                (rows * patch).sum() / patch.sum() - v,
            )
            worst, checked = max(worst, float(np.hypot(*error))), checked + 1
    assert checked > 60
    assert worst < 0.5


def test_the_loaders_agree_on_bent_images(tree: Path) -> None:
    frames = make_frames(tree, augment=Augment())
    images = {}
    for name, loader in {
        "torch": TorchLoader(num_workers=1),
        "dali": DaliLoader(num_workers=1),
        "zero_copy": SharedMemoryLoader(num_workers=1),
    }.items():
        batches = EvaluationStream(loader, frames, SceneSampler((2,), 1, 0, 1))
        images[name] = torch.cat([batch.cameras.images for batch in batches])
    assert images["torch"].std() > 20
    for name in ("dali", "zero_copy"):
        difference = (images[name] - images["torch"]).abs().mean(dim=(0, 2, 3, 4))
        assert difference.max() < 2.5, name


def test_the_map_on_a_device_is_the_cpus(tree: Path) -> None:
    source = make_frames(tree, augment=Augment()).frame(0, 1).images[0]
    assert source.camera_model is not None
    assert source.camera_model.name == "kannala_brandt"
    pixels = cv2.imread(str(source.path))
    one, two = undistort(source, pixels), undistort_on_device(source, torch.from_numpy(pixels))
    difference = np.abs(one.astype(int) - two.numpy())
    assert difference.max() <= 3  # OpenCV's remap counts in 32nds of a pixel
    assert difference.mean() < 0.3


def test_sizes_and_views_of_the_rig(tree: Path) -> None:
    frames = make_frames(tree)
    sizes = {image.original_size for image in frames.frame(0, 0).images}
    assert sizes == {(225, 400), (242, 320)}
    assert frames.frame(0, 0).images[ALL.index("CAM_FRONT_TELE")].camera_model is None
    index, row = frames.index, ALL.index("CAM_FRONT_FISHEYE")
    closer = SensorRig(cameras=ALL, camera_models={"CAM_FRONT_FISHEYE": {"zoom": 2.0}})
    zoomed = FrameSource(index, index.tokens, frames.inputs, ("car",), rig=closer).frame(0, 0)
    plain, near = frames.frame(0, 0).image_from_lidar, zoomed.image_from_lidar
    assert plain is not None
    assert near is not None
    # The same axis, twice the focal length.
    axis = torch.linalg.inv(plain[0, row].double())
    direction = axis[:3, :3] @ torch.tensor([130.0, 50.0, 1.0], dtype=torch.float64)
    one = plain[0, row, :3, :3].double() @ direction
    two = near[0, row, :3, :3].double() @ direction
    lens = zoomed.images[row].camera_model
    assert lens is not None
    centre = zoomed.images[row].network_from_original @ [lens.view[0, 2], lens.view[1, 2], 1.0]
    np.testing.assert_allclose(
        (two / two[2])[:2].numpy() - centre[:2],
        2 * ((one / one[2])[:2].numpy() - centre[:2]),
        atol=1e-2,
    )


@pytest.mark.parametrize("number", [1, 3, 8])
def test_one_to_eight_cameras(tree: Path, number: int) -> None:
    frames = make_frames(tree, ALL[:number])
    batch = next(iter(EvaluationStream(TorchLoader(), frames, SceneSampler((2,), 2, 0, 1))))
    assert batch.cameras.images.shape == (2, number, 3, *SIZE)


def test_the_reference_is_the_rigs(tree: Path) -> None:
    """The ego frame at the time of the nearest reading, or another channel's."""
    inputs = Inputs(lidar=LidarInput((-50, -50, -5, 50, 50, 5), sweeps=0))
    frames, points = {}, {}
    for reference in ("LIDAR_TOP", "ego", "RADAR_FRONT"):
        index = open_index(tree, VERSION, tree.parent / reference, reference=reference)
        source = FrameSource(index, index.tokens, inputs, ("car",), min_points=0)
        frames[reference] = source.frame(0, 0)
        made = EvaluationStream(TorchLoader(), source, SceneSampler((1,), 1, 0, 1))
        points[reference] = next(iter(made)).points.features[0, :, :3].double()
    lidar, ego = frames["LIDAR_TOP"].batch, frames["ego"].batch
    torch.testing.assert_close(ego.global_from_lidar, ego.global_from_ego)
    assert lidar.global_from_lidar[0, 2, 3] - ego.global_from_lidar[0, 2, 3] > 1.5
    # x is ahead in the ego frame, y in the lidar's.
    ahead = torch.linalg.inv(ego.global_from_lidar[0]) @ lidar.global_from_lidar[0]
    torch.testing.assert_close(
        ahead[:3, 1].round(), torch.tensor([1.0, 0, 0], dtype=torch.float64), atol=0.1, rtol=0
    )
    for reference in ("ego", "RADAR_FRONT"):
        pose = torch.linalg.inv(frames[reference].batch.global_from_lidar[0])
        moved = pose @ lidar.global_from_lidar[0]
        cloud = points["LIDAR_TOP"] @ moved[:3, :3].T + moved[:3, 3]
        nearest = torch.cdist(cloud[:200], points[reference]).amin(dim=1)
        assert (nearest < 1e-3).double().mean() > 0.95  # but for those at the range's edge


def test_another_reference_rebuilds_the_index(tree: Path, tmp_path: Path) -> None:
    first = open_index(tree, VERSION, tmp_path, reference="LIDAR_TOP")
    second = open_index(tree, VERSION, tmp_path, reference="ego")
    assert first.stamp != second.stamp
    assert open_index(tree, VERSION, tmp_path, reference="ego").stamp == second.stamp
    with pytest.raises(
        InputError, match=r"has no LIDAR_REAR record .* set data\.sensors\.reference"
    ):
        open_index(tree, VERSION, tmp_path, reference="LIDAR_REAR")


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"camera_model": "ftheta"}, "has the camera model 'ftheta': use one of"),
        ({"camera_distortion": [0.1] * 6, "camera_model": None}, "has 6 distortion coefficients"),
        ({"camera_distortion": [0.1, "a", 0, 0]}, "has camera_distortion = "),
    ],
)
def test_tables_with_odd_lenses_are_refused(
    make_tree, tmp_path: Path, change: dict[str, object], sentence: str
) -> None:  # type: ignore[no-untyped-def]
    root = make_tree()
    path = root / VERSION / "calibrated_sensor.json"
    records = json.loads(path.read_text())
    camera = next(record for record in records if record["camera_intrinsic"])
    camera |= {"camera_model": "kannala_brandt", "camera_distortion": [0.0] * 4, **change}
    path.write_text(json.dumps(records))
    with pytest.raises(InputError, match=f"calibrated_sensor.json {sentence}"):
        open_index(root, VERSION, tmp_path / "cache")


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"cameras": ()}, r"data.sensors.cameras=\[\] must be 1 to 8 channels, each once"),
        ({"cameras": ("A", "A")}, "must be 1 to 8 channels, each once"),
        ({"cameras": tuple("ABCDEFGHI")}, "must be 1 to 8 channels"),
        ({"camera_models": {"CAM_UP": {}}}, "data.sensors.camera_models.CAM_UP is no camera of"),
        (
            {"camera_models": {"CAM_BACK": {"focal": 1}}},
            "CAM_BACK.focal is unknown: choose from model, distortion, zoom",
        ),
        ({"camera_models": {"CAM_BACK": {"zoom": 0}}}, "CAM_BACK: zoom=0 must be above 0"),
        (
            {"camera_models": {"CAM_BACK": {"distortion": [1.0]}}},
            "distortion needs .*model beside it",
        ),
        (
            {"camera_models": {"CAM_BACK": {"model": "kannala_brandt", "distortion": [1.0]}}},
            "camera_models.CAM_BACK has 1 distortion coefficients; kannala_brandt takes 4",
        ),
    ],
)
def test_odd_rigs_are_refused(given: dict[str, object], sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        SensorRig(**given)  # type: ignore[arg-type]


def test_a_lens_of_the_configuration_overrides_the_tables(tree: Path) -> None:
    frames = make_frames(tree)
    settings = {"CAM_FRONT": {"model": "brown_conrady", "distortion": [-0.1, 0, 0, 0], "zoom": 0.9}}
    other = FrameSource(
        frames.index,
        frames.tokens,
        frames.inputs,
        ("car",),
        rig=SensorRig(cameras=ALL, camera_models=settings),
    )
    source = other.frame(0, 0).images[ALL.index("CAM_FRONT")]
    assert source.camera_model is not None
    assert source.camera_model.distortion == (-0.1, 0, 0, 0, 0, 0, 0, 0)
    assert source.camera_model.zoom == 0.9
    assert replace(source, camera_model=None).scale == pytest.approx(source.scale / 0.9)
