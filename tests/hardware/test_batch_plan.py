"""Effective batch and learning-rate scaling."""

import pytest

from bev_lightning.hardware.batch_plan import BatchPlan


def test_batch_arithmetic() -> None:
    plan = BatchPlan(num_processes=4, batch_size=2, accumulation=8)
    assert plan.effective_batch == 64
    assert str(plan) == "64 samples per optimizer step = 4 processes x 2 x 8 accumulated"


def test_the_learning_rate_follows_the_batch() -> None:
    plan = BatchPlan(num_processes=4, batch_size=1, accumulation=4)
    assert plan.scale_lr(2e-4, None, 8) == plan.scale_lr(2e-4, "linear", None) == 2e-4
    assert plan.scale_lr(2e-4, "linear", 8) == pytest.approx(4e-4)
    assert plan.scale_lr(2e-4, "sqrt", 64) == pytest.approx(1e-4)
    text = plan.describe(2e-4, "sqrt", 64)
    assert "16 samples per optimizer step" in text
    assert "learning rate 0.0001 = 0.0002 x sqrt(16/64)" in text and "tuned for 64 samples" in text
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
