"""Target heatmaps, with a Gaussian at every box centre, and the loss on them."""

from collections.abc import Mapping

import torch
from torch import Tensor

from bev_lightning.losses.functional import gaussian_focal_loss, normalizer
from bev_lightning.structures import BevGrid, Boxes3D
from bev_lightning.structures.constants import constant


def gaussian_heatmap(
    boxes: Boxes3D,
    grid: BevGrid,
    num_classes: int,
    min_overlap: float = 0.1,
    min_radius_cells: int = 2,
) -> Tensor:
    """Targets of a class heatmap (CenterPoint, section 3), ``(B, K, Y, X)`` float32 in 0..1.

    At the cell that holds a box's centre the value is 1. It falls off as a Gaussian with a standard
    deviation of (2 r + 1) / 6 cells within a square of r cells to each side and is 0 outside;
    overlapping boxes of a class take the larger value. A box whose centre is NaN or outside the
    grid is not drawn. (The published code is correct on square grids only, and rounds a centre just
    below the lower bound into the grid.)

    Args:
        boxes: ``(B, M)`` in the model frame.
        grid: the head's map.
        min_overlap: see :func:`gaussian_radius`.
        min_radius_cells: smallest r.
    """
    height, width = grid.shape
    cells = grid.to_cells(boxes.centre[..., :2].float())
    centre = torch.floor(cells)
    limit = constant((width, height), centre)
    drawn = boxes.valid & ((centre >= 0) & (centre < limit)).all(-1)
    # As published: lengths in cells along y, widths along x, whatever the heading.
    length = boxes.size[..., 0].float() / grid.cell[1]
    width_cells = boxes.size[..., 1].float() / grid.cell[0]
    radius = gaussian_radius(length, width_cells, min_overlap).nan_to_num().floor()
    radius = radius.clamp(min=min_radius_cells)
    return draw_gaussians(cells, radius, drawn, boxes.label, num_classes, grid.shape)


def heatmap_loss(
    logits: Tensor,
    boxes: Boxes3D,
    grid: BevGrid,
    min_radius_cells: int,
    normalizers: Mapping[str, Tensor] | None,
) -> Tensor:
    """Gaussian focal loss of ``(B, K, Y, X)``, divided by the normalizer ``heatmap`` or, without,
    the number of peaks. Arguments are those of :func:`gaussian_heatmap`."""
    heatmap = gaussian_heatmap(boxes, grid, logits.shape[1], min_radius_cells=min_radius_cells)
    count = normalizer((heatmap == 1).sum(), normalizers, "heatmap")
    return gaussian_focal_loss(logits, heatmap, count)


def count_peaks(boxes: Boxes3D, grid: BevGrid, num_classes: int, min_radius_cells: int) -> Tensor:
    """Number ``()`` of peaks of :func:`gaussian_heatmap`: cells with the value 1."""
    heatmap = gaussian_heatmap(boxes, grid, num_classes, min_radius_cells=min_radius_cells)
    return (heatmap == 1).sum()


def draw_gaussians(
    cells: Tensor,
    radius: Tensor,
    drawn: Tensor,
    label: Tensor,
    num_classes: int,
    shape: tuple[int, int],
) -> Tensor:
    """Draw Gaussians on the maps of their classes, ``(B, K, Y, X)`` float32, 1 at a centre's cell.

    Args:
        cells: ``(B, M, 2)`` centres x, y in cells.
        radius: ``(B, M)`` in cells; the standard deviation is (2 r + 1) / 6.
        drawn: ``(B, M)`` bool, False for boxes that are left out.
        label: ``(B, M)`` class.
        shape: Y, X.
    """
    batch = cells.shape[0]
    height, width = shape
    centre, radius = torch.floor(cells).nan_to_num(), radius[..., None]
    # A Gaussian is a product of one along y and one along x; (B, M, Y) and (B, M, X).
    sigma = (2 * radius + 1) / 6
    along = []
    for axis, count in ((1, height), (0, width)):
        offset = torch.arange(count, device=centre.device) - centre[..., axis, None]
        value = torch.exp(-offset.square() / (2 * sigma.square()))
        along.append(torch.where(offset.abs() <= radius, value, 0.0) * drawn[..., None])
    label = label.clamp(0, num_classes - 1)
    plane = (torch.arange(batch, device=label.device)[:, None] * num_classes + label).flatten()
    values = (along[0].unsqueeze(-1) * along[1].unsqueeze(-2)).flatten(0, 1)
    index = plane[:, None, None].expand_as(values)
    heatmap = torch.zeros(batch * num_classes, height, width, device=centre.device)
    heatmap = heatmap.scatter_reduce(0, index, values, "amax")
    return heatmap.unflatten(0, (batch, num_classes))


def gaussian_radius(length: Tensor, width: Tensor, min_overlap: float) -> Tensor:
    """Radius in cells within which a shifted box still overlaps by ``min_overlap``, of box sizes
    ``(...)`` in cells: the least of three cases (CornerNet, section 3.2).

    The published code divides all three roots by 2 instead of 2 a (a = 1, 4 and 4 ``min_overlap``).
    Its models were trained with those targets, so this is kept.
    """
    total, area = length + width, length * width
    cases = []
    for a, b, c in (
        (1.0, total, area * (1 - min_overlap) / (1 + min_overlap)),
        (4.0, 2 * total, area * (1 - min_overlap)),
        (4 * min_overlap, -2 * min_overlap * total, area * (min_overlap - 1)),
    ):
        cases.append((b + (b.square() - 4 * a * c).clamp(min=0.0).sqrt()) / 2)
    return torch.minimum(torch.minimum(cases[0], cases[1]), cases[2])
