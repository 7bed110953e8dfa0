"""Users: operations are started, changed and ended, each command repeated until it is acknowledged or refused."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import msgspec
from simulation.checks import BOUND, BOUNDED_POOL, RETRIED_MEMORY, SECRET
from simulation.events import Events, VirtualLoop
from simulation.faults import Mood
from simulation.network import Network

from cpumond.core.route import Route, Terms, is_standby
from cpumond.core.term import LEADER_HEADER, TERM_HEADER, parse_term
from cpumond.scheduler.settings.commands import ChangePool, ChangeTree, CreatePool, Edit
from cpumond.scheduler.settings.operations import (
    AbandonJob,
    AbortJob,
    AbortOperation,
    CompleteOperation,
    PatchOperation,
    ResumeOperation,
    StartOperation,
    SuspendOperation,
)
from cpumond.scheduler.state.commands import Command

if TYPE_CHECKING:
    from simulation.world import Options

GIVE_UP_S = 120.0
RULES = ("exit=3:2,delay=20s,delay_growth=2", "oom:3,per_operation=6,delay=4s,memory_growth=2", "node_lost:4,delay=15s")
OF_JOBS = "preempted:3,delay=6s"
"""Not of gangs."""
TOUCHES = 0.15
"""Which share of the other commands is about one job, or changes a specification."""


class Client:
    """One user at a time: a command, then a pause."""

    def __init__(
        self, events: Events, network: Network, addresses: tuple[str, ...], number: int, mood: Mood, watch: Any,
        options: Options,
    ) -> None:  # fmt: skip
        self.options = options
        self.events = events
        self.rng = events.rng
        self.network = network
        self.name = f"client{number}"
        self.mood = mood
        self.watch = watch
        self.pool = f"pool{number}"
        self.weight = 1.0
        self.mine: list[str] = []
        self.suspended: list[str] = []
        self.sent = 0
        self.terms = Terms()
        self.route = Route([f"http://{address}" for address in addresses], 5.0, self.rng)
        self.started: list[str] = []
        self.is_done = False
        self._ending = asyncio.Event()
        self.loop = VirtualLoop(events, self.name, self)
        self.loop.start(self._main())

    async def _main(self) -> None:
        cores = self.mood.guaranteed_cores
        guarantee: dict[str, Any] = {"strong_guarantee_resources": {"cpu": cores}} if self.rng.random() < 0.5 else {}
        if self.options.retries and self.pool == BOUNDED_POOL:
            guarantee["max_retry_memory"] = BOUND
        if self.name == "client0" and self.mood.tree:
            edits = tuple(Edit((name,), value) for name, value in self.mood.tree.items())
            await self._do(ChangeTree("default", edits))
        await self._do(CreatePool("default", self.pool, attributes=guarantee, ignore_existing=True))
        while self.events.now < self.options.commands_until_s:
            await asyncio.sleep(self.rng.expovariate(1.0 / self.mood.command_every_s))
            command = self._choose()
            is_burst = self.options.bursts and isinstance(command, StartOperation)
            more = [self._make_start() for _ in range(self.rng.randint(1, 11) if is_burst else 0)]
            await asyncio.gather(*map(self._do, (command, *more)))
        for operation_id in self.suspended:
            await self._do(ResumeOperation(operation_id))
        await self._ending.wait()
        for operation_id in self.started:
            await self._do(AbortOperation(operation_id))
        self.is_done = True

    def abort_all(self) -> None:
        """End what is left of all operations, as soon as what is being done is done."""
        self.loop.call_soon(self._ending.set)

    def _choose(self) -> Command:
        rng, roll = self.rng, self.rng.random()
        if rng.random() < 0.1:
            self.weight += 0.125
            return ChangePool("default", self.pool, (Edit(("weight",), self.weight),))
        if roll < self.mood.steers and self.suspended and rng.random() < 0.5:
            return ResumeOperation(self.suspended.pop())
        if roll < self.mood.steers and self.mine:
            operation_id = self.mine.pop(rng.randrange(len(self.mine)))
            if rng.random() < 0.5:
                self.suspended.append(operation_id)
                self.mine.append(operation_id)
                return SuspendOperation(operation_id, abort_running_jobs=rng.random() < 0.6)
            return AbortOperation(operation_id) if rng.random() < 0.7 else CompleteOperation(operation_id)
        if self.mine and rng.random() < TOUCHES:
            return self._touch(rng.choice(self.mine))
        return self._make_start()

    def _make_start(self) -> StartOperation:
        rng = self.rng
        seconds = rng.choice(self.mood.job_s)
        task = {
            "job_count": rng.choice((1, 1, 2, 3, 8)), "cpu_limit": rng.choice((0.5, 1.0, 2.0)),
            "command": ["run", f"{rng.uniform(0.5, 1.5) * seconds:.3f}", "0" if rng.random() < 0.97 else "1"],
            "interruptible": rng.random() < 0.3,
            **({"job_time_limit": 10_000.0} if rng.random() < 0.1 else {}),
        }  # fmt: skip
        spec: dict[str, Any] = {"tasks": {"t": task}, "pool": self.pool, "max_failed_job_count": 5}
        if len(self.started) % 4 == 3:
            spec["is_gang"] = True
        if len(self.started) % 3:
            spec.update({"allow_reclaimed": False} if len(self.started) % 3 == 1 else {"require_reclaimed": True})
        if len(self.started) % 5 == 2:
            spec["fail_on_job_restart"] = True
        if self.options.backfills:
            is_large, seconds = len(self.started) % 3 == 0, rng.choice((0.5, 1.0, 15.0))
            task.update({"cpu_limit": 1.5 if is_large else 0.5, "job_count": 5 if is_large else rng.choice((3, 8, 20))})
            task["command"][1] = f"{rng.uniform(0.5, 1.5) * seconds:.3f}"
            spec |= {"is_gang": is_large, "weight": 100.0 if is_large else 1.0, "allow_reclaimed": True}
            spec["title"] = "long" if seconds > 1.0 else "short"
        if self.options.vaults and len(self.started) % 3 == 1:
            spec["title"] = f"{self.name}-{len(self.started)}"
            spec["secure_vault"] = {"word": SECRET + spec["title"]}
        if self.options.gangs and rng.random() < self.options.gangs:
            spec.pop("fail_on_job_restart", None)
            task["gang_options"] = {"size": rng.randint(1, task["job_count"])} if rng.random() < 0.4 else {}
            spec["max_failed_job_count"] = 100
        if self.options.retries and rng.random() < self.options.retries:
            spec.pop("fail_on_job_restart", None)
            is_gang = "gang_options" in task or spec.get("is_gang")
            spec["retry_policy"] = [*RULES] if is_gang else [*RULES, OF_JOBS]
            task["memory_limit"], task["command"] = RETRIED_MEMORY, ["flaky", *task["command"][1:]]
        return StartOperation(spec)

    def _touch(self, operation_id: str) -> Command:
        """A command about one job of an operation, or about its specification."""
        rng, jobs = self.rng, self.watch.list_living(operation_id)
        if jobs and rng.random() < 0.6:
            job_id = rng.choice(jobs)
            return AbortJob(job_id, operation_id) if rng.random() < 0.5 else AbandonJob(job_id, operation_id)
        job_count = {"path": "/tasks/t/job_count", "value": rng.choice((1, 2, 3, 5, 8))}
        most_failed = {"path": "/max_failed_job_count", "value": rng.randint(3, 8)}
        return PatchOperation(operation_id, rng.choice(([job_count], [most_failed], [job_count, most_failed])))

    async def _do(self, command: Command) -> None:
        """Repeat the command under one mutation id until it is known what became of it."""
        self.sent += 1
        mutation_id = f"{self.name}-{self.sent}"
        body = msgspec.json.encode(command)
        path = "/api/v1/pools" if isinstance(command, ChangePool | ChangeTree | CreatePool) else "/api/v1/commands"
        began = self.events.now
        while self.events.now < began + GIVE_UP_S:
            asked_at_s, address = self.events.now, self.route.current.removeprefix("http://")
            try:
                reply = await self.network.ask(self.loop, address, path, {"mutation": mutation_id}, body, 5.0)
            except (TimeoutError, ConnectionError):
                await asyncio.sleep(self.route.unanswered(asked_at_s, self.events.now))
                continue
            leader = reply.headers.get(LEADER_HEADER)
            if not self.terms.accept(parse_term(reply.headers.get(TERM_HEADER))):
                pause_s = self.route.unanswered(asked_at_s, self.events.now)
            elif reply.status == 200:
                self.route.taken()
                operation_id = msgspec.json.decode(reply.body)["id"] or getattr(command, "operation_id", "")
                self.watch.acknowledged(command, operation_id, mutation_id)
                if isinstance(command, StartOperation):
                    self.mine.append(operation_id)
                    self.started.append(operation_id)
                return
            elif reply.status == 422:
                self.route.taken()
                self.watch.refused(command, reply.body)
                return
            elif is_standby(reply.status, leader, msgspec.json.decode(reply.body)["error"]):
                pause_s = self.route.standby(leader, 1.0, asked_at_s, self.events.now)
            else:
                pause_s = self.route.unanswered(asked_at_s, self.events.now)
            await asyncio.sleep(pause_s)
        self.watch.gave_up(command)
