"""The present incarnation of an operation with ``gang_options``: ranks, and what may still work of those before; pure
(semantics.md 7.5)."""

from __future__ import annotations

from heapq import heapify, heappop

from cpumond.scheduler.model import Task


class TaskRanks:
    """The ranks of one task, 0 .. size - 1, each given to one cookie until the incarnation ends."""

    __slots__ = ("given", "free")

    def __init__(self, size: int) -> None:
        self.given: dict[int, int] = {}
        """Cookie -> rank. A job that takes the cookie of one that still ends has none."""
        self.free = list(range(size))
        """A heap."""

    def keep(self, cookie: int, rank: int) -> None:
        """A job has a rank already."""
        if rank in self.free:
            self.free.remove(rank)
            heapify(self.free)
            self.given[cookie] = rank

    def take(self, cookie: int) -> int:
        """The rank of a job that starts, -1 for none."""
        if cookie in self.given or not self.free:
            return -1
        self.given[cookie] = heappop(self.free)
        return self.given[cookie]


class GangRun:
    """What is known of an operation's present incarnation besides its record."""

    __slots__ = ("ranks", "ending")

    def __init__(self) -> None:
        self.ranks: dict[str, TaskRanks] = {}
        """By task with ``gang_options``, once a job of it was started."""
        self.ending: dict[str, str] = {}
        """Jobs of earlier incarnations that may still work -> their node; some of them may have ended."""

    def ranks_of(self, task: Task) -> TaskRanks:
        ranks = self.ranks.get(task.name)
        if ranks is None:
            ranks = self.ranks[task.name] = TaskRanks(task.gang_size)
        return ranks

    def take_rank(self, task: Task, cookie: int) -> int:
        """The rank of a job that starts: without ``gang_options`` each place has its own."""
        return cookie if task.gang_options is None else self.ranks_of(task).take(cookie)

    def keep_rank(self, task: Task, cookie: int, rank: int) -> None:
        """A job of this incarnation that was started before has a rank, or none."""
        if task.gang_options is not None and rank >= 0:
            self.ranks_of(task).keep(cookie, rank)
