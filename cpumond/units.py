"""Conversions between units: cores and (quota, period), durations, and the text forms of both.

Cores are float CPUs (1.0 = one CPU all the time), ``_us`` are integer microseconds, ``_s`` float seconds.
"""

from __future__ import annotations

import math
import re

MIN_QUOTA_US = 1_000
MIN_PERIOD_US = 1_000
MAX_PERIOD_US = 1_000_000
DEFAULT_PERIOD_US = 100_000

_DURATION = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*(us|ms|s|min|m|h|d|w)\s*", re.ASCII)
_UNIT_S = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}


def parse_duration_s(value: object) -> float:
    """Seconds of a duration: a bare number is milliseconds (as in the documents), a string carries its unit.

    Units: us, ms, s, m or min, h, d, w. A string may add several ("1h30m"); a string of digits alone is milliseconds.
    Raises ValueError with the accepted forms.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise ValueError('expected a duration: milliseconds as a number, or a string with a unit such as "1s", "250ms"')
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            return _parse_duration_text_s(value)
    if not math.isfinite(value) or value < 0:
        raise ValueError(f"expected a duration that is finite and not negative, got {value}")
    return value / 1000.0


def _parse_duration_text_s(text: str) -> float:
    total_s, position = 0.0, 0
    while position < len(text):
        match = _DURATION.match(text, position)
        if match is None:
            raise ValueError(f'expected a duration such as "1s", "250ms" or "1h30m", got {text!r}')
        total_s += float(match[1]) * _UNIT_S[match[2]]
        position = match.end()
    if position == 0:
        raise ValueError('expected a duration such as "1s", "250ms" or "1h30m", got an empty string')
    return total_s


def format_duration(seconds: float) -> str:
    """A duration as people write it: 250ms, 1s, 10s, 5m, 1h, 90s stays 90s."""
    if seconds <= 0 or not math.isfinite(seconds):
        return f"{seconds:g}s"
    if seconds < 1:
        return f"{seconds * 1000:g}ms"
    for unit, size in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= size and seconds % size == 0:
            return f"{seconds / size:g}{unit}"
    return f"{seconds:g}s"


def cores_to_quota_us(cores: float, period_us: int) -> int:
    """The quota in microseconds a period that gives ``cores`` (>= 0), rounded to the nearest microsecond."""
    return round(cores * period_us)


def quota_to_cores(quota_us: int | None, period_us: int) -> float:
    """Cores of a quota; infinity where there is none (None)."""
    return math.inf if quota_us is None else quota_us / period_us
