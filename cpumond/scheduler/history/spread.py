"""Rates over the time in which they were measured; pure.

A node tells counters with its heartbeats. What grew between two of them is counted at the second one, in one tick;
where heartbeats come less often than ticks, the ticks between have nothing. Stored is what came with each tick, which
part of it is of the time before (``early_ratio``), and how far back that reaches (``early_s``); what is shown is spread
over that time.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from typing import Final

from cpumond.scheduler.history.model import HAS_RATES, LIMIT_COLUMNS, NOT_KNOWN, RATES, Points

MAX_SPREAD_S: Final = 600.0
"""No rate is spread over more: what a node tells after a longer silence is shown in this much of it."""

LEAST_TOLD: Final = 0.9
"""The newest point is shown once nodes have told of this part of its time."""

ALL_TOLD: Final = 0.999

LOOKED_AT: Final = 21
"""From how many points it is known what nodes usually tell later: most of them, whatever one silent node does."""


def spread_rates(points: Points, kind: int) -> Points:
    """The points with the early part of each rate where it belongs; the sum of what is known stays the same.

    A rate is not known where jobs have limits and no node has told of that time: at the end, until the next heartbeat.
    """
    if not HAS_RATES[kind] or not len(points):
        return points
    columns, first = points.columns, len(points.columns) - RATES
    rates, limits = columns[first:], columns[LIMIT_COLUMNS[kind]]
    sums = [[0.0] * len(points) for _ in rates]
    placed: deque[dict[int, float]] = deque(maxlen=LOOKED_AT)
    for number in range(len(points)):
        if not any(rate[number] > 0.0 for rate in rates):
            continue
        parts = _places_of(points, number, columns[first - 2][number], columns[first - 1][number])
        placed.append({number - place: part for place, part in parts.items()})
        for rate, total in zip(rates, sums, strict=True):
            if (value := rate[number]) > 0.0:
                for place, part in parts.items():
                    total[place] += part * value * points.intervals[number]
    told = _told_of_newest(placed) if limits[-1] > 0.0 else []
    # Where nearly all is told of the newest point, it is the mean of that part of its time; else it is not known yet.
    scale = 1.0 / told[0] if len(told) == 1 and told[0] >= LEAST_TOLD else NOT_KNOWN
    has_any = [any(row) for row in zip(*sums, strict=True)]
    spread = []
    for rate, total in zip(rates, sums, strict=True):
        column = array("f", [NOT_KNOWN]) * len(points)
        for number, interval_s in enumerate(points.intervals):
            is_told = has_any[number] or not limits[number] > 0.0
            if is_told and (rate[number] == rate[number] or total[number]):
                is_newest = len(points) - number <= len(told)
                column[number] = total[number] / interval_s * (scale if is_newest else 1.0)
        spread.append(column)
    return Points(points.ends, points.intervals, [*columns[:first], *spread])


def _places_of(points: Points, number: int, early_ratio: float, early_s: float) -> dict[int, float]:
    """To which points which part belongs of what came with a point."""
    found: dict[int, float] = {}
    if early_ratio > 0.0:
        until = points.ends[number] - points.intervals[number]
        since, place = until - min(early_s, MAX_SPREAD_S), number - 1
        while place >= 0 and points.ends[place] > since:
            part_s = min(until, points.ends[place]) - max(since, points.ends[place] - points.intervals[place])
            if part_s > 0.0:
                found[place] = part_s
            place -= 1
    whole_s = sum(found.values())
    if not whole_s:
        return {number: 1.0}
    return {number: 1.0 - early_ratio} | {place: early_ratio * part_s / whole_s for place, part_s in found.items()}


def _told_of_newest(placed: Collection[Mapping[int, float]]) -> list[float]:
    """Which part of their time nodes have told of, of the newest points, the last one first, up to the first of which
    all is told; by what they usually tell later. ``placed``: which part of what came moved back by how many points."""
    if not placed:
        return []
    sums, told = [0.0] * len(placed), list[float]()
    for age in range(max(map(max, placed))):
        sums = [total + parts.get(age, 0.0) for total, parts in zip(sums, placed, strict=True)]
        if (usual := sorted(sums)[len(sums) // 8]) > ALL_TOLD:
            break
        told.append(usual)
    return told


def merge_early(
    intervals: Sequence[float], groups: Sequence[tuple[int, int]], columns: Sequence[array[float]]
) -> tuple[array[float], array[float]]:
    """``early_ratio`` and ``early_s`` of groups of points (from, to): of what is before the whole group."""
    early_ratio, early_s = columns[-RATES - 2 : -RATES]
    ratios, reaches = array("f"), array("f")
    for a, b in groups:
        amount = early = reach = offset_s = 0.0
        for number in range(a, b):
            came = sum(rate[number] for rate in columns[-RATES:] if rate[number] > 0.0) * intervals[number]
            amount += came
            if came and early_ratio[number] > 0.0 and (left_s := early_s[number] - offset_s) > 0.0:
                part = came * early_ratio[number] * left_s / early_s[number]
                early, reach = early + part, reach + part * left_s
            offset_s += intervals[number]
        ratios.append(early / amount if early else 0.0)
        reaches.append(reach / early if early else 0.0)
    return ratios, reaches
