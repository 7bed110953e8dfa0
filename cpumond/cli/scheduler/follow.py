"""Follow the output of an operation's jobs: every byte that their nodes keep, each once.

Nodes answer between two heartbeats, so several logs are read at a time, each from where the last answer ended."""

from __future__ import annotations

import queue
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

import click

from cpumond.api.json.requests import FIRST_BYTE, TOTAL_BYTES
from cpumond.api.views import JobList, JobView, OperationDetails
from cpumond.cli.options import quote_name
from cpumond.cli.output import error_width, is_terminal
from cpumond.cli.render.grid import fold
from cpumond.cli.scheduler.finding import operation_path
from cpumond.cli.scheduler.http_client import SchedulerClient, SchedulerRefusedError
from cpumond.core.errors import EXIT_NO_SUCH, CpumondError, UnavailableError
from cpumond.core.wire import MAX_LOG_BYTES, LogStream
from cpumond.core.words import escape

WORKERS: Final = 8
MAX_JOBS: Final = 1000
"""Maximum number of jobs to follow at once."""
MAX_LINE_BYTES: Final = 65_536
"""Maximum bytes of an unfinished line that are kept."""
PAUSES_S: Final = (0.3, 3.0)
"""Seconds between two reads of a growing log, and of a log that has not grown for long."""
POLL_S: Final = 1.0
PATIENCE_S: Final = 5.0
SILENCE_S: Final = 600.0
"""Seconds for which the command waits for an absent scheduler."""
END_S: Final = 30.0
"""Seconds for which the end of a log is requested after its job has ended."""
LIVING: Final = ("starting", "running", "stopping")
FINAL: Final = ("completed", "failed", "aborted")

Write = Callable[[LogStream, bytes], None]


@dataclass(eq=False)
class _Tail:
    """One log: how far it has been read, and when it is read again."""

    job: str
    stream: LogStream
    offset: int | None
    """Byte of the log that is read next; None: only the end of the log is wanted."""
    job_ended: bool = False
    pause_s: float = PAUSES_S[0]
    due_s: float = 0.0
    is_busy: bool = False
    is_done: bool = False
    failing_since_s: float | None = None
    part: bytes = b""
    """The beginning of a line whose end has not been read."""


@dataclass
class _Piece:
    tail: _Tail
    job_ended: bool
    """Whether the job had ended before this piece was read."""
    content: bytes = b""
    first: int = 0
    total: int = 0
    error: CpumondError | None = None


@dataclass
class Follower:
    """Follows the output of one operation's jobs. ``report`` gets sentences about what happens to the jobs.

    ``jobs``: only these; None: all, also later ones. ``tail_bytes``: bytes of existing output to show, None for all."""

    client: SchedulerClient
    operation: str
    streams: tuple[LogStream, ...]
    write: Write
    report: Callable[[str], None]
    jobs: tuple[str, ...] | None = None
    tail_bytes: int | None = None
    state: str = ""
    details: OperationDetails | None = None
    listed: list[JobView] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._tails: dict[tuple[str, LogStream], _Tail] = {}
        self._todo: queue.SimpleQueue[_Tail] = queue.SimpleQueue()
        self._pieces: queue.SimpleQueue[_Piece] = queue.SimpleQueue()
        self._poll_at_s = 0.0
        self._heard_at_s = time.monotonic()
        self._is_away = False
        self._reported: set[str] = set()
        self.client = self.client.clone(PATIENCE_S)
        for _ in range(WORKERS):
            # A daemon thread: a request in progress does not keep the command from ending.
            threading.Thread(target=self._work, args=(self.client.clone(PATIENCE_S),), daemon=True).start()

    @property
    def is_final(self) -> bool:
        return self.state in FINAL

    def step(self) -> bool:
        """Request due logs and write new output. Return whether all is over: the operation, its jobs and their logs.

        Raises CpumondError if the operation is no longer known, or the scheduler is away for too long."""
        now = time.monotonic()
        if now >= self._poll_at_s:
            self._poll()
            self._poll_at_s = time.monotonic() + POLL_S * max(len(self.listed) / MAX_JOBS, 1.0)
        while not self._pieces.empty():
            self._take(self._pieces.get())
        for tail in self._tails.values():
            if not tail.is_done and not tail.is_busy and now >= tail.due_s:
                tail.is_busy = True
                self._todo.put(tail)
        living = any(job.state in LIVING for job in self.listed)
        is_over = self.is_final or (self.jobs is not None and bool(self.listed))
        return is_over and not living and all(tail.is_done for tail in self._tails.values())

    def _poll(self) -> None:
        try:
            self.details = self.client.get(operation_path(self.operation), OperationDetails)
            jobs = self._list_jobs()
        except (UnavailableError, SchedulerRefusedError) as error:
            if isinstance(error, SchedulerRefusedError) and error.status < 500 and error.status != 429:
                raise
            self._bear(error)
            return
        if self._is_away:
            self.report("the scheduler answers again")
        self._heard_at_s, self._is_away, self.state = time.monotonic(), False, self.details.state
        self.listed = [job for job in jobs if self.jobs is None or job.id in self.jobs]
        for job in reversed(self.listed):
            self._look_at(job)

    def _list_jobs(self) -> list[JobView]:
        """Return all jobs, the last started first; the list may contain more than ``jobs``."""
        found: list[JobView] = []
        cursor: str | None = None
        while True:
            path = operation_path(self.operation, "jobs")
            answer = self.client.get(path, JobList, limit=MAX_JOBS, cursor=cursor)
            found += answer.jobs
            cursor = answer.next
            if cursor is None or (self.jobs is not None and {job.id for job in found} >= set(self.jobs)):
                return found

    def _bear(self, error: CpumondError) -> None:
        if time.monotonic() - self._heard_at_s > SILENCE_S:
            raise error
        if not self._is_away:
            self.report(f"the scheduler does not answer, retrying: {error}")
        self._is_away = True

    def _look_at(self, job: JobView) -> None:
        if job.state == "starting":
            return
        ended = job.state not in LIVING
        is_taken = job.state == "lost" or (job.state == "aborted" and (job.preemption or not self.is_final))
        if is_taken and job.id not in self._reported:
            self._reported.add(job.id)
            anew = "" if self.is_final else "; it is started again"
            self.report(f"job {job.id} on node {escape(job.node_id)} is {job.state}: {job.reason}{anew}")
        for stream in self.streams:
            tail = self._tails.get((job.id, stream))
            if tail is None:
                tail = self._tails[job.id, stream] = _Tail(job.id, stream, None if self.tail_bytes else 0)
            if ended and not tail.job_ended:
                tail.job_ended, tail.due_s = True, 0.0

    def _work(self, client: SchedulerClient) -> None:
        while True:
            tail = self._todo.get()
            piece = _Piece(tail, tail.job_ended)
            query = {"stream": tail.stream, "tail": self.tail_bytes or MAX_LOG_BYTES}
            if tail.offset is not None:
                query = {"stream": tail.stream, "tail": MAX_LOG_BYTES, "offset": tail.offset}
            path = operation_path(self.operation, f"jobs/{quote_name(tail.job)}/log")
            try:
                piece.content, headers = client.exchange("GET", path, query=query)
                piece.first, piece.total = _read_place(headers, len(piece.content))
            except CpumondError as error:
                piece.error = error
            self._pieces.put(piece)

    def _take(self, piece: _Piece) -> None:
        tail, now = piece.tail, time.monotonic()
        tail.is_busy = False
        if piece.error is not None:
            self._take_failure(tail, piece, now)
        else:
            tail.failing_since_s = None
            if tail.offset is not None and piece.first > tail.offset:
                self.report(f"{piece.first - tail.offset} bytes of job {tail.job} are no longer in its node's log")
            # A log that got shorter was restarted.
            tail.offset = min(piece.first + len(piece.content), piece.total)
            self._put(tail, piece.content)
            tail.is_done = piece.job_ended and tail.offset >= piece.total
            tail.pause_s = PAUSES_S[0] if piece.content else min(2 * tail.pause_s, PAUSES_S[1])
        tail.due_s = now if piece.content and len(piece.content) == MAX_LOG_BYTES else now + tail.pause_s
        if tail.is_done and tail.part:
            self.write(tail.stream, self._prefix(tail) + tail.part + b"\n")
            tail.part = b""

    def _take_failure(self, tail: _Tail, piece: _Piece, now: float) -> None:
        error = piece.error
        tail.failing_since_s = tail.failing_since_s or now
        tail.pause_s = min(2 * tail.pause_s, PAUSES_S[1])
        if isinstance(error, SchedulerRefusedError) and error.status in (401, 403):
            raise error
        is_gone = isinstance(error, SchedulerRefusedError) and error.exit_code == EXIT_NO_SUCH
        if piece.job_ended and (is_gone or now - tail.failing_since_s > END_S):
            tail.is_done = True
            if not is_gone or tail.offset:
                self.report(f"the end of the output of job {tail.job} cannot be read: {error}")

    def _put(self, tail: _Tail, content: bytes) -> None:
        if not content:
            return
        if not self._has_several():
            self.write(tail.stream, content)
            return
        *lines, tail.part = (tail.part + content).split(b"\n")
        if len(tail.part) > MAX_LINE_BYTES:
            lines, tail.part = [*lines, tail.part], b""
        if lines:
            prefix = self._prefix(tail)
            self.write(tail.stream, b"".join(prefix + line + b"\n" for line in lines))

    def _has_several(self) -> bool:
        return self.jobs is None and self.details is not None and self.details.jobs.total > 1

    def _prefix(self, tail: _Tail) -> bytes:
        """The shortest beginning of the job's id that no other job has."""
        others = {job for job, _ in self._tails if job != tail.job}
        size = 4
        while any(other.startswith(tail.job[:size]) for other in others) and size < len(tail.job):
            size += 1
        return f"{tail.job[:size]}| ".encode()


def _read_place(headers: Mapping[str, str], size: int) -> tuple[int, int]:
    """Return how many bytes of a log precede an answer, and how many there are."""
    total = headers.get(TOTAL_BYTES, "")
    known = int(total) if total.isdecimal() else size
    first = headers.get(FIRST_BYTE, "")
    return int(first) if first.isdecimal() else max(known - size, 0), known


def follow_log(client: SchedulerClient, operation: str, job: str | None, stream: LogStream, tail_bytes: int) -> None:
    """Write the output of one job, or of each job of an operation, until the end. Raises CpumondError."""
    follower = Follower(
        client, operation, (stream,), lambda _, content: write_output(content), print_aside,
        None if job is None else (job,), tail_bytes,
    )  # fmt: skip
    while not follower.step():
        time.sleep(0.05)


def print_aside(sentence: str) -> None:
    """Print a sentence on standard error, apart from the output of jobs."""
    click.echo(fold(f"cpumond: {escape(sentence)}", error_width()), err=True)


def write_output(content: bytes) -> None:
    """Write a job's output unchanged; on a terminal control characters are made visible."""
    if is_terminal():
        click.echo(make_visible(content), nl=False)
    elif sys.stdout is not None:
        sys.stdout.buffer.write(content)
        sys.stdout.buffer.flush()


def make_visible(content: bytes) -> str:
    """Bytes as text that cannot control the terminal: all but newlines, tabs and printable characters is escaped."""
    text = content.decode("utf-8", "backslashreplace")
    return "".join(sign if sign in "\n\t" else escape(sign) for sign in text)
