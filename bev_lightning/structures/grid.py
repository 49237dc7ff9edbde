"""BEV grid: conversion between metres and cells."""

from dataclasses import dataclass

import torch
from torch import Tensor

from bev_lightning.structures.constants import constant


@dataclass(frozen=True)
class BevGrid:
    """A rectangle of the model frame's x-y plane divided into cells, with a height range.

    A BEV map on it has the shape ``(B, C, Y, X)``: cell ``[j, i]`` covers
    ``x_min + i * cell[0] <= x < x_min + (i + 1) * cell[0]`` and likewise j along y.

    Attributes:
        range: x_min, y_min, z_min, x_max, y_max, z_max [m] in the model frame.
        cell: extent of one cell along x and y [m].
    """

    range: tuple[float, float, float, float, float, float]
    cell: tuple[float, float]

    def __post_init__(self) -> None:
        object.__setattr__(self, "range", tuple(float(v) for v in self.range))
        object.__setattr__(self, "cell", tuple(float(v) for v in self.cell))
        if len(self.range) != 6 or len(self.cell) != 2:
            raise ValueError(
                f"BevGrid takes range = 6 numbers (x_min, y_min, z_min, x_max, y_max, z_max) and "
                f"cell = 2 numbers, got {self.range} and {self.cell}"
            )
        if any(low >= high for low, high in zip(self.range[:3], self.range[3:], strict=True)):
            raise ValueError(
                f"BevGrid range {self.range} is empty: each minimum must lie below its maximum"
            )
        for axis, size in enumerate(self.cell):
            extent = self.range[axis + 3] - self.range[axis]
            if size <= 0 or abs(extent / size - round(extent / size)) > 1e-3:
                raise ValueError(
                    f"BevGrid cell {self.cell} does not divide the range {self.range} evenly along "
                    f"{'xy'[axis]}, where its extent is {extent} m; choose a cell that does"
                )

    @property
    def shape(self) -> tuple[int, int]:
        """Number of cells (Y, X)."""
        width = round((self.range[3] - self.range[0]) / self.cell[0])
        height = round((self.range[4] - self.range[1]) / self.cell[1])
        return height, width

    def coarsen(self, factor: int) -> "BevGrid":
        """The grid of a feature map ``factor`` times smaller over the same range."""
        return BevGrid(self.range, (self.cell[0] * factor, self.cell[1] * factor))

    def to_cells(self, xy: Tensor) -> Tensor:
        """Metres ``(..., 2)`` as x, y to continuous cells ``(..., 2)`` as i (along x), j (along y);
        the centre of the first cell is (0.5, 0.5)."""
        return (xy - constant(self.range[:2], xy)) / constant(self.cell, xy)

    def to_metres(self, cells: Tensor) -> Tensor:
        """Inverse of :meth:`to_cells`."""
        return cells * constant(self.cell, cells) + constant(self.range[:2], cells)

    def centres(self, device: torch.device | str | None = None) -> Tensor:
        """Cell centres ``(Y, X, 2)`` as x, y [m]."""
        height, width = self.shape
        j, i = torch.meshgrid(
            torch.arange(height, device=device) + 0.5,
            torch.arange(width, device=device) + 0.5,
            indexing="ij",
        )
        return self.to_metres(torch.stack([i, j], dim=-1))

    def contains(self, points: Tensor) -> Tensor:
        """Which points ``(..., 3)`` [m] lie in the range: ``(...)`` bool, upper bounds excluded."""
        low, high = constant(self.range[:3], points), constant(self.range[3:], points)
        return ((points >= low) & (points < high)).all(dim=-1)
