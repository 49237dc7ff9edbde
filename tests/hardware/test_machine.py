"""Detection of the machine, loader workers and threads."""

import pytest

from bev_lightning.hardware.machine import (
    Machine,
    choose_num_threads,
    choose_num_workers,
    detect_machine,
)


def test_workers_leave_a_core_to_training() -> None:
    assert choose_num_workers(32, 4, on_cuda=True) == 7
    assert choose_num_workers(128, 1, on_cuda=True) == 8
    assert choose_num_workers(2, 4, on_cuda=True) == 1
    assert choose_num_workers(2, 1, on_cuda=False) == 1
    assert choose_num_workers(16, 2, on_cuda=False) == 2


def test_this_machine_is_detected() -> None:
    machine = detect_machine()
    assert machine.num_cpus >= 1
    assert (machine.card is None) == (machine.num_cuda_devices == 0)
    assert set(machine.to_dict()) >= {"num_cuda_devices", "card", "memory_gib", "capability"}


def test_machine_as_text() -> None:
    assert str(Machine(num_cpus=2)) == "2 CPU cores, no CUDA device"
    assert str(Machine(4, "RTX 3090", 23.6, 8.6, 32)) == "4 x RTX 3090 (24 GiB), 32 CPU cores"


@pytest.mark.parametrize(
    ("cpus", "processes", "workers", "threads"),
    [(2, 1, 1, 2), (2, 1, 0, 2), (16, 1, 4, 14), (8, 2, 1, 4), (2, 4, 1, 1)],
)
def test_threads_leave_some_cores_to_the_loader(
    cpus: int, processes: int, workers: int, threads: int
) -> None:
    assert choose_num_threads(cpus, processes, workers) == threads
