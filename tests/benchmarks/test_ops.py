"""bench=ops in a tiny size."""

import json
from pathlib import Path

import pytest
import torch

from bev_lightning.benchmarks.ops import measure_ops
from bev_lightning.benchmarks.ops_lidar import make_scan
from bev_lightning.benchmarks.report import write_report
from bev_lightning.config.compose import load_config
from bev_lightning.config.resolve import resolve
from bev_lightning.errors import InputError
from bev_lightning.hardware.machine import Machine


def test_operators_beside_their_references(tmp_path: Path) -> None:
    cfg = resolve(load_config("bench", ["bench=ops", "hardware=cpu"]), Machine(), tmp_path)
    rows, notes = measure_ops(cfg, size="small", repeats=1)
    write_report(tmp_path, "ops", Machine().to_dict(), rows, notes)
    stored = json.loads((tmp_path / "bench.json").read_text())
    assert stored["bench"] == "ops" and len(stored["rows"]) == len(rows)
    groups: dict[str, list[dict]] = {}
    for row in stored["rows"]:
        groups.setdefault(row["group"].split(",")[0], []).append(row)
    assert list(groups) == [
        "voxelisation",
        "rulebook",
        "sparse convolution",
        "circle_nms",
        "BEV pooling",
        "deformable attention",
        "attention with dropout",
    ]
    for found in groups.values():
        assert found[0]["ratio"] == 1
        assert all(row["ms"] > 0 and row["ratio"] > 0 for row in found)
    for row in groups["sparse convolution"]:
        assert row["matmul_share"] > 0 and row["copy_share"] > 0
        assert 0 < row["forward_cpu_ms"] < row["cpu_ms"]
    assert (tmp_path / "bench.png").exists() and "copy_share" in notes[1]


def test_unknown_sizes_are_refused(tmp_path: Path) -> None:
    cfg = resolve(load_config("bench", ["bench=ops", "hardware=cpu"]), Machine(), tmp_path)
    with pytest.raises(InputError, match="use bench.size=published or small"):
        measure_ops(cfg, size="huge", repeats=1)


def test_a_scan_is_dense_on_the_ground() -> None:
    scan = make_scan(5_000)
    assert scan.shape == (1, 5_000, 5)
    on_ground = (scan[..., 2] + 1.8).abs() < 0.05
    assert 0.1 < float(on_ground.float().mean()) < 0.9
    assert torch.equal(scan, make_scan(5_000))
