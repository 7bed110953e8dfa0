"""What reclaimed CPU was worth, and what it cost: by pool and week, and against the control group; pure.

All amounts are core-hours. What counts as extra is told in ``extras``; how the control group is chosen, in the agent's
``control_group_ratio``.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final, NamedTuple

import msgspec

from cpumond.scheduler.elements import CONTROL, OTHERS, TRIAL_PARTS
from cpumond.scheduler.history.extras import name_extra
from cpumond.scheduler.history.model import HOUR_S, OPERATION, POOL, Key, Summary, Sums
from cpumond.scheduler.history.report import order_pools
from cpumond.scheduler.model import ROOT_POOL

LEAST_PARTS: Final = 5
"""With fewer parts of operations, or hosts, in one arm nothing is said about a difference."""

WEEK_S: Final = 7 * 86_400.0
THURSDAY_S: Final = 3 * 86_400.0
"""The first of January 1970 was one: so long after its Monday."""


class SavingsRow(msgspec.Struct, frozen=True, kw_only=True):
    """A pool with those below it. ``extra_used``: core-hours of jobs, or parts of them, that ran beyond the orders that
    fit on their nodes; ``extra_ordered``: what these had ordered; ``extra_jobs``: how many of them began.

    What it cost: ``held_back`` while limits were down (``late``), ``lost`` to preemption. ``gain`` is ``extra_used``
    less both, ``money`` that at the price of a core-hour, null without one. ``reclaimed``: what limits were lowered by.
    """

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
    """From Monday, UTC, or where the time asked for begins. ``covered_s`` of it are known."""

    since: float
    until: float
    covered_s: float
    pools: list[SavingsRow]
    """The root first, a parent before its children; those alone that have something to show."""


class Difference(msgspec.Struct, frozen=True):
    """A ratio in both arms. ``low`` to ``high`` is the 95 % interval of others less control; null: too few to tell."""

    control: float
    others: float
    low: float | None = None
    high: float | None = None


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """The control group, left in shadow, against the other jobs of the same hosts, in core-hours ordered.

    ``held_back``: time that jobs were held back by their limit, of what they ordered; ``used``: CPU used of that.
    ``parts``: of operations or hosts, in the arm with fewer; ``sentence``: both in words.
    """

    control_ordered: float
    others_ordered: float
    parts: int
    held_back: Difference
    used: Difference
    sentence: str


class SavingsTree(msgspec.Struct, frozen=True):
    """``total``: all weeks together."""

    tree: str
    total: list[SavingsRow]
    weeks: list[SavingsWeek]
    comparison: Comparison | None = None
    """None where no host has a control group."""


class SavingsView(msgspec.Struct, frozen=True, kw_only=True):
    """``covered_s`` of the time are known; ``core_hour_price`` 0 and ``currency`` "" where none was told."""

    since: float
    until: float
    covered_s: float
    trees: list[SavingsTree]
    core_hour_price: float = 0.0
    currency: str = ""


class PartSums(NamedTuple):
    """Of one part: what is compared and what was ordered, in the control group and outside of it."""

    control: float
    control_ordered: float
    others: float
    others_ordered: float


def list_weeks(since: float, until: float) -> list[tuple[float, float]]:
    """The weeks, from Monday 0:00 UTC, that a time touches, cut to it."""
    monday = (since + THURSDAY_S) // WEEK_S * WEEK_S - THURSDAY_S
    weeks = []
    while monday < until:
        weeks.append((max(monday, since), min(monday + WEEK_S, until)))
        monday += WEEK_S
    return weeks


Pools = Mapping[str, Collection[tuple[str, str]]]
"""Of each tree that there is now, as ``report.list_pools`` gives them."""


def make_savings(
    known: Pools, weeks: Sequence[tuple[tuple[float, float], Summary]], tree: str | None, price: float, currency: str
) -> SavingsView:
    """The savings of weeks, the earliest first. It takes a second with 1000 pools and a year."""
    total: dict[Key, Sums] = {}
    for _, summary in weeks:
        for key, sums in summary.sums.items():
            total[key] = total.get(key, Sums()).plus(sums)
    others = {key.tree for key in total} - known.keys()
    names = [name for name in [*known, *sorted(others)] if tree in (None, name)]
    return SavingsView(
        since=weeks[0][0][0],
        until=weeks[-1][0][1],
        covered_s=math.fsum(summary.covered_s for _, summary in weeks),
        trees=[
            SavingsTree(
                name,
                _make_rows(known.get(name, ()), name, total, price),
                [
                    SavingsWeek(*times, summary.covered_s, _make_rows(known.get(name, ()), name, summary.sums, price))
                    for times, summary in weeks
                    if summary.covered_s
                ],
                _compare_arms(name, total),
            )
            for name in names
        ],
        core_hour_price=price,
        currency=currency,
    )


def at_price(view: SavingsView, price: float) -> SavingsView:
    """The same at another price of a core-hour; 0 for none."""

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
    known: Collection[tuple[str, str]], tree: str, sums: Mapping[Key, Sums], price: float
) -> list[SavingsRow]:
    pools = {key.name: each for key, each in sums.items() if key.kind == POOL and key.tree == tree}
    rows: list[SavingsRow] = []
    below = {name: its for name, its in pools.items() if name != ROOT_POOL}
    for pool, parent in [(ROOT_POOL, ""), *order_pools(known, below)]:
        its, extra = pools.get(pool, Sums()), sums.get(Key(OPERATION, tree, name_extra(pool)), Sums())
        used, held_back, lost = extra.used / HOUR_S, its.late / HOUR_S, extra.late / HOUR_S
        gain = used - held_back - lost
        if pool != ROOT_POOL and not (used or held_back or lost or its.reclaimed):
            continue
        rows.append(
            SavingsRow(
                name=pool,
                parent=parent,
                extra_jobs=round(extra.throttled, 1),
                extra_used=used,
                extra_ordered=extra.ordered / HOUR_S,
                reclaimed=its.reclaimed / HOUR_S,
                held_back=held_back,
                lost=lost,
                gain=gain,
                money=gain * price if price else None,
            )
        )
    return rows


def _compare_arms(tree: str, sums: Mapping[Key, Sums]) -> Comparison | None:
    def find(arm: str, number: int) -> Sums:
        return sums.get(Key(OPERATION, tree, f"<{arm} {number}>"), Sums())

    arms = [(find(CONTROL, number), find(OTHERS, number)) for number in range(TRIAL_PARTS)]
    arms = [(control, others) for control, others in arms if control.ordered or others.ordered]
    if not any(control.ordered for control, _ in arms) or not any(others.ordered for _, others in arms):
        return None
    held_back = compare([PartSums(a.throttled, a.ordered, b.throttled, b.ordered) for a, b in arms])
    used = compare([PartSums(a.used, a.ordered, b.used, b.ordered) for a, b in arms])
    return Comparison(
        control_ordered=math.fsum(control.ordered for control, _ in arms) / HOUR_S,
        others_ordered=math.fsum(others.ordered for _, others in arms) / HOUR_S,
        parts=count_parts([PartSums(a.used, a.ordered, b.used, b.ordered) for a, b in arms]),
        held_back=held_back,
        used=used,
        sentence=describe(held_back, used),
    )


def count_parts(parts: Iterable[PartSums]) -> int:
    """How many parts there are in the arm with fewer of them."""
    found = list(parts)
    return min(sum(part.control_ordered > 0.0 for part in found), sum(part.others_ordered > 0.0 for part in found))


def compare(parts: Sequence[PartSums]) -> Difference:
    """The ratios of both arms, and the 95 % interval of their difference by leaving out each part once (jackknife).

    Jobs of an operation, or of a host, are alike: so parts of operations or hosts are left out, never jobs, and the
    interval is as wide as Student's t asks for with the parts of the arm that has fewer.
    """
    control, others = _ratios(parts)
    least = count_parts(parts)
    if least < LEAST_PARTS:
        return Difference(control, others)
    differences = []
    for number in range(len(parts)):
        a, b = _ratios([*parts[:number], *parts[number + 1 :]])
        differences.append(b - a)
    middle, size = statistics.fmean(differences), len(parts)
    error = math.sqrt((size - 1) / size * math.fsum((each - middle) ** 2 for each in differences))
    reach = error * student_95(least - 1)
    return Difference(control, others, others - control - reach, others - control + reach)


def _ratios(parts: Iterable[PartSums]) -> tuple[float, float]:
    control, control_ordered, others, others_ordered = (math.fsum(column) for column in zip(*parts, strict=True))
    return control / control_ordered if control_ordered else 0.0, others / others_ordered if others_ordered else 0.0


def student_95(freedom: int) -> float:
    """The 97.5 % quantile of Student's t, by the expansion around the normal one; exact to .01 from 4 on."""
    z, n = statistics.NormalDist().inv_cdf(0.975), float(freedom)
    return (
        z
        + (z**3 + z) / (4 * n)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * n**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * n**3)
    )


def describe(held_back: Difference, used: Difference) -> str:
    """Both differences in words, percent of what was ordered."""
    if held_back.low is None or held_back.high is None or used.low is None or used.high is None:
        return "too few operations or hosts in the control group to tell a difference"
    told = (
        f"jobs whose limits move were held back for {100 * held_back.others:.2f} % of what they ordered, those of the "
        f"control group for {100 * held_back.control:.2f} %: {_points(held_back.low, held_back.high)}; "
        f"they used {100 * used.others:.1f} % of it, the control group {100 * used.control:.1f} %"
    )
    same = used.low <= 0.0 <= used.high
    return f"{told}, no difference that these figures can show" if same else f"{told}: {_points(used.low, used.high)}"


def _points(low: float, high: float) -> str:
    if low <= 0.0 <= high:
        return f"no difference that these figures can show ({100 * low:+.2f} to {100 * high:+.2f} points)"
    return f"{100 * low:+.2f} to {100 * high:+.2f} points (95 %)"
