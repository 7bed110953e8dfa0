"""Gangs of a state: live ones, broken ones, and attempts to place them; pure (semantics.md 7.3)."""

from __future__ import annotations

from cpumond.scheduler.decide.gangs import Reservation
from cpumond.scheduler.decide.run_times import RunTimes
from cpumond.scheduler.elements import Operation, OperationElement


class GangTable:
    """Gangs of all trees. Not stored, except in operations' records."""

    def __init__(self) -> None:
        self.live: dict[str, Operation] = {}
        """Live operations whose jobs start together, by id."""
        self.broken: dict[str, str] = {}
        """Gang of which a job ended, since the last check, before its work was done -> how the job ended."""
        self.reservations: dict[str, Reservation] = {}
        """Reservations by tree."""
        self.rests: dict[OperationElement, float] = {}
        """Gang whose reservation did not help -> time until which no resources are reserved for the gang."""
        self.looked: dict[OperationElement, tuple[float, str]] = {}
        """Gang -> time and result of the last attempt to place it."""
        self.tries: dict[str, tuple[float, int]] = {}
        """Tree -> start of the counting period of attempts to place gangs, and their number."""
        self.first: dict[str, int] = {}
        """Tree -> index of the gang that the next attempt to free resources tries first: the last one got this far."""
        self.lacking: dict[str, tuple[str, int, int]] = {}
        """Operation with ``gang_options`` lacking jobs after a restart -> task, expected and actual number (7.5)."""
        self.started_count = 0
        """Operations with ``gang_options`` that started under this scheduler."""
        self.switches: dict[str, int] = {}
        """Reason -> number of incarnations started for it."""
        self.preempted_at: dict[str, float] = {}
        """Tree -> time of the last attempt to free resources for a gang."""
        self.run_times: RunTimes | None = None
        """Run times of ended jobs; None until a tree with ``enable_backfill`` makes a reservation."""

    def forget(self, element: OperationElement) -> None:
        """Drop the attempts and the reservation of a gang that starts, ends or leaves the tree."""
        self.looked.pop(element, None)
        self.rests.pop(element, None)
        kept = self.reservations.get(element.tree.name)
        if kept is not None and kept.element is element:
            del self.reservations[element.tree.name]

    def forget_tree(self, name: str) -> None:
        for table in (self.reservations, self.tries, self.first, self.preempted_at):
            table.pop(name, None)
