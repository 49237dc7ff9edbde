"""Conventions of the source: style, types, layers, packaging, plain language."""

import ast
import configparser
import re
import subprocess
import sys
import tokenize
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "bev_lightning"
MAX_ERROR_LENGTH = 35
# Parts of identifiers for which engineers have standard terms.
PRIVATE_TERMS = {
    "place",
    "places",
    "told",
    "says",
    "said",
    "word",
    "words",
    "parcel",
    "straighten",
    "rung",
    "mend",
    "anew",
}


def run(*command: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout[-6000:]}{done.stderr[-2000:]}"


def test_ruff() -> None:
    run("ruff", "check", "--no-cache", "--output-format=concise", "bev_lightning", "tests")


def test_mypy() -> None:
    run("mypy")


def test_layers() -> None:
    command = "from importlinter.cli import lint_imports_command as lint; lint()"
    done = subprocess.run(
        [sys.executable, "-c", command, "--no-cache", "--no-logo"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "5 kept, 0 broken" in done.stdout, done.stdout[-6000:] + done.stderr[-2000:]


def test_every_package_is_installed() -> None:
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    packaged = set(setup["options"]["packages"].split())
    folders = {path.parent.relative_to(ROOT) for path in PACKAGE.rglob("__init__.py")}
    assert packaged == {"bev_lightning.conf"} | {".".join(folder.parts) for folder in folders}


def test_every_imported_distribution_is_required() -> None:
    names = {"PIL": "pillow", "cv2": "opencv-python-headless", "hydra": "hydra-core"}
    names |= {"nuscenes": "nuscenes-devkit", "nvidia": "nvidia-dali-cuda130"}
    required = set(re.findall(r"^([a-z0-9-]+)==", (ROOT / "requirements.txt").read_text(), re.M))
    # Installed with a required one, and useless without it.
    required |= {"pyquaternion", "triton"}
    required.add("spconv")  # optional
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


def test_no_unfinished_marks() -> None:
    for path in PACKAGE.rglob("*.py"):
        text = path.read_text()
        assert not re.search(r"TODO|FIXME|XXX", text), path


def test_error_sentences_are_short() -> None:
    """A placeholder in a sentence counts as one."""
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or not node.args:
                continue
            sentence = literal_text(node.args[0])
            if ast.unparse(node.func).endswith("InputError") and sentence is not None:
                assert len(sentence.split()) <= MAX_ERROR_LENGTH, (
                    f"{path}:{node.lineno}: {sentence}"
                )


def literal_text(node: ast.expr) -> str | None:
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        parts = (str(p.value) if isinstance(p, ast.Constant) else "X" for p in node.values)
        return "".join(parts)
    return None


def test_identifiers_use_standard_terms() -> None:
    for path in PACKAGE.rglob("*.py"):
        with tokenize.open(path) as file:
            names = [t for t in tokenize.generate_tokens(file.readline) if t.type == tokenize.NAME]
        for token in names:
            parts = re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", token.string)
            found = PRIVATE_TERMS & {part.lower() for part in parts}
            assert not found, f"{path}:{token.start[0]}: {token.string}"
