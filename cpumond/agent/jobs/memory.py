"""Memory for jobs on reclaimed CPU: what is free on the node and not requested by other jobs (semantics.md 1.10)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import psutil


def find_room(available: int, owners: Iterable[tuple[int | None, int | None]]) -> int:
    """Return the bytes that jobs on reclaimed CPU may still take; the result is negative if ``owners`` lack memory.

    ``available`` is the kernel's MemAvailable. ``owners`` are the requested bytes and the used bytes of each job that
    is not on reclaimed CPU; for a job without a memory request, no memory is kept."""
    return available - sum(max(ordered - (used or 0), 0) for ordered, used in owners if ordered is not None)


class MemoryFiles(NamedTuple):
    """Functions that read memory figures and set a limit. ``read_use`` and ``read_limit`` return the bytes that the
    cgroup at a path uses and may use, ``read_available`` those available on the host; None if the kernel does not
    report the value. ``hold`` sets memory.high."""

    read_use: Callable[[str], int | None] = lambda _: None
    read_limit: Callable[[str], int | None] = lambda _: None
    read_available: Callable[[], int | None] = lambda: None
    hold: Callable[[str, int], None] = lambda _path, _bytes: None


def read_available() -> int | None:
    return int(psutil.virtual_memory().available)
