"""The engines whose jobs the agent follows. A thread queries them; it exists only if a source names an engine."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, NamedTuple

from cpumond.agent.config import Source
from cpumond.agent.discovery import FoundJob
from cpumond.agent.discovery.engines import PLACES, list_engines, list_places
from cpumond.core.answers import EngineAnswer
from cpumond.host.cgroup.mounts import Hierarchies
from cpumond.host.engine.model import Engine, EngineView, Key

if TYPE_CHECKING:
    from cpumond.host.engine.link import EngineThread

SERVICE_ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount"
"""Directory in a pod that contains the token of the pod's service account and the certificates of the cluster."""
ASK_NAMES_S = 1.0
"""Minimum seconds between two queries that are due to cgroups without a name."""
ANSWER_LOOK_S = 0.02
TELL_NOTHING = {"slurm"}
"""Kinds of engines that report no changes; therefore they are queried when cgroups appear or disappear."""


class Engines:
    """The engines, for the tick's thread. Only the methods ``wait`` and ``wait_for_orders`` wait for an engine."""

    def __init__(self, hierarchies: Hierarchies, node_id: str = "") -> None:
        self._hierarchies = hierarchies
        self._node_id = node_id
        self._thread: EngineThread | None = None
        self._sources: dict[Key, Source] = {}
        self._news = threading.Event()
        self._names_at_s = 0.0

    @property
    def views(self) -> Mapping[Key, EngineView]:
        return {} if self._thread is None else self._thread.views

    def follow(self, sources: Iterable[Source]) -> None:
        """From now on, query the engines of ``sources``, and no others."""
        wanted = _choose_sources(sources)
        same = [key for key in wanted if key in self._sources and _ask_alike(wanted[key], self._sources[key])]
        if len(same) == len(wanted) == len(self._sources):
            return
        if self._thread is None:
            # An agent without such a source does not load the HTTP client.
            from cpumond.host.engine.link import EngineThread

            self._thread = EngineThread(self._news.set)
        self._sources = wanted
        contexts = {key: EngineContext(self._hierarchies, wanted[key], self._node_id) for key in wanted}
        for keys in (same, wanted):  # the first call stops engines whose settings have changed
            self._thread.follow({key: functools.partial(make_engine, key, contexts[key]) for key in keys})

    def wait(self, timeout_s: float) -> None:
        """Wait up to ``timeout_s`` until each engine has answered or failed at least once."""
        end_s = time.monotonic() + timeout_s
        while not all((view := self.views.get(key)) and (view.is_up or view.problem) for key in self._sources):
            left_s = end_s - time.monotonic()
            if left_s <= 0.0 or not self._news.wait(left_s):
                return
            self._news.clear()

    def take_news(self) -> bool:
        """Return whether an engine has reported a change since the last call."""
        if not self._news.is_set():
            return False
        self._news.clear()
        return True

    def is_up(self, found: FoundJob) -> bool:
        return any(view.is_up for view in self._find_views(found).values())

    def ask(self, found: FoundJob) -> None:
        """Query a job's engine again, because another program has changed the job's limit."""
        if self._thread is not None and found.engine is not None:
            self._thread.nudge(self._find_views(found))

    def wait_for_orders(self, jobs: Iterable[FoundJob], timeout_s: float) -> bool:
        """Query again the engines of ``jobs`` that report requests, and wait for the answers of those that are up.

        An engine may have changed a request since the last query. Return whether any engine was queried; if so, the
        caller must read the views again."""
        since_s = time.monotonic()
        telling = (found for found in jobs if found.engine is not None and found.engine.reports_request)
        keys = {key for found in telling for key in self._find_views(found)}
        if self._thread is not None and keys:
            self._thread.nudge(keys)
        while any((view := self.views.get(key)) and view.is_up and (view.asked_at_s or 0.0) <= since_s for key in keys):
            left_s = since_s + timeout_s - time.monotonic()
            if left_s <= 0.0:
                break
            self._news.wait(min(left_s, ANSWER_LOOK_S))  # an answer without changes does not set it
            self._news.clear()
        return bool(keys)

    def ask_for_names(self, kinds: set[str]) -> None:
        """Query the engines of ``kinds`` again, at most once in ASK_NAMES_S, for cgroups that have no name yet."""
        keys = [key for key in self._sources if key[0] in kinds]
        if keys and self._thread is not None and time.monotonic() >= self._names_at_s:
            self._names_at_s = time.monotonic() + ASK_NAMES_S
            self._thread.nudge(keys)

    def _find_views(self, found: FoundJob) -> dict[Key, EngineView]:
        return {key: view for key in self._sources if (view := self.views.get(key)) and found.path in view.jobs}

    def view(self) -> tuple[EngineAnswer, ...]:
        """Describe each engine for people and metrics. An engine that has not answered yet counts as down."""
        found = ((key, self.views.get(key) or EngineView(key[0])) for key in self._sources)
        return tuple(
            EngineAnswer(*key, view.title, view.count_jobs(), "" if view.is_up else view.problem or "no answer yet")
            for key, view in found
        )

    def list_problems(self) -> list[str]:
        """Return sentences about engines that do not answer or that report something impossible."""
        found = []
        for view in filter(None, map(self.views.get, self._sources)):
            if view.problem:
                found.append(f"{view.problem}; its last answer is kept; jobs that it has not named stay in shadow mode")
            found += view.notes
        return found

    def close(self) -> None:
        if self._thread is not None:
            self._thread.close()


def ask_once(
    sources: Iterable[Source], hierarchies: Hierarchies, node_id: str, timeout_s: float
) -> dict[Key, EngineView]:
    """Query the engines of ``sources`` once, for a command, and return their answers. Each may take ``timeout_s``."""
    wanted = {key: source for key, source in _choose_sources(sources).items() if key[0] in ENGINES}
    if not wanted:
        return {}
    from cpumond.host.engine.link import ask_each

    contexts = {key: EngineContext(hierarchies, source, node_id) for key, source in wanted.items()}
    return ask_each({key: functools.partial(make_engine, key, contexts[key]) for key in wanted}, timeout_s)


def _choose_sources(sources: Iterable[Source]) -> dict[Key, Source]:
    """Return each engine to query, with the first source that names this engine."""
    wanted: dict[Key, Source] = {}
    for source in sources:
        for key in list_engines(source) if source.is_engine else ():
            wanted.setdefault(key, source)
    return wanted


def _ask_alike(one: Source, other: Source) -> bool:
    return (one.token_file, one.ca_file) == (other.token_file, other.ca_file)


class EngineContext(NamedTuple):
    """Arguments of an engine's client, other than the socket."""

    hierarchies: Hierarchies
    source: Source
    node_id: str


def make_engine(key: Key, context: EngineContext) -> Engine:
    return ENGINES[key[0]](key[1], context)


def _make_containers(kind: str) -> Callable[[str, EngineContext], Engine]:
    def make(socket: str, context: EngineContext) -> Engine:
        from cpumond.host.engine.containers import ContainerEngine

        return ContainerEngine(kind, socket, context.hierarchies.cpu_version)

    return make


def _make_kubernetes(socket: str, context: EngineContext) -> Engine:
    find_cgroups = functools.partial(list_places, context.hierarchies.cpu_root, "kubernetes")
    if socket.startswith("/"):
        from cpumond.host.engine.cri import CriEngine

        return CriEngine(socket, find_cgroups)
    from cpumond.host.engine.kubernetes import KubeletAccess, KubeletEngine

    source = context.source
    token_file, ca_file = source.token_file or f"{SERVICE_ACCOUNT}/token", source.ca_file or f"{SERVICE_ACCOUNT}/ca.crt"
    return KubeletEngine(socket, KubeletAccess(token_file, ca_file, context.node_id), find_cgroups)


def _make_slurm(socket: str, context: EngineContext) -> Engine:  # noqa: ARG001 - all factories have the same signature
    from cpumond.host.engine.slurm import SlurmEngine

    return SlurmEngine(context.hierarchies, PLACES["slurm"])


ENGINES: dict[str, Callable[[str, EngineContext], Engine]] = {
    "docker": _make_containers("docker"),
    "podman": _make_containers("podman"),
    "slurm": _make_slurm,
    "kubernetes": _make_kubernetes,
}
"""Kind of a source -> function that takes the socket and an ``EngineContext``, and makes the engine's client."""
