"""Format numbers and names for people; pure but for the time zone."""

from __future__ import annotations

import difflib
import heapq
import itertools
import re
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Final

LAST_DAY = 253_402_128_000.0
"""A day of the year 9999. Times that stand for "for ever" may be later, but ``datetime`` has no such dates."""

GIB: Final = 2.0**30

MAX_COMPARED: Final = 50
"""Maximum number of known names with which a misspelt name is compared."""
MAX_COMPARED_CHARS: Final = 100

MAX_NAME: Final = 80
"""Maximum characters of a name that a message shows."""

_UNSEEN: Final = re.compile("[\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")


def escape(name: str) -> str:
    """Escape only the unprintable characters of a name, so that it cannot move the cursor."""
    return name if name.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in name)


def escape_json(text: str | bytes) -> str:
    """Escape C1 control characters and direction marks in JSON's texts: they could move the cursor or reverse text."""
    text = text.decode() if isinstance(text, bytes) else text
    return _UNSEEN.sub(lambda sign: f"\\u{ord(sign[0]):04x}", text)


def format_measured(cores: float | None) -> str:
    """Format measured cores with two decimals, below one core with three; "-" before the first measurement."""
    return format_number(cores, ".2f" if cores is None or abs(cores) >= 1 else ".3f")


def format_number(value: float | None, form: str) -> str:
    """Format a number; "-" for None."""
    return "-" if value is None else format(value, form)


def format_votes(votes: int | None) -> str:
    """Format a vote or a sum of votes with its sign."""
    return "0" if votes == 0 else format_number(votes, "+d")


def format_left(seconds: float) -> str:
    """Format a remaining time without fractions: 9m30s."""
    whole = max(round(seconds), 1)
    parts = [(whole // 3600, "h"), (whole % 3600 // 60, "m"), (whole % 60, "s")]
    return "".join(f"{number}{unit}" for number, unit in parts if number)


def format_time(at: float, form: str = "%Y-%m-%d %H:%M:%S %Z") -> str:
    """Format seconds since 1970 as local date, time and zone."""
    return datetime.fromtimestamp(min(at, LAST_DAY)).astimezone().strftime(form)


def format_utc(at: float) -> str:
    """Format seconds since 1970 as date and time in UTC, for texts that are read in other time zones."""
    return datetime.fromtimestamp(min(at, LAST_DAY), UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def iso_utc(at: float) -> str:
    """Format seconds since 1970 in UTC for programs: 2026-01-31T09:00:00.125Z."""
    return datetime.fromtimestamp(min(at, LAST_DAY), UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def count(number: int, one: str, many: str = "") -> str:
    """Format a number with its noun: 1 job, 3 jobs."""
    return f"{number} {one if number == 1 else many or one + 's'}"


def format_percent(fraction: float) -> str:
    """Format a fraction as percent with one decimal, or with more if one decimal would show only zeros."""
    percent = fraction * 100.0
    return f"{percent:.1f}" if percent >= 0.05 or percent < 1e-7 else f"{percent:.1g}"


def printable(name: str) -> str:
    """Format a name for people: cut it to ``MAX_NAME`` characters, and then escape its unprintable characters."""
    shown = name if len(name) <= MAX_NAME else f"{name[: MAX_NAME - 3]}..."
    return shown if shown.isprintable() else ascii(shown)[1:-1]


def quoted(name: str) -> str:
    return f'"{printable(name)}"'


def named(kind: str, name: str) -> str:
    """Name an element in a message: ``pool "q"``."""
    return f"{kind} {quoted(name)}"


def number(value: float) -> str:
    """Format a number with all its digits, but without a final ".0"."""
    return repr(value).removesuffix(".0")


def one_of(choices: Iterable[str]) -> str:
    """Join words: "a, b or c"."""
    *others, last = choices
    return f"{', '.join(others)} or {last}" if others else last


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return ``; did you mean "q"?``, or "" if no known name is similar."""
    near = nearest(name, known)
    return f"; did you mean {quoted(near)}?" if near else ""


def nearest(name: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """Return the most similar known name, "" if none reaches the similarity ``cutoff``, 0 to 1.

    Of very many names, only those with similar beginnings and ends are compared, as a comparison takes 0.1 ms."""
    name, names = name[:MAX_COMPARED_CHARS], [*known]
    if len(names) > MAX_COMPARED:
        names = heapq.nlargest(MAX_COMPARED, names, key=lambda other: _count_ends(name, other))
    near = difflib.get_close_matches(name, names, n=1, cutoff=cutoff)
    return near[0] if near else ""


def _count_ends(one: str, other: str) -> int:
    """Count the characters that two names share at both ends, minus the difference of their lengths."""
    ends = (zip(one, other, strict=False), zip(reversed(one), reversed(other), strict=False))
    alike = sum(1 for pairs in ends for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
    return alike - abs(len(one) - len(other))
