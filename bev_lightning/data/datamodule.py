"""LightningDataModule of a nuScenes data set: index, samples, and resumable batch streams."""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from lightning.pytorch import LightningDataModule
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from bev_lightning.checks import check_choice, check_number
from bev_lightning.classes import check_classes
from bev_lightning.data.batch_stream import (
    BatchStream,
    EvaluationStream,
    WindowedStream,
    is_stream_state,
)
from bev_lightning.data.build_gt_database import build_gt_database
from bev_lightning.data.class_balance import balance, count_boxes
from bev_lightning.data.loaders.image_cache import (
    CacheKind,
    ImageCache,
    check_image_cache,
    open_image_cache,
)
from bev_lightning.data.loaders.protocol import Loader
from bev_lightning.data.nuscenes.ground_truth import read_ground_truth
from bev_lightning.data.nuscenes.index import open_index
from bev_lightning.data.nuscenes.sample import SampleIndex
from bev_lightning.data.nuscenes.sensor_rig import SensorRig
from bev_lightning.data.samplers import SceneSampler, TrainSampler
from bev_lightning.data.samples.frame import FrameSource
from bev_lightning.data.synthetic.dataset import SyntheticSpec, generate
from bev_lightning.data.transforms.augment import Augment
from bev_lightning.data.transforms.gt_database import GroundTruthDatabase
from bev_lightning.data.transforms.gt_sampling import GTSampler, GTSampling
from bev_lightning.errors import InputError
from bev_lightning.structures import Inputs
from bev_lightning.structures.ground_truth import GroundTruth


class DetectionDataModule(LightningDataModule):
    """Loads a nuScenes data set for one model; subclass it for a data set of another format.

    Training reads an endless stream whose order and augmentation are functions of the seed.
    Evaluation reads its split in order: whole scenes per rank, and the same number of steps on all
    ranks. A rank that finishes early repeats its last sample, and a sample's first result counts.
    Evaluation loads no history, since a temporal model gets the frames of a scene one by one.

    Attributes:
        index: index of the data set, from :meth:`setup` on.
        stream: batches of training, from :meth:`train_dataloader` on.
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
        class_of_category: Mapping[str, str] | None = None,
    ) -> None:
        """Check and store the settings; nothing is read before :meth:`prepare_data`.

        Args:
            root: data root.
            version: folder of the tables.
            train_split, val_split: official splits, or splits in the version folder's splits.json.
            batch_size, val_batch_size: samples per process.
            on_missing: policy for samples whose files are missing or unreadable. "error" stops.
                "skip" leaves missing ones out, replaces unreadable ones by the next sample, and
                reports both; the metric counts them as samples without predictions.
            classes: names in the order of the labels.
            num_workers: processes that generate the synthetic data set and read the tables.
            inputs: sensors that the model reads.
            augment: training augmentation; None for none.
            loader: reads the files.
            cache_dir: folder of the index files, outside the root.
            seed: of sample order and augmentation.
            synthetic: generates the data set at the root if it is absent.
            min_points, target_range: which boxes are targets, see :class:`FrameSource`.
            cbgs: class-balanced grouping and sampling of the training samples
                (:func:`bev_lightning.data.class_balance.balance`).
            gt_sampling: objects of other scenes pasted into the training samples of a lidar
                model; None for none.
            cache, cache_gib: where training caches decoded images, and the size per process.
            sensors: the rig; None for nuScenes' cars.
            class_of_category: class of each annotated category, for own class names; None: the
                nuScenes detection classes.

        Raises:
            InputError: a setting is invalid, or two contradict each other.
        """
        super().__init__()
        check_choice("data.on_missing", on_missing)
        check_classes(classes, class_of_category)
        check_number("data.batch_size", batch_size)
        check_number("data.val_batch_size", val_batch_size)
        if synthetic is not None and synthetic.version != version:
            raise InputError(
                f"data.version={version} and data.synthetic.version={synthetic.version} differ; "
                "set both to the same value"
            )
        if target_range is not None and len(target_range) != 6:
            raise InputError(
                f"data.target_range={list(target_range)} must be six numbers, the minima of x, y, "
                "z and their maxima [m]; use null for the lidar's range"
            )
        check_image_cache(cache, loader)
        if gt_sampling is not None:
            gt_sampling.check(inputs, classes)
        self.root, self.version = root, version
        self.train_split, self.val_split = train_split, val_split
        self.batch_size, self.val_batch_size = batch_size, val_batch_size
        self.on_missing = on_missing
        self.classes, self.num_workers = tuple(classes), num_workers
        self.class_of_category = class_of_category and dict(class_of_category)
        self.inputs, self.augment, self.loader = inputs, augment, loader
        self.cache_dir, self.seed = cache_dir, seed
        self.synthetic = synthetic
        self.min_points, self.target_range = min_points, target_range
        self.cbgs, self.gt_sampling = cbgs, gt_sampling
        self.cache, self.cache_gib = cache, cache_gib
        self.rig = SensorRig() if sensors is None else sensors
        self.index: SampleIndex | None = None
        self.stream: BatchStream | None = None
        self._image_cache: ImageCache | None = None
        self._frames: dict[str, FrameSource] = {}
        self._state: dict[str, int] | None = None

    def prepare_data(self) -> None:
        """Build what is absent or out of date, once per node: the synthetic data set, the index
        and, for training, the database of objects to paste."""
        index = self.open_index()
        if self.gt_sampling is not None and (self.trainer is None or self.trainer.training):
            self.open_gt_database(index)

    def setup(self, stage: str | None = None) -> None:
        """Open the index and check that the files of the splits exist.

        Args:
            stage: fit, validate, test or predict; None for all.

        Raises:
            InputError: the index, a split, a class or a file is missing.
        """
        if self.index is None:
            self.index = self.open_index()
        # Evaluation reads no history, since a temporal model has seen it already.
        if stage in (None, "fit") and "train" not in self._frames:
            self._frames["train"] = self._training_source(self.index)
        if stage in (None, "fit", "validate", "test") and "val" not in self._frames:
            self._frames["val"] = self._source(self.val_split, history=0)
        if stage in (None, "predict") and "predict" not in self._frames:
            self._frames["predict"] = self._source(self.val_split, history=0, with_targets=False)

    def open_index(self) -> SampleIndex:
        """Open the index of the data set; build it, and a synthetic data set, where absent.

        Override it to read a data set of another format. It is called once per node before the
        other processes call it.
        """
        if self.synthetic is not None:
            generate(Path(self.root), self.synthetic, self.num_workers)
        return open_index(
            self.root,
            self.version,
            self.cache_dir,
            self.num_workers,
            reference=self.rig.reference,
            class_of_category=self.class_of_category,
        )

    def ground_truth(self, tokens: Sequence[str]) -> dict[str, GroundTruth]:
        """Annotated boxes of samples for the metric, by sample token."""
        return read_ground_truth(self.open_index() if self.index is None else self.index, tokens)

    def warn_of_derived_motion(self) -> None:
        """Warn of scenes without CAN bus files; for models that read them, after :meth:`setup`."""
        assert self.index is not None
        absent = self.index.scenes_without_can_bus
        if absent:
            num = len({self.index.scene(token) for token in self.index.tokens})
            rank_zero_warn(
                f"{len(absent)} of {num} scenes have no CAN bus file, for instance {absent[0]}: "
                f"their ego motion is derived from the ego poses; copy can_bus/ into {self.root} "
                "to use the measured one"
            )

    def open_gt_database(self, index: SampleIndex) -> GroundTruthDatabase:
        """Open the ground-truth database of the training split; build it first if it is absent or
        out of date."""
        assert self.gt_sampling is not None
        lidar = self.gt_sampling.check(self.inputs, self.classes)
        return build_gt_database(
            index, self.train_split, lidar, self.classes, self.on_missing, self.num_workers
        )

    @property
    def train_tokens(self) -> tuple[str, ...]:
        """Sample tokens that training reads."""
        return tuple(self._opened("train").tokens)

    @property
    def val_tokens(self) -> tuple[str, ...]:
        """Sample tokens that evaluation reads, in order."""
        return tuple(self._opened("val").tokens)

    def list_tokens(
        self, name: Literal["val", "predict"], num_batches: int | None = None
    ) -> list[str]:
        """Sample tokens that an evaluation reports results for.

        Args:
            num_batches: batches per process if the evaluation stops early: then only the samples of
                these batches, none of which has missing files. None: the whole split, including
                samples with missing files.
        """
        frames = self._opened(name)
        if num_batches is None:
            assert self.index is not None
            return self.index.split(self.val_split)
        sizes, (_, world_size) = frames.scene_sizes(), self._rank_and_world_size()
        positions = set()
        for rank in range(world_size):
            sampler = SceneSampler(sizes, self.val_batch_size, rank, world_size)
            for step in range(min(num_batches, len(sampler))):
                positions |= {position for _, position in sampler.batch(step)}
        return [frames.tokens[position] for position in sorted(positions)]

    @property
    def steps_per_epoch(self) -> int:
        """Micro-steps per epoch, in which all ranks together read the training split once."""
        return len(self._train_sampler())

    def train_dataloader(self) -> BatchStream | WindowedStream:
        """Endless stream of training batches, from the micro-step of the loaded checkpoint on."""
        sampler, trainer = self._train_sampler(), self.trainer
        num_micro_steps, accumulation, done = len(sampler), 1, None
        if trainer is not None:
            accumulation = trainer.accumulate_grad_batches
            if trainer.max_steps is not None and trainer.max_steps > 0:
                num_micro_steps, accumulation = trainer.max_steps * accumulation, 1
                done = trainer.fit_loop.epoch_loop.batch_progress.total.ready
        self.stream = BatchStream(
            self.loader,
            self._opened("train"),
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
                    f"{self.stream.num_again} samples of the epoch are read twice, because the "
                    "checkpoint's run had another batch size or number of processes"
                )
        if trainer and getattr(trainer.lightning_module, "loss_norm", None) == "effective":
            return WindowedStream(self.stream, trainer.accumulate_grad_batches)
        return self.stream

    def restore_progress(self, checkpoint: dict[str, Any]) -> tuple[int, int]:
        """Prepare a checkpoint for a resume and count its progress in this run's micro-steps.

        Lightning stores the state of a DataModule under the name of its class. A state that another
        class of this kind has written, for instance the base class of a subclass, is moved under
        the name of this one, so that Lightning finds it.

        Args:
            checkpoint: as Lightning loads it.

        Returns:
            micro-steps done in all, and in the current epoch. They differ from the checkpoint's own
            counts where its run had another batch size, number of processes or accumulation.

        Raises:
            InputError: the checkpoint has no position in the training data.
        """
        own = type(self).__qualname__
        if own not in checkpoint:
            found = [value for value in checkpoint.values() if is_stream_state(value)]
            if not found:
                raise InputError(
                    f"the checkpoint has no position in the training data ({own} has not saved "
                    f"one), so training cannot resume at the same sample; start a new run from its "
                    f"weights with init_from=<checkpoint>"
                )
            checkpoint[own] = found[0]
        trainer = self.trainer
        assert trainer is not None
        accumulation = trainer.accumulate_grad_batches
        if trainer.max_steps > 0:  # one pass over all steps
            done = checkpoint["global_step"] * accumulation
            return done, done
        sampler = self._train_sampler()
        done, _ = sampler.translate(checkpoint[own], accumulation)
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
        """Position in the training stream, in plain numbers; empty before there is a stream."""
        return {} if self.stream is None else dict(self.stream.state_dict())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue at a checkpoint's position; checked when the stream opens.

        Raises:
            InputError: the stream is open and its order differs.
        """
        if not state_dict:
            return
        self._state = dict(state_dict)
        if self.stream is not None:
            self.stream.load_state_dict(self._state)

    def teardown(self, stage: str | None = None) -> None:
        """Report the samples that could not be read and were replaced."""
        skipped = self.loader.stats.skipped
        if skipped:
            warnings.warn(
                f"{len(skipped)} samples could not be read and were replaced by others "
                f"(data.on_missing=skip), first: {next(iter(skipped.values()))}",
                stacklevel=2,
            )

    def _training_source(self, index: SampleIndex) -> FrameSource:
        """The training split with augmentation, class balancing and ground-truth sampling."""
        gt_sampler = None
        if self.gt_sampling is not None:
            gt_sampler = GTSampler(
                self.gt_sampling, self.open_gt_database(index), self.classes, self.seed
            )
            if gt_sampler.absent:
                rank_zero_warn(
                    f"the ground-truth database has no {', '.join(gt_sampler.absent)} of at least "
                    f"{self.gt_sampling.min_points} points: none is pasted"
                )
        source = self._source(
            self.train_split, self.inputs.history, augment=self.augment, gt_sampler=gt_sampler
        )
        counts = count_boxes(index, source.tokens, self.classes, self.min_points)
        for sentence in counts.warnings():
            rank_zero_warn(sentence)
        if self.cbgs:
            rows = balance(counts, self.seed)
            source = source.with_tokens([source.tokens[row] for row in rows])
        self._image_cache = open_image_cache(
            self.cache, self.cache_gib, self.cache_dir, source, self.loader
        )
        return source

    def _source(self, split: str, history: int, **settings: Any) -> FrameSource:
        assert self.index is not None
        source = FrameSource(
            self.index,
            self.index.split(split),
            replace(self.inputs, history=history),
            self.classes,
            seed=self.seed,
            on_missing=self.on_missing,
            min_points=self.min_points,
            target_range=self.target_range,
            rig=self.rig,
            **settings,
        )
        if source.dropped:
            rank_zero_warn(
                f"{len(source.dropped)} of {len(source.dropped) + len(source)} samples of the "
                f"split {split} are left out because files are missing (data.on_missing=skip), "
                f"first: {next(iter(source.dropped.values()))}"
            )
        return source

    def _opened(self, name: str) -> FrameSource:
        if name not in self._frames:
            raise RuntimeError(f"call setup() before the {name} samples are used")
        return self._frames[name]

    def _train_sampler(self) -> TrainSampler:
        rank, world_size = self._rank_and_world_size()
        strategy_ranks = None if self.trainer is None else self.trainer.distributed_sampler_kwargs
        if strategy_ranks is not None:
            # Processes of a strategy that work on the same samples count as one.
            rank, world_size = strategy_ranks["rank"], strategy_ranks["num_replicas"]
        return TrainSampler(
            len(self._opened("train")), self.batch_size, rank, world_size, seed=self.seed
        )

    def _evaluation(self, name: str) -> EvaluationStream:
        frames = self._opened(name)
        sampler = SceneSampler(
            frames.scene_sizes(), self.val_batch_size, *self._rank_and_world_size()
        )
        return EvaluationStream(self.loader, frames, sampler)

    def _rank_and_world_size(self) -> tuple[int, int]:
        trainer = self.trainer
        return (0, 1) if trainer is None else (trainer.global_rank, trainer.world_size)
