"""The Python API: one call gives data, model, predictions and pictures."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import bev_lightning as bev
from bev_lightning.errors import InputError

TINY = [
    "model=bevfusion_toy",
    "data=synthetic_mini",
    "hardware=cpu",
    "data.synthetic.num_train_scenes=1",
    "data.synthetic.num_val_scenes=1",
    "data.synthetic.frames_per_scene=3",
    "data.synthetic.image_size=[45,80]",
    "model.inputs.camera.size=[32,64]",
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("api")
    return [f"paths.data={folder}/data", f"paths.cache={folder}/cache", f"paths.output={folder}"]


@pytest.fixture(scope="module")
def run(folders: list[str]) -> "bev.Run":
    return bev.load(*TINY, *folders)


def test_import_is_light() -> None:
    code = "import sys, bev_lightning as b; b.load; print('torch' in sys.modules, dir(b))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("False") and "load" in done.stdout and "Run" in done.stdout
    with pytest.raises(AttributeError, match="has no attribute 'lode'"):
        bev.lode  # noqa: B018


def test_batch_prediction_and_picture(run: "bev.Run") -> None:
    batch = run.batch()
    assert batch.size == 2 and batch.cameras is not None
    boxes = run.predict(batch)
    assert boxes.score is not None and boxes.centre.shape[0] == 2
    assert not boxes.centre.requires_grad and not run.module.training
    picture = run.draw(batch, boxes, sample=1, min_score=0.0)
    assert isinstance(picture, Image.Image)
    assert np.asarray(picture).any() and picture.size == run.draw(batch).size


def test_batches_have_the_order_of_their_split(run: "bev.Run") -> None:
    first, second = run.batches("val")
    assert run.batch("val", 1).sample_tokens == second.sample_tokens
    assert run.batch().sample_tokens == first.sample_tokens
    assert set(run.batch("train").sample_tokens) <= set(run.data.train_tokens)
    with pytest.raises(InputError, match="index=2 is beyond the last batch of the val split"):
        run.batch("val", 2)
    with pytest.raises(InputError, match="split='test' does not exist"):
        run.batch("test")  # type: ignore[arg-type]


def test_losses_have_gradients(run: "bev.Run") -> None:
    terms = run.losses(run.batch("train"))
    torch.stack(list(terms.values())).sum().backward()
    assert all(p.grad is not None for p in run.module.parameters())


def test_evaluate_scores_the_given_number_of_batches(run: "bev.Run") -> None:
    assert run.evaluate().frames == 3
    assert run.evaluate(num_batches=1).frames == 2


def test_a_checkpoint_opens_with_one_call(run: "bev.Run", folders: list[str]) -> None:
    from bev_lightning.runtime.build import build_trainer

    quiet = {"logger": False, "callbacks": [], "max_steps": 1, "limit_val_batches": 0}
    trainer = build_trainer(run.cfg, **quiet, enable_checkpointing=False)
    trained = bev.load(*TINY, *folders).module
    trained.provenance = {"overrides": [*TINY, *folders], "config": {}}
    trainer.fit(trained, datamodule=run.data)
    file = Path(folders[-1].partition("=")[2]) / "a run" / "last.ckpt"
    trainer.save_checkpoint(file, weights_only=False)

    opened = bev.load("data.val_batch_size=1", *folders, ckpt=file)
    assert opened.cfg.verb == "evaluate" and str(file) in repr(opened)
    assert opened.cfg.model.inputs.camera.size == [32, 64]  # an override of the training
    for name, value in trained.state_dict().items():
        assert torch.equal(opened.module.state_dict()[name], value.cpu()), name
    assert opened.predict(opened.batch()).centre.shape[0] == 1

    other = bev.load(*TINY, *folders, f"init_from='{file}'").module
    name, value = next(iter(trained.named_parameters()))
    assert torch.equal(dict(other.named_parameters())[name], value)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["model=nonesuch"], "^model=nonesuch does not exist; model is one of "),
        (["data.bach_size=1"], "names no key of train; did you mean data.batch_size"),
        (["ckpt=last.ckpt"], "open a checkpoint with bev_lightning.load\\(ckpt="),
        (["data=nuscenes", "data.root=/nowhere"], "^data.root=/nowhere does not exist"),
    ],
)
def test_wrong_input_is_refused_in_one_sentence(overrides: list[str], message: str) -> None:
    with pytest.raises(InputError, match=message):
        bev.load(*overrides)


def test_a_missing_checkpoint_is_refused() -> None:
    with pytest.raises(InputError, match="nowhere.ckpt does not exist"):
        bev.load(ckpt="nowhere.ckpt")
