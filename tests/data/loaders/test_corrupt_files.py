"""Files that are damaged in every way we know: what each loader does, under both policies."""

import io
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from bev_lightning.data.loaders.protocol import Loader
from bev_lightning.data.loaders.shared_memory import SharedMemoryLoader
from bev_lightning.data.loaders.torch import TorchLoader
from bev_lightning.data.nuscenes.index import open_index
from bev_lightning.data.nuscenes.sensor_files import find_fault
from bev_lightning.data.samplers import TrainSampler
from bev_lightning.data.samples.frame import FrameSource
from bev_lightning.errors import InputError
from bev_lightning.structures import CameraInput, Inputs, LidarInput, RadarInput

VERSION = "v1.0-mini"
RANGE = (-30.0, -30.0, -5.0, 30.0, 30.0, 5.0)
SIZE = (90, 160)  # height, width of the tree's images
INPUTS = Inputs(
    CameraInput((32, 64), ("CAM_FRONT", "CAM_BACK")),
    LidarInput(RANGE, sweeps=1),
    RadarInput(RANGE, ("RADAR_FRONT", "RADAR_BACK_LEFT"), sweeps=0),
)
LOADERS = ("torch", "dali", "dali_prefetch", "zero_copy")


def encode(size: tuple[int, int], kind: str) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", size[::-1], (40, 90, 200)).save(buffer, kind)
    return buffer.getvalue()


def noisy_jpeg() -> bytes:
    buffer = io.BytesIO()
    pixels = np.random.default_rng(0).integers(0, 255, (*SIZE, 3), np.uint8)
    Image.fromarray(pixels).save(buffer, "JPEG", quality=95)
    return buffer.getvalue()


def lose_block(content: bytes) -> bytes:
    whole = noisy_jpeg()
    assert len(whole) > 16384
    return whole[:8192] + bytes(4096) + whole[12288:]


def points(change: Callable[[np.ndarray], None]) -> Callable[[bytes], bytes]:
    def damage(content: bytes) -> bytes:
        values = np.frombuffer(content, np.float32).reshape(-1, 5).copy()
        change(values)
        return values.tobytes()

    return damage


def put(column: int, value: float) -> Callable[[bytes], bytes]:
    return points(lambda values: values.__setitem__((3, column), value))


def make_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def make_link(path: Path) -> None:
    path.unlink()
    path.symlink_to(path.with_suffix(".gone"))


# sensor, damage (of the content, or of the path), part of the error
CASES: dict[str, tuple[str, Callable, str]] = {
    "image: half a file": ("image", lambda c: c[: len(c) // 2], "cannot be decoded"),
    "image: header alone": ("image", lambda c: c[:300], "cannot be decoded"),
    "image: 0 bytes": ("image", lambda c: b"", r"\(0 bytes\) cannot be decoded"),
    "image: text": ("image", lambda c: b"<html>404</html>\n" * 30, "not an image"),
    "image: GIF": ("image", lambda c: encode(SIZE, "GIF"), "not an image"),
    "image: zeros": ("image", lambda c: bytes(len(c)), "not an image"),
    "image: a block of zeros": ("image", lose_block, "4096 zero bytes in a row at byte"),
    "image: zeros to the end": (
        "image",
        lambda c: noisy_jpeg()[:8192] + bytes(8192),
        "4096 zero bytes in a row at byte",
    ),
    "image: turned": ("image", lambda c: encode(SIZE[::-1], "JPEG"), "is 90x160 pixels and"),
    "image: smaller": ("image", lambda c: encode((45, 80), "PNG"), "is 80x45 pixels and"),
    "image: gone": ("image", Path.unlink, r"cannot be read \(No such file"),
    "image: a folder": ("image", make_folder, r"cannot be read \(Is a directory"),
    "image: link to nothing": ("image", make_link, r"cannot be read \(No such file"),
    "lidar: cut within a point": ("lidar", lambda c: c[:1998], r"\(1998 bytes\) is cut"),
    "lidar: 0 bytes": ("lidar", lambda c: b"", r"\(0 bytes\) is empty"),
    "lidar: NaN": ("lidar", put(1, np.nan), "NaN or infinity in 1 of 200 points"),
    "lidar: infinity": ("lidar", put(3, np.inf), "NaN or infinity in 1 of 200 points"),
    "lidar: NaN in the ring": ("lidar", put(4, np.nan), "NaN or infinity in 1 of 200 points"),
    "lidar: zeros": ("lidar", lambda c: bytes(len(c)), "holds only zeros"),
    "lidar: text": ("lidar", lambda c: b"404 not found", r"\(13 bytes\) is cut"),
    "lidar: gone": ("lidar", Path.unlink, r"cannot be read \(No such file"),
    "lidar: a folder": ("lidar", make_folder, r"cannot be read \(Is a directory"),
    "sweep: 0 bytes": ("sweep", lambda c: b"", r"\(0 bytes\) is empty"),
    "sweep: NaN": ("sweep", put(0, np.nan), "NaN or infinity in 1 of 200 points"),
    "radar: 0 bytes": ("radar", lambda c: b"", r"\(0 bytes\) is not a whole binary .pcd"),
    "radar: header alone": ("radar", lambda c: c[:120], "is not a whole binary .pcd"),
    "radar: cut": ("radar", lambda c: c[:-30], "is not a whole binary .pcd"),
    "radar: ascii": (
        "radar",
        lambda c: c.replace(b"DATA binary", b"DATA ascii"),
        "is not a whole binary .pcd",
    ),
    "radar: no velocity": (
        "radar",
        lambda c: c.replace(b"vx_comp", b"vx_gone"),
        "is not a whole binary .pcd",
    ),
    "radar: gone": ("radar", Path.unlink, r"cannot be read \(No such file"),
}


def make(name: str, num_workers: int = 0) -> Loader:
    if name == "torch":
        return TorchLoader(num_workers)
    if name == "zero_copy":
        return SharedMemoryLoader(num_workers)
    from bev_lightning.data.loaders.dali import DaliLoader

    queues = (2, 1) if name == "dali_prefetch" else (0, 0)
    return DaliLoader(num_workers, 1, False, *queues)


@pytest.fixture
def make_frames(make_tree, tmp_path: Path):  # type: ignore[no-untyped-def]
    index = open_index(make_tree(sweeps=1), VERSION, tmp_path / "cache")

    def make_source(on_missing: str, inputs: Inputs = INPUTS) -> FrameSource:
        return FrameSource(index, index.tokens, inputs, ("car",), on_missing=on_missing)

    return make_source


def damage(frames: FrameSource, case: str) -> Path:
    """Damage a file of the third sample."""
    sensor, change, _ = CASES[case]
    frame = frames.frame(0, 2)
    path = {
        "image": lambda: frame.images[1].path,
        "lidar": lambda: frame.lidar[0].path,
        "sweep": lambda: frame.lidar[1].path,
        "radar": lambda: frame.radar[1].path,
    }[sensor]()
    if change in (Path.unlink, make_folder, make_link):
        change(path)
    else:
        path.write_bytes(change(path.read_bytes()))
    return path


def test_the_list_is_long() -> None:
    kinds = {case.partition(": ")[2] for case in CASES}
    assert len(CASES) >= 20
    assert len(kinds) >= 8


@pytest.mark.parametrize("case", CASES)
def test_damage_is_named_or_replaced_by_every_loader(make_frames, case: str) -> None:  # type: ignore[no-untyped-def]
    strict, lenient = make_frames("error"), make_frames("skip")
    token = strict.tokens[2]
    path = damage(strict, case)
    began = time.monotonic()
    for name in LOADERS:
        batches = make(name).open(strict, TrainSampler(5, 1, shuffle=False), 0, 5)
        for position in range(2):  # those before it arrive
            assert next(batches).sample_tokens == (strict.tokens[position],)
        with pytest.raises(InputError) as caught:
            next(batches)
        message = str(caught.value)
        assert message.startswith(f"sample {token}: the "), name
        assert str(path) in message, name
        assert "\n" not in message, name
        caught.match(CASES[case][2])
        caught.match("replace|restore|download|loader=")

        loader = make(name)
        read = list(loader.open(lenient, TrainSampler(5, 1, shuffle=False), 0, 5))
        expected = [lenient.tokens[i] for i in (0, 1, 3, 3, 4)]
        assert [batch.sample_tokens[0] for batch in read] == expected, name
        assert loader.stats.skipped == {token: message}, name
        for batch in read:
            batch.validate()
            assert batch.cameras.images.std(dim=(2, 3, 4)).min() > 0.1, name  # no blank image
    assert time.monotonic() - began < 20


@pytest.mark.parametrize("name", LOADERS)
@pytest.mark.parametrize("case", ["image: half a file", "lidar: NaN", "radar: cut"])
def test_worker_processes_raise_the_same_errors(make_frames, name: str, case: str) -> None:  # type: ignore[no-untyped-def]
    frames = make_frames("error")
    path = damage(frames, case)
    began = time.monotonic()
    with pytest.raises(InputError, match=CASES[case][2]) as caught:
        list(make(name, 1).open(frames, TrainSampler(5, 1, shuffle=False), 0, 5))
    assert str(path) in str(caught.value)
    assert time.monotonic() - began < 5


@pytest.mark.parametrize("name", LOADERS)
def test_what_is_odd_but_whole_is_read(make_frames, name: str) -> None:  # type: ignore[no-untyped-def]
    """A PNG that is called .jpg; a radar without returns; a file replaced while others train."""
    frames = make_frames("error")
    frame = frames.frame(0, 2)
    frame.images[0].path.write_bytes(encode(SIZE, "PNG"))
    content = frame.radar[0].path.read_bytes()
    head = content[: content.index(b"DATA binary\n") + len(b"DATA binary\n")]
    frame.radar[0].path.write_bytes(head.replace(b"WIDTH 4", b"WIDTH 0"))
    batches = make(name).open(frames, TrainSampler(5, 1, shuffle=False), 0, 10)
    first = [next(batches) for _ in range(3)][2]
    assert first.radar.count.item() == 2
    colour = torch.tensor(INPUTS.camera.mean) + first.cameras.images[0, 0].mean(
        dim=(1, 2)
    ).cpu() * torch.tensor(INPUTS.camera.std)
    torch.testing.assert_close(colour, torch.tensor([40.0, 90, 200]), atol=2.0, rtol=0)
    # Replaced, under the same name, in one step: from then on the new one is read.
    new = frame.images[0].path.with_suffix(".new")
    new.write_bytes(noisy_jpeg())
    os.replace(new, frame.images[0].path)
    later = list(batches)[4]
    assert later.sample_tokens == first.sample_tokens
    assert later.cameras.images[0, 0].std() > 0.2 > first.cameras.images[0, 0, 0].std()


def test_prepare_finds_faults_at_the_ends_of_files(make_frames) -> None:  # type: ignore[no-untyped-def]
    """It does not decode: a lost block in the middle is for the training to find."""
    frames = make_frames("error")
    found = {}
    for case in CASES:
        path = frames.frame(0, 2).images[1].path
        if CASES[case][0] == "image" and CASES[case][1] not in (make_folder, make_link):
            keep = path.read_bytes()
            damage(frames, case)
            found[case] = find_fault(path, SIZE)
            path.write_bytes(keep)
    assert {case for case, fault in found.items() if not fault} == {"image: a block of zeros"}
    assert found["image: gone"] == "missing"


def read_until_killed(name: str, frames: FrameSource, answer: Path) -> None:
    """Runs in a separate process, since torch raises for dead workers wherever its process is."""
    before = set(children())
    batches = make(name, 1).open(frames, TrainSampler(5, 1), 0, 1_000_000)
    next(batches)
    workers = set(children()) - before
    began = []

    def kill() -> None:
        began.append(time.monotonic())
        for worker in workers:
            os.kill(worker, signal.SIGKILL)

    threading.Timer(0.3, kill).start()
    try:
        for _ in batches:
            pass
    except InputError as error:
        answer.write_text(f"{time.monotonic() - began[0]}\n{error}")
    os._exit(0)


def children() -> list[int]:
    own = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
    return [int(pid) for pid in own]


@pytest.mark.parametrize("name", LOADERS)
def test_a_killed_process_is_a_sentence_and_no_hang(make_frames, tmp_path, name: str) -> None:  # type: ignore[no-untyped-def]
    answer = tmp_path / "answer"
    process = multiprocessing.get_context("fork").Process(
        target=read_until_killed, args=(name, make_frames("error"), answer)
    )
    process.start()
    process.join(30)
    assert process.exitcode == 0
    took, *sentence = answer.read_text().splitlines()
    assert float(took) < 5
    assert len(sentence) == 1 and "loader.num_workers" in sentence[0]
    assert "killed" in sentence[0] or "signal 9" in sentence[0]
