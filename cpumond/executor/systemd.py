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
RECONNECT_FIRST_S = 0.1
RECONNECT_MAX_S = 10.0
BUS_WAIT_S = 10.0
"""How long a job waits for a bus that is away before it counts as not started."""
STOP_TIMEOUT_US = 5_000_000
"""Between SIGTERM and SIGKILL when the host shuts down; the agent's own kill does not wait."""
START_TIMEOUT_US = 30_000_000
JOURNAL_TIMEOUT_S = 10.0
JOURNAL_SYNC_TIMEOUT_S = 3.0

ALL_RIGHT: Final = (
    [*range(1, 200), *range(244, 256)],
    [number for number in range(1, 65) if number not in (signal.SIGSTOP, signal.SIGCONT)],
)
"""Exit codes and signals after which the unit stays "active (exited)", cgroup included, until its result is taken: all
but those by which systemd says that it could not run the program. An exit code is no failure of a unit here."""

PRIORITIES: Final[dict[LogStream, str]] = {"stdout": "info", "stderr": "notice"}
_PRIORITY_NUMBERS: Final[dict[LogStream, int]] = {"stdout": 6, "stderr": 5}

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

# Run as the job's user in its directory before the job, so that a wrong program is known before the job counts as
# started: the agent itself may neither see nor enter what the job's user can.
_FIND_PROGRAM = f"""\
set -f
can_run() {{ [ -f "$1" ] && [ -x "$1" ]; }}
case $1 in
*/*) can_run "$1" && exit 0 ;;
*) IFS=:; for d in $PATH; do can_run "${{d:-.}}/$1" && exit 0; done ;;
esac
exit {EXIT_EXEC}
"""

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
    check_code: int
    check_status: int
    cpu_seconds: float | None
    max_memory: int | None
    user: str
    directory: str
    program: str

    @property
    def was_active(self) -> bool:
        """The program was executed, whatever became of it."""
        return self.active_since > 0.0

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


def unit_properties(launch: Launch, cat: str, user: str) -> list[tuple[str, str, Any]]:
    """(name, D-Bus signature, value) of the unit of a job; ``cat`` is systemd-cat's path, ``user`` "" is root."""
    unit = unit_name(launch.job_id)
    # The unit's own settings can give both streams to one connection of journald only; this program connects each,
    # with a priority of its own, and becomes the job.
    streams = [f"--priority={PRIORITIES['stdout']}", f"--stderr-priority={PRIORITIES['stderr']}"]
    command = [cat, f"--identifier={unit.removesuffix('.service')}", *streams, "--level-prefix=false", "--"]
    plain = ["no-env-expand"]
    properties: list[tuple[str, str, Any]] = [
        ("Description", "s", f"Job {launch.job_id} of cpumond"),
        ("Slice", "s", SLICE),
        ("Type", "s", "exec"),
        ("ExecStartPreEx", "a(sasas)", [["/bin/sh", ["/bin/sh", "-c", _FIND_PROGRAM, "sh", launch.argv[0]], plain]]),
        ("ExecStartEx", "a(sasas)", [[cat, [*command, *launch.argv], plain]]),
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
        ("OOMPolicy", "s", "kill"),
        ("KillMode", "s", "control-group"),
        ("SendSIGKILL", "b", True),
        ("TimeoutStartUSec", "t", START_TIMEOUT_US),
        ("TimeoutStopUSec", "t", STOP_TIMEOUT_US),
        # A pipeline in a shell relies on it; systemd's own default is for daemons.
        ("IgnoreSIGPIPE", "b", False),
        ("StandardInput", "s", "null"),
        ("StandardOutput", "s", "journal"),
        ("StandardError", "s", "journal"),
        ("SyslogLevelPrefix", "b", False),
    ]
    if launch.memory_limit > 0:
        properties += [("MemoryMax", "t", launch.memory_limit), ("MemorySwapMax", "t", 0)]
    if user:
        properties += [("User", "s", user)]
    return properties


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

    check = (properties.get("ExecStartPre") or [[]])[0]
    arguments = (properties.get("ExecStartPre") or [["", [""]]])[0][1]
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
        check_code=int(check[8]) if len(check) == 10 else 0,
        check_status=int(check[9]) if len(check) == 10 else 0,
        cpu_seconds=None if cpu_ns is None else cpu_ns / 1e9,
        max_memory=counter("MemoryPeak"),
        user=str(properties.get("User") or "root"),
        directory=str(properties.get("WorkingDirectory") or "/"),
        program=str(arguments[-1]) if arguments else "",
    )


def explain_start_failure(state: UnitState) -> tuple[str, bool]:
    """Why a unit did not become active, in a sentence, and whether that is the node's fault."""
    if state.check_code:
        code, status = state.check_code, state.check_status
    else:
        code, status = state.main_code, state.main_status
    if code == 0:
        if state.is_gone:
            return "its unit was stopped before it ran", False
        return f"systemd could not start its unit (result {state.result!r})", True
    if code != _CLD_EXITED:
        return f"signal {status} ended it before its program ran", False
    own = {
        EXIT_CHDIR: f"there is no working directory {state.directory} that user {state.user} may enter",
        EXIT_EXEC: f"there is no program {state.program!r} that user {state.user} may run",
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

    For systemd before 255, which does not say; ``root`` is where systemd itself mounts cgroups, always.
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

    __slots__ = ("job_id", "unit", "path", "changed", "seen", "asked", "running", "killed", "interrupted")

    def __init__(self, job_id: str) -> None:
        self.job_id = job_id
        self.unit = unit_name(job_id)
        self.path = unit_path(self.unit)
        self.changed = asyncio.Event()
        self.seen: dict[str, Any] = {}
        self.asked = False
        self.running = False
        self.killed = False
        self.interrupted = False


class SystemdExecutor:
    """``Executor`` with systemd. One thread of its own talks to the bus; each job is a task there.

    ``cgroups`` is not used: systemd makes the cgroups.
    """

    def __init__(self, cgroups: JobCgroups) -> None:
        self._cgroups = cgroups
        self._cat = shutil.which("systemd-cat") or "/usr/bin/systemd-cat"
        self._events: collections.deque[Event] = collections.deque()
        self._fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        # What follows is of the executor's thread.
        self._bus: MessageBus | None = None
        self._jobs: dict[str, _Job] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._connected: asyncio.Event = asyncio.Event()

    # ---- called by the agent's thread

    def recover(self, job_ids: Iterable[str]) -> dict[str, Started]:
        """See ``Executor.recover``. Raises ExecutorError: no bus, no right to start units, no library for the bus."""
        if _MISSING:
            raise ExecutorError(
                f"executor.kind systemd needs the package dbus-fast ({_MISSING}); pip install 'cpumond[systemd]'"
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

        The total is what was read: more than the tail when there is more, but not all of it. The journal keeps neither
        empty lines nor blanks at the end of a line, and drops lines of a job that writes too many at once
        (journald.conf(5), RateLimitBurst=).
        """
        unit = unit_name(job_id)
        # What a job wrote last may still lie in its socket; without an answer we read what is there.
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            self._run_journalctl(["--sync"], JOURNAL_SYNC_TIMEOUT_S)
        mine = [f"_SYSTEMD_UNIT={unit}", "_TRANSPORT=stdout", f"PRIORITY={_PRIORITY_NUMBERS[stream]}"]
        # Why systemd-cat could not become the job's program, is said in its own name.
        cat = ["+", f"_SYSTEMD_UNIT={unit}", "_TRANSPORT=journal", "SYSLOG_IDENTIFIER=systemd-cat"]
        try:
            content, total = self._read_tail(mine + (cat if stream == "stderr" else []), tail_bytes)
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

    @staticmethod
    def _run_journalctl(arguments: list[str], timeout_s: float) -> bytes:
        command = ["journalctl", "--quiet", "--no-pager", *arguments]
        done = subprocess.run(  # noqa: S603 - the arguments are ours
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=timeout_s, check=False
        )
        return done.stdout

    @staticmethod
    def _read_tail(matches: list[str], tail_bytes: int) -> tuple[bytes, int]:
        """The last bytes of what matches, read from its end and no further than needed."""
        command = ["journalctl", "--quiet", "--no-pager", "--all", "--reverse", "--output=export"]
        command += ["--output-fields=MESSAGE,_LINE_BREAK", *matches]
        pieces: list[bytes] = []
        total = 0
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
                    pieces.append(piece)
                    total += len(piece)
                    if total > tail_bytes:
                        break
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
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._bus is not None:
            self._bus.disconnect()
            with contextlib.suppress(Exception):
                await asyncio.wait_for(self._bus.wait_for_disconnect(), 1.0)  # type: ignore[no-untyped-call]

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # ---- the bus

    async def _connect(self) -> None:
        """Connect and ask for the signals. Raises ExecutorError."""
        bus = None
        try:
            bus = MessageBus(bus_type=BusType.SYSTEM)
            await asyncio.wait_for(bus.connect(), RECOVER_S / 2)
            self._bus = bus
            bus.add_message_handler(self._on_message)
            await self._match("AddMatch", f"sender='{_BUS}',member='NameOwnerChanged',arg0='{_SYSTEMD}'")
            await self._match("AddMatch", f"sender='{_SYSTEMD}',interface='{_MANAGER}',member='Reloading'")
            for job in self._jobs.values():
                await self._match("AddMatch", self._rule(job))
            await self._subscribe()
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
            with contextlib.suppress(Exception):
                await self._bus.wait_for_disconnect()  # type: ignore[no-untyped-call]
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
        elif message.member == "Reloading" and not message.body[0]:
            self._look_at_all()

    async def _call(
        self, destination: str, path: str, interface: str, member: str, signature: str, body: list[Any]
    ) -> list[Any]:
        """Call a method. Raises _BusAway or _Refused."""
        bus = self._bus
        if bus is None:
            raise _BusAway("not connected")
        try:
            message = Message(destination, path, interface, member, signature=signature, body=body)
            reply = await asyncio.wait_for(bus.call(message), CALL_TIMEOUT_S)
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

    async def _until(self, job: _Job, condition: Callable[[UnitState], bool]) -> UnitState:
        """Wait for a state of the unit; looks when it has changed, or may have."""
        while True:
            job.changed.clear()
            state = await self._look(job)
            if condition(state):
                return state
            await job.changed.wait()

    async def _list_units(self) -> dict[str, tuple[str, str]]:
        """Unit of a job -> its active state and its sub-state."""
        body = await self._manage("ListUnitsByPatterns", "asas", [], [f"{UNIT_PREFIX}*.service"])
        return {row[0]: (row[3], row[4]) for row in body[0] if (row[2], row[3]) != ("not-found", "inactive")}

    async def _watch(self) -> None:
        """Signals can get lost; a list of all units now and then shows what was missed."""
        while True:
            await asyncio.sleep(LOOK_PERIOD_S)
            try:
                units = await self._list_units()
            except (_BusAway, _Refused):
                continue
            for job in self._jobs.values():
                if not (job.running and units.get(job.unit) == ("active", "running")):
                    job.changed.set()

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
        mine = {job.unit for job in found}
        for unit in sorted(units.keys() - mine):
            job_id = unit.removeprefix(UNIT_PREFIX).removesuffix(".service")
            _log.warning("unknown_job", job_id=job_id, unit=unit, state=" ".join(units[unit]))
            if units[unit] != ("active", "running") and JOB_ID.fullmatch(job_id) is not None:
                self._spawn(self._tidy_unknown(_Job(job_id)))
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
            state = await asyncio.wait_for(self._until(job, lambda s: s.was_active or s.is_over), RECOVER_S / 3)
        except TimeoutError:
            self._spawn(self._follow(job))
            return None
        self._spawn(self._follow(job, announced=True))
        if state.is_over:
            return None
        return Started(job.job_id, state.cgroup, state.started)

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
        properties = [[n, Variant(signature, v)] for n, signature, v in unit_properties(launch, self._cat, user)]
        deadline_s = time.monotonic() + BUS_WAIT_S
        again = False
        while True:
            if job.killed:
                return NotStarted(job.job_id, "it was killed before it was started")
            try:
                await asyncio.wait_for(self._connected.wait(), max(0.0, deadline_s - time.monotonic()))
                await self._match("AddMatch", self._rule(job))
                job.asked = True
                await self._manage("StartTransientUnit", "ssa(sv)a(sa(sv))", job.unit, "fail", properties, [])
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
            return None

    async def _follow(self, job: _Job, *, announced: bool = False) -> None:
        """From systemd's promise to start the unit, to the end; ``announced``: the agent knows that it runs or ran."""
        state = await self._until(job, lambda s: s.was_active or s.is_over)
        if not (state.was_active or announced):
            if job.killed:
                problem, node_fault = "it was killed before it was started", False
            else:
                problem, node_fault = explain_start_failure(state)
            await self._remove_unit(job)
            await self._forget(job)
            self._emit(NotStarted(job.job_id, problem, node_fault=node_fault))
            return
        job.running = True
        if not announced:
            self._emit(Started(job.job_id, state.cgroup, state.started))
        if job.killed:
            self._spawn(self._signal(job, signal.SIGKILL))
        elif job.interrupted:
            self._spawn(self._signal(job, signal.SIGTERM))
        cgroup = state.cgroup
        state = await self._until(job, lambda s: s.is_over)
        job.running = False
        await self._kill_rest(job)
        # Only now the counters are complete; once the unit is stopped they are gone.
        peak, oom_kills = read_memory_files(cgroup)
        totals = await self._look(job)
        await self._remove_unit(job)
        await self._forget(job)
        self._emit(make_ended(job.job_id, state, totals, peak, oom_kills))

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
        state = await self._until(job, lambda s: s.active in ("inactive", "failed") and not s.queued)
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
        job.killed = True
        if job.asked:
            self._spawn(self._kill(job))

    async def _kill(self, job: _Job) -> None:
        if not job.running:
            await self._insist("StopUnit", "ss", job.unit, "replace")
        await self._signal(job, signal.SIGKILL)
