"""A training that is asked to stop: by whom, and when all of its processes know."""

import os
import signal
import threading
from collections.abc import Sequence
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from bev_lightning.errors import InputError


class Stopped(Exception):  # noqa: N818  not an error
    """A signal ended the training, after it had saved.

    Attributes:
        number: of the signal.
    """

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


class StopRequest:
    """Signals that are taken as a wish to stop, which all processes learn of at the same step.

    A scheduler tells the processes at different moments, or only one of them; if one stopped by
    itself the others would wait for it. So they ask one another at every optimizer step. The answer
    is read at the next one, when it has long been there: nobody waits for it.

    Args:
        signals: names, such as SIGTERM.
    """

    def __init__(self, signals: Sequence[str]) -> None:
        known = {one.name: one for one in signal.Signals}
        unknown = [str(name) for name in signals if name not in known]
        if unknown:
            raise InputError(
                f"callbacks.steps.stop_signals holds {', '.join(unknown)}, which is no signal; "
                "name signals such as SIGTERM or SIGUSR1"
            )
        self._signals = [known[name] for name in signals]
        self._number = 0
        self._before: dict[signal.Signals, Any] = {}
        self._group: Any = None
        self._asked: tuple[torch.Tensor, Any] | None = None

    def listen(self, num_processes: int) -> None:
        """Take the signals from now on. All processes must call it."""
        self._number, self._asked = 0, None
        if num_processes > 1 and dist.is_initialized() and self._group is None:
            self._group = dist.new_group(backend="gloo")
        if threading.current_thread() is threading.main_thread():
            for one in self._signals:
                self._before.setdefault(one, signal.getsignal(one))
                signal.signal(one, self._note)

    def ignore(self) -> None:
        """Leave the signals to whom they belonged."""
        if threading.current_thread() is threading.main_thread():
            for one, handler in self._before.items():
                signal.signal(one, handler)
        self._before = {}

    def poll(self) -> int:
        """The signal upon which all processes stop now; 0 to go on. Called by all at the same
        step."""
        if self._group is None:
            return self._number
        before = self._asked
        number = torch.tensor([self._number])
        work = dist.all_reduce(number, op=dist.ReduceOp.MAX, group=self._group, async_op=True)
        self._asked = (number, work)
        if before is None:
            return 0
        before[1].wait()
        return int(before[0])

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._number and number == signal.SIGINT:
            signal.default_int_handler(number, frame)  # Ctrl-C once more
        self._number = number
        if os.environ.get("LOCAL_RANK", "0") == "0":
            more = "; Ctrl-C once more ends it at once" if number == signal.SIGINT else ""
            said = f"\n{signal.Signals(number).name}: saving after this optimizer step{more}\n"
            os.write(2, said.encode())  # print is not for signal handlers
