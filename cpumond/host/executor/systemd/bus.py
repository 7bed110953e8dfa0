"""systemd for the executor: one connection, which is restored when it is lost, and calls that return the response."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Callable, Iterable
from typing import Any

import structlog

from cpumond.host.executor.model import ExecutorError
from cpumond.host.systemd.connection import (
    MANAGER,
    PROPERTIES,
    RECONNECT_FIRST_S,
    RECONNECT_MAX_S,
    RULES,
    SYSTEMD,
    BusAway,
    BusConnection,
    Refused,
    pack,
)

log = structlog.get_logger()


class SystemdBus:
    """A connection for one event loop. ``connected`` is set while there is a connection. ``on_signal`` is called with
    the member, path and body of each signal."""

    def __init__(self, on_signal: Callable[[str, str, list[Any]], None]) -> None:
        self.connected = asyncio.Event()
        self.version = 0
        self.root_cgroup = ""
        self._on_signal = on_signal
        self._bus: BusConnection | None = None
        self._rules = dict.fromkeys(RULES)

    async def connect(self) -> None:
        """Connect and subscribe to the signals. Raises ExecutorError."""
        try:
            bus = BusConnection(self._on_signal)
        except ImportError as error:
            raise ExecutorError(
                f"executor.kind systemd needs the package dbus-fast ({error}); pip install dbus-fast"
            ) from error
        try:
            await bus.connect(list(self._rules))
            await bus.subscribe()
            number = re.search(r"\d+", str(await bus.get(MANAGER, "Version")))
            self.version = int(number[0]) if number else 0
            self.root_cgroup = str(await bus.get(MANAGER, "ControlGroup"))
        except (BusAway, Refused) as error:
            bus.disconnect()
            raise ExecutorError(
                f"{explain(error)}; executor.kind systemd needs a host that runs systemd and dbus (see "
                '`systemctl status dbus`), else set executor.kind = "cgroup"'
            ) from error
        self._bus = bus
        self.connected.set()

    async def keep_connected(self, on_return: Callable[[], None]) -> None:
        while True:
            assert self._bus is not None
            await self._wait_for_loss(self._bus)
            self._bus = None
            self.connected.clear()
            log.warning("bus_lost", advice="jobs continue; their ends are noticed when the system bus is back")
            pause_s = RECONNECT_FIRST_S
            while not self.connected.is_set():
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, RECONNECT_MAX_S)
                with contextlib.suppress(ExecutorError):
                    await self.connect()
            log.info("bus_back")
            on_return()

    async def close(self) -> None:
        bus, self._bus = self._bus, None
        if bus is not None:
            bus.disconnect()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.5):
                    await self._wait_for_loss(bus)

    @staticmethod
    async def _wait_for_loss(bus: BusConnection) -> None:
        """Wait until the connection is lost; a cancelled wait leaves the bus as it is."""
        with contextlib.suppress(Exception):
            await asyncio.shield(bus.wait_for_loss())

    @property
    def connection(self) -> BusConnection:
        """The present connection. Raises BusAway."""
        if self._bus is None:
            raise BusAway("the system bus is down")
        return self._bus

    async def call(self, member: str, signature: str = "", *body: Any, **place: Any) -> list[Any]:
        """Call a method, see ``BusConnection.call``. Raises BusAway or Refused."""
        return await self.connection.call(member, signature, *body, **place)

    async def call_until_answered(self, member: str, signature: str, *body: Any, **place: Any) -> list[Any]:
        """Call a method until there is a response, however long that takes. Raises Refused."""
        while True:
            await self.connected.wait()
            try:
                return await self.call(member, signature, *body, **place)
            except BusAway:
                await asyncio.sleep(RECONNECT_FIRST_S)

    async def start_unit(
        self, unit: str, properties: Iterable[tuple[str, str, Any]], descriptors: Iterable[int] = ()
    ) -> None:
        """Start a transient unit with properties (name, signature, value). Raises BusAway or Refused."""
        await self.call(
            "StartTransientUnit", "ssa(sv)a(sa(sv))", unit, "fail", pack(properties), [], descriptors=descriptors
        )

    async def follow(self, path: str) -> None:
        """Receive the signals about an object's properties, also on later connections. Raises BusAway or Refused."""
        self._rules[_rule(path)] = None
        await self.connection.match("AddMatch", _rule(path))

    async def unfollow(self, path: str) -> None:
        """Stop receiving the signals that ``follow`` requested. Raises BusAway or Refused."""
        self._rules.pop(_rule(path), None)
        await self.connection.match("RemoveMatch", _rule(path))


def _rule(path: str) -> str:
    return f"sender='{SYSTEMD}',interface='{PROPERTIES}',member='PropertiesChanged',path='{path}'"


def explain(error: BusAway | Refused) -> str:
    return str(error) if isinstance(error, BusAway) else f"systemd does not respond on the system bus: {error}"
