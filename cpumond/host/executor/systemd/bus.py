"""systemd on the system bus: one connection that is made again when it is lost, and calls with their answers."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Callable, Iterable
from typing import Any, Final

import structlog

from cpumond.core.errors import describe
from cpumond.host.executor.model import ExecutorError

try:
    from dbus_fast import BusType, Message, MessageType, Variant
    from dbus_fast.aio import MessageBus
except ImportError as error:
    _MISSING = str(error)
else:
    _MISSING = ""

SYSTEMD: Final = "org.freedesktop.systemd1"
MANAGER: Final = f"{SYSTEMD}.Manager"
MANAGER_PATH: Final = "/org/freedesktop/systemd1"
BUS: Final = "org.freedesktop.DBus"
PROPERTIES: Final = f"{BUS}.Properties"

CONNECT_TIMEOUT_S = 4.5
CALL_TIMEOUT_S = 25.0
"""Of one call; systemd answers nothing while it reloads its units."""
RECONNECT_FIRST_S = 0.1
RECONNECT_MAX_S = 10.0
_TRANSIENT: Final = (
    "ServiceUnknown", "NameHasNoOwner", "NoReply", "Timeout", "TimedOut", "Disconnected", "NoServer", "Spawn.",
)  # fmt: skip

log = structlog.get_logger()


class BusAway(Exception):  # noqa: N818 - a state of the world, handled close by
    """No answer: the connection is lost, or systemd is not on the bus just now. The call may have been carried out."""


class Refused(Exception):  # noqa: N818 - an answer, handled close by
    """The answer is an error: the last word of its ``name``, and systemd's sentence, ``text``."""

    def __init__(self, name: str, text: str) -> None:
        super().__init__(f"{text} ({name})")
        self.name = name.rpartition(".")[2]
        self.text = text


class SystemdBus:
    """For one event loop. ``connected`` is set while there is a bus; ``on_signal`` gets member, path and body of each
    signal."""

    def __init__(self, on_signal: Callable[[str, str, list[Any]], None]) -> None:
        self.connected = asyncio.Event()
        self.version = 0
        """The version of systemd."""
        self.root_cgroup = ""
        self._on_signal = on_signal
        self._bus: MessageBus | None = None
        self._rules = dict.fromkeys(
            (
                f"sender='{BUS}',member='NameOwnerChanged',arg0='{SYSTEMD}'",
                f"sender='{SYSTEMD}',interface='{MANAGER}',member='Reloading'",
            )
        )

    async def connect(self) -> None:
        """Connect and ask for the signals. Raises ExecutorError."""
        if _MISSING:
            raise ExecutorError(
                f"executor.kind systemd needs the package dbus-fast ({_MISSING}); pip install dbus-fast"
            )
        bus = None
        try:
            bus = MessageBus(bus_type=BusType.SYSTEM, negotiate_unix_fd=True)
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                await bus.connect()
            self._bus = bus
            bus.add_message_handler(self._on_message)
            for rule in list(self._rules):
                await self._match("AddMatch", rule)
            await self.subscribe()
            number = re.search(r"\d+", str(await self.read_property(MANAGER, "Version")))
            self.version = int(number[0]) if number else 0
            self.root_cgroup = str(await self.read_property(MANAGER, "ControlGroup"))
        except Exception as error:
            # Whatever the library raises for a bus that is absent or broken.
            self._bus = None
            if bus is not None:
                bus.disconnect()
            detail = describe(error) if isinstance(error, OSError) else str(error) or type(error).__name__
            raise ExecutorError(
                f"the system bus cannot be reached: {detail}; executor.kind systemd needs a host that runs systemd and "
                'dbus (look at `systemctl status dbus`), else set executor.kind = "cgroup"'
            ) from error
        self.connected.set()

    async def keep_connected(self, on_return: Callable[[], None]) -> None:
        """Connect again whenever the connection is lost, forever."""
        while True:
            assert self._bus is not None
            await self._wait_for_disconnect(self._bus)
            self._bus = None
            self.connected.clear()
            log.warning("bus_lost", advice="jobs go on; their ends are seen when the system bus is back")
            pause_s = RECONNECT_FIRST_S
            while not self.connected.is_set():
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, RECONNECT_MAX_S)
                with contextlib.suppress(ExecutorError):
                    await self.connect()
            log.info("bus_back")
            on_return()

    async def close(self) -> None:
        """Disconnect, and wait a moment for that."""
        bus, self._bus = self._bus, None
        if bus is not None:
            bus.disconnect()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.5):
                    await self._wait_for_disconnect(bus)

    @staticmethod
    async def _wait_for_disconnect(bus: MessageBus) -> None:
        """Wait until the connection is lost, for whatever reason; a wait that is cancelled leaves the bus as it is."""
        waiting = asyncio.ensure_future(bus.wait_for_disconnect())  # type: ignore[no-untyped-call]
        with contextlib.suppress(Exception):
            await asyncio.shield(waiting)

    def _on_message(self, message: Message) -> None:
        if message.message_type is MessageType.SIGNAL:
            self._on_signal(message.member or "", message.path or "", message.body)

    async def call(
        self,
        member: str,
        signature: str = "",
        *body: Any,
        path: str = MANAGER_PATH,
        interface: str = MANAGER,
        destination: str = SYSTEMD,
        descriptors: Iterable[int] = (),
    ) -> list[Any]:
        """Call a method, of systemd's manager unless said otherwise. Raises BusAway or Refused."""
        bus = self._bus
        if bus is None:
            raise BusAway("not connected")
        try:
            message = Message(
                destination, path, interface, member, signature=signature, body=list(body), unix_fds=list(descriptors)
            )
            # Not wait_for: before Python 3.12 it can lose a cancellation.
            async with asyncio.timeout(CALL_TIMEOUT_S):
                reply = await bus.call(message)
        except (TypeError, ValueError) as error:
            # What cannot be put into a message.
            raise Refused("InvalidArgs", str(error)) from error
        except Exception as error:
            raise BusAway(str(error)) from error
        if reply is None:
            raise BusAway("disconnected")
        if reply.message_type is MessageType.ERROR:
            name = reply.error_name or ""
            if name.removeprefix(f"{BUS}.Error.").startswith(_TRANSIENT):
                raise BusAway(name)
            raise Refused(name, str(reply.body[0]) if reply.body else name)
        return list(reply.body)

    async def call_until_answered(self, member: str, signature: str, *body: Any, **place: Any) -> list[Any]:
        """Call a method until there is an answer, however long that takes. Raises Refused."""
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
        said = [[name, Variant(signature, value)] for name, signature, value in properties]
        await self.call("StartTransientUnit", "ssa(sv)a(sa(sv))", unit, "fail", said, [], descriptors=descriptors)

    async def set_properties(self, unit: str, properties: Iterable[tuple[str, str, Any]]) -> None:
        """Set properties (name, signature, value) of a unit until the next boot. Raises BusAway or Refused."""
        said = [[name, Variant(signature, value)] for name, signature, value in properties]
        await self.call("SetUnitProperties", "sba(sv)", unit, True, said)

    async def read_property(self, interface: str, name: str) -> Any:
        """A property of systemd itself. Raises BusAway or Refused."""
        return (await self.call("Get", "ss", interface, name, interface=PROPERTIES))[0].value

    async def subscribe(self) -> None:
        """Have systemd send its signals. Raises BusAway."""
        # AlreadySubscribed is as good.
        with contextlib.suppress(Refused):
            await self.call("Subscribe")

    async def follow(self, path: str) -> None:
        """Get the signals of an object's properties, on each later connection, too. Raises BusAway or Refused."""
        self._rules[_rule(path)] = None
        await self._match("AddMatch", _rule(path))

    async def unfollow(self, path: str) -> None:
        """The opposite of ``follow``. Raises BusAway or Refused."""
        self._rules.pop(_rule(path), None)
        await self._match("RemoveMatch", _rule(path))

    async def _match(self, member: str, rule: str) -> None:
        place: dict[str, Any] = {"path": "/org/freedesktop/DBus", "interface": BUS, "destination": BUS}
        await self.call(member, "s", f"type='signal',{rule}", **place)


def _rule(path: str) -> str:
    return f"sender='{SYSTEMD}',interface='{PROPERTIES}',member='PropertiesChanged',path='{path}'"
