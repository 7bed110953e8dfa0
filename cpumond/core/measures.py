"""Conversions between units: cores and (quota, period), durations, and the text forms of both.

Cores are float CPUs (1.0 = one CPU all the time), ``_us`` are integer microseconds, ``_s`` float seconds."""

from __future__ import annotations

import hashlib
import math
import re
import sys
from decimal import Decimal
from typing import Final

MIN_QUOTA_US = 1_000
MAX_PERIOD_US = 1_000_000
DEFAULT_PERIOD_US = 100_000

DURATION: Final = {"unit": "duration"}
"""Marks a field as a duration: a number of milliseconds, or a string with a unit."""


def stable_fraction(name: str) -> float:
    """Map ``name`` to a number in [0, 1): always the same for one name, evenly spread over names."""
    return int.from_bytes(hashlib.blake2b(name.encode("utf-8", "replace"), digest_size=7).digest()) / 2**56


_DURATION = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*(us|ms|s|min|m|h|d|w)\s*", re.ASCII)
_UNIT_S = {"s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}
_PARTS_OF_S = {"us": 1_000_000.0, "ms": 1_000.0}
"""Divisors, because 570 / 1000 is 0.57 but 570 * 0.001 is not."""


def parse_duration_s(value: object) -> float:
    """Parse a duration to seconds: a bare number is milliseconds (as in YTsaurus), a string carries its unit.

    Units: us, ms, s, m or min, h, d, w. A string may be a sum ("1h30m"); a string of digits alone is milliseconds.
    Raises ValueError with the accepted forms."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise ValueError('expected a duration: milliseconds as a number, or a string with a unit such as "1s", "250ms"')
    if isinstance(value, str):
        text = value
        try:
            value = float(text)
        except ValueError:
            return _parse_duration_text_s(text)
    if not 0 <= value <= sys.float_info.max:  # also refuses NaN and integers too large for a float
        raise ValueError(f"expected a duration that is finite and not negative, got {value}")
    return value / 1000.0


def _parse_duration_text_s(text: str) -> float:
    total_s, position = 0.0, 0
    while position < len(text):
        match = _DURATION.match(text, position)
        if match is None:
            raise ValueError(f'expected a duration such as "1s", "250ms" or "1h30m", got {text!r}')
        number, unit = float(match[1]), match[2]
        total_s += number / _PARTS_OF_S[unit] if unit in _PARTS_OF_S else number * _UNIT_S[unit]
        position = match.end()
    if position == 0:
        raise ValueError('expected a duration such as "1s", "250ms" or "1h30m", got an empty string')
    if not math.isfinite(total_s):
        raise ValueError(f"expected a duration that is finite, got {text!r}")
    return total_s


def format_duration(seconds: float) -> str:
    """Format a duration as people write it: 250ms, 1s, 10s, 5m, 1h; 90s stays 90s.

    ``parse_duration_s`` returns exactly ``seconds`` for this text, unless ``seconds`` is negative or not finite."""
    if seconds <= 0 or not math.isfinite(seconds):
        return f"{seconds:g}s"
    if seconds < 1:
        text = f"{_plain(Decimal(repr(seconds)) * 1000)}ms"
        return text if parse_duration_s(text) == seconds else f"{_plain(Decimal(repr(seconds)))}s"
    for unit, size in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds % size == 0:
            return f"{_plain(Decimal(repr(seconds / size)))}{unit}"
    return f"{_plain(Decimal(repr(seconds)))}s"


def _plain(number: Decimal) -> str:
    """Write a positive number with all its digits, without an exponent or trailing zeros."""
    text = f"{number:f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def format_span(seconds: float) -> str:
    """Format a time span for people: 0.4 s, 12 s, 3 min 5 s, 2 h 1 min, 3 d 4 h."""
    if seconds < 9.95:
        return f"{max(seconds, 0.0):.1f}".removesuffix(".0") + " s"
    whole = round(seconds)
    for size, unit, part, smaller in ((86_400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if whole >= size:
            rest = whole % size // part
            return f"{whole // size} {unit}" + (f" {rest} {smaller}" if rest else "")
    return f"{whole} s"


def format_cores(cores: float | None) -> str:
    """Format cores: with up to two decimals; below 1, with up to three; below 0.01, with two significant digits; below
    0.001, as <0.001. Examples: 3.2, 10, 0.0042. "no limit" for None."""
    if cores is None:
        return "no limit"
    if 0 < cores < 0.001:
        return "<0.001"
    if 0 < abs(cores) < 0.01:
        return f"{cores:.2g}"
    return f"{cores:.{3 if abs(cores) < 1 else 2}f}".rstrip("0").rstrip(".")


def count_cores(cores: float | None) -> str:
    """Format cores with their noun: 1 core, 3.2 cores; "no limit" for None."""
    text = format_cores(cores)
    return text if cores is None else f"{text} core" if text == "1" else f"{text} cores"


def cores_to_quota_us(cores: float, period_us: int) -> int:
    """Return the quota in microseconds per period that gives ``cores`` (>= 0), rounded to whole microseconds."""
    return round(cores * period_us)


def finite_or_none(value: float) -> float | None:
    """Return ``value``; None for infinity, which JSON does not have."""
    return value if math.isfinite(value) else None


def quota_to_cores(quota_us: int | None, period_us: int) -> float:
    """Return the cores of a quota; infinity for None (no quota)."""
    return math.inf if quota_us is None else quota_us / period_us
