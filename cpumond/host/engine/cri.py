"""A container runtime (containerd, CRI-O) that is queried at its CRI socket instead of a kubelet.

It uses three calls of ``runtime.v1.RuntimeService``. Their messages are parsed here field by field, because generated
code would be larger and bound to one version of protobuf. The field numbers are those of the published ``api.proto``,
which never change."""

from __future__ import annotations

import asyncio
import time
from typing import Final

from cpumond.core.measures import DEFAULT_PERIOD_US
from cpumond.host.engine.http import ANSWER_TIMEOUT_S, MAX_ANSWER_BYTES
from cpumond.host.engine.kubernetes import CONTAINER_ID, KIND, FindCgroups, RunningContainer, make_jobs, wait_for_turn
from cpumond.host.engine.model import EngineError, Publish, clean

SERVICE: Final = "/runtime.v1.RuntimeService/"
RUNNING: Final = b"\x0a\x04\x12\x02\x08\x01"
"""``ListContainersRequest``: field 1 is the filter, its field 2 the state, whose field 1 is CONTAINER_RUNNING (1)."""
LABEL: Final = "io.kubernetes."


class WireError(ValueError):
    """The bytes are not a message."""


class Message:
    """A protocol buffers message: maps each field's number to its values, numbers or bytes. Raises WireError."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0
        self._values: dict[int, list[int | bytes]] = {}
        while self._at < len(data):
            key = self._read_number()
            match key & 7:
                case 0:
                    value: int | bytes = self._read_number()
                case 1:
                    value = self._read_bytes(8)
                case 2:
                    value = self._read_bytes(self._read_number())
                case 5:
                    value = self._read_bytes(4)
                case _:
                    raise WireError(f"a field of type {key & 7}")
            self._values.setdefault(key >> 3, []).append(value)

    def _read_number(self) -> int:
        number = 0
        for shift in range(0, 70, 7):
            if self._at >= len(self._data):
                raise WireError("it ends too early")
            byte = self._data[self._at]
            self._at += 1
            number |= (byte & 127) << shift
            if byte < 128:
                return number
        raise WireError("a number of more than 10 bytes")

    def _read_bytes(self, length: int) -> bytes:
        begin, self._at = self._at, self._at + length
        if self._at > len(self._data):
            raise WireError("it ends too early")
        return self._data[begin : self._at]

    def number(self, field: int) -> int:
        """Return a signed number, 0 if it is missing."""
        value = self._values.get(field, [0])[-1]
        if not isinstance(value, int):
            raise WireError(f"field {field} is not a number")
        return value - (1 << 64) if value >= 1 << 63 else value

    def many(self, field: int) -> list[bytes]:
        found = [each for each in self._values.get(field, ()) if isinstance(each, bytes)]
        if len(found) < len(self._values.get(field, ())):
            raise WireError(f"field {field} is a number, not text or a message")
        return found

    def text(self, field: int) -> str:
        """Return a text, "" if it is missing."""
        return (self.many(field) or [b""])[-1].decode(errors="replace")

    def message(self, field: int) -> Message:
        """Return a message, an empty one if it is missing."""
        return Message((self.many(field) or [b""])[-1])

    def has(self, field: int) -> bool:
        return field in self._values

    def mapping(self, field: int) -> dict[str, str]:
        return {each.text(1): each.text(2) for each in map(Message, self.many(field))}


def encode_status_request(container_id: str) -> bytes:
    """Encode ``ContainerStatusRequest`` for an id of fewer than 128 characters."""
    return b"\x0a" + bytes([len(container_id)]) + container_id.encode()


def read_container(listed: Message, status: Message) -> RunningContainer | None:
    """Return the container that an entry in ``ListContainersResponse`` and a ``ContainerStatusResponse`` describe; None
    if it belongs to no pod."""
    labels = listed.mapping(8)
    names = {key: labels.get(f"{LABEL}{key}", "") for key in ("pod.uid", "pod.namespace", "pod.name", "container.name")}
    if not all(names.values()):
        return None
    resources = status.message(1).message(16)
    given = resources.message(1)
    quota_us, period_us = given.number(2), given.number(1)
    return RunningContainer(
        listed.text(1),
        names["pod.uid"],
        names["pod.namespace"],
        names["pod.name"],
        names["container.name"],
        listed.message(4).text(18) or listed.message(4).text(1),
        ordered_cores=quota_us / (period_us if period_us > 0 else DEFAULT_PERIOD_US) if quota_us > 0 else None,
        # Runtimes before CRI 1.26 do not report the request; then the limit found in the cgroup is the request.
        reports_request=resources.has(1),
    )


class CriEngine:
    """The client of one runtime. It does not report QoS classes, but cgroups' paths show them."""

    kind = KIND

    def __init__(self, socket: str, find_cgroups: FindCgroups) -> None:
        self._socket = socket
        self._where = f"{KIND}: {socket}"
        self._find_cgroups = find_cgroups

    async def watch(self, publish: Publish, nudged: asyncio.Event) -> None:
        try:
            import grpc.aio
        except ImportError as error:
            raise EngineError(
                f"{self._where}: a CRI socket needs grpcio: `pip install grpcio`, or omit `socket` to query the kubelet"
            ) from error
        options = [
            ("grpc.max_receive_message_length", MAX_ANSWER_BYTES),
            ("grpc.default_authority", "localhost"),
            ("grpc.enable_http_proxy", 0),
            ("grpc.use_local_subchannel_pool", 1),
        ]
        try:
            async with grpc.aio.insecure_channel(f"unix:{self._socket}", options) as channel:

                async def ask(method: str, request: bytes) -> Message:
                    call = channel.unary_unary(f"{SERVICE}{method}")
                    return Message(await call(request, timeout=ANSWER_TIMEOUT_S))

                version = await ask("Version", b"")
                title = clean(f"{version.text(2)} {version.text(3)}".strip())
                while True:
                    nudged.clear()
                    began_s = time.monotonic()
                    found = []
                    for each in map(Message, (await ask("ListContainers", RUNNING)).many(1)):
                        if each.number(6) != 1 or not CONTAINER_ID.fullmatch(each.text(1)):
                            continue
                        try:
                            status = await ask("ContainerStatus", encode_status_request(each.text(1)))
                        except grpc.aio.AioRpcError as error:
                            if error.code() != grpc.StatusCode.NOT_FOUND:
                                raise
                            continue  # it has ended since it was listed
                        found.append(read_container(each, status))
                    publish(make_jobs(filter(None, found), self._find_cgroups(), title))
                    await wait_for_turn(nudged, began_s)
        except grpc.aio.AioRpcError as error:
            detail = clean(error.details() or "")
            raise EngineError(f"{self._where}: no response ({error.code().name.lower()}: {detail})") from error
        except WireError as error:
            raise EngineError(f"{self._where}: its response is invalid: {error}") from error
