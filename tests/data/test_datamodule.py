"""The DataModule under Lightning: steps, shards, resume, reports."""

import json
import shutil
import warnings
from pathlib import Path

import lightning as L
import pytest
import torch

from bev_lightning.data.class_balance import count_boxes
from bev_lightning.data.datamodule import DetectionDataModule
from bev_lightning.data.loaders.torch import TorchLoader
from bev_lightning.data.nuscenes.index import Index
from bev_lightning.data.nuscenes.sample import SampleIndex
from bev_lightning.data.synthetic.dataset import SyntheticSpec
from bev_lightning.data.transforms.augment import Augment
from bev_lightning.data.transforms.gt_sampling import GTSampling
from bev_lightning.errors import InputError
from bev_lightning.modules.detection import DetectionModule
from bev_lightning.structures import CameraInput, Inputs, LidarInput

CLASSES = ("car", "pedestrian")
RANGE = (-20.0, -20.0, -5.0, 20.0, 20.0, 5.0)


@pytest.fixture
def make_data(make_tree, tmp_path: Path):
    root = make_tree(scenes=(("scene-0061", 3), ("scene-0103", 3)))

    def make(kind: type = DetectionDataModule, **changes) -> DetectionDataModule:
        arguments = {
            "root": str(root),
            "version": "v1.0-mini",
            "train_split": "mini_train",
            "val_split": "mini_val",
            "batch_size": 2,
            "val_batch_size": 2,
            "on_missing": "error",
            "classes": CLASSES,
            "num_workers": 0,
            "inputs": Inputs(lidar=LidarInput(RANGE, sweeps=1)),
            "augment": Augment(),
            "loader": TorchLoader(),
            "cache_dir": str(tmp_path / "cache"),
            "seed": 3,
        }
        return kind(**{**arguments, **changes})

    return make


class Noisy(L.LightningModule):
    """Learns from points, and from random numbers, as dropout does."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(5, 1)
        self.seen: list = []
        self.validated: list = []

    def training_step(self, batch, number: int) -> torch.Tensor:
        self.seen.append(batch.sample_tokens)
        noise = torch.rand(()) * 1e-3
        return (
            self.layer(batch.points.features / 50).pow(2).mean() + noise * self.layer.weight.sum()
        )

    def validation_step(self, batch, number: int) -> None:
        assert batch.targets is not None
        self.validated.append(batch.sample_tokens)

    def predict_step(self, batch, number: int) -> tuple:
        assert batch.targets is None
        return batch.sample_tokens

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), 1e-2)


def trainer(tmp_path: Path, **arguments) -> L.Trainer:
    return L.Trainer(
        **{
            "accelerator": "cpu",
            "devices": 1,
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "use_distributed_sampler": False,
            "num_sanity_val_steps": 0,
            "check_val_every_n_epoch": None,
            "val_check_interval": 2,
            "default_root_dir": tmp_path,
            **arguments,
        }
    )


def test_fit_makes_max_steps_times_accumulation_micro_steps(make_data, tmp_path: Path) -> None:
    data, module = make_data(), Noisy()
    fit = trainer(tmp_path, max_steps=3, accumulate_grad_batches=2)
    fit.fit(module, datamodule=data)
    assert fit.global_step == 3 and len(module.seen) == 6
    assert data.steps_per_epoch == 2  # three samples in batches of two
    assert all(len(tokens) == 2 for tokens in module.seen)
    assert data.stream.micro_step == 6 and data.stream.seconds_waited > 0
    assert set(sum(module.seen[:2], ())) == set(data.train_tokens)
    one_pass = [("scene-0103_0", "scene-0103_1"), ("scene-0103_2",)]
    assert module.validated == one_pass * 3 and data.val_tokens == sum(one_pass, ())


def test_epochs_work_too(make_data, tmp_path: Path) -> None:
    module = Noisy()
    trainer(tmp_path, max_epochs=2, val_check_interval=2).fit(module, datamodule=make_data())
    assert len(module.seen) == 4 and module.seen[:2] != module.seen[2:]


def test_predict_has_no_targets(make_data, tmp_path: Path) -> None:
    tokens = trainer(tmp_path).predict(Noisy(), datamodule=make_data())
    assert sum(tokens, ()) == ("scene-0103_0", "scene-0103_1", "scene-0103_2")


def test_evaluation_reads_no_history(make_data) -> None:
    inputs = Inputs(camera=CameraInput((32, 64), ("CAM_FRONT", "CAM_BACK")), history=1)
    data = make_data(inputs=inputs, augment=None, val_split="mini_train")
    data.setup()
    assert len(next(iter(data.train_dataloader())).history) == 1
    for batches in (data.val_dataloader(), data.predict_dataloader()):
        first, second = batches
        assert first.history == second.history == ()
        assert torch.cat([first.has_previous, second.has_previous]).tolist() == [False, True, True]
        assert first.sample_tokens + second.sample_tokens == data.val_tokens


@pytest.mark.parametrize("stop", [1, 2, 3])
def test_a_resumed_run_equals_an_undisturbed_one(make_data, tmp_path: Path, stop: int) -> None:
    torch.manual_seed(0)
    whole = Noisy()
    start = {name: value.clone() for name, value in whole.state_dict().items()}
    trainer(tmp_path, max_steps=4, limit_val_batches=0).fit(whole, datamodule=make_data())
    first, second = Noisy(), Noisy()
    first.load_state_dict(start)
    fit = trainer(
        tmp_path,
        max_steps=4,
        limit_val_batches=0,
        callbacks=[_SaveAndStop(stop, tmp_path / "at.ckpt")],
    )
    fit.fit(first, datamodule=make_data())
    torch.rand(7)
    last = trainer(tmp_path, max_steps=4, limit_val_batches=0)
    last.fit(second, datamodule=make_data(), ckpt_path=str(tmp_path / "at.ckpt"), weights_only=True)
    assert first.seen + second.seen == whole.seen
    assert last.global_step == 4
    for name, value in whole.state_dict().items():
        assert torch.equal(value, second.state_dict()[name])


class OwnIndex:
    """A user's data set: offers what the protocol declares and nothing else."""

    def __init__(self, index: Index) -> None:
        for name in vars(SampleIndex):
            if not name.startswith("_"):
                setattr(self, name, getattr(index, name))
        self._index = index

    def __contains__(self, token: object) -> bool:
        return token in self._index


class OwnDataModule(DetectionDataModule):
    """A user's subclass with its own index."""

    def open_index(self) -> SampleIndex:
        self.opened = True
        return OwnIndex(super().open_index())


class Resuming(Noisy):
    on_load_checkpoint = DetectionModule.on_load_checkpoint
    _datamodule = DetectionModule._datamodule


@pytest.mark.parametrize(
    ("writer", "reader"),
    [
        (OwnDataModule, OwnDataModule),
        (DetectionDataModule, OwnDataModule),  # a checkpoint from before there was a subclass
        (OwnDataModule, DetectionDataModule),
    ],
)
@pytest.mark.parametrize("length", [{"max_steps": 4}, {"max_epochs": 2}])
def test_a_subclass_resumes_in_the_middle_of_an_epoch(
    make_data, tmp_path: Path, writer: type, reader: type, length: dict
) -> None:
    def fit(module: Noisy, kind: type, path: Path | None = None, **more) -> None:
        fitting = trainer(tmp_path, limit_val_batches=0, **length, **more)
        data = make_data(kind)
        fitting.fit(module, datamodule=data, ckpt_path=path, weights_only=path and True)
        assert getattr(data, "opened", True)

    torch.manual_seed(0)
    whole, first, second = Resuming(), Resuming(), Resuming()
    first.load_state_dict(whole.state_dict())
    fit(whole, reader)
    path = tmp_path / "at.ckpt"
    fit(first, writer, callbacks=[_SaveAndStop(3, path)])  # of two steps per epoch
    assert writer.__qualname__ in torch.load(path, weights_only=True)
    fit(second, reader, path)
    assert first.seen + second.seen == whole.seen
    for name, value in whole.state_dict().items():
        assert torch.equal(value, second.state_dict()[name])


def test_a_checkpoint_without_a_position_in_the_data_is_refused(make_data, tmp_path: Path) -> None:
    path = tmp_path / "at.ckpt"
    fit = trainer(tmp_path, max_steps=2, callbacks=[_SaveAndStop(1, path)])
    fit.fit(Resuming(), datamodule=make_data())
    content = torch.load(path, weights_only=True)
    del content["DetectionDataModule"]
    torch.save(content, path)
    with pytest.raises(InputError, match="has no position in the training data .*init_from="):
        trainer(tmp_path, max_steps=2).fit(
            Resuming(), datamodule=make_data(), ckpt_path=path, weights_only=True
        )


class _SaveAndStop(L.Callback):
    def __init__(self, step: int, path: Path) -> None:
        self.step = step
        self.path = path

    def on_train_batch_end(self, trainer, *_) -> None:
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)
            trainer.should_stop = True


def test_resume_with_another_order_is_refused(make_data, tmp_path: Path) -> None:
    save = _SaveAndStop(1, tmp_path / "at.ckpt")
    trainer(tmp_path, max_steps=2, limit_val_batches=0, callbacks=[save]).fit(
        Noisy(), datamodule=make_data()
    )
    with pytest.raises(InputError, match="seed = 3 and this run has 1"):
        trainer(tmp_path, max_steps=2, limit_val_batches=0).fit(
            Noisy(), datamodule=make_data(seed=1), ckpt_path=str(save.path), weights_only=True
        )


def test_fewer_samples_than_the_batch(make_data, tmp_path: Path) -> None:
    module = Noisy()
    data = make_data(batch_size=8, val_batch_size=8)
    trainer(tmp_path, max_steps=2).fit(module, datamodule=data)
    assert [len(tokens) for tokens in module.seen] == [8, 8]
    assert module.validated == [("scene-0103_0", "scene-0103_1", "scene-0103_2")]


def test_missing_and_unreadable_files_are_reported(make_data, tmp_path: Path) -> None:
    data = make_data(on_missing="skip", inputs=Inputs(lidar=LidarInput(RANGE, sweeps=0)))
    data.prepare_data()
    lidar = Path(data.root) / "samples" / "LIDAR_TOP"
    (lidar / "scene-0061_0_LIDAR_TOP_0.pcd.bin").unlink()
    (lidar / "scene-0061_1_LIDAR_TOP_0.pcd.bin").write_bytes(b"1234")
    module = Noisy()
    fit = trainer(tmp_path, max_steps=1, limit_val_batches=0)
    with pytest.warns(UserWarning, match="are left out") as caught:
        fit.fit(module, datamodule=data)
    texts = [str(w.message) for w in caught]
    assert any(t.startswith("1 of 3 samples of the split mini_train are left out") for t in texts)
    assert any(
        t.startswith("1 samples could not be read") and "(4 bytes) is cut" in t for t in texts
    )
    assert module.seen == [("scene-0061_2", "scene-0061_2")]
    with pytest.raises(InputError, match="data.on_missing=skip"):
        make_data().setup("fit")


def test_scenes_without_can_bus_are_named_where_they_are_read(make_tree, make_data) -> None:
    scenes = (("scene-0061", 2), ("scene-0103", 2), ("scene-0916", 1))
    root = str(make_tree(scenes=scenes, can_bus=("scene-0061", "scene-0103")))
    data = make_data(root=root)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        data.setup()
    assert not [w for w in caught if "CAN bus" in str(w.message)]
    with pytest.warns(
        UserWarning, match="^1 of 3 scenes have no CAN bus file, for instance scene-0916: "
    ):
        data.warn_of_derived_motion()
    shutil.rmtree(Path(root) / "can_bus")
    data = make_data(root=root)
    data.setup("validate")
    with pytest.warns(UserWarning, match="^3 of 3 scenes have no CAN bus file, "):
        data.warn_of_derived_motion()


def test_an_evaluation_answers_for_samples_that_cannot_be_read(make_data, monkeypatch) -> None:
    data = make_data(on_missing="skip", inputs=Inputs(lidar=LidarInput(RANGE, sweeps=0)))
    data.prepare_data()
    (Path(data.root) / "samples/LIDAR_TOP/scene-0103_0_LIDAR_TOP_0.pcd.bin").unlink()
    with pytest.warns(UserWarning, match="1 of 3 samples of the split mini_val are left out"):
        data.setup("validate")
    assert data.list_tokens("val") == ["scene-0103_0", "scene-0103_1", "scene-0103_2"]
    assert data.val_tokens == ("scene-0103_1", "scene-0103_2")
    # Stopped after a batch: what that batch was to read.
    data.val_batch_size = 1
    assert data.list_tokens("val", 1) == ["scene-0103_1"]
    both = make_data(val_split="both", val_batch_size=1)
    splits = {"both": ["scene-0061", "scene-0103"]}
    (Path(data.root) / "v1.0-mini" / "splits.json").write_text(json.dumps(splits))
    monkeypatch.setattr(both, "_rank_and_world_size", lambda: (0, 2))
    both.on_missing, both.inputs = "skip", data.inputs
    with pytest.warns(UserWarning, match="1 of 6 samples"):
        both.setup("validate")
    assert both.list_tokens("val", 1) == ["scene-0061_0", "scene-0103_1"]  # of each process


def test_nonsense_is_refused(make_data) -> None:
    with pytest.raises(InputError, match="on_missing=ignore"):
        make_data(on_missing="ignore")
    with pytest.raises(InputError, match="data.batch_size=0"):
        make_data(batch_size=0)
    with pytest.raises(InputError, match="data.synthetic.version=v1.0-trainval"):
        make_data(synthetic=SyntheticSpec())
    with pytest.raises(InputError, match="'no_such_split'"):
        make_data(train_split="no_such_split").setup("fit")
    with pytest.raises(InputError, match="spaceship"):
        make_data(classes=("car", "spaceship"))


def training_labels(data: DetectionDataModule) -> list[list[int]]:
    data.setup("fit")
    source = data._frames["train"]
    frames = [source.frame(0, position).batch.targets for position in range(len(source))]
    return [targets[0].label.tolist() for targets in frames]


def test_three_nuscenes_classes_and_own_classes_label_the_targets(make_data) -> None:
    """Each frame has a car, a pedestrian, a barrier without points and an animal."""
    wide = {"augment": None, "target_range": (-1e4, -1e4, -100, 1e4, 1e4, 100), "min_points": 0}
    three = make_data(classes=("barrier", "pedestrian", "car"), **wide)
    assert training_labels(three) == [[2, 1, 0]] * 3
    mapping = {"human.pedestrian.adult": "being", "animal": "being", "vehicle.car": "vehicle"}
    own = make_data(classes=("vehicle", "being"), class_of_category=mapping, **wide)
    assert training_labels(own) == [[0, 1, 1]] * 3
    truth = own.ground_truth(own.index.tokens)
    assert truth[own.index.tokens[0]].class_name == ("vehicle", "being", "being")
    counts = count_boxes(own.index, own.train_tokens, own.classes, min_points=0)
    assert counts.num_boxes.sum(0).tolist() == [3, 6]
    with pytest.raises(InputError, match="holds car, to which data.class_of_category maps no"):
        make_data(classes=("car",), class_of_category=mapping)


def test_synthetic_data_is_made_on_first_use(make_data, tmp_path: Path) -> None:
    spec = SyntheticSpec(
        version="v1.0-mini",
        num_train_scenes=1,
        num_val_scenes=1,
        frames_per_scene=2,
        image_size=(36, 64),
        num_beams=8,
        num_azimuths=60,
        sweeps_per_frame=1,
    )
    data = make_data(root=str(tmp_path / "synthetic"), synthetic=spec, num_workers=1)
    data.prepare_data()
    data.setup("fit")
    batch = next(iter(data.train_dataloader())).validate()
    assert batch.size == 2 and len(data.train_tokens) == 2 and int(batch.points.count.min()) > 50


def test_filters_and_balance_reach_training(make_data, tmp_path: Path) -> None:
    data = make_data(
        min_points=0,
        classes=("car", "barrier"),
        target_range=(-30, -30, -9, 30, 30, 9),
        augment=None,
        cbgs=True,
    )
    data.setup("fit")
    batch = next(iter(data.train_dataloader()))
    assert sorted(set(batch.targets.label[0].tolist())) == [0, 1]
    assert len(data.train_tokens) == 6 and set(data.train_tokens) <= {
        f"scene-0061_{k}" for k in range(3)
    }
    assert data.val_tokens == tuple(f"scene-0103_{k}" for k in range(3))


def test_pasting_is_prepared_for_training_alone(make_data, tmp_path: Path) -> None:
    gt_sampling = GTSampling({"car": 2, "bus": 1}, min_points=1)
    data = make_data(gt_sampling=gt_sampling, classes=("car", "bus"))
    trainer(tmp_path).predict(Noisy(), datamodule=data)
    assert not list((tmp_path / "cache").glob("*ground-truth*"))
    data, module = make_data(gt_sampling=gt_sampling, classes=("car", "bus")), Noisy()
    with pytest.warns(UserWarning, match="the ground-truth database has no") as caught:
        trainer(tmp_path, max_steps=2).fit(module, datamodule=data)
    messages = [str(w.message) for w in caught if "ground-truth database" in str(w.message)]
    assert len(messages) == 1 and "bus" in messages[0]
    assert len(list((tmp_path / "cache").glob("*ground-truth-mini_train-1sweeps.arrow"))) == 1
    with pytest.raises(InputError, match="data.gt_sampling=null"):
        make_data(
            gt_sampling=gt_sampling, inputs=Inputs(camera=CameraInput((32, 64), ("CAM_FRONT",)))
        )
    with pytest.raises(InputError, match="data.target_range"):
        make_data(target_range=(1, 2))
