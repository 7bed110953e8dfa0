"""The executor itself. Each job is followed by one task; all tasks run in one thread."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pwd
import signal
import threading
import time
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, Final

import msgspec
import structlog

from cpumond.core.errors import CpumondError, describe
from cpumond.core.wire import LogStream
from cpumond.host.cgroup.job_tree import JobCgroupTree
from cpumond.host.executor.model import (
    KILLED_BEFORE,
    LAST_WORDS_BYTES,
    Ended,
    Event,
    EventQueue,
    Executor,
    ExecutorError,
    Launch,
    NotStarted,
    Started,
)
from cpumond.host.executor.systemd.bus import SystemdBus, explain
from cpumond.host.executor.systemd.idle import SEE, IdleSlice
from cpumond.host.executor.systemd.journal import JOURNAL_SOCKET, has_spawn_failure, open_journal, read_log
from cpumond.host.executor.systemd.secrets import SecretFiles, find_problem
from cpumond.host.executor.systemd.unit import (
    GONE,
    JOB_ID,
    UNIT_PREFIX,
    UnitState,
    check_launch,
    explain_start_failure,
    make_ended,
    read_state,
    unit_name,
    unit_path,
    unit_properties,
)
from cpumond.host.systemd.connection import DENIED, MANAGER, PROPERTIES, RECONNECT_FIRST_S, SYSTEMD, BusAway, Refused

log = structlog.get_logger()

RECOVER_S = 9.0
LIST_PERIOD_S = 5.0
"""Seconds after which all units are listed again, in case a bus signal was lost."""
FIRST_READ_S = 0.01
BUS_WAIT_S = 10.0
"""Seconds for which the start of a job waits for a lost bus; then the job counts as not started."""
LAST_WORDS_S: Final = 2.0
_OWN_FAULT = ("InvalidArgs", "PropertyReadOnly")


class _Job:
    """One job in this run of the agent; used only by the executor's thread."""

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
        self.interruption: tuple[int, str] | None = None
        """The signal that interrupts the job, and systemd's word for the processes that receive the signal."""
        self.reloads = 0


class SystemdExecutor(Executor):
    """Talks to the bus in its own thread, where each job is a task.

    ``cgroups`` only reads counters: systemd creates the cgroups. ``runtime_dir`` holds secrets of starting jobs."""

    def __init__(self, cgroups: JobCgroupTree, runtime_dir: str) -> None:
        self._cgroups = cgroups
        self._secrets = SecretFiles(runtime_dir)
        self._events = EventQueue()
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        # The following attributes are used only by the executor's thread.
        self._bus = SystemdBus(self._on_signal)
        self._idle: IdleSlice | None = None
        self._jobs: dict[str, _Job] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._orphans: set[str] = set()
        """Units of jobs that the agent does not know; each is logged once."""

    def recover(self, job_ids: Iterable[str]) -> dict[str, Started]:
        """Find the jobs of an earlier run. Raises ExecutorError without a bus, or the right to start units."""
        self._start_thread()
        assert self._loop is not None
        future = asyncio.run_coroutine_threadsafe(self._recover(list(dict.fromkeys(job_ids))), self._loop)
        try:
            return future.result(RECOVER_S)
        except TimeoutError:
            self._stop_thread()
            raise ExecutorError(
                f"systemd does not respond on the system bus within {RECOVER_S:g} s; see `systemctl status dbus`"
            ) from None
        except BaseException:
            self._stop_thread()
            raise

    def start(self, launch: Launch) -> None:
        """Start a job; if a job with this id exists already, leave it as it is."""
        try:
            unit_name(launch.job_id)
            problem = check_launch(launch) or find_problem(launch.secrets)
        except ExecutorError as error:
            problem = str(error)
        if problem:
            self._events.add(NotStarted(launch.job_id, problem))
        elif not self._post(self._begin, launch):
            self._events.add(NotStarted(launch.job_id, "the executor is not connected to systemd", node_fault=True))

    def interrupt(self, job_id: str, number: int = signal.SIGTERM, first_only: bool = False) -> None:
        """Interrupt a job; if it is still being started, it gets the signal as soon as it runs."""
        self._post(self._on_interrupt, job_id, number, "main" if first_only else "all")

    def kill(self, job_id: str) -> None:
        """Kill a job. If it was not started yet, ``poll`` will return ``NotStarted`` for it."""
        self._post(self._on_kill, job_id)

    def poll(self) -> list[Event]:
        self._events.drain()
        return self._events.take()

    def fileno(self) -> int:
        return self._events.fd

    def close(self) -> None:
        self._stop_thread()
        self._events.close()

    def read_log(self, job_id: str, directory: str, stream: LogStream, tail_bytes: int) -> tuple[bytes, int]:
        return read_log(job_id, stream, tail_bytes)

    def _post(self, function: Callable[..., None], *arguments: Any) -> bool:
        """Let the executor's thread call a function; return False if there is no such thread."""
        loop = self._loop
        if loop is None:
            return False
        try:
            loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:  # the loop was closed
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
        await self._bus.close()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._on_done)

    def _on_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("executor_task_failed", error=f"{type(error).__name__}: {error}", exc_info=error)

    def _on_signal(self, member: str, path: str, body: list[Any]) -> None:
        if member == "PropertiesChanged":
            for job in self._jobs.values():
                if job.path == path:
                    job.seen.update({name: variant.value for name, variant in body[1].items()})
                    job.changed.set()
        elif member == "NameOwnerChanged" and body[0] == SYSTEMD and body[2]:
            self._spawn(self._resubscribe())
        elif member == "Reloading" and body[0]:
            for job in self._jobs.values():
                job.reloads += 1
        elif member == "Reloading":
            self._mark_all_changed()

    async def _resubscribe(self) -> None:
        with contextlib.suppress(BusAway):
            await self._bus.connection.subscribe()
        self._mark_all_changed()

    def _mark_all_changed(self) -> None:
        for job in self._jobs.values():
            job.changed.set()

    async def _read_state(self, job: _Job) -> UnitState:
        """Return the state of a job's unit; wait while the bus is down."""
        try:
            body = await self._bus.call_until_answered("GetAll", "s", "", path=job.path, interface=PROPERTIES)
        except Refused:
            # There is no such object.
            return read_state({}, job.seen)
        return read_state({name: variant.value for name, variant in body[0].items()}, job.seen)

    async def _wait_for_state(
        self, job: _Job, condition: Callable[[UnitState], bool], *, soon: bool = False
    ) -> UnitState:
        """Wait for a state of the unit. Read it after possible changes and, if ``soon``, also at growing intervals."""
        pause_s = FIRST_READ_S
        while True:
            job.changed.clear()
            state = await self._read_state(job)
            if condition(state):
                return state
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s if soon else None):
                    await job.changed.wait()
            pause_s = min(2 * pause_s, LIST_PERIOD_S)

    async def _list_units(self) -> dict[str, tuple[str, str]]:
        """Return a map from the unit of each job to its active state and its sub-state."""
        body = await self._bus.call("ListUnitsByPatterns", "asas", [], [f"{UNIT_PREFIX}*.service"])
        return {row[0]: (row[3], row[4]) for row in body[0] if (row[2], row[3]) != ("not-found", "inactive")}

    async def _watch(self) -> None:
        """List all units every LIST_PERIOD_S, because signals can get lost."""
        while True:
            await asyncio.sleep(LIST_PERIOD_S)
            known = {job.unit for job in self._jobs.values()}
            try:
                units = await self._list_units()
            except (BusAway, Refused):
                continue
            for job in self._jobs.values():
                if not (job.running and units.get(job.unit) == ("active", "running")):
                    job.changed.set()
            # ``known`` is from before the list: a job that was forgotten while the list was made is not an orphan.
            self._reap_orphan_units({unit: state for unit, state in units.items() if unit not in known})

    async def _recover(self, job_ids: list[str]) -> dict[str, Started]:
        self._bus = SystemdBus(self._on_signal)
        await self._bus.connect()
        self._idle = IdleSlice(self._bus, self._cgroups.hierarchies)
        try:
            await self._check_rights()
            units = await self._list_units()
        except (BusAway, Refused) as error:
            raise ExecutorError(explain(error)) from error
        self._spawn(self._bus.keep_connected(self._mark_all_changed))
        self._spawn(self._watch())
        found = []
        for job_id in job_ids:
            if JOB_ID.fullmatch(job_id) is not None and unit_name(job_id) in units:
                found.append(self._add(job_id))
            else:
                self._events.add(Ended(job_id, time.time(), problem=GONE))
        self._reap_orphan_units(units)
        self._secrets.keep({job.job_id for job in found})
        started = await asyncio.gather(*(self._adopt(job) for job in found))
        return {one.job_id: one for one in started if one is not None}

    async def _check_rights(self) -> None:
        """Ask for an invalid unit: by its error, systemd shows whether the right to start units is missing."""
        try:
            await self._bus.start_unit("cpumond-rights.service", [("CPUQuotaPerSecUSec", "t", 0)])
        except Refused as refused:
            if refused.name in DENIED:
                raise ExecutorError(
                    f"systemd does not let this user start units ({refused.text}); run the agent as root: {SEE}"
                ) from refused

    def _add(self, job_id: str) -> _Job:
        job = self._jobs[job_id] = _Job(job_id)
        return job

    async def _adopt(self, job: _Job) -> Started | None:
        """Adopt a job of an earlier run. Return ``Started`` if the job lives; if not, its task will report its end."""
        job.asked = True
        with contextlib.suppress(BusAway, Refused):
            await self._bus.follow(job.path)
        try:
            async with asyncio.timeout(RECOVER_S / 3):
                state = await self._wait_for_state(job, lambda s: bool(s.has_run) or s.is_over)
        except TimeoutError:
            self._spawn(self._follow(job))
            return None
        has_run = await self._has_run(job, state)
        job.running = has_run and not state.is_over
        self._spawn(self._follow(job, announced=has_run or state.is_gone))
        return Started(job.job_id, state.cgroup, state.started) if job.running else None

    def _reap_orphan_units(self, units: dict[str, tuple[str, str]]) -> None:
        """Log each job that the agent does not know once, and remove those that have ended."""
        self._orphans &= units.keys()
        for unit in units.keys() - {job.unit for job in self._jobs.values()}:
            job_id = unit.removeprefix(UNIT_PREFIX).removesuffix(".service")
            if JOB_ID.fullmatch(job_id) is None:
                continue
            if unit not in self._orphans:
                log.warning("unknown_job", job_id=job_id, unit=unit, state=" ".join(units[unit]))
                self._orphans.add(unit)
            if units[unit] != ("active", "running"):
                self._spawn(self._remove_orphan(_Job(job_id)))

    async def _remove_orphan(self, job: _Job) -> None:
        """Remove the unit of a job that the agent does not know, unless it contains a process."""
        with contextlib.suppress(BusAway, Refused):
            state = await self._read_state(job)
            if state.is_over and not (await self._bus.call("GetUnitProcesses", "s", job.unit))[0]:
                await self._bus.call("StopUnit", "ss", job.unit, "replace")
                await self._bus.call("ResetFailedUnit", "s", job.unit)

    def _begin(self, launch: Launch) -> None:
        if launch.job_id in self._jobs:
            log.warning("job_is_there", job_id=launch.job_id)
            return
        self._spawn(self._run(self._add(launch.job_id), launch))

    async def _run(self, job: _Job, launch: Launch) -> None:
        refused = await self._request_unit(job, launch)
        if refused is None:
            await self._follow(job)
        else:
            self._secrets.remove(job.job_id)
            await self._forget(job)
            self._events.add(refused)

    async def _request_unit(self, job: _Job, launch: Launch) -> NotStarted | None:
        """Ask systemd to start the unit; return None if systemd accepts."""
        user = launch.user
        if not user and os.geteuid() != 0:
            user = pwd.getpwuid(os.geteuid()).pw_name
        try:
            properties = unit_properties(launch, user, self._bus.version)
            if launch.secrets:
                path = self._secrets.write(job.job_id, launch.secrets)
                properties.append(("EnvironmentFiles", "a(sb)", [[path, False]]))
        except ExecutorError as error:
            return NotStarted(job.job_id, str(error))
        except OSError as error:
            problem = f"its secrets cannot be passed to systemd: {error.filename}: {describe(error)}"
            return NotStarted(job.job_id, problem, node_fault=True)
        deadline_s = time.monotonic() + BUS_WAIT_S
        again = False
        while True:
            if job.killed:
                return NotStarted(job.job_id, KILLED_BEFORE)
            try:
                async with asyncio.timeout(max(0.0, deadline_s - time.monotonic())):
                    await self._bus.connected.wait()
                if launch.reclaimed:
                    assert self._idle is not None
                    await self._idle.hold()
                await self._bus.follow(job.path)
                job.asked = True
                job.argv = launch.argv
                await self._start_unit(job, properties)
            except CpumondError as error:
                return NotStarted(job.job_id, str(error), node_fault=True)
            except TimeoutError:
                return NotStarted(job.job_id, f"the system bus has been down for {BUS_WAIT_S:g} s", node_fault=True)
            except BusAway:
                # systemd may have started the unit nevertheless.
                again = job.asked
                await asyncio.sleep(RECONNECT_FIRST_S)
                continue
            except Refused as refused:
                if refused.name == "UnitExists" and again:
                    return None
                own_fault = refused.name in _OWN_FAULT
                return NotStarted(job.job_id, f"systemd refuses its unit: {refused.text}", node_fault=not own_fault)
            except OSError as error:
                problem = f"journald does not accept its output: {JOURNAL_SOCKET}: {describe(error)}"
                return NotStarted(job.job_id, problem, node_fault=True)
            return None

    async def _start_unit(self, job: _Job, properties: list[tuple[str, str, Any]]) -> None:
        """Start the unit. Raises BusAway, Refused, and OSError if there is no journal."""
        with open_journal(job.unit, "stdout") as stdout, open_journal(job.unit, "stderr") as stderr:
            # A descriptor is named by its index in the list of descriptors that are sent with the message.
            streams = [("StandardOutputFileDescriptor", "h", 0), ("StandardErrorFileDescriptor", "h", 1)]
            await self._bus.start_unit(job.unit, [*properties, *streams], [stdout.fileno(), stderr.fileno()])

    async def _follow(self, job: _Job, *, announced: bool = False) -> None:
        """Follow a unit from the moment when systemd accepted its start until its end. ``announced``: the agent already
        knows that the job runs or ran."""
        state = await self._wait_for_state(job, lambda s: bool(s.has_run) or s.is_over)
        self._secrets.remove(job.job_id)
        damaged = await self._is_damaged(job, state)
        if damaged or not (announced or await self._has_run(job, state)):
            if damaged:
                problem = "systemd was reloaded while it was being started, and damaged its command; submit it again"
                node_fault = True
                await self._kill_rest(job)
            elif job.killed:
                problem, node_fault = KILLED_BEFORE, False
            else:
                problem, node_fault = explain_start_failure(state)
            await self._remove_unit(job)
            await self._forget(job)
            self._events.add(NotStarted(job.job_id, problem, node_fault=node_fault))
            return
        job.running = True
        # If the unit's cgroup is gone already, use the path that it had.
        cgroup = state.cgroup or f"{self._bus.root_cgroup}/{state.slice_cgroup}/{job.unit}".lstrip("/")
        if not announced:
            self._events.add(Started(job.job_id, cgroup, state.started))
        if job.killed:
            self._spawn(self._signal(job, signal.SIGKILL))
        elif job.interruption is not None:
            self._spawn(self._signal(job, *job.interruption))
        state = await self._wait_for_state(job, lambda s: s.is_over)
        job.running = False
        await self._kill_rest(job)
        # The counters are complete only now, and they will be gone once the unit is stopped.
        peak, oom_kills = self._cgroups.read_memory_peak(cgroup)
        totals = await self._read_state(job)
        await self._remove_unit(job)
        await self._forget(job)
        ended = make_ended(job.job_id, state, totals, peak, oom_kills)
        if ended.exit_code:
            last_words, stderr_size = await self._read_last_words(job.job_id)
            ended = msgspec.structs.replace(ended, last_words=last_words, stderr_size=stderr_size)
        self._events.add(ended)

    async def _read_last_words(self, job_id: str) -> tuple[bytes, int | None]:
        """Return the end and the size of a failed job's stderr; (b"", None) if the journal is slow.

        Only for failed jobs, because reading the journal costs two more processes per job."""
        reading = asyncio.to_thread(read_log, job_id, "stderr", LAST_WORDS_BYTES)
        try:
            return await asyncio.wait_for(reading, LAST_WORDS_S)
        except (ExecutorError, TimeoutError):
            return b"", None

    async def _has_run(self, job: _Job, state: UnitState) -> bool:
        """Return whether the program has run; if its exit status may be systemd's own, the journal tells."""
        if state.has_run is not None:
            return state.has_run
        return not await asyncio.to_thread(has_spawn_failure, job.unit)

    async def _is_damaged(self, job: _Job, state: UnitState) -> bool:
        """Return whether systemd ran a different command than it was given.

        At a reload, systemd reads its units back from files that it wrote. systemd 252 writes ``$`` and ``;`` so that
        it reads them back with a backslash. This does not affect a running command, only one that is about to run. If
        it is unknown whether the command or the reload came first, return True."""
        if not job.argv or not state.argv or job.argv == state.argv or not state.started:
            return False
        try:
            loaded_us = int(await self._bus.connection.get(MANAGER, "UnitsLoadTimestamp"))
        except (BusAway, Refused):
            return True
        # The time is the last reload's. The bus keeps the order, so all reloads before the response are counted.
        return job.reloads != 1 or state.started >= loaded_us / 1e6

    async def _kill_rest(self, job: _Job) -> None:
        """Send SIGKILL to all processes of a unit until none is left."""
        pause_s = 0.005
        with contextlib.suppress(Refused):
            while (await self._bus.call_until_answered("GetUnitProcesses", "s", job.unit))[0]:
                await self._signal(job, signal.SIGKILL)
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, 1.0)

    async def _remove_unit(self, job: _Job) -> None:
        """Remove the unit completely, with its cgroup and its result."""
        await self._call_until_answered("StopUnit", "ss", job.unit, "replace")
        # If a unit is removed at its last change, there may be no signal of this change.
        state = await self._wait_for_state(
            job, lambda s: s.active in ("inactive", "failed") and not s.queued, soon=True
        )
        if not state.is_gone:
            await self._call_until_answered("ResetFailedUnit", "s", job.unit)

    async def _call_until_answered(self, member: str, signature: str, *body: Any) -> None:
        """Call a method of systemd until there is a response, even a refusal such as "no such unit"."""
        try:
            await self._bus.call_until_answered(member, signature, *body)
        except Refused as refused:
            log.debug("systemd_refused", call=member, error=str(refused))

    async def _forget(self, job: _Job) -> None:
        del self._jobs[job.job_id]
        with contextlib.suppress(BusAway, Refused):
            await self._bus.unfollow(job.path)

    async def _signal(self, job: _Job, number: int, which: str = "all") -> None:
        await self._call_until_answered("KillUnit", "ssi", job.unit, which, number)

    def _on_interrupt(self, job_id: str, number: int, which: str) -> None:
        job = self._jobs.get(job_id)
        if job is None or job.interruption is not None:
            return
        job.interruption = number, which
        if job.running:
            self._spawn(self._signal(job, number, which))

    def _on_kill(self, job_id: str) -> None:
        job = self._jobs.get(job_id)
        if job is None:
            return
        # A job that does not run yet is killed as soon as it runs.
        job.killed = True
        if job.asked:
            self._spawn(self._signal(job, signal.SIGKILL))
