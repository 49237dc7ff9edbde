"""Loss functions, computed in float32 or higher under any autocast."""

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

# Of cx, cy, cz, log w, log l, log h, sin, cos, vx, vy.
CODE_WEIGHTS = (1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.2, 0.2)


def widen(value: Tensor) -> Tensor:
    """Cast to at least float32; float64 stays, for gradient checks."""
    return value.to(torch.promote_types(value.dtype, torch.float32))


def normalizer(count: Tensor, normalizers: Mapping[str, Tensor] | None, name: str) -> Tensor:
    """What a loss term is divided by: the given normalizer, else its own count, at least 1."""
    return count.clamp(min=1) if normalizers is None else normalizers[name]


def gaussian_focal_loss(logits: Tensor, heatmap: Tensor, count: Tensor | None = None) -> Tensor:
    """CornerNet's focal loss (Law and Deng, ECCV 2018, equation 1), divided by the number of peaks.

    Args:
        logits: ``(B, K, Y, X)``.
        heatmap: the same shape, 0..1, exactly 1 at the centre of a box.
        count: what the sum is divided by instead.
    """
    probability = widen(logits).sigmoid().clamp(1e-4, 1 - 1e-4)
    peak = heatmap == 1
    hit = -probability.log() * (1 - probability).square() * peak
    miss = -(1 - probability).log() * probability.square() * (1 - heatmap).pow(4)
    return (hit + miss).sum() / (peak.sum().clamp(min=1) if count is None else count)


def sigmoid_focal_loss(
    logits: Tensor, labels: Tensor, alpha: float = 0.25, gamma: float = 2.0
) -> Tensor:
    """RetinaNet's focal loss of each logit ``(..., K)``, for labels ``(...)``; label K is
    background."""
    logits = widen(logits)
    target = F.one_hot(labels, logits.shape[-1] + 1)[..., :-1].to(logits.dtype)
    entropy = F.binary_cross_entropy_with_logits(logits, target, reduction="none")
    probability = logits.sigmoid()
    wrong = probability + target - 2 * probability * target
    return entropy * (alpha * target + (1 - alpha) * (1 - target)) * wrong.pow(gamma)


def masked_l1_loss(predicted: Tensor, target: Tensor, weight: Tensor) -> Tensor:
    """Weighted absolute difference of each number; 0, also in the gradient, where the target is NaN
    (an unknown velocity) or the weight is 0."""
    used = torch.isfinite(target) & (weight > 0)
    difference = torch.where(used, widen(predicted) - target.nan_to_num(), 0.0)
    return difference.abs() * weight


def depth_loss(depth_logits: Tensor, target: Tensor, count: Tensor | None = None) -> Tensor:
    """Cross entropy of the depth distribution, averaged over pixels with a lidar depth (BEVDepth,
    section 4.1); 0 without such pixels.

    Args:
        depth_logits: ``(B, N, D, h, w)``.
        target: ``(B, N, h, w)`` int64 index of the depth bin, -1 for none.
        count: what the sum is divided by; None for the number of those pixels.
    """
    with torch.autocast(depth_logits.device.type, enabled=False):
        logits, bins = widen(depth_logits).flatten(0, 1), target.flatten(0, 1)
        entropy = F.cross_entropy(logits, bins, ignore_index=-1, reduction="sum")
        return entropy / ((target >= 0).sum().clamp(min=1) if count is None else count)
