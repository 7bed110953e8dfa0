"""Chunks of the history's points, and the encoding of ticks and points as bytes."""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import msgspec

from cpumond.scheduler.history.model import KINDS, WIDTHS, Series, Tick

VALUE_BYTES: Final = 4


class DamageError(Exception):
    """The file holds data that the history never wrote. ``chunk``: the damaged chunk; None: the whole file."""

    def __init__(self, text: str, chunk: Chunk | None = None) -> None:
        super().__init__(text)
        self.chunk = chunk


@dataclass(slots=True)
class Chunk:
    """The part of a chunk that is kept in memory."""

    id: int
    ends: array[float]
    intervals: array[float]
    left_out: int
    """Maximum, over the chunk's moments, of the number of operations beyond the limit of series."""

    @property
    def begin(self) -> float:
        return self.ends[0] - self.intervals[0]

    @property
    def end(self) -> float:
        return self.ends[-1]


class _StoredTick(msgspec.Struct, array_like=True, frozen=True):
    """A row of the journal."""

    at: float
    interval_s: float
    left_out: int
    names: tuple[list[Series], ...]
    values: tuple[bytes, ...]


def find_range(ends: array[float], since: float, until: float) -> tuple[int, int]:
    """Return the index range (from, to) of the points whose intervals end in (since, until]."""
    inside = [number for number, end in enumerate(ends) if since < end <= until]
    return (inside[0], inside[-1] + 1) if inside else (0, 0)


def pack(columns: Iterable[array[float]]) -> bytes:
    """Compress columns: first bytes of all values, then second ones, and so on, since similar bytes compress well."""
    raw = b"".join([column.tobytes() for column in columns])
    return zlib.compress(b"".join([raw[number::VALUE_BYTES] for number in range(VALUE_BYTES)]), 1)


def unpack(data: bytes, kind: int, chunk: Chunk) -> list[array[float]]:
    """Return the columns of ``pack``. Raises DamageError."""
    length = len(chunk.ends)
    try:
        sorted_bytes = zlib.decompress(data)
    except (zlib.error, TypeError) as error:
        raise DamageError(f"points cannot be unpacked: {error}", chunk) from None
    plane = WIDTHS[kind] * length if kind in range(len(KINDS)) else 0
    if not plane or len(sorted_bytes) != VALUE_BYTES * plane:
        raise DamageError("a row of points has a different length than its chunk", chunk)
    raw = bytearray(len(sorted_bytes))
    for number in range(VALUE_BYTES):
        raw[number::VALUE_BYTES] = sorted_bytes[number * plane : (number + 1) * plane]
    values = array("f", bytes(raw))
    return [values[number : number + length] for number in range(0, plane, length)]


def pack_values(tick: Tick) -> None:
    """Compress a tick's values: uncompressed, those of a chunk's ticks take some 30 MiB if there are many series."""
    if tick.values:
        tick.packed = tuple(zlib.compress(values.tobytes(), 1) for values in tick.values)
        tick.values = ()


def values_of(tick: Tick, kind: int) -> array[float]:
    return array("f", zlib.decompress(tick.packed[kind])) if tick.packed else tick.values[kind]


def encode_tick(tick: Tick) -> bytes:
    """Return a row of the journal. Also replaces ``tick.values`` by their compressed form."""
    pack_values(tick)
    stored = _StoredTick(tick.at, tick.interval_s, tick.left_out, tick.names, tick.packed)
    return zlib.compress(msgspec.msgpack.encode(stored), 1)


def decode_tick(data: bytes) -> Tick:
    """Return the tick stored in a row of the journal. Raises DamageError."""
    try:
        stored = msgspec.msgpack.decode(zlib.decompress(data), type=_StoredTick)
        tick = Tick(stored.at, stored.interval_s, stored.names, (), stored.left_out, packed=stored.values)
        lengths = [len(values_of(tick, kind)) for kind in range(len(KINDS))]
    except (msgspec.MsgspecError, zlib.error, ValueError, TypeError, IndexError) as error:
        raise DamageError(f"a tick of the journal cannot be read: {error}") from None
    if lengths != [len(each) * width for each, width in zip(stored.names, WIDTHS, strict=False)]:
        raise DamageError("a tick of the journal has a different length than it states")
    return tick


def decode_times(times: bytes) -> tuple[array[float], array[float]]:
    """Return the ends and lengths of the intervals. Raises DamageError."""
    try:
        values = array("d", times)
    except (TypeError, ValueError) as error:
        raise DamageError(f"the times of a chunk cannot be read: {error}") from None
    half = len(values) // 2
    if not half or len(values) % 2:
        raise DamageError("a chunk has no times")
    return values[:half], values[half:]
