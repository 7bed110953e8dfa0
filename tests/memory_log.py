"""The log of a store in memory, for stores of tests: the contract of ``Store``'s ``read_log`` and ``cut_log``."""

import itertools
from collections.abc import Sequence

from cpumond.scheduler.store import Entry
from cpumond.scheduler.store.entries import LogEnd, Place, Row, choose_cut, end_after, make_rows


class MemoryLog:
    """``rows``: by number. What a repeated write adds again is there once, as in PostgreSQL."""

    def __init__(self) -> None:
        self.rows: dict[int, Row] = {}
        self.end = LogEnd()

    def make(self, entries: Sequence[Entry]) -> list[Row]:
        """The rows that would be added. Raises UnicodeEncodeError."""
        return make_rows(entries, self.end)[0]

    def add(self, rows: Sequence[Row]) -> None:
        for row in rows:
            self.rows.setdefault(row.number, row)
            self.end = max(self.end, end_after(row, self.end))

    def reopen(self) -> None:
        """A store that is opened goes on after its newest row: what was cut behind that counts no more."""
        last = self.rows[max(self.rows)] if self.rows else None
        self.end = LogEnd(self.end.number, end_after(last, LogEnd()).position if last else 0)

    def read(
        self, subjects: Sequence[str] = (), *, before: int | None = None, since: float = 0.0, limit: int = 50
    ) -> list[tuple[int, Entry]]:
        found = (
            (number, Entry(row.at, row.subjects, row.value))
            for number, row in sorted(self.rows.items(), reverse=True)
            if (before is None or number < before) and row.at >= since
        )
        return list(itertools.islice((each for each in found if {*subjects} <= {*each[1].subjects}), limit))

    def cut(self, until: float, max_bytes: int) -> int:
        places = [Place(row.number, row.position, row.at) for row in self.rows.values()]
        numbers = choose_cut(places, self.end, until, max_bytes)
        for number in numbers:
            del self.rows[number]
        return len(numbers)
