"""Share functions: how much an element takes at a suggestion (fair_share_update.md 8 and 9).

An element's ``B`` (9.5) is its path - the values that ``A`` (9.1 to 9.3) runs through, in order - measured by the
suggestion that each point of the path needs: the least ``s`` with ``value <= min(strong + proposed + s, limits)``. So
nothing of ``M`` (9.4) is computed but the resource that binds: along a linear piece of the path the needed suggestion
is a maximum of lines, and one division per piece turns path into function. Where the path moves without needing more
suggestion, ``B`` jumps; where the path itself jumps, ``B`` waits at the lower end until the upper end is affordable.

Paths and functions of pools are made from 0 up to where they are needed: a prefix has the same numbers as the whole.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from types import MappingProxyType
from typing import Final

from cpumond.fairshare.resources import ZERO, Vector, add, greatest, positive_part, scale, subtract, sum_vectors

TIE: Final = 1e-12
"""Running sums that are closer to a bound than this are summed again, child by child, before they are compared."""

NEARLY_ONE: Final = 1.0 - TIE
BELOW_ONE: Final = 1.0 - 2.0**-53

ROUNDING: Final = 1e-15
"""Levels closer than this are the same level."""

STEEPEST: Final = 2.0**14
"""A segment with a slope above this is a ramp, known by its ends: a slope times a rounded length would be too rough."""

EXACT: Final = 2.0**60
"""Slopes are summed as integers in units of 1 / EXACT: what is added and taken away again leaves nothing behind, and a
resource that nobody takes more of stays as it is."""

Jump = tuple[float, int, Vector]
"""A place, the index of the segment that begins there, and the height in each resource."""

Group = tuple[tuple[int, int], ...]
"""Children that jump at one place of their parent's path: (index of the child, index of its segment behind it)."""

Position = tuple[float, float, float, Group, int]
"""Where on the path a segment lies: the fit factor at its start, fit factor per suggestion, the fit factor at its end;
the children that jump right here, and how many of them have jumped."""

SlopeChange = tuple[float, int, int, int, int, int]
"""A fit factor and by how much the slope changes there, in each resource, in units of 1 / EXACT."""


NO_JUMPS: Final[Mapping[int, Vector]] = MappingProxyType({})


class ShareFunction:
    """``B`` of one element, left-continuous, known on [0, ``horizon``] (9.5).

    Segment ``i`` covers suggestions above ``starts[i]`` up to ``starts[i + 1]`` (the last one: up to the horizon); its
    value is ``values[i] + slopes[i] * (s - starts[i])``. ``at_zero`` is B(0), which may lie below ``values[0]``;
    ``at_horizon`` is the last value. A pool's ``positions[i]`` says where its path is meanwhile (empty for operations),
    ``zero_position`` where it is at 0. ``jumps`` are the segments that do not begin where the one before ends,
    ``lower_ends`` the values below these jumps; ``ramps`` are the segments steeper than STEEPEST. Never changed once
    made.
    """

    __slots__ = (
        "starts", "values", "slopes", "at_zero", "at_horizon", "horizon", "positions", "zero_position", "jumps",
        "lower_ends", "ramps", "_changes",
    )  # fmt: skip

    def __init__(
        self,
        starts: list[float],
        values: list[Vector],
        slopes: list[Vector],
        at_zero: Vector,
        lower_ends: Mapping[int, Vector] = NO_JUMPS,
        positions: Sequence[Position] = (),
        zero_position: Position = (0.0, 0.0, 0.0, (), 0),
        horizon: float = 1.0,
        at_horizon: Vector | None = None,
    ) -> None:
        self.starts = starts
        self.values = values
        self.slopes = slopes
        self.at_zero = at_zero
        self.horizon = horizon
        self.positions = positions
        self.zero_position = zero_position
        if at_horizon is None:
            t = horizon - starts[-1]
            at_horizon = add(values[-1], scale(slopes[-1], t))
        self.at_horizon = at_horizon
        self.jumps: Sequence[Jump] = ()
        self.lower_ends = lower_ends
        if lower_ends:
            self.jumps = [(starts[n], n, positive_part(subtract(values[n], end))) for n, end in lower_ends.items()]
        self._changes: tuple[float, list[SlopeChange]] = (0.0, [])
        self.ramps: Sequence[int] = ()
        if max(map(max, slopes)) > STEEPEST:
            self.ramps = [n for n, slope in enumerate(slopes) if max(slope) > STEEPEST]

    def end_of(self, segment: int) -> Vector:
        """The value at the right end of a segment; ``at_zero`` for -1."""
        if segment + 1 == len(self.starts):
            return self.at_horizon
        return self.lower_ends[segment + 1] if segment + 1 in self.lower_ends else self.values[segment + 1]

    def value_in(self, segment: int, suggestion: float) -> Vector:
        """The value at a suggestion within a segment; ``at_zero`` for segment -1."""
        if segment < 0:
            return self.at_zero
        if suggestion == self.horizon:
            return self.at_horizon
        t = suggestion - self.starts[segment]
        v = self.values[segment]
        m = self.slopes[segment]
        return (v[0] + m[0] * t, v[1] + m[1] * t, v[2] + m[2] * t, v[3] + m[3] * t, v[4] + m[4] * t)

    def exact_value(self, segment: int, suggestion: float) -> Vector:
        """As ``value_in``; where segments meet, but for rounding of the suggestion, the value that both have there."""
        near = suggestion * 2.0**-51
        for n in (segment, segment + 1):
            if 0 <= n < len(self.starts) and abs(self.starts[n] - suggestion) <= near:
                if n not in self.lower_ends:
                    return self.values[n]
                if n > segment:
                    return self.lower_ends[n]
        return self.value_in(segment, suggestion)

    def segment_at(self, suggestion: float) -> int:
        """The segment that holds a suggestion in [0, horizon], -1 for 0."""
        return bisect_left(self.starts, suggestion) - 1

    def value(self, suggestion: float) -> Vector:
        """B(suggestion), suggestion in [0, horizon]."""
        return self.value_in(self.segment_at(suggestion), suggestion)

    def position_at(self, segment: int, suggestion: float) -> tuple[float, Group, int]:
        """Where a pool's path is at a suggestion within a segment (9.4).

        The fit factor, the children that jump there, and how many of them have.
        """
        if segment < 0:
            x, _, _, group, jumped = self.zero_position
            return x, group, jumped
        x, rate, end, group, jumped = self.positions[segment]
        return min(x + rate * (suggestion - self.starts[segment]), end), group, jumped

    def slope_changes(self, factor: float, reach: float) -> list[SlopeChange]:
        """Where and how the slope changes as a function of x, with suggestion ``x * factor``, for x in [0, reach].

        Ramps count as flat. Kept for the next sum if it is a pool's, which is longer than an operation's.
        """
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
        rates = [
            (int(a * unit), int(b * unit), int(c * unit), int(d * unit), int(e * unit)) for a, b, c, d, e in slopes
        ]
        for ramp in self.ramps:
            if ramp < len(rates):
                rates[ramp] = FLAT
        if self.slopes[-1] != ZERO and 1.0 == self.horizon <= until:  # beyond suggestion 1 it stays as it is
            starts = [*starts, 1.0]
            rates.append(FLAT)
        return [
            (s / factor, a - f, b - g, c - h, d - i, e - j)
            for s, (a, b, c, d, e), (f, g, h, i, j) in zip(starts, rates, [FLAT, *rates], strict=False)
        ]


FLAT: Final = (0, 0, 0, 0, 0)

NOTHING: Final = ShareFunction([0.0], [ZERO], [ZERO], ZERO, positions=[(1.0, 0.0, 1.0, (), 0)])
"""Who demands nothing gets nothing."""


def between(x: float, x0: float, x1: float, v0: float, v1: float) -> float:
    """The value at ``x`` on the line from (x0, v0) to (x1, v1), reckoned from the nearer end (8)."""
    t = (x - x0) / (x1 - x0)
    return v0 + (v1 - v0) * t if t < 0.5 else v1 - (v1 - v0) * (1.0 - t)


# ---- operations


def gang_function(demand: Vector, limits: Vector) -> ShareFunction:
    """``B`` of a gang operation: nothing until all of its demand fits (9.1)."""
    needed = max(demand)
    if needed <= 0.0 or needed >= 1.0 or any(d > limit for d, limit in zip(demand, limits, strict=True)):
        return NOTHING
    return ShareFunction([0.0, needed], [ZERO, demand], [ZERO, ZERO], ZERO, {1: ZERO})


def operation_function(usage: Vector, demand: Vector, limits: Vector) -> ShareFunction:
    """``B`` of an operation: its resources grow together to the usage, then from the usage to the demand (9.1, 9.4).

    All three are shares, ``demand`` dominates ``usage``. Up to the greatest usage ``B_r(s) = min(s, usage_r)``; then
    ``usage + g * (demand - usage)`` with the greatest ``g`` in [0, 1] that the suggestion and the limits allow.
    """
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
    """The value of section 9.1 for the fit factor, in [0, 1], at which growth to ``usage`` meets the first limit."""
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
    """The second half of ``operation_function``: from the usage, which has been reached, to the demand."""
    growth = subtract(demand, usage)
    room, end, needed = 1.0, demand, max(demand)
    factors = [between(x, u, d, 1.0, 2.0) if d > x else 2.0 for x, u, d in zip(limits, usage, demand, strict=True)]
    factor = min(factors)
    if factor < 2.0:
        # Whether the sum with others is exactly 1 decides what those get (9.4): the value of section 9.1 at this f.
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
    """Where along a linear piece more suggestion is needed, and which resource decides (9.4).

    On the piece ``level + slope * x``, x in [0, length], the needed suggestion is the greatest component, but at least
    ``suggestion``, which is there at its start; at the end it is ``needed``. Returns (suggestion, suggestion at the
    end, x, x at the end) of the parts where it rises, in order; one resource binds in each.
    """
    if needed <= suggestion + suggestion * rounding:
        return []
    lines = [(v, m) for v, m in zip(level, slope, strict=True) if m > 0.0 and v + m * length > suggestion]
    if not lines:  # nothing but rounding
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


# ---- the path of a pool


class Path:
    """The values that ``A`` of a pool runs through (9.2, 9.3), as vertices, from fit factor 0 on.

    Vertex ``i`` is at fit factor ``xs[i]`` with value ``values[i]``; the step to the next vertex is linear with
    ``slopes[i]`` per fit factor, or a jump (None). ``jumps[i]`` says of a jump step who jumps there: all children that
    jump at this fit factor, and how many of them before the step. ``factors[c]`` is child c's suggestion per fit
    factor (fair_share), None in a FIFO pool; ``functions`` are the children's in the order of the path, as far as they
    are needed. ``complete``: the last vertex is the end of the domain.
    """

    __slots__ = ("xs", "values", "slopes", "jumps", "functions", "factors", "complete")

    def __init__(self, functions: list[ShareFunction], factors: list[float] | None, complete: bool) -> None:
        self.xs: list[float] = [0.0]
        self.values: list[Vector] = [sum_vectors([function.at_zero for function in functions])]
        self.slopes: list[Vector | None] = []
        self.jumps: dict[int, tuple[Group, int]] = {}
        self.functions = functions
        self.factors = factors
        self.complete = complete

    def add_step(self, x: float, slope: Vector, value: Vector) -> None:
        """Append a linear step to fit factor ``x``."""
        self.xs.append(x)
        self.slopes.append(slope)
        self.values.append(value)

    def add_jumps(self, x: float, here: list[tuple[int, int, Vector]], one_by_one: bool) -> None:
        """Append what the children ``here`` (child, segment, height) do at ``x``: a joint jump, or one for each."""
        group: Group = tuple((child, segment) for child, segment, _ in here)
        value = self.values[-1]
        for done, (_, _, height) in enumerate(here):
            value = add(value, height)
            if one_by_one or done == len(here) - 1:
                self.jumps[len(self.slopes)] = (group, done if one_by_one else 0)
                self.slopes.append(None)
                self.xs.append(x)
                self.values.append(value)

    def places_at(self, x: float, group: Group = (), jumped: int = 0) -> tuple[list[int], list[float]]:
        """Where the children are at fit factor ``x``, of ``group`` the first ``jumped`` behind their jump (12.1).

        Two lists: the segment of each child's function, and its suggestion.
        """
        functions = self.functions
        if self.factors is None:
            suggestions = [min(max(x - child, 0.0), 1.0) for child in range(len(functions))]
        else:
            suggestions = [s if (s := x * factor) < 1.0 else 1.0 for factor in self.factors]
        segments = [bisect_left(f.starts, s) - 1 for f, s in zip(functions, suggestions, strict=True)]
        for n, (child, after) in enumerate(group):
            segments[child] = after if n < jumped else after - 1
            suggestions[child] = functions[child].starts[after]
        return segments, suggestions

    def sum_at(self, vertex: int) -> Vector:
        """The value at a vertex, as the sum of the children's values there in their order."""
        group, jumped = self.jumps.get(vertex, ((), 0))
        if vertex - 1 in self.jumps:
            group, _ = self.jumps[vertex - 1]
            jumped = self.jumps[vertex][1] if vertex in self.jumps else len(group)
        return self._sum(self.xs[vertex], group, jumped)

    def sum_along(self, step: int) -> Vector:
        """As ``sum_at``, in the middle of a linear step: what stays as it is there, free of its ends' rounding."""
        return self._sum((self.xs[step] + self.xs[step + 1]) / 2.0, (), 0)

    def sum_at_end(self) -> Vector:
        """As ``sum_at``, for the last vertex of a complete path."""
        factors = self.factors or [1.0] * len(self.functions)
        return sum_vectors(
            [
                f.at_horizon if factor >= 1.0 else f.value(factor)
                for f, factor in zip(self.functions, factors, strict=True)
            ]
        )

    def _sum(self, x: float, group: Group, jumped: int) -> Vector:
        places = zip(self.functions, *self.places_at(x, group, jumped), strict=True)
        return sum_vectors([function.exact_value(segment, s) for function, segment, s in places])


def fifo_path(functions: list[ShareFunction], complete: bool) -> Path:
    """The path of a FIFO pool: its children's functions one after the other, in their order (9.3)."""
    path = Path(functions, None, complete)
    for child in range(len(functions)):
        _append_child(path, child, path.values[-1], float(child), 1.0, 1.0)
    return path


def weighted_path(functions: list[ShareFunction], factors: list[float], reach: float, improved: bool) -> Path:
    """The path of a fair_share pool: its children's functions, arguments scaled by weight, summed (9.2).

    Children are in their order; ``factors`` are their weights by the least weight. The path goes to the last change of
    slope at or before the fit factor ``reach`` in (0, 1], to the end if that is 1; the functions are known that far.
    ``improved``: children that jump at one place do so one by one in their order. One sweep over all changes: linear
    in their number but for sorting.
    """
    path = Path(functions, factors, reach == 1.0)
    takers = [child for child, function in enumerate(functions) if function is not NOTHING]
    if len(takers) == 1 and factors[takers[0]] >= 1.0:
        _append_child(path, takers[0], ZERO, 0.0, factors[takers[0]], reach * factors[takers[0]])
    elif takers:
        _sum(path, takers, reach, improved)
    if path.complete and path.xs[-1] < 1.0:
        path.add_step(1.0, ZERO, path.values[-1])
    return path


def _append_child(path: Path, child: int, base: Vector, offset: float, factor: float, until: float) -> None:
    """Append a child that moves alone, up to suggestion ``until``: from ``offset`` on, on top of ``base``."""
    function = path.functions[child]
    starts, values = function.starts, function.values
    jumps = {segment: height for _, segment, height in function.jumps}
    for segment, slope in enumerate(function.slopes):
        if segment in jumps:
            s = starts[segment]
            path.xs[-1] = x = _below(offset + s / factor, offset, factor, s)
            path.add_jumps(x, [(child, segment, jumps[segment])], True)
            path.values[-1] = add(base, values[segment])
        ends = segment + 1 == len(starts)
        end = function.horizon if ends else starts[segment + 1]
        if end > until:
            break
        value = function.end_of(segment) if ends or function.lower_ends else values[segment + 1]
        path.add_step(offset + end / factor, slope if factor == 1.0 else scale(slope, factor), add(base, value))


def _below(x: float, offset: float, factor: float, suggestion: float) -> float:
    """The fit factor of a child's jump: near ``x``, and not so great that the child would be taken beyond it."""
    while (x - offset) * factor > suggestion:
        x = math.nextafter(x, 0.0)
    return x


_END, _JUMP, _RAMP = range(3)
"""What breaks a sum of running slopes, in the order in which it happens at one place."""

Ramp = tuple[float, float, Vector]
"""A ramp on a path: the fit factors of its start and end, and its rise."""


def _sum(path: Path, takers: list[int], reach: float, improved: bool) -> None:
    """Append the sum of the children ``takers``, with running value and slope; jumps and ramps are added by height."""
    changes: list[SlopeChange] = []
    breaks: list[tuple[float, int, int, int, Vector]] = []
    ramps: dict[tuple[int, int], Ramp] = {}
    for child in takers:
        function, factor = path.functions[child], path.factors[child] if path.factors else 1.0
        changes += function.slope_changes(factor, reach)
        breaks += [
            (_below(s / factor, 0.0, factor, s), _JUMP, child, segment, height)
            for s, segment, height in function.jumps
            if s <= reach * factor
        ]
        for segment in function.ramps:
            x, x_end, rise = _ramp(function, segment, factor)
            if x_end > x:
                ramps[child, segment] = x, x_end, rise
                breaks += [(x, _RAMP, child, segment, ZERO), (x_end, _END, child, segment, rise)]
            elif segment + 1 < len(function.starts):  # nothing between its ends but rounding
                breaks.append((x, _JUMP, child, segment + 1, rise))
    changes.sort()
    breaks.sort(key=itemgetter(0, 1, 2, 3))
    value, slope = path.values[0], FLAT
    active: dict[tuple[int, int], Ramp] = {}
    begin = 0
    for x, here in groupby(breaks, itemgetter(0)):
        if x >= 1.0 or x > reach:
            break
        end = bisect_left(changes, (x,), begin)
        value, slope = _sweep(path, changes[begin:end], value, slope, x, active)
        begin = end
        jumps = []
        for _, kind, child, segment, height in here:
            if kind == _RAMP:
                active[child, segment] = ramps[child, segment]
                continue
            value = add(value, height)
            if kind == _END:
                active.pop((child, segment), None)
            else:
                jumps.append((child, segment, height))
        if jumps:
            path.add_jumps(x, jumps, improved)
    _sweep(path, changes[begin:], value, slope, 1.0 if path.complete else None, active)


def _ramp(function: ShareFunction, segment: int, factor: float) -> Ramp:
    """Where a steep segment of a child begins and ends on the path, and how much it rises."""
    end = function.horizon if segment + 1 == len(function.starts) else function.starts[segment + 1]
    rise = subtract(function.end_of(segment), function.values[segment])
    return function.starts[segment] / factor, end / factor, rise


def _sweep(
    path: Path,
    changes: list[SlopeChange],
    value: Vector,
    slope: tuple[int, int, int, int, int],
    until: float | None,
    active: dict[tuple[int, int], Ramp],
) -> tuple[Vector, tuple[int, int, int, int, int]]:
    """Append steps from the end of ``path`` through ``changes`` and on to ``until``.

    ``value`` and ``slope`` are the sums so far without the ``active`` ramps; returned is what they are then.
    """
    if active:
        return _sweep_with_ramps(path, changes, value, slope, until, active)
    at = path.xs[-1]
    v0, v1, v2, v3, v4 = value
    m0, m1, m2, m3, m4 = slope
    add_x, add_value, add_slope = path.xs.append, path.values.append, path.slopes.append
    unit = 1.0 / EXACT
    for x, d0, d1, d2, d3, d4 in changes:
        if x > at:
            if x >= 1.0:
                break
            dx = x - at
            r0 = m0 * unit
            r1 = m1 * unit
            r2 = m2 * unit
            r3 = m3 * unit
            r4 = m4 * unit
            add_slope((r0, r1, r2, r3, r4))
            v0 += r0 * dx
            v1 += r1 * dx
            v2 += r2 * dx
            v3 += r3 * dx
            v4 += r4 * dx
            add_value((v0, v1, v2, v3, v4))
            add_x(x)
            at = x
        m0 += d0
        m1 += d1
        m2 += d2
        m3 += d3
        m4 += d4
    value, slope = (v0, v1, v2, v3, v4), (m0, m1, m2, m3, m4)
    if until is not None and until > at:
        rates: Vector = (m0 * unit, m1 * unit, m2 * unit, m3 * unit, m4 * unit)
        value = add(value, scale(rates, until - at))
        path.add_step(until, rates, value)
    return value, slope


def _sweep_with_ramps(
    path: Path,
    changes: list[SlopeChange],
    value: Vector,
    slope: tuple[int, int, int, int, int],
    until: float | None,
    active: dict[tuple[int, int], Ramp],
) -> tuple[Vector, tuple[int, int, int, int, int]]:
    """As ``_sweep``, with the rise of ramps on top: each is exact at its ends, whatever its slope."""
    for x, *change in [*changes, *([(until, *FLAT)] if until is not None else [])]:
        at = path.xs[-1]
        if x > at:
            a, b, c, d, e = slope
            value = add(value, scale((a / EXACT, b / EXACT, c / EXACT, d / EXACT, e / EXACT), x - at))
            on_top = [scale(rise, (x - start) / (end - start)) for start, end, rise in active.values()]
            reached = greatest(sum_vectors([value, *on_top]), path.values[-1])
            path.add_step(x, scale(subtract(reached, path.values[-1]), 1.0 / (x - at)), reached)
        a, b, c, d, e = change
        slope = (slope[0] + a, slope[1] + b, slope[2] + c, slope[3] + d, slope[4] + e)
    return value, slope


def settle(path: Path) -> None:
    """Where a resource stays as it is, replace its running sum by the children's own.

    For callers that compare such values with each other; worth it for small paths only.
    """
    for r in range(5):
        flat = [slope is not None and slope[r] == 0.0 for slope in path.slopes]
        flat.append(False)
        step = 0
        while True in flat[step:]:
            first = flat.index(True, step)
            step = flat.index(False, first)
            longest = max(range(first, step), key=lambda n: path.xs[n + 1] - path.xs[n])
            exact = path.sum_along(longest)[r]
            for vertex in range(first, step + 1):
                v = list(path.values[vertex])
                v[r] = exact
                path.values[vertex] = (v[0], v[1], v[2], v[3], v[4])


# ---- from path to function


def stop_within(path: Path, bound: Vector) -> tuple[int, float, Vector]:
    """The farthest that ``path`` gets with all values within ``bound``, which holds its start (9.4).

    Returns (step, fit factor, value): within this linear step, at the start of this jump step that does not fit, or
    (number of steps, fit factor of the end, last value). A jump counts as made only if the path gets beyond it.
    """
    values = path.values
    first_beyond = [
        _first_beyond(path, r, limit) if last > limit - TIE and last > 0.0 else len(values)
        for r, (limit, last) in enumerate(zip(bound, values[-1], strict=True))
    ]
    end = min(first_beyond)
    step = end - 1
    x = path.xs[step]
    v = values[step]
    if step == len(path.slopes):
        return step, x, path.sum_at_end() if path.complete else v
    m = path.slopes[step]
    if m is None:
        return step, x, v
    stopping = [r for r in range(5) if first_beyond[r] == end]
    if step and path.slopes[step - 1] is None and any(v[r] > bound[r] - TIE for r in stopping):
        exact = path.sum_at(step)
        if any(exact[r] >= bound[r] for r in stopping):
            return step - 1, x, values[step - 1]
    x_end, v_end = path.xs[end], values[end]
    stop = min(between(bound[r], v[r], v_end[r], x, x_end) if v_end[r] > v[r] else x for r in stopping)
    stop = min(max(stop, x), x_end)
    a, b, c, d, e = (between(stop, x, x_end, v[r], v_end[r]) for r in range(5))
    if stop > x and 0.0 in m:
        exact = path.sum_along(step)
        a, b, c, d, e = (v if rate else at for v, rate, at in zip((a, b, c, d, e), m, exact, strict=True))
    return step, stop, (a, b, c, d, e)


def _first_beyond(path: Path, r: int, limit: float) -> int:
    """The first vertex whose value of resource ``r`` exceeds a limit that the start keeps; their number if none does.

    Near the limit the children's own sums decide.
    """
    values, key = path.values, itemgetter(r)
    beyond = bisect_right(values, limit + TIE, key=key)
    near = max(bisect_right(values, limit - TIE, 0, beyond, key=key), 1)

    def exact(vertex: int) -> float:
        for step in (vertex, vertex - 1):
            slope = path.slopes[step] if step < len(path.slopes) else None
            if slope is not None and slope[r] == 0.0:
                return path.sum_along(step)[r]
        return path.sum_at(vertex)[r]

    return bisect_right(range(beyond), limit, near, beyond, key=exact) if near < beyond else beyond


class _Segments:
    """The segments of a pool's function while they are made; ``moved``: the path moved on since the last one ended."""

    __slots__ = ("starts", "values", "slopes", "positions", "lower_ends", "end", "moved")

    def __init__(self, at_zero: Vector) -> None:
        self.starts: list[float] = []
        self.values: list[Vector] = []
        self.slopes: list[Vector] = []
        self.positions: list[Position] = []
        self.lower_ends: dict[int, Vector] = {}
        self.end = at_zero
        """The value where the last segment ends."""
        self.moved = False

    def add(self, start: float, value: Vector, slope: Vector, position: Position, end: Vector) -> None:
        """Append a segment; its start is a jump if the path has moved."""
        if self.moved:
            self.lower_ends[len(self.starts)] = self.end
            self.moved = False
        self.end = end
        self.starts.append(start)
        self.values.append(value)
        self.slopes.append(slope)
        self.positions.append(position)


class _Piece:
    """The piece of a path from where it leaves ``guarantee`` to where it meets ``limits``, which hold its start (9.4).

    ``first`` and ``last`` are the steps of the path that hold its ends; ``is_cut``: it ends before the path does. Its
    vertices before ``exact_until`` are those of the path.
    """

    __slots__ = ("first", "last", "is_cut", "xs", "values", "slopes", "at_zero", "exact_until")

    def __init__(self, path: Path, guarantee: Vector, limits: Vector) -> None:
        first, x, at_zero = stop_within(path, guarantee)
        last, last_x, last_value = stop_within(path, limits)
        if (last, last_x) < (first, x):
            first, x, at_zero = last, last_x, last_value
        self.first, self.last, self.at_zero = first, last, at_zero
        self.is_cut = last < len(path.slopes)
        xs, values, slopes = path.xs[first : last + 1], path.values[first : last + 1], path.slopes[first:last]
        xs[0], values[0] = x, at_zero
        self.exact_until = len(xs)
        if self.is_cut and last_x > xs[-1]:
            xs.append(last_x)
            slopes.append(path.slopes[last])
            values.append(last_value)
        elif path.complete:
            values[-1] = last_value
        self.xs, self.values, self.slopes = xs, values, slopes


def pool_function(path: Path, guarantee: Vector, limits: Vector, asked_from: float = 0.0) -> ShareFunction | None:
    """``B`` of a pool whose children take ``path`` (9.4, 9.5), as far as an incomplete path tells; None: not even B(0).

    ``guarantee`` is strong + proposed share, ``limits`` the limits share, at most 1. What lies within the guarantee is
    B(0); what lies beyond the limits is never reached; in between each step of the path is measured by the suggestion
    it needs.
    Below the suggestion ``asked_from``, but for 0, the function is not made, and must not be asked.
    """
    q = greatest(guarantee, path.values[0])
    if not path.complete and _ends_at(path, q, limits):
        return None
    piece = _Piece(path, q, greatest(limits, path.values[0]))
    first, xs, values, slopes = piece.first, piece.xs, piece.values, piece.slopes
    levels = _levels(values, q)
    segments = _Segments(piece.at_zero)
    at_one: Vector | None = None
    s = 0.0
    begin = 0
    if asked_from:
        begin = max(bisect_right(levels, asked_from, key=max) - 1, 0)
        s = max(*levels[begin], 0.0)
        segments.moved = begin > 0
    for n in range(begin, len(slopes)):
        m = slopes[n]
        high = max(levels[n + 1])
        if high > NEARLY_ONE and n + 1 < piece.exact_until:  # whether it is 1 decides (9.4, trim)
            values[n + 1] = _exact_value(path, first + n + 1, m, values[n], values[n + 1], levels[n + 1])
            levels[n + 1] = subtract(values[n + 1], q)
            high = max(levels[n + 1])
        rounding = ROUNDING if s <= NEARLY_ONE else 0.0
        more = high > s + s * rounding
        if not more:  # B jumps here
            segments.moved = True
        elif m is None:  # waits below the jump until its upper end is affordable
            segments.add(s, values[n], ZERO, (xs[n], 0.0, xs[n], *path.jumps[first + n]), values[n])
            segments.moved = high < 1.0
        elif levels[n][levels[n + 1].index(high)] >= s - ROUNDING:  # one resource binds from end to end
            a, b, c, d, e = m
            rate = (xs[n + 1] - xs[n]) / (high - s)
            slope = (a * rate, b * rate, c * rate, d * rate, e * rate)
            segments.add(s, values[n], slope, (xs[n], rate, xs[n + 1], (), 0), values[n + 1])
        else:
            rising = rising_parts(levels[n], m, xs[n + 1] - xs[n], s, high, rounding)
            _add_rising(segments, rising, (xs[n], xs[n + 1]), values[n], m)
        if more:
            s = high if high < 1.0 else BELOW_ONE
        if high >= 1.0:
            vertex = n if m is None else n + 1
            at_one = values[vertex]
            if segments.moved:
                segments.add(s, at_one, ZERO, _waiting(path, first + vertex, xs[vertex]), at_one)
            break
    if at_one is None and (piece.is_cut or path.complete):
        at_one = values[-1]
        segments.add(s, at_one, ZERO, _waiting(path, piece.last, xs[-1]), at_one)
    if not segments.starts:
        return None
    return ShareFunction(
        segments.starts,
        segments.values,
        segments.slopes,
        piece.at_zero,
        segments.lower_ends,
        segments.positions,
        _waiting(path, first, xs[0]),
        s if at_one is None else 1.0,
        at_one,
    )


def _add_rising(
    segments: _Segments,
    rising: list[tuple[float, float, float, float]],
    span: tuple[float, float],
    v: Vector,
    m: Vector,
) -> None:
    """Add what ``rising_parts`` says of a linear step of the path as segments (9.4)."""
    x, x_end = span
    reached = 0.0
    for low, high, dx, dx_end in rising:
        segments.moved |= dx > reached
        rate = (dx_end - dx) / (high - low)
        position = (x + dx, rate, x + dx_end, (), 0)
        segments.add(low, add(v, scale(m, dx)), scale(m, rate), position, add(v, scale(m, dx_end)))
        reached = dx_end
    segments.moved |= reached < x_end - x


def _levels(values: list[Vector], guarantee: Vector) -> list[Vector]:
    """By how much each value exceeds the guarantee."""
    if not any(guarantee):
        return values
    q0, q1, q2, q3, q4 = guarantee
    return [(a - q0, b - q1, c - q2, d - q3, e - q4) for a, b, c, d, e in values]


def _ends_at(path: Path, *bounds: Vector) -> bool:
    """Whether an incomplete path ends so near a bound that only what follows tells on which side of it (9.4)."""
    end = path.values[-1]
    return any(v > 0.0 and abs(v - limit) <= TIE for bound in bounds for v, limit in zip(end, bound, strict=True))


def _waiting(path: Path, step: int, x: float) -> Position:
    """The position at ``x`` in a step, or at the lower end of a jump step."""
    group, done = path.jumps.get(step, ((), 0))
    return (x, 0.0, x, group, done)


def _exact_value(path: Path, vertex: int, m: Vector | None, before: Vector, running: Vector, level: Vector) -> Vector:
    """The value at a vertex that needs a suggestion of nearly 1, as the children's own values make it.

    ``before`` is that of the vertex before, from which the slope is ``m``; ``running`` and ``level`` are of this one.
    """
    if m is None or any(rate > 0.0 and x > NEARLY_ONE for rate, x in zip(m, level, strict=True)):
        ends = path.complete and vertex == len(path.slopes)
        return path.sum_at_end() if ends else path.sum_at(vertex)
    a, b, c, d, e = (x if rate else same for rate, x, same in zip(m, running, before, strict=True))
    return (a, b, c, d, e)
