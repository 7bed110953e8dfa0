"""Gangs of a state: which live, which are broken, and how placing them went so far; pure (semantics.md 7.3)."""

from __future__ import annotations

from cpumond.scheduler.decide.gangs import Reservation
from cpumond.scheduler.decide.run_times import RunTimes
from cpumond.scheduler.elements import Operation, OperationElement


class GangTable:
    """The gangs of all trees. Not stored, but for what records say."""

    def __init__(self) -> None:
        self.live: dict[str, Operation] = {}
        """Live operations whose jobs start together, by id."""
        self.broken: dict[str, str] = {}
        """Gangs of which a job ended without its work done since they were last looked at, and how."""
        self.reservations: dict[str, Reservation] = {}
        """By tree."""
        self.rests: dict[OperationElement, float] = {}
        """Until when no room is kept for a gang, since it was in vain before."""
        self.looked: dict[OperationElement, tuple[float, str]] = {}
        """When it was last tried to place a gang, and why it was not."""
        self.tries: dict[str, tuple[float, int]] = {}
        """Tree -> since when attempts to place gangs are counted, and their number."""
        self.first: dict[str, int] = {}
        """Tree -> the first gang that the next attempt to make room looks at, since the one before found none."""
        self.lacking: dict[str, tuple[str, int, int]] = {}
        """With ``gang_options``: operations of which a restart found not all jobs running, and what of them (7.5)."""
        self.started_count = 0
        """Operations with ``gang_options`` that were started since this scheduler was."""
        self.switches: dict[str, int] = {}
        """Reason -> how many incarnations have followed another one since."""
        self.preempted_at: dict[str, float] = {}
        """Tree -> when it was last tried to make room for a gang."""
        self.run_times: RunTimes | None = None
        """Of jobs that ended; None until a tree with ``enable_backfill`` keeps room."""

    def forget(self, element: OperationElement) -> None:
        """Drop attempts and reservation of a gang that starts, ends or leaves the tree."""
        self.looked.pop(element, None)
        self.rests.pop(element, None)
        kept = self.reservations.get(element.tree.name)
        if kept is not None and kept.element is element:
            del self.reservations[element.tree.name]

    def forget_tree(self, name: str) -> None:
        for table in (self.reservations, self.tries, self.first, self.preempted_at):
            table.pop(name, None)
