"""The Arrow index: round trip, one file for all spellings of the root, rebuilt on changes."""

import errno
import io
import json
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import nuscenes.utils.splits  # noqa: F401  once, not in each forked process
import pytest
from PIL import Image

from bev_lightning.data.nuscenes import build_index
from bev_lightning.data.nuscenes import report as report_module
from bev_lightning.data.nuscenes.index import Index, open_index
from bev_lightning.data.nuscenes.missing_files import find_missing
from bev_lightning.data.nuscenes.report import Files, make_report
from bev_lightning.data.process_pool import map_in_processes
from bev_lightning.errors import InputError

VERSION = "v1.0-mini"


def test_index_holds_scenes_without_boxes_and_without_can_bus(make_tree, tmp_path: Path) -> None:
    root = make_tree(can_bus=["scene-0103"], empty=[("scene-0061", 1)])
    index = open_index(root, VERSION, tmp_path / "cache")
    empty = index.sample("scene-0061_1").annotations
    assert empty.centre.shape == (0, 3) and empty.token == () and empty.velocity.dtype == np.float64
    assert index.scenes_without_can_bus == ("scene-0061",)
    assert index.scene("scene-0103_1") == "scene-0103"
    sample = index.sample("scene-0061_2")
    assert sample.readings.sweep.dtype == sample.readings.size.dtype == np.int64
    assert sample.annotations.num_lidar_pts.tolist() == [5, 5, 0, 5]
    with pytest.raises(KeyError):
        index.sample("scene-9999_0")


def test_parts_and_processes_do_not_change_a_byte(make_tree, tmp_path: Path, monkeypatch) -> None:
    root = make_tree()
    whole = open_index(root, VERSION, tmp_path / "one")
    monkeypatch.setattr(build_index, "_CHUNK_BYTES", 3000)
    chunks = open_index(root, VERSION, tmp_path / "chunks")
    assert chunks.path.read_bytes() == whole.path.read_bytes()
    processes = open_index(root, VERSION, tmp_path / "processes", num_workers=2)
    assert processes.path.read_bytes() == whole.path.read_bytes()
    assert [path.name for path in processes.path.parent.iterdir() if path.is_dir()] == []
    monkeypatch.setattr(build_index, "_SCENES_PER_PART", 1)
    scenes = open_index(root, VERSION, tmp_path / "scenes")
    assert [scenes.sample(t).can_bus.tolist() for t in scenes.tokens] == [
        whole.sample(t).can_bus.tolist() for t in whole.tokens
    ]


def build_until(num_writes: int, written: Path, root: Path, cache: Path) -> None:
    """In a child process: killed before it renames one more file."""
    replace, left = os.replace, [num_writes]

    def count(source: str, target: Path) -> None:
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        left[0] -= 1
        with written.open("a") as file:
            file.write(f"{Path(target).name}\n")
        replace(source, target)

    build_index._CHUNK_BYTES, build_index._SCENES_PER_PART = 3000, 1
    os.replace = count
    open_index(root, VERSION, cache)


def test_a_killed_build_goes_on_to_the_same_bytes(make_tree, tmp_path: Path) -> None:
    root = make_tree(can_bus=["scene-0061"])

    def start(where: str, num_writes: int) -> int | None:
        args = (num_writes, tmp_path / f"{where}.txt", root, tmp_path / where)
        process = multiprocessing.get_context("fork").Process(target=build_until, args=args)
        process.start()
        process.join()
        return process.exitcode

    assert start("undisturbed", -1) == 0
    every = (tmp_path / "undisturbed.txt").read_text().split()
    assert len(every) > 12 and every[-2:] == ["index.arrow", every[-1]]
    for num_writes in (0, 3, len(every) - 4):  # in the first part, the tables and the scenes
        where = f"killed-{num_writes}"
        assert start(where, num_writes) == -signal.SIGKILL
        assert start(where, 1) == -signal.SIGKILL
        assert start(where, -1) == 0
        # What was written is not written again: no work is done twice but the part cut off.
        assert (tmp_path / f"{where}.txt").read_text().split() == every
        one, two = (tmp_path / name / every[-1] for name in (where, "undisturbed"))
        assert one.read_bytes() == two.read_bytes()
        assert {path.suffix for path in one.parent.iterdir()} == {".arrow", ".lock"}


def test_workers_die_with_a_killed_parent(tmp_path: Path) -> None:
    script = tmp_path / "main.py"
    script.write_text(
        "import os, signal, time\n"
        "from bev_lightning.data.process_pool import map_in_processes\n"
        "def work(job):\n"
        "    print(os.getpid(), flush=True)\n"
        "    if job == 1: os.kill(os.getppid(), signal.SIGKILL)\n"
        "    time.sleep(600)\n"
        "if __name__ == '__main__': list(map_in_processes(work, [0, 1], 2))\n"
    )
    # The pipe closes when the last of them has gone.
    done = subprocess.run([sys.executable, script], stdout=subprocess.PIPE, text=True, timeout=60)
    assert done.returncode == -signal.SIGKILL and len(done.stdout.split()) >= 1


def test_without_locks_each_process_has_parts_of_its_own(make_tree, tmp_path, monkeypatch) -> None:
    def refuse(*args: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    root = make_tree()
    whole = open_index(root, VERSION, tmp_path / "one")
    monkeypatch.setattr("fcntl.flock", refuse)
    others = tmp_path / "cache" / whole.path.with_suffix(".parts").name / "of-another-process"
    others.mkdir(parents=True)
    index = open_index(root, VERSION, tmp_path / "cache")
    assert index.path.read_bytes() == whole.path.read_bytes()
    assert others.is_dir() and list(others.parent.iterdir()) == [others]


def test_a_full_disk_and_a_file_for_a_folder_are_sentences(
    make_tree, tmp_path, monkeypatch
) -> None:
    def fill(handle: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    root = make_tree()
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"cannot be written \(Not a directory\): set paths.cache"):
        open_index(root, VERSION, tmp_path / "file" / "cache")
    monkeypatch.setattr("os.fsync", fill)
    with pytest.raises(
        InputError, match=r"cannot be written \(No space left on device\): free space"
    ):
        open_index(root, VERSION, tmp_path / "cache")
    assert not list((tmp_path / "cache").rglob("*.tmp"))


def test_a_killed_worker_is_a_sentence() -> None:
    with pytest.raises(InputError, match=r"one of 2 processes was killed.*data.num_workers"):
        list(map_in_processes(os._exit, [1, 1], 2))


def test_every_spelling_of_the_root_is_one_index(make_tree, tmp_path: Path, monkeypatch) -> None:
    root = make_tree()
    (tmp_path / "link").symlink_to(root)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    spellings = ("tree", "tree/", "./tree", "tree//", str(root), "link", "~/tree", "x/../tree")
    for spelling in spellings:
        index = open_index(spelling, VERSION, "cache")
        assert index.root == root
        assert all(not path.startswith("/") for path in index.sample(index.tokens[0]).readings.path)
    assert len(list((tmp_path / "cache").glob("*.arrow"))) == 1
    assert not list((tmp_path / "cache").glob("*.tmp"))


def test_index_is_rebuilt_only_when_tables_change(make_tree, tmp_path: Path) -> None:
    root = make_tree()
    first = open_index(root, VERSION, tmp_path / "cache")
    made = first.path.stat().st_mtime_ns
    began = time.perf_counter()
    assert open_index(root, VERSION, tmp_path / "cache").path.stat().st_mtime_ns == made
    assert time.perf_counter() - began < 0.5
    path = root / VERSION / "sample_annotation.json"
    records = json.loads(path.read_text())
    records[0]["translation"][0] += 1.0
    path.write_text(json.dumps(records))
    again = open_index(root, VERSION, tmp_path / "cache")
    assert again.path == first.path
    before, after = (i.sample("scene-0061_0").annotations.centre[0, 0] for i in (first, again))
    assert after - before == pytest.approx(1.0)  # the open one still reads what it mapped


def test_another_schema_and_a_broken_file_are_rebuilt(
    make_tree, tmp_path: Path, monkeypatch
) -> None:
    root, cache = make_tree(), tmp_path / "cache"
    monkeypatch.setattr(build_index, "SCHEMA_VERSION", 999)
    monkeypatch.setattr("bev_lightning.data.nuscenes.index.SCHEMA_VERSION", 999)
    path = open_index(root, VERSION, cache).path
    monkeypatch.undo()
    with pytest.raises(InputError, match="has schema 999 and this program reads"):
        Index(path, root)
    assert len(open_index(root, VERSION, cache)) == 5
    path.write_bytes(b"rubbish")
    assert len(open_index(root, VERSION, cache)) == 5


def test_a_test_set_without_annotations(make_tree, tmp_path: Path) -> None:
    root = make_tree(scenes=(("scene-0077", 2),), version="v1.0-test", empty=[("scene-0077", 0)])
    for absent in (False, True):
        for name in ("sample_annotation", "instance"):
            table = root / "v1.0-test" / f"{name}.json"
            table.unlink() if absent else table.write_text("[]")
        index = open_index(root, "v1.0-test", tmp_path / "cache")
        assert index.split("test") == ["scene-0077_0", "scene-0077_1"]
        assert index.sample("scene-0077_1").annotations.rotation.shape == (0, 4)


def test_names_that_would_leave_their_folder_are_refused(make_tree, tmp_path: Path) -> None:
    root = make_tree()
    with pytest.raises(InputError, match=r"data.version '\.\./other' cannot be part of a file's"):
        open_index(root, "../other", tmp_path / "cache")
    splits = root / VERSION / "splits.json"
    splits.write_text('{"a/../../b": ["scene-0061"]}')
    with pytest.raises(InputError, match=r"splits.json: the split 'a/\.\./\.\./b' cannot be part"):
        open_index(root, VERSION, tmp_path / "cache")
    splits.unlink()
    scenes = root / VERSION / "scene.json"
    records = json.loads(scenes.read_text())
    records[0]["name"] = "../../scene-0061"
    scenes.write_text(json.dumps(records))
    with pytest.raises(InputError, match=r"the scene '\.\./\.\./scene-0061' cannot be part"):
        open_index(root, VERSION, tmp_path / "cache")


def test_index_pickles_by_path_and_several_processes_may_build(make_tree, tmp_path: Path) -> None:
    root = make_tree()
    with multiprocessing.get_context("fork").Pool(2) as pool:
        args = [(root, VERSION, tmp_path / "cache")] * 2
        one, two = pool.starmap(open_index, args)
    assert one.path == two.path and one.tokens == two.tokens
    assert len(pickle.dumps(one)) < 1000


def test_unknown_split_root_version_and_cache_are_refused(make_tree, tmp_path: Path) -> None:
    root = make_tree()
    index = open_index(root, VERSION, tmp_path / "cache")
    assert index.split("mini_val") == ["scene-0103_0", "scene-0103_1"]
    with pytest.raises(InputError, match="'mini_tset': use one of mini_train, mini_val"):
        index.split("mini_tset")
    with pytest.raises(InputError, match=r"data.root=/nowhere does not exist"):
        open_index("/nowhere", VERSION, tmp_path / "cache")
    with pytest.raises(InputError, match="set data.version=v1.0-mini"):
        open_index(root, "v1.0-trainval", tmp_path / "cache")
    with pytest.raises(InputError, match="lies inside data.root"):
        open_index(root, VERSION, root / "cache")


def test_missing_files_and_report(make_tree, tmp_path: Path) -> None:
    root = make_tree(scenes=(("scene-0061", 2), ("scene-0103", 1)), empty=[("scene-0061", 0)])
    index = open_index(root, VERSION, tmp_path / "cache")
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
    assert report.files["LIDAR_TOP"] == Files(key_frames=3, missing_key_frames=1, sweeps=2)
    assert report.files["CAM_FRONT"] == Files(key_frames=3)
    assert report.files["RADAR_FRONT"] == Files(key_frames=3, sweeps=2)
    assert report.samples_per_split["mini_train"] == 2 and report.corrupt_files == {}
    assert "3 key frames (1 missing), 2 sweeps" in report.to_text()
    assert json.loads(json.dumps(report.to_json()))["files"]["LIDAR_TOP"]["sweeps"] == 2


def test_report_is_the_same_from_several_processes(make_tree, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(build_index, "_SCENES_PER_PART", 1)
    monkeypatch.setattr(report_module, "_LEAST_BATCHES_PER_PROCESS", 1)
    index = open_index(make_tree(), VERSION, tmp_path / "cache")
    assert index.num_batches == 2
    one, two = (make_report(index, ("car",), num_workers=num) for num in (0, 2))
    assert one == two and one.num_samples == 5


def test_processes_that_read_tables_and_files_do_without_torch() -> None:
    modules = ", ".join(
        f"bev_lightning.data.{name}" for name in ("nuscenes.report", "nuscenes.build_index")
    )
    check = f"import sys, {modules}; print('torch' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", check], stdout=subprocess.PIPE, check=True)
    assert run.stdout == b"False\n"


def test_report_names_corrupt_files(make_tree, tmp_path: Path) -> None:
    root = make_tree(scenes=(("scene-0061", 3), ("scene-0103", 2)))
    whole = (root / "samples/CAM_FRONT/scene-0061_1_CAM_FRONT_0.jpg").read_bytes()

    def put(path: str, content: bytes) -> str:
        assert (root / path).is_file()
        (root / path).write_bytes(content)
        return path

    small = io.BytesIO()
    Image.new("RGB", (80, 90)).save(small, "JPEG")
    num = len(whole) // 2
    camera, lidar = "samples/CAM_FRONT/scene-0061", "samples/LIDAR_TOP/scene-0061"
    expected = {
        put(f"{camera}_0_CAM_FRONT_0.jpg", whole[:num]): (
            f"{num} bytes, the end of the JPEG is missing"
        ),
        put(f"{camera}_1_CAM_FRONT_0.jpg", b""): "0 bytes",
        put(f"{camera}_2_CAM_FRONT_0.jpg", b"this is text"): "not an image",
        put("samples/CAM_BACK/scene-0103_0_CAM_BACK_0.jpg", small.getvalue()): (
            "80x90 pixels, but 160x90 in the tables"
        ),
        put(f"{lidar}_0_LIDAR_TOP_0.pcd.bin", b"x" * 4001): "4001 bytes, no multiple of 20",
        put("sweeps/LIDAR_TOP/scene-0061_1_LIDAR_TOP_1.pcd.bin", b""): "0 bytes",
    }
    radar = put("samples/RADAR_FRONT/scene-0061_0_RADAR_FRONT_0.pcd", b"# .PCD v0.7")
    report = make_report(open_index(root, VERSION, tmp_path / "cache"), ("car",))
    assert "is not a whole binary .pcd" in report.corrupt_files.pop(radar)
    assert report.corrupt_files == expected
    assert report.files["CAM_FRONT"] == Files(key_frames=5, corrupt_key_frames=3)
    assert report.files["LIDAR_TOP"].corrupt_sweeps == 1
    assert "5 key frames (3 corrupt)" in report.to_text() and "\n...\n" not in report.to_text()


def test_real_tree(nuscenes_dir: Path, tmp_path: Path) -> None:
    index = open_index(nuscenes_dir, VERSION, tmp_path / "cache")
    assert index.scenes_without_can_bus == ("scene-0003", "scene-0001")
    report = make_report(index, ("car", "pedestrian"))
    assert report.num_boxes == 168 and report.samples_per_split["real_lidar"] == 2
    assert report.files["LIDAR_TOP"] == Files(key_frames=5, missing_key_frames=3)
    assert report.files["CAM_FRONT"] == Files(key_frames=5) and report.corrupt_files == {}
