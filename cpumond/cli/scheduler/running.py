"""The commands ``run`` and ``operation wait``: an operation from its start to its end, and its exit code."""

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
from cpumond.cli.scheduler.client import SchedulerClient, connection_options, scheduler_options
from cpumond.cli.scheduler.finding import OPERATION, operation_path
from cpumond.cli.scheduler.follow import FINAL, SILENCE_S, Follower, tell_aside
from cpumond.cli.scheduler.spec import spec_options
from cpumond.core.errors import CpumondError, NotYetError, UnavailableError
from cpumond.core.measures import format_span
from cpumond.core.wire import LogStream
from cpumond.core.words import count, show_name

EXIT_FAILED: Final = 1
EXIT_ABORTED: Final = 2
EXIT_OF_STATE: Final = {"completed": 0, "failed": EXIT_FAILED, "aborted": EXIT_ABORTED}
POLL_S: Final = 1.0
STOP_S: Final = 60.0
"""How long jobs are given to end after Ctrl-C."""


@click.command("run", epilog="Example: cpumond run --pool research --cpu-limit 4 -- python train.py")
@connection_options
@spec_options
def run_command(client: SchedulerClient, spec: dict[str, Any]) -> None:
    """Run COMMAND as an operation: its output here, its exit code, Ctrl-C aborts it.

    The options are those of `cpumond operation start`; the first job that fails ends it unless --set
    max_failed_job_count=N allows more. Of several jobs each line begins with the job's id. A job that is preempted or
    lost is started anew. A second Ctrl-C ends this command at once and leaves the rest to the scheduler.

    Exit code: 0 completed, that of the first failed job, 1 failed without one, 2 aborted by somebody else, 128 and the
    number of the signal that ended it here: 141, and the operation is aborted, when nobody reads its output any more.
    """
    spec = {"max_failed_job_count": 1, **spec}
    with ended_by([signal.SIGINT, signal.SIGTERM], leave_at_second=True) as ending:
        run = _Run(client, ending)
        try:
            code = run.start(spec)
        except KeyboardInterrupt:
            _tell(run.tell_left())
            code = 128 + ending.number
    click.get_current_context().exit(code)


class _Run:
    """One operation from its start to its end."""

    def __init__(self, client: SchedulerClient, ending: Ending) -> None:
        self._client = client
        self._ending = ending
        self._operation = ""
        self._is_aborted = False

    def start(self, spec: dict[str, Any]) -> int:
        """Start it and write what its jobs do; the exit code."""
        answer = self._client.decode(self._client.request("POST", "/operations", {"spec": spec}), Done)
        self._operation = answer.id
        for warning in answer.warnings:
            with contextlib.suppress(OSError):
                warn(warning)
        _tell(f"operation {answer.id} is started; Ctrl-C aborts it")
        follower = Follower(self._client, answer.id, ("stdout", "stderr"), _write_raw, _tell)
        try:
            while not follower.step():
                if self._ending.wait(0.05):
                    return self._stop(follower)
        except OSError as error:
            # Nobody takes its output any more: as the command itself would, it ends.
            self._ending.number = self._ending.number or signal.SIGPIPE
            code = self._stop(follower)
            if isinstance(error, BrokenPipeError):
                return code
            raise
        return tell_end(follower)

    def _stop(self, follower: Follower) -> int:
        """After the first signal. What is over already only has an end of its output that nobody waits for."""
        end_s = time.monotonic() + STOP_S
        if not follower.is_final:
            _tell(f"operation {self._operation} is aborted; Ctrl-C again ends this command at once")
            self._abort()
            while not follower.step() and time.monotonic() < end_s:
                time.sleep(0.05)
        return 128 + self._ending.number

    def _abort(self) -> None:
        message = f"ended by {signal.Signals(self._ending.number).name} of `cpumond run`"
        try:
            self._client.request("POST", operation_path(self._operation, "abort"), {"message": message})
            self._is_aborted = True
        except CpumondError as error:
            _tell(f"operation {self._operation} may go on: {error}")

    def tell_left(self) -> str:
        """What is with the operation when this command ends before it, after the second signal."""
        if self._is_aborted:
            return f"operation {self._operation} is left to the scheduler, which stops its jobs"
        if not self._operation:
            return "it is not known whether the operation was started; see `cpumond operation list`"
        return f"operation {self._operation} may go on; `cpumond operation abort {self._operation}` ends it"


def tell_end(follower: Follower) -> int:
    """Say how the operation ended where that is not well. Returns the exit code."""
    details = follower.details
    assert details is not None
    if details.state != "completed":
        _tell(f"operation {details.id} is {details.state}{f': {details.error}' if details.error else ''}")
    failed = [job for job in reversed(follower.listed) if job.state == "failed" and job.exit_code]
    if details.state == "failed" and failed:
        return failed[0].exit_code or EXIT_FAILED
    return EXIT_OF_STATE[details.state]


def _write_raw(stream: LogStream, content: bytes) -> None:
    """What a job wrote, as it is: it is the user's own command."""
    target = sys.stdout if stream == "stdout" else sys.stderr
    if target is None:  # closed by the caller, who does not want it
        return
    try:
        target.buffer.write(content)
        target.buffer.flush()
    except OSError:
        # What follows, such as the flush at exit, must not fail as well.
        os.dup2(os.open(os.devnull, os.O_WRONLY), target.fileno())
        raise


def _tell(sentence: str) -> None:
    """As ``tell_aside``, where standard error may be gone: the operation is looked after anyway."""
    with contextlib.suppress(OSError):
        tell_aside(sentence)


class Waited(msgspec.Struct, frozen=True):
    """An operation that was waited for, and how it was found."""

    id: str
    state: str
    error: str


class WaitedList(msgspec.Struct, frozen=True):
    """What ``operation wait`` prints with ``--json``."""

    operations: list[Waited]


@click.command("wait", epilog="Example: cpumond operation wait 1a-2b-3c-4d --timeout 1h && echo done")
@click.argument("operations", metavar="OPERATION...", type=OPERATION, nargs=-1, required=True)
@click.option("--timeout", "timeout_s", type=DurationType(0.0, 1e9), help="Such as 1h; default: without end.")
@click.option(
    "--state", "wanted", type=click.Choice(["running", "finished"]), default="finished", show_default=True,
    help="What to wait for; who is finished has been running.",
)  # fmt: skip
@scheduler_options
def wait_command(
    client: SchedulerClient,
    operations: tuple[str, ...],
    timeout_s: float | None,
    wanted: Literal["running", "finished"],
) -> None:
    """Wait until operations have ended, or run.

    Exit code: 0 when all have completed (or run), 1 when one failed, 2 when one was aborted, 75 when the time-out came
    first, 67 for an operation that does not exist.
    """
    end_s = None if timeout_s is None else time.monotonic() + timeout_s
    waiting, done = dict.fromkeys(operations), list[Waited]()
    while True:
        for operation in list(waiting):
            found = _look(client, operation, end_s)
            if found is None or not (found.state in FINAL or (wanted == "running" and _runs(found))):
                continue
            del waiting[operation]
            done.append(Waited(found.id, found.state, found.error))
            if not client.as_json:
                print_text(
                    f"operation {found.id} is {found.state}{f': {show_name(found.error)}' if found.error else ''}"
                )
                sys.stdout.flush()
        if not waiting:
            break
        if end_s is not None and time.monotonic() >= end_s:
            _print_waited(client, done)
            span = format_span(timeout_s or 0.0)
            raise NotYetError(f"after {span} {count(len(waiting), 'operation')} not {wanted} yet: {', '.join(waiting)}")
        time.sleep(POLL_S if end_s is None else max(min(POLL_S, end_s - time.monotonic()), 0.0))
    _print_waited(client, done)
    click.get_current_context().exit(max(EXIT_OF_STATE.get(each.state, 0) for each in done))


def _runs(found: OperationDetails) -> bool:
    return found.state == "running" and found.jobs.active > 0


def _look(client: SchedulerClient, operation: str, end_s: float | None) -> OperationDetails | None:
    """The operation; None where no scheduler answers before the time-out. Raises UnavailableError without one."""
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
