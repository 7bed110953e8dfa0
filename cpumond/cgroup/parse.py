"""Texts of cgroup files to values; pure."""

from __future__ import annotations

import msgspec


def parse_flat_keyed(text: str) -> dict[str, int]:
    """A file of ``key value`` lines, such as cpu.stat."""
    pairs = (line.split() for line in text.splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2}


def parse_cpu_max(text: str) -> tuple[int | None, int]:
    """(quota_us or None, period_us) of a v2 ``cpu.max``. Raises ValueError."""
    quota, period = text.split()
    return (None if quota == "max" else int(quota)), int(period)


def parse_cpu_list(text: str) -> int:
    """The number of CPUs in a list such as ``0-3,8``; 0 for an empty one. Raises ValueError."""
    count = 0
    for part in text.strip().split(","):
        if part:
            first, _, last = part.partition("-")
            count += int(last or first) - int(first) + 1
    return count


class Pressure(msgspec.Struct, frozen=True):
    """PSI of the CPU: share of time in which some task waited, over 10 and 60 s, in [0, 1], and its total seconds."""

    some_10s_ratio: float
    some_60s_ratio: float
    some_total_s: float


def parse_pressure_total(raw: bytes) -> float:
    """Seconds in which some task waited, of a pressure file. Raises ValueError."""
    if not raw.startswith(b"some "):
        raise ValueError("no line `some`")
    start = raw.index(b"total=") + 6
    return int(raw[start : raw.index(b"\n", start)]) * 1e-6


def parse_pressure(text: str) -> Pressure | None:
    """The ``some`` line of a pressure file, or None when there is none."""
    for line in text.splitlines():
        if line.startswith("some "):
            fields = dict(part.split("=", 1) for part in line.split()[1:])
            return Pressure(float(fields["avg10"]) / 100, float(fields["avg60"]) / 100, int(fields["total"]) / 1e6)
    return None
