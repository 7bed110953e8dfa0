"""Tests run in two processes; some measure how CPU is shared and must run alone."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator

import pytest


@contextlib.contextmanager
def hold_room(factory: pytest.TempPathFactory, alone: bool) -> Iterator[None]:
    """Wait until nobody is in the room that wants to be alone, or nobody at all, and keep it so.

    Whoever is in the room must not ask a second time.
    """
    if "PYTEST_XDIST_WORKER" not in os.environ:
        yield
        return
    shared = factory.getbasetemp().parent
    with (shared / "door.lock").open("w") as door, (shared / "room.lock").open("w") as room:
        # Who waits for the room stands in the door, so that nobody slips in before.
        fcntl.flock(door, fcntl.LOCK_EX)
        fcntl.flock(room, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        fcntl.flock(door, fcntl.LOCK_UN)
        yield
