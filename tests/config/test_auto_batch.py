"""The largest micro-step that fits, with trials that are reported and with one that trains."""

import json
import re
from pathlib import Path

import pytest

from bev_lightning.config import auto_batch as batch_search
from bev_lightning.config.auto_batch import find_batch, replace_values, try_batch
from bev_lightning.config.compose import load_config
from bev_lightning.errors import InputError
from bev_lightning.hardware.batch_plan import BatchPlan

OVERRIDES = [
    "model=bevfusion_lidar_toy",
    "data.batch_size=2",
    "accumulation='4'",
    "auto_batch=true",
]
PLAN = BatchPlan(num_processes=2, batch_size=2, accumulation=4)


@pytest.mark.parametrize(
    ("fits", "limit_gib", "batch", "accumulation"),
    [(8, None, 8, 1), (4, None, 4, 2), (1, None, 1, 8), (8, 3.5, 2, 4)],
)
def test_the_effective_batch_stays(
    fits: int,
    limit_gib: float | None,
    batch: int,
    accumulation: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    tried = []

    def trial(overrides: list[str], plan: BatchPlan) -> float | None:
        tried.append(plan.batch_size)
        return 1024.0 + 1024.0 * plan.batch_size if plan.batch_size <= fits else None

    monkeypatch.setattr(batch_search, "try_batch", trial)
    overrides = find_batch(OVERRIDES, PLAN, limit_gib)
    assert tried == [size for size in (8, 4, 2, 1) if size >= batch]
    cfg = load_config("train", overrides)
    assert (cfg.data.batch_size, cfg.trainer.accumulate_grad_batches) == (batch, accumulation)
    assert cfg.auto_batch is False
    printed = capsys.readouterr().out
    assert f"auto_batch: data.batch_size={batch} takes {batch + 1}.00 GiB" in printed
    assert "auto_batch: 16 samples per optimizer step" in printed
    assert ("data.batch_size=8 takes out of memory" in printed) == (fits < 8)


def test_where_nothing_fits_the_remedies_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_search, "try_batch", lambda overrides, plan: None)
    with pytest.raises(InputError, match="not even data.batch_size=1 fits .* precision=bf16"):
        find_batch(OVERRIDES, PLAN)


def test_a_trial_reads_what_its_training_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    class Ended:
        stderr = "much\nbev_lightning.train: data.root=/nowhere does not exist; set data.root"
        returncode = 2

    def run(score: dict | None):
        def start(command: list[str], **_: object) -> Ended:
            cfg = load_config("train", command[3:])
            assert (cfg.data.batch_size, cfg.trainer.max_steps) == (2, 2)
            (folder,) = [w.split("=", 1)[1] for w in command if w.startswith("hydra.run.dir")]
            if score is not None:
                (Path(folder) / "score.json").write_text(json.dumps(score))
            return Ended()

        return start

    monkeypatch.setattr(batch_search.subprocess, "run", run({"status": "out_of_memory"}))
    assert try_batch(OVERRIDES, PLAN) is None
    monkeypatch.setattr(batch_search.subprocess, "run", run(None))
    sentence = "tried data.batch_size=2 and the training failed: data.root=/nowhere does not exist"
    with pytest.raises(InputError, match=re.escape(sentence)):
        try_batch(OVERRIDES, PLAN)
    Ended.returncode = 0
    good = {"status": "finished", "peak_mib": 900}
    monkeypatch.setattr(batch_search.subprocess, "run", run(good))
    assert try_batch(OVERRIDES, PLAN) == 900.0


def test_values_are_replaced() -> None:
    assert replace_values(["a.b=1", "+c=2", "d=3"], {"c": "4", "e": "5"}) == [
        "a.b=1",
        "d=3",
        "c=4",
        "e=5",
    ]
