"""The executor of kind "systemd": each job is a transient service unit in ``cpumond-jobs.slice``.

Over the system bus, and as root only: who may start units may do anything. The unit outlives the agent, and its result
stays readable (RemainAfterExit) until it was taken. What a job writes goes to the journal: journald's own limits on
size and rate hold there instead of ``Launch.max_log_bytes``. A job's command, environment and user can be seen by every
user of the host (``systemctl show``), so no secrets belong there.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import os
import pwd
import re
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping
from typing import IO, Any, Final

import msgspec
import structlog

from cpumond.errors import describe
from cpumond.executor import Ended, Event, ExecutorError, JobCgroups, Launch, NotStarted, Started
from cpumond.wire import LogStream

try:
    from dbus_fast import BusType, Message, MessageType, Variant
    from dbus_fast.aio import MessageBus
except ImportError as error:
    _MISSING = str(error)
else:
    _MISSING = ""

_log = structlog.get_logger()

SLICE = "cpumond-jobs.slice"
SLICE_CGROUP = "cpumond.slice/cpumond-jobs.slice"
UNIT_PREFIX = "cpumond-job-"
JOB_ID = re.compile(r"[A-Za-z0-9_.-]{1,200}")
QUOTA_PERIOD_US = 100_000
MAX_ARGUMENTS_BYTES = 2_097_152
"""Of argv and environment together; the kernel's own limit is about that."""

_SYSTEMD = "org.freedesktop.systemd1"
_MANAGER = f"{_SYSTEMD}.Manager"
_MANAGER_PATH = "/org/freedesktop/systemd1"
_BUS = "org.freedesktop.DBus"
_PROPERTIES = f"{_BUS}.Properties"

RECOVER_S = 9.0
CALL_TIMEOUT_S = 25.0
"""Of one call; systemd answers nothing while it reloads its units."""
LOOK_PERIOD_S = 5.0
"""How often all units are listed, in case a signal of the bus got lost."""
FIRST_LOOK_S = 0.01
RECONNECT_FIRST_S = 0.1
RECONNECT_MAX_S = 10.0
BUS_WAIT_S = 10.0
"""How long a job waits for a bus that is away before it counts as not started."""
STOP_TIMEOUT_US = 5_000_000
"""Between SIGTERM and SIGKILL when the host shuts down; the agent's own kill does not wait."""
START_TIMEOUT_US = 30_000_000
JOURNAL_TIMEOUT_S = 10.0
LAST_WORDS_BYTES: Final = 4096
LAST_WORDS_S: Final = 2.0
JOURNAL_SYNC_TIMEOUT_S = 1.0
"""journald does not come to an end of it while a job floods it."""
COUNT_S = 1.0
"""How long a log is read on, only to count its bytes."""
SPAWN_FAILED = "641257651c1b4ec9a8624d7a40a9e1e7"
"""The journal's MESSAGE_ID of systemd when it could not execute a unit's program (systemd.journal-fields(7))."""

SYSTEMD_EXITS = range(200, 244)
ALL_RIGHT: Final = (
    [code for code in range(1, 256) if code not in SYSTEMD_EXITS],
    [number for number in range(1, 65) if number not in (signal.SIGSTOP, signal.SIGCONT)],
)
"""Exit codes and signals after which the unit stays "active (exited)", cgroup included, until its result is taken: all
but those by which systemd says that it could not run the program. An exit code is no failure of a unit here."""

PRIORITIES: Final[dict[LogStream, int]] = {"stdout": 6, "stderr": 5}
"""The journal's PRIORITY of what a job writes (info, notice); it tells the two streams apart."""
JOURNAL_SOCKET = "/run/systemd/journal/stdout"
SEARCH_PATH_VERSION = 250
"""The first systemd that looks a program up in directories of the unit's own (ExecSearchPath=)."""

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
_GONE = "its unit is gone: nobody knows how it ended"
_TRANSIENT = (
    "ServiceUnknown", "NameHasNoOwner", "NoReply", "Timeout", "TimedOut", "Disconnected", "NoServer", "Spawn.",
)  # fmt: skip
_OWN_FAULT = ("InvalidArgs", "PropertyReadOnly")


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
    return f"{_MANAGER_PATH}/unit/{escaped}"


def check_launch(launch: Launch) -> str:
    """Why a launch cannot be said over the bus, in a sentence; "" if it can.

    A string with a zero byte would end the connection to the bus, so nothing of the kind is ever sent.
    """
    if not launch.argv or not launch.argv[0]:
        return "its command is empty"
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


def open_journal(unit: str, stream: LogStream) -> socket.socket:
    """A stream of the journal for one of a job's two, as systemd opens it itself, but with a priority of its own.

    journald files each line under the unit of the process that wrote it, and where that has ended already, under the
    one named here, for only root may name one. Raises OSError.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        # With a queue that is full the answer comes at once, too.
        connection.setblocking(False)
        connection.connect(JOURNAL_SOCKET)
        # Identifier, unit, priority, whether "<N>" at a line's begin is one; not to syslog, kernel log and console.
        header = [unit.removesuffix(".service"), unit, str(PRIORITIES[stream]), "0", "0", "0", "0"]
        connection.sendall("".join(f"{line}\n" for line in header).encode())
        connection.shutdown(socket.SHUT_RD)
        # The job gets it as its standard output, which must wait when it is full.
        connection.setblocking(True)
    except BaseException:
        connection.close()
        raise
    return connection


def read_state(properties: Mapping[str, Any], seen: Mapping[str, Any]) -> UnitState:
    """The state from all properties of a unit, and from ``seen``: those that signals told while there was a unit."""
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
        problem = _GONE if state.is_gone else f"systemd ended its unit (result {state.result!r})"
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


def read_memory_files(cgroup: str, root: str = "/sys/fs/cgroup") -> tuple[int | None, int]:
    """(Peak of a cgroup's memory in bytes or None, processes killed for lack of it), as far as the kernel tells.

    systemd before 255 does not say, and removes the cgroup with its last process, so often there is nothing to read.
    ``root`` is where systemd itself mounts cgroups, always.
    """
    if not cgroup:
        return None, 0
    if os.path.exists(os.path.join(root, "cgroup.controllers")):
        folder, peak_name, events_name = os.path.join(root, cgroup), "memory.peak", "memory.events"
    else:
        folder, peak_name = os.path.join(root, "memory", cgroup), "memory.max_usage_in_bytes"
        events_name = "memory.oom_control"
    peak, kills = None, 0
    with contextlib.suppress(OSError, ValueError), open(os.path.join(folder, peak_name), encoding="ascii") as file:
        peak = int(file.read())
    with contextlib.suppress(OSError, ValueError), open(os.path.join(folder, events_name), encoding="ascii") as file:
        for line in file:
            name, _, value = line.partition(" ")
            if name == "oom_kill":
                kills = int(value)
    return peak, kills


def read_export(stream: IO[bytes]) -> Iterator[dict[bytes, bytes]]:
    """The entries of journalctl's export format: lines ``NAME=text``, or NAME, 8 bytes of length, bytes."""
    entry: dict[bytes, bytes] = {}
    while line := stream.readline():
        name, is_text, value = line.rstrip(b"\n").partition(b"=")
        if not name:
            if entry:
                yield entry
            entry = {}
        elif is_text:
            entry[name] = value
        else:
            entry[name] = stream.read(int.from_bytes(stream.read(8), "little"))
            stream.read(1)
    if entry:
        yield entry


_LINE_ENDS: Final = {b"line-max": b"", b"eof": b"", b"pid-change": b"", b"nul": b"\0"}
"""What stood at the end of a line in the journal (``_LINE_BREAK``); a line feed where it says nothing."""


class _BusAway(Exception):  # noqa: N818 - a state of the world, handled close by
    """No answer: the connection is lost, or systemd is not on the bus just now. The call may have been carried out."""


class _Refused(Exception):  # noqa: N818 - an answer, handled close by
    """The answer is an error: ``name`` without its first words, and systemd's sentence."""

    def __init__(self, name: str, text: str) -> None:
        super().__init__(f"{text} ({name})")
        self.name = name.rpartition(".")[2]
        self.text = text


class _Job:
    """One job as this run of the agent knows it; used by the executor's thread only."""

    __slots__ = (
        "job_id", "unit", "path", "argv", "changed", "seen", "asked", "running", "killed", "interrupted",
        "reloads",
    )  # fmt: skip

    def __init__(self, job_id: str) -> None:
        self.job_id = job_id
        self.unit = unit_name(job_id)
        self.path = unit_path(self.unit)
        self.argv: list[str] = []
        self.changed = asyncio.Event()
        self.seen: dict[str, Any] = {}
        self.asked = False
        self.running = False
        self.killed = False
        self.interrupted = False
        self.reloads = 0


class SystemdExecutor:
    """``Executor`` with systemd. One thread of its own talks to the bus; each job is a task there.

    ``cgroups`` is not used: systemd makes the cgroups.
    """

    def __init__(self, cgroups: JobCgroups) -> None:
        self._cgroups = cgroups
        self._events: collections.deque[Event] = collections.deque()
        self._fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        # What follows is of the executor's thread.
        self._bus: MessageBus | None = None
        self._jobs: dict[str, _Job] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._connected: asyncio.Event = asyncio.Event()
        self._version = 0
        self._root_cgroup = ""
        self._unknown: set[str] = set()

    # ---- called by the agent's thread

    def recover(self, job_ids: Iterable[str]) -> dict[str, Started]:
        """See ``Executor.recover``. Raises ExecutorError: no bus, no right to start units, no library for the bus."""
        if _MISSING:
            raise ExecutorError(
                f"executor.kind systemd needs the package dbus-fast ({_MISSING}); pip install dbus-fast"
            )
        self._start_thread()
        assert self._loop is not None
        future = asyncio.run_coroutine_threadsafe(self._recover(list(dict.fromkeys(job_ids))), self._loop)
        try:
            return future.result(RECOVER_S)
        except TimeoutError:
            self._stop_thread()
            raise ExecutorError(
                f"systemd does not answer on the system bus within {RECOVER_S:g} s; look at `systemctl status dbus`"
            ) from None
        except BaseException:
            self._stop_thread()
            raise

    def start(self, launch: Launch) -> None:
        """See ``Executor.start``. A job that is there already is left as it is."""
        try:
            unit_name(launch.job_id)
            problem = check_launch(launch)
        except ExecutorError as error:
            problem = str(error)
        if problem:
            self._emit(NotStarted(launch.job_id, problem))
        elif not self._post(self._begin, launch):
            self._emit(NotStarted(launch.job_id, "the executor is not connected to systemd", node_fault=True))

    def interrupt(self, job_id: str) -> None:
        """See ``Executor.interrupt``. A job that is just being started gets the signal as soon as it runs."""
        self._post(self._on_interrupt, job_id)

    def kill(self, job_id: str) -> None:
        """See ``Executor.kill``. A job that was not yet started then comes as ``NotStarted``."""
        self._post(self._on_kill, job_id)

    def poll(self) -> list[Event]:
        """See ``Executor.poll``."""
        with contextlib.suppress(OSError):
            os.eventfd_read(self._fd)
        events = []
        with contextlib.suppress(IndexError):
            while True:
                events.append(self._events.popleft())
        return events

    def fileno(self) -> int:
        """See ``Executor.fileno``; closed by ``close``."""
        return self._fd

    def close(self) -> None:
        """See ``Executor.close``."""
        self._stop_thread()
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def read_log(self, job_id: str, directory: str, stream: LogStream, tail_bytes: int) -> tuple[bytes, int]:
        """See ``Executor.read_log``; read from the journal, ``directory`` is not used.

        The total is of what the journal has, and of a log too long to be counted in 1 s only of its last
        part. The journal keeps neither empty lines nor blanks at the end of a line, and drops lines of a job that
        writes too many at once (journald.conf(5), RateLimitBurst=).
        """
        unit = unit_name(job_id)
        self._sync_journal()
        matches = [f"_SYSTEMD_UNIT={unit}", "_TRANSPORT=stdout", f"PRIORITY={PRIORITIES[stream]}"]
        try:
            content, total = self._read_tail(matches, tail_bytes)
            # Silent jobs have a log, too: systemd's own words about the unit show that it was here.
            if not total and not self._run_journalctl(["--lines=1", "--output=cat", f"UNIT={unit}"], JOURNAL_TIMEOUT_S):
                raise ExecutorError(f"the journal has nothing about job {job_id}: it never ran here, or is too old")
        except OSError as error:
            raise ExecutorError(f"journalctl cannot be run: {describe(error)}; install systemd's programs") from error
        except subprocess.TimeoutExpired:
            raise ExecutorError(
                f"journalctl did not end within {JOURNAL_TIMEOUT_S:g} s; a smaller journal is read faster "
                "(SystemMaxUse= in journald.conf)"
            ) from None
        return content, total

    # ---- the journal

    def _sync_journal(self) -> None:
        """What was written last may still lie in a socket; without an answer we read what is there."""
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            self._run_journalctl(["--sync"], JOURNAL_SYNC_TIMEOUT_S)

    @staticmethod
    def _run_journalctl(arguments: list[str], timeout_s: float) -> bytes:
        command = ["journalctl", "--quiet", "--no-pager", *arguments]
        done = subprocess.run(  # noqa: S603 - the arguments are ours
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=timeout_s, check=False
        )
        return done.stdout

    @staticmethod
    def _read_tail(matches: list[str], tail_bytes: int) -> tuple[bytes, int]:
        """The last bytes of what matches, read from its end, and how many there are in all."""
        command = ["journalctl", "--quiet", "--no-pager", "--all", "--reverse", "--output=export"]
        command += ["--output-fields=MESSAGE,_LINE_BREAK", *matches]
        pieces: list[bytes] = []
        total = 0
        enough_s = time.monotonic() + COUNT_S
        with subprocess.Popen(  # noqa: S603 - the arguments are ours
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        ) as process:
            late = threading.Event()

            def end() -> None:
                late.set()
                process.kill()

            timer = threading.Timer(JOURNAL_TIMEOUT_S, end)
            timer.start()
            try:
                assert process.stdout is not None
                for entry in read_export(process.stdout):
                    piece = entry.get(b"MESSAGE", b"") + _LINE_ENDS.get(entry.get(b"_LINE_BREAK", b""), b"\n")
                    if total < tail_bytes:
                        pieces.append(piece)
                    elif time.monotonic() > enough_s:
                        break
                    total += len(piece)
            finally:
                timer.cancel()
                process.kill()
        if late.is_set():
            raise subprocess.TimeoutExpired(command, JOURNAL_TIMEOUT_S)
        content = b"".join(reversed(pieces))
        return content[len(content) - tail_bytes :] if len(content) > tail_bytes else content, total

    # ---- the thread

    def _emit(self, event: Event) -> None:
        self._events.append(event)
        if self._fd >= 0:
            os.eventfd_write(self._fd, 1)

    def _post(self, function: Callable[..., None], *arguments: Any) -> bool:
        """Have the executor's thread call a function; False when there is no such thread."""
        loop = self._loop
        if loop is None:
            return False
        try:
            loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:  # it was closed
            return False
        return True

    def _start_thread(self) -> None:
        loop = asyncio.new_event_loop()

        def run() -> None:
            asyncio.set_event_loop(loop)
            try:
                loop.run_forever()
                loop.run_until_complete(self._shut_down())
            finally:
                loop.close()

        self._loop = loop
        self._thread = threading.Thread(target=run, name="systemd-executor", daemon=True)
        self._thread.start()

    def _stop_thread(self) -> None:
        loop, thread = self._loop, self._thread
        self._loop = self._thread = None
        if loop is None or thread is None:
            return
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(loop.stop)
        thread.join(2.0)

    async def _shut_down(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=1.0)
        bus, self._bus = self._bus, None
        if bus is not None:
            bus.disconnect()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.5):
                    await self._wait_for_disconnect(bus)

    @staticmethod
    async def _wait_for_disconnect(bus: MessageBus) -> None:
        """Until the connection is lost, for whatever reason; who stops waiting leaves the bus as it is."""
        waiting = asyncio.ensure_future(bus.wait_for_disconnect())  # type: ignore[no-untyped-call]
        with contextlib.suppress(Exception):
            await asyncio.shield(waiting)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._on_done)

    def _on_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("executor_task_failed", error=f"{type(error).__name__}: {error}", exc_info=error)

    # ---- the bus

    async def _connect(self) -> None:
        """Connect and ask for the signals. Raises ExecutorError."""
        bus = None
        try:
            bus = MessageBus(bus_type=BusType.SYSTEM, negotiate_unix_fd=True)
            async with asyncio.timeout(RECOVER_S / 2):
                await bus.connect()
            self._bus = bus
            bus.add_message_handler(self._on_message)
            await self._match("AddMatch", f"sender='{_BUS}',member='NameOwnerChanged',arg0='{_SYSTEMD}'")
            await self._match("AddMatch", f"sender='{_SYSTEMD}',interface='{_MANAGER}',member='Reloading'")
            for job in self._jobs.values():
                await self._match("AddMatch", self._rule(job))
            await self._subscribe()
            number = re.search(r"\d+", await self._ask_manager("Version"))
            self._version = int(number[0]) if number else 0
            self._root_cgroup = await self._ask_manager("ControlGroup")
        except Exception as error:
            # Whatever the library raises for a bus that is not there, or not well.
            self._bus = None
            if bus is not None:
                bus.disconnect()
            detail = describe(error) if isinstance(error, OSError) else str(error) or type(error).__name__
            raise ExecutorError(
                f"the system bus cannot be reached: {detail}; executor.kind systemd needs a host that runs systemd and "
                'dbus (look at `systemctl status dbus`), else set executor.kind = "cgroup"'
            ) from error
        self._connected.set()

    async def _keep_connected(self) -> None:
        while True:
            assert self._bus is not None
            await self._wait_for_disconnect(self._bus)
            self._bus = None
            self._connected.clear()
            _log.warning("bus_lost", advice="jobs go on; their ends are seen when the system bus is back")
            pause_s = RECONNECT_FIRST_S
            while not self._connected.is_set():
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, RECONNECT_MAX_S)
                with contextlib.suppress(ExecutorError):
                    await self._connect()
            _log.info("bus_back")
            self._look_at_all()

    async def _subscribe(self) -> None:
        # AlreadySubscribed is as good.
        with contextlib.suppress(_Refused):
            await self._manage("Subscribe")

    async def _resubscribe(self) -> None:
        with contextlib.suppress(_BusAway):
            await self._subscribe()
        self._look_at_all()

    def _look_at_all(self) -> None:
        for job in self._jobs.values():
            job.changed.set()

    @staticmethod
    def _rule(job: _Job) -> str:
        return f"sender='{_SYSTEMD}',interface='{_PROPERTIES}',member='PropertiesChanged',path='{job.path}'"

    async def _match(self, member: str, rule: str) -> None:
        await self._call(_BUS, "/org/freedesktop/DBus", _BUS, member, "s", [f"type='signal',{rule}"])

    def _on_message(self, message: Message) -> None:
        if message.message_type is not MessageType.SIGNAL:
            return
        if message.member == "PropertiesChanged":
            for job in self._jobs.values():
                if job.path == message.path:
                    job.seen.update({name: variant.value for name, variant in message.body[1].items()})
                    job.changed.set()
        elif message.member == "NameOwnerChanged" and message.body[0] == _SYSTEMD and message.body[2]:
            self._spawn(self._resubscribe())
        elif message.member == "Reloading" and message.body[0]:
            for job in self._jobs.values():
                job.reloads += 1
        elif message.member == "Reloading":
            self._look_at_all()

    async def _call(
        self,
        destination: str,
        path: str,
        interface: str,
        member: str,
        signature: str,
        body: list[Any],
        descriptors: Iterable[int] = (),
    ) -> list[Any]:
        """Call a method. Raises _BusAway or _Refused."""
        bus = self._bus
        if bus is None:
            raise _BusAway("not connected")
        try:
            message = Message(
                destination, path, interface, member, signature=signature, body=body, unix_fds=list(descriptors)
            )
            # Not wait_for: before Python 3.12 it can lose a cancellation.
            async with asyncio.timeout(CALL_TIMEOUT_S):
                reply = await bus.call(message)
        except (TypeError, ValueError) as error:
            # What cannot be put into a message.
            raise _Refused("InvalidArgs", str(error)) from error
        except Exception as error:
            raise _BusAway(str(error)) from error
        if reply is None:
            raise _BusAway("disconnected")
        if reply.message_type is MessageType.ERROR:
            name = reply.error_name or ""
            if name.removeprefix(f"{_BUS}.Error.").startswith(_TRANSIENT):
                raise _BusAway(name)
            raise _Refused(name, str(reply.body[0]) if reply.body else name)
        return list(reply.body)

    async def _ask_manager(self, name: str) -> str:
        """A property of systemd itself."""
        answer = await self._call(_SYSTEMD, _MANAGER_PATH, _PROPERTIES, "Get", "ss", [_MANAGER, name])
        return str(answer[0].value)

    async def _manage(self, member: str, signature: str = "", *body: Any) -> list[Any]:
        return await self._call(_SYSTEMD, _MANAGER_PATH, _MANAGER, member, signature, list(body))

    async def _insist(self, member: str, signature: str, *body: Any) -> None:
        """Call a method of systemd until there is an answer; that there is no such unit or process is as good."""
        while True:
            await self._connected.wait()
            try:
                await self._manage(member, signature, *body)
            except _BusAway:
                await asyncio.sleep(RECONNECT_FIRST_S)
            except _Refused as refused:
                _log.debug("systemd_refused", call=member, error=str(refused))
                return
            else:
                return

    async def _look(self, job: _Job) -> UnitState:
        """The state of a job's unit; waits while nobody answers."""
        while True:
            await self._connected.wait()
            try:
                body = await self._call(_SYSTEMD, job.path, _PROPERTIES, "GetAll", "s", [""])
            except _BusAway:
                await asyncio.sleep(RECONNECT_FIRST_S)
            except _Refused:
                # No such object.
                return read_state({}, job.seen)
            else:
                return read_state({name: variant.value for name, variant in body[0].items()}, job.seen)

    async def _until(self, job: _Job, condition: Callable[[UnitState], bool], *, soon: bool = False) -> UnitState:
        """Wait for a state of the unit; looks when it has changed or may have, and again and again if it comes soon."""
        pause_s = FIRST_LOOK_S
        while True:
            job.changed.clear()
            state = await self._look(job)
            if condition(state):
                return state
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s if soon else None):
                    await job.changed.wait()
            pause_s = min(2 * pause_s, LOOK_PERIOD_S)

    async def _list_units(self) -> dict[str, tuple[str, str]]:
        """Unit of a job -> its active state and its sub-state."""
        body = await self._manage("ListUnitsByPatterns", "asas", [], [f"{UNIT_PREFIX}*.service"])
        return {row[0]: (row[3], row[4]) for row in body[0] if (row[2], row[3]) != ("not-found", "inactive")}

    async def _watch(self) -> None:
        """Signals can get lost; a list of all units now and then shows what was missed."""
        while True:
            await asyncio.sleep(LOOK_PERIOD_S)
            mine = {job.unit for job in self._jobs.values()}
            try:
                units = await self._list_units()
            except (_BusAway, _Refused):
                continue
            for job in self._jobs.values():
                if not (job.running and units.get(job.unit) == ("active", "running")):
                    job.changed.set()
            # What ended and was forgotten while the list was made, is not unknown.
            self._care_for_unknown({unit: state for unit, state in units.items() if unit not in mine})

    # ---- jobs

    async def _recover(self, job_ids: list[str]) -> dict[str, Started]:
        self._connected = asyncio.Event()
        await self._connect()
        try:
            await self._check_rights()
            units = await self._list_units()
        except (_BusAway, _Refused) as error:
            raise ExecutorError(f"systemd does not answer on the system bus: {error}") from error
        self._spawn(self._keep_connected())
        self._spawn(self._watch())
        found = []
        for job_id in job_ids:
            if JOB_ID.fullmatch(job_id) is not None and unit_name(job_id) in units:
                found.append(self._add(job_id))
            else:
                self._emit(Ended(job_id, time.time(), problem=_GONE))
        self._care_for_unknown(units)
        started = await asyncio.gather(*(self._adopt(job) for job in found))
        return {one.job_id: one for one in started if one is not None}

    async def _check_rights(self) -> None:
        """Ask for a unit that systemd cannot accept: it refuses it in other words to those who have no right."""
        probe = [["CPUQuotaPerSecUSec", Variant("t", 0)]]
        try:
            await self._manage("StartTransientUnit", "ssa(sv)a(sa(sv))", "cpumond-rights.service", "fail", probe, [])
        except _Refused as refused:
            if refused.name in ("AccessDenied", "InteractiveAuthorizationRequired", "AuthFailed"):
                raise ExecutorError(
                    f"systemd does not let this user start units ({refused.text}); "
                    "run the agent as root: see systemd/executor.conf"
                ) from refused

    def _add(self, job_id: str) -> _Job:
        job = self._jobs[job_id] = _Job(job_id)
        return job

    async def _adopt(self, job: _Job) -> Started | None:
        """Take up a job of an earlier run; its ``Started`` if it lives, else its end comes from its task."""
        job.asked = True
        with contextlib.suppress(_BusAway, _Refused):
            await self._match("AddMatch", self._rule(job))
        try:
            async with asyncio.timeout(RECOVER_S / 3):
                state = await self._until(job, lambda s: bool(s.has_run) or s.is_over)
        except TimeoutError:
            self._spawn(self._follow(job))
            return None
        has_run = await self._has_run(job, state)
        job.running = has_run and not state.is_over
        self._spawn(self._follow(job, announced=has_run or state.is_gone))
        return Started(job.job_id, state.cgroup, state.started) if job.running else None

    def _care_for_unknown(self, units: dict[str, tuple[str, str]]) -> None:
        """Jobs that nobody asked for: told once, and removed when they have ended."""
        self._unknown &= units.keys()
        for unit in units.keys() - {job.unit for job in self._jobs.values()}:
            job_id = unit.removeprefix(UNIT_PREFIX).removesuffix(".service")
            if JOB_ID.fullmatch(job_id) is None:
                continue
            if unit not in self._unknown:
                _log.warning("unknown_job", job_id=job_id, unit=unit, state=" ".join(units[unit]))
                self._unknown.add(unit)
            if units[unit] != ("active", "running"):
                self._spawn(self._tidy_unknown(_Job(job_id)))

    async def _tidy_unknown(self, job: _Job) -> None:
        """Remove the unit of a job that nobody asked for, unless a process lives in it."""
        with contextlib.suppress(_BusAway, _Refused):
            state = await self._look(job)
            if state.is_over and not (await self._manage("GetUnitProcesses", "s", job.unit))[0]:
                await self._manage("StopUnit", "ss", job.unit, "replace")
                await self._manage("ResetFailedUnit", "s", job.unit)

    def _begin(self, launch: Launch) -> None:
        if launch.job_id in self._jobs:
            _log.warning("job_is_there", job_id=launch.job_id)
            return
        self._spawn(self._run(self._add(launch.job_id), launch))

    async def _run(self, job: _Job, launch: Launch) -> None:
        """The life of a job."""
        refused = await self._ask(job, launch)
        if refused is None:
            await self._follow(job)
        else:
            await self._forget(job)
            self._emit(refused)

    async def _ask(self, job: _Job, launch: Launch) -> NotStarted | None:
        """Have systemd start the unit; None when it said that it will."""
        user = launch.user
        if not user and os.geteuid() != 0:
            user = pwd.getpwuid(os.geteuid()).pw_name
        try:
            properties = unit_properties(launch, user, self._version)
        except ExecutorError as error:
            return NotStarted(job.job_id, str(error))
        deadline_s = time.monotonic() + BUS_WAIT_S
        again = False
        while True:
            if job.killed:
                return NotStarted(job.job_id, "it was killed before it was started")
            try:
                async with asyncio.timeout(max(0.0, deadline_s - time.monotonic())):
                    await self._connected.wait()
                await self._match("AddMatch", self._rule(job))
                job.asked = True
                job.argv = launch.argv
                await self._start_unit(job, properties)
            except TimeoutError:
                return NotStarted(job.job_id, f"the system bus is away for {BUS_WAIT_S:g} s", node_fault=True)
            except _BusAway:
                # It may have been heard all the same.
                again = True
                await asyncio.sleep(RECONNECT_FIRST_S)
                continue
            except _Refused as refused:
                if refused.name == "UnitExists" and again:
                    return None
                own_fault = refused.name in _OWN_FAULT
                return NotStarted(job.job_id, f"systemd refuses its unit: {refused.text}", node_fault=not own_fault)
            except OSError as error:
                problem = f"journald does not take what it writes: {JOURNAL_SOCKET}: {describe(error)}"
                return NotStarted(job.job_id, problem, node_fault=True)
            return None

    async def _start_unit(self, job: _Job, properties: list[tuple[str, str, Any]]) -> None:
        """Raises _BusAway, _Refused, and OSError when there is no journal."""
        with open_journal(job.unit, "stdout") as stdout, open_journal(job.unit, "stderr") as stderr:
            said = [[name, Variant(signature, value)] for name, signature, value in properties]
            # A descriptor is its number in the list of those that go with the message.
            said += [[f"Standard{name}FileDescriptor", Variant("h", n)] for n, name in enumerate(("Output", "Error"))]
            await self._call(
                _SYSTEMD,
                _MANAGER_PATH,
                _MANAGER,
                "StartTransientUnit",
                "ssa(sv)a(sa(sv))",
                [job.unit, "fail", said, []],
                [stdout.fileno(), stderr.fileno()],
            )

    async def _follow(self, job: _Job, *, announced: bool = False) -> None:
        """From systemd's promise to start the unit, to the end; ``announced``: the agent knows that it runs or ran."""
        state = await self._until(job, lambda s: bool(s.has_run) or s.is_over)
        damaged = await self._is_damaged(job, state)
        if damaged or not (announced or await self._has_run(job, state)):
            if damaged:
                problem = "systemd was reloaded while it was being started, and damaged its command; start it again"
                node_fault = True
                await self._kill_rest(job)
            elif job.killed:
                problem, node_fault = "it was killed before it was started", False
            else:
                problem, node_fault = explain_start_failure(state)
            await self._remove_unit(job)
            await self._forget(job)
            self._emit(NotStarted(job.job_id, problem, node_fault=node_fault))
            return
        job.running = True
        cgroup = state.cgroup or self._cgroup_of(job)
        if not announced:
            self._emit(Started(job.job_id, cgroup, state.started))
        if job.killed:
            self._spawn(self._signal(job, signal.SIGKILL))
        elif job.interrupted:
            self._spawn(self._signal(job, signal.SIGTERM))
        state = await self._until(job, lambda s: s.is_over)
        job.running = False
        await self._kill_rest(job)
        # Only now the counters are complete; once the unit is stopped they are gone.
        peak, oom_kills = read_memory_files(cgroup)
        totals = await self._look(job)
        await self._remove_unit(job)
        await self._forget(job)
        ended = make_ended(job.job_id, state, totals, peak, oom_kills)
        if ended.exit_code:
            ended = msgspec.structs.replace(ended, last_words=await self._read_last_words(job.job_id))
        self._emit(ended)

    async def _read_last_words(self, job_id: str) -> bytes:
        """The end of a failed job's stderr; nothing where the journal takes long to tell."""

        def read() -> bytes:
            try:
                return self.read_log(job_id, "", "stderr", LAST_WORDS_BYTES)[0]
            except ExecutorError:
                return b""

        try:
            return await asyncio.wait_for(asyncio.to_thread(read), LAST_WORDS_S)
        except TimeoutError:
            return b""

    def _cgroup_of(self, job: _Job) -> str:
        """Where the cgroup of a unit was that has none any more."""
        return f"{self._root_cgroup}/{SLICE_CGROUP}/{job.unit}".lstrip("/")

    async def _has_run(self, job: _Job, state: UnitState) -> bool:
        """Whether an exit status that systemd uses itself is the program's own: systemd logs each of its own."""
        if state.has_run is not None:
            return state.has_run
        matches = ["--lines=1", "--output=cat", f"MESSAGE_ID={SPAWN_FAILED}", f"UNIT={job.unit}"]

        def look() -> bytes:
            self._sync_journal()
            return self._run_journalctl(matches, JOURNAL_TIMEOUT_S)

        try:
            return not await asyncio.to_thread(look)
        except (OSError, subprocess.TimeoutExpired):
            return False

    async def _is_damaged(self, job: _Job, state: UnitState) -> bool:
        """Whether systemd ran another command than it was told.

        At a reload it reads its units from its own files; systemd 252 writes ``$`` and ``;`` there in a way that it
        reads back with a backslash. That does no harm to what runs, but to what is just going to. Where it cannot be
        told which came first, the answer is yes.
        """
        if not job.argv or not state.argv or job.argv == state.argv or not state.started:
            return False
        try:
            answer = await self._call(
                _SYSTEMD, _MANAGER_PATH, _PROPERTIES, "Get", "ss", [_MANAGER, "UnitsLoadTimestamp"]
            )
        except (_BusAway, _Refused):
            return True
        # The time is of the last reload; the bus keeps the order, so all those before the answer are counted.
        return job.reloads != 1 or state.started >= int(answer[0].value) / 1e6

    async def _kill_rest(self, job: _Job) -> None:
        """SIGKILL to all processes of a unit until there is none."""
        pause_s = 0.005
        while True:
            await self._connected.wait()
            try:
                processes = (await self._manage("GetUnitProcesses", "s", job.unit))[0]
            except _BusAway:
                processes = None
            except _Refused:
                return
            if processes is not None and not processes:
                return
            if processes:
                await self._signal(job, signal.SIGKILL)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, 1.0)

    async def _remove_unit(self, job: _Job) -> None:
        """Leave nothing of the unit: neither its cgroup nor its result."""
        await self._insist("StopUnit", "ss", job.unit, "replace")
        # The last change of a unit that is removed with it may come without a signal.
        state = await self._until(job, lambda s: s.active in ("inactive", "failed") and not s.queued, soon=True)
        if not state.is_gone:
            await self._insist("ResetFailedUnit", "s", job.unit)

    async def _forget(self, job: _Job) -> None:
        del self._jobs[job.job_id]
        with contextlib.suppress(_BusAway, _Refused):
            await self._match("RemoveMatch", self._rule(job))

    async def _signal(self, job: _Job, number: int) -> None:
        await self._insist("KillUnit", "ssi", job.unit, "all", number)

    def _on_interrupt(self, job_id: str) -> None:
        job = self._jobs.get(job_id)
        if job is None:
            return
        first, job.interrupted = not job.interrupted, True
        if job.running and first:
            self._spawn(self._signal(job, signal.SIGTERM))

    def _on_kill(self, job_id: str) -> None:
        job = self._jobs.get(job_id)
        if job is None:
            return
        # What is not yet there to be hit, is hit when it runs.
        job.killed = True
        if job.asked:
            self._spawn(self._signal(job, signal.SIGKILL))
