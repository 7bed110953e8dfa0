"""A scheduler's process: the real ``Scheduler`` while it leads, behind an application of three requests."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from typing import Any

import msgspec
from simulation.database import Database, SimArbiter
from simulation.events import Events, VirtualLoop
from simulation.network import Network, Reply

from cpumond.api.yt.replies import ReplyCache, export_reply
from cpumond.api.yt.values import YtError
from cpumond.core.errors import CpumondError
from cpumond.core.term import LEADER_HEADER, TERM_HEADER
from cpumond.core.wire import Heartbeat, NodeRegistration
from cpumond.scheduler.model import Rules
from cpumond.scheduler.operations import OperationCommand
from cpumond.scheduler.service import Clock, Scheduler
from cpumond.scheduler.service import Reply as Done
from cpumond.scheduler.settings.commands import ConfigCommand
from cpumond.scheduler.store import Change, StoreError
from cpumond.scheduler.stored import MUTATION

USER = "u"
COMMANDS: msgspec.json.Decoder[OperationCommand] = msgspec.json.Decoder(OperationCommand)
POOL_COMMANDS: msgspec.json.Decoder[ConfigCommand] = msgspec.json.Decoder(ConfigCommand)
RULES = Rules(
    spare=(0.0, 0.0, 0.0, 0.0, 0.0), node_heartbeat_timeout_s=20.0, waiting_job_timeout_s=10.0, heartbeat_period_s=1.0
)


class Machine:
    """A host of a scheduler: its name in the network, its clocks."""

    def __init__(self, events: Events, name: str) -> None:
        self.events = events
        self.name = name
        self.wall_offset_s = 1.7e9 + events.rng.uniform(-20.0, 20.0)


class MachineClock(Clock):
    """The scheduler's clock: its host's wall clock at the start plus the time since then."""

    def __init__(self, machine: Machine) -> None:
        self.scale = 1.0
        self._events = machine.events
        self._offset_s = machine.wall_offset_s

    def now(self) -> float:
        return self._events.now + self._offset_s


class App:
    """What agents and clients ask of one reign."""

    def __init__(self, scheduler: Scheduler, term: int) -> None:
        self.scheduler = scheduler
        self.term = term
        self.replies = ReplyCache(scheduler.clock.now)
        self.replies.restore(scheduler.remembered.values())

    async def __call__(self, path: str, headers: Mapping[str, str], body: bytes) -> Reply:
        try:
            if path.endswith("/heartbeats"):
                answer = await self.scheduler.heartbeat(msgspec.json.decode(body, type=Heartbeat))
                return self._reply(409 if answer.register else 200, answer)
            if path.endswith("/nodes"):
                return self._reply(200, await self.scheduler.register(msgspec.json.decode(body, type=NodeRegistration)))
            return self._reply(200, await self._execute(path, headers["mutation"], body))
        except StoreError as error:
            return self._reply(503, {"error": str(error)})
        except CpumondError as error:
            return self._reply(503 if _tells_to_try_again(error) else 422, {"error": str(error)})

    async def _execute(self, path: str, mutation_id: str, body: bytes) -> Any:
        command = (POOL_COMMANDS if path.endswith("/pools") else COMMANDS).decode(body)

        async def work() -> Any:
            def remember(reply: Done) -> Change:
                entry = export_reply(USER, mutation_id, "command", self.scheduler.clock.now(), {"id": reply.id})
                return Change(MUTATION, f"{USER} {mutation_id}", msgspec.json.encode(entry))

            done = await self.scheduler.execute(command, USER, remember)
            return {"id": done.id}

        return await self.replies.run(USER, mutation_id, "command", work)

    def _reply(self, status: int, value: Any) -> Reply:
        return Reply(status, {TERM_HEADER: str(self.term)}, msgspec.json.encode(value))


def _tells_to_try_again(error: CpumondError) -> bool:
    return isinstance(error, YtError) and getattr(error, "code", None) in (100, 105)


class SchedulerProcess:
    """One run of ``cpumond scheduler`` on a machine."""

    def __init__(
        self, machine: Machine, address: str, database: Database, network: Network, watch: Any, lease_s: float = 10.0
    ) -> None:
        self.machine = machine
        self.address = address
        self.database = database
        self.network = network
        self.watch = watch
        self.lease_s = lease_s
        self.events = machine.events
        self.loop = VirtualLoop(machine.events, f"{machine.name}/scheduler", machine)
        self.loop.on_kill.append(self._closed_by_kernel)
        self.app: App | None = None
        self.term = 0
        self.leader = ""
        self.valid_until_s = 0.0
        network.serve(address, self.loop, self.handle)
        self.loop.start(self._main())

    @property
    def scheduler(self) -> Scheduler | None:
        """Of the present reign, if there is one."""
        return None if self.app is None else self.app.scheduler

    def _closed_by_kernel(self) -> None:
        if self.database.can_reach(self):
            self.database.end_of(self)

    def _new_id(self) -> str:
        return f"{self.events.rng.getrandbits(48):x}"

    async def handle(self, path: str, headers: Mapping[str, str], body: bytes) -> Reply:
        app = self.app
        if app is None or not self._leads():
            return self._standby()
        reply = await app(path, headers, body)
        return reply if self._leads() and self.app is app else self._standby()

    def _leads(self) -> bool:
        return self.events.now < self.valid_until_s

    def _standby(self) -> Reply:
        hint = {LEADER_HEADER: self.leader} if self.leader else {}
        return Reply(503, hint, b'{"error": "standby"}')

    async def _main(self) -> None:
        arbiter = SimArbiter(self.database, self)
        while True:
            try:
                begun = self.events.now
                lease = await asyncio.to_thread(arbiter.take, self.address, self.lease_s)
                if lease is None:
                    found = await asyncio.to_thread(arbiter.look)
                    self.leader = found.leader if found is not None else ""
                else:
                    await self._reign(arbiter, lease.term, begun)
            except StoreError:
                pass
            await asyncio.sleep(1.0)

    async def _reign(self, arbiter: SimArbiter, term: int, begun: float) -> None:
        self.term = term
        self.valid_until_s = begun + self.lease_s * 0.9
        store = await asyncio.to_thread(arbiter.open_store, term)
        stopping = asyncio.Event()
        scheduler = await asyncio.to_thread(Scheduler, RULES, store, MachineClock(self.machine), 1.0, self._new_id)
        self.watch.loaded(self, scheduler)
        running = asyncio.ensure_future(scheduler.run(stopping))
        await scheduler.ready.wait()
        self.app = App(scheduler, term)
        try:
            while self._leads():
                await asyncio.sleep(self.lease_s / 3)
                begun = self.events.now
                with contextlib.suppress(StoreError):
                    if not await asyncio.to_thread(arbiter.renew, term, self.lease_s):
                        break
                    self.valid_until_s = begun + self.lease_s * 0.9
        finally:
            self.app, self.valid_until_s = None, 0.0
            stopping.set()
            running.cancel()
            with contextlib.suppress(StoreError):
                await asyncio.to_thread(store.close)
