"""The present incarnation of an operation with ``gang_options``: its ranks, and jobs of earlier incarnations that may
still work; pure (semantics.md 7.5)."""

from __future__ import annotations

from cpumond.scheduler.model import Task


class TaskRanks:
    """The ranks of one task, 0 .. size - 1, each given to one cookie until the incarnation ends."""

    __slots__ = ("given", "_size", "_taken", "_next")

    def __init__(self, size: int) -> None:
        self.given: dict[int, int] = {}
        """Cookie -> rank. A job that takes the cookie of a job that is still ending has no rank."""
        self._size = size
        self._taken: set[int] = set()
        self._next = 0
        """The lowest rank that may be free."""

    def keep(self, cookie: int, rank: int) -> None:
        """Record the rank that a job has already."""
        if rank < self._size and rank not in self._taken:
            self._taken.add(rank)
            self.given[cookie] = rank

    def take(self, cookie: int) -> int:
        """Return the rank of a job that starts, the lowest free one; -1: none is free."""
        while self._next in self._taken:
            self._next += 1
        if cookie in self.given or self._next >= self._size:
            return -1
        self.keep(cookie, self._next)
        return self.given[cookie]


class GangRun:
    """State of an operation's present incarnation besides its record."""

    __slots__ = ("ranks", "ending")

    def __init__(self) -> None:
        self.ranks: dict[str, TaskRanks] = {}
        """Ranks by task with ``gang_options``, once a job of the task was started."""
        self.ending: dict[str, str] = {}
        """Jobs of earlier incarnations that may still work -> their node; some of them may have ended."""

    def ranks_of(self, task: Task) -> TaskRanks:
        ranks = self.ranks.get(task.name)
        if ranks is None:
            ranks = self.ranks[task.name] = TaskRanks(task.gang_size)
        return ranks

    def take_rank(self, task: Task, cookie: int) -> int:
        """Return the rank of a job that starts; without ``gang_options`` each place has its own."""
        return cookie if task.gang_options is None else self.ranks_of(task).take(cookie)

    def keep_rank(self, task: Task, cookie: int, rank: int) -> None:
        """Record the rank, if any, of a job of this incarnation that was started before."""
        if task.gang_options is not None and rank >= 0:
            self.ranks_of(task).keep(cookie, rank)
