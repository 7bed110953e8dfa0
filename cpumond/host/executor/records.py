"""Files of unfinished jobs, by which the next run of the agent finds them again."""

from __future__ import annotations

import contextlib
import os
import shutil

import msgspec
import structlog

from cpumond.core.decode import ContentError, decode_json
from cpumond.core.errors import describe, from_os_error
from cpumond.host.executor.model import Ended, NotStarted

log = structlog.get_logger("cpumond.host.executor")


class Record(msgspec.Struct):
    """One job on disk, until the agent has stored the job's end. ``pid``: None until the keeper has reported it."""

    job_id: str
    directory: str
    max_log_bytes: int
    procs: list[str]
    pid: int | None = None
    start_time: float = 0.0
    ended: Ended | None = None
    not_started: NotStarted | None = None
    max_stderr_bytes: int = 0

    @property
    def outcome(self) -> Ended | NotStarted | None:
        """The event to send to the agent once nothing of the job remains."""
        return self.not_started or self.ended


class Records:
    """The files ``<directory>/<job_id>.json``."""

    def __init__(self, directory: str) -> None:
        self.directory = directory

    def make(self) -> None:
        """Create the directory. Raises CpumondError."""
        try:
            os.makedirs(self.directory, 0o700, exist_ok=True)
        except OSError as error:
            raise from_os_error(error, f"create {self.directory}", "fix runtime_dir or run as root") from error

    def make_again(self) -> bool:
        """Create the directory again if it was removed; return whether that was necessary and possible."""
        if os.path.isdir(self.directory):
            return False
        try:
            os.makedirs(self.directory, 0o700, exist_ok=True)
        except OSError:
            return False  # each start of a job will report this
        log.error("the records of jobs were removed and are rewritten", path=self.directory)
        return True

    def load(self) -> dict[str, Record]:
        """Return job id -> record; remove other files. Raises CpumondError."""
        found = {}
        try:
            names = os.listdir(self.directory)
        except OSError as error:
            raise from_os_error(error, f"read {self.directory}", "fix runtime_dir or run as root") from error
        for name in names:
            path = os.path.join(self.directory, name)
            if not name.endswith(".json"):
                unlink(path)
                continue
            try:
                with open(path, "rb") as file:
                    record = decode_json(file.read(), Record)
            except (OSError, ContentError) as error:
                log.warning("a record of a job cannot be read and is removed", path=path, problem=str(error))
                unlink(path)
                continue
            job_id = name.removesuffix(".json")
            found[job_id] = msgspec.structs.replace(record, job_id=job_id)
        return found

    def store(self, job_id: str, record: Record) -> None:
        """Store a record. Raises OSError."""
        path = self._path(job_id)
        with open(f"{path}.new", "wb", opener=lambda path, flags: os.open(path, flags | os.O_CLOEXEC, 0o600)) as file:
            file.write(msgspec.json.encode(record))
        os.rename(f"{path}.new", path)

    def store_if_possible(self, job_id: str, record: Record) -> None:
        """Call ``store``; a failure is logged."""
        try:
            self.store(job_id, record)
        except OSError as error:
            log.warning("a record of a job cannot be written", job_id=job_id, problem=describe(error))

    def remove(self, job_id: str) -> None:
        unlink(self._path(job_id))

    def _path(self, job_id: str) -> str:
        return os.path.join(self.directory, f"{job_id}.json")


def drop_slurm_records(runtime_dir: str) -> None:
    """Remove files of jobs of the executor of kind "slurm", which only version 0.2 had."""
    directory = os.path.join(runtime_dir, "slurm-jobs")
    with contextlib.suppress(OSError):
        jobs = sorted(name.removesuffix(".json") for name in os.listdir(directory))
        if jobs:
            log.warning("jobs that were started through Slurm are no longer followed", job_ids=jobs)
        shutil.rmtree(directory)
    unlink(os.path.join(runtime_dir, "slurm-guests"))


def unlink(path: str) -> None:
    with contextlib.suppress(OSError):
        os.unlink(path)
