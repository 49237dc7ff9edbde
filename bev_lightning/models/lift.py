"""Lifts image features to the bird's-eye view (Lift, Splat, Shoot); the camera branch."""

from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bev_lightning.errors import InputError
from bev_lightning.models.image import MapSize, conv_norm_relu
from bev_lightning.models.protocol import RowParallel
from bev_lightning.ops.bev_pool import PoolIndex, bev_pool, build_pool_index
from bev_lightning.private_apis import FakeTensor
from bev_lightning.structures import BevGrid, Cameras, Points
from bev_lightning.structures.geometry import project

# For a fixed rig: full and last batch, each mirrored too. 12 bytes per point of the frustum.
NUM_KEPT_INDICES = 4


class LiftSplat(nn.Module):
    """Lift, Splat, Shoot (Philion and Fidler 2020) as MIT BEVFusion uses it, without or with lidar.

    Each feature pixel predicts a distribution over depth bins and a context vector; their product
    is pooled over the BEV cells of its points. With ``lidar_depth`` (``DepthLSSTransform``) the
    depths of the lidar points, drawn into the images, are further input of the prediction.

    The rays of the feature map's pixels pass through the image pixels ``linspace(0, W - 1, w)`` and
    ``linspace(0, H - 1, h)``, not through the centres of the feature pixels, as in the published
    training.

    Args:
        in_channels: channels of the image features.
        out_channels: context channels, and channels of the BEV map.
        grid: BEV grid of the pooling; points outside its range, in height too, are dropped. The map
            returned is ``downsample`` times coarser.
        depth_bins: start, stop, step [m] of the bins along the optical axis; bin k is at
            ``start + k * step``, the stop is excluded.
        downsample: 1, or 2 for the published three convolutions after the pooling.
        lidar_depth: draw the lidar's depths into the images.
        stride: image pixels per feature pixel; needed with ``lidar_depth`` only, even.
        truncate_cells: truncate cell indices towards zero instead of rounding down, so that points
            up to one cell (in height: up to one height of the range) below the lower bounds count
            too. A bug of the published code that its weights were trained with: use false for a
            training of your own.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        grid: BevGrid,
        depth_bins: tuple[float, float, float],
        downsample: int = 1,
        lidar_depth: bool = False,
        stride: int = 8,
        truncate_cells: bool = True,
    ) -> None:
        super().__init__()
        if downsample not in (1, 2):
            raise InputError(f"LiftSplat downsample {downsample} is unknown; use 1 or 2")
        if lidar_depth and (stride < 2 or stride % 2):
            raise InputError(f"LiftSplat with lidar_depth needs an even stride, got {stride}")
        self.pool_grid = grid
        self.grid = grid.coarsen(downsample)
        self.depth_bins = (float(depth_bins[0]), float(depth_bins[1]), float(depth_bins[2]))
        self.num_depths = len(torch.arange(*self.depth_bins))
        self.out_channels = out_channels
        self.truncate_cells = truncate_cells
        self._indices: dict[tuple[bytes | int, ...], PoolIndex] = {}
        num_predicted = self.num_depths + out_channels
        if lidar_depth:
            self.depth_encoder: nn.Module | None = nn.Sequential(
                *conv_norm_relu(1, 8, 1, bias=True),
                *conv_norm_relu(8, 32, 5, stride=stride // 2, bias=True),
                *conv_norm_relu(32, 64, 5, stride=2, bias=True),
            )
            self.depth_net: nn.Module = nn.Sequential(
                *conv_norm_relu(in_channels + 64, in_channels, 3, bias=True),
                *conv_norm_relu(in_channels, in_channels, 3, bias=True),
                nn.Conv2d(in_channels, num_predicted, 1),
            )
        else:
            self.depth_encoder = None
            self.depth_net = nn.Conv2d(in_channels, num_predicted, 1)
        self.downsample: nn.Module = nn.Identity()
        if downsample == 2:
            self.downsample = nn.Sequential(
                *conv_norm_relu(out_channels, out_channels, 3),
                *conv_norm_relu(out_channels, out_channels, 3, stride=2),
                *conv_norm_relu(out_channels, out_channels, 3),
            )

    def forward(
        self,
        features: Tensor,
        cameras: Cameras,
        points: Points | None = None,
        row_parallel: RowParallel | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Lift the features of N cameras.

        Args:
            features: ``(B, N, C, h, w)``.
            cameras: their images' size and ``image_from_lidar``.
            points: of the lidar, used with ``lidar_depth`` only.
            row_parallel: processes that share the pooling of all their samples, each with a strip
                of the grid's rows.

        Returns:
            BEV map ``(B, out_channels, Y, X)`` on ``grid`` and depth logits ``(B, N, D, h, w)``.
        """
        logits, context = self.predict_depth(features, cameras, points)
        # The distribution is float32 under autocast: bins far from the peak matter in the sum.
        depth = logits.float().softmax(dim=2)
        size = (features.shape[-2], features.shape[-1])
        if row_parallel is None or row_parallel.size == 1:
            bev = bev_pool(depth, context, self.pool_index(cameras, size))
        else:
            bev = self._pool_strip(depth, context, cameras, row_parallel)
        return self.downsample(bev), logits

    def _pool_strip(
        self, depth: Tensor, context: Tensor, cameras: Cameras, row_parallel: RowParallel
    ) -> Tensor:
        """Pool this process's rows for the samples of all, then exchange them for all rows of its
        own samples."""
        gather = row_parallel.gather_samples
        matrices = gather(cameras.image_from_lidar)
        size = (depth.shape[-2], depth.shape[-1])
        cells = self.cells(replace(cameras, image_from_lidar=matrices), size)
        height, width = self.pool_grid.shape
        num_rows = height // row_parallel.size
        cells = cells - row_parallel.rank * num_rows * width
        cells = torch.where((cells >= 0) & (cells < num_rows * width), cells, -1)
        index = build_pool_index(cells, (num_rows, width))
        return row_parallel.rows_to_samples(bev_pool(gather(depth), gather(context), index), dim=2)

    def pool_index(self, cameras: Cameras, size: tuple[int, int]) -> PoolIndex:
        """The BEV cell of each point of the frustum, for :func:`bev_pool`.

        On a CPU the indices of the last few calibrations are cached, so that a fixed rig builds its
        own once. On a GPU each step builds it again: comparing the matrices would synchronise host
        and device, to save one asynchronous sort.

        Args:
            size: h, w of the feature map.
        """
        matrices = cameras.image_from_lidar
        # A fake tensor has no content, and a compiled graph must not remember one.
        is_fake = isinstance(matrices, FakeTensor) or torch.compiler.is_compiling()
        if matrices.device.type != "cpu" or is_fake:
            return build_pool_index(self.cells(cameras, size), self.pool_grid.shape)
        content = matrices.detach().contiguous().numpy().tobytes()
        key = (content, *cameras.images.shape[:2], *cameras.images.shape[-2:], *size)
        index = self._indices.pop(key, None)
        if index is None:
            # Validation's inference mode would leave tensors that training cannot save.
            with torch.inference_mode(False):
                index = build_pool_index(self.cells(cameras, size), self.pool_grid.shape)
        self._indices[key] = index
        if len(self._indices) > NUM_KEPT_INDICES:
            del self._indices[next(iter(self._indices))]
        return index

    def predict_depth(
        self, features: Tensor, cameras: Cameras, points: Points | None
    ) -> tuple[Tensor, Tensor]:
        """Depth logits ``(B, N, D, h, w)`` and context ``(B, N, out_channels, h, w)``."""
        batch, num_cameras = features.shape[:2]
        x = features.flatten(0, 1)
        if self.depth_encoder is not None:
            if points is None:
                raise InputError(
                    "LiftSplat with lidar_depth reads lidar points but the batch has none; "
                    "add the lidar to the model's inputs or set lidar_depth=false"
                )
            drawn = depth_map(cameras, points).flatten(0, 1).unsqueeze(1)
            encoded = self.depth_encoder(drawn.to(features.dtype))
            if encoded.shape[-2:] != x.shape[-2:]:
                raise InputError(
                    f"LiftSplat encodes the depth of {tuple(drawn.shape[-2:])} images to "
                    f"{tuple(encoded.shape[-2:])} but the features are {tuple(x.shape[-2:])}; "
                    f"set stride to image pixels per feature pixel"
                )
            x = torch.cat([encoded, x], dim=1)
        predicted = self.depth_net(x).unflatten(0, (batch, num_cameras))
        logits, context = predicted.split((self.num_depths, self.out_channels), dim=2)
        return logits, context

    def frustum(self, cameras: Cameras, size: tuple[int, int]) -> Tensor:
        """Points ``(B, N, D, h, w, 3)`` [m] in the model frame, at each depth of each ray."""
        origin, rays = self._rays(cameras, size)
        depths = torch.arange(*self.depth_bins, device=rays.device)
        return origin[:, :, None, None, None] + depths[:, None, None, None] * rays[:, :, None]

    @torch.no_grad()
    def cells(self, cameras: Cameras, size: tuple[int, int]) -> Tensor:
        """BEV cells ``(B, N, D, h, w)`` int32 ``j * X + i`` on ``pool_grid``, -1 outside of it.

        Args:
            size: h, w of the feature map.
        """
        height, width = self.pool_grid.shape
        x, y, z = self.frustum(cameras, size).unbind(-1)
        z_extent = self.pool_grid.range[5] - self.pool_grid.range[2]
        inside = torch.ones_like(x, dtype=torch.bool)
        indices = []
        for values, low, cell, num in (
            (x, self.pool_grid.range[0], self.pool_grid.cell[0], width),
            (y, self.pool_grid.range[1], self.pool_grid.cell[1], height),
            (z, self.pool_grid.range[2], z_extent, 1),
        ):
            value = (values - low) / cell
            inside &= (value > -1 if self.truncate_cells else value >= 0) & (value < num)
            indices.append(value)
        # Truncation and rounding down agree from 0 on, and (-1, 0) is cell 0 or already outside.
        i, j = (value.clamp(0, 2**15).to(torch.int32) for value in indices[:2])
        return torch.where(inside, j * width + i, -1)

    @torch.no_grad()
    def _rays(self, cameras: Cameras, size: tuple[int, int]) -> tuple[Tensor, Tensor]:
        """Camera centres ``(B, N, 3)`` [m] and rays ``(B, N, h, w, 3)`` [m per metre of depth]."""
        # point = matrix (u d, v d, d) + shift. The closed-form inverse needs no solver and no host
        # synchronisation; float64, since matrices mix focal lengths with ones.
        image_from_lidar = cameras.image_from_lidar.double()
        a, b, c = image_from_lidar[..., :3, :3].unbind(-2)
        bc = torch.linalg.cross(b, c)
        columns = torch.stack([bc, torch.linalg.cross(c, a), torch.linalg.cross(a, b)], dim=-1)
        inverse = columns / (a * bc).sum(-1)[..., None, None]
        origin = -(inverse @ image_from_lidar[..., :3, 3:]).squeeze(-1)
        height, width = cameras.images.shape[-2:]
        device = inverse.device
        v = torch.linspace(0, height - 1, size[0], device=device, dtype=torch.float64)
        u = torch.linspace(0, width - 1, size[1], device=device, dtype=torch.float64)
        rows = v[:, None, None] * inverse[..., None, None, :, 1] + inverse[..., None, None, :, 2]
        rays = rows + u[:, None] * inverse[..., None, None, :, 0]
        return origin.float(), rays.float()


class CameraBranch(nn.Module):
    """Images to a BEV map: backbone, neck (its first map is lifted), view transform."""

    def __init__(self, backbone: nn.Module, neck: nn.Module, lift: LiftSplat) -> None:
        super().__init__()
        self.backbone, self.neck, self.lift = backbone, neck, lift
        self.map_size = MapSize(backbone, neck)

    def forward(self, cameras: Cameras, points: Points | None = None) -> tuple[Tensor, Tensor]:
        """BEV map ``(B, C, Y, X)`` on ``lift.grid`` and depth logits ``(B, N, D, h, w)``."""
        bev, logits = self.lift(self.extract(cameras), cameras, points)
        return bev, logits

    def extract(self, cameras: Cameras) -> Tensor:
        """Feature map ``(B, N, C, h, w)`` that is lifted."""
        features: Tensor = self.neck(self.backbone(cameras.images.flatten(0, 1)))[0]
        return features.unflatten(0, cameras.images.shape[:2])

    def depth_targets(self, cameras: Cameras, points: Points) -> Tensor:
        """Targets of the depth logits from the lidar: bins ``(B, N, h, w)``, -1 without a point."""
        size = self.map_size(*map(int, cameras.images.shape[-2:]))
        return depth_targets(cameras, points, self.lift.depth_bins, size)


@torch.no_grad()
def depth_map(cameras: Cameras, points: Points) -> Tensor:
    """Draw the lidar points into the images.

    Pixel indices are u and v truncated, as in MIT BEVFusion. Of several points in one pixel the
    nearest is kept. (The published code keeps the last one written, on a GPU any of them.)

    Returns:
        ``(B, N, H, W)`` float32 depth [m], 0 without a point.
    """
    batch, num_cameras, _, height, width = cameras.images.shape
    with torch.autocast(cameras.images.device.type, enabled=False):
        xyz = points.features[:, None, :, :3].float()
        pixels, depth = project(cameras.image_from_lidar.float(), xyz)
        real = torch.arange(xyz.shape[2], device=xyz.device) < points.count[:, None, None]
        u, v = pixels.unbind(-1)
        seen = real & (depth > 1e-5) & (u >= 0) & (u < width) & (v >= 0) & (v < height)
        # Points outside go to an extra slot per image, so that the host knows all shapes. The
        # minimum does not depend on the order of writing.
        slot = torch.where(seen, v.long() * width + u.long(), height * width)
        drawn = depth.new_full((batch, num_cameras, height * width + 1), torch.inf)
        drawn.scatter_reduce_(2, slot, depth, "amin")
        drawn = drawn[..., :-1].unflatten(2, (height, width))
        return torch.where(drawn.isinf(), 0.0, drawn)


@torch.no_grad()
def depth_targets(
    cameras: Cameras,
    points: Points,
    depth_bins: tuple[float, float, float],
    size: tuple[int, int],
) -> Tensor:
    """The depth bin of the lidar at each feature pixel, to supervise the depth logits.

    A feature pixel takes the nearest point of its block of image pixels (BEVDepth, Li et al. 2023,
    section 3.2) and the bin with the closest depth.

    Args:
        depth_bins: start, stop, step [m], as in :class:`LiftSplat`.
        size: h, w of the feature map.

    Returns:
        ``(B, N, h, w)`` int64 bin, -1 without a point or with a depth outside the bins.
    """
    start, _, step = depth_bins
    num_depths = len(torch.arange(*depth_bins))
    drawn = depth_map(cameras, points)
    height, width = drawn.shape[-2:]
    block = (-(-height // size[0]), -(-width // size[1]))
    pad = (0, block[1] * size[1] - width, 0, block[0] * size[0] - height)
    hidden = F.pad(torch.where(drawn > 0, -drawn, -torch.inf), pad, value=-torch.inf)
    nearest = -F.max_pool2d(hidden, block)
    bins = ((nearest - start) / step).round()
    inside = (bins >= 0) & (bins < num_depths)
    return torch.where(inside, bins, -1).long()
