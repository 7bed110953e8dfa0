"""Ending a command that runs until a signal arrives."""

from __future__ import annotations

import contextlib
import math
import os
import select
import signal
from collections.abc import Callable, Iterator, Sequence


class Ending:
    """A kind of ``threading.Event`` that a signal handler may set while the same thread waits for it. The lock of an
    Event is not reentrant, so a handler that interrupts the holder of the lock would wait forever."""

    def __init__(self, read_fd: int, write_fd: int) -> None:
        self._write_fd = write_fd
        self._is_set = False
        self.number = 0
        """Number of the signal that set this ``Ending``."""
        self._poll = select.poll()
        self._poll.register(read_fd, select.POLLIN)

    def set(self) -> None:
        self._is_set = True
        with contextlib.suppress(BlockingIOError):
            os.write(self._write_fd, b".")

    def is_set(self) -> bool:
        return self._is_set

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until it is set, for at most ``timeout_s`` seconds (None: no limit). Return whether it is set."""
        if not self._is_set:
            self._poll.poll(None if timeout_s is None else math.ceil(max(timeout_s, 0.0) * 1e3))
        return self._is_set


def list_ending_signals() -> list[signal.Signals]:
    """SIGTERM, and SIGHUP unless it is ignored (as under nohup)."""
    is_ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return [signal.SIGTERM] if is_ignored else [signal.SIGTERM, signal.SIGHUP]


@contextlib.contextmanager
def ended_by(numbers: Sequence[signal.Signals], leave_at_second: bool = False) -> Iterator[Ending]:
    """An Ending that these signals set instead of ending the process, so that the command ends in its normal way.

    ``leave_at_second``: the second signal raises KeyboardInterrupt."""
    read_fd, write_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    ending = Ending(read_fd, write_fd)

    def handle(number: int, _: object) -> None:
        if leave_at_second and ending.is_set():
            raise KeyboardInterrupt
        ending.number = number
        ending.set()

    try:
        with _handled(numbers, handle):
            yield ending
    finally:
        os.close(read_fd)
        os.close(write_fd)


def ending_as_interrupted(numbers: Sequence[signal.Signals]) -> contextlib.AbstractContextManager[None]:
    """Let these signals end a command by an exception, as SIGINT does, so that it leaves nothing half done."""
    return _handled(numbers, signal.default_int_handler)


@contextlib.contextmanager
def _handled(numbers: Sequence[signal.Signals], handler: Callable[..., object]) -> Iterator[None]:
    previous = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, earlier in previous.items():
            signal.signal(number, earlier)
