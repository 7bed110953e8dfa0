"""What the tests of the closed loop need besides ``cpumond.testing.Cluster``: the kernel's view, and a bad network."""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import httpx2
import psutil
from commands import run_command
from scheduler_process import NO_BINDINGS, YT, clean_environment
from waiting import SLOWNESS

from cpumond.cluster import Cluster, ClusterNode, ClusterProcess
from cpumond.core.errors import UnavailableError
from cpumond.core.job_cgroups import name_idle_parent
from cpumond.host.cgroup.mounts import Hierarchies

MIB = 2**20
WAIT_S = 120.0
"""Longer than anything here takes on a machine that is busy with something else."""

WORKER = f"""
import os, sys, time
wake = sys.argv[1]
while True:
    if os.path.exists(wake):
        if not os.path.exists(wake + ".seen"):
            open(wake + ".seen", "w").close()
        end = time.process_time() + 0.02
        while time.process_time() < end:
            pass
    else:
        end = time.process_time() + 0.002
        while time.process_time() < end:
            pass
        time.sleep({0.018 * SLOWNESS})
"""
"""Uses 0.1 cores at most, and 1.0 as long as the file of the first argument is there; when it has seen it, it makes a
file with ``.seen`` at the end of its name. On an emulated processor it does less: there the loop itself costs as much.
One core and not more: agents, schedulers and the tests beside it need the other one."""


class Loop(Cluster):
    """A cluster as it is tested here: the command line, ``yt``, and what the kernel says of its jobs."""

    def __init__(
        self, directory: Path, hierarchies: Hierarchies, nodes: int = 1, is_idle: bool = False, **options: Any
    ) -> None:
        """``is_idle``: jobs on reclaimed CPU stay in the idle class; else they get on beside any work of this host."""
        self.place = directory
        self._lift = threading.Thread(target=self._lift_guests) if not is_idle else None
        self._is_over = threading.Event()
        self.hierarchies = hierarchies
        options.setdefault("check_period", "250ms")
        super().__init__(directory, nodes, cgroup_prefix=f"cpumond-loop-{os.getpid()}-{next(_numbers)}", **options)

    def __enter__(self) -> Loop:
        super().__enter__()
        try:
            # Jobs get more than their limits are lowered to, whatever else runs on the machine, and do not starve it.
            self.set_weight(8)
            if self._lift is not None:
                self._lift.start()
        except BaseException:
            self.close()
            raise
        return self

    def close(self) -> None:
        self._is_over.set()
        if self._lift is not None and self._lift.ident is not None:
            self._lift.join()
        super().close()

    def _lift_guests(self) -> None:
        """Take jobs on reclaimed CPU out of the idle class, into which each start puts them."""
        parents = [Path(self.hierarchies.cpu_root, name_idle_parent(node.cgroup_root)) for node in self.nodes]
        name, weight = ("cpu.weight", "800") if self.hierarchies.cpu_version == 2 else ("cpu.shares", "8192")
        while not self._is_over.wait(0.05):
            for parent in parents:
                with contextlib.suppress(OSError):  # it is not there yet, or not any more
                    if (parent / "cpu.idle").read_text() == "1\n":
                        (parent / "cpu.idle").write_text("0")
                        (parent / name).write_text(weight)

    def set_weight(self, weight: int) -> None:
        """How much of a busy machine all jobs together get: so many times what any other process gets, at most 100."""
        name, unit = ("cpu.weight", 100) if self.hierarchies.cpu_version == 2 else ("cpu.shares", 1024)
        for cgroup in (self.cgroup_prefix, *(node.cgroup_root for node in self.nodes)):
            Path(self.hierarchies.cpu_root, cgroup, name).write_text(str(weight * unit), encoding="ascii")

    # --- commands

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """A command of the command line, spoken to this cluster's scheduler."""
        environment = {**clean_environment(), "CPUMOND_SCHEDULER": self.url, "HOME": str(self.place)}
        return run_command(list(arguments), environment)

    def ask(self, *arguments: str) -> Any:
        """The JSON of a command that must succeed."""
        done = self.run(*arguments, "--json")
        assert done.returncode == 0, (arguments, done.stderr)
        return json.loads(done.stdout)

    def start(self, pool: str, *command: str, count: int = 1, cpu: float = 1.0, monitor: str = "") -> str:
        """``cpumond operation start``; the id it prints."""
        options = ["--job-cpu-monitor", monitor] if monitor else []
        done = self.run(
            "operation", "start", "--pool", pool, "--job-count", str(count), "--cpu-limit", str(cpu),
            "--memory", str(128 * MIB), *options, "--", *command,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def yt(self, *arguments: str) -> str:
        """What the unmodified client prints; it must succeed."""
        done = self.try_yt(*arguments)
        assert done.returncode == 0, (arguments, done.stderr)
        return done.stdout.strip()

    def try_yt(self, *arguments: str, program: Path = YT) -> subprocess.CompletedProcess[str]:
        """A run of the unmodified client, or of another ``program`` that uses its library."""
        blocked = self.place / "no_bindings"
        blocked.mkdir(exist_ok=True)
        (blocked / "yt_yson_bindings.py").write_text(NO_BINDINGS)
        return subprocess.run(
            [str(program), *arguments],
            env={
                **clean_environment(), "YT_PROXY": self.scheduler.listen, "HOME": str(self.place),
                "YT_CONFIG_PATCHES": "{proxy={retries={enable=%false}}}", "PYTHONPATH": str(blocked),
            },
            capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip

    def set_tree(self, **values: object) -> None:
        """Change options of the default tree."""
        edits = [{"path": [key], "value": value} for key, value in values.items()]
        with httpx2.Client(trust_env=False, verify=False, timeout=60.0) as client:
            answer = client.patch(f"{self.url}/api/v1/trees/default", json={"edits": edits})
        assert answer.status_code == 200, answer.text

    # --- what the scheduler says

    def operation(self, operation_id: str) -> Any:
        """One operation, as ``operation show --json`` has it."""
        return self.get(f"/api/v1/operations/{operation_id}")

    def await_state(self, operation_id: str, state: str) -> Any:
        """Wait until an operation is in a state; its view."""
        return self.wait(
            lambda: found if (found := self.operation(operation_id))["state"] == state else None,
            f"operation {operation_id} is {state}, not {self.operation(operation_id)['state']}",
            WAIT_S,
        )

    def await_running(self, operation_id: str, count: int = 1) -> list[dict[str, Any]]:
        """Wait until so many jobs of an operation live in their cgroups, as their nodes have reported; these jobs."""

        def find() -> list[dict[str, Any]]:
            jobs = [job for job in self.jobs(operation_id, "running") if job["cgroup"] and self.pids(job["cgroup"])]
            return jobs if len(jobs) == count else []

        return self.wait(find, f"{count} jobs of {operation_id} run", WAIT_S)

    def await_no_jobs(self) -> None:
        """Wait until no node has a job, and no scheduler thinks so."""
        self.wait(lambda: not any(node["jobs"] for node in self.nodes_view()), "the scheduler has no jobs", WAIT_S)
        self.wait(lambda: not any(any(node_states(node).values()) for node in self.nodes), "no node has jobs", WAIT_S)

    def nodes_view(self) -> list[dict[str, Any]]:
        """All nodes with their jobs."""
        return [self.get(f"/api/v1/nodes/{node.node_id}") for node in self.nodes]

    def abort(self, operation_id: str) -> None:
        """Abort an operation."""
        self.post(f"/api/v1/operations/{operation_id}/abort", {})

    # --- what the kernel says

    def pids(self, cgroup: str) -> list[int]:
        """The processes of a cgroup; none where it is gone."""
        try:
            text = Path(self.hierarchies.cpu_root, cgroup, "cgroup.procs").read_text(encoding="ascii")
        except OSError:
            return []
        return [int(word) for word in text.split()]

    def quota_cores(self, cgroup: str) -> float:
        """The quota of a cgroup; infinity where there is none."""
        place = Path(self.hierarchies.cpu_root, cgroup)
        if self.hierarchies.cpu_version == 2:
            quota, period = (place / "cpu.max").read_text(encoding="ascii").split()
        else:
            quota, period = (
                (place / name).read_text(encoding="ascii").strip() for name in ("cpu.cfs_quota_us", "cpu.cfs_period_us")
            )
        return float("inf") if quota in ("max", "-1") else int(quota) / int(period)

    def keeper_of(self, job: Mapping[str, Any]) -> int:
        """The process that keeps a living job: its parent."""
        return psutil.Process(self.main_pid(job)).ppid()

    def main_pid(self, job: Mapping[str, Any]) -> int:
        """The first process of a living job."""
        mine = self.pids(job["cgroup"])
        for pid in mine:
            with contextlib.suppress(psutil.NoSuchProcess):  # one that it ran has ended just now
                if psutil.Process(pid).ppid() not in mine:
                    return pid
        raise AssertionError(f"no process of {job['id']} lives")


_numbers = iter(range(1_000_000))


def configure(node: ClusterNode, text: str, name: str = "test") -> None:
    """Further configuration of one node, from its next start on; "" takes it away."""
    folder = Path(node.directory, "conf.d")
    folder.mkdir(exist_ok=True)
    (folder / f"z-{name}.toml").write_text(text, encoding="utf-8")


def restart(node: ClusterNode) -> None:
    """End an agent in order and start it again."""
    assert node.stop() == 0
    node.start()


def runs(process: ClusterProcess) -> bool:
    """Whether a process of the cluster was started and not ended since."""
    with contextlib.suppress(UnavailableError):
        return process.pid > 0
    return False


def node_states(node: ClusterNode) -> dict[str, int]:
    """How many of the scheduler's jobs an agent has, by state."""
    states: dict[str, int] = node.get("/v1/status")["executor"]["states"]
    return states


def is_alive(pid: int) -> bool:
    """Whether a process is there and not only waited for."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


class CpuMeter:
    """Reads the kernel's counters of all jobs of a cluster for as long as they live; the last value of each stays."""

    def __init__(self, cluster: Loop) -> None:
        self._cluster = cluster
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.seconds: dict[str, float] = {}
        """By cgroup."""

    def __enter__(self) -> CpuMeter:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(0.02):
            self.read()

    def read(self) -> None:
        """One look at all counters."""
        places = self._cluster.hierarchies
        parents = [each.cgroup_root for each in self._cluster.nodes]
        for parent in (*parents, *map(name_idle_parent, parents)):
            top = os.path.join(places.cpuacct_root, parent)
            with contextlib.suppress(OSError):
                for name in os.listdir(top):
                    if os.path.isdir(os.path.join(top, name)):
                        self._read_one(f"{parent}/{name}", os.path.join(top, name))

    def _read_one(self, cgroup: str, place: str) -> None:
        # It may have ended between the two looks.
        with contextlib.suppress(OSError):
            if self._cluster.hierarchies.cpu_version == 2:
                with open(os.path.join(place, "cpu.stat"), encoding="ascii") as file:
                    self.seconds[cgroup] = int(file.read().split()[1]) / 1e6
            else:
                with open(os.path.join(place, "cpuacct.usage"), encoding="ascii") as file:
                    self.seconds[cgroup] = int(file.read()) / 1e9

    def of(self, jobs: list[dict[str, Any]]) -> float:
        """What these jobs have used together."""
        return sum(self.seconds.get(job["cgroup"], 0.0) for job in jobs)


Network = Literal["pass", "cut", "refuse", "no answers"]


class Proxy:
    """The network between an agent and the scheduler: TCP that is passed on, or not.

    ``mode`` "cut": nothing moves, and what was sent meanwhile arrives late, as after a cable was put back; "refuse":
    every connection is closed; "no answers": requests arrive, answers do not. ``delay_s`` holds up answers.
    ``requests`` are the bodies of all POSTs that were passed on, with their paths, the oldest first.
    """

    def __init__(self, find_target: Callable[[], str]) -> None:
        self._find_target = find_target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.mode: Network = "pass"
        self.delay_s = 0.0
        self.requests: list[tuple[str, dict[str, Any]]] = []
        self._pairs: list[_Pair] = []
        self._late: list[tuple[float, _Pair, bytes]] = []
        self._half_open = False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Proxy:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        for pair in self._pairs:
            pair.close()
        self._listener.close()

    def cut_half_open(self) -> None:
        """All connections die without a word to the agent: its next request on one of them is never answered."""
        self._half_open = True

    def heartbeats(self) -> list[dict[str, Any]]:
        """The bodies of the heartbeats that were passed on."""
        return [body for path, body in list(self.requests) if path == "/api/v1/heartbeats"]

    def _run(self) -> None:
        while not self._stop.is_set():
            if self._half_open:
                self._half_open = False
                for pair in self._pairs:
                    pair.lose_server()
            mode = self.mode
            self._send_late(mode)
            ready = set(select.select(list(self._watched(mode)), [], [], 0.01)[0])
            if self._listener in ready:
                self._accept(mode)
            for pair in self._pairs:
                if mode == "refuse":
                    pair.close()
                if pair.client in ready:
                    self._pass_request(pair)
                if pair.server in ready:
                    self._pass_answer(pair)
            self._pairs = [pair for pair in self._pairs if not pair.closed]

    def _watched(self, mode: Network) -> Iterator[socket.socket]:
        if mode != "cut":
            yield self._listener
            for pair in self._pairs:
                yield pair.client
                if pair.server is not None and mode != "no answers":
                    yield pair.server

    def _accept(self, mode: Network) -> None:
        client, _ = self._listener.accept()
        host, _, port = self._find_target().rpartition(":")
        try:
            if mode == "refuse":
                raise ConnectionRefusedError
            server = socket.create_connection((host, int(port)), 5.0)
        except OSError:
            client.close()
            return
        self._pairs.append(_Pair(client, server))

    def _pass_request(self, pair: _Pair) -> None:
        data = pair.receive(pair.client)
        if not data:
            pair.close()
        elif pair.server is not None:
            self.requests += pair.parse(data)
            pair.send(pair.server, data)

    def _pass_answer(self, pair: _Pair) -> None:
        data = pair.receive(pair.server)
        if not data:
            pair.close()
        elif self.delay_s:
            self._late.append((time.monotonic() + self.delay_s, pair, data))
        else:
            pair.send(pair.client, data)

    def _send_late(self, mode: Network) -> None:
        now_s = time.monotonic()
        due = [item for item in self._late if item[0] <= now_s and mode == "pass"]
        self._late = [item for item in self._late if item not in due]
        for _, pair, data in due:
            pair.send(pair.client, data)


class _Pair:
    """A connection of the agent and its other half."""

    def __init__(self, client: socket.socket, server: socket.socket) -> None:
        self.client = client
        self.server: socket.socket | None = server
        self.closed = False
        self._request = b""

    def receive(self, sock: socket.socket | None) -> bytes:
        try:
            return b"" if sock is None or self.closed else sock.recv(65_536)
        except OSError:
            return b""

    def send(self, sock: socket.socket | None, data: bytes) -> None:
        try:
            if sock is not None and not self.closed:
                sock.sendall(data)
        except OSError:
            self.close()

    def parse(self, data: bytes) -> Iterator[tuple[str, dict[str, Any]]]:
        """The POSTs that are whole now."""
        self._request += data
        while b"\r\n\r\n" in self._request:
            head, _, rest = self._request.partition(b"\r\n\r\n")
            length = re.search(rb"(?i)content-length: *(\d+)", head)
            size = int(length[1]) if length else 0
            if len(rest) < size:
                return
            self._request = rest[size:]
            if size:
                yield head.split()[1].decode(), json.loads(rest[:size])

    def lose_server(self) -> None:
        if self.server is not None:
            self.server.close()
            self.server = None

    def close(self) -> None:
        self.closed = True
        self.client.close()
        self.lose_server()
