"""bench=prepare: the random tables and the report."""

import json
from pathlib import Path

from omegaconf import OmegaConf

from bev_lightning.benchmarks.prepare import measure_prepare
from bev_lightning.benchmarks.random_tables import VERSION, write_tables


def test_tables_have_the_given_size_and_are_reproducible(tmp_path: Path) -> None:
    counts = [write_tables(tmp_path / name, ["scene-0001", "scene-0002"], 21) for name in "ab"]
    assert counts[0] == counts[1]
    for table in (tmp_path / "a" / VERSION).glob("*.json"):
        records = json.loads(table.read_text())
        assert len({record["token"] for record in records}) == len(records) > 0, table
        assert table.read_bytes() == (tmp_path / "b" / VERSION / table.name).read_bytes()
        assert counts[0].get(table.stem, len(records)) == len(records)
    assert counts[0]["sample"] == 21
    # v1.0-trainval has 77 readings and 34 boxes a sample.
    assert 65 < counts[0]["sample_data"] / 21 < 80 and 28 < counts[0]["sample_annotation"] / 21 < 40


def test_bench_compares_with_the_devkit(tmp_path: Path) -> None:
    cfg = OmegaConf.create({"paths": {"run": str(tmp_path)}})
    rows, notes = measure_prepare(cfg, 0.0006, num_workers=1, devkit_scale=0.0003, devkit_samples=5)
    assert [row.name for row in rows] == [
        "devkit: load and loop",
        "devkit: load alone",
        "index, 1 processes",
        "open the index",
        "decode a sample",
    ]
    assert rows[0].ratio == 1 and rows[2].ratio is not None and rows[2].ratio > 0
    assert rows[0].cpu_ms > rows[1].cpu_ms > 0 and rows[3].ms < 100
    assert rows[2].peak_mib > 100 and rows[2].more["index_mib"] > 0.1
    assert "20 sample," in notes[0] and "looped over 5 of them" in notes[1]
    assert "scaled by 2, loop time by 4" in notes[1]
    assert list(tmp_path.iterdir()) == []
