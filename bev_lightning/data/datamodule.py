"""The LightningDataModule: from a data root to the streams that training and evaluation read."""

import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from lightning.pytorch import LightningDataModule
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from bev_lightning.classes import check_classes
from bev_lightning.data.batch_stream import BatchStream, EvaluationStream, WindowedStream
from bev_lightning.data.build_gt_database import build_ground_truth
from bev_lightning.data.class_balance import balance, count_boxes
from bev_lightning.data.loaders.image_cache import (
    CacheKind,
    ImageCache,
    check_image_cache,
    open_image_cache,
)
from bev_lightning.data.loaders.protocol import Loader
from bev_lightning.data.nuscenes.index import Index, open_index
from bev_lightning.data.nuscenes.sensor_rig import SensorRig
from bev_lightning.data.samplers import SceneSampler, TrainSampler
from bev_lightning.data.samples.frame import FrameSource
from bev_lightning.data.synthetic.dataset import SyntheticSpec, generate
from bev_lightning.data.transforms.augment import Augment
from bev_lightning.data.transforms.gt_database import GroundTruthDatabase
from bev_lightning.data.transforms.gt_sampling import GTSampler, GTSampling, check_lidar_only
from bev_lightning.errors import InputError
from bev_lightning.structures import Inputs


class DetectionDataModule(LightningDataModule):
    """Reads a nuScenes data set for one model.

    Training reads an endless stream whose order and augmentation are functions of the seed;
    evaluation reads its split in order, whole scenes to each rank, all of which make the same
    number of steps. A rank that is done early repeats its last sample: a sample's first result
    counts. It reads no history, for a model meets each scene's frames one after the other.

    Attributes:
        index: the data set's index, from :meth:`setup` on.
        stream: training's batches, from :meth:`train_dataloader` on; ``seconds_waited`` tells how
            long the model waited for them.
    """

    def __init__(
        self,
        root: str,
        version: str,
        train_split: str,
        val_split: str,
        batch_size: int,
        val_batch_size: int,
        on_missing: Literal["error", "skip"],
        classes: Sequence[str],
        num_workers: int,
        inputs: Inputs,
        augment: Augment | None,
        loader: Loader,
        cache_dir: str,
        seed: int,
        synthetic: SyntheticSpec | None = None,
        min_points: int = 1,
        target_range: Sequence[float] | None = None,
        cbgs: bool = False,
        gt_sampling: GTSampling | None = None,
        cache: CacheKind = "none",
        cache_gib: float = 8.0,
        sensors: SensorRig | None = None,
    ) -> None:
        """Keep the settings; nothing is read before :meth:`prepare_data`.

        Args:
            root: data root.
            version: folder of the tables.
            train_split, val_split: official splits, or ones of the version folder's splits.json.
            batch_size, val_batch_size: samples per process.
            on_missing: what to do with samples whose files are missing or cannot be read: stop with
                a sentence, or leave them out (missing) or replace them by the next (unreadable),
                counted and reported at the end. The metric counts them as samples without
                predictions.
            classes: names in the order of the labels.
            num_workers: processes that make the synthetic data set and look at the tables.
            inputs: what the model reads.
            augment: of training; None for none.
            loader: reads the files.
            cache_dir: where indexes live, outside the root.
            seed: of order and augmentation.
            synthetic: makes the data set at the root where it is absent.
            min_points, target_range: see :class:`FrameSource`; which boxes are targets.
            cbgs: see training samples so often that the classes are balanced
                (:func:`bev_lightning.data.class_balance.balance`).
            gt_sampling: objects of other scenes pasted into the training samples of a lidar
                model; None for none.
            cache, cache_gib: where training keeps decoded images, and how many, per process.
            sensors: the rig; None for nuScenes' cars.
        """
        super().__init__()
        if on_missing not in ("error", "skip"):
            raise InputError(f"data.on_missing={on_missing} is unknown: use error or skip")
        check_classes(classes)
        if batch_size < 1 or val_batch_size < 1:
            raise InputError(
                f"data.batch_size={batch_size} and data.val_batch_size={val_batch_size} must be 1 "
                f"or more"
            )
        if synthetic is not None and synthetic.version != version:
            raise InputError(
                f"data.version={version} but data.synthetic.version={synthetic.version}: set both "
                f"alike"
            )
        if target_range is not None and len(target_range) != 6:
            raise InputError(
                f"data.target_range={list(target_range)} must be 6 numbers: x, y, z minima and "
                f"maxima [m]; or null for the lidar's range"
            )
        check_image_cache(cache, loader)
        if gt_sampling is not None:
            check_lidar_only(inputs)
        self.root, self.version = root, version
        self.train_split, self.val_split = train_split, val_split
        self.batch_size, self.val_batch_size = batch_size, val_batch_size
        self.on_missing = on_missing
        self.classes, self.num_workers = tuple(classes), num_workers
        self.inputs, self.augment, self.loader = inputs, augment, loader
        self.cache_dir, self.seed = cache_dir, seed
        self.synthetic = synthetic
        self.min_points, self.target_range = min_points, target_range
        self.cbgs, self.gt_sampling = cbgs, gt_sampling
        self.cache, self.cache_gib = cache, cache_gib
        self.rig = SensorRig() if sensors is None else sensors
        self.index: Index | None = None
        self.stream: BatchStream | None = None
        self._image_cache: ImageCache | None = None
        self._frames: dict[str, FrameSource] = {}
        self._state: dict[str, int] | None = None

    def prepare_data(self) -> None:
        """Once per node: make the synthetic data set, the index and, unless a trainer only
        evaluates, the objects to paste, where they are absent or out of date."""
        index = self.open_index()
        if self.gt_sampling is not None and (self.trainer is None or self.trainer.training):
            self.open_ground_truth(index)

    def setup(self, stage: str | None = None) -> None:
        """Open the index and look for the files of the splits that the stage reads.

        Args:
            stage: fit, validate, test or predict; None for all.

        Raises:
            InputError: the index, a split, a class or a file is not there.
        """
        if self.index is None:
            self.index = self._index()
        if stage in (None, "fit") and "train" not in self._frames:
            self._frames["train"] = self._training_source(self.index)
        if stage in (None, "fit", "validate", "test") and "val" not in self._frames:
            self._frames["val"] = self._evaluation_source()
        if stage in (None, "predict") and "predict" not in self._frames:
            self._frames["predict"] = self._evaluation_source(with_targets=False)

    def open_index(self) -> Index:
        """Open the index of the data set; build it, and a synthetic data set, where absent."""
        if self.synthetic is not None:
            generate(Path(self.root), self.synthetic, self.num_workers)
        return self._index()

    def warn_of_derived_motion(self) -> None:
        """Name the scenes without CAN bus files: for models that read them, after :meth:`setup`."""
        assert self.index is not None
        absent = self.index.scenes_without_can_bus
        if absent:
            num = len({self.index.scene(token) for token in self.index.tokens})
            rank_zero_warn(
                f"{len(absent)} of {num} scenes have no CAN bus file, for instance {absent[0]}: "
                f"their ego motion comes from the ego poses; put can_bus/ into {self.root} to read "
                f"what was measured"
            )

    def open_ground_truth(self, index: Index, renew: bool = False) -> GroundTruthDatabase:
        """What pasting draws from: the objects of the training split, made where it is absent;
        ``renew`` as of :func:`build_ground_truth`."""
        lidar = check_lidar_only(self.inputs)
        return build_ground_truth(
            index, self.train_split, lidar, self.on_missing, self.num_workers, renew
        )

    @property
    def train_tokens(self) -> tuple[str, ...]:
        """Sample tokens that training reads."""
        return self._opened("train").tokens

    @property
    def val_tokens(self) -> tuple[str, ...]:
        """Sample tokens that evaluation reads, in order."""
        return self._opened("val").tokens

    def list_tokens(
        self, name: Literal["val", "predict"], num_batches: int | None = None
    ) -> list[str]:
        """Sample tokens that an evaluation answers for, whether their files can be read or not.

        Args:
            num_batches: where it stops before the end, the batches that each process takes: then
                it answers for the samples of these, and for none with missing files. None: for the
                whole split, those with missing files among it.
        """
        frames = self._opened(name)
        if num_batches is None:
            assert self.index is not None
            return self.index.split(self.val_split)
        sizes, (_, world_size) = frames.scene_sizes(), self._place()
        places = set()
        for rank in range(world_size):
            sampler = SceneSampler(sizes, self.val_batch_size, rank, world_size)
            for step in range(min(num_batches, len(sampler))):
                places |= {position for _, position in sampler.batch(step)}
        return [frames.tokens[place] for place in sorted(places)]

    @property
    def steps_per_epoch(self) -> int:
        """Micro-steps in which all ranks together read the training split once."""
        return len(self._sampler())

    def train_dataloader(self) -> BatchStream | WindowedStream:
        """The endless stream, from the micro-step that a checkpoint brought along."""
        sampler = self._sampler()
        trainer = self.trainer
        num_micro_steps, accumulation, done = len(sampler), 1, None
        if trainer is not None:
            accumulation = trainer.accumulate_grad_batches
            if trainer.max_steps is not None and trainer.max_steps > 0:
                num_micro_steps, accumulation = trainer.max_steps * accumulation, 1
                done = trainer.fit_loop.epoch_loop.batch_progress.total.ready
        frames = self._opened("train")
        self.stream = BatchStream(
            self.loader,
            frames,
            sampler,
            num_micro_steps,
            accumulation=accumulation,
            image_cache=self._image_cache,
        )
        if self._state is not None:
            self.stream.load_state_dict(self._state)
            if done is not None:
                self.stream.shift = self.stream.micro_step - done
            if self.stream.num_again:
                rank_zero_warn(
                    f"{self.stream.num_again} samples of the epoch are read again, for the batches "
                    "of this run are others"
                )
        if trainer and getattr(trainer.lightning_module, "loss_norm", None) == "effective":
            return WindowedStream(self.stream, trainer.accumulate_grad_batches)
        return self.stream

    def count_done(self, state: dict[str, int], num_steps: int) -> tuple[int, int]:
        """Micro-steps of this run's batches that stand for what a checkpoint's run has done: in
        all, and of its last epoch.

        Args:
            state: of the checkpoint's stream.
            num_steps: optimizer steps of the checkpoint.
        """
        trainer = self.trainer
        assert trainer is not None
        if trainer.max_steps > 0:  # one pass for all of them
            done = num_steps * trainer.accumulate_grad_batches
            return done, done
        sampler = self._sampler()
        done, _ = sampler.translate(state, trainer.accumulate_grad_batches)
        return done, (done - 1) % len(sampler) + 1 if done else 0

    def val_dataloader(self) -> EvaluationStream:
        """The validation split in order."""
        return self._evaluation("val")

    def test_dataloader(self) -> EvaluationStream:
        """The same as :meth:`val_dataloader`."""
        return self.val_dataloader()

    def predict_dataloader(self) -> EvaluationStream:
        """The validation split in order, without targets."""
        return self._evaluation("predict")

    def state_dict(self) -> dict[str, Any]:
        """Place in the training stream, in plain numbers; empty before there is one."""
        return {} if self.stream is None else dict(self.stream.state_dict())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on at a checkpoint's place; checked when the stream opens.

        Raises:
            InputError: the stream is open and its order is another.
        """
        if not state_dict:
            return
        self._state = dict(state_dict)
        if self.stream is not None:
            self.stream.load_state_dict(self._state)

    def teardown(self, stage: str | None = None) -> None:
        """Report what could not be read and was replaced."""
        skipped = self.loader.stats.skipped
        if skipped:
            warnings.warn(
                f"{len(skipped)} samples could not be read and were replaced by others "
                f"(data.on_missing=skip), first: {next(iter(skipped.values()))}",
                stacklevel=2,
            )

    def _training_source(self, index: Index) -> FrameSource:
        """The training split with its augmentation, balanced and pasted into as asked."""
        gt_sampler = None
        if self.gt_sampling is not None:
            gt_sampler = GTSampler(
                self.gt_sampling, self.open_ground_truth(index), self.classes, self.seed
            )
            if gt_sampler.absent:
                rank_zero_warn(
                    f"the ground-truth database has no {', '.join(gt_sampler.absent)} of at least "
                    f"{self.gt_sampling.min_points} points: none is pasted"
                )
        source = self._source(self.train_split, self.inputs, self.augment, gt_sampler=gt_sampler)
        counts = count_boxes(index, source.tokens, self.classes, self.min_points)
        for sentence in counts.sentences():
            rank_zero_warn(sentence)
        if self.cbgs:
            rows = balance(counts, self.seed)
            source = source.with_tokens([source.tokens[row] for row in rows])
        self._image_cache = open_image_cache(
            self.cache, self.cache_gib, self.cache_dir, source, self.loader
        )
        return source

    def _evaluation_source(self, with_targets: bool = True) -> FrameSource:
        """The validation split; without history, which a model has seen already."""
        inputs = replace(self.inputs, history=0)
        return self._source(self.val_split, inputs, with_targets=with_targets)

    def _source(
        self,
        split: str,
        inputs: Inputs,
        augment: Augment | None = None,
        with_targets: bool = True,
        gt_sampler: GTSampler | None = None,
    ) -> FrameSource:
        assert self.index is not None
        source = FrameSource(
            self.index,
            self.index.split(split),
            inputs,
            self.classes,
            augment=augment,
            seed=self.seed,
            on_missing=self.on_missing,
            with_targets=with_targets,
            min_points=self.min_points,
            target_range=self.target_range,
            gt_sampler=gt_sampler,
            rig=self.rig,
        )
        if source.dropped:
            rank_zero_warn(
                f"{len(source.dropped)} of {len(source.dropped) + len(source)} samples of the "
                f"split "
                f"{split} are left out because files are missing (data.on_missing=skip), first: "
                f"{next(iter(source.dropped.values()))}"
            )
        return source

    def _index(self) -> Index:
        place = (self.root, self.version, self.cache_dir, self.num_workers)
        return open_index(*place, self.rig.reference)

    def _opened(self, name: str) -> FrameSource:
        if name not in self._frames:
            raise RuntimeError(f"call setup() before the {name} samples are used")
        return self._frames[name]

    def _sampler(self) -> TrainSampler:
        rank, world_size = self._place()
        told = None if self.trainer is None else self.trainer.distributed_sampler_kwargs
        if told is not None:
            # Processes that share the work on the same samples count as one.
            rank, world_size = told["rank"], told["num_replicas"]
        return TrainSampler(
            len(self._opened("train")), self.batch_size, rank, world_size, seed=self.seed
        )

    def _evaluation(self, name: str) -> EvaluationStream:
        frames = self._opened(name)
        sampler = SceneSampler(frames.scene_sizes(), self.val_batch_size, *self._place())
        return EvaluationStream(self.loader, frames, sampler)

    def _place(self) -> tuple[int, int]:
        """This process's rank, and how many there are."""
        trainer = self.trainer
        return (0, 1) if trainer is None else (trainer.global_rank, trainer.world_size)
