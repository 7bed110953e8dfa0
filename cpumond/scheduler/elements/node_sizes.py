"""The largest requests that an empty node of a tree can hold, for each resource and for all of them together. Pure.

Amounts are absolute, in the order of RESOURCES. All nodes of the tree count, including cordoned and silent ones, which
will have their capacity again. If there are no nodes, every job counts as fitting (semantics.md 5.2)."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Final

from cpumond.core.measures import count_cores, format_cores
from cpumond.core.words import count
from cpumond.fairshare.resources import CPU, MEMORY, RESOURCES, ZERO, Vector, dominates, format_amount, sum_vectors

ROUNDING: Final = 1e-9
MOST_KEPT: Final = 10_000
"""Maximum number of different requests of which the result is cached."""


def fits(room: Vector, wanted: Vector) -> bool:
    """Whether ``wanted`` fits into ``room``; differences by the rounding of sums of floats are ignored."""
    return dominates(room, wanted) or all(w <= r + ROUNDING * max(w, 1.0) for r, w in zip(room, wanted, strict=True))


class NodeSizes:
    """The nodes' capacities, each with the number of nodes that have it. Made once for all operations of an update.
    ``chosen_by``: the filter that selects these nodes, in words; "" if they are all nodes of the tree."""

    __slots__ = ("counts", "total", "chosen_by", "_largest", "_known")

    def __init__(self, counts: Mapping[Vector, int], chosen_by: str = "") -> None:
        self.counts = counts
        self.chosen_by = chosen_by
        self.total = sum_vectors([_times(each, number) for each, number in counts.items()]) if counts else ZERO
        self._largest: list[Vector] = []
        """Capacities without those that a different capacity reaches in every resource. There are few of them."""
        for each in sorted(counts, reverse=True):
            if not any(dominates(other, each) for other in self._largest):
                self._largest.append(each)
        self._known: dict[tuple[Vector, int], str] = {}

    def find_most_memory(self, order: Vector) -> float:
        """Return the most memory of a node that can hold the other resources of a request; 0 if no node can."""
        slots, cpu, gpu, _, network = order
        rest = (slots, cpu, gpu, 0.0, network)
        return max((each[MEMORY] for each in self._largest if fits(each, rest)), default=0.0)

    @property
    def _that_fit(self) -> str:
        return f" matching {self.chosen_by}" if self.chosen_by else ""

    def explain_excess(self, order: Vector) -> str:
        """Return why no node can hold a job with this request: ``5 cores, largest node 4``; "" if a node can."""
        return self._explain(order, 1)

    def explain_gang_excess(self, orders: Collection[tuple[Vector, int]]) -> str:
        """Return why the nodes cannot hold all of these jobs (requests and numbers) at once; "" if perhaps they can."""
        for order, number in orders:
            if told := self._explain(order, number):
                return told
        wanted = sum_vectors([_times(order, number) for order, number in orders]) if orders else ZERO
        over = [] if not self.counts or fits(self.total, wanted) else self._find_over(self.total, wanted)
        return "; ".join(_compare(r, wanted, f"at once, all nodes{self._that_fit}", self.total) for r in over)

    def explain_unplaceable(self, jobs: Collection[tuple[Vector, int]], is_gang: bool) -> str:
        """Return why an operation can start none of these jobs that it needs; "" if it can start one, or needs none."""
        if is_gang:
            return self.explain_gang_excess(jobs)
        told = [self.explain_excess(order) for order, _ in jobs]
        return told[0] if told and all(told) else ""

    def leave_out_unplaceable(self, jobs: list[tuple[Vector, int]], is_gang: bool) -> list[tuple[Vector, int]]:
        """Return the jobs that can start on these nodes; for a gang either all jobs or none."""
        if is_gang:
            return [] if self.explain_gang_excess(jobs) else jobs
        return [each for each in jobs if not self.explain_excess(each[0])]

    def _explain(self, order: Vector, number: int) -> str:
        told = self._known.get((order, number))
        if told is None:
            if len(self._known) >= MOST_KEPT:
                self._known.clear()
            told = self._known[order, number] = self._find(order, number)
        return told

    def _find(self, order: Vector, number: int) -> str:
        # There may be very many requests: this is a plain loop, and the rounding is subtracted from the amounts first.
        v, w, x, y, z = (amount - ROUNDING * max(amount, 1.0) for amount in order)
        for a, b, c, d, e in self._largest:
            if a >= v and b >= w and c >= x and d >= y and e >= z:
                break
        else:
            if not self._largest:
                return f"no node matches {self.chosen_by}" if self.chosen_by else ""
            a, b, c, d, e = (max(amounts) for amounts in zip(*self._largest, strict=True))
            most = (a, b, c, d, e)
            if over := self._find_over(most, order):
                return "; ".join(_compare(r, order, f"largest node{self._that_fit}", most) for r in over)
            lacking = {r for each in self._largest for r in self._find_over(each, order)}
            what = " and ".join(_format(r, order) for r in sorted(lacking))
            return f"{what} on one node, no node{self._that_fit} has enough of each"
        if number == 1:
            return ""
        room = 0
        for each, times in self.counts.items():
            room += times * _count_jobs(each, order, number)
            if room >= number:
                return ""
        what = " and ".join(_format(r, order) for r, x in enumerate(order) if x and (r > 0 or x != 1.0))
        return f"{count(number, 'job')} of {what} at once, all nodes{self._that_fit} together hold {room}"

    @staticmethod
    def _find_over(room: Vector, order: Vector) -> list[int]:
        return [r for r, x in enumerate(order) if x > room[r] + ROUNDING * max(x, 1.0)]


def _count_jobs(capacity: Vector, order: Vector, most: int) -> int:
    """Return how many jobs with the request ``order`` an empty node can hold."""
    room = (int(c / x * (1.0 + ROUNDING) + ROUNDING) for c, x in zip(capacity, order, strict=True) if x)
    return min(room, default=most)


def _times(amounts: Vector, number: int) -> Vector:
    a, b, c, d, e = (amount * number for amount in amounts)
    return (a, b, c, d, e)


def _format(r: int, amounts: Vector) -> str:
    return count_cores(amounts[r]) if r == CPU else f"{_bare(r, amounts)} {RESOURCES[r].replace('_', ' ')}"


def _bare(r: int, amounts: Vector) -> str:
    return format_cores(amounts[r]) if r == CPU else format_amount(r, amounts[r])


def _compare(r: int, order: Vector, words: str, most: Vector) -> str:
    if _bare(r, order) == _bare(r, most):  # the difference is too small for the digits shown
        return f"{order[r]:.15g} {RESOURCES[r].replace('_', ' ')}, {words} {most[r]:.15g}"
    return f"{_format(r, order)}{' ' if words.startswith('at') else ', '}{words} {_bare(r, most)}"
