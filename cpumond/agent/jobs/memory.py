"""Memory for jobs on reclaimed CPU: what their node has free, and its owners do not wait for (semantics.md 1.10)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import psutil


def find_room(available: int, owners: Iterable[tuple[int | None, int | None]]) -> int:
    """Bytes that jobs on reclaimed CPU may still take, negative where owners would miss some.

    ``available`` as the kernel has it (MemAvailable); ``owners``: what each ordered and uses, in bytes; one that
    ordered no memory waits for none.
    """
    return available - sum(max(ordered - (used or 0), 0) for ordered, used in owners if ordered is not None)


class MemoryFiles(NamedTuple):
    """Bytes that a cgroup uses and may use, by its path; what the host has available; how memory.high is set.

    The first three give None where the kernel does not tell.
    """

    read_use: Callable[[str], int | None] = lambda _: None
    read_limit: Callable[[str], int | None] = lambda _: None
    read_available: Callable[[], int | None] = lambda: None
    hold: Callable[[str, int], None] = lambda _path, _bytes: None


def read_available() -> int | None:
    return int(psutil.virtual_memory().available)
