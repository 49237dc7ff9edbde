"""bench.json, bench.md and bench.png."""

import json
from pathlib import Path

from PIL import Image

from bev_lightning.benchmarks.report import Row, with_ratios, write_report

ROWS = [
    Row("reference", "pool", ms=8.0, cpu_ms=12.0, peak_mib=100.0),
    Row("fast", "pool", ms=4.0, cpu_ms=3.0, peak_mib=20.0, more={"share_of_copy": 0.5}),
    Row("reference", "other", ms=1.0),
    Row("fast", "other", ms=0.25),
]


def test_ratio_is_by_process_time_where_both_have_it() -> None:
    assert [row.ratio for row in with_ratios(ROWS)] == [1.0, 4.0, 1.0, 4.0]


def test_report_as_json_markdown_and_image(tmp_path: Path) -> None:
    text = write_report(tmp_path, "ops", {"num_cpus": 2}, with_ratios(ROWS), ["half precision"])
    content = json.loads((tmp_path / "bench.json").read_text())
    assert content["bench"] == "ops" and content["machine"] == {"num_cpus": 2}
    assert content["rows"][1] == {
        "name": "fast",
        "group": "pool",
        "ms": 4.0,
        "cpu_ms": 3.0,
        "samples_per_s": None,
        "peak_mib": 20.0,
        "ratio": 4.0,
        "share_of_copy": 0.5,
    }
    lines = text.splitlines()
    # Columns without values are left out.
    assert lines[0] == "| name | group | ms | cpu_ms | peak_mib | ratio | share_of_copy |"
    assert lines[3] == "| fast | pool | 4 | 3 | 20 | 4 | 0.5 |" and lines[-1] == "half precision"
    assert Image.open(tmp_path / "bench.png").size[0] == 1080
