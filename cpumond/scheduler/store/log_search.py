"""How the newest entries about several subjects are found, whatever engine keeps the log. Pure but for what it asks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Protocol

from cpumond.scheduler.store import Entry

NO_NUMBER: Final = 2**62
"""Above all numbers."""
PAGE: Final = 64
MAX_PAGE: Final = 4096


class LogIndex(Protocol):
    """What an engine answers; each of it by a few steps into an index, however long the log is."""

    def find_lowest(self, since: float) -> int | None:
        """The lowest number of the entries that are not older; None: there is none."""
        ...

    def find_first(self, subject: str) -> int | None:
        """The lowest number of the entries about it; None: there is none."""
        ...

    def list_numbers(self, subject: str | None, below: int, lowest: int, limit: int) -> list[int]:
        """The highest numbers of entries about ``subject``, or of all, before ``below`` and not before ``lowest``,
        falling."""
        ...

    def choose_about(self, subject: str, numbers: Sequence[int]) -> list[int]: ...

    def read_entries(self, numbers: Sequence[int]) -> list[tuple[int, Entry]]:
        """The entries that are sound, in the order of ``numbers``."""
        ...


def search(
    index: LogIndex, subjects: Sequence[str], before: int | None, since: float, limit: int
) -> list[tuple[int, Entry]]:
    """See ``Store.read_log``: of the numbers of the subject that has the fewest, those that the others have, too."""
    names = list(dict.fromkeys(subjects))
    below = NO_NUMBER if before is None else min(before, NO_NUMBER)
    # Clocks are put right: an entry with a higher number may be an older one.
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
    """The names, those of few entries first, and the bounds between which all have some; None: there is no such."""
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
    """Those of ``numbers`` whose entries are about ``subject``: compared with its own where these are not many more."""
    if not numbers:
        return []
    limit = 4 * len(numbers)
    nearby = index.list_numbers(subject, numbers[0] + 1, numbers[-1], limit)
    chosen = {*(nearby if len(nearby) < limit else index.choose_about(subject, numbers))}
    return [number for number in numbers if number in chosen]
