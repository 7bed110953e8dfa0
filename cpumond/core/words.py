"""Numbers and names as people read them; pure but for the time zone."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import Final

from cpumond.core.measures import format_cores

LAST_DAY = 253_402_128_000.0
"""Of the year 9999: a time that stands for "for ever" may be later, where ``datetime`` has no date."""


_UNSEEN: Final = re.compile("[\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")


def show_name(name: str) -> str:
    """A name that moves no cursor: what cannot be printed is escaped, and only that."""
    return name if name.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in name)


def show_json(text: str | bytes) -> str:
    """JSON that moves no cursor and turns no text: C1 controls and marks of direction, which only texts in it hold, are
    escaped as JSON has it."""
    text = text.decode() if isinstance(text, bytes) else text
    return _UNSEEN.sub(lambda sign: f"\\u{ord(sign[0]):04x}", text)


def show_measured(cores: float | None) -> str:
    """Measured cores with two digits after the point, below one core with three, or "-" where there are none yet."""
    return show_number(cores, ".2f" if cores is None or abs(cores) >= 1 else ".3f")


def show_number(value: float | None, form: str) -> str:
    """A number, or "-" where there is none yet."""
    return "-" if value is None else format(value, form)


def show_votes(votes: int | None) -> str:
    """A vote or a sum of votes with its sign."""
    return "0" if votes == 0 else show_number(votes, "+d")


def show_cores(cores: float | None) -> str:
    """Cores as ``format_cores`` has them, in words where there is no limit."""
    return "no limit" if cores is None else format_cores(cores)


def show_left(seconds: float) -> str:
    """A remaining time without fractions: 9m30s."""
    whole = max(round(seconds), 1)
    parts = [(whole // 3600, "h"), (whole % 3600 // 60, "m"), (whole % 60, "s")]
    return "".join(f"{number}{unit}" for number, unit in parts if number)


def show_time(at: float, form: str = "%Y-%m-%d %H:%M:%S %Z") -> str:
    """Local date, time and zone of seconds since 1970."""
    return datetime.fromtimestamp(min(at, LAST_DAY)).astimezone().strftime(form)


def show_utc(at: float) -> str:
    """Date and time in UTC of seconds since 1970, for what is read elsewhere than where it was written."""
    return datetime.fromtimestamp(min(at, LAST_DAY), UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def iso_utc(at: float) -> str:
    """The same as programs read it: 2026-01-31T09:00:00.125Z."""
    return datetime.fromtimestamp(min(at, LAST_DAY), UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def count(number: int, one: str, many: str = "") -> str:
    """A number and its noun: 1 job, 3 jobs."""
    return f"{number} {one if number == 1 else many or one + 's'}"
