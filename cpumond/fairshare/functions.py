"""Functions from a suggestion to the share that an element takes; here for operations (fair_share_update.md 8, 9)."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final

from cpumond.fairshare.resources import ZERO, Vector, add, positive_part, scale, subtract

ROUNDING: Final = 1e-15
"""Levels closer than this count as equal."""

STEEPEST: Final = 2.0**14
"""Segments steeper than this are ramps, for which both ends are kept: slope times a rounded length is too inexact."""

EXACT: Final = 2.0**60
"""Slopes are summed as integers in units of 1 / EXACT: a slope that is added and later subtracted leaves no remainder.
So a resource of which no element takes more stays exactly constant."""

Jump = tuple[float, int, Vector]
"""A suggestion at which the value jumps, the index of the segment that begins there, the jump's height per resource."""

Group = tuple[tuple[int, int], ...]
"""Children that jump at one place of their parent's path: (index of the child, index of its segment after the jump)."""

Position = tuple[float, float, float, Group, int]
"""Position of a segment on the path: the fit factor at its start, fit factor per suggestion, the fit factor at its end,
the children that jump exactly there, and how many of them have jumped."""

SlopeChange = tuple[float, int, int, int, int, int]
"""A fit factor and the changes of slope there, one per resource, in units of 1 / EXACT."""

NO_CHANGES: Final[tuple[float, list[SlopeChange]]] = (0.0, [])

NO_JUMPS: Final[Mapping[int, Vector]] = MappingProxyType({})


class ShareFunction:
    """``B`` of one element, left-continuous, known on [0, ``horizon``] (9.5).

    Segment ``i`` covers suggestions above ``starts[i]`` up to ``starts[i + 1]`` (the last one: up to the horizon); its
    value is ``values[i] + slopes[i] * (s - starts[i])``. ``at_zero`` is B(0), which may lie below ``values[0]``.
    ``at_horizon`` is the last value. ``positions[i]`` is the segment's position on a pool's path (an operation has no
    positions), ``zero_position`` that of suggestion 0. ``jumps``: the segments that do not begin where the previous one
    ends; ``lower_ends``: the values just before these jumps. ``ramps``: the segments steeper than STEEPEST. A function
    never changes."""

    __slots__ = (
        "starts", "values", "slopes", "at_zero", "at_horizon", "horizon", "positions", "zero_position", "jumps",
        "lower_ends", "ramps", "_changes",
    )  # fmt: skip

    def __init__(
        self, starts: list[float], values: list[Vector], slopes: list[Vector], at_zero: Vector,
        lower_ends: Mapping[int, Vector] = NO_JUMPS, positions: Sequence[Position] = (),
        zero_position: Position = (0.0, 0.0, 0.0, (), 0), horizon: float = 1.0, at_horizon: Vector | None = None,
    ) -> None:  # fmt: skip
        self.starts = starts
        self.values = values
        self.slopes = slopes
        self.at_zero = at_zero
        self.horizon = horizon
        self.positions = positions
        self.zero_position = zero_position
        if at_horizon is None:
            at_horizon = add(values[-1], scale(slopes[-1], horizon - starts[-1]))
        self.at_horizon = at_horizon
        self.jumps: Sequence[Jump] = ()
        self.lower_ends = lower_ends
        if lower_ends:
            self.jumps = [(starts[n], n, positive_part(subtract(values[n], end))) for n, end in lower_ends.items()]
        self._changes = NO_CHANGES
        self.ramps: Sequence[int] = ()
        if max(map(max, slopes)) > STEEPEST:
            self.ramps = [n for n, slope in enumerate(slopes) if max(slope) > STEEPEST]

    def end_of(self, segment: int) -> Vector:
        """Return the value at the right end of a segment; for segment -1, ``at_zero``."""
        if segment + 1 == len(self.starts):
            return self.at_horizon
        return self.lower_ends[segment + 1] if segment + 1 in self.lower_ends else self.values[segment + 1]

    def value_in(self, segment: int, suggestion: float) -> Vector:
        """Return the value at a suggestion within a segment; for segment -1, ``at_zero``."""
        if segment < 0:
            return self.at_zero
        if suggestion == self.horizon:
            return self.at_horizon
        t = suggestion - self.starts[segment]
        v = self.values[segment]
        m = self.slopes[segment]
        return (v[0] + m[0] * t, v[1] + m[1] * t, v[2] + m[2] * t, v[3] + m[3] * t, v[4] + m[4] * t)

    def exact_value(self, segment: int, suggestion: float) -> Vector:
        """Return ``value_in``; but if two segments meet at the suggestion, up to rounding: the value stored there."""
        near = suggestion * 2.0**-51
        for n in (segment, segment + 1):
            if 0 <= n < len(self.starts) and abs(self.starts[n] - suggestion) <= near:
                if n not in self.lower_ends:
                    return self.values[n]
                if n > segment:
                    return self.lower_ends[n]
        return self.value_in(segment, suggestion)

    def segment_at(self, suggestion: float) -> int:
        """Return the segment that contains a suggestion in [0, horizon]; -1 if the suggestion is 0."""
        return bisect_left(self.starts, suggestion) - 1

    def value(self, suggestion: float) -> Vector:
        """Return B(suggestion), for a suggestion in [0, horizon]."""
        return self.value_in(self.segment_at(suggestion), suggestion)

    def position_at(self, segment: int, suggestion: float) -> tuple[float, Group, int]:
        """Return the position on a pool's path at a suggestion within a segment (9.4): the fit factor, the children
        that jump there, and how many of these have jumped."""
        if segment < 0:
            x, _, _, group, jumped = self.zero_position
            return x, group, jumped
        x, rate, end, group, jumped = self.positions[segment]
        return min(x + rate * (suggestion - self.starts[segment]), end), group, jumped

    def slope_changes(self, factor: float, reach: float) -> list[SlopeChange]:
        """Return at which x in [0, reach], and by how much, the slope changes if the suggestion is x * factor. Ramps
        count as flat. A pool's result is kept for the next sum, because it takes longer than an operation's."""
        if not self.positions:
            return self._list_changes(factor, reach * factor)
        if self._changes[0] != factor:
            self._changes = (factor, self._list_changes(factor, 1.0))
        changes = self._changes[1]
        return changes if changes[-1][0] <= reach else changes[: bisect_right(changes, (reach, math.inf))]

    def _list_changes(self, factor: float, until: float) -> list[SlopeChange]:
        starts, slopes = self.starts, self.slopes
        if starts[-1] > until:
            count = bisect_right(starts, until)
            starts, slopes = starts[:count], slopes[:count]
        unit = factor * EXACT
        ramps = self.ramps
        changes: list[SlopeChange] = []
        f = g = h = i = j = 0
        for n, (s, (v, w, x, y, z)) in enumerate(zip(starts, slopes, strict=True)):
            if ramps and n in ramps:
                a = b = c = d = e = 0
            else:
                a, b, c, d, e = int(v * unit), int(w * unit), int(x * unit), int(y * unit), int(z * unit)
            changes.append((s / factor, a - f, b - g, c - h, d - i, e - j))
            f, g, h, i, j = a, b, c, d, e
        if self.slopes[-1] != ZERO and 1.0 == self.horizon <= until:  # from suggestion 1 on, the value is constant
            changes.append((1.0 / factor, -f, -g, -h, -i, -j))
        return changes


FLAT: Final = (0, 0, 0, 0, 0)

NOTHING: Final = ShareFunction([0.0], [ZERO], [ZERO], ZERO, positions=[(1.0, 0.0, 1.0, (), 0)])
"""The function of an element that demands nothing."""


def between(x: float, x0: float, x1: float, v0: float, v1: float) -> float:
    """Return the value at ``x`` on the line from (x0, v0) to (x1, v1), computed from the end nearer to ``x`` (8)."""
    t = (x - x0) / (x1 - x0)
    return v0 + (v1 - v0) * t if t < 0.5 else v1 - (v1 - v0) * (1.0 - t)


def gang_function(demand: Vector, limits: Vector) -> ShareFunction:
    """Return ``B`` of a gang operation: nothing until its whole demand fits (9.1)."""
    needed = max(demand)
    if needed <= 0.0 or needed >= 1.0 or any(d > limit for d, limit in zip(demand, limits, strict=True)):
        return NOTHING
    return ShareFunction([0.0, needed], [ZERO, demand], [ZERO, ZERO], ZERO, {1: ZERO})


def operation_function(usage: Vector, demand: Vector, limits: Vector) -> ShareFunction:
    """Return ``B`` of an operation: all resources grow to the usage, and from the usage to the demand (9.1, 9.4). All
    arguments are shares; ``demand`` dominates ``usage``. Up to the greatest usage ``B_r(s) = min(s, usage_r)``; then
    ``usage + g * (demand - usage)`` with the greatest ``g`` in [0, 1] that the suggestion and the limits allow."""
    if max(demand) <= 0.0:
        return NOTHING
    starts: list[float] = []
    values: list[Vector] = []
    slopes: list[Vector] = []
    cap = min((limit for limit, u in zip(limits, usage, strict=True) if limit < u), default=1.0)
    top = min(max(usage), cap, 1.0)
    u0, u1, u2, u3, u4 = usage
    s = 0.0
    for end in sorted(usage):
        if s < end and s < top:
            starts.append(s)
            values.append((
                s if u0 > s else u0, s if u1 > s else u1, s if u2 > s else u2, s if u3 > s else u3, s if u4 > s else u4,
            ))  # fmt: skip
            slopes.append((
                1.0 if u0 > s else 0.0, 1.0 if u1 > s else 0.0, 1.0 if u2 > s else 0.0, 1.0 if u3 > s else 0.0,
                1.0 if u4 > s else 0.0,
            ))  # fmt: skip
            s = end if end < top else top
    if max(usage) <= cap and s < 1.0 and demand != usage:
        return _grow_to_demand(starts, values, slopes, usage, demand, limits)
    reached = usage if max(usage) <= cap else _value_within(usage, limits)
    if s < 1.0:
        starts.append(s)
        values.append(reached)
        slopes.append(ZERO)
    return ShareFunction(starts, values, slopes, ZERO, at_horizon=reached)


def _value_within(usage: Vector, limits: Vector) -> Vector:
    """The value of section 9.1 for the fit factor, in [0, 1], at which growth to ``usage`` reaches the first limit."""
    top = max(usage)
    edges = [0.0, *sorted({x for x in usage if 0.0 < x < top}), top]
    factors = [edge / top for edge in edges]
    factor = 1.0
    for limit, u in zip(limits, usage, strict=True):
        if limit < u:
            n = bisect_right(edges, limit)
            factor = min(factor, between(limit, edges[n - 1], edges[n], factors[n - 1], factors[n]))
    n = bisect_left(factors, factor, 1)
    a, b, c, d, e = (between(factor, factors[n - 1], factors[n], min(edges[n - 1], u), min(edges[n], u)) for u in usage)
    return (a, b, c, d, e)


def _grow_to_demand(
    starts: list[float], values: list[Vector], slopes: list[Vector], usage: Vector, demand: Vector, limits: Vector
) -> ShareFunction:
    """Add the second half of ``operation_function``: from the usage, already reached, to the demand."""
    growth = subtract(demand, usage)
    room, end, needed = 1.0, demand, max(demand)
    factors = [between(x, u, d, 1.0, 2.0) if d > x else 2.0 for x, u, d in zip(limits, usage, demand, strict=True)]
    factor = min(factors)
    if factor < 2.0:
        # Shares depend on whether the sum with other shares is exactly 1 (9.4): use the value of section 9.1 at this f.
        room = factor - 1.0
        a, b, c, d, e = (between(factor, 1.0, 2.0, u, d) for u, d in zip(usage, demand, strict=True))
        end = (a, b, c, d, e)
        needed = max(x if f == factor else v for x, f, v in zip(limits, factors, end, strict=True))
    s = max(usage)
    reached, at, lower_ends = 0.0, usage, {}
    for low, high, x, x_end in rising_parts(usage, growth, room, s, needed):
        if x > reached:
            lower_ends[len(starts)] = at
        starts.append(low)
        values.append(add(usage, scale(growth, x)) if x else usage)
        slopes.append(scale(growth, (x_end - x) / (high - low)))
        s, reached, at = high, x_end, add(usage, scale(growth, x_end))
    if s < 1.0:
        if reached < room:
            lower_ends[len(starts)] = at
        starts.append(s)
        values.append(end)
        slopes.append(ZERO)
    return ShareFunction(starts, values, slopes, ZERO, lower_ends, at_horizon=end)


def rising_parts(
    level: Vector, slope: Vector, length: float, suggestion: float, needed: float, rounding: float = ROUNDING
) -> list[tuple[float, float, float, float]]:
    """Return the parts of a linear piece on which the needed suggestion rises; one resource determines each part (9.4).

    The piece is ``level + slope * x``, x in [0, length]. The needed suggestion is the greatest component, but at least
    ``suggestion``, that of the start; that of the end is ``needed``. Each part is (suggestion at its start, suggestion
    at its end, x at its start, x at its end)."""
    if needed <= suggestion + suggestion * rounding:
        return []
    lines = [(v, m) for v, m in zip(level, slope, strict=True) if m > 0.0 and v + m * length > suggestion]
    if not lines:  # the needed suggestion rises by rounding only
        return []
    x, _, bound, rate = min((max((suggestion - v) / m, 0.0), -m, v, m) for v, m in lines)
    low = suggestion
    parts: list[tuple[float, float, float, float]] = []
    while True:
        x_end, next_bound, next_rate = length, 0.0, 0.0
        for v, m in lines:
            if m > rate:
                crossing = max((bound - v) / (m - rate), x)
                if crossing < x_end or (crossing == x_end and m > next_rate > 0.0):
                    x_end, next_bound, next_rate = crossing, v, m
        high = bound + rate * x_end if next_rate else needed
        if high > low + low * rounding:
            parts.append((low, high, x, x_end))
            low, x = high, x_end
        elif x_end > x:
            x = x_end
        if not next_rate:
            return parts
        bound, rate = next_bound, next_rate
