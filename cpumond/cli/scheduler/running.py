"""The commands ``run`` and ``operation wait``: an operation from start to end, and its exit code."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from typing import Any, Final, Literal

import click
import msgspec

from cpumond.api.views import Done, OperationDetails
from cpumond.cli.ending import Ending, ended_by
from cpumond.cli.options import DurationType
from cpumond.cli.output import print_json, print_text, warn
from cpumond.cli.scheduler.client import connection_options, scheduler_options
from cpumond.cli.scheduler.finding import OPERATION, operation_path
from cpumond.cli.scheduler.follow import FINAL, SILENCE_S, Follower, print_aside
from cpumond.cli.scheduler.http_client import SchedulerClient
from cpumond.cli.scheduler.spec import spec_options
from cpumond.core.errors import CpumondError, NotYetError, UnavailableError
from cpumond.core.measures import format_span
from cpumond.core.wire import LogStream
from cpumond.core.words import count, escape

EXIT_FAILED: Final = 1
EXIT_ABORTED: Final = 2
EXIT_OF_STATE: Final = {"completed": 0, "failed": EXIT_FAILED, "aborted": EXIT_ABORTED}
POLL_S: Final = 1.0
STOP_S: Final = 60.0
"""Seconds that jobs are given to end after Ctrl-C."""
REPORT_AFTER_S: Final = 5.0
"""A wait shorter than this is not reported."""


@click.command("run", epilog="Example: cpumond run --pool research --cpu-limit 4 -- python train.py")
@connection_options
@spec_options
@click.option("--wait", "waits", is_flag=True, help="Start it even if no node is large enough now: one may be added.")
def run_command(client: SchedulerClient, spec: dict[str, Any], waits: bool) -> None:
    """Run COMMAND as an operation, with its output and exit code here; Ctrl-C aborts it.

    The options are those of `cpumond operation start`; the first job that fails ends it unless --set
    max_failed_job_count=N allows more. If there are several jobs, each line begins with the id of its job. A job that
    is preempted or lost is started again. With --job-count 100 the jobs find the numbers 0 to 99 in YT_JOB_COOKIE, and
    a restarted job keeps its number: `cpumond run --job-count 100 -- sh -c 'process part-$YT_JOB_COOKIE'`. While no job
    runs, the reason is printed after 5 s, and again when it changes. A second Ctrl-C ends this command at once and
    leaves the rest to the scheduler.

    Exit code: 0 completed; the code of the first failed job, 1 if it failed without one; 2 aborted by another user; 128
    plus the number of the signal that ended it here (141, and the operation is aborted, if the reader of its output has
    gone). 69, and it is aborted, if no node could hold one of its jobs even when empty, unless --wait is given."""
    spec = {"max_failed_job_count": 1, **spec}
    with ended_by([signal.SIGINT, signal.SIGTERM], leave_at_second=True) as ending:
        run = _Run(client, ending, waits)
        try:
            code = run.start(spec)
        except KeyboardInterrupt:
            _print_aside(run.describe_left())
            code = 128 + ending.number
    click.get_current_context().exit(code)


class WaitReport:
    """The reason why an operation without a job waits, reported once it has been the same for REPORT_AFTER_S."""

    def __init__(self) -> None:
        self._why = self._printed = ""
        self._since_s = 0.0

    def note(self, details: OperationDetails, now_s: float) -> str:
        """The reason to report now, "" for none; ``now_s``: seconds of any steady clock."""
        is_idle = not details.jobs.active and details.state not in FINAL
        why = "; ".join(dict.fromkeys(part.why for part in details.trees.values())) if is_idle else ""
        if why != self._why:
            self._why, self._since_s = why, now_s
        if not is_idle:
            self._printed = ""
        if why in ("", self._printed) or now_s - self._since_s < REPORT_AFTER_S:
            return ""
        self._printed = why
        return why


class _Run:
    """One operation from start to end. ``waits``: wait even if no node could hold one of its jobs."""

    def __init__(self, client: SchedulerClient, ending: Ending, waits: bool) -> None:
        self._client = client
        self._waits = waits
        self._ending = ending
        self._operation = ""
        self._is_aborted = False

    def start(self, spec: dict[str, Any]) -> int:
        """Start the operation and write the output of its jobs; return the exit code."""
        answer = self._client.decode(self._client.request("POST", "/operations", {"spec": spec}), Done)
        self._operation = answer.id
        for warning in answer.warnings:
            with contextlib.suppress(OSError):
                warn(warning)
        _print_aside(f"operation {answer.id} is started; Ctrl-C aborts it")
        follower = Follower(self._client, answer.id, ("stdout", "stderr"), _write_raw, _print_aside)
        told, seen = WaitReport(), None
        try:
            while not follower.step():
                if self._ending.wait(0.05):
                    return self._stop(follower)
                if seen is not follower.details and follower.details is not None:
                    if seen is None and not self._waits:
                        self._refuse_too_large(follower.details)
                    seen = follower.details
                    if why := told.note(seen, time.monotonic()):
                        _print_aside(f"operation {answer.id} waits: {why}")
        except OSError as error:
            # The reader of the output has gone, so this command ends as COMMAND itself would.
            self._ending.number = self._ending.number or signal.SIGPIPE
            code = self._stop(follower)
            if isinstance(error, BrokenPipeError):
                return code
            raise
        return print_end(follower)

    def _refuse_too_large(self, details: OperationDetails) -> None:
        """Abort at once an operation that no node could hold: the user would wait in vain. Raises UnavailableError."""
        if details.shown_state != "cannot start":
            return
        whys = "; ".join(dict.fromkeys(part.why for part in details.trees.values()))
        self._abort(f"{whys}: ended by `cpumond run`")
        raise UnavailableError(
            f"operation {details.id} {whys}; it is aborted. Request less, or give --wait to wait for a larger node"
        )

    def _stop(self, follower: Follower) -> int:
        """Abort after the first signal. If the operation is over already, do not wait for the rest of its output."""
        end_s = time.monotonic() + STOP_S
        if not follower.is_final:
            _print_aside(f"operation {self._operation} is aborted; Ctrl-C again ends this command at once")
            self._abort(f"ended by {signal.Signals(self._ending.number).name} of `cpumond run`")
            while not follower.step() and time.monotonic() < end_s:
                time.sleep(0.05)
        return 128 + self._ending.number

    def _abort(self, message: str) -> None:
        try:
            self._client.request("POST", operation_path(self._operation, "abort"), {"message": message})
            self._is_aborted = True
        except CpumondError as error:
            _print_aside(f"operation {self._operation} may continue: {error}")

    def describe_left(self) -> str:
        """Describe what happens to the operation if this command ends first, after the second signal."""
        if self._is_aborted:
            return f"operation {self._operation} is left to the scheduler, which stops its jobs"
        if not self._operation:
            return "it is unknown whether the operation was started; see `cpumond operation list`"
        return f"operation {self._operation} may continue; `cpumond operation abort {self._operation}` ends it"


def print_end(follower: Follower) -> int:
    """Print how the operation ended unless it completed. Return the exit code."""
    details = follower.details
    assert details is not None
    if details.state != "completed":
        _print_aside(f"operation {details.id} is {details.state}{f': {details.error}' if details.error else ''}")
    failed = [job for job in reversed(follower.listed) if job.state == "failed" and job.exit_code]
    if details.state == "failed" and failed:
        return failed[0].exit_code or EXIT_FAILED
    return EXIT_OF_STATE[details.state]


def _write_raw(stream: LogStream, content: bytes) -> None:
    """Write a job's output unchanged, because it is the user's own command."""
    target = sys.stdout if stream == "stdout" else sys.stderr
    if target is None:  # closed by the caller, who does not want the output
        return
    try:
        target.buffer.write(content)
        target.buffer.flush()
    except OSError:
        # Later writes, for example the flush at exit, must not fail as well.
        os.dup2(os.open(os.devnull, os.O_WRONLY), target.fileno())
        raise


def _print_aside(sentence: str) -> None:
    """Print like ``print_aside``; if standard error is closed, continue with the operation."""
    with contextlib.suppress(OSError):
        print_aside(sentence)


class Waited(msgspec.Struct, frozen=True):
    """An operation that was waited for, and its state."""

    id: str
    state: str
    error: str


class WaitedList(msgspec.Struct, frozen=True):
    """Output of ``operation wait --json``."""

    operations: list[Waited]


@click.command("wait", epilog="Example: cpumond operation wait 1a-2b-3c-4d --timeout 1h && echo done")
@click.argument("operations", metavar="OPERATION...", type=OPERATION, nargs=-1, required=True)
@click.option("--timeout", "timeout_s", type=DurationType(0.0, 1e9), help="For example 1h; default: no time-out.")
@click.option(
    "--state", "wanted", type=click.Choice(["running", "finished"]), default="finished", show_default=True,
    help="State to wait for; a finished operation counts as running.",
)  # fmt: skip
@scheduler_options
def wait_command(
    client: SchedulerClient, operations: tuple[str, ...], timeout_s: float | None,
    wanted: Literal["running", "finished"],
) -> None:  # fmt: skip
    """Wait until operations have ended, or are running.

    Exit code: 0 when all have completed (or run), 1 when one failed, 2 when one was aborted, 75 when the time-out came
    first, 67 for an operation that does not exist."""
    end_s = None if timeout_s is None else time.monotonic() + timeout_s
    waiting, done = dict.fromkeys(operations), list[Waited]()
    while True:
        for operation in list(waiting):
            found = _look(client, operation, end_s)
            runs = found is not None and found.state == "running" and found.jobs.active > 0
            if found is None or not (found.state in FINAL or (wanted == "running" and runs)):
                continue
            del waiting[operation]
            done.append(Waited(found.id, found.state, found.error))
            if not client.as_json:
                print_text(f"operation {found.id} is {found.state}{f': {escape(found.error)}' if found.error else ''}")
                sys.stdout.flush()
        if not waiting:
            break
        if end_s is not None and time.monotonic() >= end_s:
            _print_waited(client, done)
            span = format_span(timeout_s or 0.0)
            raise NotYetError(f"after {span}, {count(len(waiting), 'operation')} not {wanted}: {', '.join(waiting)}")
        time.sleep(POLL_S if end_s is None else max(min(POLL_S, end_s - time.monotonic()), 0.0))
    _print_waited(client, done)
    click.get_current_context().exit(max(EXIT_OF_STATE.get(each.state, 0) for each in done))


def _look(client: SchedulerClient, operation: str, end_s: float | None) -> OperationDetails | None:
    """Return the operation; None if no scheduler answers before the time-out. Without time-out: UnavailableError."""
    begun_s = time.monotonic()
    while True:
        try:
            return client.get(operation_path(operation), OperationDetails)
        except UnavailableError:
            if time.monotonic() >= (begun_s + SILENCE_S if end_s is None else end_s):
                if end_s is None:
                    raise
                return None
            time.sleep(POLL_S)


def _print_waited(client: SchedulerClient, done: list[Waited]) -> None:
    if client.as_json:
        print_json(msgspec.json.encode(WaitedList(done)), WaitedList)
