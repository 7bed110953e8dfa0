"""What systemd says about a job's unit, and what it means for the job; pure."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from cpumond.executor.model import Ended
from cpumond.executor.systemd.units import SYSTEMD_EXITS

EXIT_CHDIR, EXIT_EXEC, EXIT_GROUP, EXIT_USER = 200, 203, 216, 217
_EXIT_WORDS: Final = {
    201: "its nice level cannot be set", 202: "its file descriptors cannot be set up",
    204: "no memory for it", 205: "its resource limits cannot be set", 206: "its OOM score cannot be set",
    207: "its signal mask cannot be set", 208: "its standard input cannot be opened",
    209: "its standard output cannot be opened", 214: "its CPU scheduling cannot be set",
    215: "its CPU affinity cannot be set", 218: "its capabilities cannot be set",
    219: "its cgroup cannot be made or entered", 220: "no session can be made for it",
    222: "its standard error cannot be opened", 224: "PAM refused its user",
    226: "its namespaces cannot be set up", 228: "its system call filter cannot be set",
    229: "its SELinux context cannot be set", 231: "its AppArmor profile cannot be set",
    237: "its keyring cannot be set up", 243: "its credentials cannot be set up",
}  # fmt: skip
"""systemd's own exit codes (systemd.exec(5)) that are the node's fault, in words."""

_CLD_EXITED = 1
_UNKNOWN_COUNTER = 2**64 - 1
GONE: Final = "its unit is gone: nobody knows how it ended"


class UnitState(msgspec.Struct, frozen=True):
    """What systemd says about a job's unit at one moment; times in seconds since 1970, 0 = not yet."""

    active: str
    loaded: bool
    queued: bool
    active_since: float
    started: float
    finished: float
    cgroup: str
    result: str
    main_code: int
    main_status: int
    cpu_seconds: float | None
    max_memory: int | None
    user: str
    directory: str
    argv: list[str]

    @property
    def has_run(self) -> bool | None:
        """The program was executed, whatever became of it; None when this does not tell.

        A program that ends at once can do so before systemd has seen that it began.
        """
        if self.active_since > 0.0:
            return True
        if self.main_code == _CLD_EXITED and self.main_status in SYSTEMD_EXITS:
            return None
        return self.main_code != 0

    @property
    def is_gone(self) -> bool:
        return not self.loaded and self.active == "inactive"

    @property
    def is_over(self) -> bool:
        """The main process has ended, or there will be none."""
        return self.main_code != 0 or (self.active in ("inactive", "failed") and not self.queued)


def read_state(properties: Mapping[str, Any], seen: Mapping[str, Any]) -> UnitState:
    """The state from all properties of a unit, and from ``seen``: what signals said while there was a unit."""
    loaded = properties.get("LoadState", "not-found") != "not-found"
    active = properties.get("ActiveState", "inactive")
    if not loaded and active == "inactive":
        # What the bus answers about a unit that is no more is the default of each property.
        properties = {**properties, **seen, "ActiveState": "inactive"}

    def number(name: str) -> int:
        return int(properties.get(name) or 0)

    def counter(name: str) -> int | None:
        value = properties.get(name)
        return None if value is None or value == _UNKNOWN_COUNTER else int(value)

    command = (properties.get("ExecStart") or [["", []]])[0][1]
    cpu_ns = counter("CPUUsageNSec")
    return UnitState(
        active=active,
        loaded=loaded,
        queued=bool((properties.get("Job") or [0])[0]),
        active_since=number("ActiveEnterTimestamp") / 1e6,
        started=number("ExecMainStartTimestamp") / 1e6,
        finished=number("ExecMainExitTimestamp") / 1e6,
        cgroup=str(properties.get("ControlGroup") or "").lstrip("/"),
        result=str(properties.get("Result") or ""),
        main_code=number("ExecMainCode"),
        main_status=number("ExecMainStatus"),
        cpu_seconds=None if cpu_ns is None else cpu_ns / 1e9,
        max_memory=counter("MemoryPeak"),
        user=str(properties.get("User") or "root"),
        directory=str(properties.get("WorkingDirectory") or "/"),
        argv=[str(word).replace("$$", "$") for word in command],
    )


def explain_start_failure(state: UnitState) -> tuple[str, bool]:
    """Why a unit did not become active, in a sentence, and whether that is the node's fault."""
    code, status = state.main_code, state.main_status
    if code == 0:
        if state.is_gone:
            return "its unit was stopped before it ran", False
        return f"systemd could not start its unit (result {state.result!r})", True
    if code != _CLD_EXITED:
        return f"signal {status} ended it before its program ran", False
    own = {
        EXIT_CHDIR: f"there is no working directory {state.directory} that user {state.user} may enter",
        EXIT_EXEC: f"there is no program {''.join(state.argv[:1])!r} that user {state.user} may run",
        EXIT_USER: f"there is no user {state.user!r} on this host",
        EXIT_GROUP: f"the groups of user {state.user!r} cannot be determined",
    }
    if status in own:
        return own[status], False
    return f"{_EXIT_WORDS.get(status, 'systemd could not prepare its process')} (exit status {status} of systemd)", True


def make_ended(job_id: str, state: UnitState, totals: UnitState, peak: int | None, oom_kills: int) -> Ended:
    """What became of a job: ``state`` has how it ended, ``totals`` is of the moment after its last process ended."""
    exit_code = ended_by = None
    problem = ""
    if state.main_code == _CLD_EXITED:
        exit_code = state.main_status
    elif state.main_code:
        ended_by = state.main_status
    else:
        problem = GONE if state.is_gone else f"systemd ended its unit (result {state.result!r})"
    peaks = [value for value in (state.max_memory, totals.max_memory, peak) if value is not None]
    return Ended(
        job_id,
        finish_time=state.finished or time.time(),
        exit_code=exit_code,
        signal=ended_by,
        cpu_seconds=state.cpu_seconds if totals.cpu_seconds is None else totals.cpu_seconds,
        max_memory=max(peaks, default=None),
        oom_killed=oom_kills > 0 or "oom-kill" in (state.result, totals.result),
        problem=problem,
    )
