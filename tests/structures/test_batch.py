from dataclasses import replace

import pytest
import torch

from bev_lightning.structures import Batch, Boxes3D, CameraInput, Cameras, Inputs, Points


def sample(token: str, num_points: int = 3, num_boxes: int = 1) -> Batch:
    return Batch(
        sample_tokens=(token,),
        scene_tokens=("scene",),
        timestamps=torch.tensor([1]),
        global_from_lidar=torch.eye(4, dtype=torch.float64)[None],
        global_from_ego=torch.eye(4, dtype=torch.float64)[None],
        lidar_from_previous_lidar=torch.eye(4)[None],
        has_previous=torch.tensor([False]),
        cameras=Cameras(torch.zeros(1, 2, 3, 4, 6), torch.eye(4).expand(1, 2, 4, 4)),
        points=Points(torch.ones(1, num_points, 5), torch.tensor([num_points])),
        targets=Boxes3D.empty(1, num_boxes),
    )


def test_stack_pads_points_and_boxes():
    batch = Batch.stack([sample("a", 3, 1), sample("b", 5, 0)]).validate()
    assert batch.size == len(batch) == 2
    assert batch.sample_tokens == ("a", "b")
    assert batch.points.features.shape == (2, 5, 5)
    assert batch.points.count.tolist() == [3, 5]
    assert batch.points.features[0, 3:].abs().sum() == 0
    assert batch.targets.valid.shape == (2, 1)
    assert batch.radar is None


def test_stack_keeps_history():
    with_history = [replace(sample(t), history=(sample(t + "-2"), sample(t + "-1"))) for t in "ab"]
    batch = Batch.stack(with_history)
    assert [frame.sample_tokens for frame in batch.history] == [("a-2", "b-2"), ("a-1", "b-1")]


def test_stack_refuses_samples_of_different_sensors():
    with pytest.raises(ValueError, match="b.*have no points"):
        Batch.stack([sample("a"), replace(sample("b"), points=None)])


def test_to_moves_every_tensor():
    moved = sample("a").to("meta")
    assert moved.cameras.images.device.type == "meta"
    assert moved.targets.valid.device.type == "meta"
    assert moved.sample_tokens == ("a",)


def test_validate_names_the_sample_and_the_field():
    broken = sample("frame-7")
    broken.points.features[0, 0, 0] = float("nan")
    with pytest.raises(ValueError, match=r"points\.features.*frame-7"):
        broken.validate()
    with pytest.raises(ValueError, match=r"cameras\.images.*expected"):
        replace(
            sample("a"), cameras=Cameras(torch.zeros(1, 3, 4, 6), torch.eye(4)[None, None])
        ).validate()
    with pytest.raises(ValueError, match="exceeds"):
        replace(sample("a"), points=Points(torch.ones(1, 2, 5), torch.tensor([3]))).validate()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"size": (96,)}, "height, width"),
        ({"size": (96, 256), "std": (1, 1)}, "three numbers"),
        ({"size": (96, 256), "scale": 0.0}, "positive"),
        ({"size": (0, 256)}, "positive"),
    ],
)
def test_a_camera_input_that_cannot_be(wrong: dict, message: str):
    with pytest.raises(ValueError, match=message):
        CameraInput(**wrong)


def test_a_model_reads_at_least_one_sensor():
    with pytest.raises(ValueError, match="at least one"):
        Inputs()
