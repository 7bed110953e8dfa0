"""Search for the newest entries about several subjects, for any engine. Pure, except that it sends queries."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Protocol

from cpumond.scheduler.store import Entry

NO_NUMBER: Final = 2**62
"""A number above those of all entries."""
PAGE: Final = 64
MAX_PAGE: Final = 4096


class LogIndex(Protocol):
    """Queries to an engine; each one takes a few steps in an index, even if the log is long."""

    def find_lowest(self, since: float) -> int | None:
        """Return the lowest number of the entries that are not older than ``since``; None if there is none."""

    def find_first(self, subject: str) -> int | None:
        """Return the lowest number of the entries about ``subject``; None if there is none."""

    def list_numbers(self, subject: str | None, below: int, lowest: int, limit: int) -> list[int]:
        """Return the highest numbers of entries about ``subject`` (None: of any entries) that are below ``below`` and
        at least ``lowest``, in descending order."""

    def choose_about(self, subject: str, numbers: Sequence[int]) -> list[int]: ...

    def read_entries(self, numbers: Sequence[int]) -> list[tuple[int, Entry]]:
        """Return the undamaged entries, in the order of ``numbers``."""


def search(
    index: LogIndex, subjects: Sequence[str], before: int | None, since: float, limit: int
) -> list[tuple[int, Entry]]:
    """See ``Store.read_log``. Of the entries about the rarest subject, keeps those about all others, too."""
    names = list(dict.fromkeys(subjects))
    below = NO_NUMBER if before is None else min(before, NO_NUMBER)
    # Clocks are corrected, so an entry with a higher number may be older.
    lowest = index.find_lowest(since) if since > 0.0 else 0
    if lowest is not None and len(names) > 1:
        names, below, lowest = _narrow(index, names, below, lowest)
    if lowest is None:
        return []
    leader, others = names[0] if names else None, names[1:]
    found: list[tuple[int, Entry]] = []
    size = PAGE if others else min(max(limit, 0), MAX_PAGE)
    while len(found) < limit:
        page = numbers = index.list_numbers(leader, below, lowest, size)
        for other in others:
            numbers = _choose(index, other, numbers)
        entries = index.read_entries(numbers) if numbers else []
        found += [each for each in entries if each[1].at >= since and {*names} <= {*each[1].subjects}]
        if len(page) < size:
            break
        below = page[-1]
        if 4 * len(numbers) < len(page):
            size = min(4 * size, MAX_PAGE)
    return found[: max(limit, 0)]


def _narrow(index: LogIndex, names: list[str], below: int, lowest: int) -> tuple[list[str], int, int | None]:
    """Return the names, those with few entries first, and the bounds between which each of them has entries; None if
    there are no such bounds."""
    reached: dict[str, int] = {}
    for name in names:
        page = index.list_numbers(name, below, lowest, PAGE)
        first = index.find_first(name)
        if not page or first is None:
            return names, below, None
        below, lowest = page[0] + 1, max(lowest, first)
        reached[name] = page[-1] if len(page) == PAGE else 0
    return sorted(names, key=lambda name: reached[name]), below, lowest


def _choose(index: LogIndex, subject: str, numbers: list[int]) -> list[int]:
    """Return those of ``numbers`` that are about ``subject``: by listing its numbers, if they are not many more."""
    if not numbers:
        return []
    limit = 4 * len(numbers)
    nearby = index.list_numbers(subject, numbers[0] + 1, numbers[-1], limit)
    chosen = {*(nearby if len(nearby) < limit else index.choose_about(subject, numbers))}
    return [number for number in numbers if number in chosen]
