"""The encoder against a plain implementation: one query, camera, head and point at a time."""

import math
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn

from bev_lightning.errors import InputError
from bev_lightning.models.attention import SpatialCrossAttention
from bev_lightning.models.bev_encoder import BEVEncoder, EncoderLayer, PreviousBev
from bev_lightning.ops.backend import use_reference
from bev_lightning.structures import BevGrid

# Neither square nor centred, so that a swapped x and y shows.
GRID = BevGrid((-6.0, -4.0, -5.0, 18.0, 8.0, 3.0), (4.0, 4.0))  # 3 x 6 cells
LEVELS = [(4, 7), (2, 3)]
IMAGE = (32, 56)
CAMERAS, CHANNELS, HEADS, ANCHORS = 3, 8, 2, 2


def make_encoder(**changes: object) -> BEVEncoder:
    torch.manual_seed(0)
    settings: dict[str, object] = dict(  # noqa: C408
        grid=GRID,
        channels=CHANNELS,
        num_layers=2,
        num_heads=HEADS,
        num_levels=len(LEVELS),
        num_cameras=CAMERAS,
        num_anchors=ANCHORS,
        num_points=4,
        num_temporal_points=3,
        ffn_channels=12,
        motion="can_bus",
    )
    encoder = BEVEncoder(**(settings | changes)).eval()  # type: ignore[arg-type]
    for parameter in encoder.parameters():  # offsets and weights that depend on the query
        nn.init.normal_(parameter, std=0.3)
    return encoder


def make_cameras(batch: int, seed: int = 0) -> Tensor:
    """Cameras that look to different sides from near the origin; different in each sample."""
    rng = torch.Generator().manual_seed(seed)
    intrinsic = torch.tensor([[20.0, 0.0, 28.0], [0.0, 20.0, 16.0], [0.0, 0.0, 1.0]])
    result = torch.zeros(batch, CAMERAS, 4, 4)
    for b in range(batch):
        for n in range(CAMERAS):
            angle = 2 * math.pi * n / CAMERAS + float(torch.rand((), generator=rng))
            forward = torch.tensor([math.cos(angle), math.sin(angle), 0.0])
            right = torch.tensor([math.sin(angle), -math.cos(angle), 0.0])
            rotation = torch.stack([right, torch.tensor([0.0, 0.0, -1.0]), forward])
            result[b, n] = torch.eye(4)
            result[b, n, :3, :3] = intrinsic @ rotation
            result[b, n, :3, 3] = intrinsic @ rotation @ torch.tensor([0.3, -0.2, 0.1])
    return result


def make_inputs(batch: int) -> tuple[list[Tensor], Tensor, Tensor, Tensor]:
    rng = torch.Generator().manual_seed(1)
    maps = [torch.randn(batch, CAMERAS, CHANNELS, h, w, generator=rng) for h, w in LEVELS]
    can_bus = torch.randn(batch, 18, generator=rng)
    can_bus[:, 17] *= 10.0
    bev = torch.randn(batch, CHANNELS, *GRID.shape, generator=rng)
    return maps, make_cameras(batch), can_bus, bev


def run(
    encoder: BEVEncoder,
    rows: list[int],
    batch: int,
    valid: list[bool] | None = None,
    image_from_lidar: Tensor | None = None,
) -> Tensor:
    maps, cameras, can_bus, bev = make_inputs(batch)
    cameras = cameras if image_from_lidar is None else image_from_lidar
    previous = None
    if valid is not None:
        previous = PreviousBev(bev[rows], torch.tensor(valid))
    eye = torch.eye(4).expand(len(rows), 4, 4)
    result: Tensor = encoder(
        [m[rows] for m in maps], cameras[rows], IMAGE, can_bus[rows], eye, previous
    )
    return result


def bilinear(cells: Tensor, location: Tensor) -> Tensor:
    """``(h, w, D)`` at x, y, fractions."""
    height, width, _ = cells.shape
    x, y = float(location[0]) * width - 0.5, float(location[1]) * height - 0.5
    total = torch.zeros(cells.shape[-1])
    for j in (math.floor(y), math.floor(y) + 1):
        for i in (math.floor(x), math.floor(x) + 1):
            if 0 <= j < height and 0 <= i < width:
                total = total + cells[j, i] * (1 - abs(x - i)) * (1 - abs(y - j))
    return total


def plain_temporal(
    layer: EncoderLayer, query: Tensor, position: Tensor, maps: list[Tensor], shift: Tensor
) -> Tensor:
    attention, (height, width) = layer.temporal, GRID.shape
    points = attention.num_points
    result = []
    for q in range(height * width):
        context = torch.cat([maps[0][q], query[q] + position[q]])
        offsets = attention.sampling_offsets(context).view(HEADS, 2, points, 2)
        weights = attention.attention_weights(context).view(HEADS, 2, points).softmax(-1)
        location = torch.tensor([(q % width + 0.5) / width, (q // width + 0.5) / height])
        heads = []
        for head in range(HEADS):
            seen = torch.zeros(CHANNELS // HEADS)
            for k, past in enumerate(maps):
                value = attention.value_proj(past).view(height, width, HEADS, -1)[:, :, head]
                for p in range(points):
                    at = location + (shift if k == 0 else 0.0)
                    at = at + offsets[head, k, p] / torch.tensor([float(width), float(height)])
                    seen = seen + 0.5 * weights[head, k, p] * bilinear(value, at)
            heads.append(seen)
        result.append(query[q] + attention.output_proj(torch.cat(heads)))
    return torch.stack(result)


def plain_spatial(
    layer: EncoderLayer, query: Tensor, features: list[Tensor], cameras: Tensor
) -> Tensor:
    attention = layer.spatial.deformable_attention
    width, points = GRID.shape[1], attention.num_points
    result = []
    for q in range(len(query)):
        x = GRID.range[0] + (q % width + 0.5) * GRID.cell[0]
        y = GRID.range[1] + (q // width + 0.5) * GRID.cell[1]
        heights = (GRID.range[2] + 0.5, GRID.range[5] - 0.5)
        slot, count = torch.zeros(CHANNELS), 0
        for n in range(CAMERAS):
            locations, is_seen = [], False
            for z in heights:
                image = cameras[n] @ torch.tensor([x, y, z, 1.0])
                location = image[:2] / image[2].clamp(min=1e-5) / torch.tensor([56.0, 32.0])
                locations.append(location)
                inside = bool(((location > 0) & (location < 1)).all())
                is_seen = is_seen or (inside and float(image[2]) > 1e-5)
            if not is_seen:
                continue
            count += 1
            offsets = attention.sampling_offsets(query[q]).view(HEADS, len(LEVELS), points, 2)
            weights = attention.attention_weights(query[q]).view(HEADS, -1).softmax(-1)
            weights = weights.view(HEADS, len(LEVELS), points)
            heads = []
            for head in range(HEADS):
                seen = torch.zeros(CHANNELS // HEADS)
                for level, (h, w) in enumerate(LEVELS):
                    cells = attention.value_proj(features[level][n]).view(h, w, HEADS, -1)
                    for p in range(points):
                        at = offsets[head, level, p] / torch.tensor([float(w), float(h)])
                        at = at + locations[p % ANCHORS]
                        seen = seen + weights[head, level, p] * bilinear(cells[:, :, head], at)
                heads.append(seen)
            slot = slot + torch.cat(heads)
        result.append(query[q] + layer.spatial.output_proj(slot / max(count, 1)))
    return torch.stack(result)


def plain_encoder(encoder: BEVEncoder, row: int, batch: int, with_previous: bool) -> Tensor:
    maps, cameras, can_bus, bev = make_inputs(batch)
    height, width = GRID.shape
    query = encoder.queries + encoder.can_bus_mlp(can_bus[row])  # type: ignore[misc]
    first = query
    position = torch.stack(
        [
            torch.cat([encoder.column_embedding[i], encoder.row_embedding[j]])
            for j in range(height)
            for i in range(width)
        ]
    )
    features = [
        torch.stack(
            [
                maps[level][row, n].flatten(1).T
                + encoder.camera_embedding[n]
                + encoder.level_embedding[level]
                for n in range(CAMERAS)
            ]
        )
        for level in range(len(LEVELS))
    ]
    dx, dy, yaw = float(can_bus[row, 0]), float(can_bus[row, 1]), float(can_bus[row, 16])
    turn = math.radians(float(can_bus[row, 17]))
    angle = yaw - math.atan2(dy, dx)
    length = math.hypot(dx, dy)
    shift = torch.tensor([length * math.sin(angle) / 24.0, length * math.cos(angle) / 12.0])
    past = torch.zeros(height * width, CHANNELS)
    for q in range(height * width):
        # About the origin of the model frame: cell (1.5, 1.0).
        x, y = q % width + 0.5 - 1.5, q // width + 0.5 - 1.0
        i = round(math.cos(turn) * x - math.sin(turn) * y + 1.5 - 0.5)
        j = round(math.sin(turn) * x + math.cos(turn) * y + 1.0 - 0.5)
        if 0 <= i < width and 0 <= j < height:
            past[q] = bev[row, :, j, i]
    for layer in encoder.layers:
        assert isinstance(layer, EncoderLayer)
        pair = [past, first] if with_previous else [query, query]
        moved = shift if with_previous else torch.zeros(2)
        query = layer.norm1(plain_temporal(layer, query, position, pair, moved))
        query = layer.norm2(plain_spatial(layer, query, features, cameras[row]))
        query = layer.norm3(layer.feed_forward(query))
    return query.T.unflatten(1, GRID.shape)


@torch.no_grad()
def test_equals_the_plain_implementation_in_a_mixed_batch() -> None:
    encoder = make_encoder()
    valid = [True, False, True]
    bev = run(encoder, [0, 1, 2], 3, valid)
    for row in (0, 1):
        wanted = plain_encoder(encoder, row, 3, valid[row])
        torch.testing.assert_close(bev[row], wanted, atol=1e-5, rtol=1e-4)


@torch.no_grad()
def test_rows_are_independent_and_their_order_is_irrelevant() -> None:
    encoder = make_encoder()
    valid = [True, False, True]
    together = run(encoder, [0, 1, 2], 3, valid)
    for row in range(3):
        alone = run(encoder, [row], 3, [valid[row]])
        torch.testing.assert_close(together[row : row + 1], alone)
    torch.testing.assert_close(run(encoder, [2, 0, 1], 3, [True, True, False]), together[[2, 0, 1]])
    torch.testing.assert_close(run(encoder, [1], 3, None), together[1:2])


def test_gradient_checkpointing_changes_nothing() -> None:
    plain, frugal = make_encoder(), make_encoder(gradient_checkpointing=True)
    for encoder in (plain, frugal):
        run(encoder, [0, 1], 2, [True, False]).square().sum().backward()
    for (name, a), b in zip(plain.named_parameters(), frugal.parameters(), strict=True):
        assert a.grad is not None and a.grad.abs().sum() > 0, name
        torch.testing.assert_close(a.grad, b.grad, msg=name)


@torch.no_grad()
def test_nothing_visible() -> None:
    behind = torch.zeros(1, CAMERAS, 4, 4)
    bev = run(make_encoder(), [0], 1, image_from_lidar=behind)
    assert bool(torch.isfinite(bev).all())


@torch.no_grad()
def test_a_query_is_seen_with_any_of_its_anchors() -> None:
    encoder, cameras = make_encoder(), make_inputs(2)[1]
    _, is_seen = encoder.project_anchors(cameras, IMAGE)
    visible = encoder.find_visible(cameras, IMAGE)
    assert torch.equal(visible.seen, is_seen[..., 0] | is_seen[..., 1])
    assert visible.seen.any() and (is_seen[..., 0] ^ is_seen[..., 1]).any()
    assert torch.equal(visible.num_cameras, visible.seen.long().sum(1).clamp(min=1))


def test_the_reference_agrees_with_its_gradients() -> None:
    results = []
    for context in (nullcontext(), use_reference()):
        encoder = make_encoder()
        with context:
            bev = run(encoder, [0, 1], 2, [True, False])
        bev.square().sum().backward()
        results.append([bev.detach(), *(p.grad for p in encoder.parameters())])
    torch.testing.assert_close(*results, atol=1e-4, rtol=1e-4)


def test_bfloat16_autocast() -> None:
    encoder = make_encoder()
    wanted = run(encoder, [0, 1], 2, [True, False])
    with torch.autocast("cpu", torch.bfloat16):
        bev = run(encoder, [0, 1], 2, [True, False])
    assert bool(torch.isfinite(bev).all())
    torch.testing.assert_close(bev.float(), wanted, atol=0.3, rtol=0.1)


def test_refusals() -> None:
    maps, cameras, can_bus, _ = make_inputs(1)
    eye = torch.eye(4)[None]
    encoder = make_encoder()
    with pytest.raises(InputError, match="takes 2 feature maps and the neck returns 1"):
        encoder(maps[:1], cameras, IMAGE, can_bus, eye)
    with pytest.raises(InputError, match="has 3 cameras and the batch 2"):
        encoder([m[:, :2] for m in maps], cameras[:, :2], IMAGE, can_bus, eye)
    with pytest.raises(InputError, match="has no can_bus"):
        encoder(maps, cameras, IMAGE, None, eye)
    with pytest.raises(InputError, match="motion=odometry is unknown"):
        make_encoder(motion="odometry")
    with pytest.raises(InputError, match="4 points cannot be divided between 3 height anchors"):
        SpatialCrossAttention(8, 2, 1, 4, 3)
    with pytest.raises(InputError, match="8 channels cannot be divided between 3 heads"):
        make_encoder(num_heads=3)
