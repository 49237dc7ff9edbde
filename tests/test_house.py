"""The house rules: style, types, floors, packaging."""

import ast
import configparser
import re
import subprocess
import sys
from pathlib import Path

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
    command = "from importlinter.cli import lint_imports_command as lint; lint()"
    done = subprocess.run(
        [sys.executable, "-c", command, "--no-cache", "--no-logo"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "5 kept, 0 broken" in done.stdout, done.stdout[-6000:] + done.stderr[-2000:]


def test_every_room_is_packaged() -> None:
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    packaged = set(setup["options"]["packages"].split())
    folders = {path.parent.relative_to(ROOT) for path in PACKAGE.rglob("__init__.py")}
    assert packaged == {"bev_lightning.conf"} | {".".join(folder.parts) for folder in folders}


def test_every_third_party_is_required() -> None:
    names = {"PIL": "pillow", "cv2": "opencv-python-headless", "hydra": "hydra-core"}
    names |= {"nuscenes": "nuscenes-devkit", "nvidia": "nvidia-dali-cuda130"}
    required = set(re.findall(r"^([a-z0-9-]+)==", (ROOT / "requirements.txt").read_text(), re.M))
    # Brought by one that is required, and useless without it.
    required |= {"pyquaternion", "triton"}
    required.add("spconv")  # used where a user has installed it
    for path in PACKAGE.rglob("*.py"):
        for module in imported(path):
            known = module in sys.stdlib_module_names or module == "bev_lightning"
            assert known or names.get(module, module) in required, (path, module)


def imported(path: Path) -> set[str]:
    modules: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            modules |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            modules.add(node.module.partition(".")[0])
    return modules


def test_requirements_are_pinned() -> None:
    lines = (ROOT / "requirements.txt").read_text().splitlines()
    for line in lines:
        assert line.startswith("#") or re.match(r"^[a-z0-9-]+==[0-9.]+(; .*)?$", line), line


def test_files_are_finished() -> None:
    for path in PACKAGE.rglob("*.py"):
        text = path.read_text()
        assert not re.search(r"TODO|FIXME|XXX", text), path
