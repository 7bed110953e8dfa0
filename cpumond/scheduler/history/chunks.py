"""A chunk of the history's points, and how ticks and points are made into bytes and read back."""

from __future__ import annotations

import struct
import zlib
from array import array
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from operator import mul
from typing import Final

from cpumond.scheduler.history.model import EARLIER_WIDTHS, KINDS, NOT_KNOWN, RATES, WIDTHS, Tick

VALUE_BYTES: Final = 4

_HEAD: Final = struct.Struct("<ddI4I")


class DamageError(Exception):
    """The file holds what the history never wrote. ``chunk``: the only damaged one, None for the whole file."""

    def __init__(self, text: str, chunk: Chunk | None = None) -> None:
        super().__init__(text)
        self.chunk = chunk


@dataclass(slots=True)
class Chunk:
    """The part of a chunk that is kept in memory."""

    id: int
    tier: int
    is_moving: bool
    """Whether its series are still being moved here from the finer chunks within its time."""
    ends: array[float]
    intervals: array[float]
    left_out: int
    """The most operations at one moment that had no series for want of room."""

    @property
    def begin(self) -> float:
        return self.ends[0] - self.intervals[0]

    @property
    def end(self) -> float:
        return self.ends[-1]


def find_range(ends: array[float], since: float, until: float) -> tuple[int, int]:
    inside = [number for number, end in enumerate(ends) if since < end <= until]
    return (inside[0], inside[-1] + 1) if inside else (0, 0)


def find_row(ids: array[int], series: int) -> int:
    try:
        return ids.index(series)
    except ValueError:
        return -1


def join_times(chunks: Collection[Chunk]) -> tuple[array[float], array[float]]:
    ends, intervals = array("d"), array("d")
    for chunk in chunks:
        ends += chunk.ends
        intervals += chunk.intervals
    return ends, intervals


def pack(columns: Iterable[array[float]]) -> bytes:
    """Compressed, the first bytes of all values before all second bytes, and so on: alike bytes compress well."""
    raw = b"".join([column.tobytes() for column in columns])
    return zlib.compress(b"".join([raw[number::VALUE_BYTES] for number in range(VALUE_BYTES)]), 1)


def unpack(data: bytes, kind: int, chunk: Chunk) -> list[array[float]]:
    """Raises DamageError."""
    length = len(chunk.ends)
    try:
        sorted_bytes = zlib.decompress(data)
    except (zlib.error, TypeError) as error:
        raise DamageError(f"points cannot be unpacked: {error}", chunk) from None
    widths = (WIDTHS, *EARLIER_WIDTHS) if kind in range(len(KINDS)) else ()
    width = next((each[kind] for each in widths if len(sorted_bytes) == VALUE_BYTES * each[kind] * length), 0)
    if not width:
        raise DamageError("a row of points has another length than its chunk", chunk)
    raw = bytearray(len(sorted_bytes))
    plane = width * length
    for number in range(VALUE_BYTES):
        raw[number::VALUE_BYTES] = sorted_bytes[number * plane : (number + 1) * plane]
    values = array("f", bytes(raw))
    columns = [values[number * length : (number + 1) * length] for number in range(width)]
    if width < WIDTHS[kind]:
        columns[width - RATES : width - RATES] = [array("f", [NOT_KNOWN]) * length] * (WIDTHS[kind] - width)
    return columns


def pack_values(tick: Tick) -> None:
    """Keep the values compressed: those of a chunk's ticks would take some 30 MiB where there are many series."""
    if tick.values:
        tick.packed = tuple(zlib.compress(values.tobytes(), 1) for values in tick.values)
        tick.values = ()


def values_of(tick: Tick, kind: int) -> array[float]:
    """The values of the series of one kind."""
    return array("f", zlib.decompress(tick.packed[kind])) if tick.packed else tick.values[kind]


def encode_tick(tick: Tick) -> bytes:
    parts = [_HEAD.pack(tick.at, tick.interval_s, tick.left_out, *map(len, tick.ids))]
    parts += [ids.tobytes() for ids in tick.ids]
    parts += [values_of(tick, kind).tobytes() for kind in range(len(KINDS))]
    return zlib.compress(b"".join(parts), 1)


def decode_tick(data: bytes) -> Tick:
    """Raises DamageError."""
    try:
        raw = zlib.decompress(data)
        at, interval_s, left_out, *counts = _HEAD.unpack_from(raw)
        view, offset = memoryview(raw), _HEAD.size
        ids: list[array[int]] = []
        values: list[array[float]] = []
        for count in counts:
            ids.append(array("q", bytes(view[offset : offset + 8 * count])))
            offset += 8 * count
        words, versions = (len(raw) - offset) / VALUE_BYTES, (WIDTHS, *EARLIER_WIDTHS)
        widths = next((each for each in versions if sum(map(mul, counts, each)) == words), WIDTHS)
        for kind, (count, width) in enumerate(zip(counts, widths, strict=True)):
            rows = array("f", bytes(view[offset : offset + 4 * count * width]))
            values.append(rows if width == WIDTHS[kind] else _widen(rows, width, WIDTHS[kind]))
            offset += 4 * count * width
    except (zlib.error, struct.error, ValueError, TypeError) as error:
        raise DamageError(f"a tick of the journal cannot be read: {error}") from None
    if offset != len(raw):
        raise DamageError("a tick of the journal has another length than it says")
    return Tick(at, interval_s, tuple(ids), tuple(values), left_out=left_out)


def _widen(rows: array[float], width: int, now: int) -> array[float]:
    """Rows as they were stored by an earlier version: what it did not know stands before the rates."""
    widened = array("f")
    for start in range(0, len(rows), width):
        rates = start + width - RATES
        widened += rows[start:rates] + array("f", [NOT_KNOWN] * (now - width)) + rows[rates : start + width]
    return widened


def decode_times(times: bytes) -> tuple[array[float], array[float]]:
    """Ends and intervals. Raises DamageError."""
    try:
        values = array("d", times)
    except (TypeError, ValueError) as error:
        raise DamageError(f"the times of a chunk cannot be read: {error}") from None
    half = len(values) // 2
    if not half or len(values) % 2:
        raise DamageError("a chunk has no times")
    return values[:half], values[half:]
