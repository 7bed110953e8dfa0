"""Entries of the store's log as rows: numbering, size and truncation, the same for all engines. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, NamedTuple

import msgspec

from cpumond.scheduler.store import Entry

CUT_ENTRIES: Final = 500
"""Maximum number of entries that one ``cut_log`` drops; it limits how long other writes wait."""
ENTRY_BYTES: Final = 64
"""Bytes that an entry takes besides its text: for numbers, an index and a checksum."""
SUBJECTS: Final = msgspec.json.Decoder(tuple[str, ...])


class LogEnd(NamedTuple):
    """The end of a log. ``number``: of the last entry, even if it was dropped. ``position``: of the next entry."""

    number: int = 0
    position: int = 0


class Row(NamedTuple):
    """An entry as it is stored. ``position``: bytes of all entries before it. ``listed``: its subjects as JSON."""

    number: int
    position: int
    at: float
    listed: bytes
    value: bytes
    subjects: tuple[str, ...]


class Place(NamedTuple):
    """Properties of an entry that decide whether it is dropped."""

    number: int
    position: int
    at: float


def measure(listed_bytes: int, value_bytes: int) -> int:
    """Bytes that an entry takes in a store: its subjects are in its row and in an index, whose pages are never full."""
    return ENTRY_BYTES + value_bytes + 3 * listed_bytes


def make_rows(entries: Iterable[Entry], end: LogEnd) -> tuple[list[Row], LogEnd]:
    """Return the rows of entries that follow ``end``, and the new end. Raises UnicodeEncodeError."""
    rows: list[Row] = []
    for entry in entries:
        number = entry.number or end.number + 1
        subjects = tuple(dict.fromkeys(entry.subjects))
        rows.append(Row(number, end.position, entry.at, msgspec.json.encode(subjects), entry.value, subjects))
        end = end_after(rows[-1], end)
    return rows, end


def end_after(row: Row, end: LogEnd) -> LogEnd:
    return LogEnd(max(row.number, end.number), row.position + measure(len(row.listed), len(row.value)))


def list_subjects(listed: object) -> tuple[str, ...]:
    """Return the subjects of a row; none if the row is damaged."""
    try:
        return SUBJECTS.decode(listed) if isinstance(listed, bytes) else ()
    except msgspec.MsgspecError:
        return ()


def choose_cut(places: Iterable[Place], end: LogEnd, until: float, max_bytes: int) -> list[int]:
    """Return the numbers of entries to drop: those that are too old, or beyond ``max_bytes``."""
    chosen = {place.number for place in places if place.at < until or end.position - place.position > max_bytes}
    return sorted(chosen)[:CUT_ENTRIES]
