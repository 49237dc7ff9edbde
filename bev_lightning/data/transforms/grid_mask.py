"""GridMask (Chen et al. 2020): hides a grid of squares in the images of a training sample.

As in the published BEVFormer and BEVFusion: not rotated, one mask for all cameras, applied to
normalised images, where hidden pixels become 0, the mean colour. Earlier frames of a temporal queue
are not masked, as in BEVFormer.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from bev_lightning.data.transforms.augment import Augment

_STREAM = 2  # separate random stream: it does not change the other augmentation


@dataclass(frozen=True)
class GridMask:
    """A mask. Pixel ``[v, u]`` is visible where its row or its column lies in a visible stripe.

    Attributes:
        period: of the grid [pixels].
        stripe: width of the visible stripes, less than the period [pixels].
        offset: v, u of the first stripe, 0 to period - 1 [pixels].
    """

    period: int
    stripe: int
    offset: tuple[int, int]

    def visible(self, size: Sequence[int], device: torch.device | str | None = None) -> Tensor:
        """Visible pixels ``(H, W)`` bool."""
        rows, columns = (
            (torch.arange(length, device=device) - start) % self.period < self.stripe
            for length, start in zip(size, self.offset, strict=True)
        )
        return rows[:, None] | columns

    def hide(self, images: Tensor) -> None:
        """Set the squares of normalised images ``(..., H, W)`` to 0, in place."""
        images.mul_(self.visible(images.shape[-2:], images.device))


def random_grid_mask(
    augment: Augment, size: tuple[int, int], seed: Sequence[int]
) -> GridMask | None:
    """A random mask with the probability ``augment.grid_mask``, else None.

    Args:
        size: height, width of the network's image [pixels].
        seed: (seed, epoch, position).
    """
    if augment.grid_mask <= 0:
        return None
    rng = np.random.default_rng([*seed, _STREAM])
    if rng.uniform() >= augment.grid_mask:
        return None
    period = int(rng.integers(2, max(3, size[0])))
    stripe = min(max(int(period * augment.grid_mask_ratio + 0.5), 1), period - 1)
    first, second = rng.integers(period, size=2).tolist()
    return GridMask(period, stripe, (first, second))
