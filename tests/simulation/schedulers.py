"""A scheduler's process: the real ``Scheduler`` while it leads, behind an application of three requests."""

import asyncio
from collections.abc import Mapping, MutableMapping
from typing import Any

import msgspec
from simulation.database import Database, SimArbiter
from simulation.events import Events, VirtualLoop
from simulation.network import Network, Reply

from cpumond.api.yt.replies import ReplyCache, export_reply
from cpumond.api.yt.values import YtError
from cpumond.core.errors import CpumondError
from cpumond.core.term import TERM_HEADER, parse_term
from cpumond.core.wire import NodeHeartbeat, NodeRegistration
from cpumond.scheduler.model import Rules
from cpumond.scheduler.model.node_failures import NodeFailures
from cpumond.scheduler.program.door import REFUSAL, LeaderDoor, describe_standby, standby_headers
from cpumond.scheduler.program.leading import App, Leading, Receive, Scope, Send
from cpumond.scheduler.program.vault_keys import FileKeys
from cpumond.scheduler.service import Clock, Scheduler
from cpumond.scheduler.service import Reply as Done
from cpumond.scheduler.service.stored import MUTATION
from cpumond.scheduler.settings.commands import ConfigCommand
from cpumond.scheduler.settings.operations import OperationCommand
from cpumond.scheduler.store import Change, Store, StoreError

USER = "u"
COMMANDS: msgspec.json.Decoder[OperationCommand] = msgspec.json.Decoder(OperationCommand)
POOL_COMMANDS: msgspec.json.Decoder[ConfigCommand] = msgspec.json.Decoder(ConfigCommand)
RULES = Rules(
    spare=(0.0, 0.0, 0.0, 0.0, 0.0),
    node_heartbeat_timeout_s=20.0,
    waiting_job_timeout_s=10.0,
    heartbeat_period_s=1.0,
    vault_keys=FileKeys([b"k" * 32]),
    node_failures=NodeFailures(pause_s=5.0, max_pause_s=20.0, max_holds=3),
)


class Machine:
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


class ReignApp:
    """What agents and clients ask of one reign; an ASGI application."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.replies = ReplyCache(scheduler.clock.now)
        self.replies.restore(scheduler.remembered.values())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = (await receive())["body"]
        await _send(send, await self._answer(scope["path"], scope["headers"], body))

    async def _answer(self, path: str, headers: Mapping[str, str], body: bytes) -> Reply:
        try:
            if path.endswith("/heartbeats"):
                answer = await self.scheduler.heartbeat(msgspec.json.decode(body, type=NodeHeartbeat))
                return self._reply(409 if answer.register else 200, answer)
            if path.endswith("/nodes"):
                return self._reply(200, await self.scheduler.register(msgspec.json.decode(body, type=NodeRegistration)))
            return self._reply(200, await self._execute(path, headers["mutation"], body))
        except StoreError as error:
            return self._reply(503, {"error": str(error)})
        except CpumondError as error:
            is_temporary = isinstance(error, YtError) and getattr(error, "code", None) in (100, 105)
            return self._reply(503 if is_temporary else 422, {"error": str(error)})

    async def _execute(self, path: str, mutation_id: str, body: bytes) -> Any:
        command = (POOL_COMMANDS if path.endswith("/pools") else COMMANDS).decode(body)

        async def work() -> Any:
            def remember(reply: Done) -> Change:
                entry = export_reply(USER, mutation_id, "command", self.scheduler.clock.now(), {"id": reply.id})
                return Change(MUTATION, f"{USER} {mutation_id}", msgspec.json.encode(entry))

            # Each in the name of a user of its own, by which its entry in the log is known.
            return {"id": (await self.scheduler.execute(command, mutation_id, remember)).id}

        return await self.replies.run(USER, mutation_id, "command", work)

    def _reply(self, status: int, value: Any) -> Reply:
        return Reply(status, {}, msgspec.json.encode(value))


class SchedulerProcess:
    """One run of ``cpumond scheduler`` on a machine: the real ``Leading`` and the real door, without sockets."""

    def __init__(
        self, machine: Machine, address: str, database: Database, network: Network, watch: Any, lease_s: float
    ) -> None:
        self.machine = machine
        self.address = address
        self.database = database
        self.watch = watch
        self.events = machine.events
        self.loop = VirtualLoop(machine.events, f"{machine.name}/scheduler", machine)
        self.loop.on_kill.append(self._closed_by_kernel)
        self.stopping = asyncio.Event()
        self.is_ending = False
        """Whether it was asked to end, which a stopped process hears only once it goes on."""
        arbiter = SimArbiter(database, self)
        self.leading = Leading(arbiter, self._open_reign, address, lease_s, lambda: self.events.now)
        self.door = LeaderDoor(self.leading, self._standby)
        network.serve(address, self.loop, self.handle)
        self.loop.start(self._main())

    @property
    def scheduler(self) -> Scheduler | None:
        """Of the reign in which it may answer now, if there is one."""
        reign = self.leading.find_reign()
        return None if reign is None else reign.scheduler

    def _closed_by_kernel(self) -> None:
        if self.database.can_reach(self):
            self.database.end_of(self)

    def _new_id(self) -> str:
        return f"{self.events.rng.getrandbits(48):x}"

    async def _main(self) -> None:
        await self.leading.run(self.stopping)
        self.loop.kill()

    def _open_reign(self, store: Store) -> tuple[Scheduler, App]:
        scheduler = Scheduler(RULES, store, MachineClock(self.machine), 1.0, self._new_id)
        self.watch.loaded(self, self.leading.lead.term, scheduler)
        return scheduler, ReignApp(scheduler)

    async def handle(self, path: str, headers: Mapping[str, str], body: bytes) -> Reply:
        """One request through the door."""
        status, told, content = 0, {}, b""

        async def send(message: MutableMapping[str, Any]) -> None:
            nonlocal status, told, content
            if message["type"] == "http.response.start":
                status = message["status"]
                told = {name.decode(): value.decode() for name, value in message["headers"]}
            else:
                content += message["body"]

        async def receive() -> MutableMapping[str, Any]:
            return {"type": "http.request", "body": body}

        await self.door({"type": "http", "path": path, "headers": headers}, receive, send)
        self.watch.replied(self.address, parse_term(told.get(TERM_HEADER)))
        return Reply(status, told, content)

    async def _standby(self, scope: Scope, receive: Receive, send: Send) -> None:
        seen = self.leading.view()
        text = describe_standby(seen, self.address, str(scope.get(REFUSAL, "")))
        await _send(send, Reply(503, standby_headers(seen, self.address), msgspec.json.encode({"error": text})))


async def _send(send: Send, reply: Reply) -> None:
    headers = [(name.encode(), value.encode()) for name, value in reply.headers.items()]
    await send({"type": "http.response.start", "status": reply.status, "headers": headers})
    await send({"type": "http.response.body", "body": reply.body})
