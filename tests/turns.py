"""Tests run in several processes, since most of them wait; some measure how CPU is shared and must run alone."""

import contextlib
import fcntl
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def hold_room(folder: Path, alone: bool) -> Iterator[None]:
    """Wait until nobody is in the room that wants to be alone, or nobody at all, and keep it so: one for all processes
    that name this folder. Whoever is in it must not ask a second time. The locks are the process's own: they go with
    it, also when children that it forked live on."""
    with (folder / "door").open("a+") as door, (folder / "room").open("a+") as room:
        # Who waits for the room stands in the door, so that nobody slips in before.
        with stopped_clock():
            fcntl.lockf(door, fcntl.LOCK_EX)
            fcntl.lockf(room, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        fcntl.lockf(door, fcntl.LOCK_UN)
        yield


def note_end(folder: Path) -> None:
    """One more test that had to be alone is over."""
    with (folder / "ends").open("ab") as file:
        file.write(b".")


def wait_for_ends(folder: Path, number: int, patience_s: float = 900.0) -> None:
    """Wait until so many tests that had to be alone are over, whichever process ran them; one that was lost with its
    process is not waited for longer than ``patience_s``."""
    pause, ends, deadline_s = threading.Event(), folder / "ends", time.monotonic() + patience_s
    with stopped_clock():
        while (ends.stat().st_size if ends.exists() else 0) < number and time.monotonic() < deadline_s:
            pause.wait(0.2)


@contextlib.contextmanager
def stopped_clock() -> Iterator[None]:
    """What passes meanwhile does not count as the test's time: pytest-timeout's timer stands still."""
    left_s, _ = signal.setitimer(signal.ITIMER_REAL, 0.0)
    try:
        yield
    finally:
        if left_s > 0.0:
            signal.setitimer(signal.ITIMER_REAL, left_s)


@contextlib.contextmanager
def preferred() -> Iterator[None]:
    """Before whatever else this host does come this process and those that it starts, where that is allowed."""
    usual = os.getpriority(os.PRIO_PROCESS, 0)
    with contextlib.suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, 0, -20)
    try:
        yield
    finally:
        with contextlib.suppress(PermissionError):
            os.setpriority(os.PRIO_PROCESS, 0, usual)
