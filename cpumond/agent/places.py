"""The agent's files in ``state_dir`` and ``runtime_dir``: rewritten if they are removed while it runs."""

from __future__ import annotations

from collections.abc import Callable

import structlog

from cpumond.core.errors import CpumondError, UnavailableError

log = structlog.get_logger("cpumond.agent")

LOG_AGAIN_S = 600.0
"""Seconds for which `status` shows files that were removed and rewritten."""
PATIENCE = 3
"""Looks in a row that find the lock owned by another agent before this one gives way."""

Look = Callable[[], list[str]]
"""Rewrites missing files and returns their paths. May raise CpumondError."""


class Places:
    """Watches the agent's files. ``problem`` is for `status`; ``lost_total`` counts files; ``is_ousted``: another
    agent owns the directories."""

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
        """Rewrite files removed since the last look; never raises."""
        lost: list[str] = []
        errors: list[str] = []
        for look in [self.lock, *self.looks]:
            try:
                lost += look()
                self._blocked = 0 if look is self.lock else self._blocked
            except CpumondError as error:
                errors.append(str(error))
                if look is self.lock and isinstance(error, UnavailableError):
                    # The files may belong to the other agent by now; a `restore` holds the lock only briefly.
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
