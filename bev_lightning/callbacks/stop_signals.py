"""Stops a training on a signal, at the same optimizer step in all processes."""

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
    """A signal stopped the training, after it had saved a checkpoint.

    Attributes:
        number: of the signal.
    """

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


class StopRequest:
    """Turns signals into a stop request that all processes see at the same optimizer step.

    A scheduler signals the processes at different moments, or only one of them, and a process that
    stopped alone would leave the others waiting. So they all-reduce the request at every optimizer
    step, asynchronously; the result is read one step later, when it has arrived.

    Args:
        signals: names, such as SIGTERM.
    """

    def __init__(self, signals: Sequence[str]) -> None:
        known = {one.name: one for one in signal.Signals}
        unknown = [str(name) for name in signals if name not in known]
        if unknown:
            raise InputError(
                f"callbacks.steps.stop_signals holds {', '.join(unknown)}, which is no signal; "
                "use names such as SIGTERM or SIGUSR1"
            )
        self._signals = [known[name] for name in signals]
        self._number = 0
        self._handlers: dict[signal.Signals, Any] = {}
        self._group: Any = None
        self._pending: tuple[torch.Tensor, Any] | None = None

    def listen(self, num_processes: int) -> None:
        """Install the signal handlers. All processes must call it."""
        self._number, self._pending = 0, None
        if num_processes > 1 and dist.is_initialized() and self._group is None:
            self._group = dist.new_group(backend="gloo")
        if threading.current_thread() is threading.main_thread():
            for one in self._signals:
                self._handlers.setdefault(one, signal.getsignal(one))
                signal.signal(one, self._note)

    def ignore(self) -> None:
        """Restore the former signal handlers."""
        if threading.current_thread() is threading.main_thread():
            for one, handler in self._handlers.items():
                signal.signal(one, handler)
        self._handlers = {}

    def poll(self) -> int:
        """The number of the signal on which all processes stop now, or 0. All processes must call
        it at the same step."""
        if self._group is None:
            return self._number
        previous = self._pending
        number = torch.tensor([self._number])
        work = dist.all_reduce(number, op=dist.ReduceOp.MAX, group=self._group, async_op=True)
        self._pending = (number, work)
        if previous is None:
            return 0
        previous[1].wait()
        return int(previous[0])

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._number and number == signal.SIGINT:
            signal.default_int_handler(number, frame)  # Ctrl-C once more
        self._number = number
        if os.environ.get("LOCAL_RANK", "0") == "0":
            more = "; Ctrl-C once more ends it at once" if number == signal.SIGINT else ""
            message = f"\n{signal.Signals(number).name}: saving after this optimizer step{more}\n"
            os.write(2, message.encode())  # print is not safe in a signal handler
