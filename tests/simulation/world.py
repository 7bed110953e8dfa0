"""One seed is one world: a pair of schedulers, their database, hosts with agents, users, and what goes wrong."""

import contextlib
import gc
import os
import sys
import tempfile
import time
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import structlog
from simulation.checks import Ledger, ViolationError
from simulation.clients import Client
from simulation.database import Database, Session
from simulation.events import Events
from simulation.faults import BACKFILLS, Faults, Mood
from simulation.hosts import Agent, Host, LinkOptions, played_disks
from simulation.network import Network
from simulation.schedulers import Machine, SchedulerProcess

from cpumond.fairshare.resources import CPU, Vector, add, subtract
from cpumond.scheduler import service
from cpumond.scheduler.decide.placement import may_start_within, wants_jobs
from cpumond.scheduler.program import leading
from cpumond.scheduler.service.idle_watch import IdleWatch
from cpumond.scheduler.state import State
from cpumond.scheduler.store import Change
from cpumond.scheduler.store.entries import Row

MEMORY = "/dev/shm"
CHECK_S = 10.0
HEARD_S = 12.0
ABORT_S = 40.0
"""So long before the end all operations that are left are ended by their users; nothing may be left over then."""


@dataclass(frozen=True)
class Options:
    """How large a world is, and how long it lives, in its own seconds."""

    hosts: int = 5
    seconds: float = 300.0
    faults_until_s: float = 200.0
    commands_until_s: float = 190.0
    clients: int = 2
    has_faults: bool = True
    lease_s: float = 10.0
    gangs: float = 0.0
    """The part of the operations that have ``gang_options``."""
    vaults: bool = False
    """Whether some operations have secrets."""
    has_bad_host: bool = False
    """Whether one of the hosts fails all its jobs, for a while again and again."""
    retries: float = 0.0
    """The part that have a retry policy, and jobs that fail at random."""
    guarantees: bool = False
    """Whether long jobs of small operations take what is guaranteed to others, and preemption comes within seconds."""
    backfills: bool = False
    """Whether room that is kept for gangs is used until it is needed: every third operation is a large gang, and the
    others' jobs run for a second or for fifteen."""
    bursts: bool = False
    """Whether operations are submitted several at once."""


@dataclass
class Outcome:
    seed: int
    violation: str
    simulated_s: float
    real_s: float
    """Of one core."""
    checks: int
    events: int
    counts: dict[str, int]
    faults: dict[str, int]
    trace: int
    notes: list[str] = field(default_factory=list)

    @property
    def speed(self) -> float:
        return self.simulated_s / self.real_s


class World:
    def __init__(self, seed: int, options: Options, directory: str) -> None:
        self.seed = seed
        self.options = options
        self.events = events = Events(seed)
        self.network = Network(events)
        self.database = Database(now=lambda: events.now + self.database_offset_s, charge=events.charge)
        self.database_offset_s = events.rng.uniform(-20.0, 20.0)
        self.database.latency = lambda: events.rng.uniform(0.0005, 0.004)
        self.database.can_reach = self._can_reach
        self.database.later = self._commit_later
        self.ledger = Ledger(events, self.database)
        self.ledger.find_state = self._find_state
        self.addresses = ("s1:9757", "s2:9757")
        self.machines = [Machine(events, name) for name in ("s1", "s2")]
        self.schedulers: list[SchedulerProcess | None] = [None, None]
        for machine, address in zip(self.machines, self.addresses, strict=True):
            self.network.place(address, machine.name)
        self.link = LinkOptions(self.addresses)
        rng = events.rng
        self.mood = Mood.draw(rng)
        if options.guarantees:
            self.mood = self.mood.with_guarantees()
        if options.backfills:
            self.mood = replace(self.mood, tree={**self.mood.tree, **BACKFILLS})
        self.hosts = [
            Host(events, f"n{number}", directory, rng.choice((2.0, 4.0, 8.0)), self.ledger)
            for number in range(1, options.hosts + 1)
        ]
        self.clients: list[Client] = []
        self.faults = Faults(self)
        self.idle: set[tuple[str, str]] | None = None
        self.unmet: set[str] | None = None

    def _can_reach(self, owner: Any) -> bool:
        return owner is None or self.network.can_pass(owner.machine.name, "db")

    def _find_state(self) -> State | None:
        """Of the scheduler that leads in the database's term."""
        for process in self.schedulers:
            reign = None if process is None else process.leading.reign
            if reign is not None and reign.term == self.database.term and reign.scheduler is not None:
                return reign.scheduler.state
        return None

    def _commit_later(self, session: Session | None, changes: Sequence[Change], rows: Sequence[Row], term: int) -> None:
        """A commit under way on a connection that its client has lost."""

        def commit() -> None:
            if session is not None and session.is_alive:
                self.ledger.written(changes, rows, term)
                self.database.commit(changes, rows)
                self.database.end(session)

        self.events.world_loop.call_later(self.events.rng.uniform(0.0, 3.0), commit)

    def start_scheduler(self, number: int) -> None:
        known = self.schedulers[number]
        if known is not None and known.is_ending and not known.loop.is_dead:
            self.events.world_loop.call_later(1.0, self.start_scheduler, number)  # it is ending
            return
        if known is None or known.loop.is_dead:
            self.schedulers[number] = SchedulerProcess(
                self.machines[number], self.addresses[number], self.database, self.network, self.ledger,
                self.options.lease_s,
            )  # fmt: skip

    def make_agent(self, host: Host) -> Agent:
        return Agent(host, self.network, self.link)

    def start(self) -> None:
        later = self.events.world_loop.call_later
        for number in range(2):
            later(self.events.rng.uniform(0.0, 2.0), self.start_scheduler, number)
        for host in self.hosts:
            later(self.events.rng.uniform(0.0, 3.0), host.start_agent, self.make_agent)
        options = self.options
        self.clients = [
            Client(self.events, self.network, self.addresses, number, self.mood, self.ledger, options)
            for number in range(options.clients)
        ]
        for client in self.clients:
            self.network.place(client.name, client.name)
        if options.has_faults:
            self.faults.start()
        later(CHECK_S, self._look)
        for second in range(0, 15, 2):
            later(options.seconds - ABORT_S - 1.0 - second, self._look_for_idle)
            later(options.seconds - ABORT_S - 1.0 - second, self._look_for_unmet)
        later(options.seconds - ABORT_S, self._abort_all)

    def _look(self) -> None:
        for process in self.schedulers:
            if process is not None and not process.loop.is_dead and process.scheduler is not None:
                self.ledger.check_state(process.scheduler, process.leading.lead.term)
        self.events.world_loop.call_later(CHECK_S, self._look)

    def _look_for_idle(self) -> None:
        """Work that could run and does not, each second of the last ones before the end."""
        waits: set[tuple[str, str]] = set()
        for process in self.schedulers:
            state = None if process is None or process.scheduler is None else process.scheduler.state
            for operation in () if state is None else state.operations.values():
                task = operation.record.tasks[0]
                if not operation.needed or operation.record.suspended or operation.record.state != "running":
                    continue
                # Each incarnation waits anew: for the end of the one before, which may have begun a second ago.
                name = f"{operation.id} {operation.record.incarnation}".rstrip()
                reservations = state.gangs.reservations.values() if state else ()
                kept = {node.id for each in reservations for node in each.rooms}
                holds = 0
                for host in self.hosts:
                    agent = host.agent
                    if agent is None or agent.assigned.problem:  # the latter lasts up to a minute longer than its fault
                        continue
                    used = sum(each.order.cpu_limit for each in agent.assigned.jobs.values())
                    node = state.nodes.get(host.name) if state is not None else None
                    if node is not None and node.cordoned:
                        continue
                    # Room of jobs that wait for the end of those before them (semantics.md 7.4).
                    used += sum(job.limits[CPU] for job in node.jobs.values() if job.after) if node is not None else 0.0
                    holds += int((host.cpu - used) // task.cpu_limit)
                    if host.cpu - used >= task.cpu_limit and not operation.record.is_gang and host.name not in kept:
                        waits.add((name, host.name))
                if operation.record.is_gang and not kept and holds >= operation.needed_job_count:
                    waits.add((name, "all together"))
        self.idle = waits if self.idle is None else self.idle & waits

    def _look_for_unmet(self) -> None:
        """Operations whose pool would reach its strong guarantee by the end of one job of a pool that is above its own,
        where preemption comes within seconds: each second of the last ones before the end."""
        found: set[str] = set()
        for process in self.schedulers:
            state = None if process is None or process.scheduler is None else process.scheduler.state
            for operation in () if state is None else state.operations.values():
                record, element = operation.record, operation.elements["default"]
                tree, order, pool = element.tree, record.tasks[0].resources, element.parent
                settings, total = tree.config.settings, tree.total
                if not settings.guarantee_tolerance or settings.fair_share_starvation_timeout > 3000.0:
                    continue
                if not wants_jobs(element) or record.is_gang or record.require_reclaimed:
                    continue
                if pool is None or _most(add(pool.usage, order), total) > max(pool.strong_guarantee_share) + 1e-6:
                    continue
                if any(
                    job.is_active and job.element.parent is not pool and not job.element.operation.record.is_gang
                    and job.element.parent is not None and node.is_online and node.cordon is None
                    and _most(subtract(job.element.parent.usage, job.usage), total)
                    > max(job.element.parent.strong_guarantee_share)
                    and may_start_within(record, node.unordered_cores + job.ordinary_cores, order[CPU])
                    and min(subtract(add(node.free, job.usage), order)) >= 0.0
                    for node in tree.nodes.values()
                    for job in node.jobs.values()
                ):  # fmt: skip
                    found.add(operation.id)
        self.unmet = found if self.unmet is None else self.unmet & found

    def _abort_all(self) -> None:
        for client in self.clients:
            client.abort_all()

    def run(self) -> None:
        """Raises ViolationError."""
        self.start()
        events, step = self.events, 1.0
        while events.now < self.options.seconds:
            events.run(events.now + step)
            if events.violation is not None:
                raise events.violation
            if events.problems:
                raise ViolationError(f"after {events.now:.3f} s: an exception: {events.problems[0]}")
        self.check_end()

    def check_end(self) -> None:
        """Liveness: the faults have been over for long. Raises ViolationError."""
        problems: list[str] = []
        now, ledger = self.events.now, self.ledger
        leaders = [each for each in self.schedulers if each is not None and each.scheduler is not None]
        if len(leaders) != 1:
            raise ViolationError(f"after {now:.3f} s: {len(leaders)} schedulers lead")
        state = leaders[0].scheduler.state  # type: ignore[union-attr]
        ledger.check_state(leaders[0].scheduler, leaders[0].leading.lead.term)  # type: ignore[arg-type]
        ledger.check_log()
        if self.idle:
            problems.append(f"operations that could run on a node waited for 14 s: {sorted(self.idle)}")
        if self.unmet:
            problems.append(f"pools of operations were kept from their guarantees for 14 s: {sorted(self.unmet)}")
        problems += [f"{each.name} still waits for its command" for each in self.clients if not each.is_done]
        for host in self.hosts:
            agent = host.agent
            if agent is None or now - agent.taken_at_s > HEARD_S:
                problems.append(f"{host.name} has not been heard for {HEARD_S:g} s")
            elif agent.assigned.problem:
                problems.append(f"{host.name} offers nothing: {agent.assigned.problem}")
            if agent is not None:
                left = sorted(set(agent.assigned.jobs) - set(state.jobs))
                problems += [f"{host.name} still has job {job_id}, which no scheduler knows" for job_id in left]
        for job_id, (host, process) in ledger.living.items():
            if job_id not in state.jobs:
                problems.append(f"job {job_id} of {process.operation_id} runs on {host.name}, nobody knows it")
        for operation_id, operation in state.operations.items():
            problems.append(
                f"operation {operation_id} is not done: {operation.record.state}, "
                f"suspended {operation.record.suspended}, needs {operation.needed}, has {operation.active}"
            )
        if problems:
            raise ViolationError(f"after {now:.3f} s, {now - self.options.faults_until_s:g} s past faults: {problems}")


def _most(amount: Vector, total: Vector) -> float:
    return max(x / t if t else 0.0 for x, t in zip(amount, total, strict=True))


Preparation = Callable[[World], AbstractContextManager[None]]


def run_seed(seed: int, options: Options = Options(), prepare: Preparation | None = None) -> Outcome:
    """Live through one seed. ``prepare``: changes the world for as long as it lives."""
    with _quiet():
        return _live(seed, options, prepare)


def _live(seed: int, options: Options, prepare: Preparation | None) -> Outcome:
    begun = time.process_time()
    with tempfile.TemporaryDirectory(dir=MEMORY if os.path.isdir(MEMORY) else None) as directory:
        world = World(seed, options, directory)
        violation = ""
        busy = types.SimpleNamespace(**{**vars(time), "thread_time": lambda: world.events.now * world.mood.load})
        with (
            played_disks(world.events),
            world.ledger.see_stops(),
            world.ledger.see_kept_room(),
            mock.patch.object(service, "time", busy),
            # Real processes make these, when so much real time is over: a busy machine would have other worlds.
            mock.patch.object(IdleWatch, "take_if_due"),
            prepare(world) if prepare is not None else contextlib.nullcontext(),
        ):
            try:
                world.run()
            except ViolationError as error:
                violation = str(error)
            for loop in world.events.loops:
                loop.kill()
    ledger = world.ledger
    outcome = Outcome(
        seed, violation, world.events.now, time.process_time() - begun, ledger.checks, world.events.count,
        ledger.counts, world.faults.counts, ledger.trace, ledger.told,
    )  # fmt: skip
    for loop in world.events.loops:
        loop.discard()
    return outcome


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """No log, no garbage collection in between: it takes more time than all that is simulated."""
    before = structlog.get_config()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(50), cache_logger_on_first_use=False)
    collect, service._collect = service._collect, lambda _: None
    garbage, leading.gc = leading.gc, types.SimpleNamespace(collect=lambda: 0)  # type: ignore[assignment]
    was_enabled = gc.isenabled()
    gc.disable()
    told = sys.unraisablehook
    # Killed processes' coroutines are thrown away at the end: what they do then happens in no world.
    sys.unraisablehook = lambda _: None
    try:
        yield
    finally:
        with warnings.catch_warnings(action="ignore"):
            gc.collect()
        sys.unraisablehook = told
        structlog.configure(**before)
        service._collect, leading.gc = collect, garbage
        if was_enabled:
            gc.enable()
