"""A cluster of real processes on this machine: one scheduler, some agents, their jobs in real cgroups."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import psutil

from cpumond.cluster.ports import hold
from cpumond.cluster.postgresql import PostgresServer
from cpumond.core.errors import UnavailableError
from cpumond.core.job_cgroups import name_idle_parent
from cpumond.host.cgroup.mounts import read_mounts
from cpumond.host.cgroup_processes import read_processes

CLUSTER_PREFIX = "cpumond-cluster-"
"""Prefix of the name of a ``Cluster``'s top cgroup; the process id follows."""

ANY_PORT = "127.0.0.1:0"
RUN_PREFIX = "cpumond-run-"
"""Prefix of the name of a ``runtime_dir`` outside of the cluster's directory; the process id and other text follow."""

MAX_RUNTIME_DIR = 80
"""Maximum bytes of a ``runtime_dir``'s path, because a path of a unix socket has at most 107 bytes."""

MAX_SOCKET_DIR = 94
"""Maximum bytes of a path to which only ``/control.sock`` is added."""

SHORT_DIR = "/tmp"  # noqa: S108 - mkdtemp makes a directory of its own in it
"""Where a ``runtime_dir`` is created if the path of TMPDIR is too long for a socket."""

T = TypeVar("T")
_PAUSE = threading.Event()
"""An event that is never set: waiting for it with a time-out is a pause."""

PACKAGE_PLACE = os.path.abspath(os.path.join(__file__, "..", "..", ".."))
LAUNCH_PROGRAM = """
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, 15)
if os.getppid() != int(sys.argv[1]):
    sys.exit(1)
sys.path.append(sys.argv[2])
del sys.argv[1:3]
from cpumond.cli import main
main()
"""
"""Runs ``cpumond`` so that it gets SIGTERM when the thread that started this program ends (PR_SET_PDEATHSIG).
Arguments: the id of the starting process, the directory that contains the package, and the arguments of ``cpumond``."""


class ClusterProcess:
    """One process of a ``Cluster``, with its configuration and log; it may be stopped and started again."""

    def __init__(self, directory: str, name: str, command: Sequence[str], kept_environment: Mapping[str, str]) -> None:
        self.name = name
        self.directory = os.path.join(directory, name)
        self.config_path = os.path.join(self.directory, "config.toml")
        self.log_path = os.path.join(self.directory, "log.jsonl")
        self._command = command
        self._environment = kept_environment
        self._process: subprocess.Popen[bytes] | None = None
        self.is_paused = False
        self._log_offset = 0
        self._held: list[socket.socket] = []
        os.makedirs(self.directory, exist_ok=True)

    @property
    def pid(self) -> int:
        """The id of the running process. Raises UnavailableError if none runs."""
        if self._process is None:
            raise UnavailableError(f"{self.name} does not run")
        return self._process.pid

    def list_addresses(self) -> list[str]:
        """Return the addresses, "host:port", that the process listens on, also after a restart."""
        return []

    def let_go(self) -> None:
        while self._held:
            self._held.pop().close()

    def make_tables(self) -> Mapping[str, Mapping[str, object]]:
        """Return table -> keys of the process's configuration; "" stands for the keys outside of any table."""
        raise NotImplementedError

    def launch(self) -> None:
        """Write the configuration and start the process, which ends with the thread that calls this."""
        if self._process is not None:
            raise UnavailableError(f"{self.name} is already running; kill or stop it first")
        with open(self.config_path, "w", encoding="utf-8", opener=_open_private) as file:
            for table, values in self.make_tables().items():
                file.write(f"[{table}]\n" if table else "")
                file.writelines(f"{key} = {json.dumps(value)}\n" for key, value in values.items())
        self._log_offset = os.path.getsize(self.log_path) if os.path.exists(self.log_path) else 0
        with open(self.log_path, "ab") as log:
            self._process = subprocess.Popen(
                # -P: nothing is imported from the current directory.
                [sys.executable, "-P", "-c", LAUNCH_PROGRAM, str(os.getpid()), PACKAGE_PLACE, *self._command,
                 "--config", self.config_path],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=dict(self._environment), start_new_session=True,
            )  # fmt: skip

    def check(self) -> None:
        """Raise UnavailableError, with the log's last line, if the process ended without ``stop`` or ``kill``."""
        code = None if self._process is None else self._process.poll()
        if code is not None:
            how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
            last = self.log(self._log_offset).strip().rpartition("\n")[2]
            raise UnavailableError(f"{self.name} {how}; the last line of its log: {last[:500]}")

    def wait_ready(self, timeout_s: float = 120.0) -> None:
        """Wait until the log of this run reports the start. Raises UnavailableError, with the last lines of the log."""
        deadline_s = time.monotonic() + timeout_s
        while not self.log_events("started", since=self._log_offset):
            ended = self._process is None or self._process.poll() is not None
            if ended or time.monotonic() > deadline_s:
                how = "ended during its start" if ended else f"did not start within {timeout_s:g} s"
                told = self.log(self._log_offset)[-1500:].strip() or "its log is empty"
                raise UnavailableError(f"{self.name} {how}: {told}")
            _PAUSE.wait(0.02)
        self.let_go()

    def start(self) -> None:
        self.launch()
        self.wait_ready()

    def stop(self, number: int = signal.SIGTERM, timeout_s: float = 60.0) -> int:
        """Send a signal, wait for the end (SIGKILL after ``timeout_s``), and return the exit code; 0 if not running."""
        process = self._process
        if process is None:
            return 0
        process.send_signal(number)
        try:
            code = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
            code = process.wait()
        self._process, self.is_paused = None, False
        # Otherwise a different program may be assigned one of the ports before this process is back.
        self._held += hold(self.list_addresses())
        return code

    def kill(self) -> None:
        self.stop(signal.SIGKILL)

    def pause(self) -> None:
        """Send SIGSTOP: the process does nothing until ``resume``, as on a host that hangs."""
        os.kill(self.pid, signal.SIGSTOP)
        self.is_paused = True

    def resume(self) -> None:
        self.is_paused = False
        os.kill(self.pid, signal.SIGCONT)

    @property
    def is_running(self) -> bool:
        """Whether the process was started and has not ended; a paused process counts as running."""
        return self._process is not None and self._process.poll() is None

    def log(self, since: int = 0) -> str:
        """The log of all runs, from the byte ``since`` on."""
        try:
            with open(self.log_path, "rb") as file:
                file.seek(since)
                return file.read().decode("utf-8", "replace")
        except FileNotFoundError:
            return ""

    def log_events(self, name: str, since: int = 0) -> list[dict[str, Any]]:
        """The log's records of the event ``name``, in order, from the byte ``since`` on."""
        # The last line is left out while it is still being written.
        lines = [line for line in self.log(since).splitlines(keepends=True) if line.endswith("}\n")]
        records = [json.loads(line) for line in lines if line.startswith("{") and f'"{name}"' in line]
        return [record for record in records if record.get("event") == name]


class ClusterScheduler(ClusterProcess):
    """A scheduler of a ``Cluster``. It keeps its port over restarts. ``store``: the table of its configuration."""

    def __init__(
        self, directory: str, name: str, listen: str, extra: str, environment: Mapping[str, str], scale: float,
        token: str, node_token: str,
    ) -> None:  # fmt: skip
        super().__init__(directory, name, ["scheduler", "--time-scale", str(scale)], environment)
        self.listen = listen
        self.store: Mapping[str, str] = {}
        self._token = token
        self._node_token = node_token
        _write_extra(os.path.join(self.directory, "config.conf.d"), extra)

    def make_tables(self) -> Mapping[str, Mapping[str, object]]:
        tokens_file = ""
        if self._token:
            tokens_file = os.path.join(self.directory, "tokens")
            user, node = (hashlib.sha256(each.encode()).hexdigest() for each in (self._token, self._node_token))
            with open(tokens_file, "w", encoding="utf-8", opener=_open_private) as file:
                file.write(f"{psutil.Process().username()}:{user}:admin\nnodes:{node}:node\n")
        return {
            "": {"state_dir": os.path.join(self.directory, "state"), "fair_share_update_period": "100ms"},
            "min_spare_job_resources_on_node": {"cpu": 0.01, "memory": 1048576},
            "api": {"listen": self.listen, "tokens_file": tokens_file},
            "history": {"period": "5s"},
            "log": {"format": "json"},
            "store": self.store,
        }

    def wait_ready(self, timeout_s: float = 120.0) -> None:
        super().wait_ready(timeout_s)
        self.listen = str(self.log_events("started")[-1]["listen"])

    def list_addresses(self) -> list[str]:
        return [self.listen]

    @property
    def url(self) -> str:
        return f"http://{self.listen}"


class ClusterNode(ClusterProcess):
    """One agent of a ``Cluster``, which is one node; its jobs outlive the agent, as on any node."""

    def __init__(self, cluster: Cluster, node_id: str, tags: Sequence[str]) -> None:
        super().__init__(cluster.directory, node_id, ["agent"], cluster.environment)
        self.node_id = node_id
        self.cgroup_root = f"{cluster.cgroup_prefix}/{node_id}"
        self.runtime_dir = os.path.join(self.directory, "run")
        self._short_dir = ""
        if len(os.fsencode(self.runtime_dir)) > MAX_RUNTIME_DIR:
            self.runtime_dir = self._short_dir = _make_short_directory(f"{RUN_PREFIX}{os.getpid()}-")
        self.state_dir = os.path.join(self.directory, "state")
        self.jobs_dir = os.path.join(self.directory, "jobs")
        self._cluster = cluster
        self._tags = tags
        self._listens = dict.fromkeys(("web", "metrics"), ANY_PORT if cluster.web else "")
        _write_extra(os.path.join(self.directory, "conf.d"), cluster.agent_config)

    @property
    def control_socket(self) -> str:
        return os.path.join(self.runtime_dir, "control.sock")

    @property
    def web_url(self) -> str:
        """The address of the agent's page, with a slash at its end; "" if the agent has no page, or never ran."""
        return self._make_url("web", "/")

    @property
    def metrics_url(self) -> str:
        """The address that Prometheus scrapes; "" if the agent has no page, or never ran."""
        return self._make_url("metrics", "/metrics")

    def _make_url(self, name: str, path: str) -> str:
        return "" if self._listens[name] in ("", ANY_PORT) else f"http://{self._listens[name]}{path}"

    def wait_ready(self, timeout_s: float = 120.0) -> None:
        super().wait_ready(timeout_s)
        if self._cluster.web:
            # A restart uses the same ports.
            started = self.log_events("started")[-1]
            self._listens = {name: str(started[name]) for name in self._listens}

    def list_addresses(self) -> list[str]:
        return [each for each in self._listens.values() if each not in ("", ANY_PORT)]

    def make_tables(self) -> Mapping[str, Mapping[str, object]]:
        cluster = self._cluster
        return {
            "": {
                "node_id": self.node_id, "state_dir": self.state_dir, "runtime_dir": self.runtime_dir,
                "managed_roots": [self.cgroup_root], "mountinfo": cluster.mountinfo,
            },
            "monitor": {"mode": "reclaim", "min_cpu_limit": 0.05, **cluster.monitor},
            "scheduler": {
                "url": cluster.urls if len(cluster.urls) > 1 else cluster.url,
                "token": cluster.node_token, "heartbeat_period": cluster.heartbeat_period,
                "retry_max": "1s", "tags": list(self._tags),
            },
            "resources": {"cpu": cluster.cpu, "memory": cluster.memory, "user_slots": cluster.user_slots},
            "executor": {
                "kind": "cgroup", "cgroup_root": self.cgroup_root, "jobs_dir": self.jobs_dir,
                "allow_root": os.geteuid() == 0,
                # An agent that is not root runs jobs as its own account, and its configuration must name this account.
                "user": "" if os.geteuid() == 0 else psutil.Process().username(),
            },
            "metrics": {"listen": self._listens["metrics"]},
            "report": {"kind": "none"},
            # Each check adds a point to the graphs; ten minutes and more are kept.
            "web": {"listen": self._listens["web"], "period": cluster.monitor["check_period"], "samples": 600},
            "log": {"format": "json"},
        }  # fmt: skip

    def get(self, path: str) -> Any:
        """The JSON of a GET over the agent's control socket, for example ``/v1/status``. Raises UnavailableError."""
        return _request("GET", f"http://agent{path}", uds=self.control_socket)

    def find_keepers(self) -> list[int]:
        """The ids of processes ``keeper.PROGRAM RUNTIME_DIR``, which keep the node's jobs and outlive the agent."""
        found = []
        for process in psutil.process_iter(["cmdline"]):
            *words, last = process.info["cmdline"] or [""]
            if last == self.runtime_dir and any("keeper" in word for word in words[1:]):
                found.append(process.pid)
        return found

    def close(self, timeout_s: float = 30.0) -> None:
        """Kill the keeper, and remove a ``runtime_dir`` outside of the cluster's directory."""
        deadline_s = time.monotonic() + timeout_s
        while (keepers := self.find_keepers()) and time.monotonic() < deadline_s:
            for pid in keepers:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            _PAUSE.wait(0.01)
        if self._short_dir:
            shutil.rmtree(self._short_dir, ignore_errors=True)


class Cluster:
    """Real ``cpumond scheduler``s, of which one leads, and real ``cpumond agent``s on this machine, with real jobs in
    real cgroups. Each agent is a node ``node-1``, ``node-2``... that offers ``cpu`` cores, ``memory`` bytes and
    ``user_slots``, in cgroups below ``cgroup_prefix``; its files are in ``directory``. ``monitor``: keys of the agents'
    ``[monitor]``; limits go down to 0.05 cores unless these set a floor. ``scheduler_config``, ``agent_config``:
    further TOML of any tables. ``tags``: those of every node, or node -> its tags. ``real_time_scale``: how many times
    as fast the scheduler's time runs. ``mountinfo``: the file for a simulated kernel. With a ``token`` the scheduler
    accepts no request without it (nodes have a ``node_token``); without a ``token`` every user of the machine may run
    jobs on the nodes, as root if root created them. With ``web`` each agent has a page at its ``web_url``. Entering
    waits until all nodes are online; leaving ends all processes and jobs and removes all cgroups.

    Several ``schedulers`` share a PostgreSQL server in its own directory, and one leads, by a lease of ``lease``. They
    need the extra ``cpumond[postgresql]`` and PostgreSQL. ``scheduler`` is the first of them."""

    def __init__(
        self, directory: str | os.PathLike[str], nodes: int = 1, *, cpu: float = 1.0, memory: int = 2 * 2**30,
        user_slots: int = 20, check_period: str = "1s", monitor: Mapping[str, object] | None = None,
        scheduler_config: str = "", agent_config: str = "", tags: Sequence[str] | Mapping[str, Sequence[str]] = (),
        real_time_scale: float = 1.0, heartbeat_period: str = "200ms", listen: str = "127.0.0.1:0",
        cgroup_prefix: str = "", mountinfo: str = "/proc/self/mountinfo", token: str = "",
        web: bool = False, schedulers: int = 1, lease: str = "10s",
    ) -> None:  # fmt: skip
        self.token = token
        self.node_token = secrets.token_hex(24) if token else ""
        self.web = web
        self.directory = os.path.abspath(directory)
        self.cpu = cpu
        self.memory = memory
        self.user_slots = user_slots
        self.monitor = {"check_period": check_period, **(monitor or {})}
        self.agent_config = agent_config
        self.heartbeat_period = heartbeat_period
        self.cgroup_prefix = cgroup_prefix or f"{CLUSTER_PREFIX}{os.getpid()}"
        self.mountinfo = mountinfo
        self.environment = _clean_environment()
        self.schedulers = [
            ClusterScheduler(
                self.directory, name, listen if number == 1 else ANY_PORT, scheduler_config, self.environment,
                real_time_scale, token, self.node_token,
            )
            for number in range(1, schedulers + 1)
            for name in ("scheduler" if number == 1 else f"scheduler-{number}",)
        ]  # fmt: skip
        self.scheduler = self.schedulers[0]
        self._asked, self._leader = list(self.schedulers), self.scheduler
        self.lease = lease
        self.database: PostgresServer | None = None
        names = [f"node-{number}" for number in range(1, nodes + 1)]
        tags_of = tags if isinstance(tags, Mapping) else dict.fromkeys(names, tags)
        self.nodes = [ClusterNode(self, name, tags_of.get(name, ())) for name in names]

    def __enter__(self) -> Cluster:
        try:
            if len(self.schedulers) > 1:
                self.database = PostgresServer(is_private=True).__enter__()
            for scheduler in self.schedulers:
                if self.database is not None:
                    conninfo = self.database.conninfo()
                    scheduler.store = {"kind": "postgresql", "conninfo": conninfo, "lease": self.lease}
                scheduler.start()
            if self.database is not None:
                self.wait(self.find_leader, "a scheduler leads")
            for node in self.nodes:
                node.launch()
            for node in self.nodes:
                node.wait_ready()
            self.wait(self._all_online, "all nodes are online")
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _all_online(self) -> bool:
        online = {node["id"] for node in self.get("/api/v1/nodes")["nodes"] if node["is_online"]}
        return online >= {node.node_id for node in self.nodes}

    def close(self) -> None:
        """End every process and every job of the cluster, and remove its cgroups. Files stay."""
        for process in (*self.nodes, *self.schedulers):
            process.kill()
            process.let_go()
        # Remove jobs while keepers reap them. Once the keepers are gone, do it again for a job that was just starting.
        self._remove_cgroups()
        for node in self.nodes:
            node.close()
        self._remove_cgroups()
        if self.database is not None:
            self.database.close()

    def _list_cgroups(self) -> list[str]:
        """Return the topmost cgroups that the cluster's nodes use."""
        return [self.cgroup_prefix, *(name_idle_parent(node.cgroup_root) for node in self.nodes)]

    def _remove_cgroups(self) -> None:
        for cgroup in self._list_cgroups():
            remove_cgroups(cgroup, self.mountinfo)

    def check(self) -> None:
        """Raise UnavailableError if a process ended without ``stop`` or ``kill``."""
        for process in (*self.schedulers, *self.nodes):
            process.check()

    def leftovers(self) -> list[str]:
        """Return the cluster's cgroups in every hierarchy, and its keepers; after ``close`` there are none."""
        keepers = [f"process {pid}" for node in self.nodes for pid in node.find_keepers()]
        places = [place for cgroup in self._list_cgroups() for place in _list_places(cgroup, self.mountinfo)]
        return places + keepers

    @property
    def url(self) -> str:
        return self.scheduler.url

    @property
    def urls(self) -> list[str]:
        return [scheduler.url for scheduler in self.schedulers]

    def find_leader(self) -> ClusterScheduler | None:
        """Return the scheduler that reports that it leads; None if none reports this. A single one always leads."""
        if len(self.schedulers) == 1:
            return self.scheduler
        # The last leader is asked first.
        self._asked.sort(key=lambda each: each is not self._leader)
        for scheduler in self._asked:
            if scheduler.is_running and not scheduler.is_paused:
                with contextlib.suppress(UnavailableError):
                    if _request("GET", f"{scheduler.url}/readyz").get("role") == "leader":
                        self._leader = scheduler
                        return scheduler
        return None

    def _find_url(self) -> str:
        leader = self.find_leader()
        if leader is None:
            raise UnavailableError("no scheduler leads")
        return leader.url

    def describe_pages(self) -> str:
        """Describe the addresses of the pages, one per line; the address of the scheduler's page signs the user in."""
        pages = [
            *(("web page", f"{url}/#token={self.token}" if self.token else f"{url}/") for url in self.urls),
            *((f"page of {node.node_id}", node.web_url) for node in self.nodes),
            *((f"metrics, {node.node_id}", node.metrics_url) for node in self.nodes),
        ]
        return "\n".join(f"  {name:<15}  {address}" for name, address in pages if address)

    def get(self, path: str) -> Any:
        """Return the JSON of a GET, for example ``/api/v1/status``. Raises UnavailableError with the error's text."""
        return _request("GET", f"{self._find_url()}{path}", token=self.token)

    def post(self, path: str, body: object = None) -> Any:
        """Return the JSON of a POST. Raises UnavailableError with the error's sentence."""
        return _request("POST", f"{self._find_url()}{path}", body, token=self.token)

    def create_pool(self, name: str, parent: str = "<Root>", **attributes: object) -> None:
        """Create a pool in the default tree, with YTsaurus' attributes."""
        self.post("/api/v1/trees/default/pools", {"name": name, "parent": parent, "attributes": attributes})

    def start_operation(
        self, pool: str, command: str | Sequence[str], job_count: int = 1, cpu_limit: float = 1.0,
        memory: int = 16 * 2**20, monitor: Mapping[str, object] | None = None, **spec: object,
    ) -> str:  # fmt: skip
        """Start an operation of one task, ``main``, and return its id. ``spec``: other keys of the specification."""
        task = {
            "job_count": job_count,
            "cpu_limit": cpu_limit,
            "memory_limit": memory,
            "command": command if isinstance(command, str) else list(command),
        }
        whole = {"pool": pool, "tasks": {"main": task}, **({"job_cpu_monitor": monitor} if monitor else {}), **spec}
        return str(self.post("/api/v1/operations", {"spec": whole})["id"])

    def jobs(self, operation_id: str, state: str | None = None) -> list[dict[str, Any]]:
        """The jobs of an operation as the scheduler shows them, the last started first."""
        query = f"?limit=1000&state={state}" if state else "?limit=1000"
        jobs: list[dict[str, Any]] = self.get(f"/api/v1/operations/{operation_id}/jobs{query}")["jobs"]
        return jobs

    def wait(self, condition: Callable[[], T], what: str, timeout_s: float = 100.0) -> T:
        """Call ``condition`` until its value is true; return it. Raises TimeoutError with the ends of all logs."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            value = condition()
            if value:
                return value
            if time.monotonic() > deadline_s:
                logs = [f"{each.name}: {line}" for each in (*self.schedulers, *self.nodes)
                        for line in each.log().splitlines()[-5:]]  # fmt: skip
                raise TimeoutError(f"not within {timeout_s:g} s: {what}\n" + "\n".join(logs))
            _PAUSE.wait(0.05)


def _make_short_directory(prefix: str) -> str:
    """A directory whose path is short enough for a socket: in TMPDIR, or in SHORT_DIR if TMPDIR is too long."""
    path = tempfile.mkdtemp(prefix=prefix)
    if len(os.fsencode(path)) > MAX_SOCKET_DIR and os.path.isdir(SHORT_DIR):
        os.rmdir(path)
        path = tempfile.mkdtemp(prefix=prefix, dir=SHORT_DIR)
    return path


def _write_extra(folder: str, text: str) -> None:
    """Write further configuration to a drop-in file, where any table may occur again."""
    if text:
        os.makedirs(folder, exist_ok=True)
        with open(os.path.join(folder, "extra.toml"), "w", encoding="utf-8") as file:
            file.write(text)


def _clean_environment() -> dict[str, str]:
    """The environment without settings of cpumond and yt, and without variables that systemd set for this process."""
    strange = ("YT_", "CPUMOND_", "NOTIFY_", "WATCHDOG_", "LISTEN_", "INVOCATION_", "JOURNAL_")
    return {name: value for name, value in os.environ.items() if not name.startswith(strange)}


def _request(method: str, url: str, body: object = None, uds: str | None = None, token: str = "") -> Any:
    import httpx2

    headers = {"Authorization": f"Bearer {token}"} if token else {}
    try:
        transport = httpx2.HTTPTransport(uds=uds, verify=False, trust_env=False)
        with httpx2.Client(transport=transport, timeout=20.0, trust_env=False, headers=headers) as client:
            answer = client.request(method, url, json=body)
    except httpx2.TransportError as error:
        raise UnavailableError(f"{method} {url}: no server answers: {error or type(error).__name__}") from error
    if not answer.is_success:
        told = answer.text
        with contextlib.suppress(ValueError, KeyError, TypeError):
            told = answer.json()["error"]
        raise UnavailableError(f"{method} {url}: answered {answer.status_code}: {told}")
    return answer.json()


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CLOEXEC, 0o600)


def _list_places(prefix: str, mountinfo: str) -> list[str]:
    """Return the directory ``prefix`` in each cgroup mount in which it exists."""
    points = {mount.mount_point for mount in read_mounts(mountinfo)}
    return sorted(place for point in points if os.path.isdir(place := os.path.join(point, prefix)))


def remove_cgroups(prefix: str, mountinfo: str = "/proc/self/mountinfo", timeout_s: float = 30.0) -> bool:
    """Kill processes in and below cgroup ``prefix`` in every hierarchy, and remove it. Return whether it is gone."""
    deadline_s = time.monotonic() + timeout_s
    while places := _list_places(prefix, mountinfo):
        for place in places:
            _kill_and_remove(place)
        if time.monotonic() > deadline_s:
            return False
        _PAUSE.wait(0.01)
    return True


def _kill_and_remove(top: str) -> None:
    for place, _, files in os.walk(top, topdown=False):
        processes = read_processes(place)
        for pid in processes:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        # This fails while a process is still exiting; the next round tries again.
        with contextlib.suppress(OSError):
            try:
                os.rmdir(place)
            except OSError as error:
                # ENOTEMPTY shows a simulated hierarchy of plain files, as a real cgroup's own files do not count.
                if error.errno == errno.ENOTEMPTY and not processes:
                    for name in files:
                        os.unlink(os.path.join(place, name))
                    os.rmdir(place)
