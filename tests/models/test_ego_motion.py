import math

import torch

from bev_lightning.models.ego_motion import (
    motion_from_can_bus,
    motion_from_pose,
    origin_cell,
    rotate_map,
)
from bev_lightning.structures import BevGrid
from bev_lightning.structures.geometry import make_transform


def pose(x: float, y: float, yaw: float) -> torch.Tensor:
    """global_from_ego, float64: x forward, y left."""
    cos, sin = math.cos(yaw), math.sin(yaw)
    rotation = torch.tensor([[cos, -sin, 0.0], [sin, cos, 0.0], [0.0, 0.0, 1.0]])
    return make_transform(rotation, torch.tensor([x, y, 0.0])).double()


# A lidar at the ego's origin with x right, y forward, as nuScenes mounts it.
EGO_FROM_LIDAR = pose(0.0, 0.0, -math.pi / 2)


def test_both_sources_agree() -> None:
    rng = torch.Generator().manual_seed(0)
    for _ in range(20):
        x, y, yaw, dx, dy, turn = (torch.rand(6, generator=rng) * 2 - 1).tolist()
        before = pose(1000 * x, 1000 * y, 3 * yaw)
        now = pose(1000 * x + 5 * dx, 1000 * y + 5 * dy, 3 * yaw + 0.3 * turn)
        can_bus = torch.zeros(1, 18)
        can_bus[0, :3] = (now - before)[:3, 3]
        can_bus[0, 16] = 3 * yaw + 0.3 * turn
        can_bus[0, 17] = math.degrees(0.3 * turn)
        change = torch.linalg.inv(now @ EGO_FROM_LIDAR) @ before @ EGO_FROM_LIDAR
        ours = motion_from_pose(change[None])
        published = motion_from_can_bus(can_bus)
        torch.testing.assert_close(ours.shift, published.shift, atol=1e-4, rtol=0.0)
        torch.testing.assert_close(ours.rotation, published.rotation, atol=1e-5, rtol=0.0)


def test_straight_ahead_is_up() -> None:
    change = torch.eye(4)[None].clone()
    change[0, 1, 3] = -2.0  # what lay 2 m ahead is where the lidar is now
    motion = motion_from_pose(change)
    assert motion.shift.tolist() == [[0.0, 2.0]]
    assert motion.rotation.tolist() == [0.0]


def test_a_fixed_thing_is_found_again_under_augmentation() -> None:
    """The point p + shift in the rotated map is where the thing at p lay before."""
    grid = BevGrid((-6.0, -4.0, -5.0, 10.0, 12.0, 3.0), (1.0, 1.0))
    augment = pose(0.4, -0.7, 0.8)
    augment[:3, :3] *= 1.1
    augment = torch.diag(torch.tensor([-1.0, 1.0, 1.0, 1.0])).double() @ augment
    before, now = pose(3.0, 1.0, 0.2), pose(4.0, 2.0, 0.5)
    change = augment @ torch.linalg.inv(now) @ before @ torch.linalg.inv(augment)
    motion = motion_from_pose(change[None])
    thing = torch.tensor([2.0, 3.0, 0.0, 1.0]).double()
    there = torch.linalg.inv(change) @ thing  # in the previous model frame
    previous = torch.zeros(1, 1, *grid.shape)
    i, j = grid.to_cells(there[:2]).floor().long().tolist()
    previous[0, 0, j, i] = 1.0
    turned = rotate_map(previous, motion.rotation, origin_cell(grid))
    found = turned[0, 0].nonzero().float().mean(0).flip(0) + 0.5  # x, y in cells
    wanted = grid.to_cells(thing[:2].float() + motion.shift[0])
    assert (found - wanted).abs().max() < 1.0


def test_turn_equals_loops() -> None:
    height, width, centre = 5, 8, (2.5, 3.0)
    bev = torch.randn(2, 3, height, width, generator=torch.Generator().manual_seed(0))
    turn = torch.tensor([0.3, -1.2])
    turned = rotate_map(bev, turn, centre)
    for b in range(2):
        cos, sin = math.cos(turn[b]), math.sin(turn[b])
        for j in range(height):
            for i in range(width):
                x, y = i + 0.5 - centre[0], j + 0.5 - centre[1]
                source_i = round(cos * x - sin * y + centre[0] - 0.5)
                source_j = round(sin * x + cos * y + centre[1] - 0.5)
                inside = 0 <= source_i < width and 0 <= source_j < height
                wanted = bev[b, :, source_j, source_i] if inside else torch.zeros(3)
                assert torch.equal(turned[b, :, j, i], wanted)


def test_no_turn_changes_nothing() -> None:
    bev = torch.randn(1, 2, 7, 3)
    assert torch.equal(rotate_map(bev, torch.zeros(1), (100.0, 100.0)), bev)
