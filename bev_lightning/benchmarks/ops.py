"""``bench=ops``: every operator beside its reference, and how near both are to what the machine can
do (Williams et al. 2009, the roofline)."""

from dataclasses import dataclass, replace
from typing import Literal

import torch
from omegaconf import DictConfig

from bev_lightning.benchmarks.ops_points import measure_nms, measure_sparse_conv, measure_voxelize
from bev_lightning.benchmarks.ops_view import (
    measure_attention,
    measure_bev_pool,
    measure_deform_attention,
)
from bev_lightning.benchmarks.report import Row, with_ratios
from bev_lightning.benchmarks.step import measure_matmul
from bev_lightning.benchmarks.timing import time_all
from bev_lightning.errors import InputError

_COPIED_MIB = 256


@dataclass(frozen=True)
class _Size:
    image_size: tuple[int, int]
    channels: int
    cell_m: float
    sides: tuple[int, ...]
    num_queries: tuple[int, int]
    num_cells: int
    num_points: int
    num_boxes: int


_SIZES = {
    "small": _Size((64, 176), 16, 2.4, (20,), (90, 20), 400, 5_000, 100),
    "published": _Size((256, 704), 80, 0.3, (50, 200), (900, 200), 32_400, 250_000, 1_000),
}


def measure_ops(
    cfg: DictConfig, size: Literal["published", "small"], repeats: int
) -> tuple[list[Row], list[str]]:
    """Rows of all operators on the run's device.

    Raises:
        InputError: the size is unknown.
    """
    if size not in _SIZES:
        raise InputError(f"bench.size={size} is unknown; use bench.size=published or small")
    sizes = _SIZES[size]
    device = torch.device("cuda" if cfg.trainer.accelerator == "gpu" else "cpu")
    copied = measure_copy(device)
    multiplied = measure_matmul(device, torch.float32)
    rows = measure_voxelize(device, sizes.num_points, repeats)
    rows += measure_sparse_conv(device, sizes.num_points, repeats)
    rows += measure_nms(device, sizes.num_boxes, repeats)
    rows += measure_bev_pool(device, sizes.image_size, sizes.channels, sizes.cell_m, repeats)
    rows += measure_deform_attention(device, sizes.sides, repeats)
    rows += measure_attention(device, sizes.num_queries, sizes.num_cells, repeats)
    what = (
        f"Float32 on {device.type}, {torch.get_num_threads()} threads, medians of {repeats}, "
        "forward and backward where there is a gradient. least_mib: bytes that inputs, outputs and "
        "gradients have to move at least; gflop: of the sums that are asked for, whoever takes "
        "them."
    )
    roof = (
        f"copy_share: least_mib a second over the {copied / 1e9:.3g} GB/s that a copy of "
        f"{_COPIED_MIB} MiB reads and writes here; matmul_share: gflop a second over the "
        f"{multiplied / 1e9:.4g} GFLOP/s of a large matrix product. The larger of the two is the "
        "distance to the roof."
    )
    return [_with_roof(row, copied, multiplied) for row in with_ratios(rows)], [what, roof]


def measure_copy(device: torch.device) -> float:
    """Bytes a second that a copy reads and writes."""
    source = torch.ones(_COPIED_MIB * 2**18, device=device)
    target = torch.empty_like(source)
    seconds = time_all({"": lambda: target.copy_(source)})[""].ms / 1e3
    return 2 * _COPIED_MIB * 2**20 / seconds


def _with_roof(row: Row, copied: float, multiplied: float) -> Row:
    # By wall time, as the machine's own rates were taken.
    shares: dict[str, float | str | None] = {}
    for share, key, rate in (
        ("copy_share", "least_mib", copied / 2**20),
        ("matmul_share", "gflop", multiplied / 1e9),
    ):
        amount = row.more.get(key)
        if row.ms and isinstance(amount, float):
            shares[share] = amount / (row.ms / 1e3) / rate
    return replace(row, more=row.more | shares)
