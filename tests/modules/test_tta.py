"""Views of a scene, and what becomes of the boxes seen in them."""

import math
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from bev_lightning.errors import InputError
from bev_lightning.modules.detection import DetectionModule
from bev_lightning.modules.tta import TestTimeAugmentation, merge_views, view_batch
from bev_lightning.structures import Batch, Boxes3D, Cameras, Inputs, LidarInput, Points, Radar
from bev_lightning.structures.geometry import project, wrap_angle

INPUTS = Inputs(lidar=LidarInput((-50.0, -50.0, -5.0, 50.0, 50.0, 3.0)))


def make_batch() -> Batch:
    """One sample: three cars, each a point; their headings and speeds are in the radar."""
    torch.manual_seed(0)
    xyz = torch.tensor([[10.0, 5.0, 0.0], [-7.0, 3.0, 1.0], [20.0, -9.0, -1.0]])
    heading = torch.tensor([[1.0, 0.5], [-2.0, 1.0], [0.1, -3.0]])
    radar = torch.cat([xyz, torch.ones(3, 1), heading, torch.zeros(3, 2)], 1)
    pose = torch.eye(4, dtype=torch.float64)
    pose[:3, 3] = torch.tensor([600.0, 1600.0, 2.0])
    intrinsic = torch.tensor([[100.0, 0, 50, 0], [0, 100, 30, 0], [0, 0, 1, 0], [0, 0, 0, 1]])
    camera_from_lidar = torch.tensor([[1.0, 0, 0, 0], [0, 0, -1, 0], [0, 1, 0, 0.5], [0, 0, 0, 1]])
    return Batch(
        sample_tokens=("one",),
        scene_tokens=("scene",),
        timestamps=torch.zeros(1, dtype=torch.int64),
        global_from_lidar=pose[None],
        global_from_ego=pose[None],
        lidar_from_previous_lidar=torch.eye(4)[None],
        has_previous=torch.zeros(1, dtype=torch.bool),
        cameras=Cameras(torch.zeros(1, 1, 3, 8, 8), (intrinsic @ camera_from_lidar)[None, None]),
        points=Points(torch.cat([xyz, torch.zeros(3, 2)], 1)[None], torch.tensor([3])),
        radar=Radar(radar[None], torch.tensor([3])),
    )


class Perfect(nn.Module):
    """Finds every car where it is, in any view."""

    def forward(self, batch: Batch) -> Batch:
        return batch

    def decode(self, batch: Batch) -> Boxes3D:
        velocity = batch.radar.features[..., 4:6]
        shape = velocity.shape[:-1]
        return Boxes3D(
            centre=batch.points.features[..., :3],
            size=torch.tensor([4.0, 2.0, 1.5]).expand(*shape, 3),
            yaw=torch.atan2(velocity[..., 1], velocity[..., 0]),
            velocity=velocity,
            label=torch.zeros(shape, dtype=torch.int64),
            valid=torch.ones(shape, dtype=torch.bool),
            score=torch.tensor([0.9, 0.8, 0.7]).expand(shape),
        )


def test_views_are_all_combinations_the_scene_itself_first() -> None:
    views = TestTimeAugmentation(rotate_deg=(90,)).views()
    assert views.shape == (8, 4, 4) and torch.equal(views[0], torch.eye(4))
    assert sorted(torch.linalg.det(views).round().tolist()) == [-1] * 4 + [1] * 4
    unique = {tuple(v.round().flatten().int().tolist()) for v in views}
    assert len(unique) == 8
    assert len(TestTimeAugmentation(flip_x=False, flip_y=False).views()) == 1


def test_a_view_changes_frames_and_nothing_else() -> None:
    batch = make_batch()
    for view in TestTimeAugmentation(rotate_deg=(30,)).views():
        seen = view_batch(batch, view).validate()
        pixels = project(batch.cameras.image_from_lidar[0, 0], batch.points.features[0, :, :3])
        moved = project(seen.cameras.image_from_lidar[0, 0], seen.points.features[0, :, :3])
        for one, two in zip(pixels, moved, strict=True):
            torch.testing.assert_close(one, two, atol=1e-3, rtol=1e-4)
        where = batch.global_from_lidar[0, :3, :3] @ batch.points.features[0, :, :3].double().T
        again = seen.global_from_lidar[0, :3, :3] @ seen.points.features[0, :, :3].double().T
        torch.testing.assert_close(where, again, atol=1e-4, rtol=0)
        torch.testing.assert_close(
            seen.radar.features[..., 4:6].norm(dim=-1), batch.radar.features[..., 4:6].norm(dim=-1)
        )


def test_a_perfect_detector_stays_perfect() -> None:
    module = DetectionModule(Perfect(), lambda p, t: {}, INPUTS, ("car",))
    batch = make_batch()
    plain = module.predict_step(batch, 0)
    module.use_tta(TestTimeAugmentation(rotate_deg=(90, 30)))
    merged = module.predict_step(batch, 0)
    assert merged.valid.shape == (1, 36) and int(merged.valid.sum()) == 3
    merged = merged[merged.valid]
    merged = merged[merged.score.argsort(descending=True)]
    torch.testing.assert_close(merged.centre, plain.centre[0], atol=1e-4, rtol=0)
    torch.testing.assert_close(merged.velocity, plain.velocity[0], atol=1e-4, rtol=0)
    torch.testing.assert_close(
        wrap_angle(merged.yaw - plain.yaw[0]), torch.zeros(3), atol=1e-4, rtol=0
    )
    torch.testing.assert_close(merged.score, plain.score[0])
    torch.testing.assert_close(merged.size, plain.size[0])


class Products(TorchDispatchMode):
    """The types of what matrix products multiply: TF32 rounds those of float32."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: set[torch.dtype] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket.__name__ in ("mm", "bmm", "addmm", "baddbmm"):
            self.dtypes |= {value.dtype for value in args if isinstance(value, torch.Tensor)}
        return func(*args, **(kwargs or {}))


def test_tf32_moves_nothing() -> None:
    batch = make_batch()
    boxes = Perfect().decode(batch)
    many = replace(
        boxes,
        **{
            name: getattr(boxes, name).repeat_interleave(20, dim=1)
            for name in ("centre", "size", "yaw", "velocity", "label", "valid", "score")
        },
    )
    with Products() as products:
        view_batch(batch, TestTimeAugmentation(rotate_deg=(30,)).views()[4])
        merge_views([many, many], reach=0.5)
    assert products.dtypes == {torch.float64}


def test_autocast_moves_nothing() -> None:
    boxes, batch = Perfect().decode(make_batch()), make_batch()
    view = TestTimeAugmentation(rotate_deg=(30,)).views()[4]

    def run() -> list[torch.Tensor]:
        seen = view_batch(batch, view)
        assert seen.cameras is not None and seen.points is not None and seen.radar is not None
        turned = boxes.transform(view)
        merged = merge_views([boxes, boxes], reach=0.5)
        pixels, depth = project(seen.cameras.image_from_lidar[0], seen.points.features[..., :3])
        return [
            *(seen.cameras.image_from_lidar, seen.points.features, seen.radar.features),
            *(seen.lidar_from_previous_lidar, seen.global_from_lidar, pixels, depth),
            *(turned.centre, turned.size, turned.yaw, turned.velocity),
            *(merged.centre, merged.size, merged.yaw, merged.velocity, merged.score),
        ]

    plain = run()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for want, found in zip(plain, run(), strict=True):
            assert found.dtype == want.dtype
            torch.testing.assert_close(found, want, atol=0, rtol=0)


def test_neighbours_are_averaged_and_what_one_view_sees_alone_sinks() -> None:
    boxes = Perfect().decode(make_batch())[:, :2]
    other = replace(
        boxes,
        centre=boxes.centre + torch.tensor([0.4, 0.0, 0.0]),
        yaw=wrap_angle(boxes.yaw + torch.tensor([0.2, math.pi])),
        score=torch.tensor([[0.3, 0.4]]),
        valid=torch.tensor([[True, True]]),
        label=torch.tensor([[0, 1]]),
    )
    merged = merge_views([boxes, other], reach=0.5)
    assert merged.valid.tolist() == [[True, True, False, True]]
    assert merged.score[0].tolist() == pytest.approx([0.6, 0.4, 0.0, 0.2])
    shift = 0.3 / (0.9 + 0.3)
    assert merged.centre[0, 0, 0].item() == pytest.approx(10 + 0.4 * shift)
    assert merged.yaw[0, 0].item() == pytest.approx(boxes.yaw[0, 0].item() + 0.2 * shift)
    torch.testing.assert_close(merged.centre[0, 1], boxes.centre[0, 1])  # another class beside it
    # Turned by half a circle: too far to be averaged; the stronger one's stays.
    opposite = replace(other, label=boxes.label)
    merged = merge_views([boxes, opposite], reach=0.5)
    assert merged.yaw[0, 1].item() == pytest.approx(boxes.yaw[0, 1].item())
    assert merged.centre[0, 1, 0].item() == pytest.approx(-7 + 0.4 * 0.4 / 1.2)


def test_models_with_memory_are_refused() -> None:
    inputs = replace(INPUTS, history=2)
    module = DetectionModule(Perfect(), lambda p, t: {}, inputs, ("car",))
    with pytest.raises(InputError, match="tta=null"):
        module.use_tta(TestTimeAugmentation())
    with pytest.raises(InputError, match="reach=0"):
        TestTimeAugmentation(reach=0)
