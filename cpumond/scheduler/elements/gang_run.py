"""The present incarnation of an operation with ``gang_options``: its ranks, and jobs of earlier incarnations that may
still work; pure (semantics.md 7.5)."""

from __future__ import annotations

from cpumond.scheduler.model import Task


class TaskRanks:
    """The ranks of one task, 0 .. size - 1. Each rank belongs to one cookie until the incarnation ends."""

    __slots__ = ("given", "_size", "_taken", "_next")

    def __init__(self, size: int) -> None:
        self.given: dict[int, int] = {}
        """Cookie -> rank. A job gets no rank if its cookie is here already: an earlier job with it is still ending."""
        self._size = size
        self._taken: set[int] = set()
        self._next = 0
        """The lowest rank that may be free."""

    def keep(self, cookie: int, rank: int) -> None:
        """Record the rank of a job that already has a rank."""
        if rank < self._size and rank not in self._taken:
            self._taken.add(rank)
            self.given[cookie] = rank

    def take(self, cookie: int) -> int:
        """Return the rank of a job that starts: the lowest free rank, or -1 if no rank is free."""
        while self._next in self._taken:
            self._next += 1
        if cookie in self.given or self._next >= self._size:
            return -1
        self.keep(cookie, self._next)
        return self.given[cookie]


class GangRun:
    """State of an operation's present incarnation that its record does not contain."""

    __slots__ = ("ranks", "ending")

    def __init__(self) -> None:
        self.ranks: dict[str, TaskRanks] = {}
        """Ranks by task, for tasks with ``gang_options`` of which a job was started."""
        self.ending: dict[str, str] = {}
        """Job of an earlier incarnation that may still work -> its node; some of these jobs may have ended."""

    def ranks_of(self, task: Task) -> TaskRanks:
        ranks = self.ranks.get(task.name)
        if ranks is None:
            ranks = self.ranks[task.name] = TaskRanks(task.gang_size)
        return ranks

    def take_rank(self, task: Task, cookie: int) -> int:
        """Return the rank of a job that starts. Without ``gang_options`` the rank is the cookie."""
        return cookie if task.gang_options is None else self.ranks_of(task).take(cookie)

    def keep_rank(self, task: Task, cookie: int, rank: int) -> None:
        """Record the rank of a job of this incarnation that was started before, if the job has a rank."""
        if task.gang_options is not None and rank >= 0:
            self.ranks_of(task).keep(cookie, rank)
