"""``bench=gpu``: all that can be said of a card in a few minutes, each part in its own process."""

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

import torch
from omegaconf import DictConfig

from bev_lightning.benchmarks.report import Row
from bev_lightning.config.compose import config_dir
from bev_lightning.errors import InputError
from bev_lightning.progress import track

_ROOT = Path(__file__).resolve().parents[2]


def check_gpu(
    cfg: DictConfig,
    models: Sequence[str],
    variants: Sequence[str],
    batch_size: int,
    repeats: int,
    limit_s: float,
) -> tuple[list[Row], list[str]]:
    """The tests marked ``gpu``, bench=ops, and bench=step of each model in each variant.

    What does not run is told in the notes, and its output lies in the run directory. Nothing new
    begins after ``limit_s``, and what runs then is stopped.

    Raises:
        InputError: there is no CUDA device.
    """
    if not torch.cuda.is_available():
        raise InputError(
            "bench=gpu measures a CUDA card and torch finds none; run it on a machine with one"
        )
    end, run = time.monotonic() + limit_s, Path(cfg.paths.run).resolve()
    notes, rows = _test(run, end), []
    words = ["hardware.devices=1", f"data.batch_size={batch_size}", f"bench.repeats={repeats}"]
    cases = [
        [f"model={model}", *variant.split(), "bench=step", *words]
        for variant in variants
        for model in models
    ]
    if (config_dir() / "bench" / "ops.yaml").is_file():
        cases.insert(0, ["bench=ops"])
    for number, case in enumerate(track(cases, "measuring", unit="job")):
        name = " ".join(word for word in case if word not in ("bench=step", *words))
        folder = run / f"{number}"
        folder.mkdir()
        place = f'hydra.run.dir="{folder}"'
        said = _call(["bev_lightning.bench", *case, place], folder / "output.txt", end)
        if said is not None:
            notes.append(f"{name}: {said}.")
            continue
        for row in json.loads((folder / "bench.json").read_text())["rows"]:
            group = " ".join(filter(None, [name, row.pop("group")]))
            known = {key: row.pop(key) for key in ("ms", "cpu_ms", "samples_per_s", "peak_mib")}
            rows.append(Row(row.pop("name"), group, ratio=row.pop("ratio"), **known, more=row))
    return rows, notes


def _test(run: Path, end: float) -> list[str]:
    """What the tests for a GPU say: those files that hold one, as far as they can be read here."""
    paths = (_ROOT / "tests").rglob("*.py")
    files = [str(path) for path in paths if "mark.gpu" in path.read_text(encoding="utf-8")]
    options = ["-o", "addopts=--import-mode=importlib", "--continue-on-collection-errors"]
    report = run / "tests.xml"
    words = [
        "pytest",
        "-q",
        "-m",
        "gpu",
        "-p",
        "no:cacheprovider",
        *options,
        f"--junitxml={report}",
    ]
    said = _call([*words, *files], run / "tests.txt", end)
    if not report.is_file():
        return [f"tests: {said}."]
    suite = ElementTree.parse(report).getroot()
    cases = list(suite.iter("testcase"))
    broken = [c for c in cases if c.find("failure") is not None or c.find("error") is not None]
    skipped = [case for case in cases if case.find("skipped") is not None]
    passed = len(cases) - len(broken) - len(skipped)
    names = [f"{c.get('classname', '')}.{c.get('name')}".strip(".") for c in broken]
    tail = f": {', '.join(names)}" if names else ""
    return [f"tests: {passed} passed, {len(skipped)} skipped, {len(broken)} failed{tail}."]


def _call(words: Sequence[str], output: Path, end: float) -> str | None:
    """Run a module until it is done; what went wrong, None where nothing did."""
    left = end - time.monotonic()
    if left < 5:
        return "not begun, the time was over"
    with output.open("w") as file:
        try:
            code = subprocess.run(
                [sys.executable, "-m", *words],
                cwd=_ROOT,
                stdout=file,
                stderr=subprocess.STDOUT,
                timeout=left,
                check=False,
            ).returncode
        except subprocess.TimeoutExpired:
            return "stopped, the time was over"
    if code == 0:
        return None
    lines = [line for line in output.read_text().splitlines() if line.strip()]
    return lines[-1].rstrip(".") if lines else f"exit code {code}"
