"""Value and cost of reclaimed CPU, by pool and week, and compared with the control group; pure.

All amounts are core-hours, of whole UTC days. ``extras`` decides which jobs are extra. The agent's
``control_group_ratio`` decides which jobs are in the control group."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Final, NamedTuple

import msgspec

from cpumond.scheduler.elements import CONTROL, OTHERS, Arm
from cpumond.scheduler.history.model import ARM, DAY_S, HOUR_S, POOL, Amounts, Key, PeriodTotals, add_up
from cpumond.scheduler.history.report import order_pools
from cpumond.scheduler.model import ROOT_POOL

LEAST_DAYS: Final = 2
"""Minimum number of days with jobs in both arms; with fewer, nothing is stated about their difference."""
STUDENT_95: Final = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
"""The 97.5 % quantiles of Student's t, for one degree of freedom and more."""

WEEK_S: Final = 7 * DAY_S
THURSDAY_S: Final = 3 * DAY_S
"""Seconds from a Monday to the Thursday 1970-01-01."""


class SavingsRow(msgspec.Struct, frozen=True, kw_only=True):
    """A pool with those below it. ``extra_used``: core-hours of jobs, or parts of jobs, that ran beyond the requests
    that fit on their nodes. ``extra_ordered``: what these jobs requested. ``extra_jobs``: how many of them began.

    The cost is ``held_back``, the time throttled while limits were lowered (``late``), and ``lost``, the loss by
    preemption. ``gain``: ``extra_used`` minus both. ``money``: the gain at the price of a core-hour; null without a
    price. ``reclaimed``: by how much limits were lowered."""

    name: str
    parent: str = ""
    extra_jobs: float = 0.0
    extra_used: float = 0.0
    extra_ordered: float = 0.0
    reclaimed: float = 0.0
    held_back: float = 0.0
    lost: float = 0.0
    gain: float = 0.0
    money: float | None = None


class SavingsWeek(msgspec.Struct, frozen=True):
    """A week from Monday, UTC, or from the beginning of the requested time; ``covered_s`` of its seconds are known."""

    since: float
    until: float
    covered_s: float
    pools: list[SavingsRow]
    """The root first, each parent before its children; only pools that have amounts."""


class Difference(msgspec.Struct, frozen=True):
    """A ratio in both arms, over the whole time. ``low`` to ``high``: the 95 % interval of the difference, others minus
    control, estimated from the variation between days; null if there are too few days."""

    control: float
    others: float
    low: float | None = None
    high: float | None = None


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """The control group, which stays in shadow, compared with the other jobs of the same hosts, as ratios to the
    requested core-hours. ``held_back``: time throttled by the limit. ``used``: CPU used. ``days``: number of days with
    jobs in both arms. ``sentence``: both differences in words."""

    control_ordered: float
    others_ordered: float
    days: int
    held_back: Difference
    used: Difference
    sentence: str


class SavingsTree(msgspec.Struct, frozen=True):
    """Savings of a tree. ``total``: of all weeks together."""

    tree: str
    total: list[SavingsRow]
    weeks: list[SavingsWeek]
    comparison: Comparison | None = None
    """None if no host has a control group."""


class SavingsView(msgspec.Struct, frozen=True, kw_only=True):
    """``covered_s``: known seconds of the time. ``core_hour_price`` is 0 and ``currency`` "" if none is configured."""

    since: float
    until: float
    covered_s: float
    trees: list[SavingsTree]
    core_hour_price: float = 0.0
    currency: str = ""


class DaySums(NamedTuple):
    """One day: the compared amount and the requested amount, in the control group and outside of it."""

    control: float
    control_ordered: float
    others: float
    others_ordered: float


def monday_before(at: float) -> float:
    """Return the last Monday 0:00 UTC that is not after ``at``."""
    return (at + THURSDAY_S) // WEEK_S * WEEK_S - THURSDAY_S


def list_weeks(since: float, until: float) -> list[tuple[float, float]]:
    """Return the weeks from Monday 0:00 UTC that overlap a time; the first and the last are cut at its bounds."""
    begin = monday_before(since)
    parts = []
    while begin < until:
        parts.append((max(begin, since), min(begin + WEEK_S, until)))
        begin += WEEK_S
    return parts


Pools = Mapping[str, Collection[tuple[str, str]]]
"""Tree -> its pools, as from ``report.list_pools``; only trees that exist."""


Weeks = Sequence[tuple[tuple[float, float], PeriodTotals]]
"""Weeks, the earliest first."""


def list_arms(weeks: Weeks) -> list[Key]:
    """Return the keys of the control groups and of the arms with which they are compared."""
    return list({key: None for _, week in weeks for key in week.totals if key.kind == ARM})


def make_savings(
    known: Pools, weeks: Weeks, days: Sequence[Mapping[Key, Amounts]], tree: str | None, price: float, currency: str
) -> SavingsView:
    """Return the savings of weeks. ``days``: for each day the amounts of ``list_arms``."""
    total: dict[Key, Amounts] = {}
    for _, week in weeks:
        add_up(week.totals.items(), total)
    others = {key.tree for key in total} - known.keys()
    names = [name for name in [*known, *sorted(others)] if tree in (None, name)]
    return SavingsView(
        since=weeks[0][0][0],
        until=weeks[-1][0][1],
        covered_s=math.fsum(week.covered_s for _, week in weeks),
        trees=[
            SavingsTree(
                name,
                _make_rows(known.get(name, ()), name, total, price),
                [
                    SavingsWeek(*times, week.covered_s, _make_rows(known.get(name, ()), name, week.totals, price))
                    for times, week in weeks
                    if week.covered_s
                ],
                _compare_arms(name, days),
            )
            for name in names
        ],
        core_hour_price=price,
        currency=currency,
    )


def at_price(view: SavingsView, price: float) -> SavingsView:
    """Return the view at a different price of a core-hour; 0: without a price."""

    def change(rows: list[SavingsRow]) -> list[SavingsRow]:
        return [msgspec.structs.replace(row, money=row.gain * price if price else None) for row in rows]

    trees = [
        msgspec.structs.replace(
            tree,
            total=change(tree.total),
            weeks=[msgspec.structs.replace(week, pools=change(week.pools)) for week in tree.weeks],
        )
        for tree in view.trees
    ]
    return msgspec.structs.replace(view, trees=trees, core_hour_price=price)


def _make_rows(
    known: Collection[tuple[str, str]], tree: str, totals: Mapping[Key, Amounts], price: float
) -> list[SavingsRow]:
    pools = {key.name: each for key, each in totals.items() if key.kind == POOL and key.tree == tree}
    rows: list[SavingsRow] = []
    below = {name: its for name, its in pools.items() if name != ROOT_POOL}
    for pool, parent in [(ROOT_POOL, ""), *order_pools(known, below)]:
        its = pools.get(pool, Amounts())
        if pool != ROOT_POOL and not (its.extra_used or its.late or its.lost or its.reclaimed):
            continue
        gain = (its.extra_used - its.late - its.lost) / HOUR_S
        rows.append(
            SavingsRow(
                name=pool,
                parent=parent,
                extra_jobs=round(its.extra_jobs, 1),
                extra_used=its.extra_used / HOUR_S,
                extra_ordered=its.extra_ordered / HOUR_S,
                reclaimed=its.reclaimed / HOUR_S,
                held_back=its.late / HOUR_S,
                lost=its.lost / HOUR_S,
                gain=gain,
                money=gain * price if price else None,
            )
        )
    return rows


def _compare_arms(tree: str, days: Sequence[Mapping[Key, Amounts]]) -> Comparison | None:
    def find(arm: Arm, day: Mapping[Key, Amounts]) -> Amounts:
        return day.get(Key(ARM, tree, arm), Amounts())

    arms = [(find(CONTROL, day), find(OTHERS, day)) for day in days]
    control_ordered = math.fsum(control.ordered for control, _ in arms)
    others_ordered = math.fsum(others.ordered for _, others in arms)
    if not control_ordered or not others_ordered:
        return None
    held_back = compare([DaySums(a.throttled, a.ordered, b.throttled, b.ordered) for a, b in arms])
    used = compare([DaySums(a.used, a.ordered, b.used, b.ordered) for a, b in arms])
    return Comparison(
        control_ordered=control_ordered / HOUR_S,
        others_ordered=others_ordered / HOUR_S,
        days=sum(control.ordered > 0.0 and others.ordered > 0.0 for control, others in arms),
        held_back=held_back,
        used=used,
        sentence=describe(held_back, used),
    )


def compare(days: Sequence[DaySums]) -> Difference:
    """Return the ratios of both arms, and the 95 % interval of others minus control. A day deviates by the difference
    between its value and that of the whole time, weighted by its requests. The interval is that of Student for a mean,
    limited to the whole request."""
    control, others = _find_ratio([day[:2] for day in days]), _find_ratio([day[2:] for day in days])
    both = sum(day.control_ordered > 0.0 and day.others_ordered > 0.0 for day in days)
    if both < LEAST_DAYS:
        return Difference(control, others)
    all_control, all_others = (math.fsum(day[place] for day in days) for place in (1, 3))
    deviations = [
        (day.others - others * day.others_ordered) / all_others
        - (day.control - control * day.control_ordered) / all_control
        for day in days
    ]
    reach = student_95(both - 1) * math.sqrt(both / (both - 1)) * math.hypot(*deviations)
    # The bound may exceed 1: some jobs are throttled for longer, or use more, than they request.
    middle, most = others - control, max(1.0, control, others)
    return Difference(control, others, max(middle - reach, -most), min(middle + reach, most))


def _find_ratio(days: Sequence[tuple[float, float]]) -> float:
    return math.fsum(part for part, _ in days) / math.fsum(ordered for _, ordered in days)


def student_95(freedom: int) -> float:
    """Return Student's 97.5 % quantile, exact to 0.01: from a table; for more degrees of freedom, by an expansion."""
    if freedom <= len(STUDENT_95):
        return STUDENT_95[freedom - 1]
    return 1.960 + 2.372 / freedom + 2.823 / freedom**2


def describe(held_back: Difference, used: Difference) -> str:
    """Return both differences in words, in percent of the requests."""
    if held_back.low is None or held_back.high is None or used.low is None or used.high is None:
        return "jobs of both groups ran on too few days to show a difference"
    told = (
        f"jobs with moving limits were throttled for {100 * held_back.others:.2f} % of their requested core-hours, "
        f"jobs of the control group for {100 * held_back.control:.2f} %: {_points(held_back.low, held_back.high)}; "
        f"they used {100 * used.others:.1f} % of them, the control group {100 * used.control:.1f} %"
    )
    same = used.low <= 0.0 <= used.high
    return f"{told}, no significant difference" if same else f"{told}: {_points(used.low, used.high)}"


def _points(low: float, high: float) -> str:
    if low <= 0.0 <= high:
        return f"no significant difference ({100 * low:+.2f} to {100 * high:+.2f} points)"
    return f"{100 * low:+.2f} to {100 * high:+.2f} points (95 %)"
