"""One job of the scheduler: the order to start it, its figures from the monitor, and the state in which it ended."""

from __future__ import annotations

import contextlib
import math
import signal
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final, Literal

import msgspec
import structlog

from cpumond.agent.config import parse_layer
from cpumond.agent.discovery import FoundJob
from cpumond.agent.jobs.files import JobFile
from cpumond.agent.jobs.overdraft import Share
from cpumond.core import wire
from cpumond.core.errors import ConfigError
from cpumond.host.executor.model import Ended

log = structlog.get_logger("cpumond.agent")

MAX_REASON = 1000
OVERDRAFT = "resource_overdraft"
"""Kind of a stop order that comes from the node, not from the scheduler."""
NO_MEMORY = "the node ran out of memory"
MAX_STDERR_LINE = 300
LIMIT_SLACK = 2**20
"""If a job's peak memory is at least this many bytes below its limit, the limit was not the reason for its kill."""

EndState = Literal["completed", "failed", "aborted", "lost"]


class Usage(wire.JobFigures, frozen=True):
    """The monitor's figures of a job's cgroup, with its limit in force and its smoothed usage, both in cores."""

    current_cores: float
    smoothed_cores: float | None = None
    mode: str = ""


SUMS = wire.CPU_COUNTERS[1:]
"""Fields of ``Usage`` that start at 0 in each run of the agent; ``JobFile`` keeps the sums of earlier runs."""

NO_SECRETS: Final[Mapping[str, str]] = MappingProxyType({})


class AssignedJob:
    """One job. ``sent_at_s``: monotonic time of the heartbeat in whose response the order came."""

    __slots__ = (
        "checkpoint_at", "directory", "earlier", "file", "found", "kill_at_s", "over_reserve", "received_at_s",
        "secrets", "sent_at_s", "usage",
    )  # fmt: skip

    def __init__(
        self,
        file: JobFile,
        directory: str,
        received_at_s: float,
        sent_at_s: float,
        secrets: Mapping[str, str] = NO_SECRETS,
    ) -> None:
        self.file = file
        self.secrets = secrets
        """Secrets of the order, kept here until the job starts: the order in the job's file has no secrets."""
        self.directory = directory
        self.received_at_s = received_at_s
        self.sent_at_s = sent_at_s
        self.kill_at_s = math.inf
        self.found: FoundJob | None = None
        self.usage: Usage | None = None
        self.over_reserve = False
        """Whether the job uses more memory than it reserves, as its report says."""
        self.checkpoint_at: float | None = None
        """Time of the job's last checkpoint, in seconds since 1970."""
        self.earlier: dict[str, float] = {name: getattr(file, name) for name in SUMS}
        """The job's ``SUMS`` in earlier runs of the agent, in core-seconds."""

    @property
    def order(self) -> wire.JobOrder:
        return self.file.order

    @property
    def takes_room(self) -> bool:
        """Whether the job is starting or running, and so holds resources of the node."""
        return self.file.state in ("starting", "running")

    @property
    def is_stopping(self) -> bool:
        """Whether the job was asked to stop and has not ended."""
        return self.takes_room and self.file.stop is not None

    @property
    def current_cores(self) -> float:
        return self.order.cpu_limit if self.usage is None else self.usage.current_cores

    def sums(self) -> dict[str, float]:
        """Return ``SUMS`` since the job's start, in core-seconds, including those of earlier runs of the agent."""
        return {name: before + (getattr(self.usage, name, None) or 0.0) for name, before in self.earlier.items()}

    def note_usage(self, now: Usage) -> None:
        """Store new figures. No sum falls, even if the monitor stops moving the limit or follows the cgroup anew."""
        if self.usage is not None:
            sums = {name: (getattr(self.usage, name) or 0.0, getattr(now, name) or 0.0) for name in SUMS}
            if fallen := {name: before for name, (before, after) in sums.items() if after < before}:
                now = msgspec.structs.replace(now, **fallen)
        self.usage = now

    def note_checkpoint(self, touched_at: float | None, now: float) -> None:
        """Record when the job touched its checkpoint file; both times are in seconds since 1970.

        A time before the job's start or last checkpoint, or in the future, is ignored: any job can set such a time."""
        start = self.file.start_time
        if touched_at is not None and start is not None and max(start, self.checkpoint_at or 0.0) <= touched_at <= now:
            self.checkpoint_at = touched_at

    def share(self, amount: float) -> Share:
        """Return the job's share: ``amount`` of a resource. A job that is still starting counts as the newest one."""
        start_time = self.file.start_time
        return Share(self.order.job_id, math.inf if start_time is None else start_time, amount)

    def mark_running(self) -> None:
        """Let the monitor follow the job from now on. Invalid options of the job are logged and ignored."""
        order = self.order
        try:
            layer = parse_layer(order.job_cpu_monitor, f"job {order.job_id}")
        except ConfigError as error:
            log.warning("job_cpu_monitor_refused", job_id=order.job_id, error=str(error))
            layer = {}
        self.found = FoundJob(
            order.job_id,
            order.operation_id,
            self.file.cgroup,
            order.cpu_limit,
            layer=layer,
            is_assigned=True,
            moves_ceiling=order.moves_ceiling,
        )

    def report(self) -> wire.JobReport:
        order, usage = self.order, self.usage or Usage(self.current_cores)
        return wire.JobReport(
            job_id=order.job_id,
            operation_id=order.operation_id,
            cpu_limit=order.cpu_limit,
            current_cpu_limit=usage.current_cores,
            smoothed_cpu_usage=usage.smoothed_cores,
            mode=usage.mode,
            from_scheduler=True,
            stopping=self.file.stop is not None,
            task=order.task,
            start_time=self.file.start_time,
            memory=order.reserved_memory,
            over_reserve=self.over_reserve,
            cgroup=self.file.cgroup,
            checkpoint_at=self.checkpoint_at,
            **{**wire.list_figures(usage), **self.sums()},
        )

    def make_end(self, state: EndState, reason: str, ended: Ended) -> wire.FinishedJob:
        """Describe the job's end for the scheduler. An end by a signal has an exit code above 128, as in shells."""
        sums: dict[str, Any] = {**self.sums()}
        return wire.FinishedJob(
            job_id=self.order.job_id,
            operation_id=self.order.operation_id,
            state=state,
            task=self.order.task,
            exit_code=ended.exit_code if ended.signal is None else 128 + ended.signal,
            reason=reason[:MAX_REASON],
            start_time=self.file.start_time,
            finish_time=ended.finish_time,
            cpu_seconds=ended.cpu_seconds,
            max_memory=ended.max_memory,
            cgroup=self.file.cgroup,
            **sums,
        )

    def _has_failed_by_itself(self, ended: Ended) -> bool:
        """Return whether a job, interrupted by the signal that its order names, ended with an exit code above 0."""
        is_overdraft = self.file.stop is not None and self.file.stop.kind == OVERDRAFT
        return bool(self.order.interruption_signal and ended.exit_code) and not is_overdraft

    def classify_end(self, ended: Ended) -> tuple[EndState, str]:
        """Return the state in which the job ended, and why ("" if completed). "failed": it was the job's own fault."""
        stop, stopped_at, order = self.file.stop, self.file.stopped_at, self.order
        was_over = stopped_at is not None and ended.finish_time < stopped_at
        if ended.exit_code == 0 and (stop is None or order.interruptible or was_over):
            return "completed", ""
        if ended.problem and self.file.start_time is None:
            return "lost", ended.problem  # it may have started unnoticed
        if stop is not None and not self._has_failed_by_itself(ended):
            return "aborted", stop.why
        if ended.problem:
            return "lost", ended.problem
        if ended.oom_killed and (not order.memory_limit or self._was_below_limit(ended)):
            if 0 < order.memory_reserve < (ended.max_memory or 0):
                why = f"{wire.MEMORY_OVERDRAFT}{ended.max_memory} of {order.memory_reserve} bytes: {NO_MEMORY}"
                return "aborted", why
            return "aborted", NO_MEMORY
        if ended.oom_killed:
            return "failed", f"{wire.OUT_OF_MEMORY}it requested memory_limit = {order.memory_limit} bytes"
        return "failed", _describe_exit(ended)

    def _was_below_limit(self, ended: Ended) -> bool:
        """Return whether the kernel killed a process of the job because the node lacked memory, not because of the
        job's own limit. False without a ``memory_reserve``, because such a job reserves all that it may use."""
        used, order = ended.max_memory, self.order
        return order.memory_reserve > 0 and used is not None and used < order.memory_limit - LIMIT_SLACK


def find_signal(order: wire.JobOrder) -> int:
    """Return the signal that interrupts a job; SIGTERM if the order names none, or one that this host does not know (a
    scheduler of a different version may name such a signal)."""
    return signal.Signals.__members__.get(order.interruption_signal, signal.SIGTERM)


def _describe_exit(ended: Ended) -> str:
    """Describe a job's end in a sentence, with the last line of its stderr."""
    if ended.signal is not None:
        with contextlib.suppress(ValueError):
            return f"killed by {signal.Signals(ended.signal).name}"
        return f"killed by signal {ended.signal}"
    lines = [line for line in ended.last_words.decode("utf-8", "replace").splitlines() if line.strip()]
    if not lines:
        return f"exit code {ended.exit_code}"
    shown = "".join(sign if sign.isprintable() else "?" for sign in lines[-1])
    return f"exit code {ended.exit_code}; stderr: {shown[:MAX_STDERR_LINE]}"
