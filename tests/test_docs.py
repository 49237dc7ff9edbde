"""The documentation builds without warnings, and its commands compose."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from bev_lightning.config.compose import compose_jobs

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FLAGS = ("-m", "--multirun", "--help", "--cfg", "job")


def _commands() -> list[tuple[str, str]]:
    """Every ``python -m bev_lightning.VERB ...`` in a code block of a page."""
    found = []
    for page in PAGES:
        for block in re.findall(r"^ *```bash\n(.*?)^ *```", page.read_text(), re.S | re.M):
            for line in block.replace("\\\n", " ").splitlines():
                if match := re.search(r"-m (bev_lightning\.\w+.*)", line):
                    found.append((str(page.relative_to(ROOT)), match[1]))
    return found


@pytest.mark.parametrize(("page", "command"), _commands())
def test_commands_compose(page: str, command: str) -> None:
    program, *words = shlex.split(command, comments=True)
    verb = program.removeprefix("bev_lightning.")
    extra = None
    if "--config-dir" in words:
        at = words.index("--config-dir")
        extra = str(ROOT / words[at + 1])
        del words[at : at + 2]
    # The launcher for SLURM comes with an optional package.
    overrides = [w for w in words if w not in FLAGS and not re.match(r"hydra[./]launcher", w)]
    _, jobs = compose_jobs(verb, overrides, "-m" in words, extra)
    assert jobs and jobs[0].cfg.verb == verb


def test_site_builds_without_warnings(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "-d", str(tmp_path)]
    quiet = {"NO_MKDOCS_2_WARNING": "1", "DISABLE_MKDOCS_2_WARNING": "true"}
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | quiet, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    home = (tmp_path / "index.html").read_text()
    assert "fonts.googleapis" not in home and "detections.jpg" in home
    assert "zero_copy" in (tmp_path / "config" / "loader" / "index.html").read_text()
    assert "bev_lightning.runtime.api.load" in (tmp_path / "reference/api/index.html").read_text()


def test_readme_links_exist() -> None:
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", (ROOT / "README.md").read_text()):
        assert target.startswith("http") or (ROOT / target).exists(), target
