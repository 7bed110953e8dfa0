"""The latest decisions and samples of each job, packed so that thousands of jobs need little memory.

A decision takes 62 bytes; a sample takes 28 bytes, or 32 with a peak."""

from __future__ import annotations

import math
import struct
from typing import Final, Literal, get_args

import msgspec

from cpumond.core.answers import DecisionAnswer
from cpumond.core.measures import finite_or_none
from cpumond.monitor.model import CpuReading

Result = Literal[
    "applied", "shadow", "failed", "paused", "pinned", "overridden", "contested", "refused", "up-only", "gone",
    "noticed",
]  # fmt: skip
RESULTS: Final[tuple[Result, ...]] = get_args(Result)
KINDS: Final = (
    "grow", "shrink", "restore", "foreign-raise", "foreign-lower", "reapply", "adopt", "pin", "mode", "order",
)  # fmt: skip

_RECORD = struct.Struct("<dddddddhBBH")
_RATIO_STEPS = 65_535
_BY_LOOK = 0x80
"""Flag for ``by_look`` in the byte that stores the kind."""
_NO_VOTES = -32768


class DecisionRing:
    """The newest ``size`` records of one job. A new record overwrites the oldest one."""

    __slots__ = ("_data", "_next", "size")

    def __init__(self, size: int = 100) -> None:
        self.size = size
        self._data = bytearray()
        self._next = 0

    def append(self, record: DecisionAnswer) -> None:
        """Add a record in constant time."""
        cores = (record.old_cores, record.new_cores, record.applied_cores)
        packed = _RECORD.pack(
            record.at,
            *(math.inf if each is None else each for each in cores),
            record.usage_cores,
            record.smoothed_cores,
            record.throttled_ratio,
            _NO_VOTES if record.votes_sum is None else max(min(record.votes_sum, 32767), -32767),
            KINDS.index(record.kind) | (_BY_LOOK if record.by_look else 0),
            RESULTS.index(record.result),
            int(record.pressure_ratio * _RATIO_STEPS + 0.5),
        )
        if len(self._data) < self.size * _RECORD.size:
            self._data += packed
            return
        start = self._next * _RECORD.size
        self._data[start : start + _RECORD.size] = packed
        self._next = (self._next + 1) % self.size

    def records(self) -> list[DecisionAnswer]:
        rows = list(_RECORD.iter_unpack(self._data))
        rows = rows[self._next :] + rows[: self._next]
        return [
            DecisionAnswer(
                row[0], KINDS[row[8] & ~_BY_LOOK], finite_or_none(row[1]), finite_or_none(row[2]),
                finite_or_none(row[3]), row[4], row[5], row[6], None if row[7] == _NO_VOTES else row[7],
                RESULTS[row[9]], row[10] / _RATIO_STEPS, row[8] >= _BY_LOOK,
            )
            for row in rows
        ]  # fmt: skip


class SampleRecord(msgspec.Struct, frozen=True):
    """One point of a job's graphs. ``at`` is in seconds since 1970.

    ``usage_cores`` is the mean since the previous point, and ``throttled_ratio``, in [0, 1], the maximum of the checks
    since then. The remaining values are those after the last of these checks; ``limit_cores`` and ``floor_cores`` are
    the monitor's. ``peak_cores`` is that of JobState, None under a rule without a peak."""

    at: float
    usage_cores: float
    smoothed_cores: float | None
    limit_cores: float
    floor_cores: float
    votes_sum: int | None
    throttled_ratio: float
    peak_cores: float | None = None


_SAMPLE = struct.Struct("<dffffhH")
_PEAK_SAMPLE = struct.Struct("<dfffffhH")
_MAX_F32 = 3.4e38
_NAN = math.nan


class SampleRing:
    """The newest ``size`` samples of one job. A new sample overwrites the oldest one. Memory is allocated as samples
    are added; memory for peaks only with the first peak.

    ``base`` is the reading from which the usage of the next sample counts."""

    __slots__ = ("_data", "_next", "_sample", "base", "peak_ratio", "size")

    def __init__(self, size: int) -> None:
        self.size = size
        self.base: CpuReading | None = None
        self.peak_ratio = 0.0
        self._sample = _SAMPLE
        self._data = bytearray()
        self._next = 0

    def resize(self, size: int) -> None:
        """Change the maximum number of samples; the newest ones are kept."""
        bytes_each = self._sample.size
        kept = self._data[self._next * bytes_each :] + self._data[: self._next * bytes_each]
        self.size, self._next, self._data = size, 0, kept[-size * bytes_each :]

    def append(
        self, at: float, usage_cores: float, smoothed_cores: float | None, limit_cores: float, floor_cores: float,
        votes_sum: int | None, throttled_ratio: float, peak_cores: float | None = None,
    ) -> None:  # fmt: skip
        """Add a sample (see ``SampleRecord``) in constant time. ``votes_sum`` must not exceed 32 767."""
        if peak_cores is not None and self._sample is _SAMPLE:
            rows = _SAMPLE.iter_unpack(self._data)
            self._data = bytearray(b"".join(_PEAK_SAMPLE.pack(*row[:5], _NAN, *row[5:]) for row in rows))
            self._sample = _PEAK_SAMPLE
        cores = [usage_cores, _NAN if smoothed_cores is None else smoothed_cores, limit_cores, floor_cores]
        if self._sample is _PEAK_SAMPLE:
            cores.append(_NAN if peak_cores is None else peak_cores)
        votes = _NO_VOTES if votes_sum is None else votes_sum
        try:
            packed = self._sample.pack(at, *cores, votes, int(throttled_ratio * _RATIO_STEPS + 0.5))
        except OverflowError:
            # A value exceeds what a short float can hold: for example, a job requested 1e300 cores.
            packed = self._sample.pack(at, *[min(value, _MAX_F32) for value in cores], votes, 0)
        data, whole = self._data, self.size * self._sample.size
        if len(data) < whole:
            data += packed
            if len(data) == whole:
                self._data = bytearray(data)  # the copy has no spare memory
            return
        start = self._next * self._sample.size
        data[start : start + self._sample.size] = packed
        self._next = (self._next + 1) % self.size

    def records(self) -> list[SampleRecord]:
        rows = list(self._sample.iter_unpack(self._data))
        return [
            SampleRecord(
                at, usage, None if math.isnan(smoothed) else smoothed, limit, floor,
                None if votes == _NO_VOTES else votes, ratio / _RATIO_STEPS,
                None if not peak or math.isnan(peak[0]) else peak[0],
            )
            for at, usage, smoothed, limit, floor, *peak, votes, ratio in rows[self._next :] + rows[: self._next]
        ]  # fmt: skip
