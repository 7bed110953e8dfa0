"""Jobs and pins that came over the control socket. They are on disk before the response acknowledges them."""

from __future__ import annotations

import math
import os

import msgspec
import structlog

from cpumond.agent.discovery import FoundJob
from cpumond.agent.state_file import REGISTRY_FILE, Identity, Pin, Registry, identify, load, put_aside, save
from cpumond.core.answers import RegisteredJob
from cpumond.core.errors import StateFileError

log = structlog.get_logger("cpumond.agent")


class RegisteredJobs:
    """The registry and its file. When a method returns, its change is on disk. If it raises, nothing has changed."""

    def __init__(self, state_dir: str) -> None:
        self.path = os.path.join(state_dir, REGISTRY_FILE)
        self.content = Registry()
        self._ends_s: dict[str, tuple[Pin, float]] = {}
        self._saved: Identity | None = None

    def load(self) -> None:
        """Read the registry. A damaged file is put aside, and this is logged."""
        try:
            self.content = load(self.path, Registry) or Registry()
            self._saved = identify(self.path)
        except StateFileError as error:
            log.error("registry_damaged", error=str(error), kept_as=put_aside(self.path))

    def found_jobs(self) -> list[FoundJob]:
        """Return the registered jobs in the form of a source's jobs."""
        return [
            FoundJob(job.job_id, job.operation_id, job.path, job.cpu_limit, None, job.job_cpu_monitor)
            for job in self.content.jobs.values()
        ]

    def current_pins(self, wall_s: float, boottime_s: float) -> dict[str, Pin]:
        """Return the pins that have not expired. The first call (at a start, or for a new pin) computes the time left
        from the wall clock. Later calls use time since boot, so setting the clock makes no pin longer or shorter."""
        current = {}
        for name, pin in self.content.pins.items():
            left_s = math.inf if pin.until is None else pin.until - wall_s
            known, end_s = self._ends_s.get(name, (None, 0.0))
            if known is not pin:
                end_s = boottime_s + left_s
                self._ends_s[name] = (pin, end_s)
            if end_s > boottime_s:
                current[name] = pin
        return current

    def add(self, job: RegisteredJob) -> None:
        """Register a job, or replace the job with the same id. Raises CreateError or AccessError."""
        self._save(msgspec.structs.replace(self.content, jobs={**self.content.jobs, job.job_id: job}))

    def remove(self, job_id: str) -> bool:
        """Forget a job; return False if no job has this id. Raises CreateError or AccessError."""
        if job_id not in self.content.jobs:
            return False
        jobs = {name: job for name, job in self.content.jobs.items() if name != job_id}
        self._save(msgspec.structs.replace(self.content, jobs=jobs))
        return True

    def pin(self, job_id: str, pin: Pin | None) -> None:
        """Set a job's pin; None ends it. Raises CreateError or AccessError."""
        pins = {name: known for name, known in self.content.pins.items() if name != job_id}
        if pin is not None:
            pins[job_id] = pin
        self._save(msgspec.structs.replace(self.content, pins=pins))

    def _save(self, content: Registry) -> None:
        self._saved = save(self.path, content)
        self.content = content

    def look_after_file(self) -> list[str]:
        """If the file was removed or replaced, rewrite it and return its path. Raises CreateError or AccessError."""
        if self._saved is None or identify(self.path) == self._saved:
            return []
        self._save(self.content)
        return [self.path]
