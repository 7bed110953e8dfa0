"""Docker and Podman: their containers, over the engine's unix socket.

Both use the same HTTP interface. An event only says that it is time for a new look, and at which container."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import re
import time
from collections.abc import AsyncIterator, Iterable
from typing import Any, Final

import httpx2
import msgspec

from cpumond.core.decode import ContentError, decode_json
from cpumond.core.errors import describe
from cpumond.core.measures import DEFAULT_PERIOD_US, MAX_PERIOD_US, MIN_QUOTA_US
from cpumond.host.engine.http import ANSWER_TIMEOUT_S, StatusError, check_status, get_json
from cpumond.host.engine.model import SHORT_ID, EngineError, EngineJob, EngineReply, Publish, clean, clean_labels
from cpumond.host.engine.processes import find_engine_cgroup

RELIST_S: Final = 60.0
"""Seconds after which all containers are listed again if no event comes."""
SILENT_S: Final = 600.0
"""Seconds until the engine is asked again about a container without an answer, unless an event comes earlier."""
SETTLE_S, SETTLE_MAX_S = 0.02, 2.0
LOOK_SHARE: Final = 0.2
"""Maximum fraction of the time that an engine spends on looks. Events come in groups, so the next look waits for the
rest of a group."""
MAX_EVENT_BYTES: Final = 1 << 20
MAX_CONTAINERS: Final = 10_000
MAX_CORES: Final = 10**6
WATCHED_ACTIONS: Final = frozenset({"start", "restart", "die", "died", "update", "rename", "destroy", "remove"})
PROJECT_LABELS: Final = ("com.docker.compose.project", "io.podman.compose.project")
SERVICE_LABELS: Final = ("com.docker.compose.service", "io.podman.compose.service")
POD_LABEL, NAMESPACE_LABEL = "io.kubernetes.pod.name", "io.kubernetes.pod.namespace"
USED_LABELS: Final = (*PROJECT_LABELS, *SERVICE_LABELS, POD_LABEL, NAMESPACE_LABEL)
_ID: Final = re.compile(r"[0-9a-f]{64}")
_USERS_FOLDER: Final = re.compile(r"(?:/var)?/run/user/([0-9]{1,10})/")


class _State(msgspec.Struct, frozen=True, rename="pascal"):
    running: bool = False
    pid: int = 0


class _Config(msgspec.Struct, frozen=True, rename="pascal"):
    image: str = ""
    labels: dict[str, str] | None = None


class _HostConfig(msgspec.Struct, frozen=True, rename="pascal"):
    nano_cpus: int = 0
    cpu_quota: int = 0
    cpu_period: int = 0
    cpuset_cpus: str = ""


class Container(msgspec.Struct, frozen=True, rename="pascal"):
    """Those fields of the response to ``/containers/ID/json`` that are used."""

    id: str
    name: str = ""
    state: _State = _State()
    config: _Config = _Config()
    host_config: _HostConfig = _HostConfig()


class _Listed(msgspec.Struct, frozen=True, rename="pascal"):
    """One container of a list; only Podman's own interface reports ``pod_name``."""

    id: str
    names: list[str] | None = None
    pod_name: str = ""


class _Component(msgspec.Struct, frozen=True, rename="pascal"):
    name: str = ""


class _Version(msgspec.Struct, frozen=True, rename="pascal"):
    version: str = ""
    components: list[_Component] | None = None


class _Event(msgspec.Struct, frozen=True):
    action: str = msgspec.field(name="Action", default="")
    actor: dict[str, Any] = msgspec.field(name="Actor", default_factory=dict)


class ContainerEngine:
    """The client of one dockerd or one Podman service.

    An ordinary user's service may only name that user's cgroups. A container without a valid answer affects no other.
    """

    def __init__(self, kind: str, socket: str, cpu_version: int) -> None:
        self.kind = kind
        self.socket = socket
        self._where = f"{kind}: {socket}"
        self._cpu_version = cpu_version
        self._known: dict[str, Container] = {}
        self._pods: dict[str, str] = {}
        self._silent: dict[str, tuple[str, float]] = {}
        """Container without a valid answer -> the reason, and when to query it again, on the monotonic clock."""
        self._suspect = ""
        """The container about which the engine did not answer in time at the last look."""
        self._title = ""
        self._is_podman = kind == "podman"

    async def watch(self, publish: Publish, nudged: asyncio.Event) -> None:
        self._known.clear()
        transport = httpx2.AsyncHTTPTransport(uds=self.socket)
        try:
            owner = find_owner(self.socket)
            async with httpx2.AsyncClient(
                transport=transport,
                base_url="http://engine",
                headers={"accept-encoding": "identity"},
                timeout=ANSWER_TIMEOUT_S,
                trust_env=False,
            ) as client:
                version = await get_json(client, self._where, "/version", _Version)
                # Podman may stand in for Docker: /run/docker.sock can be a link to Podman's socket.
                is_named = any(each.name == "Podman Engine" for each in version.components or ())
                self._is_podman = is_named or self.kind == "podman"
                self._title = f"{self.kind} {clean(version.version)}".strip()
                # Events are requested before the list, so that none in between is missed.
                endless = httpx2.Timeout(ANSWER_TIMEOUT_S, read=None)
                query = {"filters": '{"type":["container"]}'}
                async with client.stream("GET", "/events", params=query, timeout=endless) as events:
                    check_status(events, self._where, "/events")
                    await self._follow(client, events, publish, nudged, owner)
        except (httpx2.HTTPError, httpx2.InvalidURL, OSError) as error:
            raise EngineError(f"{self.kind}: no response from {self.socket} ({self._word(error)})") from error

    def _word(self, error: Exception) -> str:
        if not os.path.exists(self.socket):
            return "the socket does not exist"
        if isinstance(error, (httpx2.TimeoutException, TimeoutError)):
            return f"none within {ANSWER_TIMEOUT_S:g} s"
        if isinstance(error, httpx2.RemoteProtocolError):
            return "it closed the connection"
        return describe(error) or type(error).__name__

    async def _follow(
        self, client: httpx2.AsyncClient, events: httpx2.Response, publish: Publish, nudged: asyncio.Event, owner: int
    ) -> None:
        changed: set[str] = set()

        async def read_events() -> None:
            async for event in self._read_events(events):
                changed.add(event)
                if len(changed) > MAX_CONTAINERS:
                    raise EngineError(f"{self._where}: it reports events of more containers than are allowed")
                nudged.set()
            raise EngineError(f"{self.kind}: {self.socket} closed the connection")

        reader = asyncio.create_task(read_events())
        try:
            while True:
                nudged.clear()
                # An event that is added to ``changed`` from here on came after the list was requested.
                stale = set(changed)
                changed.clear()
                began_s = time.monotonic()
                await self._look(client, stale)
                took_s = time.monotonic() - began_s
                publish(self._make_jobs(owner))
                nudge = asyncio.create_task(nudged.wait())
                await asyncio.wait({reader, nudge}, timeout=RELIST_S, return_when=asyncio.FIRST_COMPLETED)
                nudge.cancel()
                if reader.done():
                    reader.result()
                await asyncio.sleep(min(max(SETTLE_S, took_s / LOOK_SHARE), SETTLE_MAX_S))
        finally:
            reader.cancel()
            with contextlib.suppress(asyncio.CancelledError, EngineError, httpx2.HTTPError, OSError):
                await reader

    async def _look(self, client: httpx2.AsyncClient, stale: Iterable[str]) -> None:
        """List all running containers, and query those that are new or in ``stale``."""
        listed = await get_json(client, self._where, "/containers/json", list[_Listed])
        ids = [each.id for each in listed[:MAX_CONTAINERS] if _ID.fullmatch(each.id)]
        for gone in (self._known.keys() | self._silent.keys()) - set(ids) | set(stale):
            self._known.pop(gone, None)
            self._silent.pop(gone, None)
        waits = {name for name, (_, again_at_s) in self._silent.items() if time.monotonic() < again_at_s}
        new = [each for each in ids if each not in self._known and each not in waits]
        if new and self._is_podman:
            pods = await get_json(client, self._where, "/v4.0.0/libpod/containers/json", list[_Listed])
            running = set(ids)
            self._pods = {each.id: clean(each.pod_name) for each in pods if each.pod_name and each.id in running}
        for each in new:
            try:
                found = await get_json(client, self._where, f"/containers/{each}/json", Container)
            except EngineError as error:
                if isinstance(error, StatusError) and error.status == 404:
                    continue  # it has ended since it was listed
                # An invalid or too large answer may take long to read, so do not request it at each look.
                again_at_s = -math.inf if isinstance(error, StatusError) else time.monotonic() + SILENT_S
                self._silent[each] = f"{error}; ignored", again_at_s
            except TimeoutError:
                # After one time-out the engine may be stuck. If only one container times out twice, it is the cause.
                if each == self._suspect:
                    what = f"no response about container {each[:SHORT_ID]} within {ANSWER_TIMEOUT_S:g} s"
                    self._silent[each] = f"{self._where}: {what}; ignored", time.monotonic() + SILENT_S
                self._suspect = each
                raise
            else:
                self._silent.pop(each, None)
                if found.id == each:
                    self._known[each] = shorten(found)

    async def _read_events(self, events: httpx2.Response) -> AsyncIterator[str]:
        rest = b""
        async for chunk in events.aiter_raw():  # raw: compressed data would unpack to more
            *lines, rest = (rest + chunk).split(b"\n")
            if len(rest) > MAX_EVENT_BYTES:
                raise EngineError(f"{self.kind}: {self.socket}: an event is larger than {MAX_EVENT_BYTES >> 20} MiB")
            for line in lines:
                try:
                    event = decode_json(line, _Event)
                except ContentError:
                    continue  # an event of an unknown kind, or an empty line
                name = event.actor.get("ID")
                if event.action in WATCHED_ACTIONS and isinstance(name, str) and _ID.fullmatch(name):
                    yield name
            # A service, perhaps an ordinary user's, may send events without end, which must not keep this process busy.
            await asyncio.sleep(SETTLE_S)

    def _make_jobs(self, owner: int) -> EngineReply:
        found = [self._make_job(each, owner) for each in self._known.values()]
        notes = {why for why, _ in self._silent.values()} | {each for each in found if isinstance(each, str) and each}
        jobs = tuple(each for each in found if isinstance(each, EngineJob))
        return EngineReply(jobs, self._title, tuple(sorted(notes)))

    def _make_job(self, container: Container, owner: int) -> EngineJob | str:
        """Return the container as a job; a sentence if the reported cgroup is not its own; "" if it does not run."""
        if not container.state.running or container.state.pid <= 0:
            return ""
        path = find_engine_cgroup(container.state.pid, container.id, self._cpu_version)
        name = container.name.lstrip("/") or container.id[:SHORT_ID]
        if path is None or (owner and not path.startswith(f"user.slice/user-{owner}.slice/")):
            where = "a cgroup without its id in the path" if path is None else f"{path!r}"
            return f"{self.kind}: container {name!r} is reported in {where}; ignored"
        try:
            ordered_cores = read_order(container.host_config)
        except ValueError as error:
            return f"{self.kind}: container {name!r}: {error}; ignored"
        given = container.config.labels or {}
        project = next((given[key] for key in PROJECT_LABELS if given.get(key)), "")
        pod = self._pods.get(container.id) or given.get(POD_LABEL, "")
        service = next((given[key] for key in SERVICE_LABELS if given.get(key)), "")
        labels = clean_labels({
            "name": name, "image": container.config.image, "project": project, "service": service, "pod": pod,
            "namespace": given.get(NAMESPACE_LABEL), "cpuset": container.host_config.cpuset_cpus,
        })  # fmt: skip
        return EngineJob(
            self.kind,
            container.id,
            name,
            path,
            labels,
            project or clean(pod),
            ordered_cores,
            # `podman update` before 5.1 does not change the reported limits; newer ones do, with some databases.
            reports_request=not self._is_podman,
        )


def shorten(container: Container) -> Container:
    """Reduce a container to what is used: an ordinary user may run the service and send responses of any size."""
    labels = {key: clean(text) for key, text in (container.config.labels or {}).items() if key in USED_LABELS}
    config = _Config(clean(container.config.image), labels)
    host_config = msgspec.structs.replace(container.host_config, cpuset_cpus=clean(container.host_config.cpuset_cpus))
    return msgspec.structs.replace(container, name=clean(container.name), config=config, host_config=host_config)


def find_owner(socket: str) -> int:
    """Return the uid of the user whose service listens at ``socket``. For a socket in a user's own folder it is this
    user, whatever a link there leads to. Raises OSError."""
    found = _USERS_FOLDER.match(socket)
    return int(found[1]) if found is not None else os.stat(socket).st_uid


def read_order(given: _HostConfig) -> float | None:
    """Return a container's requested cores; None without a limit. Raises ValueError for a limit that no kernel accepts,
    because in the end the limit is written to the kernel."""
    if given.nano_cpus > 0:
        quota, period = given.nano_cpus, 10**9
    elif given.cpu_quota > 0:
        quota, period = given.cpu_quota, given.cpu_period or DEFAULT_PERIOD_US
    else:
        return None
    if not MIN_QUOTA_US * period <= quota * MAX_PERIOD_US <= MAX_CORES * MAX_PERIOD_US * period:
        raise ValueError(f"its CPU limit of {clean(str(quota))} / {clean(str(period))} cores is impossible")
    return quota / period
