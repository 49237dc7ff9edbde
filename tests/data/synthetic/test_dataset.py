"""The generator as a whole: spec, marker, atomicity, determinism."""

import hashlib
import json
import logging
import os
from dataclasses import replace
from pathlib import Path

import pytest

from bev_lightning.data.synthetic import dataset as synthetic
from bev_lightning.data.synthetic.dataset import MARKER, SyntheticSpec, generate
from bev_lightning.errors import InputError

SPEC = SyntheticSpec(
    version="v1.0-mini",
    num_train_scenes=1,
    num_val_scenes=1,
    frames_per_scene=2,
    seed=3,
    image_size=(36, 64),
    num_beams=8,
    num_azimuths=60,
    sweeps_per_frame=1,
    objects_per_scene=20,
)


def hash_tree(root: Path) -> dict[str, str]:
    files = sorted(path for path in root.rglob("*") if path.is_file())
    return {
        str(path.relative_to(root)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files
    }


def test_bytes_do_not_depend_on_the_number_of_workers(tmp_path: Path) -> None:
    generate(tmp_path / "one", SPEC, num_workers=1)
    generate(tmp_path / "two", SPEC, num_workers=2)
    one, two = hash_tree(tmp_path / "one"), hash_tree(tmp_path / "two")
    # 2 scenes x 2 frames x (12 samples + 6 sweeps), 13 tables, 2 can_bus files, a map, the marker.
    assert len(one) == 2 * 2 * 18 + 13 + 2 + 1 + 1
    assert one == two


def test_a_scene_does_not_depend_on_its_neighbours(tmp_path: Path) -> None:
    generate(tmp_path / "both", SPEC, num_workers=1)
    generate(tmp_path / "val", replace(SPEC, num_train_scenes=0), num_workers=1)
    both, val = hash_tree(tmp_path / "both"), hash_tree(tmp_path / "val")
    shared = [name for name in val if name.startswith(("samples/", "sweeps/", "can_bus/"))]
    assert len(shared) == 2 * 18 + 1
    assert all(both[name] == val[name] for name in shared)
    generate(tmp_path / "seed", replace(SPEC, num_train_scenes=0, seed=4), num_workers=1)
    other = hash_tree(tmp_path / "seed")
    images = [name for name in shared if name.endswith(".jpg")]
    assert all(other[name] != val[name] for name in images)


def test_the_same_spec_returns_at_once_and_another_is_regenerated(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = tmp_path / "data" / "set"
    spec = replace(SPEC, num_train_scenes=0)
    generate(root, spec, num_workers=1)
    stamp = (root / MARKER).stat().st_mtime_ns
    generate(root, spec, num_workers=1)
    assert (root / MARKER).stat().st_mtime_ns == stamp
    with caplog.at_level(logging.WARNING):
        generate(root, replace(spec, seed=9), num_workers=1)
    assert "regenerating it" in caplog.text
    assert json.loads((root / MARKER).read_text())["spec"]["seed"] == 9
    assert sorted(os.listdir(root.parent)) == [".set.lock", "set"]


def test_a_foreign_folder_is_kept(tmp_path: Path) -> None:
    (tmp_path / "photo.jpg").write_bytes(b"mine")
    with pytest.raises(InputError, match=r"is not synthetic data.*choose another"):
        generate(tmp_path, SPEC)
    assert os.listdir(tmp_path) == ["photo.jpg"]
    with pytest.raises(InputError, match="is not synthetic data"):
        generate(tmp_path / "photo.jpg", SPEC)


def test_a_run_that_dies_leaves_nothing_that_passes_for_a_data_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, spec = tmp_path / "set", replace(SPEC, num_train_scenes=0)

    def die(*job: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(synthetic, "write_scene", die)
        with pytest.raises(KeyboardInterrupt):
            generate(root, spec, num_workers=1)
    assert not root.exists()
    assert (tmp_path / ".set.partial").exists()
    root.mkdir()  # an empty folder is no obstacle
    generate(root, spec, num_workers=1)
    assert (root / MARKER).exists()
    assert not (tmp_path / ".set.partial").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": "v1.0-test"}, "v1.0-trainval or v1.0-mini"),
        ({"num_train_scenes": 9}, "num_train_scenes=9"),
        ({"num_train_scenes": 0, "num_val_scenes": 0}, "has 0 scenes"),
        ({"image_size": (4, 64)}, "8 pixels"),
        ({"objects_per_scene": 1000}, "choose 10 to 200"),
    ],
)
def test_a_wrong_spec_is_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        replace(SPEC, **change)  # type: ignore[arg-type]


def test_a_list_from_a_config_serves_as_image_size() -> None:
    spec = replace(SPEC, image_size=[36, 64])  # type: ignore[arg-type]
    assert spec == SPEC
    assert spec.scenes == ("scene-0061", "scene-0103")
