"""Entries of the store's log as rows: what all engines number, measure and cut alike. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, NamedTuple

from cpumond.scheduler.store import Entry

CUT_ENTRIES: Final = 500
"""The most that one ``cut_log`` drops: other writes wait for no more."""
ENTRY_BYTES: Final = 64
SUBJECT_BYTES: Final = 16
"""What an entry, and each of its subjects, takes beside its text: numbers, an index, a checksum."""


class LogEnd(NamedTuple):
    """Where a log goes on. ``number``: of its last entry, also if that was dropped; ``position``: of the next one."""

    number: int = 0
    position: int = 0


class Row(NamedTuple):
    """An entry as it is stored. ``position``: the bytes of all entries before it."""

    number: int
    position: int
    at: float
    subjects: tuple[bytes, ...]
    value: bytes


class Place(NamedTuple):
    """What decides whether an entry is dropped."""

    number: int
    position: int
    at: float


def measure(subjects: Iterable[bytes], value: bytes) -> int:
    """The bytes that an entry takes in a store; subjects are there twice."""
    return ENTRY_BYTES + len(value) + sum(SUBJECT_BYTES + 2 * len(subject) for subject in subjects)


def make_rows(entries: Iterable[Entry], end: LogEnd) -> tuple[list[Row], LogEnd]:
    """The rows of entries that follow ``end``, and the end after them. Raises UnicodeEncodeError."""
    rows: list[Row] = []
    number, position = end
    for entry in entries:
        number = entry.number or number + 1
        subjects = tuple(subject.encode() for subject in dict.fromkeys(entry.subjects))
        rows.append(Row(number, position, entry.at, subjects, entry.value))
        position += measure(subjects, entry.value)
    return rows, LogEnd(max(number, end.number), position)


def choose_cut(places: Iterable[Place], end: LogEnd, until: float, max_bytes: int) -> list[int]:
    """The numbers of those to drop: too old, or ``max_bytes`` are reached without them."""
    chosen = {place.number for place in places if place.at < until or end.position - place.position > max_bytes}
    return sorted(chosen)[:CUT_ENTRIES]
