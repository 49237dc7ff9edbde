import io
import sys
import time
from collections.abc import Callable

import pytest

from bev_lightning.progress import Progress, track


def test_a_bar_on_a_terminal_leaves_no_line(run_on_terminal: Callable) -> None:
    output, lines = run_on_terminal(
        "from bev_lightning.progress import Progress\n"
        "with Progress('reading', 4, 'file', interval_s=0) as progress:\n"
        "    for _ in range(4): progress.update(1, lambda: 'loss 1.5')\n"
        "print('done')\n"
    )
    assert "reading:  25%" in output and "reading: 100%" in output and "loss 1.5" in output
    assert "\n" not in output.split("done")[0].rstrip("\r\n")  # one line, drawn over
    assert lines == ["done"]


def test_a_bar_that_stays_is_drawn_once(run_on_terminal: Callable) -> None:
    _, lines = run_on_terminal(
        "from bev_lightning.progress import Progress\n"
        "with Progress('train', 3, leave=True, interval_s=0) as progress:\n"
        "    for _ in range(3):\n"
        "        progress.update()\n"
        "        progress.hide()\n"
        "        with Progress('validate', 2, 'batch', interval_s=0) as inner:\n"
        "            for _ in range(2): inner.update()\n"
        "print('done')\n"
    )
    assert len(lines) == 2 and lines[0].startswith("train: 100%") and lines[1] == "done"


def test_a_file_gets_a_first_and_a_last_line(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress("train", 100, initial=10) as progress:
        for _ in range(90):
            progress.update(1, lambda: "loss 1.5")
    first, last = capsys.readouterr().err.splitlines()
    assert first.startswith("train: step 11/100 (11 %), loss 1.5, 00:0") and first.endswith("left")
    assert last.startswith("train: step 100/100 (100 %), loss 1.5, in 00:0")


def test_a_file_gets_lines_at_the_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    stream, now = io.StringIO(), 0.0
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(time, "monotonic", lambda: now)
    calls = []
    with Progress("train", None) as progress:
        for _ in range(10):
            now += 20.0
            progress.update(1, lambda: str(calls.append(1) or "loss 2"))
    assert stream.getvalue().splitlines() == [
        "train: step 1, loss 2",
        "train: step 4, loss 2",
        "train: step 7, loss 2",
        "train: step 10, loss 2",
        "train: step 10, loss 2, in 03:20",
    ]
    assert len(calls) == 5  # values are read only when they are shown


def test_a_short_stage_shows_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert list(track(range(5), "reading")) == [0, 1, 2, 3, 4]
    with Progress("quiet", 2, enabled=False) as progress:
        progress.update()
    assert capsys.readouterr().err == ""
    assert list(track(iter("ab"), "reading", unit="file", delay_s=0)) == ["a", "b"]
    assert capsys.readouterr().err.startswith("reading: file 1\nreading: file 2, in 00:00\n")
