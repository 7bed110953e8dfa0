"""Hosts that run jobs: what survives an agent (processes, files), and the agent with the real ``AssignedJobs``."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import pwd
import signal
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
from simulation.events import Events, Killed, VirtualLoop
from simulation.network import Network

from cpumond.agent.config import AgentConfig, finish_config, parse_config_text
from cpumond.agent.jobs import assigned as assigned_module
from cpumond.agent.jobs import files
from cpumond.agent.jobs.assigned import AssignedJobs
from cpumond.agent.jobs.job import Usage
from cpumond.agent.report.scheduler import MAX_ASKED_PERIOD_S
from cpumond.core.difference import Differences
from cpumond.core.route import Route, Terms, is_standby, standby_period_s
from cpumond.core.term import LEADER_HEADER, TERM_HEADER, parse_term
from cpumond.core.wire import AgentAbout, Heartbeat, HeartbeatAnswer, NodeHeartbeat, NodeRegistration, NodeResources
from cpumond.host.executor.model import Ended, Event, ExecutorError, Launch, NotStarted, Started

ME = pwd.getpwuid(os.geteuid()).pw_name
ABOUT = AgentAbout("0", "shadow", "shadow", knows_secrets=True)
NO_USAGE: dict[str, Usage] = {}


@dataclass(slots=True)
class Process:
    """A job that lives on a host, whether an agent is there or not."""

    launch: Launch
    operation_id: str
    started_at: float
    heeds_sigterm: bool
    is_stopping: bool = False


class Host:
    """A machine. ``watch``: what is told of each start and end of a job (``checks.Ledger``)."""

    def __init__(self, events: Events, name: str, directory: str, cpu: float, watch: Any) -> None:
        self.events = events
        self.name = name
        self.cpu = cpu
        self.watch = watch
        self.wall_offset_s = 1.7e9 + events.rng.uniform(-20.0, 20.0)
        self.boot = 1
        self.is_full = False
        self.fails: Literal["", "started", "not started"] = ""
        """How all of its jobs fail at once."""
        self.crash_at_write = 0
        """Kill the agent at the so-many-th write of a file from now; 0: never."""
        self.processes: dict[str, Process] = {}
        self.starting: dict[str, Launch] = {}
        self.ended: dict[str, Ended] = {}
        """Ends as they are on disk, for the next agent."""
        self.executor: HostExecutor | None = None
        self.agent: Agent | None = None
        self.config = make_config(name, directory, cpu)

    def wall_s(self) -> float:
        return self.events.now + self.wall_offset_s

    def monotonic_s(self) -> float:
        return self.events.now

    boottime_s = monotonic_s

    # --- processes

    def launch(self, launch: Launch) -> None:
        self.starting[launch.job_id] = launch
        rng = self.events.rng
        delay_s = rng.uniform(0.005, 0.1) if rng.random() < 0.95 else rng.uniform(0.1, 3.0)
        self.events.world_loop.call_later(delay_s, self._begin, launch, self.boot)

    def _begin(self, launch: Launch, boot: int) -> None:
        if self.starting.get(launch.job_id) is not launch or boot != self.boot:
            return
        del self.starting[launch.job_id]
        if self.fails == "not started":
            self._push(NotStarted(launch.job_id, "there is no working directory"))
            return
        rng = self.events.rng
        process = Process(launch, launch.environment["CPUMOND_OPERATION_ID"], self.wall_s(), rng.random() < 0.7)
        self.processes[launch.job_id] = process
        self.watch.started(self, process)
        seconds, code = (0.0, 1.0) if self.fails else (float(each) for each in launch.argv[-2:])
        signal, is_oom = None, False
        if not self.fails and launch.argv[-3] == "flaky" and (roll := rng.random()) < 0.45:
            is_oom = roll < 0.25
            code, signal = (0, 9) if is_oom else (3, None)
        told = (None if is_oom else int(code), signal, is_oom)
        self.events.world_loop.call_later(seconds, self._end, process, boot, *told)
        self._push(Started(launch.job_id, f"jobs/{launch.job_id}", process.started_at))

    def _end(self, process: Process, boot: int, code: int | None, signal: int | None, is_oom: bool = False) -> None:
        job_id = process.launch.job_id
        if self.processes.get(job_id) is not process or boot != self.boot:
            return
        del self.processes[job_id]
        ended = self.ended[job_id] = Ended(job_id, self.wall_s(), code, signal, cpu_seconds=1.0, oom_killed=is_oom)
        self.watch.ended(self, process, ended)
        self._push(ended)

    def interrupt(self, job_id: str, number: int) -> None:
        process = self.processes.get(job_id)
        if process is not None and not process.is_stopping:
            process.is_stopping = True
            if process.heeds_sigterm:
                self.events.world_loop.call_later(
                    self.events.rng.uniform(0.01, 2.0), self._end, process, self.boot, None, number
                )

    def kill(self, job_id: str) -> None:
        self.starting.pop(job_id, None)
        process = self.processes.get(job_id)
        if process is not None:
            process.is_stopping = True
            self.events.world_loop.call_later(0.01, self._end, process, self.boot, None, 9)

    def _push(self, event: Event) -> None:
        if self.executor is not None and self.agent is not None:
            self.executor.events.append(event)
            self.agent.wake()

    # --- the agent, and the machine itself

    def start_agent(self, make: Callable[[Host], Agent]) -> None:
        if self.agent is None:
            self.agent = make(self)

    def kill_agent(self) -> None:
        if self.agent is not None:
            self.agent.loop.kill()
            self.forget_agent()

    def forget_agent(self) -> None:
        if self.agent is not None:
            # The kernel lets go of a killed process's lock.
            self.agent.assigned._jobs_dir.close()
        self.agent = self.executor = None
        # What it had just begun to start comes up or does not.
        for job_id in list(self.starting):
            if self.events.rng.random() < 0.5:
                del self.starting[job_id]

    def reboot(self) -> None:
        """Power is lost: no process and no agent is left; files are."""
        self.kill_agent()
        for process in self.processes.values():
            self.watch.ended(self, process, None)
        self.boot += 1
        self.processes.clear()
        self.starting.clear()


class HostExecutor:
    def __init__(self, host: Host) -> None:
        self.host = host
        self.events: list[Event] = []
        self.is_broken = False

    def recover(self, job_ids: Iterable[str]) -> dict[str, Started]:
        if self.is_broken:
            raise ExecutorError("nothing can be started here")
        host, found = self.host, {}
        for job_id in job_ids:
            process = host.processes.get(job_id)
            if process is not None:
                found[job_id] = Started(job_id, f"jobs/{job_id}", process.started_at)
            elif job_id in host.starting:
                pass  # its start is told when it has one
            else:
                ended = host.ended.get(job_id)
                self.events.append(ended or Ended(job_id, host.wall_s(), problem="it is not known how it ended"))
        return found

    def start(self, launch: Launch) -> None:
        self.host.launch(launch)

    def interrupt(self, job_id: str, number: int = signal.SIGTERM, first_only: bool = False) -> None:
        self.host.interrupt(job_id, number)

    def kill(self, job_id: str) -> None:
        if job_id in self.host.starting:
            self.events.append(Ended(job_id, self.host.wall_s(), signal=9))
        self.host.kill(job_id)

    def poll(self) -> list[Event]:
        events, self.events = self.events, []
        return events

    def fileno(self) -> int:
        return 0

    def read_log(self, job_id: str, directory: str, stream: str, tail_bytes: int) -> tuple[bytes, int]:
        return b"", 0

    def close(self) -> None:
        pass


@dataclass(frozen=True, slots=True)
class LinkOptions:
    addresses: tuple[str, ...]
    period_s: float = 1.0
    timeout_s: float = 5.0
    retry_max_s: float = 30.0


class Agent:
    """One run of an agent: the tick, and the link to the schedulers, in one process."""

    def __init__(self, host: Host, network: Network, options: LinkOptions) -> None:
        self.host = host
        self.network = network
        self.options = options
        self.events = host.events
        self.rng = host.events.rng
        self.loop = VirtualLoop(host.events, f"{host.name}/agent", host)
        self.incarnation = f"{host.name}-{host.events.count}"
        host.executor = HostExecutor(host)
        self.assigned = AssignedJobs(host.config, host.executor, host)  # type: ignore[arg-type]
        self.assigned._boot_id = f"{host.name} {host.boot}"
        self.assigned.on_offer = self._offer
        self.answers: list[tuple[HeartbeatAnswer, float]] = []
        self.pending: Heartbeat | None = None
        self.sequence = 0
        self.terms = Terms()
        self.route = Route([f"http://{address}" for address in options.addresses], options.retry_max_s, self.rng)
        self.differences = Differences()
        self.period_s = 0.0
        self._taken_since_demand, self._asks_about = True, False
        self.registered: NodeRegistration | None = None
        self.wanted = self._registration()
        self.taken_at_s = -1e9
        self._awake = asyncio.Event()
        self._has_pending = asyncio.Event()
        self.loop.start(self._tick())
        self.loop.start(self._link())

    def wake(self) -> None:
        self.loop.call_soon(self._awake.set)

    def _registration(self) -> NodeRegistration:
        config = self.host.config
        slots = 0 if self.assigned.problem else config.resources.user_slots or 0
        resources = NodeResources(cpu=self.host.cpu, memory=config.resources.memory or 0, user_slots=slots)
        return NodeRegistration(self.host.name, self.incarnation, resources, key=f"key-{self.host.name}")

    def _offer(self) -> None:
        self.wanted = self._registration()

    # --- the tick

    async def _tick(self) -> None:
        host, assigned = self.host, self.assigned
        assigned.load(self.events.now)
        beat_at_s = self.events.now + self.rng.uniform(0.0, self.options.period_s)
        while True:
            now = self.events.now
            answers, self.answers = self.answers, []
            for answer, sent_at_s in answers:
                assigned.apply_answer(answer, sent_at_s, now)
            due = assigned.advance(now, lambda: (NO_USAGE, 0.0))
            due |= assigned.adjust(now, lambda: (NO_USAGE, 0.0))
            if due or now >= beat_at_s:
                beat_at_s = now + max(self.options.period_s, self.period_s)
                if assigned.knows_jobs:
                    self.sequence += 1
                    self.pending = Heartbeat(
                        host.name, self.incarnation, self.sequence, host.wall_s(), host.cpu, assigned.reports(),
                        finished_jobs=assigned.finished_jobs(),
                    )  # fmt: skip
                    self._has_pending.set()
            wait_s = min(beat_at_s, assigned.next_deadline_s()) - self.events.now
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._awake.wait(), max(wait_s, 0.01))
            self._awake.clear()

    # --- the link, as ``report.scheduler.SchedulerLink`` does it

    async def _link(self) -> None:
        while True:
            await self._has_pending.wait()
            self._has_pending.clear()
            heartbeat, self.pending = self.pending, None
            if heartbeat is None:
                continue
            began_at_s, pause_s = self.events.now, 0.0
            try:
                verdict, leader = await self._deliver(heartbeat)
            except (TimeoutError, ConnectionError):
                verdict, leader = "elsewhere", None
            now = self.events.now
            if verdict == "taken":
                self.route.taken()
                continue
            if verdict == "standby":
                period_s = standby_period_s(max(self.options.period_s, self.period_s))
                pause_s = self.route.standby(leader, period_s, began_at_s, now)
            elif verdict == "elsewhere":
                pause_s = self.route.unanswered(began_at_s, now)
            elif verdict == "refused":
                pause_s = self.route.refused(now)
            if self.pending is None:
                self.pending = heartbeat
            self._has_pending.set()
            await asyncio.sleep(pause_s)

    async def _deliver(self, heartbeat: Heartbeat) -> tuple[str, str | None]:
        """What became of it, in a word, and the leader that a standby named."""
        wanted = self.wanted
        if self.registered != wanted:
            verdict, leader, _ = await self._ask("/api/v1/nodes", wanted)
            if verdict == "taken":
                self.registered, verdict = wanted, "again"
            return verdict, leader
        sent_at_s, told = self.events.now, self.differences.make(heartbeat)
        if self._asks_about:
            told = NodeHeartbeat(**{**msgspec.structs.asdict(told), "about": ABOUT})
        self._asks_about = False
        verdict, leader, body = await self._ask("/api/v1/heartbeats", told)
        if verdict != "taken":
            return verdict, leader
        answer = msgspec.json.decode(body, type=HeartbeatAnswer)
        if answer.full and not answer.accepted and told is not heartbeat:
            return "again", None
        if answer.accepted:
            self.differences.taken(heartbeat, answer)
            self._asks_about = answer.knows_about is False
            self.period_s = min(answer.period_s or 0.0, MAX_ASKED_PERIOD_S)
            self.taken_at_s = self.events.now
            self.host.watch.answered(self.host, answer)
            self.answers.append((answer, sent_at_s))
            self._awake.set()
            self._taken_since_demand = True
        elif answer.register:
            self.registered = None
            again, self._taken_since_demand = self._taken_since_demand, False
            return "again" if again else "refused", None
        return "taken", None

    async def _ask(self, path: str, message: msgspec.Struct) -> tuple[str, str | None, bytes]:
        address = self.route.current.removeprefix("http://")
        body = msgspec.json.encode(message)
        reply = await self.network.ask(self.loop, address, path, {}, body, self.options.timeout_s)
        term = parse_term(reply.headers.get(TERM_HEADER))
        if not self.terms.accept(term):
            return "elsewhere", None, b""
        leader = reply.headers.get(LEADER_HEADER)
        if reply.status in (200, 409):
            self.host.watch.took_term(self.host, self.incarnation, term)
            return "taken", None, reply.body
        error = msgspec.json.decode(reply.body)["error"]
        if is_standby(reply.status, leader, error):
            return "standby", leader, b""
        return ("elsewhere" if reply.status == 404 or reply.status >= 500 else "refused"), None, b""


def make_config(name: str, directory: str, cpu: float) -> AgentConfig:
    text = (
        f'node_id = "{name}"\nstate_dir = "{directory}/{name}"\nruntime_dir = "{directory}/{name}/run"\n'
        f'[resources]\ncpu = {cpu}\nmemory = 64000000000\nuser_slots = 100\n'
        f'[executor]\nkind = "cgroup"\nallow_root = true\nuser = "{ME}"\n'
    )  # fmt: skip
    return finish_config(parse_config_text(text, name), name)


class InlineExecutor:
    """In place of a pool of threads."""

    def __init__(self, *_: Any) -> None:
        pass

    def submit(self, function: Callable[..., Any], *args: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(function(*args))
        except Exception as error:
            future.set_exception(error)
        return future

    def shutdown(self, *_: Any, **__: Any) -> None:
        pass


@contextlib.contextmanager
def played_disks(events: Events) -> Iterator[None]:
    """Files are written by the host whose process is running: its disk may be full, or its agent killed at a write."""
    replace = files._replace

    def write(path: str, content: bytes, before: str = "") -> None:
        host = events.current.host if events.current is not None else None
        if host is not None and host.is_full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
        if host is not None and host.crash_at_write:
            host.crash_at_write -= 1
            if not host.crash_at_write:
                if events.rng.random() < 0.5:
                    replace(path, content, before)
                host.kill_agent()
                raise Killed
        replace(path, content, before)

    saved = (files._replace, files.ThreadPoolExecutor, assigned_module.ThreadPoolExecutor)
    files._replace = write
    files.ThreadPoolExecutor = assigned_module.ThreadPoolExecutor = InlineExecutor  # type: ignore[misc,assignment]
    try:
        yield
    finally:
        files._replace = saved[0]
        files.ThreadPoolExecutor, assigned_module.ThreadPoolExecutor = saved[1:]  # type: ignore[misc]
