"""bench=gpu: without optional packages, without a GPU, and with faked results."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from helpers import run_directory, run_verb

from bev_lightning.benchmarks import gpu
from bev_lightning.config.compose import load_config
from bev_lightning.config.resolve import resolve
from bev_lightning.hardware.machine import Machine

ROOT = Path(__file__).resolve().parent.parent.parent
# As if these were not installed.
ABSENT = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("nuscenes", "pyquaternion") or name == "nvidia.dali":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
"""
TINY = [
    "model=bevfusion_lidar_toy",
    "bench.repeats=1",
    "model.inputs.lidar.max_points=2000",
    "model.network.lidar.out_channels=8",
    "model.network.backbone={in_channels:8,out_channels:[8,8,8],layer_nums:[1,1,1]}",
    "model.network.neck={in_channels:[8,8,8],out_channels:[8,8,8]}",
    "model.network.head={in_channels:24,channels:8,num_boxes:20}",
]


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "sitecustomize.py").write_text(ABSENT)
    return os.environ | {
        "PYTHON": sys.executable,
        "PYTHONPATH": f"{tmp_path}:{ROOT}",
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
    }


def test_a_step_needs_neither_devkit_nor_dali(tmp_path: Path, environment: dict[str, str]) -> None:
    overrides = ["bench=step", "hardware=cpu", *TINY]
    done = run_verb(tmp_path, "bench", *overrides, **environment)
    run = run_directory(tmp_path, done)
    assert {"bench.json", "bench.md", "bench.png"} <= {path.name for path in run.iterdir()}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_script_refuses_without_a_gpu(tmp_path: Path, environment: dict[str, str]) -> None:
    done = subprocess.run(
        ["bash", str(ROOT / "scripts/gpu_check.sh")],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2 and not (tmp_path / "gpu_check.json").exists()
    (line,) = done.stderr.strip().splitlines()
    assert line == (
        "bev_lightning.bench: bench=gpu measures a CUDA GPU and torch finds none; run it on a "
        "machine with a GPU"
    )


def test_failures_are_reported(tmp_path: Path) -> None:
    output, end = tmp_path / "output.txt", time.monotonic() + 60
    assert gpu._call(["platform"], output, end) is None and output.read_text()
    assert gpu._call(["no_such_module"], output, end).endswith("No module named no_such_module")
    assert (
        gpu._call(["platform"], output, time.monotonic())
        == "not started, the time limit was reached"
    )
    slow = ["timeit", "-n1", "-r1", "import time; time.sleep(60)"]
    assert gpu._call(slow, output, time.monotonic() + 5.2) == "stopped at the time limit"


def test_the_tests_for_a_gpu_are_found_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "tests"
    folder.mkdir()
    marked = "import pytest\n@pytest.mark.gpu\ndef test_{}(): {}\n"
    (folder / "test_a.py").write_text(
        marked.format("good", "pass")
        + marked.format("bad", "assert 0")
        + marked.format("skipped", "pytest.skip()")
        + "def test_other(): assert 0\n"
    )
    (folder / "test_b.py").write_text("import no_such_module\n" + marked.format("b", "pass"))
    (folder / "test_c.py").write_text("import no_such_module\n")
    monkeypatch.setattr(gpu, "_ROOT", tmp_path)
    (note,) = gpu._run_tests(tmp_path, time.monotonic() + 300)
    assert note.startswith("tests: 1 passed, 1 skipped, 2 failed: ")
    assert "test_bad" in note and "test_b" in note and "test_c" not in note


def test_rows_of_all_cases_become_one_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = {"name": "fast", "group": "step", "ms": 2.0, "cpu_ms": None, "samples_per_s": 500.0}
    row |= {"peak_mib": 3.0, "ratio": 2.5, "mfu": 0.25}
    called = []

    def call(command: list[str], output: Path, deadline: float) -> str | None:
        called.append(command)
        if "precision=fp8" in command:
            return "precision=fp8 is not available"
        (output.parent / "bench.json").write_text(json.dumps({"rows": [row]}))
        return None

    monkeypatch.setattr(gpu, "_call", call)
    monkeypatch.setattr(gpu, "_run_tests", lambda run, deadline: ["tests: 1 passed."])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    cfg = resolve(load_config("bench", ["bench=gpu", "hardware=cpu"]), Machine(), tmp_path)
    variants = ["precision=32 seed=2", "precision=fp8"]
    rows, notes = gpu.check_gpu(cfg, ["bevfusion"], variants, 2, 3, 60.0)
    steps = [one for one in rows if "model=bevfusion" in one.group]
    assert [(one.group, one.name, one.ratio) for one in steps] == [
        ("model=bevfusion precision=32 seed=2 step", "fast", 2.5)
    ]
    assert steps[0].more == {"mfu": 0.25} and steps[0].samples_per_s == 500.0
    assert notes == [
        "tests: 1 passed.",
        "model=bevfusion precision=fp8: precision=fp8 is not available.",
    ]
    assert ["data.batch_size=2", "bench.repeats=3"] == called[-1][-3:-1]
