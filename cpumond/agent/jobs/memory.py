"""Memory for jobs on reclaimed CPU: free on the node, and not claimed by its other jobs (semantics.md 1.10)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import psutil


def find_room(available: int, owners: Iterable[tuple[int | None, int | None]]) -> int:
    """Return the bytes that jobs on reclaimed CPU may still take, negative if owners would lack memory.

    ``available`` is the kernel's MemAvailable. ``owners`` are the requested and used bytes of each other job; a job
    without a memory request claims none.
    """
    return available - sum(max(ordered - (used or 0), 0) for ordered, used in owners if ordered is not None)


class MemoryFiles(NamedTuple):
    """Functions that read and set memory limits; those that read return None if the kernel does not report the value.

    They return the bytes used and allowed by the cgroup at a path and those available on the host; the last one sets
    memory.high."""

    read_use: Callable[[str], int | None] = lambda _: None
    read_limit: Callable[[str], int | None] = lambda _: None
    read_available: Callable[[], int | None] = lambda: None
    hold: Callable[[str, int], None] = lambda _path, _bytes: None


def read_available() -> int | None:
    return int(psutil.virtual_memory().available)
