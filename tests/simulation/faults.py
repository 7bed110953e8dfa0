"""What goes wrong: each fault strikes, lasts for a while, and is mended."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from simulation.hosts import Host
    from simulation.schedulers import SchedulerProcess
    from simulation.world import World

Undo = Callable[[], None]

GIVES_UP_SOON = {"node_reconnection_timeout": 25_000.0}
BACKFILLS = {"enable_backfill": True, "backfill_quantile": 0.5, "backfill_margin": 1.0}
"""With times that half of the jobs exceed."""
PREEMPTS_SOON = {
    "fair_share_starvation_timeout": 2000.0, "max_unpreemptible_running_job_count": 0,
    "preemptive_scheduling_backoff": 500.0, "job_preemption_timeout": 3000.0, "enable_aggressive_starvation": True,
}  # fmt: skip


def _nothing() -> None:
    pass


def _set(thing: object, name: str, value: object, usual: object = False) -> Undo:
    """Set an attribute until it is mended."""
    setattr(thing, name, value)
    return lambda: setattr(thing, name, usual)


@dataclass(frozen=True)
class Mood:
    """What is different from world to world, so that each kind of trouble has worlds where little else happens."""

    fault_every_s: float
    lasts_s: tuple[float, ...]
    command_every_s: float
    """Of one user."""
    job_s: tuple[float, ...]
    tree: Mapping[str, Any]
    """Options of the tree, where they are not the defaults: preemption soon, nodes given up soon."""
    load: float
    """How busy a leader is: above a half of its time nodes are told to send less often."""
    steers: float
    """Which share of commands changes operations instead of starting one."""
    guaranteed_cores: float = 2.0
    """Of a pool that has a guarantee."""

    def with_guarantees(self) -> Mood:
        """Long jobs of operations that the count rule protects, and half of the cluster guaranteed."""
        tree = {**PREEMPTS_SOON, "max_unpreemptible_running_job_count": 10, "enable_aggressive_starvation": False}
        return replace(self, tree=tree, job_s=(90.0, 150.0), steers=0.2, guaranteed_cores=8.0)

    @staticmethod
    def draw(rng: random.Random) -> Mood:
        return Mood(
            fault_every_s=rng.choice((2.0, 5.0, 12.0)),
            lasts_s=rng.choice(((0.3, 2.0), (0.3, 2.0, 8.0, 15.0, 30.0), (5.0, 12.0, 25.0))),
            command_every_s=rng.choice((0.7, 3.0, 6.0)),
            job_s=rng.choice(((0.05, 1.0, 3.0), (0.05, 1.0, 3.0, 8.0, 20.0), (15.0, 30.0))),
            tree=rng.choice(({}, GIVES_UP_SOON, PREEMPTS_SOON, {**GIVES_UP_SOON, **PREEMPTS_SOON})),
            load=rng.choice((0.1, 0.1, 0.4, 0.7)),
            steers=rng.choice((0.2, 0.5, 0.8)),
        )


class Faults:
    """Draws faults until the world's ``faults_until_s``; all are mended then."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.events = world.events
        self.rng = world.events.rng
        self.counts: dict[str, int] = {}
        self._open: dict[int, Undo] = {}
        self._number = 0
        self.kinds: dict[str, tuple[float, Callable[[], Undo]]] = {
            "scheduler killed": (2.0, lambda: self._kill(self.rng.randrange(2))),
            "scheduler stopped": (2.0, lambda: self._stop(self.rng.randrange(2))),
            "scheduler ended": (2.0, self._end_scheduler),
            "leader killed": (3.0, lambda: self._kill(self._pick_leader())),
            "leader stopped": (3.0, lambda: self._stop(self._pick_leader())),
            "agent killed": (3.0, self._kill_agent),
            "agent killed at a write": (2.0, self._crash_agent),
            "agent stopped": (2.0, self._stop_agent),
            "host started anew": (1.0, self._reboot),
            "host's disk full": (1.0, lambda: _set(self._pick_host(), "is_full", True)),
            "executor broken": (0.5, self._break_executor),
            "clock stepped": (2.0, self._step_clock),
            "database's sessions ended": (2.0, self._end_sessions),
            "commits broken": (2.0, lambda: _set(world.database, "breaks_commit", self._draw_break, lambda: "")),
            "database down": (1.0, self._stop_database),
            "database full": (1.0, lambda: _set(world.database, "is_full", True)),
            "database cut off": (2.0, lambda: self._cut((self.rng.choice(("s1", "s2")), "db"))),
            "leader cut off the database": (2.0, lambda: self._cut((world.machines[self._pick_leader()].name, "db"))),
            "node cut off": (2.0, self._cut_node),
            "scheduler cut off nodes": (1.0, self._cut_scheduler),
            "messages lost": (2.0, lambda: _set(world.network, "lost", self.rng.choice((0.01, 0.1, 0.3)), 0.0)),
            "messages repeated": (1.0, lambda: _set(world.network, "repeated", self.rng.choice((0.05, 0.5)), 0.0)),
            "messages slow": (2.0, self._slow),
        }

    def start(self) -> None:
        self._weights = [weight * self.rng.choice((0.0, 0.0, 1.0, 4.0)) for weight, _ in self.kinds.values()]
        if self.world.options.has_bad_host:
            self.kinds["host fails all its jobs"] = 12.0, self._fail_jobs
            self._weights.append(12.0)
        if any(self._weights):
            self._wait()
        self.events.world_loop.call_at(self.world.options.faults_until_s, self._end)

    def _wait(self) -> None:
        self.events.world_loop.call_later(self.rng.expovariate(1.0 / self.world.mood.fault_every_s), self._strike)

    def _strike(self) -> None:
        if self.events.now >= self.world.options.faults_until_s:
            return
        name = self.rng.choices(list(self.kinds), self._weights)[0]
        self.counts[name] = self.counts.get(name, 0) + 1
        undo = self.kinds[name][1]()
        lasts_s = self.rng.choice(self.world.mood.lasts_s) * self.rng.uniform(0.5, 1.5)
        self.world.ledger.note("fault", name, f"{lasts_s:.1f} s")
        self._number += 1
        self._open[self._number] = undo
        self.events.world_loop.call_later(lasts_s, self._mend, self._number)
        self._wait()

    def _mend(self, number: int) -> None:
        undo = self._open.pop(number, None)
        if undo is not None:
            undo()

    def _end(self) -> None:
        for number in list(self._open):
            self._mend(number)
        self.world.network.heal()
        for number in range(2):
            self.world.start_scheduler(number)
        for host in self.world.hosts:
            host.crash_at_write = 0
            host.start_agent(self.world.make_agent)

    # --- schedulers

    def _pick_leader(self) -> int:
        leading = [number for number, each in enumerate(self.world.schedulers) if each is not None and each.scheduler]
        return leading[0] if leading else self.rng.randrange(2)

    def _kill(self, number: int) -> Undo:
        process = self.world.schedulers[number]
        if process is not None:
            process.loop.kill()
        return lambda: self.world.start_scheduler(number)

    def _end_scheduler(self) -> Undo:
        number = self.rng.randrange(2)
        process = self.world.schedulers[number]
        if process is not None:
            process.is_ending = True
            process.loop.call_soon(process.stopping.set)
        return lambda: self.world.start_scheduler(number)

    def _stop(self, number: int) -> Undo:
        process: SchedulerProcess | None = self.world.schedulers[number]
        if process is None:
            return _nothing
        process.loop.stop_process()
        return process.loop.continue_process

    # --- hosts

    def _pick_host(self) -> Host:
        return self.rng.choice(self.world.hosts)

    def _revive(self, host: Host) -> Undo:
        return lambda: host.start_agent(self.world.make_agent)

    def _kill_agent(self) -> Undo:
        host = self._pick_host()
        host.kill_agent()
        return self._revive(host)

    def _crash_agent(self) -> Undo:
        host = self._pick_host()
        host.crash_at_write = self.rng.randint(1, 12)
        return self._revive(host)

    def _stop_agent(self) -> Undo:
        agent = self._pick_host().agent
        if agent is None:
            return _nothing
        agent.loop.stop_process()
        return agent.loop.continue_process

    def _reboot(self) -> Undo:
        host = self._pick_host()
        host.reboot()
        return self._revive(host)

    def _break_executor(self) -> Undo:
        executor = self._pick_host().executor
        return _nothing if executor is None else _set(executor, "is_broken", True)

    def _fail_jobs(self) -> Undo:
        # Always the same one: two agree that an operation is at fault.
        return _set(self.world.hosts[0], "fails", self.rng.choice(("started", "not started")), "")

    def _step_clock(self) -> Undo:
        step_s = self.rng.choice((-1.0, 1.0)) * self.rng.choice((0.5, 5.0, 30.0))
        kind = self.rng.randrange(3)
        if kind == 0:
            self._pick_host().wall_offset_s += step_s
        elif kind == 1:
            self.rng.choice(self.world.machines).wall_offset_s += step_s
        else:
            self.world.database_offset_s += step_s
        return _nothing

    # --- the database

    def _end_sessions(self) -> Undo:
        self.world.database.end_all()
        return _nothing

    def _draw_break(self) -> str:
        return self.rng.choice(("", "", "", "", "lost", "lost", "gone before", "gone after", "gone late"))

    def _stop_database(self) -> Undo:
        self.world.database.end_all()
        return _set(self.world.database, "is_down", True)

    # --- the network

    def _cut(self, *pairs: tuple[str, str]) -> Undo:
        cut = self.world.network.cut
        ways = [way for a, b in pairs for way in ((a, b), (b, a))]
        if self.rng.random() < 0.3:
            ways = ways[:: self.rng.choice((1, 2))]  # one direction only, perhaps
        cut |= set(ways)
        return lambda: cut.difference_update(ways)

    def _cut_node(self) -> Undo:
        name = self._pick_host().name
        return self._cut(*((name, machine.name) for machine in self.world.machines))

    def _cut_scheduler(self) -> Undo:
        name = self.rng.choice(("s1", "s2"))
        return self._cut(*((name, host.name) for host in self.world.hosts))

    def _slow(self) -> Undo:
        network = self.world.network
        network.mean_s, network.slow_s = self.rng.choice(((0.05, 2.0), (0.3, 4.0), (1.0, 8.0)))

        def undo() -> None:
            network.mean_s, network.slow_s = 0.001, 0.3

        return undo
