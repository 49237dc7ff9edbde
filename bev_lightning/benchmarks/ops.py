"""``bench=ops``: times every operator and its reference, against the machine's roofline.

The roofline model is that of Williams et al. 2009.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import torch
from omegaconf import DictConfig

from bev_lightning.benchmarks.ops_camera import (
    measure_attention,
    measure_bev_pool,
    measure_deform_attention,
)
from bev_lightning.benchmarks.ops_lidar import measure_nms, measure_sparse_conv, measure_voxelize
from bev_lightning.benchmarks.report import Row, with_ratios
from bev_lightning.benchmarks.timing import COPY_MIB, measure_copy, measure_matmul
from bev_lightning.errors import InputError

# What each benchmark takes between device and repeats.
_SIZES: dict[str, dict[Callable[..., list[Row]], tuple[Any, ...]]] = {
    "small": {
        measure_voxelize: (5_000,),
        measure_sparse_conv: (5_000,),
        measure_nms: (100,),
        measure_bev_pool: ((64, 176), 16, 2.4),
        measure_deform_attention: ((20,),),
        measure_attention: ((90, 20), 400),
    },
    "published": {
        measure_voxelize: (250_000,),
        measure_sparse_conv: (250_000,),
        measure_nms: (1_000,),
        measure_bev_pool: ((256, 704), 80, 0.3),
        measure_deform_attention: ((50, 200),),
        measure_attention: ((900, 200), 32_400),
    },
}


def measure_ops(
    cfg: DictConfig, size: Literal["published", "small"], repeats: int
) -> tuple[list[Row], list[str]]:
    """Rows of all operators on the configured device.

    Arguments: see ``conf/bench/ops.yaml``.

    Raises:
        InputError: the size is unknown.
    """
    if size not in _SIZES:
        raise InputError(f"bench.size={size} is unknown; use bench.size=published or small")
    device = torch.device("cuda" if cfg.trainer.accelerator == "gpu" else "cpu")
    copy_rate = measure_copy(device)
    matmul_rate = measure_matmul(device, torch.float32)
    rows: list[Row] = []
    for measure, sizes in _SIZES[size].items():
        rows += measure(device, *sizes, repeats=repeats)
    conditions = (
        f"Float32 on {device.type}, {torch.get_num_threads()} threads, medians of {repeats}, "
        "forward and backward if there is a gradient. least_mib: minimum traffic of inputs, "
        "outputs and gradients; gflop: arithmetic that the operator requires, the same for all "
        "implementations."
    )
    roof = (
        f"copy_share: least_mib per second over the {copy_rate / 1e9:.3g} GB/s of a copy of "
        f"{COPY_MIB} MiB on this machine; matmul_share: gflop per second over the "
        f"{matmul_rate / 1e9:.4g} GFLOP/s of a large matrix product. The larger of the two is the "
        "share of the roofline reached."
    )
    rows = [_with_roof(row, copy_rate, matmul_rate) for row in with_ratios(rows)]
    return rows, [conditions, roof]


def _with_roof(row: Row, copy_rate: float, matmul_rate: float) -> Row:
    # By wall time, like the rates of the machine.
    shares: dict[str, float | str | None] = {}
    for share, key, rate in (
        ("copy_share", "least_mib", copy_rate / 2**20),
        ("matmul_share", "gflop", matmul_rate / 1e9),
    ):
        amount = row.more.get(key)
        if row.ms and isinstance(amount, float):
            shares[share] = amount / (row.ms / 1e3) / rate
    return replace(row, more=row.more | shares)
