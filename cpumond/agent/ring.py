"""The last decisions of one job, packed: 54 bytes each, so that 5000 jobs keep 100 each in little memory."""

from __future__ import annotations

import struct
from typing import Final, Literal, get_args

import msgspec

Result = Literal[
    "applied",
    "shadow",
    "failed",
    "paused",
    "pinned",
    "overridden",
    "contested",
    "refused",
    "up-only",
    "gone",
    "noticed",
]
RESULTS: Final[tuple[Result, ...]] = get_args(Result)
KINDS: Final = ("grow", "shrink", "restore", "foreign-raise", "foreign-lower", "reapply", "adopt", "pin", "mode")

_RECORD = struct.Struct("<dddddddhBB")
_NO_VOTES = -32768


class DecisionRecord(msgspec.Struct, frozen=True):
    """One change, or one attempt at it. ``at`` seconds since 1970, cores as in JobState; ``result`` what became of it.

    ``kind``: grow, shrink, restore as decided; foreign-raise, foreign-lower: somebody else wrote; reapply: written
    again after that; adopt: found at the start; pin; mode: the job's mode changed.
    """

    at: float
    kind: str
    old_cores: float
    new_cores: float
    applied_cores: float
    usage_cores: float
    smoothed_cores: float
    throttled_ratio: float
    votes_sum: int | None
    result: str


class DecisionRing:
    """The newest ``size`` records of one job, the oldest is overwritten."""

    __slots__ = ("_data", "_next", "size")

    def __init__(self, size: int = 100) -> None:
        self.size = size
        self._data = bytearray()
        self._next = 0

    def append(self, record: DecisionRecord) -> None:
        """Add a record; constant time."""
        packed = _RECORD.pack(
            record.at,
            record.old_cores,
            record.new_cores,
            record.applied_cores,
            record.usage_cores,
            record.smoothed_cores,
            record.throttled_ratio,
            _NO_VOTES if record.votes_sum is None else max(min(record.votes_sum, 32767), -32767),
            KINDS.index(record.kind),
            RESULTS.index(record.result),
        )
        if len(self._data) < self.size * _RECORD.size:
            self._data += packed
            return
        start = self._next * _RECORD.size
        self._data[start : start + _RECORD.size] = packed
        self._next = (self._next + 1) % self.size

    def records(self) -> list[DecisionRecord]:
        """All records, oldest first."""
        rows = list(_RECORD.iter_unpack(self._data))
        rows = rows[self._next :] + rows[: self._next]
        return [
            DecisionRecord(
                row[0], KINDS[row[8]], row[1], row[2], row[3], row[4], row[5], row[6],
                None if row[7] == _NO_VOTES else row[7], RESULTS[row[9]],
            )
            for row in rows
        ]  # fmt: skip
