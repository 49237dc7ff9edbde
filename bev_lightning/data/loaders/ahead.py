"""An iterator that a thread of its own runs ahead, up to a bounded queue."""

import queue
import threading
from collections.abc import Iterator
from typing import Any, Generic, TypeVar

_T = TypeVar("_T")
_PATIENCE_S = 0.05  # between two looks whether it is closed


class Ahead(Generic[_T]):
    """Items of an iterator in their order; its exception is raised where its item would be due."""

    def __init__(self, items: Iterator[_T], depth: int) -> None:
        """Start the thread.

        Args:
            depth: items that wait in the queue at most.
        """
        self._queue: queue.Queue[Any] = queue.Queue(depth)
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(items,), daemon=True)
        self._thread.start()

    def __iter__(self) -> "Ahead[_T]":
        return self

    def __next__(self) -> _T:
        item, error = self._queue.get()
        if error is not None:
            self._queue.put((None, error))  # for who asks again
            raise error
        return item  # type: ignore[no-any-return]

    def stop(self) -> None:
        """Let the thread end after the item it is at; what waits in the queue is dropped."""
        self._is_closed.set()

    def join(self) -> None:
        """Wait for the thread's end."""
        self._thread.join()

    def _run(self, items: Iterator[_T]) -> None:
        try:
            for item in items:
                if not self._put((item, None)):
                    return
        except BaseException as error:
            self._put((None, error))
        else:
            self._put((None, StopIteration()))

    def _put(self, pair: tuple[Any, BaseException | None]) -> bool:
        while not self._is_closed.is_set():
            try:
                self._queue.put(pair, timeout=_PATIENCE_S)
            except queue.Full:
                continue
            return True
        return False
