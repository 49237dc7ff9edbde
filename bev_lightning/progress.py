"""Progress of a stage: one bar on a terminal, else a plain line a minute."""

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sized
from typing import TypeVar

from tqdm import tqdm

_Item = TypeVar("_Item")
_BAR = "{desc}: {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}{postfix}]"


class Progress:
    """Shows on stderr how far a stage has come.

    On a terminal this is a bar that vanishes at the end. In a file or a pipe it is a line at the
    first update, one a minute, and one at the end.

    Args:
        name: of the stage.
        total: number of units; None or infinite if it is not known.
        unit: what is counted, in the singular.
        initial: units done before.
        delay_s: a stage that ends before shows nothing [s].
        leave: the bar stays on the terminal at its end.
        interval_s: least time between two updates [s]; None for half a second on a terminal and a
            minute elsewhere.
        enabled: False shows nothing.
    """

    def __init__(
        self,
        name: str,
        total: float | None,
        unit: str = "step",
        initial: int = 0,
        delay_s: float = 0.0,
        leave: bool = False,
        interval_s: float | None = None,
        enabled: bool = True,
    ) -> None:
        self.name, self.unit, self.leave, self.enabled = name, unit, leave, enabled
        self.total = int(total) if total is not None and total < float("inf") else None
        self.done = self._initial = initial
        self._file = sys.stderr
        self._on_terminal = self._file.isatty()
        if interval_s is None:
            interval_s = 0.5 if self._on_terminal else 60.0
        self._interval_s = interval_s
        self._began = time.monotonic()
        self._next = self._began + delay_s
        self._bar: tqdm | None = None
        self._line = ""
        self._values: Callable[[], str] | None = None

    def update(self, count: int = 1, values: Callable[[], str] | None = None) -> None:
        """Count units.

        Args:
            values: text to show beside them, such as ``loss 1.2``; called only when it is shown.
        """
        self.done += count
        self._values = values
        if self.enabled and time.monotonic() >= self._next:
            self._show(ends=False)

    def hide(self) -> None:
        """Clear the bar from the terminal until the next update, for other output."""
        if self._bar is not None:
            self._bar.clear()

    def close(self) -> None:
        """Show the last state; nothing of a stage that has not shown anything."""
        if self._bar is not None or self._line:
            self._show(ends=True)
        if self._bar is not None:
            self._bar.close()
        self.enabled = False
        self._bar, self._line = None, ""

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _show(self, ends: bool) -> None:
        self._next = time.monotonic() + self._interval_s
        values = self._values() if self._values is not None else ""
        if not self._on_terminal:
            self._write_line(values, ends)
            return
        if self._bar is None:
            self._bar = tqdm(
                desc=self.name,
                total=self.total,
                initial=self._initial,
                unit=self.unit,
                file=self._file,
                position=0,
                leave=self.leave,
                mininterval=0.0,
                dynamic_ncols=True,
                bar_format=None if self.total is None else _BAR,
            )
        self._bar.set_postfix_str(values, refresh=False)
        self._bar.update(self.done - self._bar.n)
        self._bar.refresh()

    def _write_line(self, values: str, ends: bool) -> None:
        seconds = time.monotonic() - self._began
        count = self.done - self._initial
        parts = [f"{self.name}: {self.unit} {self.done}"]
        if self.total:
            parts = [f"{parts[0]}/{self.total} ({100 * self.done // self.total} %)"]
        parts += [values] if values else []
        if ends:
            parts.append(f"in {tqdm.format_interval(seconds)}")
        elif self.total and count > 0:
            left = seconds / count * (self.total - self.done)
            parts.append(f"{tqdm.format_interval(left)} left")
        self._line = ", ".join(parts)
        print(self._line, file=self._file, flush=True)


def track(
    items: Iterable[_Item],
    name: str,
    total: int | None = None,
    unit: str = "step",
    delay_s: float = 1,
) -> Iterator[_Item]:
    """The items, with a :class:`Progress` over them."""
    if total is None and isinstance(items, Sized):
        total = len(items)
    with Progress(name, total, unit, delay_s=delay_s) as progress:
        for item in items:
            yield item
            progress.update()
