"""bench=loading on few samples, and its random files."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from bev_lightning.benchmarks.loading import measure_loading
from bev_lightning.benchmarks.random_sensor_files import make_recordings
from bev_lightning.config.compose import load_config


def test_files_have_realistic_sizes(tmp_path: Path) -> None:
    recordings = make_recordings(tmp_path, 1, ("CAM_FRONT", "CAM_BACK"), sweeps=1)
    sample = recordings.sample("sample0")
    assert [int(depth) for depth in sample.readings.sweep] == [0, 0, 0, 1]
    for path in sample.readings.path[:2]:
        assert 150_000 < (tmp_path / path).stat().st_size < 220_000
        assert Image.open(tmp_path / path).size == (1600, 900)
    cloud = np.fromfile(tmp_path / sample.readings.path[2], np.float32).reshape(-1, 5)
    assert cloud.shape == (34_720, 5) and 0 < cloud[:, 3].max() <= 255


@pytest.mark.slow
def test_loaders_and_parts_are_compared() -> None:
    rows, notes = measure_loading(load_config("bench", ["bench=loading"]), 1, 1, 1, 2, 1)
    ratios = {(row.group, row.name): row.ratio for row in rows}
    assert ratios["loader", "torch"] == 1
    assert ratios["loader", "zero_copy"] > 3
    assert ratios["10 lidar sweeps", "one pass"] > 4
    differences = [row.more["difference"] for row in rows if "difference" in row.more]
    assert len(differences) == 2 and max(differences) < 2.5
    cached = next(row for row in rows if "cache" in row.name)
    assert 0.5 < cached.more["cache_hit_rate"] <= 1
    assert "2 random samples" in notes[0]
