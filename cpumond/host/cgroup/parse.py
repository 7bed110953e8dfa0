"""Parse texts of cgroup files; pure."""

from __future__ import annotations

import re

import msgspec

_SOME = re.compile(
    r"some avg10=([0-9]{1,9}(?:\.[0-9]{1,9})?) avg60=([0-9]{1,9}(?:\.[0-9]{1,9})?) .*total=([0-9]{1,20})"
)


STAT_BYTES = 1024
"""Bytes to read of a cpu.stat, which is shorter than this in both versions."""
USAGE_BYTES = 64
"""Bytes to read for the CPU time used, which comes first in its file."""
THROTTLED_LINE = b"nr_throttled %d\n"
"""The line of cpu.stat with the number of throttled periods."""


def parse_flat_keyed(text: str) -> dict[str, int]:
    """Parse a file of ``key value`` lines, for example cpu.stat. Raises ValueError for a value that is not a number."""
    pairs = (line.split() for line in text.splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2}


def parse_throttled(raw: bytes) -> int:
    """Parse only ``nr_throttled`` of cpu.stat; 0 if it is missing because a quota was never set. Raises ValueError."""
    start = raw.find(b"nr_throttled ")
    return 0 if start < 0 else int(raw[start + 13 : raw.index(b"\n", start)])


def parse_cpu_max(text: str) -> tuple[int | None, int]:
    """Parse a v2 ``cpu.max`` to (quota_us or None, period_us). Raises ValueError."""
    quota, period = text.split()
    return (None if quota == "max" else int(quota)), int(period)


def parse_cpu_list(text: str) -> int:
    """Count the CPUs in a list such as ``0-3,8``; 0 for an empty one. Raises ValueError."""
    count = 0
    for part in text.strip().split(","):
        if part:
            first, _, last = part.partition("-")
            count += int(last or first) - int(first) + 1
    return count


class Pressure(msgspec.Struct, frozen=True):
    """PSI of the CPU: the fraction, in [0, 1], of the last 10 and 60 s in which some task waited; total seconds."""

    some_10s_ratio: float
    some_60s_ratio: float
    some_total_s: float


def parse_pressure_total(raw: bytes) -> float:
    """Parse the seconds in which some task waited, from a pressure file. Raises ValueError."""
    if not raw.startswith(b"some "):
        raise ValueError("the line `some` is missing")
    start = raw.index(b"total=") + 6
    end = raw.index(b"\n", start)
    if end - start > 20:
        raise ValueError("total is larger than 64 bits")
    return int(raw[start:end]) * 1e-6


def parse_pressure(text: str) -> Pressure | None:
    """Parse the ``some`` line of a pressure file; None if it is missing. Raises ValueError if it is damaged."""
    for line in text.splitlines():
        found = _SOME.fullmatch(line)
        if found is not None:
            return Pressure(float(found[1]) / 100, float(found[2]) / 100, int(found[3]) / 1e6)
        if line.startswith("some "):
            raise ValueError(f"not a pressure line: {line[:200]!r}")
    return None
