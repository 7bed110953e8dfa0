"""The unit of a job: its name, and all its properties; pure, but for a look into PATH."""

from __future__ import annotations

import os
import re
import shutil
import signal
from typing import Any, Final

from cpumond.executor.model import NO_COMMAND, ExecutorError, Launch

SLICE = "cpumond-jobs.slice"
SLICE_CGROUP = "cpumond.slice/cpumond-jobs.slice"
UNIT_PREFIX = "cpumond-job-"
JOB_ID = re.compile(r"[A-Za-z0-9_.-]{1,200}")
QUOTA_PERIOD_US = 100_000
MAX_ARGUMENTS_BYTES = 2_097_152
"""Of argv and environment together; the kernel's own limit is about that."""
STOP_TIMEOUT_US = 5_000_000
"""Between SIGTERM and SIGKILL when the host shuts down; the agent's own kill does not wait."""
START_TIMEOUT_US = 30_000_000
SEARCH_PATH_VERSION = 250
"""The first systemd that looks a program up in directories of the unit's own (ExecSearchPath=)."""

SYSTEMD_EXITS = range(200, 244)
ALL_RIGHT: Final = (
    [code for code in range(1, 256) if code not in SYSTEMD_EXITS],
    [number for number in range(1, 65) if number not in (signal.SIGSTOP, signal.SIGCONT)],
)
"""Exit codes and signals after which the unit stays "active (exited)", cgroup included, until its result is taken: all
but those by which systemd says that it could not run the program. An exit code is no failure of a unit here."""


def unit_name(job_id: str) -> str:
    """The unit of a job. Raises ExecutorError for an id that cannot be a part of a unit's name."""
    if JOB_ID.fullmatch(job_id) is None:
        raise ExecutorError(
            f"job id {job_id!r} cannot name a unit; use 1 to 200 letters, digits, '-', '_' and '.' of ASCII"
        )
    return f"{UNIT_PREFIX}{job_id}.service"


def unit_path(unit: str) -> str:
    """The object of a unit on the bus: what is no letter or digit is written as ``_`` and two hexadecimal digits."""
    escaped = "".join(c if c.isascii() and c.isalnum() else f"_{ord(c):02x}" for c in unit)
    return f"/org/freedesktop/systemd1/unit/{escaped}"


def check_launch(launch: Launch) -> str:
    """Why a launch cannot be said over the bus, in a sentence; "" if it can.

    A string with a zero byte would end the connection to the bus, so nothing of the kind is ever sent.
    """
    if not launch.argv or not launch.argv[0]:
        return NO_COMMAND
    words = [*launch.argv, *launch.environment, *launch.environment.values(), launch.user, launch.working_directory]
    try:
        size = sum(len(word.encode()) + 1 for word in words)
    except UnicodeEncodeError:
        return "its command or environment is no valid UTF-8"
    if any("\0" in word for word in words):
        return "its command or environment holds a zero byte"
    if size > MAX_ARGUMENTS_BYTES:
        return f"its command and environment have {size} bytes; at most {MAX_ARGUMENTS_BYTES} are possible"
    if not launch.working_directory.startswith("/"):
        return f"its working directory {launch.working_directory!r} is not absolute"
    return ""


def find_program(launch: Launch, systemd_version: int) -> tuple[str, list[str]]:
    """The program as systemd shall look for it, and the directories where; none: it knows where.

    It looks in the job's own view of the file system, which a sandboxed agent may not share. Raises ExecutorError.
    """
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
        raise ExecutorError(f"there is no program {name!r} in its PATH; name it with its full path")
    return found, []


def unit_properties(launch: Launch, user: str, systemd_version: int) -> list[tuple[str, str, Any]]:
    """(name, D-Bus signature, value) for the unit of a job; ``user`` "" is root. Raises ExecutorError."""
    program, search_path = find_program(launch, systemd_version)
    # systemd replaces $NAME in the words of a command, and $$ by one $.
    argv = [word.replace("$", "$$") for word in launch.argv]
    properties: list[tuple[str, str, Any]] = [
        ("Description", "s", f"Job {launch.job_id} of cpumond"),
        # Stopped after the agent when the host goes down: then the jobs are lost with it, not failed by a signal.
        ("Before", "as", ["cpumond.service"]),
        ("Slice", "s", SLICE),
        ("Type", "s", "exec"),
        ("ExecStart", "a(sasb)", [[program, argv, False]]),
        ("Environment", "as", [f"{name}={value}" for name, value in launch.environment.items()]),
        ("WorkingDirectory", "s", launch.working_directory),
        ("RemainAfterExit", "b", True),
        ("SuccessExitStatus", "(aiai)", [list(ALL_RIGHT[0]), list(ALL_RIGHT[1])]),
        ("Restart", "s", "no"),
        ("CPUAccounting", "b", True),
        # systemd makes at least 1 ms a period of it; 0 would be no limit at all.
        ("CPUQuotaPerSecUSec", "t", max(1, round(launch.cpu_limit * 1e6))),
        ("CPUQuotaPeriodUSec", "t", QUOTA_PERIOD_US),
        ("MemoryAccounting", "b", True),
        ("TasksAccounting", "b", True),
        ("NoNewPrivileges", "b", True),
        ("OOMPolicy", "s", "kill"),
        ("KillMode", "s", "control-group"),
        ("SendSIGKILL", "b", True),
        ("TimeoutStartUSec", "t", START_TIMEOUT_US),
        ("TimeoutStopUSec", "t", STOP_TIMEOUT_US),
        # A pipeline in a shell relies on it; systemd's own default is for daemons.
        ("IgnoreSIGPIPE", "b", False),
        ("StandardInput", "s", "null"),
    ]
    if search_path:
        properties.append(("ExecSearchPath", "as", search_path))
    if launch.memory_limit > 0:
        properties += [("MemoryMax", "t", launch.memory_limit), ("MemorySwapMax", "t", 0)]
    if launch.max_tasks > 0:
        properties.append(("TasksMax", "t", launch.max_tasks))
    if user:
        properties.append(("User", "s", user))
    return properties
