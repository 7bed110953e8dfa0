"""Kubernetes: the containers of this node's pods, as listed by its kubelet.

The kubelet reports ids, names and limits, but no process. A container's cgroup is below ``kubepods``, and has the pod's
uid and the container's id in its path."""

from __future__ import annotations

import asyncio
import math
import re
import ssl
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

import httpx2
import msgspec

from cpumond.core.errors import AccessError, describe
from cpumond.host.engine.http import ANSWER_TIMEOUT_S, StatusError, get_json
from cpumond.host.engine.model import RECLAIMED_LABEL, EngineError, EngineJob, EngineReply, Publish, clean, clean_labels
from cpumond.host.engine.nudge import wait_nudged
from cpumond.host.engine.processes import CRUN_CHILD
from cpumond.host.engine.token import read_token

KIND: Final = "kubernetes"
POLL_S: Final = 5.0
CONFIG_S: Final = 600.0
"""Seconds between two lists of all containers, and between two reads of the kubelet's own settings."""
SETTLE_S, LOOK_SHARE = 0.2, 0.2
"""Seconds that a requested look waits for more requests; maximum share of the time that looks cost the kubelet."""
MIN_CORES: Final = 0.01
"""The lowest limit that the kubelet sets, even if less is requested."""
MAX_CORES: Final = 1e6
RECLAIMED_RESOURCE: Final = "cpumond.io/reclaimed-cpu"
GUARANTEED: Final = "a Guaranteed pod: its CPUs may be its own, so its limit is never moved"
INSECURE: Final = "none"
"""As ``ca_file``, this word means that the kubelet's certificate is not checked."""
CONTAINER_ID: Final = re.compile(r"[0-9a-f]{64}")
_CGROUP: Final = re.compile(rf"(?:cri-containerd-|[a-z]+-)?({CONTAINER_ID.pattern})(?:\.scope)?(?:/{CRUN_CHILD})?")
_POD_CGROUP: Final = re.compile(r"(?:kubepods[a-z-]*-)?pod([0-9a-f][0-9a-f_-]*)(?:\.slice)?")
_QUANTITY: Final = re.compile(r"\+?([0-9]{1,18}(?:\.[0-9]{0,18})?|\.[0-9]{1,18})(n|u|m|k|[eE][+-]?[0-9]{1,2})?")
_UNITS: Final = {"n": 1e-9, "u": 1e-6, "m": 1e-3, "": 1.0, "k": 1e3}

FindCgroups = Callable[[], Iterable[str]]
"""Returns the cgroups that may be containers of pods, relative to the hierarchy of the cpu controller."""


class RunningContainer(msgspec.Struct, frozen=True):
    """A running container as its node reports it; ``ordered_cores`` and ``reports_request`` are those of ``EngineJob``.

    ``qos`` is "Guaranteed", "Burstable", "BestEffort" or "" (unknown); ``reclaimed`` is the value of RECLAIMED_LABEL.
    ``pod_cores`` is the limit of its pod as a whole, None if the pod has none. All containers of the pod share this
    request: the kubelet sets it on the pod's cgroup, and on each container without its own limit."""

    container_id: str
    pod_uid: str
    namespace: str
    pod: str
    container: str
    image: str = ""
    qos: str = ""
    ordered_cores: float | None = None
    reports_request: bool = True
    reclaimed: str = ""
    pod_cores: float | None = None

    @property
    def name(self) -> str:
        return f"{self.namespace}/{self.pod}/{self.container}"


class _Resources(msgspec.Struct, frozen=True):
    limits: dict[str, str | float] | None = None


class _Container(msgspec.Struct, frozen=True):
    name: str
    image: str = ""
    resources: _Resources | None = None


class _State(msgspec.Struct, frozen=True):
    running: dict[str, Any] | None = None


class _ContainerStatus(msgspec.Struct, frozen=True):
    name: str
    container_id: str = msgspec.field(name="containerID", default="")
    image: str = ""
    state: _State | None = None
    resources: _Resources | None = None


class _Metadata(msgspec.Struct, frozen=True):
    name: str
    namespace: str
    uid: str


class _Spec(msgspec.Struct, frozen=True, rename="camel"):
    resources: _Resources | None = None
    containers: list[_Container] | None = None
    init_containers: list[_Container] | None = None
    ephemeral_containers: list[_Container] | None = None


class _Status(msgspec.Struct, frozen=True, rename="camel"):
    resources: _Resources | None = None
    qos_class: str = ""
    container_statuses: list[_ContainerStatus] | None = None
    init_container_statuses: list[_ContainerStatus] | None = None
    ephemeral_container_statuses: list[_ContainerStatus] | None = None


class Pod(msgspec.Struct, frozen=True):
    """Those fields of a pod that are used."""

    metadata: _Metadata
    spec: _Spec = _Spec()
    status: _Status = _Status()


class PodList(msgspec.Struct, frozen=True):
    """The kubelet's response to ``/pods``."""

    items: list[Pod] | None = None


class _KubeletSettings(msgspec.Struct, frozen=True):
    cfs_quota: bool = msgspec.field(name="cpuCFSQuota", default=True)


class _Configuration(msgspec.Struct, frozen=True):
    kubeletconfig: _KubeletSettings = _KubeletSettings()


def list_running(pods: PodList, enforces_limits: bool = True) -> tuple[list[RunningContainer], list[str]]:
    """Return the running containers, and sentences about those with invalid descriptions.

    Without ``enforces_limits`` (``cpuCFSQuota = false``) the kubelet sets no limits, so nothing is requested."""
    found, notes = [], []
    for pod in pods.items or ():
        spec, status = pod.spec, pod.status
        groups = (spec.containers, spec.init_containers, spec.ephemeral_containers)
        given = {each.name: each for group in groups for each in group or ()}
        for group in (status.container_statuses, status.init_container_statuses, status.ephemeral_container_statuses):
            for each in group or ():
                if each.state is None or each.state.running is None:
                    continue
                try:
                    found.append(_read_container(pod, each, given.get(each.name), enforces_limits))
                except ValueError as error:
                    notes.append(f"{KIND}: {clean(f'{pod.metadata.name}/{each.name}')}: {error}; ignored")
    return found, notes


def _read_container(
    pod: Pod, status: _ContainerStatus, given: _Container | None, enforces_limits: bool
) -> RunningContainer:
    asked = (given.resources if given is not None else None) or _Resources()
    # Use the limits in force: after a resize in place, the specification already has the next ones.
    in_force = status.resources or asked
    of_pod = pod.status.resources or pod.spec.resources or _Resources()
    reclaimed = (asked.limits or {}).get(RECLAIMED_RESOURCE, "")
    container_id = status.container_id.rpartition("://")[2]
    if not CONTAINER_ID.fullmatch(container_id):
        raise ValueError(f"its id {clean(status.container_id)!r} is not the id of a container")
    return RunningContainer(
        container_id, pod.metadata.uid, pod.metadata.namespace, pod.metadata.name, status.name,
        status.image or (given.image if given is not None else ""), pod.status.qos_class,
        _read_limit(in_force) if enforces_limits else None, reclaimed=str(reclaimed),
        pod_cores=_read_limit(of_pod) if enforces_limits else None,
    )  # fmt: skip


def _read_limit(given: _Resources) -> float | None:
    """Return a CPU limit in cores, None if there is none. Raises ValueError."""
    cores = parse_cores((given.limits or {}).get("cpu", 0.0))
    return max(cores, MIN_CORES) if cores > 0.0 else None


def parse_cores(quantity: str | float) -> float:
    """Parse a CPU quantity ("500m", "1.5", "2", "1e3") to cores, >= 0. Raises ValueError."""
    found = _QUANTITY.fullmatch(str(quantity))
    unit = "" if found is None else found[2] or ""
    cores = math.nan if found is None else float(found[1]) * (_UNITS[unit] if unit in _UNITS else float(f"1{unit}"))
    if not cores <= MAX_CORES:
        raise ValueError(f"its CPU limit {clean(str(quantity))!r} is invalid")
    return cores


def make_jobs(
    running: Iterable[RunningContainer], cgroups: Iterable[str], title: str = "", notes: Iterable[str] = ()
) -> EngineReply:
    """Make jobs of the containers that have a cgroup; a pod with a limit as a whole is one job, whatever it contains.
    If all running containers of a pod have a cgroup, also return the cgroup of its sandbox, which only keeps the pod's
    namespaces open."""
    places: dict[str, dict[str, str]] = {}
    for path in cgroups:
        found = find_ids(path)
        if found is not None:
            places.setdefault(found[0], {})[found[1]] = path
    jobs: list[EngineJob] = []
    known, waited_for, whole = set(), set(), set()
    for each in running:
        known.add(each.pod_uid)
        path = places.get(each.pod_uid, {}).pop(each.container_id, "")
        if each.pod_uid in whole:
            continue
        if not path:
            waited_for.add(each.pod_uid)
        elif each.pod_cores is not None:
            whole.add(each.pod_uid)
            jobs.append(_make_job(each, path.removesuffix(f"/{CRUN_CHILD}").rpartition("/")[0]))
        else:
            jobs.append(_make_job(each, path))
    for uid in whole:
        places.pop(uid)
    for uid, left in places.items():
        if uid in waited_for or len(left) != 1:
            continue
        [(sandbox, path)] = left.items()
        # Also if no container of the pod runs: a sandbox starts first and ends last. CRI-O makes none for most pods.
        if uid in known or "/crio-" not in path:
            jobs.append(EngineJob(KIND, sandbox, f"{uid}/sandbox", path, is_job=False))
    return EngineReply(tuple(jobs), title, tuple(sorted(set(notes))))


def find_ids(path: str) -> tuple[str, str] | None:
    """Return the pod's uid and the container's id from the path of a container's cgroup; None for other paths."""
    above, _, last = path.removesuffix(f"/{CRUN_CHILD}").rpartition("/")
    container, pod = _CGROUP.fullmatch(last), _POD_CGROUP.fullmatch(above.rpartition("/")[2])
    if container is None or pod is None:
        return None
    return pod[1].replace("_", "-"), container[1]


def find_qos(path: str) -> str:
    """Return a pod's QoS class from the path of its cgroup; only a Guaranteed pod's path contains no class."""
    return next((qos for qos in ("Burstable", "BestEffort") if re.search(rf"[/-]{qos.lower()}\b", path)), "Guaranteed")


def _make_job(each: RunningContainer, path: str) -> EngineJob:
    """Describe a container as a job; if its pod has a limit as a whole, describe the pod."""
    qos = find_qos(path)
    pod = f"{each.namespace}/{each.pod}"
    is_whole = each.pod_cores is not None
    labels = clean_labels({
        "namespace": each.namespace, "pod": each.pod, "container": "" if is_whole else each.container,
        "image": "" if is_whole else each.image, "qos": each.qos or qos, RECLAIMED_LABEL: each.reclaimed,
    })  # fmt: skip
    return EngineJob(
        KIND,
        each.pod_uid if is_whole else each.container_id,
        clean(pod if is_whole else each.name),
        path,
        labels,
        clean(pod),
        each.pod_cores if is_whole else each.ordered_cores,
        reports_request=each.reports_request,
        left_out=GUARANTEED if "Guaranteed" in (each.qos, qos) else "",
    )


async def wait_for_turn(nudged: asyncio.Event, began_s: float) -> None:
    """Wait until the next look is due. ``began_s``: when the last look began, on the monotonic clock."""
    took_s = time.monotonic() - began_s
    await asyncio.sleep(min(max(SETTLE_S, took_s / LOOK_SHARE), POLL_S))
    await wait_nudged(nudged, POLL_S)


class KubeletAccess(msgspec.Struct, frozen=True):
    """Access to a kubelet at an https:// address: the file of the token, the file of the authorities for the kubelet's
    certificate (INSECURE: any), and the node's name in that certificate."""

    token_file: str
    ca_file: str
    node_name: str


class KubeletEngine:
    """The client of this node's kubelet. An http:// address must be the kubelet's port that requires no token."""

    kind = KIND

    def __init__(self, address: str, access: KubeletAccess, find_cgroups: FindCgroups) -> None:
        self._address = address.rstrip("/")
        self._where = f"{KIND}: {self._address}"
        self.access = access
        self._is_secure = address.startswith("https:")
        self._find_cgroups = find_cgroups

    async def watch(self, publish: Publish, nudged: asyncio.Event) -> None:
        enforces_limits, configured_at_s = True, -math.inf
        try:
            async with httpx2.AsyncClient(
                base_url=self._address,
                verify=self._make_context() if self._is_secure else False,
                headers={"accept-encoding": "identity"},
                timeout=ANSWER_TIMEOUT_S,
                trust_env=False,
            ) as client:
                while True:
                    nudged.clear()
                    began_s = time.monotonic()
                    if began_s - configured_at_s >= CONFIG_S:
                        enforces_limits, configured_at_s = await self._ask_quota(client), began_s
                    pods = await get_json(client, self._where, "/pods", PodList, self._make_request())
                    running, notes = list_running(pods, enforces_limits)
                    publish(make_jobs(running, self._find_cgroups(), "kubelet", notes))
                    await wait_for_turn(nudged, began_s)
        except StatusError as error:
            raise EngineError(f"{error}{_ADVICE.get(error.status, '')}") from error
        except (httpx2.HTTPError, httpx2.InvalidURL, OSError) as error:
            raise EngineError(f"{KIND}: no response from {self._address} ({self._word(error)})") from error

    async def _ask_quota(self, client: httpx2.AsyncClient) -> bool:
        """Return whether the kubelet enforces CPU limits; True unless its settings can be read and say no."""
        try:
            found = await get_json(client, self._where, "/configz", _Configuration, self._make_request())
        except StatusError as error:
            if error.status not in (403, 404):
                raise
            return True
        return found.kubeletconfig.cfs_quota

    def _make_context(self) -> ssl.SSLContext:
        if self.access.ca_file == INSECURE:
            context = ssl.create_default_context()
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
            return context
        try:
            return ssl.create_default_context(cafile=self.access.ca_file)
        except OSError as error:
            raise EngineError(f"{KIND}: ca_file {self.access.ca_file}: {describe(error)}") from error

    def _make_request(self) -> Mapping[str, Any]:
        if not self._is_secure:
            return {}
        try:
            token = read_token(self.access.token_file)
        except AccessError as error:
            raise EngineError(f"{KIND}: token_file {error}") from error
        # The certificate is for the node's name, whatever address is used; none is for the loopback address.
        return {"headers": {"authorization": f"Bearer {token}"}, "extensions": {"sni_hostname": self.access.node_name}}

    def _word(self, error: Exception) -> str:
        if isinstance(error, TimeoutError | httpx2.TimeoutException):
            return f"none within {ANSWER_TIMEOUT_S:g} s"
        text = (describe(error) if isinstance(error, OSError) else str(error)) or type(error).__name__
        if "CERTIFICATE_VERIFY_FAILED" in text:
            name, file = self.access.node_name, self.access.ca_file
            return f"its certificate is not one for the node {name!r} signed by ca_file {file}: {text}"
        return text


_ADVICE: Final = {
    401: ": it does not accept this token. Either the API server, which it asks about each token, is down (a CRI "
    "socket needs neither), or token_file does not belong to a service account of its cluster",
    403: ": this token may not read it; grant its service account get on nodes/pods (before Kubernetes 1.33, on "
    "nodes/proxy)",
    500: ": perhaps the API server, which it asks about rights, is down; a CRI socket needs neither",
}
