"""The house rules: style, types, floors, packaging."""

import configparser
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "bev_lightning"


def run(*command: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout[-6000:]}{done.stderr[-2000:]}"


def test_ruff() -> None:
    run("ruff", "check", "--no-cache", "--output-format=concise", "bev_lightning", "tests")


def test_mypy() -> None:
    run("mypy")


def test_floors() -> None:
    run("importlinter.cli", "lint", "--no-cache")


def test_every_room_is_packaged() -> None:
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    packaged = set(setup["options"]["packages"].split())
    rooms = {f"bev_lightning.{path.parent.name}" for path in PACKAGE.glob("*/__init__.py")}
    assert packaged == {"bev_lightning", "bev_lightning.conf"} | rooms


def test_every_third_party_is_required() -> None:
    names = {"PIL": "pillow", "cv2": "opencv-python-headless", "hydra": "hydra-core"}
    names |= {"nuscenes": "nuscenes-devkit", "nvidia": "nvidia-dali-cuda130"}
    required = set(re.findall(r"^([a-z0-9-]+)==", (ROOT / "requirements.txt").read_text(), re.M))
    # Brought by one that is required, and useless without it.
    required |= {"pyquaternion"}
    for path in PACKAGE.rglob("*.py"):
        for module in re.findall(r"^\s*(?:from|import) (\w+)", path.read_text(), re.M):
            known = module in sys.stdlib_module_names or module == "bev_lightning"
            assert known or names.get(module, module) in required, (path, module)


def test_requirements_are_pinned() -> None:
    lines = (ROOT / "requirements.txt").read_text().splitlines()
    for line in lines:
        assert line.startswith("#") or re.match(r"^[a-z0-9-]+==[0-9.]+(; .*)?$", line), line


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: path.stem)
def test_files_stay_short(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 400
    assert "TODO" not in path.read_text()
