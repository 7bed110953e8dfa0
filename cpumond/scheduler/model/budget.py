"""Core-hour budgets of pools and users: the option, the record, periods, forecasts (semantics.md 2.15). Pure.

Amounts are core-seconds, in pairs (requested, used). Days are dates in the budget's time zone, as text: ``2026-11-29``.
"""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta, tzinfo
from functools import lru_cache
from typing import Annotated, Final, Literal
from zoneinfo import ZoneInfo

import msgspec

CorePair = tuple[float, float]
NOTHING_COUNTED: Final[CorePair] = (0.0, 0.0)
HOUR_S: Final = 3600.0
DAY: Final = timedelta(days=1)
BACK_DAYS: Final = 2
"""If the clock goes back by at most this number of days, usage counts for the newest known day. If it goes back by
more, that newest day counts as wrong."""
KEPT_DAYS: Final = 62
"""Number of days for which amounts are kept; more if the period is longer."""
RECENT_DAYS: Final = 7
"""Number of recent days whose usage a forecast extrapolates; it requires at least one hour of usage."""
Level = Literal[0, 1, 2]
LOW: Final = 1
SPENT: Final = 2
"""Levels of a budget; 0 means that less than ``warn_ratio`` is spent."""


class Budget(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """``budget`` of a pool, or one of ``user_budgets`` of a tree. ``core_hours``: None if there is no budget."""

    core_hours: Annotated[float, msgspec.Meta(ge=0.0, le=1e12)] | None = None
    period: Literal["month", "week", "day", "rolling"] = "month"
    rolling_days: Annotated[int, msgspec.Meta(ge=1, le=366)] = 30
    zone: str = "UTC"
    counts: Literal["ordered", "used"] = "ordered"
    warn_ratio: Annotated[float, msgspec.Meta(ge=0.0, le=1.0)] = 0.8
    when_spent: Literal["warn", "leftover", "stop"] = "warn"

    @property
    def limit_s(self) -> float:
        return (self.core_hours or 0.0) * HOUR_S

    def end_of(self, day: str) -> float:
        """Return the end of the day in seconds since 1970."""
        after = date.fromisoformat(day) + DAY
        return datetime(after.year, after.month, after.day, tzinfo=read_zone(self.zone)).timestamp()

    def first_day(self, day: str) -> str:
        """Return the first day of the period that contains ``day``."""
        at = date.fromisoformat(day)
        back = {"month": at.day - 1, "week": at.weekday(), "day": 0, "rolling": self.rolling_days - 1}[self.period]
        return add_days(day, -back)

    def find_day(self, known: str, now: float) -> str:
        """Return the day for which usage counts now. ``known``: the newest day. A clock set back starts no new day."""
        today = datetime.fromtimestamp(now, read_zone(self.zone)).date().isoformat()
        return known if today < known <= add_days(today, BACK_DAYS) else today

    def sum_from(self, first: str, days: dict[str, CorePair]) -> float:
        """Return the sum over the days from ``first`` on."""
        return sum(pair[self.counts == "used"] for name, pair in days.items() if name >= first)

    def forecast_day(self, days: dict[str, CorePair], day: str, since: float, now: float) -> str | None:
        """Return the day on which the budget will be spent if usage continues as in the last days. ``since``: start of
        counting. Returns None if this is not in this period (for a rolling one: never), or is not known yet."""
        first = self.first_day(day)
        spent = self.sum_from(first, days)
        if spent >= self.limit_s:
            return day
        recent = add_days(day, -RECENT_DAYS)
        known_s = now - max(since, self.end_of(add_days(recent, -1)))
        rate = self.sum_from(recent, days) / known_s if known_s >= HOUR_S else 0.0
        coming_days = self.rolling_days + 1 if self.period == "rolling" else 31
        for ahead in range(coming_days if rate > 0.0 else 0):
            then = add_days(day, ahead)
            begin = self.first_day(then)
            if begin > first:
                if self.period != "rolling":
                    break
                spent -= self.sum_from(first, {first: days[first]}) if first in days else 0.0
                first = begin
            if spent + rate * (self.end_of(then) - (now if first <= day else self.end_of(day))) >= self.limit_s:
                return then
        return None


NO_BUDGET: Final = Budget()


class BudgetRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """Stored record of a budget. ``tree``: id of the tree. ``owner``: id of a pool or name of a user.

    ``days``: counted amounts by day, without those of live jobs beyond ``StartRecord.counted``. ``day``: the newest
    day. ``level``: level of ``budget`` at the last check, in the period that began on the day ``period``."""

    tree: str
    kind: Literal["pool", "user"]
    owner: str
    since: float
    days: dict[str, CorePair] = {}
    day: str = ""
    period: str = ""
    level: Level = 0
    budget: Budget = NO_BUDGET

    @property
    def key(self) -> str:
        return f"{self.tree} {self.kind} {self.owner}"


def add_days(day: str, number: int) -> str:
    return (date.fromisoformat(day) + number * DAY).isoformat()


@lru_cache(maxsize=64)
def read_zone(name: str) -> tzinfo:
    """Return the time zone of that name; UTC if this host, unlike that of an earlier leader, does not know it."""
    return find_zone(name) or UTC


def find_zone(name: str) -> tzinfo | None:
    try:
        return UTC if name == "UTC" else ZoneInfo(name)
    except (KeyError, OSError, ValueError):
        return None
