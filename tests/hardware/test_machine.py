"""The machine and the batch."""

import pytest

from bev_lightning.hardware.machine import (
    BatchPlan,
    Machine,
    choose_num_threads,
    choose_num_workers,
    detect_machine,
)


def test_batch_arithmetic() -> None:
    plan = BatchPlan(num_processes=4, batch_size=2, accumulation=8)
    assert plan.effective_batch == 64
    assert str(plan) == "64 samples per optimizer step = 4 processes x 2 x 8 accumulated"


def test_the_learning_rate_follows_the_batch() -> None:
    plan = BatchPlan(num_processes=4, batch_size=1, accumulation=4)
    assert plan.scale_lr(2e-4, None, 8) == plan.scale_lr(2e-4, "linear", None) == 2e-4
    assert plan.scale_lr(2e-4, "linear", 8) == pytest.approx(4e-4)
    assert plan.scale_lr(2e-4, "sqrt", 64) == pytest.approx(1e-4)
    said = plan.describe(2e-4, "sqrt", 64)
    assert "16 samples per optimizer step" in said
    assert "learning rate 0.0001 = 0.0002 x sqrt(16/64)" in said and "made for 64 samples" in said
    assert plan.describe(2e-4, "sqrt", 16).endswith("; learning rate 0.0002")
    assert str(BatchPlan(1, 2, 1)).endswith("= 1 process x 2 x 1 accumulated")


def test_an_effective_batch_splits_many_ways() -> None:
    plans = BatchPlan(num_processes=2, batch_size=3, accumulation=4).split()
    assert [(p.batch_size, p.accumulation) for p in plans] == [
        (12, 1),
        (6, 2),
        (4, 3),
        (3, 4),
        (2, 6),
        (1, 12),
    ]
    assert {plan.effective_batch for plan in plans} == {24}


def test_workers_leave_a_core_to_training() -> None:
    assert choose_num_workers(32, 4, on_cuda=True) == 7
    assert choose_num_workers(128, 1, on_cuda=True) == 8
    assert choose_num_workers(2, 4, on_cuda=True) == 1
    assert choose_num_workers(2, 1, on_cuda=False) == 1
    assert choose_num_workers(16, 2, on_cuda=False) == 2


def test_this_machine_is_seen() -> None:
    machine = detect_machine()
    assert machine.num_cpus >= 1
    assert (machine.card is None) == (machine.num_cuda_devices == 0)
    assert set(machine.to_dict()) >= {"num_cuda_devices", "card", "memory_gib", "capability"}


def test_a_machine_in_words() -> None:
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
