"""One connection to systemd on the system bus; once it is lost, the caller makes a new one."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable
from typing import Any, Final

from cpumond.core.errors import describe

try:
    from dbus_fast import BusType, Message, MessageType, Variant
    from dbus_fast.aio import MessageBus
except ImportError as error:
    MISSING = str(error)
else:
    MISSING = ""

SYSTEMD: Final = "org.freedesktop.systemd1"
MANAGER: Final = f"{SYSTEMD}.Manager"
MANAGER_PATH: Final = "/org/freedesktop/systemd1"
BUS: Final = "org.freedesktop.DBus"
BUS_PATH: Final = "/org/freedesktop/DBus"
PROPERTIES: Final = f"{BUS}.Properties"
RULES: Final = (
    f"sender='{BUS}',member='NameOwnerChanged',arg0='{SYSTEMD}'",
    f"sender='{SYSTEMD}',interface='{MANAGER}',member='Reloading'",
)
"""Rules for signals that all callers need: systemd came or went, or has reloaded its units."""

CONNECT_TIMEOUT_S = 4.5
CALL_TIMEOUT_S = 25.0
"""Maximum seconds for one call. It is long, because systemd does not respond while it reloads its units."""
RECONNECT_FIRST_S = 0.1
RECONNECT_MAX_S = 10.0
LOST: Final = "the connection to the system bus is lost"
DENIED: Final = ("AccessDenied", "InteractiveAuthorizationRequired", "AuthFailed")
_TRANSIENT: Final = (
    "ServiceUnknown", "NameHasNoOwner", "NoReply", "Timeout", "TimedOut", "Disconnected", "NoServer", "Spawn.",
)  # fmt: skip


class BusAway(Exception):  # noqa: N818 - a state of the world, handled close by
    """No response: the connection is lost, or systemd is not on the bus now. The call may have been carried out."""


class Refused(Exception):  # noqa: N818 - an answer, handled close by
    """The response is an error. ``name``: the last word of the error's name. ``text``: systemd's sentence."""

    def __init__(self, name: str, text: str) -> None:
        super().__init__(f"{text} ({name})")
        self.name = name.rpartition(".")[2]
        self.text = text


class BusConnection:
    """A connection for one event loop.

    ``on_signal`` is called with member, path and body of each signal; ``address`` "" is the system bus.

    Raises ImportError if the library is missing."""

    def __init__(self, on_signal: Callable[[str, str, list[Any]], None], address: str = "") -> None:
        if MISSING:
            raise ImportError(MISSING)
        self._on_signal = on_signal
        self._address = address
        self._bus: MessageBus | None = None

    async def connect(self, rules: Iterable[str]) -> None:
        """Connect, and subscribe to the signals that match ``rules``. Raises BusAway."""
        self._bus = None
        try:
            if self._address:
                self._bus = MessageBus(bus_address=self._address, negotiate_unix_fd=True)
            else:
                self._bus = MessageBus(bus_type=BusType.SYSTEM, negotiate_unix_fd=True)
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                await self._bus.connect()
            self._bus.add_message_handler(self._on_message)
            for rule in rules:
                await self.match("AddMatch", rule)
        except Exception as error:
            # The library raises any kind of error for a missing or broken bus.
            self.disconnect()
            detail = describe(error) if isinstance(error, OSError) else str(error) or type(error).__name__
            raise BusAway(f"the system bus cannot be reached: {detail}") from error

    def _on_message(self, message: Message) -> None:
        if message.message_type is MessageType.SIGNAL:
            self._on_signal(message.member or "", message.path or "", message.body)

    def wait_for_loss(self) -> asyncio.Future[None]:
        """Return a future that is done or failed once the connection is lost, for whatever reason."""
        assert self._bus is not None
        return asyncio.ensure_future(self._bus.wait_for_disconnect())  # type: ignore[no-untyped-call]

    def disconnect(self) -> None:
        if self._bus is not None:
            self._bus.disconnect()

    async def call(
        self, member: str, signature: str = "", *body: Any, path: str = MANAGER_PATH, interface: str = MANAGER,
        destination: str = SYSTEMD, descriptors: Iterable[int] = (),
    ) -> list[Any]:  # fmt: skip
        """Call a method, by default of systemd's manager. Raises BusAway or Refused."""
        assert self._bus is not None
        try:
            message = Message(
                destination, path, interface, member, signature=signature, body=list(body), unix_fds=list(descriptors)
            )
            # Not ``wait_for``, which can lose a cancellation before Python 3.12.
            async with asyncio.timeout(CALL_TIMEOUT_S):
                reply = await self._bus.call(message)
        except (TypeError, ValueError) as error:
            # The arguments do not fit into a message.
            raise Refused("InvalidArgs", str(error)) from error
        except Exception as error:
            raise BusAway(
                f"systemd does not respond on the system bus: {str(error) or type(error).__name__}"
            ) from error
        if reply is None:
            raise BusAway(LOST)
        if reply.message_type is MessageType.ERROR:
            name = reply.error_name or ""
            text = str(reply.body[0]) if reply.body else name
            if name.removeprefix(f"{BUS}.Error.").startswith(_TRANSIENT):
                raise BusAway(f"systemd does not respond on the system bus: {text}")
            raise Refused(name, text)
        return list(reply.body)

    async def get(self, interface: str, name: str, path: str = MANAGER_PATH) -> Any:
        """Return a property of one of systemd's objects. Raises BusAway or Refused."""
        return (await self.call("Get", "ss", interface, name, path=path, interface=PROPERTIES))[0].value

    async def set_properties(self, unit: str, properties: Iterable[tuple[str, str, Any]]) -> None:
        """Set properties (name, signature, value) of a unit until the next boot. Raises BusAway or Refused."""
        await self.call("SetUnitProperties", "sba(sv)", unit, True, pack(properties))

    async def subscribe(self) -> None:
        """Ask systemd for its signals. Raises BusAway."""
        with contextlib.suppress(Refused):  # it may be subscribed already
            await self.call("Subscribe")

    async def match(self, member: str, rule: str) -> None:
        """Call AddMatch or RemoveMatch for the signals of a rule. Raises BusAway or Refused."""
        await self.call(member, "s", f"type='signal',{rule}", path=BUS_PATH, interface=BUS, destination=BUS)


def pack(properties: Iterable[tuple[str, str, Any]]) -> list[list[Any]]:
    return [[name, Variant(signature, value)] for name, signature, value in properties]
