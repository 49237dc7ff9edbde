"""Trainings in several processes, and one process on the same samples as their reference."""

import multiprocessing
import runpy
import socket
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

WORKER = Path(__file__).parent / "parallel_worker.py"
PRELOADED = ["torch", "lightning", "bev_lightning.runtime.build", "bev_lightning.config.program"]
# Longer than a rendezvous needs on a busy machine.
TIMEOUT_S = 400.0

Launch = Callable[..., dict[str, Any]]


@pytest.fixture(scope="session")
def launch(tmp_path_factory: pytest.TempPathFactory) -> Launch:
    """Train ``model`` in as many processes as ``replica`` has entries; see ``parallel_worker.run``
    for the rest. Returns what process 0 saw."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)

    def start(model: str, overrides: list[str], replica: list[int], **more: Any) -> dict[str, Any]:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        out = tmp_path_factory.mktemp("training") / "seen.pt"
        job = {
            "model": model,
            "overrides": overrides,
            "replica": replica,
            "port": port,
            "out": str(out),
        }
        job |= {"replicas": max(replica) + 1, "batch": 1, "steps": 4, "accumulation": 2}
        job |= {"optimizer": "sgd", **more}
        processes = [
            context.Process(target=runpy.run_path, args=(str(WORKER), {"job": job, "rank": rank}))
            for rank in range(len(replica))
        ]
        for process in processes:
            process.start()
        end = time.monotonic() + TIMEOUT_S
        try:
            while any(process.is_alive() for process in processes):
                failed = any(process.exitcode for process in processes)
                if failed or time.monotonic() > end:
                    break
                time.sleep(0.1)
        finally:
            time.sleep(0.5)  # time for the others to fail after the first one
            for process in processes:
                if process.is_alive():
                    process.kill()
                process.join()
        logs = [Path(f"{out}.{rank}.log").read_text()[-1500:] for rank in range(len(processes))]
        assert [process.exitcode for process in processes] == [0] * len(processes), logs
        seen: dict[str, Any] = torch.load(out, weights_only=True)
        ranks = range(len(processes))
        seen["kept"] = [int(Path(f"{out}.{rank}.kept").read_text()) for rank in ranks]
        return seen

    return start


@pytest.fixture(scope="session")
def reference(launch: Launch) -> Launch:
    """One process that takes the micro-batches of all replicas one after the other."""

    @cache
    def start(model: str, num_micro: int, optimizer: str = "sgd") -> dict[str, Any]:
        overrides = ["strategy=single", *CLIP, *CONSTANT]
        return launch(model, overrides, [0], accumulation=num_micro, optimizer=optimizer)

    return start


# Far below the norm of the gradients of these models, and a rate that knows nothing of the length.
CLIP = ["trainer.gradient_clip_val=0.5"]
CONSTANT = ["scheduler=constant"]


@pytest.fixture(scope="session")
def deviation() -> Callable[[dict[str, Any], dict[str, Any]], float]:
    """Largest difference of two trainings, of gradients as a share of the largest gradient of the
    step, and of weights."""

    def compare(one: dict[str, Any], other: dict[str, Any]) -> float:
        worst = 0.0
        for own, theirs in zip(one["gradients"], other["gradients"], strict=True):
            assert own.keys() == theirs.keys()
            largest = max(float(value.abs().max()) for value in own.values())
            assert largest > 0
            for name, value in own.items():
                worst = max(worst, float((value - theirs[name]).abs().max()) / largest)
        for name, value in one["weights"].items():
            difference = value.float() - other["weights"][name].float()
            worst = max(worst, float(difference.abs().max()))
        return worst

    return compare
