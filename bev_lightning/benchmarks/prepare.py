"""``bench=prepare``: builds an index of nuScenes tables, against loading them with the devkit."""

import contextlib
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from bev_lightning.benchmarks.random_tables import (
    TRAINVAL_SAMPLES,
    TRAINVAL_SCENES,
    VERSION,
    write_tables,
)
from bev_lightning.benchmarks.report import Row, with_ratios
from bev_lightning.errors import InputError

_PREAMBLE = """
import json, resource, sys, time
def usage():
    own = resource.getrusage(resource.RUSAGE_SELF)
    theirs = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = own.ru_utime + own.ru_stime + theirs.ru_utime + theirs.ru_stime
    return {"cpu_s": cpu, "own_mib": own.ru_maxrss / 1024}
root, version, cache, number = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])
began = time.perf_counter()
"""
_CONVERT = """
from bev_lightning.data.nuscenes.index import open_index
index = open_index(root, version, cache, number)
print(json.dumps({"s": time.perf_counter() - began, "path": str(index.path), **usage()}))
"""
_OPEN = """
from pathlib import Path
from bev_lightning.data.nuscenes.index import Index
began, cpu = time.perf_counter(), time.process_time()
index = Index(Path(cache), Path(root))
opened, opened_cpu = time.perf_counter(), time.process_time()
for token in index.tokens[:number]:
    index.sample(token)
print(json.dumps({
    "open_s": opened - began, "open_cpu_s": opened_cpu - cpu,
    "sample_s": (time.perf_counter() - opened) / number,
    "sample_cpu_s": (time.process_time() - opened_cpu) / number, **usage(),
}))
"""
# The calls of published converters: boxes and cameras, previous sweeps, velocities.
_DEVKIT = """
from nuscenes import NuScenes
imported, base = time.perf_counter(), usage()
devkit = NuScenes(version, root, verbose=False)
loaded, load_cpu = time.perf_counter(), usage()["cpu_s"]
for sample in devkit.sample[:number]:
    for channel, token in sample["data"].items():
        if not channel.startswith("RADAR"):
            devkit.get_sample_data(token)
        record = devkit.get("sample_data", token)
        for _ in range(0 if channel.startswith("CAM") else 10):
            if not record["prev"]:
                break
            record = devkit.get("sample_data", record["prev"])
            devkit.get("ego_pose", record["ego_pose_token"])
            devkit.get("calibrated_sensor", record["calibrated_sensor_token"])
    for token in sample["anns"]:
        devkit.box_velocity(token)
done = usage()
print(json.dumps({
    "import_s": imported - began, "import_cpu_s": base["cpu_s"],
    "load_s": loaded - imported, "load_cpu_s": load_cpu - base["cpu_s"],
    "loop_s": time.perf_counter() - loaded, "loop_cpu_s": done["cpu_s"] - load_cpu,
    "import_mib": base["own_mib"], "load_mib": done["own_mib"] - base["own_mib"],
}))
"""


def measure_prepare(
    cfg: DictConfig, scale: float, num_workers: int, devkit_scale: float, devkit_samples: int
) -> tuple[list[Row], list[str]]:
    """Write random tables, build their index, and read a part of them with the devkit.

    Arguments: see ``conf/bench/prepare.yaml``.
    """
    from nuscenes.utils.splits import train, val

    names = sorted([*train, *val])
    with tempfile.TemporaryDirectory(dir=cfg.paths.run) as folder:
        root, cache = Path(folder) / "tables", Path(folder) / "cache"
        counts = _make(root, names, scale)
        ours = _measure(_CONVERT, root, cache, num_workers)
        index = Path(ours["path"])
        opened = _measure(_OPEN, root, index, min(200, counts["sample"]))
        index_mib = index.stat().st_size / 2**20
        part, num = root, counts["sample"]
        if devkit_scale < scale:
            part = Path(folder) / "part"
            num = _make(part, names, devkit_scale)["sample"]
        looped = min(devkit_samples, num)
        devkit = _measure(_DEVKIT, part, cache, looped)
    larger, longer = counts["sample"] / num, counts["sample"] / looped
    load_ms = 1e3 * (devkit["import_s"] + devkit["load_s"] * larger)
    load_cpu_ms = 1e3 * (devkit["import_cpu_s"] + devkit["load_cpu_s"] * larger)
    peak_mib = devkit["import_mib"] + devkit["load_mib"] * larger
    both_ms = load_ms + 1e3 * devkit["loop_s"] * longer
    both_cpu_ms = load_cpu_ms + 1e3 * devkit["loop_cpu_s"] * longer
    rows = [
        Row("devkit: load and loop", "convert", both_ms, both_cpu_ms, peak_mib=peak_mib),
        Row("devkit: load alone", "convert", load_ms, load_cpu_ms, peak_mib=peak_mib),
        Row(
            f"index, {num_workers} processes",
            "convert",
            ms=1e3 * ours["s"],
            cpu_ms=1e3 * ours["cpu_s"],
            peak_mib=ours["own_mib"] + ours["workers_mib"],
            more={"index_mib": index_mib},
        ),
        Row("open the index", "read", 1e3 * opened["open_s"], 1e3 * opened["open_cpu_s"]),
        Row("decode a sample", "read", 1e3 * opened["sample_s"], 1e3 * opened["sample_cpu_s"]),
    ]
    rows = with_ratios(rows[:3]) + rows[3:]
    made = ", ".join(f"{num} {table}" for table, num in counts.items())
    tables = (
        f"Random tables (scale={scale:g}): {made}; no sensor files. Each row is a fresh process "
        f"including its imports."
    )
    scaled = (
        f"The devkit loaded tables of {num} samples and looped over {looped} of them: load time "
        f"and memory are scaled by {larger:.3g}, loop time by {longer:.3g}, imports not at all."
    )
    peak = (
        "peak_mib of the index: peak of the main process plus the largest sum of the peaks of "
        "workers alive at the same time, including mapped file pages."
    )
    return rows, [tables, scaled, peak]


def _make(root: Path, names: list[str], scale: float) -> dict[str, int]:
    num_scenes = min(len(names), max(1, round(TRAINVAL_SCENES * scale)))
    return write_tables(root, names[:num_scenes], max(1, round(TRAINVAL_SAMPLES * scale)))


def _measure(script: str, *arguments: object) -> dict[str, Any]:
    """Run a script in a fresh process: the JSON of its last line, and its workers' memory."""
    root, cache, number = arguments
    command = [sys.executable, "-c", _PREAMBLE + script]
    command += [str(root), VERSION, str(cache), str(number)]
    workers_mib = 0.0
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        # getrusage reports only the largest child, and includes memory from before an exec. So sum
        # the peak of each worker.
        while process.poll() is None:
            workers_mib = max(workers_mib, sum(_worker_peaks(process.pid)))
            time.sleep(0.1)
        assert process.stdout is not None
        output = process.stdout.read()
    if process.returncode:
        raise InputError(
            f"a measured process ended with exit code {process.returncode}; see its error above"
        )
    result: dict[str, Any] = json.loads(output.splitlines()[-1])
    return {**result, "workers_mib": workers_mib}


def _worker_peaks(parent: int) -> list[float]:
    """Peak resident memory of each living multiprocessing worker [MiB]; empty without /proc."""
    peaks = []
    for task in Path(f"/proc/{parent}/task").glob("*/children"):
        with contextlib.suppress(OSError, IndexError):  # it may end at any time
            for child in task.read_text().split():
                if b"multiprocessing" in Path(f"/proc/{child}/cmdline").read_bytes():
                    status = Path(f"/proc/{child}/status").read_text()
                    peaks.append(int(status.split("VmHWM:")[1].split()[0]) / 1024)
    return peaks
