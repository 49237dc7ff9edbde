import math
from dataclasses import replace
from pathlib import Path

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from PIL import Image

from bev_lightning.callbacks.drawing import PANEL, PREDICTION, TRUTH
from bev_lightning.callbacks.pictures import (
    CELL_WIDTH,
    GAP,
    TOP_VIEW,
    WIDTH,
    PredictionPictures,
    count_found,
    draw_sample,
)
from bev_lightning.structures import Batch, Boxes3D, CameraInput, Cameras, Inputs, Points

CLASSES = ("car", "pedestrian")
MEAN, STD = (100.0, 110.0, 120.0), (50.0, 51.0, 52.0)
CAMERA = CameraInput((48, 128), mean=MEAN, std=STD)
AZIMUTHS = (0.0, -55.0, 55.0, 180.0, 110.0, -110.0)
"""Of the six cameras in nuScenes' order [degrees, counter-clockwise from forward]."""


def camera_matrix(azimuth: float, size: tuple[int, int] = (48, 128)) -> torch.Tensor:
    """A camera at the origin of the model frame (x right, y forward) with 90 degrees of view."""
    angle = math.radians(azimuth + 90)
    ahead, right = (math.cos(angle), math.sin(angle), 0.0), (math.sin(angle), -math.cos(angle), 0.0)
    axes = torch.tensor([right, (0.0, 0.0, -1.0), ahead])
    intrinsic = torch.tensor([[64.0, 0.0, 63.5], [0.0, 64.0, 23.5], [0.0, 0.0, 1.0]])
    matrix = torch.eye(4)
    matrix[:3, :3] = intrinsic @ axes
    return matrix


def boxes(*centres: tuple[float, float], score: float | None = None, label: int = 0) -> Boxes3D:
    """``(1, M)`` cars that look forward, their centres 0 m high."""
    num = len(centres)
    return Boxes3D(
        centre=torch.tensor([[[x, y, 0.0] for x, y in centres]]).reshape(1, num, 3),
        size=torch.tensor([4.0, 2.0, 1.6]).expand(1, num, 3).clone(),
        yaw=torch.full((1, num), math.pi / 2),
        velocity=torch.zeros(1, num, 2),
        label=torch.full((1, num), label),
        valid=torch.ones(1, num, dtype=torch.bool),
        score=None if score is None else torch.full((1, num), score),
    )


def make_batch(
    token: str = "token", targets: Boxes3D | None = None, cameras: bool = True, points: bool = True
) -> Batch:
    """Camera i is a plain grey of the value 20 + 30 i."""
    global_from_ego = torch.eye(4, dtype=torch.float64)
    global_from_ego[:3, 3] = torch.tensor([600.0, 1600.0, 0.0])
    ego_from_lidar = torch.eye(4, dtype=torch.float64)  # ego: x forward, y left
    ego_from_lidar[:2, :2] = torch.tensor([[0.0, 1.0], [-1.0, 0.0]])
    grey = torch.tensor([20.0 + 30.0 * i for i in range(6)])[:, None, None, None].expand(
        6, 3, 48, 128
    )
    images = (grey - torch.tensor(MEAN)[:, None, None]) / torch.tensor(STD)[:, None, None]
    matrices = torch.stack([camera_matrix(azimuth) for azimuth in AZIMUTHS])
    cloud = torch.tensor([[[10.0, 30.0, 0.0, 5.0, 0.0], [900.0, 0.0, 0.0, 0.0, 0.0]]])
    return Batch(
        sample_tokens=(token,),
        scene_tokens=("scene",),
        timestamps=torch.tensor([0]),
        global_from_lidar=(global_from_ego @ ego_from_lidar)[None],
        global_from_ego=global_from_ego[None],
        lidar_from_previous_lidar=torch.eye(4)[None],
        has_previous=torch.tensor([False]),
        cameras=Cameras(images[None], matrices[None]) if cameras else None,
        points=Points(cloud, torch.tensor([1])) if points else None,
        targets=targets,
    ).validate()


def draw(batch: Batch, predictions: Boxes3D | None = None) -> np.ndarray:
    return draw_sample(batch, 0, predictions, CLASSES, CAMERA)


def cell(picture: np.ndarray, row: int, column: int) -> np.ndarray:
    height = CELL_WIDTH * 48 // 128
    top, left = row * (height + GAP), column * (CELL_WIDTH + GAP)
    return picture[top : top + height, left : left + CELL_WIDTH]


def is_colour(picture: np.ndarray, colour: tuple[int, int, int], tolerance: int = 60) -> np.ndarray:
    return np.abs(picture.astype(int) - colour).max(axis=-1) < tolerance


def test_cameras_stand_as_they_look_whatever_their_order() -> None:
    picture = draw(make_batch())
    assert picture.dtype == np.uint8
    assert picture.shape == (2 * 180 + 2 * GAP + TOP_VIEW, WIDTH, 3)
    # front left, front, front right; back left, back, back right
    for (row, column), camera in zip(np.ndindex(2, 3), (2, 0, 1, 4, 3, 5), strict=True):
        assert cell(picture, row, column)[150, 240].tolist() == [20 + 30 * camera] * 3


def test_a_box_is_drawn_into_the_cameras_that_see_it() -> None:
    picture = draw(make_batch(targets=boxes((0.0, 12.0))))
    front = is_colour(cell(picture, 0, 1), TRUTH)
    rows, columns = np.nonzero(front)
    # Near face at 10 m, 1 m to either side, 0.8 m up and down: 64 / 10 pixels a metre, enlarged
    # 3.75 times.
    middle_u, middle_v = 63.5 * 3.75 + 1.375, 23.5 * 3.75 + 1.375
    assert columns.min() == pytest.approx(middle_u - 6.4 * 3.75, abs=1.5)
    assert columns.max() == pytest.approx(middle_u + 6.4 * 3.75, abs=1.5)
    assert rows.min() == pytest.approx(middle_v - 0.8 * 6.4 * 3.75, abs=1.5)
    assert rows.max() == pytest.approx(middle_v + 0.8 * 6.4 * 3.75, abs=1.5)
    for row, column in ((0, 0), (0, 2), (1, 0), (1, 1), (1, 2)):
        assert not is_colour(cell(picture, row, column), TRUTH).any()


def test_the_top_view_shows_points_annotations_and_predictions() -> None:
    picture = draw(make_batch(targets=boxes((0.0, 20.0))), boxes((-20.0, 0.0), score=0.9))
    view = picture[-TOP_VIEW:, :TOP_VIEW]
    scale, middle = TOP_VIEW / 110.0, TOP_VIEW / 2 - 0.5

    def around(x: float, y: float, metres: float) -> np.ndarray:
        v, u, r = round(middle - y * scale), round(middle + x * scale), round(metres * scale)
        return view[v - r : v + r + 1, u - r : u + r + 1]

    assert is_colour(around(0.0, 20.0, 3.0), TRUTH).sum() > 50
    assert not is_colour(around(0.0, 20.0, 3.0), PREDICTION).any()
    assert is_colour(around(-20.0, 0.0, 3.0), PREDICTION).sum() > 50
    point = around(10.0, 30.0, 0.3).astype(int).sum(axis=-1)
    assert point.max() > sum(PANEL) + 200
    assert is_colour(view, TRUTH).sum() == is_colour(around(0.0, 20.0, 3.0), TRUTH).sum()


@pytest.mark.parametrize(("cameras", "points"), [(False, True), (True, False), (False, False)])
def test_sensors_that_are_not_there_are_not_drawn(cameras: bool, points: bool) -> None:
    picture = draw(make_batch(cameras=cameras, points=points, targets=boxes((0.0, 20.0))))
    assert picture.shape == (TOP_VIEW + (2 * 180 + 2 * GAP if cameras else 0), WIDTH, 3)
    assert is_colour(picture[-TOP_VIEW:, :TOP_VIEW], TRUTH).any()


def test_what_is_unsure_broken_or_padding_is_left_out() -> None:
    none = draw(make_batch(), boxes(score=0.9))
    weak = draw(make_batch(), boxes((0.0, 20.0), score=0.1))
    broken = boxes((0.0, 20.0), score=0.9)
    broken.yaw[:] = math.nan
    padding = replace(boxes((0.0, 20.0), score=0.9), valid=torch.zeros(1, 1, dtype=torch.bool))
    for predictions in (
        weak,
        draw(make_batch(), broken),
        draw(make_batch(), padding),
        draw(make_batch()),
    ):
        assert np.array_equal(predictions, none)
    half = draw(make_batch(), boxes((0.0, 20.0), score=0.9).to(dtype=torch.bfloat16))
    assert not np.array_equal(half, none)


def test_annotations_are_found_once_each() -> None:
    truth = boxes((0.0, 0.0), (3.0, 0.0), (30.0, 0.0))[0]
    # Two predictions at the first box: the second of them is too far from what is left.
    found = boxes((0.5, 0.0), (0.4, 0.0), (28.1, 0.0), score=0.5)[0]
    assert count_found(truth, found) == 2
    assert count_found(truth, boxes((1.6, 0.0), (0.1, 0.0), score=0.5)[0]) == 2
    # The first takes the box that the second would have hit.
    assert count_found(truth, boxes((1.4, 0.0), (0.1, 0.0), score=0.5)[0]) == 1
    assert count_found(boxes()[0], found) == 0
    assert count_found(truth, boxes(score=0.5)[0]) == 0


class Module(L.LightningModule):
    """Predicts one car, whatever it sees."""

    inputs = Inputs(camera=CAMERA)

    def validation_step(self, batch: Batch, batch_idx: int) -> dict[str, Boxes3D]:
        return {"boxes": boxes((5.0, 10.0), score=0.8)}


class Batches:
    def __init__(self, *tokens: str) -> None:
        self.tokens = tokens

    def __len__(self) -> int:
        return len(self.tokens)

    def __iter__(self):
        return (make_batch(token, boxes((0.0, 20.0))) for token in self.tokens)


def validate(folder: Path, callback: PredictionPictures, num: int) -> None:
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        logger=TensorBoardLogger(folder, name="", version="tensorboard"),
        callbacks=[callback],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    trainer.validate(Module(), Batches(*(f"sample-{i}" for i in range(num))), verbose=False)


def test_pictures_reach_tensorboard_and_the_run_directory(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    validate(tmp_path, PredictionPictures(CLASSES, num_samples=2), num=4)
    names = sorted(path.name for path in (tmp_path / "pictures").iterdir())
    assert names == ["step_000000_0.png", "step_000000_1.png"]
    # Spread over the split: the first and the third of four.
    for place, token in enumerate(("sample-0", "sample-2")):
        want = draw(make_batch(token, boxes((0.0, 20.0))), boxes((5.0, 10.0), score=0.8))
        assert np.array_equal(np.asarray(Image.open(tmp_path / "pictures" / names[place])), want)
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert events.Tags()["images"] == ["val/sample_0", "val/sample_1"]
    image = events.Images("val/sample_0")[0]
    assert (image.height, image.width) == (2 * 180 + 2 * GAP + TOP_VIEW, WIDTH)


def test_a_folder_of_ones_own_and_fewer_batches_than_pictures(tmp_path: Path) -> None:
    validate(tmp_path, PredictionPictures(CLASSES, 3, folder=tmp_path / "mine"), num=1)
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["step_000000_0.png"]


@pytest.mark.parametrize(
    ("num_batches", "size", "want"),
    [
        (10, 4, {0: [(0, 0)], 5: [(1, 0)]}),
        (1, 4, {0: [(0, 0), (1, 1)]}),
        (math.inf, 1, {0: [(0, 0)], 1: [(1, 0)]}),
    ],
)
def test_samples_are_spread_over_the_batches(num_batches, size, want) -> None:
    callback = PredictionPictures(CLASSES, num_samples=2)
    chosen = {i: callback._chosen(num_batches, i, size) for i in range(10)}
    assert {i: places for i, places in chosen.items() if places} == want
