"""Directories of the scheduler's jobs: their files and their removal.

``jobs_dir/JOB/job.json`` is replaced before each step that it records, and its previous version is kept. The directory
also contains the executor's logs and the job's working directory. No file is synced to disk: the files must survive a
crash of the agent, but not a crash of the host, which ends the jobs too."""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import shutil
import subprocess
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Literal

import msgspec
import structlog

from cpumond.agent.state_file import identify, make_directory
from cpumond.core.decode import ContentError, decode_json
from cpumond.core.errors import ConfigError, UnavailableError, from_os_error
from cpumond.core.wire import FinishedJob, JobOrder, StopOrder

log = structlog.get_logger("cpumond.agent")

JOB_FILE = "job.json"
BEFORE = ".before"
"""Suffix of the previous version of a job's file; this version is read if the newest one is damaged."""
SANDBOX = "sandbox"
CHECKPOINT = "checkpoint"
"""Name of the file that a job touches to report a checkpoint; only jobs of tasks with ``checkpoints`` have one."""
LOCK_FILE = ".lock"
SUMS_FILE = ".sums"
"""File of the sums of all jobs. It begins with a dot, as no job id does."""
SUMS_PERIOD_S = 10.0
"""Seconds between two writes of the sums: what jobs use after the last write is not counted if the agent is killed."""
ASIDE = ".gone-"
MAX_ERROR = 1000

State = Literal["waiting", "starting", "running", "ended"]


class JobFile(msgspec.Struct, frozen=True):
    """Content of ``job.json``.

    ``boot_id``: the host's boot in which the job ran. ``start_time``: seconds since 1970. The sums of core-seconds are
    those of ``JobReport`` when the file was written: at each step and at the agent's end. SUMS_FILE may be newer."""

    order: JobOrder
    boot_id: str
    state: State = "waiting"
    start_time: float | None = None
    cgroup: str = ""
    stop: StopOrder | None = None
    finished: FinishedJob | None = None
    acknowledged: bool = False
    stopped_at: float | None = None
    """Time of the first stop order, seconds since 1970."""
    reclaimed_cpu_seconds: float = 0.0
    ordered_cpu_seconds: float = 0.0
    throttled_cpu_seconds: float = 0.0
    late_cpu_seconds: float = 0.0
    stderr_size: int | None = None
    """Belongs to ``finished``, but an agent of version 0.2 could not read ``finished`` with this field."""

    def make_end(self) -> FinishedJob | None:
        """Return the end for the scheduler; None while the job has not ended."""
        end = self.finished
        if end is None or self.stderr_size is None:
            return end
        return msgspec.structs.replace(end, stderr_size=self.stderr_size)


class JobsDir:
    """``executor.jobs_dir``, locked so that no other agent uses it. Threads do slow work there, not the tick."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.workers = ThreadPoolExecutor(2, "jobs")
        self.kept: dict[str, tuple[float, str]] = {}
        """Acknowledged jobs whose logs are kept: finish time (since 1970) and directory, oldest first."""
        self._lock: int | None = None
        self._sums_at_s = -math.inf
        self._sums_writing: Future[None] | None = None
        self._sums_refused = False

    @property
    def is_open(self) -> bool:
        return self._lock is not None

    def open(self) -> None:
        """Create the directory if it is missing, and lock it. Only the agent may write to it.

        The users of jobs may pass through the directory. Raises CreateError, AccessError, ConfigError, and
        UnavailableError while another agent uses it."""
        path = self.path
        make_directory(path, 0o711, "executor.jobs_dir")
        found = os.stat(path)
        if found.st_uid != os.geteuid() or found.st_mode & 0o022:
            raise ConfigError(
                f"executor.jobs_dir: {path} belongs to another user or is writable by others, who could place links "
                "there; configure a directory of the agent's own with mode 0711"
            )
        try:
            os.chmod(path, 0o711)  # noqa: S103 - independent of the umask
        except OSError as error:
            raise from_os_error(error, f"set the mode of {path}", "fix executor.jobs_dir") from error
        try:
            lock = os.open(os.path.join(path, LOCK_FILE), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise from_os_error(error, f"create {path}/{LOCK_FILE}", "free space or fix executor.jobs_dir") from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(lock)
            raise UnavailableError(
                f"executor.jobs_dir: {path} is in use by another agent; configure a separate directory for each agent"
            ) from None
        self.close()
        self._lock = lock

    def close(self) -> None:
        """Release the lock, so that another agent can use the directory."""
        if self._lock is not None:
            os.close(self._lock)
        self._lock = None

    def is_removed(self) -> bool:
        """Return whether the open directory was removed or replaced."""
        if self._lock is None:
            return False
        held = os.fstat(self._lock)
        return identify(os.path.join(self.path, LOCK_FILE)) != (held.st_dev, held.st_ino)

    def remove(self, directory: str) -> None:
        """Delete a directory recursively, in a separate thread, because a job may have left a million files."""
        if os.path.lexists(directory):
            self.workers.submit(remove_tree, directory)

    def drop_logs(self, oldest: float, most: int) -> list[str]:
        """Remove the logs of jobs that ended before ``oldest``; if more than ``most`` are left, the oldest ones, too.
        Return the ids of these jobs."""
        gone: list[str] = []
        for job_id, (finish_time, directory) in self.kept.items():
            if finish_time > oldest and len(self.kept) - len(gone) <= most:
                break
            gone.append(job_id)
            self.remove(directory)
        for job_id in gone:
            del self.kept[job_id]
        return gone

    def note_sums(self, now_s: float, sums: Callable[[], dict[str, dict[str, float]]]) -> None:
        """Write the sums of all jobs every SUMS_PERIOD_S, because an agent that is killed cannot write them at its end.

        All sums are in one file, because there may be a thousand jobs. A separate thread writes this file, because the
        jobs may keep the disk busy."""
        if now_s < self._sums_at_s or not (self._sums_writing is None or self._sums_writing.done()):
            return
        self._sums_at_s = now_s + SUMS_PERIOD_S
        if content := sums():
            self._sums_writing = self.workers.submit(self._write_sums, content)

    def _write_sums(self, sums: dict[str, dict[str, float]]) -> None:
        try:
            _replace(os.path.join(self.path, SUMS_FILE), msgspec.json.encode(sums))
        except OSError as error:
            problem = from_os_error(error, f"write {SUMS_FILE} in {self.path}", "free space there")
            if not self._sums_refused:
                log.error("sums_not_written", error=str(problem), retry_s=SUMS_PERIOD_S)
            self._sums_refused = True
        else:
            self._sums_refused = False


def read_job_file(directory: str) -> JobFile | None:
    """Return the newest intact version of a job's file; None if there is none. A damaged version is logged."""
    path = os.path.join(directory, JOB_FILE)
    damaged = False
    for name in (path, path + BEFORE):
        try:
            with open(name, "rb") as file:
                return decode_json(file.read(), JobFile)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except (OSError, ContentError) as error:
            log.error("job_file_damaged", path=name, error=str(error))
            damaged = True
    if damaged:
        log.error("job_not_followed", directory=directory, advice="end it if it runs, and remove the directory")
    return None


def write_job_file(directory: str, content: JobFile) -> None:
    """Replace a job's file as a whole and keep the previous version. If it raises OSError, the old file is intact."""
    path = os.path.join(directory, JOB_FILE)
    _replace(path, msgspec.json.encode(content), path + BEFORE)


def read_sums(jobs_dir: str) -> dict[str, dict[str, float]]:
    """Read SUMS_FILE: job -> name of a sum -> core-seconds; return {} if the file is missing or damaged."""
    path = os.path.join(jobs_dir, SUMS_FILE)
    try:
        with open(path, "rb") as file:
            return decode_json(file.read(), dict[str, dict[str, float]])
    except FileNotFoundError:
        return {}
    except (OSError, ContentError) as error:
        log.error("sums_damaged", path=path, error=str(error), advice="nothing to do: it will be rewritten")
        return {}


def _replace(path: str, content: bytes, before: str = "") -> None:
    """Replace a file as a whole, and keep the old one as ``before``. If it raises OSError, the old file is intact."""
    with open(f"{path}.new", "wb", opener=lambda name, flags: os.open(name, flags | os.O_CLOEXEC, 0o600)) as file:
        file.write(content)
    if before:
        with contextlib.suppress(FileNotFoundError):
            os.rename(path, before)
    os.rename(f"{path}.new", path)


def make_checkpoint_file(directory: str, uid: int, gid: int) -> None:
    """Create a job's empty checkpoint file, writable by its user and older than the job's start. Raises OSError."""
    path = os.path.join(directory, CHECKPOINT)
    with open(path, "wb", opener=lambda name, flags: os.open(name, flags | os.O_CLOEXEC, 0o600)) as file:
        os.utime(file.fileno(), (0, 0))
        if uid != os.geteuid():
            os.fchown(file.fileno(), uid, gid)


def read_checkpoint(directory: str) -> float | None:
    """Return when a job last touched its checkpoint file, in seconds since 1970; None if there is no such file."""
    try:
        return os.stat(os.path.join(directory, CHECKPOINT), follow_symlinks=False).st_mtime
    except OSError:
        return None


def set_aside(directory: str) -> str:
    """Rename a directory that is to be removed, so that its name is free at once. Return the new path."""
    parent, name = os.path.split(directory)
    aside = os.path.join(parent, f"{ASIDE}{name}")
    try:
        os.rename(directory, aside)
    except OSError:
        return directory  # the new name exists already: the directory is removed where it is
    return aside


def list_set_aside(jobs_dir: str) -> list[str]:
    return [os.path.join(jobs_dir, name) for name in os.listdir(jobs_dir) if name.startswith(ASIDE)]


def remove_tree(directory: str) -> None:
    """Delete a directory recursively; failures are logged. Links are never followed."""
    try:
        shutil.rmtree(directory)
    except Exception:
        if not os.path.lexists(directory):
            return
        # The tree may be thousands of levels deep, made unreadable by the job, or partly removed by a different
        # thread. These tools need no stack, fix the owner's rights, and continue after errors.
        for command in (["/bin/chmod", "-R", "u+rwX", "--", directory], ["/bin/rm", "-rf", "--", directory]):
            done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
        if os.path.lexists(directory):
            log.error("directory_not_removed", directory=directory, error=done.stderr.strip()[:MAX_ERROR])
