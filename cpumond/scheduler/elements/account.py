"""The live state of a core-hour budget, and the view of that state. Pure (semantics.md 2.15)."""

from __future__ import annotations

from typing import Final, Literal

import msgspec

from cpumond.scheduler.model.budget import HOUR_S, NOTHING_COUNTED, SPENT, Budget, BudgetRecord, CorePair

CONSEQUENCES: Final = {
    "warn": "nothing is withheld", "leftover": "it gets only what others leave", "stop": "no new job starts",
}  # fmt: skip
_PERIODS: Final = {"month": "this month", "week": "this week", "day": "today"}
_LEVELS: Final[tuple[Literal["within", "low", "spent"], ...]] = ("within", "low", "spent")


class Account:
    """A budget of a pool or a user. ``tree`` and ``name``: names that are shown. ``live``: core-seconds of live jobs
    minus their ``Job.settled``; these count for the newest day."""

    __slots__ = ("_known", "_sum_s", "budget", "live", "name", "record", "tree")

    def __init__(self, record: BudgetRecord) -> None:
        self.record = record
        self.budget = record.budget
        self.tree = self.name = ""
        self.live: CorePair = NOTHING_COUNTED
        self._known: object = None
        self._sum_s = 0.0

    def count(self, ordered: float, used: float) -> None:
        self.live = (self.live[0] + ordered, self.live[1] + used)

    def holds_back(self, how: str) -> bool:
        """Whether the budget is spent and its option ``when_spent`` is ``how``."""
        return self.record.level == SPENT and self.budget.when_spent == how

    def grow(self, ordered: float, used: float) -> dict[str, CorePair]:
        """Return the stored sums by day, with these amounts added to the newest day."""
        days, day = self.record.days, self.record.day
        before = days.get(day, NOTHING_COUNTED)
        return {**days, day: (before[0] + ordered, before[1] + used)}

    def day(self, now: float) -> str:
        return self.budget.find_day(self.record.day, now)

    def spent_s(self, now: float) -> float:
        """Return the core-seconds spent in the present period."""
        known = (self.record, self.budget, day := self.day(now))
        if self._known != known:  # the sum is cached: this runs at each update
            self._known, self._sum_s = known, self.budget.sum_from(self.budget.first_day(day), self.record.days)
        return self._sum_s + self.live[self.budget.counts == "used"]


class BudgetView(msgspec.Struct, frozen=True):
    """A core-hour budget. ``level``: low from ``warn_ratio`` on, spent at the whole budget. ``first_day``: first day of
    the present period in its zone. ``forecast_day``: when the budget will be spent if usage continues as in the
    last week; null if on no day of the period, or not known yet. ``text``: all of this as a sentence."""

    tree: str
    kind: Literal["pool", "user"]
    name: str
    budget: Budget
    first_day: str
    core_hours: float
    spent_core_hours: float
    level: Literal["within", "low", "spent"]
    forecast_day: str | None
    text: str


def view_budget(account: Account, now: float) -> BudgetView:
    budget, record, day = account.budget, account.record, account.day(now)
    hours, spent = budget.core_hours or 0.0, account.spent_s(now) / HOUR_S
    forecast = budget.forecast_day(account.grow(*account.live), day, record.since, now)
    period = _PERIODS.get(budget.period, f"in {budget.rolling_days} days")
    part = f" ({spent / hours:.0%})" if hours else ""
    text = f"{spent:.6g} of {hours:.6g} core-hours {budget.counts} {period}{part}"
    if record.level == SPENT:
        text += f", spent: {CONSEQUENCES[budget.when_spent]}"
    elif forecast is not None:
        text += f", will be spent on {forecast} at the present rate"
    level, first = _LEVELS[record.level], budget.first_day(day)
    return BudgetView(account.tree, record.kind, account.name, budget, first, hours, spent, level, forecast, text)
