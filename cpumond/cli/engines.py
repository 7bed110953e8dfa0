"""The engines of this host for ``init`` and ``doctor``: presence, answers, and jobs."""

from __future__ import annotations

import contextlib
import grp
import math
import os
import pwd
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

import msgspec

from cpumond.agent.config import AgentConfig, Source
from cpumond.agent.discovery import FoundJob, list_jobs
from cpumond.agent.discovery.engines import list_engine_jobs, list_engines
from cpumond.agent.engines import ENGINES, ask_once
from cpumond.cli.render.grid import LONGEST_NAME, shorten_name
from cpumond.core.errors import CpumondError
from cpumond.core.words import count, escape
from cpumond.host.engine.model import EngineView, Key

if TYPE_CHECKING:
    from cpumond.host.cgroup.mounts import Hierarchies

ASK_S: Final = 12.0
"""Seconds for all first requests to one engine, which needs one or two seconds for hundreds of containers. A client
waits less for one answer, so that its own sentence about the time-out is shown."""
SHOWN: Final = 3


class EngineFacts(msgspec.Struct, frozen=True):
    """The particulars of one kind of engine.

    ``daemon``: name of the engine; ``noun``: its jobs; ``start``: advice if the engine does not answer. ``programs``:
    services of which one runs where there is such an engine; none for Podman. ``writes``: processes that change quotas
    for the engine. ``workloads``: kinds of cgroups that may belong to it. For the drop-in that lets the agent reach the
    engine: ``units`` start before the agent; ``opened`` is opened in addition to the sockets, for the reason ``why``.
    ``reports_processes``: the engine reports the first process of a container, which leads to the container's cgroup.
    """

    daemon: str
    noun: str
    start: str
    why: str
    workloads: tuple[str, ...]
    units: tuple[str, ...]
    programs: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    opened: tuple[str, ...] = ()
    reports_processes: bool = False


FACTS: Final[dict[str, EngineFacts]] = {
    "docker": EngineFacts(
        "dockerd", "container", "systemctl enable --now docker",
        "Access to Docker's socket is full control of this host. The agent only reads from it: lists, "
        "descriptions and events of containers.",
        ("docker", "container"), ("docker.socket", "docker.service"), ("dockerd",), ("dockerd", "containerd"),
        reports_processes=True,
    ),
    "podman": EngineFacts(
        "podman", "container", "systemctl enable --now podman.socket",
        "The directory, not the socket in it, so that a recreated socket is seen, too. Nothing is started or changed "
        "through it.",
        ("podman",), ("podman.socket",), (), ("podman", "conmon"), reports_processes=True,
    ),
    # munge identifies the caller; a node without its own configuration keeps that of slurmctld in /run/slurm.
    "slurm": EngineFacts(
        "slurmd", "job", "install Slurm's client commands, or find out why slurmctld does not answer: `squeue`",
        "For `squeue`: munge identifies the caller. The configuration in /etc/slurm is visible anyway.",
        ("slurm",), ("munge.service",), ("slurmd",), ("slurmd",), ("/run/munge", "/run/slurm"),
    ),
    "kubernetes": EngineFacts(
        "kubelet", "container",
        "check that kubelet runs. The runtime's CRI socket as `socket` of its source needs no token and no API server "
        "(`pip install grpcio`); the kubelet asks the API server about each token. On a host `token_file` needs a "
        "permanent token: a Secret of type kubernetes.io/service-account-token, whose account may get nodes/pods and "
        "nodes/configz (docs/engines.md has the lines)",
        "The socket of the container runtime.",
        ("kubernetes", "containerd", "cri-o"), ("containerd.service", "crio.service"),
        ("kubelet", "k3s-server", "k3s-agent", "k0s"), ("kubelet", "containerd", "crio", "conmon"),
    ),
}  # fmt: skip
"""Kind of source -> its particulars."""
CRI_SOCKETS: Final = (
    "/run/containerd/containerd.sock", "/run/crio/crio.sock", "/run/k3s/containerd/containerd.sock",
)  # fmt: skip
"""Sockets of the container runtimes below a kubelet, which list its containers without a token."""


class JobsSeen(msgspec.Struct, frozen=True):
    """The jobs of one kind of engine, by whether their limits will move.

    ``managed``: names of jobs whose limit would be moved; ``unlimited``: without a requested limit; ``unnamed``:
    cgroups that the engine did not name; ``refused``: reason -> names; ``lost``: names of jobs without a cgroup in the
    hierarchy of the cpu controller."""

    managed: tuple[str, ...] = ()
    unlimited: tuple[str, ...] = ()
    unnamed: tuple[str, ...] = ()
    refused: dict[str, tuple[str, ...]] = {}
    lost: tuple[str, ...] = ()


class EngineSeen(msgspec.Struct, frozen=True):
    """One kind of engine on this host, or one that a source names.

    ``views`` by socket; ``programs``: its services that run; ``found``: its jobs by the source that names them, the
    default source if ``is_configured`` is False."""

    kind: str
    is_configured: bool
    views: dict[str, EngineView]
    programs: tuple[str, ...] = ()
    found: tuple[FoundJob, ...] = ()
    jobs: JobsSeen = JobsSeen()

    @property
    def facts(self) -> EngineFacts:
        return FACTS[self.kind]

    @property
    def is_here(self) -> bool:
        """Whether any sign of the engine was seen: an answer, a service, a job, or a socket that may not be opened."""
        is_up = any(view.is_up for view in self.views.values())
        return bool(self.programs or self.found or is_up or any(map(find_closed, self.views)))

    @property
    def can_be_followed(self) -> bool:
        """Whether a generated source for the engine could work, now or later. One for a kubelet needs credentials that
        only the cluster issues."""
        return self.is_here and (self.kind != "kubernetes" or any(view.is_up for view in self.views.values()))

    @property
    def own_socket(self) -> str:
        """The ``socket`` of a source for the engine: "" if it listens at its default path."""
        return next(iter(self.sockets), "") if self.kind == "kubernetes" else ""

    @property
    def sockets(self) -> list[str]:
        """The files that must be reachable."""
        return [socket for socket in self.views if socket.startswith("/")]

    @property
    def headline(self) -> str:
        """Name of the engine and where it answers; only its service if it does not answer and has no job."""
        up = [socket for socket, view in self.views.items() if view.is_up]
        where = f" ({', '.join(filter(None, up))})" if any(up) else ""
        return f"{self.describe()}{where}" if up or self.found else self.facts.daemon

    def describe(self) -> str:
        """A short description: "dockerd 20.10.24 with 14 containers"."""
        titles = [view.title for view in self.views.values() if view.title]
        asked, _, version = titles[0].partition(" ") if titles else (self.kind, "", "")
        # A CRI socket belongs to the runtime, which reports its own version, not that of the kubelet.
        shown = f"{self.facts.daemon if asked == self.kind else asked} {version}".strip()
        number = len(self.found) + len(self.jobs.lost)
        pods = len({job.engine.group for job in self.found if job.engine is not None and job.engine.group})
        of_pods = f" in {count(pods, 'pod')}" if self.kind == "kubernetes" and pods else ""
        return f"{shown} with {count(number, self.facts.noun)}{of_pods}"


def see_engines(
    config: AgentConfig, hierarchies: Hierarchies, programs: Iterable[str], more: Iterable[Source] = ()
) -> list[EngineSeen]:
    """All kinds of engines that are on this host or that a source names, each asked once.

    ``programs``: the names of all processes; ``more``: sources to examine in addition to those of the configuration."""
    running = set(programs)
    given = [source for source in config.source if source.is_engine]
    kinds = {source.kind for source in given}
    looked_at = [*given, *(source for source in more if source not in given)]
    # A kind that no source names is looked for at its default path.
    named = {source.kind for source in looked_at}
    for kind in ENGINES:
        source = msgspec.convert({"kind": kind}, Source)
        if kind not in named and _may_be_here(source, hierarchies.cpu_root, running):
            if kind == "kubernetes":
                source = msgspec.structs.replace(source, socket=next(filter(os.path.exists, CRI_SOCKETS), ""))
            looked_at.append(source)
    views = ask_once(looked_at, hierarchies, config.node_id, ASK_S)
    found = list_jobs(looked_at, [], hierarchies.cpu_root, views).jobs
    seen = []
    for kind in dict.fromkeys(source.kind for source in looked_at):
        own_views = {
            key[1]: views.get(key, EngineView(kind, problem=f"{kind}: this version of cpumond does not support it"))
            for source in looked_at
            if source.kind == kind
            for key in list_engines(source)
        }
        own = tuple(job for job in found if job.engine is not None and job.engine.kind == kind)
        jobs = sort_jobs(own, own_views, config, hierarchies)
        here = tuple(name for name in FACTS[kind].programs if name in running)
        seen.append(EngineSeen(kind, kind in kinds, own_views, here, own, jobs))
    return seen


def collect_views(seen: Iterable[EngineSeen]) -> dict[Key, EngineView]:
    return {(each.kind, socket): view for each in seen for socket, view in each.views.items()}


def _may_be_here(source: Source, cpu_root: str, running: set[str]) -> bool:
    """Whether a request to the engine makes sense: a service runs, or a socket or a job's cgroup exists."""
    if running.intersection(FACTS[source.kind].programs) or list_engine_jobs(cpu_root, source, {})[0]:
        return True
    sockets = [socket for _, socket in list_engines(source) if socket.startswith("/")]
    return any(os.path.exists(socket) or find_closed(socket) for socket in sockets)


def sort_jobs(
    found: Iterable[FoundJob], views: Mapping[str, EngineView], config: AgentConfig, hierarchies: Hierarchies
) -> JobsSeen:
    """Sort the jobs of an engine by whether their limits will move."""
    from cpumond.agent.tracked import find_refusal

    fates: dict[str, list[str]] = {"managed": [], "unlimited": [], "unnamed": []}
    refused: dict[str, list[str]] = {}
    for job in found:
        assert job.engine is not None
        settings = config.resolve_settings(job.source, job.operation_id, job.layer)
        if not job.engine.is_named:
            fates["unnamed"].append(job.path)
        elif why := find_refusal(config, job, settings, os.path.join(hierarchies.cpu_root, job.path)):
            refused.setdefault(why, []).append(job.job_id)
        else:
            fates["unlimited" if _ordered_nothing(job, hierarchies) else "managed"].append(job.job_id)
    lost = [
        job.name
        for view in views.values()
        for path, job in view.jobs.items()
        if job.is_job and not os.path.isdir(os.path.join(hierarchies.cpu_root, path))
    ]
    return msgspec.convert({**fates, "refused": refused, "lost": lost}, JobsSeen)


def _ordered_nothing(job: FoundJob, hierarchies: Hierarchies) -> bool:
    """Whether a job's engine and cgroup show that it requested no limit, and its source leaves such jobs alone."""
    from cpumond.cli.agent.watch import read_own_quota
    from cpumond.host.cgroup import open_cgroup

    if job.cpu_limit_cores is not None or (job.engine is not None and job.engine.ordered_cores is not None):
        return False
    if job.source is not None and job.source.unlimited == "host":
        return False
    with contextlib.suppress(CpumondError):
        cgroup = open_cgroup(hierarchies, job.path)
        if cgroup is not None:
            with contextlib.closing(cgroup):
                return read_own_quota(cgroup) == math.inf
    return True


def describe_fates(kind: str, jobs: JobsSeen, is_shadow: bool = True) -> list[str]:
    """Return a sentence for each group of jobs: whether their limits move, and if not, why."""
    noun = FACTS[kind].noun
    how = "managed, in shadow mode at first" if is_shadow else "managed"
    said: list[tuple[str, str, tuple[str, ...], str]] = [
        (how, noun, jobs.managed, " with a CPU limit{names}"),
        ("only observed", noun, jobs.unlimited, " without a CPU limit{names}"),
        *(("only observed", noun, names, f"{{names}}: {why}") for why, names in jobs.refused.items()),
        ("only observed", "cgroup", jobs.unnamed, " that it does not know{names}"),
        ("not observed", noun, jobs.lost,
         " without a cgroup in the hierarchy of the cpu controller, where a limit could be{names}"),
    ]  # fmt: skip
    return [
        f"{fate}: {count(len(names), what)}{rest.replace('{names}', format_some(names))}"
        for fate, what, names, rest in said
        if names
    ]


def list_troubles(seen: EngineSeen) -> Iterator[tuple[str, str]]:
    """Yield the problems of an engine on this host, each with advice: no answer, the engine's notes, unnamed jobs."""
    is_up = False
    for socket, view in seen.views.items():
        is_up = is_up or view.is_up
        if not view.is_up:
            yield explain_silence(seen, socket, view)
        yield from ((note, "see the engine's own log") for note in view.notes)
    if seen.jobs.unnamed and is_up and seen.is_configured:
        text = f"{count(len(seen.jobs.unnamed), 'cgroup')} that it does not know{format_some(seen.jobs.unnamed)}"
        advice = f"does a second {seen.facts.daemon} own them? Add a source with its `socket`"
        yield text, f"{advice}; until then they stay in shadow mode"


def format_some(names: Iterable[str]) -> str:
    """The first of some names, in brackets."""
    shown = [shorten_name(escape(name), LONGEST_NAME) for name in names]
    more = f" and {len(shown) - SHOWN} more" if len(shown) > SHOWN else ""
    return f" ({', '.join(shown[:SHOWN])}{more})"


def find_closed(socket: str) -> str:
    """The right that this process lacks to open a unix socket, as a clause; "" if it has all, or there is no socket."""
    if not socket.startswith("/"):
        return ""
    parts = socket.split("/")
    for end in range(2, len(parts) + 1):
        place = "/".join(parts[:end])
        try:
            found = os.stat(place)
        except OSError:
            return ""
        if not os.access(place, os.W_OK if end == len(parts) else os.X_OK, effective_ids=True):
            owner = f"{_name(pwd.getpwuid, found.st_uid)}:{_name(grp.getgrgid, found.st_gid)}"
            account = _name(pwd.getpwuid, os.geteuid())
            return f"{account} may not open {place} (of {owner}, mode {stat.S_IMODE(found.st_mode):04o})"
    return ""


def _name(look_up: Callable[[int], Any], number: int) -> str:
    try:
        return str(look_up(number)[0])
    except KeyError:
        return str(number)


def explain_silence(seen: EngineSeen, socket: str, view: EngineView) -> tuple[str, str]:
    """The reason why an engine does not answer at a socket, and advice."""
    kind = seen.kind
    if closed := find_closed(socket):
        return f"{FACTS[kind].daemon}: {closed}", "run this as root; the service has the right (CAP_DAC_OVERRIDE)"
    if kind == "slurm" and shutil.which("squeue") is None:
        return "slurm: `squeue` is not installed here", "install Slurm's client commands (Debian: slurm-client)"
    advice = [] if seen.programs and kind == "docker" else [FACTS[kind].start]
    if socket.startswith("/run/user/"):
        owner = socket.split("/")[3]
        advice = [f"as the user {owner}: systemctl --user enable --now podman.socket; loginctl enable-linger {owner}"]
    if socket.startswith("/"):
        advice.append(f'if it listens elsewhere: `cpumond init --socket {kind}=PATH`, or socket = "PATH" in its source')
    return view.problem or f"{kind}: no answer", "; ".join(advice)
