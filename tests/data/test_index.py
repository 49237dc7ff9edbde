"""The Arrow index: round trip, one for all spellings, anew when tables change."""

import json
import multiprocessing
import os
import pickle
import time
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest

from bev_lightning.data import index as index_module
from bev_lightning.data.index import build_index, find_missing
from bev_lightning.data.report import make_report
from bev_lightning.data.tables import Tables, read_samples
from bev_lightning.errors import InputError

VERSION = "v1.0-mini"


def test_index_gives_back_every_value(make_tree, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(index_module, "_ROWS_PER_BATCH", 2)  # several record batches
    root = make_tree(can_bus=["scene-0103"], empty=[("scene-0061", 1)])
    index = build_index(root, VERSION, tmp_path / "cache")
    expected = list(read_samples(Tables(root, VERSION), root / "can_bus"))
    assert index.tokens == [sample.token for sample in expected]
    for theirs in expected:
        ours = index.sample(theirs.token)
        assert (ours.scene_name, ours.timestamp, ours.previous, ours.next, ours.from_can_bus) == (
            theirs.scene_name,
            theirs.timestamp,
            theirs.previous,
            theirs.next,
            theirs.from_can_bus,
        )
        np.testing.assert_array_equal(ours.can_bus, theirs.can_bus)
        for part in ("readings", "annotations"):
            for field in fields(getattr(ours, part)):
                one, two = (getattr(getattr(s, part), field.name) for s in (ours, theirs))
                if isinstance(two, np.ndarray):
                    assert one.shape == two.shape and one.dtype == two.dtype, field.name
                    np.testing.assert_array_equal(one, two)
                else:
                    assert one == two
    assert index.sample("scene-0061_1").annotations.centre.shape == (0, 3)
    assert index.scenes_without_can_bus == ("scene-0061",)


def test_every_spelling_of_the_root_is_one_index(make_tree, tmp_path: Path, monkeypatch) -> None:
    root = make_tree()
    (tmp_path / "link").symlink_to(root)
    monkeypatch.chdir(tmp_path)
    for spelling in ("tree", "tree/", "./tree", "tree//", str(root), "link"):
        index = build_index(spelling, VERSION, "cache")
        assert index.root == root
        assert all(not path.startswith("/") for path in index.sample(index.tokens[0]).readings.path)
    assert len(list((tmp_path / "cache").glob("*.arrow"))) == 1
    assert not list((tmp_path / "cache").glob("*.tmp"))


def test_index_is_made_anew_only_when_tables_change(make_tree, tmp_path: Path) -> None:
    root = make_tree()
    first = build_index(root, VERSION, tmp_path / "cache")
    made = first.path.stat().st_mtime_ns
    began = time.perf_counter()
    assert build_index(root, VERSION, tmp_path / "cache").path.stat().st_mtime_ns == made
    assert time.perf_counter() - began < 0.5
    path = root / VERSION / "sample_annotation.json"
    records = json.loads(path.read_text())
    records[0]["translation"][0] += 1.0
    path.write_text(json.dumps(records))
    again = build_index(root, VERSION, tmp_path / "cache")
    assert again.path == first.path
    before, after = (i.sample("scene-0061_0").annotations.centre[0, 0] for i in (first, again))
    assert after - before == pytest.approx(1.0)  # the open one still reads what it mapped


def test_other_schema_or_rubbish_is_replaced(make_tree, tmp_path: Path, monkeypatch) -> None:
    root = make_tree()
    monkeypatch.setattr(index_module, "SCHEMA_VERSION", 999)
    path = build_index(root, VERSION, tmp_path / "cache").path
    monkeypatch.undo()
    assert (
        build_index(root, VERSION, tmp_path / "cache").schema_version == index_module.SCHEMA_VERSION
    )
    path.write_bytes(b"rubbish")
    assert len(build_index(root, VERSION, tmp_path / "cache")) == 5


def test_index_pickles_by_path_and_several_processes_may_build(make_tree, tmp_path: Path) -> None:
    root = make_tree()
    with multiprocessing.get_context("fork").Pool(2) as pool:
        args = [(root, VERSION, tmp_path / "cache")] * 2
        one, two = pool.starmap(build_index, args)
    assert one.path == two.path and one.tokens == two.tokens
    assert len(pickle.dumps(one)) < 1000


def test_unknown_split_root_version_and_cache_are_refused(make_tree, tmp_path: Path) -> None:
    root = make_tree()
    index = build_index(root, VERSION, tmp_path / "cache")
    assert index.split("mini_val") == ["scene-0103_0", "scene-0103_1"]
    with pytest.raises(InputError, match="'mini_tset' .*mini_train, mini_val"):
        index.split("mini_tset")
    with pytest.raises(InputError, match=r"data.root=/nowhere is not a folder"):
        build_index("/nowhere", VERSION, tmp_path / "cache")
    with pytest.raises(InputError, match="versions there: v1.0-mini"):
        build_index(root, "v1.0-trainval", tmp_path / "cache")
    with pytest.raises(InputError, match="lies inside data.root"):
        build_index(root, VERSION, root / "cache")


def test_missing_files_and_report(make_tree, tmp_path: Path) -> None:
    root = make_tree(scenes=(("scene-0061", 2), ("scene-0103", 1)), empty=[("scene-0061", 0)])
    index = build_index(root, VERSION, tmp_path / "cache")
    gone = "samples/LIDAR_TOP/scene-0061_1_LIDAR_TOP_0.pcd.bin"
    (root / gone).unlink()
    assert find_missing(root, [gone, "samples/CAM_BACK/scene-0061_1_CAM_BACK_0.jpg", "no/x"]) == {
        gone,
        "no/x",
    }
    report = make_report(index, ("car", "barrier", "bus"))
    assert (report.num_scenes, report.num_samples, report.num_boxes) == (2, 3, 8)
    assert report.boxes_per_class == {"car": 2, "barrier": 2, "bus": 0}
    assert report.num_other_boxes == 4 and report.num_zero_point_boxes == 2
    assert report.num_nan_velocities == 4 and report.num_samples_without_boxes == 1
    lidar = report.files["LIDAR_TOP"]
    assert (lidar.key_frames, lidar.missing_key_frames, lidar.sweeps, lidar.missing_sweeps) == (
        3,
        1,
        2,
        0,
    )
    assert report.samples_per_split["mini_train"] == 2
    assert "(1 missing)" in report.to_text() and json.dumps(report.to_json())


@pytest.mark.skipif("BEV_NUSCENES_DIR" not in os.environ, reason="BEV_NUSCENES_DIR is not set")
def test_real_tree(tmp_path: Path) -> None:
    index = build_index(os.environ["BEV_NUSCENES_DIR"], VERSION, tmp_path / "cache")
    assert index.scenes_without_can_bus == ("scene-0003", "scene-0001")
    report = make_report(index, ("car", "pedestrian"))
    assert report.num_boxes == 168 and report.samples_per_split["real_lidar"] == 2
    assert report.files["LIDAR_TOP"].missing_key_frames == 3
    assert report.files["CAM_FRONT"].missing_key_frames == 0
