"""Parts for tests and for trying things out: fake trees and clocks, real cgroups, real load, a cluster of processes.

Used by this project's tests, by ``cpumond demo`` and ``cpumond cluster``, and by authors of new parts. Nothing here
runs in the agent.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import secrets
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import psutil
from cgroupspy.nodes import Node

from cpumond.cgroup.mounts import Hierarchies, read_mounts
from cpumond.errors import UnavailableError

CLUSTER_PREFIX = "cpumond-cluster-"
"""Of the cgroups of a ``Cluster``; its process id follows."""

ANY_PORT = "127.0.0.1:0"
RUN_PREFIX = "cpumond-run-"
"""Of an agent's ``runtime_dir`` outside of the cluster's directory; the process id and more follow."""

MAX_RUNTIME_DIR = 80
"""Bytes of a path; the address of a unix socket below it may have 107."""

MAX_SOCKET_DIR = 94
"""The same without anything to spare."""

SHORT_DIR = "/tmp"  # noqa: S108 - mkdtemp makes a directory of its own in it
"""Where there is room for a socket's address when there is none in TMPDIR."""

Tree = Mapping[str, Any]
T = TypeVar("T")
_PAUSE = threading.Event()
"""Never set: waiting for it is a pause."""


def make_tree(root: str | os.PathLike[str], tree: Tree) -> str:
    """Directories and files as a literal: a mapping is a directory, a text a file's content; the root's path."""
    path = os.fspath(root)
    os.makedirs(path, exist_ok=True)
    for name, content in tree.items():
        place = os.path.join(path, name)
        if isinstance(content, Mapping):
            make_tree(place, content)
        else:
            with open(place, "w", encoding="ascii") as file:
                file.write(str(content))
    return path


def v2_cgroup(usage_usec: int = 0, quota: str = "max 100000", **files: object) -> dict[str, object]:
    """The files of one v2 cgroup for ``make_tree``; further files by keyword, dots written as underscores."""
    stat = f"usage_usec {usage_usec}\nuser_usec 0\nsystem_usec 0\nnr_periods 0\nnr_throttled 0\nthrottled_usec 0\n"
    return {
        "cpu.stat": stat,
        "cpu.max": f"{quota}\n",
        "cpu.max.burst": "0\n",
        "cpu.weight": "100\n",
        **{name.replace("_", "."): content for name, content in files.items()},
    }


def write_mountinfo(path: str | os.PathLike[str], mounts: Mapping[str, str]) -> str:
    """A mountinfo text: mount point -> "cgroup2", or the comma-separated v1 controllers; the file's path."""
    lines = []
    for number, (point, kind) in enumerate(mounts.items(), 30):
        fs_type, options = ("cgroup2", "rw") if kind == "cgroup2" else ("cgroup", f"rw,{kind}")
        # 0:0 is the device of no file system: the kernel would show another one at these places.
        lines.append(f"{number} 1 0:0 / {point} rw,relatime - {fs_type} {fs_type} {options}\n")
    with open(path, "w", encoding="ascii") as file:
        file.write("".join(lines))
    return os.fspath(path)


def make_v2_host(root: str | os.PathLike[str], tree: Tree) -> str:
    """A fake unified hierarchy under ``root``/cgroup with ``tree`` in it; the path of its mountinfo."""
    place = os.path.join(os.fspath(root), "cgroup")
    make_tree(place, {"cgroup.controllers": "cpuset cpu io memory\n", **tree})
    return write_mountinfo(os.path.join(os.fspath(root), "mountinfo"), {place: "cgroup2"})


class FakeClock:
    """A clock that moves when told to: ``advance`` all, ``suspend`` only boot time and wall time."""

    def __init__(self, start_s: float = 1000.0) -> None:
        self._monotonic_s = start_s
        self._asleep_s = 0.0

    def monotonic_s(self) -> float:
        return self._monotonic_s

    def boottime_s(self) -> float:
        return self._monotonic_s + self._asleep_s

    def wall_s(self) -> float:
        return 1.7e9 + self.boottime_s()

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        self._monotonic_s += seconds

    def suspend(self, seconds: float) -> None:
        """Let the machine sleep."""
        self._asleep_s += seconds


V1_FILES = {
    "quota_us": "cpu.cfs_quota_us",
    "period_us": "cpu.cfs_period_us",
    "burst_us": "cpu.cfs_burst_us",
    "shares": "cpu.shares",
}
V2_FILES = {"quota_us": "cpu.max", "period_us": "cpu.max", "burst_us": "cpu.max.burst", "shares": "cpu.weight"}


class CgroupTree:
    """Real cgroups below one top cgroup of our own, in every hierarchy the agent reads; ``close`` removes them all.

    Files are named as the kernel names them, or, in every layout, by what they set: ``quota_us`` (-1 for none),
    ``period_us``, ``burst_us`` and ``shares``. Shares are 1024 where nobody changed them; on v2 they are written as the
    nearest ``cpu.weight``, and read back from it.
    """

    def __init__(self, hierarchies: Hierarchies, top: str) -> None:
        self.hierarchies = hierarchies
        self.top = top
        self.roots = sorted({hierarchies.cpu_root, hierarchies.cpuacct_root})
        self._processes: list[LoadProcess] = []
        for root in self.roots:
            place = Node(root)
            for part in top.split("/"):
                place = place.create_cgroup(part)
        self._enable(self.path(""))

    def _enable(self, directory: str) -> None:
        """On v2 a cgroup has the files of a controller only where the one above it says so."""
        if self.hierarchies.cpu_version == 2:
            with open(os.path.join(directory, "cgroup.subtree_control"), "w", encoding="ascii") as file:
                file.write("+cpu")

    def make(self, name: str) -> str:
        """Make the cgroup ``top``/``name``; its path relative to the hierarchy."""
        for root in self.roots:
            place = os.path.join(root, self.top)
            for part in name.split("/"):
                if root == self.hierarchies.cpu_root:
                    self._enable(place)
                place = os.path.join(place, part)
                os.makedirs(place, exist_ok=True)
        return f"{self.top}/{name}"

    def remove(self, name: str) -> None:
        """Remove an empty cgroup ``top``/``name``."""
        for root in self.roots:
            os.rmdir(os.path.join(root, self.top, name))

    def path(self, name: str, file: str = "") -> str:
        """Absolute path of a file of ``top``/``name`` in the hierarchy of the cpu controller."""
        return os.path.join(self.hierarchies.cpu_root, self.top, name, file) if name else os.path.join(
            self.hierarchies.cpu_root, self.top, file
        )  # fmt: skip

    def write(self, name: str, file: str, value: object) -> None:
        """Write a file of a cgroup, as somebody other than the agent would."""
        if self.hierarchies.cpu_version == 2:
            if file == "quota_us":
                value = "max" if str(value) == "-1" else value
            elif file == "period_us":
                value = f"{self.read(name, 'cpu.max').split()[0]} {value}"
            elif file == "shares":
                value = min(max(round(int(str(value)) * 100 / 1024), 1), 10_000)
        with open(self.path(name, self.file(file)), "w", encoding="ascii") as target:
            target.write(str(value))

    def read(self, name: str, file: str) -> str:
        """The text of a file of a cgroup."""
        with open(self.path(name, self.file(file)), encoding="ascii") as source:
            text = source.read().strip()
        if self.hierarchies.cpu_version == 2:
            if file == "quota_us":
                return "-1" if text.startswith("max") else text.split()[0]
            if file == "period_us":
                return text.split()[1]
            if file == "shares":
                return str(round(int(text) * 1024 / 100))
        return text

    def file(self, setting: str) -> str:
        """The kernel's name of the file that has this setting here; of any other name, that name."""
        return (V2_FILES if self.hierarchies.cpu_version == 2 else V1_FILES).get(setting, setting)

    def read_all(self, name: str) -> dict[str, str]:
        """All CPU settings of a cgroup, file -> text, for a comparison byte for byte."""
        settings = {}
        for file in sorted(os.listdir(self.path(name))):
            if file.startswith("cpu.") and not file.startswith(("cpu.stat", "cpu.pressure")):
                with contextlib.suppress(OSError), open(self.path(name, file), encoding="ascii") as source:
                    settings[file] = source.read()
        return settings

    def quota_cores(self, name: str) -> float:
        """The quota of a cgroup in cores; infinity when there is none."""
        quota_us, period_us = int(self.read(name, "quota_us")), int(self.read(name, "period_us"))
        return float("inf") if quota_us < 0 else quota_us / period_us

    def throttled_s(self, name: str) -> float:
        """For how long the quota of a cgroup has kept its threads waiting."""
        stat = dict(line.split() for line in self.read(name, "cpu.stat").splitlines())
        return int(stat["throttled_usec"]) / 1e6 if "throttled_usec" in stat else int(stat["throttled_time"]) / 1e9

    def start_load(self, name: str, threads: int = 1) -> LoadProcess:
        """A process in the cgroup ``top``/``name`` that burns what it is told to."""
        load = LoadProcess([os.path.join(root, self.top, name, "cgroup.procs") for root in self.roots], threads)
        self._processes.append(load)
        return load

    def close(self) -> None:
        """End the load and remove every cgroup below the top, and the top."""
        for process in self._processes:
            process.stop()
        for root in self.roots:
            for directory, _, _ in os.walk(os.path.join(root, self.top), topdown=False):
                _remove_when_empty(directory)

    def __enter__(self) -> CgroupTree:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _remove_when_empty(directory: str) -> None:
    """rmdir, again while the kernel is still taking the last process out."""
    for _ in range(200):
        try:
            os.rmdir(directory)
        except FileNotFoundError:
            return
        except OSError:
            threading.Event().wait(0.01)
        else:
            return


LOAD_PROGRAM = """
import sys, threading, time
paths, threads = sys.argv[2:], int(sys.argv[1])
for path in paths:
    with open(path, "w") as file:
        file.write("0")
import multiprocessing, os, select
children = []
for _ in range(threads - 1):
    r, w = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(w)
        source = r
        children = []
        break
    os.close(r)
    children.append(w)
else:
    source = 0
    print("ready", flush=True)
duty, pending = 0.0, b""
while True:
    wait = 0.0 if duty >= 1.0 else (None if duty <= 0.0 else 0.05 * (1.0 - duty))
    if select.select([source], [], [], wait)[0]:
        data = os.read(source, 4096)
        if not data:
            break
        for child in children:
            os.write(child, data)
        duty = float(data.split()[-1])
    end = time.monotonic() + 0.05 * duty
    while duty > 0.0 and time.monotonic() < end:
        sum(range(2000))
"""


class LoadProcess:
    """A real process (with ``threads`` - 1 children) in a cgroup that burns a share of a CPU each."""

    def __init__(self, procs_files: list[str], threads: int = 1) -> None:
        self.threads = threads
        self._process = subprocess.Popen(
            [sys.executable, "-S", "-c", LOAD_PROGRAM, str(threads), *procs_files],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        assert self._process.stdout is not None
        ready = select.poll()  # select() knows no descriptors from 1024 on
        ready.register(self._process.stdout, select.POLLIN)
        if not ready.poll(30_000) or not self._process.stdout.readline():
            self.stop()
            raise RuntimeError("the load process did not start")

    def burn(self, cores: float) -> None:
        """Use ``cores`` in all from now on (0 = sleep)."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{cores / self.threads}\n".encode())
        self._process.stdin.flush()

    @property
    def pid(self) -> int:
        """The process's id."""
        return self._process.pid

    def stop(self) -> None:
        """End it and its children."""
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()


@contextlib.contextmanager
def real_cgroups(hierarchies: Hierarchies, top: str) -> Iterator[CgroupTree]:
    """A ``CgroupTree`` that is gone afterwards."""
    tree = CgroupTree(hierarchies, top)
    try:
        yield tree
    finally:
        tree.close()


PACKAGE_PLACE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
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
"""``cpumond`` that asks for SIGTERM at the end of the thread that started it (PR_SET_PDEATHSIG). Its arguments: the
process that starts it, where the package is, then those of the command."""


class ClusterProcess:
    """One process of a ``Cluster``: its configuration, log and life. ``kill`` and ``start`` it as often as you like."""

    def __init__(self, directory: str, name: str, command: Sequence[str], kept_environment: Mapping[str, str]) -> None:
        self.name = name
        self.directory = os.path.join(directory, name)
        self.config_path = os.path.join(self.directory, "config.toml")
        self.log_path = os.path.join(self.directory, "log.jsonl")
        self._command = command
        self._environment = kept_environment
        self._process: subprocess.Popen[bytes] | None = None
        self._log_offset = 0
        os.makedirs(self.directory, exist_ok=True)

    @property
    def pid(self) -> int:
        """Of the running process. Raises UnavailableError when none runs."""
        if self._process is None:
            raise UnavailableError(f"{self.name} does not run")
        return self._process.pid

    def launch(self) -> None:
        """Start the process and do not wait for it. It ends with the thread that calls this."""
        if self._process is not None:
            raise UnavailableError(f"{self.name} runs already; kill or stop it first")
        self._log_offset = os.path.getsize(self.log_path) if os.path.exists(self.log_path) else 0
        with open(self.log_path, "ab") as log:
            self._process = subprocess.Popen(
                # -P: nothing is imported from the directory that we happen to be in.
                [sys.executable, "-P", "-c", LAUNCH_PROGRAM, str(os.getpid()), PACKAGE_PLACE, *self._command,
                 "--config", self.config_path],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=dict(self._environment), start_new_session=True,
            )  # fmt: skip

    def check(self) -> None:
        """Raises UnavailableError, with the log's end, when it has ended though nobody ended it here."""
        code = None if self._process is None else self._process.poll()
        if code is not None:
            how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"has ended with exit code {code}"
            last = self.log(self._log_offset).strip().rpartition("\n")[2]
            raise UnavailableError(f"{self.name} {how}; the last line of its log: {last[:500]}")

    def wait_ready(self, timeout_s: float = 120.0) -> None:
        """Wait until the present run says that it has started. Raises UnavailableError, with the log's end."""
        deadline_s = time.monotonic() + timeout_s
        while not self.log_events("started", since=self._log_offset):
            ended = self._process is None or self._process.poll() is not None
            if ended or time.monotonic() > deadline_s:
                how = "ended at its start" if ended else f"did not start within {timeout_s:g} s"
                told = self.log(self._log_offset)[-1500:].strip() or "its log is empty"
                raise UnavailableError(f"{self.name} {how}: {told}")
            _PAUSE.wait(0.02)

    def start(self) -> None:
        """Start it and wait until it is ready."""
        self.launch()
        self.wait_ready()

    def stop(self, number: int = signal.SIGTERM, timeout_s: float = 60.0) -> int:
        """Send a signal and wait for the end, which SIGKILL brings after ``timeout_s``; the exit code."""
        process = self._process
        if process is None:
            return 0
        process.send_signal(number)
        try:
            code = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
            code = process.wait()
        self._process = None
        return code

    def kill(self) -> None:
        """SIGKILL."""
        self.stop(signal.SIGKILL)

    def log(self, since: int = 0) -> str:
        """What it wrote in all of its runs, from a byte on."""
        try:
            with open(self.log_path, "rb") as file:
                file.seek(since)
                return file.read().decode("utf-8", "replace")
        except FileNotFoundError:
            return ""

    def log_events(self, name: str, since: int = 0) -> list[dict[str, Any]]:
        """Its log's records of one event, in order."""
        # A line that is not whole yet is left out.
        lines = [line for line in self.log(since).splitlines(keepends=True) if line.endswith("}\n")]
        records = [json.loads(line) for line in lines if line.startswith("{") and f'"{name}"' in line]
        return [record for record in records if record.get("event") == name]


class ClusterScheduler(ClusterProcess):
    """The scheduler of a ``Cluster``. It keeps its port when it is started again."""

    def __init__(
        self, directory: str, listen: str, extra: str, environment: Mapping[str, str], scale: float, token: str,
        node_token: str,
    ) -> None:  # fmt: skip
        super().__init__(directory, "scheduler", ["scheduler", "--time-scale", str(scale)], environment)
        self.listen = listen
        self._token = token
        self._node_token = node_token
        _write_extra(os.path.join(self.directory, "config.conf.d"), extra)

    def launch(self) -> None:
        tokens_file = ""
        if self._token:
            tokens_file = os.path.join(self.directory, "tokens")
            user, node = (hashlib.sha256(each.encode()).hexdigest() for each in (self._token, self._node_token))
            with open(tokens_file, "w", encoding="utf-8", opener=_open_private) as file:
                file.write(f"{psutil.Process().username()}:{user}:admin\nnodes:{node}:node\n")
        with open(self.config_path, "w", encoding="utf-8") as file:
            file.write(
                f'state_dir = {json.dumps(os.path.join(self.directory, "state"))}\nfair_share_update_period = "100ms"\n'
                "[min_spare_job_resources_on_node]\ncpu = 0.01\nmemory = 1048576\n"
                f"[api]\nlisten = {json.dumps(self.listen)}\ntokens_file = {json.dumps(tokens_file)}\n"
                '[log]\nformat = "json"\n'
            )
        super().launch()

    def wait_ready(self, timeout_s: float = 120.0) -> None:
        super().wait_ready(timeout_s)
        self.listen = str(self.log_events("started")[-1]["listen"])

    @property
    def url(self) -> str:
        """Its address."""
        return f"http://{self.listen}"


class ClusterNode(ClusterProcess):
    """One agent of a ``Cluster`` with the node that it is; jobs outlive it, as everywhere."""

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
        self._web_listen = self._metrics_listen = ANY_PORT if cluster.web else ""
        _write_extra(os.path.join(self.directory, "conf.d"), cluster.agent_config)

    @property
    def control_socket(self) -> str:
        """The agent's unix socket."""
        return os.path.join(self.runtime_dir, "control.sock")

    @property
    def web_url(self) -> str:
        """The address of the agent's page, with a slash at its end; "" where it has none, or never ran."""
        return "" if self._web_listen in ("", ANY_PORT) else f"http://{self._web_listen}/"

    @property
    def metrics_url(self) -> str:
        """Where Prometheus finds the agent; "" where it has no page, or never ran."""
        return "" if self._metrics_listen in ("", ANY_PORT) else f"http://{self._metrics_listen}/metrics"

    def wait_ready(self, timeout_s: float = 120.0) -> None:
        super().wait_ready(timeout_s)
        if self._web_listen:
            # The same ports after a restart.
            started = self.log_events("started")[-1]
            self._web_listen, self._metrics_listen = str(started["web"]), str(started["metrics"])

    def launch(self) -> None:
        cluster = self._cluster
        tables: dict[str, Mapping[str, object]] = {
            "": {
                "node_id": self.node_id, "state_dir": self.state_dir, "runtime_dir": self.runtime_dir,
                "managed_roots": [self.cgroup_root], "mountinfo": cluster.mountinfo,
            },
            "monitor": {"mode": "reclaim", "min_cpu_limit": 0.05, **cluster.monitor},
            "scheduler": {
                "url": cluster.url, "token": cluster.node_token, "heartbeat_period": cluster.heartbeat_period,
                "retry_max": "1s", "tags": list(self._tags),
            },
            "resources": {"cpu": cluster.cpu, "memory": cluster.memory, "user_slots": cluster.user_slots},
            "executor": {
                "kind": "cgroup", "cgroup_root": self.cgroup_root, "jobs_dir": self.jobs_dir,
                "allow_root": os.geteuid() == 0,
                # Whoever is not root runs jobs as itself, and has to say so.
                "user": "" if os.geteuid() == 0 else psutil.Process().username(),
            },
            "metrics": {"listen": self._metrics_listen},
            "report": {"kind": "none"},
            # A point of the graphs at each check, for ten minutes and more.
            "web": {"listen": self._web_listen, "period": cluster.monitor["check_period"], "samples": 600},
            "log": {"format": "json"},
        }  # fmt: skip
        with open(self.config_path, "w", encoding="utf-8", opener=_open_private) as file:
            for table, values in tables.items():
                file.write(f"[{table}]\n" if table else "")
                file.writelines(f"{key} = {json.dumps(value)}\n" for key, value in values.items())
        super().launch()

    def get(self, path: str) -> Any:
        """The JSON of a GET over the agent's control socket, for example ``/v1/status``. Raises UnavailableError."""
        return _request("GET", f"http://agent{path}", uds=self.control_socket)

    def find_keepers(self) -> list[int]:
        """The process that keeps the node's jobs; it outlives the agent."""
        return _find_keepers(self.runtime_dir)

    def close(self, timeout_s: float = 30.0) -> None:
        """SIGKILL to the keeper, and remove what is not in the cluster's directory."""
        deadline_s = time.monotonic() + timeout_s
        while (keepers := self.find_keepers()) and time.monotonic() < deadline_s:
            for pid in keepers:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            _PAUSE.wait(0.01)
        if self._short_dir:
            shutil.rmtree(self._short_dir, ignore_errors=True)


class Cluster:
    """One real ``cpumond scheduler`` and real ``cpumond agent``s on this machine, with real jobs in real cgroups.

    Each agent is a node ``node-1``, ``node-2``... that offers ``cpu`` cores, ``memory`` bytes and ``user_slots``, in
    cgroups below ``cgroup_prefix``; its files are in ``directory``. ``monitor`` are keys of the agents' ``[monitor]``
    (limits go down to 0.05 cores where it does not say otherwise), ``scheduler_config`` and ``agent_config`` further
    TOML of any tables. ``tags`` are those of all nodes, or by node. The scheduler's time runs ``real_time_scale`` times
    as fast. ``mountinfo`` for a simulated kernel. With a ``token`` the scheduler takes no request without it (nodes
    have a ``node_token``): else every user of the machine may run jobs on the nodes, as root where root made them. With
    ``web`` each agent has its page, too, at its ``web_url``. Entering it waits until all nodes are online; leaving it
    ends every process and job and removes every cgroup, whatever happened. Needs the extra ``cpumond[scheduler]``.
    """

    def __init__(
        self, directory: str | os.PathLike[str], nodes: int = 1, *, cpu: float = 1.0, memory: int = 2 * 2**30,
        user_slots: int = 20, check_period: str = "1s", monitor: Mapping[str, object] | None = None,
        scheduler_config: str = "", agent_config: str = "", tags: Sequence[str] | Mapping[str, Sequence[str]] = (),
        real_time_scale: float = 1.0, heartbeat_period: str = "200ms", listen: str = "127.0.0.1:0",
        cgroup_prefix: str = "", mountinfo: str = "/proc/self/mountinfo", token: str = "",
        web: bool = False,
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
        self.scheduler = ClusterScheduler(
            self.directory, listen, scheduler_config, self.environment, real_time_scale, token, self.node_token
        )
        names = [f"node-{number}" for number in range(1, nodes + 1)]
        self.nodes = [
            ClusterNode(self, name, tags.get(name, ()) if isinstance(tags, Mapping) else tags) for name in names
        ]

    # --- life

    def __enter__(self) -> Cluster:
        try:
            self.scheduler.start()
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
        """End every process and every job of it, and remove its cgroups. Files stay where they are."""
        for process in (*self.nodes, self.scheduler):
            process.kill()
        # Jobs first: then there is still somebody who waits for them. Again for one that was just being started.
        remove_cgroups(self.cgroup_prefix, self.mountinfo)
        for node in self.nodes:
            node.close()
        remove_cgroups(self.cgroup_prefix, self.mountinfo)

    def check(self) -> None:
        """Raises UnavailableError when a process has ended though nobody ended it here."""
        for process in (self.scheduler, *self.nodes):
            process.check()

    def leftovers(self) -> list[str]:
        """What of it is there: cgroups of every hierarchy, and keepers; after ``close`` nothing."""
        keepers = [f"process {pid}" for node in self.nodes for pid in node.find_keepers()]
        return _list_places(self.cgroup_prefix, self.mountinfo) + keepers

    # --- requests

    @property
    def url(self) -> str:
        """The scheduler's address."""
        return self.scheduler.url

    def describe_pages(self) -> str:
        """The addresses of the pages and the token for the scheduler's, a line each, for people."""
        pages = [
            ("web page", f"{self.url}/"),
            *((f"page of {node.node_id}", node.web_url) for node in self.nodes),
            *((f"metrics, {node.node_id}", node.metrics_url) for node in self.nodes),
        ]
        lines = [f"  {name:<15}  {address}" for name, address in pages if address]
        if self.token:
            lines.insert(1, f"  {'its token':<15}  {self.token}")
        return "\n".join(lines)

    def get(self, path: str) -> Any:
        """The JSON of a GET, for example ``/api/v1/status``. Raises UnavailableError with what the scheduler said."""
        return _request("GET", f"{self.url}{path}", token=self.token)

    def post(self, path: str, body: object = None) -> Any:
        """The JSON of a POST. Raises UnavailableError with what the scheduler said."""
        return _request("POST", f"{self.url}{path}", body, token=self.token)

    def create_pool(self, name: str, parent: str = "<Root>", **attributes: object) -> None:
        """Make a pool in the default tree, with the documents' attributes."""
        self.post("/api/v1/trees/default/pools", {"name": name, "parent": parent, "attributes": attributes})

    def start_operation(
        self, pool: str, command: str | Sequence[str], job_count: int = 1, cpu_limit: float = 1.0,
        memory: int = 16 * 2**20, monitor: Mapping[str, object] | None = None, **spec: object,
    ) -> str:  # fmt: skip
        """Start an operation of one task, ``main``; its id. ``spec``: whatever else stands in a specification."""
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
        """Ask ``condition`` until it is true; its value. Raises TimeoutError with the last lines of all logs."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            value = condition()
            if value:
                return value
            if time.monotonic() > deadline_s:
                logs = [f"{each.name}: {line}" for each in (self.scheduler, *self.nodes)
                        for line in each.log().splitlines()[-5:]]  # fmt: skip
                raise TimeoutError(f"not within {timeout_s:g} s: {what}\n" + "\n".join(logs))
            _PAUSE.wait(0.05)


def _make_short_directory(prefix: str) -> str:
    """A directory for a socket, where that can be: TMPDIR may be too long for it."""
    path = tempfile.mkdtemp(prefix=prefix)
    if len(os.fsencode(path)) > MAX_SOCKET_DIR and os.path.isdir(SHORT_DIR):
        os.rmdir(path)
        path = tempfile.mkdtemp(prefix=prefix, dir=SHORT_DIR)
    return path


def _write_extra(folder: str, text: str) -> None:
    """Further configuration as a drop-in, so that it may name any table."""
    if text:
        os.makedirs(folder, exist_ok=True)
        with open(os.path.join(folder, "extra.toml"), "w", encoding="utf-8") as file:
            file.write(text)


def _clean_environment() -> dict[str, str]:
    """The environment without what would lead a process elsewhere."""
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
        raise UnavailableError(f"{method} {url}: nobody answers: {error or type(error).__name__}") from error
    if not answer.is_success:
        told = answer.text
        with contextlib.suppress(ValueError, KeyError, TypeError):
            told = answer.json()["error"]
        raise UnavailableError(f"{method} {url}: answered {answer.status_code}: {told}")
    return answer.json()


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CLOEXEC, 0o600)


def _find_keepers(runtime_dir: str) -> list[int]:
    """The processes that were started as ``keeper.py RUNTIME_DIR``."""
    found = []
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        # It ended just now, or is somebody else's.
        with contextlib.suppress(OSError), open(f"/proc/{name}/cmdline", "rb") as file:
            words = file.read().rstrip(b"\0").split(b"\0")
            if words[-1] == os.fsencode(runtime_dir) and any(b"keeper" in word for word in words[1:-1]):
                found.append(int(name))
    return found


def _list_places(prefix: str, mountinfo: str) -> list[str]:
    """The directory ``prefix`` in each cgroup mount that has it."""
    points = {mount.mount_point for mount in read_mounts(mountinfo)}
    return sorted(place for point in points if os.path.isdir(place := os.path.join(point, prefix)))


def remove_cgroups(prefix: str, mountinfo: str = "/proc/self/mountinfo", timeout_s: float = 30.0) -> bool:
    """Kill all that lives in the cgroup ``prefix`` and below, in every hierarchy, and remove it; whether it is gone."""
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
        processes: list[int] = []
        with contextlib.suppress(OSError), open(os.path.join(place, "cgroup.procs"), encoding="ascii") as file:
            processes = [int(word) for word in file.read().split() if word.isdigit() and word != "0"]
        for pid in processes:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        # Not while a process is still on its way out: the next round does it.
        with contextlib.suppress(OSError):
            try:
                os.rmdir(place)
            except OSError as error:
                # A tree of plain files; a cgroup is never "not empty" because of its files.
                if error.errno == errno.ENOTEMPTY and not processes:
                    for name in files:
                        os.unlink(os.path.join(place, name))
                    os.rmdir(place)
