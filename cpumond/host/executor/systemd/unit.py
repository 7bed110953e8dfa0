"""The unit of a job: its name, its start properties, its state, and what that state means for the job.

Pure, except that ``find_program`` may search PATH."""

from __future__ import annotations

import os
import re
import shutil
import signal
import time
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from cpumond.core.job_cgroups import IDLE_SLICE, JOBS_SLICE, JOBS_SLICE_CGROUP
from cpumond.host.cgroup.settings import compute_start_weight
from cpumond.host.executor.keeper import RECLAIMED_OOM_SCORE
from cpumond.host.executor.model import NO_COMMAND, Ended, ExecutorError, Launch

UNIT_PREFIX = "cpumond-job-"
JOB_ID = re.compile(r"[A-Za-z0-9_.-]{1,200}")
QUOTA_PERIOD_US = 100_000
MAX_ARGUMENTS_BYTES = 2_097_152
"""Maximum bytes of argv and environment together; the kernel's own limit is about as high."""
STOP_TIMEOUT_US = 5_000_000
"""Microseconds between SIGTERM and SIGKILL when the host shuts down. If the agent kills a job, it does not wait."""
START_TIMEOUT_US = 30_000_000
SEARCH_PATH_VERSION = 250
"""The first systemd that can look up a program in directories that the unit names (ExecSearchPath=)."""

SYSTEMD_EXITS = range(200, 244)
ALL_RIGHT: Final = (
    [code for code in range(1, 256) if code not in SYSTEMD_EXITS],
    [number for number in range(1, 65) if number not in (signal.SIGSTOP, signal.SIGCONT)],
)
"""Exit codes and signals after which the unit stays "active (exited)", with its cgroup, until its result is read.

These are all but those by which systemd reports that it could not run the program: no exit code is a failure."""

EXIT_CHDIR, EXIT_EXEC, EXIT_GROUP, EXIT_USER = 200, 203, 216, 217
_EXIT_WORDS: Final = {
    201: "its nice level cannot be set", 202: "its file descriptors cannot be set up",
    204: "there is no memory for it", 205: "its resource limits cannot be set", 206: "its OOM score cannot be set",
    207: "its signal mask cannot be set", 208: "its standard input cannot be opened",
    209: "its standard output cannot be opened", 214: "its CPU scheduling cannot be set",
    215: "its CPU affinity cannot be set", 218: "its capabilities cannot be set",
    219: "its cgroup cannot be created or entered", 220: "no session can be created for it",
    222: "its standard error cannot be opened", 224: "PAM refused its user",
    226: "its namespaces cannot be set up", 228: "its system call filter cannot be set",
    229: "its SELinux context cannot be set", 231: "its AppArmor profile cannot be set",
    237: "its keyring cannot be set up", 243: "its credentials cannot be set up",
}  # fmt: skip
"""Those of systemd's own exit codes (systemd.exec(5)) that are the node's fault, each with its meaning in words."""

_CLD_EXITED = 1
_UNKNOWN_COUNTER = 2**64 - 1
GONE: Final = "its unit is gone, so its end is unknown"


def unit_name(job_id: str) -> str:
    """Return the name of a job's unit. Raises ExecutorError for an id that cannot be a part of a unit's name."""
    if JOB_ID.fullmatch(job_id) is None:
        raise ExecutorError(
            f"job id {job_id!r} cannot name a unit; use 1 to 200 letters, digits, '-', '_' and '.' of ASCII"
        )
    return f"{UNIT_PREFIX}{job_id}.service"


def unit_path(unit: str) -> str:
    """Return the bus path of a unit; characters other than letters and digits become ``_`` and two hex digits."""
    escaped = "".join(c if c.isascii() and c.isalnum() else f"_{ord(c):02x}" for c in unit)
    return f"/org/freedesktop/systemd1/unit/{escaped}"


def check_launch(launch: Launch) -> str:
    """Return why a launch cannot be sent over the bus, in a sentence; "" if it can.

    A string with a zero byte would end the connection to the bus, so no such string is ever sent."""
    if not launch.argv or not launch.argv[0]:
        return NO_COMMAND
    words = [*launch.argv, *launch.environment, *launch.environment.values(), launch.user, launch.working_directory]
    words += [*launch.secrets, *launch.secrets.values()]
    try:
        size = sum(len(word.encode()) + 1 for word in words)
    except UnicodeEncodeError:
        return "its command or environment is not valid UTF-8"
    if any("\0" in word for word in words):
        return "its command or environment contains a zero byte"
    if size > MAX_ARGUMENTS_BYTES:
        return f"its command and environment have {size} bytes; at most {MAX_ARGUMENTS_BYTES} are allowed"
    if not launch.working_directory.startswith("/"):
        return f"its working directory {launch.working_directory!r} is not absolute"
    return ""


def find_program(launch: Launch, systemd_version: int) -> tuple[str, list[str]]:
    """Return the program as systemd should look it up, and the directories to search, if needed. systemd searches,
    because it sees the file system as the job does; a sandboxed agent may see it differently. Raises ExecutorError."""
    name = launch.argv[0]
    path = launch.environment.get("PATH")
    if "/" in name:
        return os.path.normpath(os.path.join(launch.working_directory, name)), []
    if path is None:
        return name, []
    if systemd_version >= SEARCH_PATH_VERSION:
        return name, [directory for directory in path.split(":") if directory.startswith("/")]
    found = shutil.which(name, path=path)
    if found is None:
        raise ExecutorError(f"the program {name!r} is not in its PATH; give its full path")
    return found, []


def unit_properties(launch: Launch, user: str, systemd_version: int) -> list[tuple[str, str, Any]]:
    """Return (name, D-Bus signature, value) for the unit of a job; ``user`` "" is root. Raises ExecutorError."""
    program, search_path = find_program(launch, systemd_version)
    # systemd replaces $NAME in the words of a command, and $$ by one $.
    argv = [word.replace("$", "$$") for word in launch.argv]
    properties: list[tuple[str, str, Any]] = [
        ("Description", "s", f"Job {launch.job_id} of cpumond"),
        # If the host shuts down, stop jobs after the agent: so they count as lost with it, not as failed by a signal.
        ("Before", "as", ["cpumond.service"]),
        ("Slice", "s", IDLE_SLICE if launch.reclaimed else JOBS_SLICE),
        ("Type", "s", "exec"),
        ("ExecStart", "a(sasb)", [[program, argv, False]]),
        ("Environment", "as", [f"{name}={value}" for name, value in launch.environment.items()]),
        ("WorkingDirectory", "s", launch.working_directory),
        ("RemainAfterExit", "b", True),
        ("SuccessExitStatus", "(aiai)", [list(ALL_RIGHT[0]), list(ALL_RIGHT[1])]),
        ("Restart", "s", "no"),
        ("CPUAccounting", "b", True),
        # Also on v1, where the weight becomes cpu.shares, in steps of a hundredth of a core: the agent later moves the
        # weight and compares it with the file. On v1 a unit without any CPU setting has no limit files.
        ("CPUWeight", "t", compute_start_weight(launch.cpu_limit, 2)),
        ("MemoryAccounting", "b", True),
        ("TasksAccounting", "b", True),
        ("NoNewPrivileges", "b", True),
        ("OOMPolicy", "s", "kill"),
        ("KillMode", "s", "control-group"),
        ("SendSIGKILL", "b", True),
        ("TimeoutStartUSec", "t", START_TIMEOUT_US),
        ("TimeoutStopUSec", "t", STOP_TIMEOUT_US),
        # Pipelines in a shell rely on SIGPIPE; systemd's own default is for daemons.
        ("IgnoreSIGPIPE", "b", False),
        ("StandardInput", "s", "null"),
    ]
    if search_path:
        properties.append(("ExecSearchPath", "as", search_path))
    if launch.memory_limit > 0:
        properties += [("MemoryMax", "t", launch.memory_limit), ("MemorySwapMax", "t", 0)]
    if launch.has_ceiling:
        # systemd raises the quota to at least 1 ms per period; 0 would mean no limit at all.
        properties.append(("CPUQuotaPerSecUSec", "t", max(1, round(launch.cpu_limit * 1e6))))
        properties.append(("CPUQuotaPeriodUSec", "t", QUOTA_PERIOD_US))
    if launch.reclaimed:
        properties.append(("OOMScoreAdjust", "i", RECLAIMED_OOM_SCORE))
    if launch.max_tasks > 0:
        properties.append(("TasksMax", "t", launch.max_tasks))
    if user:
        properties.append(("User", "s", user))
    return properties


class UnitState(msgspec.Struct, frozen=True):
    """The state of a job's unit at one moment; times in seconds since 1970, 0 = not yet."""

    active: str
    loaded: bool
    queued: bool
    active_since: float
    started: float
    finished: float
    cgroup: str
    slice: str
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
        """Whether the program was executed, however it ended; None if this state does not show it.

        A program that ends at once may have ended before systemd has noticed its start."""
        if self.active_since > 0.0:
            return True
        if self.main_code == _CLD_EXITED and self.main_status in SYSTEMD_EXITS:
            return None
        return self.main_code != 0

    @property
    def slice_cgroup(self) -> str:
        return IDLE_SLICE if self.slice == IDLE_SLICE else JOBS_SLICE_CGROUP

    @property
    def is_gone(self) -> bool:
        return not self.loaded and self.active == "inactive"

    @property
    def is_over(self) -> bool:
        """Whether the main process has ended, or will never exist."""
        return self.main_code != 0 or (self.active in ("inactive", "failed") and not self.queued)


def read_state(properties: Mapping[str, Any], seen: Mapping[str, Any]) -> UnitState:
    """Return the state by a unit's properties, and by ``seen``: those that signals showed while the unit existed."""
    loaded = properties.get("LoadState", "not-found") != "not-found"
    active = properties.get("ActiveState", "inactive")
    if not loaded and active == "inactive":
        # For a unit that is gone, the bus returns only the default of each property.
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
        slice=str(properties.get("Slice") or ""),
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
    """Explain why a unit did not become active, in a sentence, and whether that is the node's fault."""
    code, status = state.main_code, state.main_status
    if code == 0:
        if state.is_gone:
            return "its unit was stopped before it ran", False
        return f"systemd could not start its unit (result {state.result!r})", True
    if code != _CLD_EXITED:
        return f"signal {status} ended it before its program ran", False
    own = {
        EXIT_CHDIR: f"the working directory {state.directory} does not exist, or user {state.user} may not enter it",
        EXIT_EXEC: f"the program {''.join(state.argv[:1])!r} does not exist, or user {state.user} may not run it",
        EXIT_USER: f"the user {state.user!r} does not exist on this host",
        EXIT_GROUP: f"the groups of user {state.user!r} cannot be determined",
    }
    if status in own:
        return own[status], False
    return f"{_EXIT_WORDS.get(status, 'systemd could not prepare its process')} (exit status {status} of systemd)", True


def make_ended(job_id: str, state: UnitState, totals: UnitState, peak: int | None, oom_kills: int) -> Ended:
    """Return the event of a job's end: ``state`` has its result, ``totals`` was read after its last process ended."""
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
        job_id, finish_time=state.finished or time.time(), exit_code=exit_code, signal=ended_by,
        cpu_seconds=state.cpu_seconds if totals.cpu_seconds is None else totals.cpu_seconds,
        max_memory=max(peaks, default=None), oom_killed=oom_kills > 0 or "oom-kill" in (state.result, totals.result),
        problem=problem,
    )  # fmt: skip
