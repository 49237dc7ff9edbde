"""Resume, weights of other runs, and early ends of trainings, in this process."""

import json
import os
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from helpers import TINY_DATA, call_main
from safetensors.torch import save_file

from bev_lightning.config.compose import load_config
from bev_lightning.config.resolve import resolve
from bev_lightning.errors import InputError
from bev_lightning.hardware.machine import Machine
from bev_lightning.modules.detection import DetectionModule
from bev_lightning.runtime.build import (
    build_module,
    check_resume,
    load_matching_weights,
    load_weights,
)
from bev_lightning.train import main

MODEL = ["model=bevfusion_lidar_toy", "model.network.head.num_boxes=20"]
TINY = [
    *MODEL,
    *TINY_DATA,
    "data.synthetic.frames_per_scene=3",
    "logger=none",
    "data.batch_size=1",
    "accumulation=2",
    "trainer.max_steps=3",
    "trainer.enable_progress_bar=false",
]
FOUR = ["data.classes=[car,truck,bus,pedestrian]"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("resume")


@pytest.fixture(autouse=True)
def here(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(folder)
    handler = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, handler)  # Lightning ignores further ones


def train(*overrides: str) -> tuple[int, Path]:
    """Exit code and run directory."""
    before = set(Path("outputs/train").glob("*"))
    code = call_main(main, "train", *overrides)
    (run,) = set(Path("outputs/train").glob("*")) - before
    return code, run.resolve()


def score_of(run: Path) -> dict:
    return json.loads((run / "score.json").read_text())


@pytest.fixture(scope="module")
def whole(folder: Path) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        code, run = train(*TINY, "callbacks.steps.keep_every_n_train_steps=2")
    assert code == 0
    return run / "checkpoints"


def module_of(*overrides: str) -> DetectionModule:
    return build_module(
        resolve(load_config("train", [*MODEL, "hardware=cpu", *overrides]), Machine())
    )


def test_resume_alone_continues_the_same_run(whole: Path) -> None:
    names = {path.name for path in whole.iterdir()}
    assert names == {"best.ckpt", "last.ckpt", "step_000002.ckpt", "step_000003.ckpt"}
    code, run = train(f"resume={whole / 'step_000002.ckpt'}")
    assert code == 0 and score_of(run)["steps"] == 3
    one, other = (
        torch.load(folder / "last.ckpt", weights_only=True)
        for folder in (whole, run / "checkpoints")
    )
    # The same samples in the same order, the same rate: the same weights, to the last bit.
    assert one["DetectionDataModule"] == other["DetectionDataModule"]
    assert one["DetectionDataModule"]["micro_step"] == 6
    weights = other["state_dict"]
    assert all(torch.equal(value, weights[key]) for key, value in one["state_dict"].items())
    assert score_of(run)["NDS"] == score_of(whole.parent)["NDS"]
    code, run = train(f"resume={whole / 'last.ckpt'}", "trainer.max_steps=4")
    assert code == 0 and score_of(run)["steps"] == 4
    content = torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)
    assert content["global_step"] == 4 and content["DetectionDataModule"]["micro_step"] == 8


def test_another_model_is_refused_by_resume_and_loaded_by_init_from(
    whole: Path, tmp_path: Path
) -> None:
    checkpoint = whole / "last.ckpt"
    check_resume(module_of(), checkpoint)
    four = module_of(*FOUR)
    with pytest.raises(
        InputError, match=r"^resume=.* of another model: .*use init_from="
    ) as refusal:
        check_resume(four, checkpoint)
    assert "network.head.heatmap.1.bias (10,) for (4,)" in str(refusal.value)
    with pytest.raises(InputError, match=r"2 of another shape .*; give the model= and the"):
        load_weights(four, checkpoint)

    state = torch.load(checkpoint, weights_only=True)["state_dict"]
    names = load_matching_weights(four, checkpoint)
    assert names["reshaped"] == ["network.head.heatmap.1.weight", "network.head.heatmap.1.bias"]
    assert not names["missing"] and not names["unexpected"]
    own = four.state_dict()
    assert names["loaded"] == [name for name in own if name not in names["reshaped"]]
    assert all(torch.equal(own[name], state[name]) for name in names["loaded"])

    weights = tmp_path / "weights.safetensors"
    save_file({name: value.contiguous() for name, value in state.items()}, weights)
    torch.save({"state_dict": state}, tmp_path / "published.pth")
    for path in (weights, tmp_path / "published.pth"):
        with pytest.raises(InputError, match=r"no optimizer_states.*; use init_from="):
            check_resume(module_of(), path)


def test_a_refused_resume_records_a_failed_run(
    whole: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, run = train(f"resume={whole / 'last.ckpt'}", *FOUR)
    assert code == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith("bev_lightning.train: resume=")
    score = score_of(run)
    assert score["status"] == "failed" and score["steps"] == 0 and "NDS" not in score


@pytest.mark.parametrize(
    ("raised", "code", "status", "sentence"),
    [
        (
            torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB. GPU 0 has none."),
            2,
            "out_of_memory",
            (
                r"ran out of memory at the samples \w+ \(CUDA out of memory. Tried .* 2 GiB; "
                r"in GiB: parameters 0.\d\d, gradients .*, optimizer .*, activations .*\); "
                "set gradient_checkpointing=true .* then use precision=bf16"
            ),
        ),
        (
            KeyboardInterrupt(),
            130,
            "interrupted",
            r"interrupted at step 1; continue with resume=.*/checkpoints/last.ckpt",
        ),
    ],
)
def test_a_training_that_ends_early_reports_why(
    whole: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    raised: BaseException,
    code: int,
    status: str,
    sentence: str,
) -> None:
    step = DetectionModule.training_step

    def fail(module: DetectionModule, batch, batch_idx: int):
        if batch_idx == 3:
            raise raised
        return step(module, batch, batch_idx)

    monkeypatch.setattr(DetectionModule, "training_step", fail)
    ended, run = train(*TINY, "callbacks.steps.every_n_train_steps=1")
    assert ended == code
    last = capsys.readouterr().err.splitlines()[-1]
    assert re.match(f"bev_lightning.train: .*{sentence}", last), last
    score = score_of(run)
    assert score["status"] == status and score["steps"] == 1 and score["wall_s"] > 0
    assert "NDS" not in score
    names = sorted(path.name for path in (run / "checkpoints").iterdir())
    assert names == ["last.ckpt", "step_000001.ckpt"]


def test_validations_fall_between_optimizer_steps(
    whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[int, bool]] = []

    def note(module: DetectionModule) -> None:
        loop = module.trainer.fit_loop.epoch_loop
        seen.append((module.global_step, loop._should_accumulate()))
        module.results = {}

    monkeypatch.setattr(DetectionModule, "on_validation_epoch_start", note)
    code, _ = train(*TINY, "trainer.val_check_interval=1", "trainer.max_steps=2")
    assert code == 0 and seen == [(1, False), (2, False)]


def test_epochs_resume_in_their_middle_and_at_their_end(whole: Path) -> None:
    # Three batches an epoch: a step of two, and a step of the one that is left.
    epochs = ["trainer.max_steps=-1", "trainer.max_epochs=3", "trainer.val_check_interval=2"]
    every = ["callbacks.steps.every_n_train_steps=1", "callbacks.steps.keep_last=9"]
    code, run = train(*TINY, *epochs, *every)
    assert code == 0 and score_of(run)["steps"] == 6
    keys = ("state_dict", "optimizer_states", "lr_schedulers", "loops", "DetectionDataModule")
    one = torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)
    for step in (3, 4):
        code, on = train(f"resume={run / 'checkpoints' / f'step_00000{step}.ckpt'}")
        assert code == 0
        other = torch.load(on / "checkpoints" / "last.ckpt", weights_only=True)
        for key in keys:
            assert repr(one[key]) == repr(other[key]), (step, key)
        assert all(torch.equal(v, other["state_dict"][k]) for k, v in one["state_dict"].items())
        assert score_of(on)["NDS"] == score_of(run)["NDS"]


def test_other_batch_sizes_resume_at_the_same_sample(whole: Path) -> None:
    changed = ["data.batch_size=3", "accumulation=1"]
    code, run = train(f"resume={whole / 'step_000002.ckpt'}", *changed, "trainer.max_steps=4")
    assert code == 0 and score_of(run)["steps"] == 4
    content = torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)
    # Four batches of one are an epoch of three and one, which is read again; two epochs follow.
    assert content["DetectionDataModule"]["micro_step"] == 3
    progress = content["loops"]["fit_loop"]["epoch_loop.batch_progress"]
    assert progress["total"]["ready"] == 4


def test_a_signal_saves_and_stops(
    whole: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    step = DetectionModule.training_step

    def send(module: DetectionModule, batch, batch_idx: int):
        if batch_idx == 0:
            os.kill(os.getpid(), signal.SIGTERM)
        return step(module, batch, batch_idx)

    monkeypatch.setattr(DetectionModule, "training_step", send)
    code, run = train(*TINY, "logger=tensorboard", "trainer.log_every_n_steps=1")
    assert code == 143
    message = capsys.readouterr().err.splitlines()[-1]
    assert message == (
        f"bev_lightning.train: interrupted by SIGTERM at step 1; continue with "
        f"resume={run / 'checkpoints' / 'last.ckpt'}"
    )
    marker = json.loads((run / "stopped.json").read_text())
    assert marker["signal"] == "SIGTERM" and marker["step"] == 1
    assert score_of(run)["status"] == "interrupted"
    monkeypatch.setattr(DetectionModule, "training_step", step)
    sys_argv = [*TINY, "logger=tensorboard", "trainer.log_every_n_steps=1", "resume=auto"]
    before = set(Path("outputs/train").glob("*"))
    monkeypatch.setattr(sys, "argv", ["train", *sys_argv])
    main()
    assert set(Path("outputs/train").glob("*")) == before  # in the same directory
    assert "resume=auto: continuing from outputs/train" in capsys.readouterr().out
    assert score_of(run)["steps"] == 3 and not (run / "stopped.json").exists()
    one, other = (
        torch.load(folder / "last.ckpt", weights_only=True)["state_dict"]
        for folder in (whole, run / "checkpoints")
    )
    assert all(torch.equal(value, other[key]) for key, value in one.items())
