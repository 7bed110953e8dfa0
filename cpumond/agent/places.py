"""Watch the agent's files in ``state_dir`` and ``runtime_dir``, and rewrite those that are removed while it runs."""

from __future__ import annotations

from collections.abc import Callable

import structlog

from cpumond.core.errors import CpumondError, UnavailableError

log = structlog.get_logger("cpumond.agent")

LOG_AGAIN_S = 600.0
"""Seconds for which `status` reports that files were removed and rewritten."""
PATIENCE = 3
"""Number of looks in a row that must find the lock owned by another agent before this agent stops."""

Look = Callable[[], list[str]]
"""A function that rewrites missing files and returns their paths. May raise CpumondError."""


class Places:
    """Watches the agent's files. ``problem`` is for `status`. ``lost_total`` counts files that were removed or
    replaced. ``is_ousted``: whether another agent owns the directories."""

    def __init__(self, *looks: Look) -> None:
        self.lock: Look = list
        self.looks = [*looks]
        self.problem = ""
        self.lost_total = 0
        self.is_ousted = False
        self._blocked = 0
        self._logged_until_s = 0.0
        self._error = ""

    def look(self, now_s: float) -> None:
        """Rewrite the files that were removed since the last look. Never raises."""
        lost: list[str] = []
        errors: list[str] = []
        for look in [self.lock, *self.looks]:
            try:
                lost += look()
                self._blocked = 0 if look is self.lock else self._blocked
            except CpumondError as error:
                errors.append(str(error))
                if look is self.lock and isinstance(error, UnavailableError):
                    # By now the files may belong to another agent; if a `restore` has them, the lock is free soon.
                    self._blocked += 1
                    self.is_ousted = self._blocked >= PATIENCE
                    break
        if lost:
            self.lost_total += len(lost)
            self._logged_until_s = now_s + LOG_AGAIN_S
            self.problem = (
                f"{', '.join(lost)}: removed or replaced while the agent ran, and rewritten; find out who did it"
            )
            log.error("files_lost", paths=lost, advice="they were rewritten; find out who removed or replaced them")
        elif now_s >= self._logged_until_s:
            self.problem = ""
        if errors:
            self._logged_until_s = now_s
            self.problem = "; ".join(errors)
        if errors and self.problem != self._error:
            log.error("files_lost", error=self.problem)
        self._error = self.problem if errors else ""
