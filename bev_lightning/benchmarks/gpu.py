"""``bench=gpu``: tests and benchmarks of a GPU in a few minutes, a process each."""

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
    """Run the tests marked ``gpu``, bench=ops, and bench=step of each model in each variant.

    The notes report what failed; its output is in the run directory. After ``limit_s`` nothing new
    starts, and the running process is stopped.

    Arguments: see ``conf/bench/gpu.yaml``.

    Raises:
        InputError: there is no CUDA device.
    """
    if not torch.cuda.is_available():
        raise InputError(
            "bench=gpu measures a CUDA GPU and torch finds none; run it on a machine with a GPU"
        )
    deadline, run = time.monotonic() + limit_s, Path(cfg.paths.run).resolve()
    notes, rows = _run_tests(run, deadline), []
    common = ["hardware.devices=1", f"data.batch_size={batch_size}", f"bench.repeats={repeats}"]
    cases = [
        [f"model={model}", *variant.split(), "bench=step", *common]
        for variant in variants
        for model in models
    ]
    if (config_dir() / "bench" / "ops.yaml").is_file():
        cases.insert(0, ["bench=ops"])
    for number, case in enumerate(track(cases, "measuring", unit="job")):
        name = " ".join(item for item in case if item not in ("bench=step", *common))
        folder = run / f"{number}"
        folder.mkdir()
        run_dir = f'hydra.run.dir="{folder}"'
        error = _call(["bev_lightning.bench", *case, run_dir], folder / "output.txt", deadline)
        if error is not None:
            notes.append(f"{name}: {error}.")
            continue
        for row in json.loads((folder / "bench.json").read_text())["rows"]:
            group = " ".join(filter(None, [name, row.pop("group")]))
            known = {key: row.pop(key) for key in ("ms", "cpu_ms", "samples_per_s", "peak_mib")}
            rows.append(Row(row.pop("name"), group, ratio=row.pop("ratio"), **known, more=row))
    return rows, notes


def _run_tests(run: Path, deadline: float) -> list[str]:
    """Run the test files that contain tests marked ``gpu``; their results in a note."""
    paths = (_ROOT / "tests").rglob("*.py")
    files = [str(path) for path in paths if "mark.gpu" in path.read_text(encoding="utf-8")]
    options = ["-o", "addopts=--import-mode=importlib", "--continue-on-collection-errors"]
    report = run / "tests.xml"
    command = ["pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", *options]
    error = _call([*command, f"--junitxml={report}", *files], run / "tests.txt", deadline)
    if not report.is_file():
        return [f"tests: {error}."]
    suite = ElementTree.parse(report).getroot()
    cases = list(suite.iter("testcase"))
    broken = [c for c in cases if c.find("failure") is not None or c.find("error") is not None]
    skipped = [case for case in cases if case.find("skipped") is not None]
    passed = len(cases) - len(broken) - len(skipped)
    names = [f"{c.get('classname', '')}.{c.get('name')}".strip(".") for c in broken]
    tail = f": {', '.join(names)}" if names else ""
    return [f"tests: {passed} passed, {len(skipped)} skipped, {len(broken)} failed{tail}."]


def _call(command: Sequence[str], output: Path, deadline: float) -> str | None:
    """Run ``python -m`` with a command; returns an error message, or None on success."""
    left = deadline - time.monotonic()
    if left < 5:
        return "not started, the time limit was reached"
    with output.open("w") as file:
        try:
            code = subprocess.run(
                [sys.executable, "-m", *command],
                cwd=_ROOT,
                stdout=file,
                stderr=subprocess.STDOUT,
                timeout=left,
                check=False,
            ).returncode
        except subprocess.TimeoutExpired:
            return "stopped at the time limit"
    if code == 0:
        return None
    lines = [line for line in output.read_text().splitlines() if line.strip()]
    return lines[-1].rstrip(".") if lines else f"exit code {code}"
