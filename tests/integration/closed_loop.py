"""What the tests of the closed loop need besides ``cpumond.testing.Cluster``: the kernel's view, and a bad network."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import subprocess
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import httpx2
import psutil
from commands import run_command
from executor_contract import read_cores
from scheduler_process import YT, clean_environment, yt_environment
from waiting import SLOWNESS

from cpumond.cluster import Cluster, ClusterNode, ClusterProcess
from cpumond.core.errors import UnavailableError
from cpumond.core.job_cgroups import name_idle_parent
from cpumond.host.cgroup.job_tree import JobCgroupTree
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
        environment = {**clean_environment(), "CPUMOND_SCHEDULER": self.url, "HOME": str(self.place)}
        return run_command(list(arguments), environment)

    def ask(self, *arguments: str) -> Any:
        """The JSON of a command that must succeed."""
        done = self.run(*arguments, "--json")
        assert done.returncode == 0, (arguments, done.stderr)
        return json.loads(done.stdout)

    def start(self, pool: str, *command: str, count: int = 1, cpu: float = 1.0, monitor: str = "") -> str:
        options = ["--job-cpu-monitor", monitor] if monitor else []
        done = self.run(
            "operation", "start", "--pool", pool, "--job-count", str(count), "--cpu-limit", str(cpu),
            "--memory", str(128 * MIB), *options, "--", *command,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def yt(self, *arguments: str) -> str:
        done = self.try_yt(*arguments)
        assert done.returncode == 0, (arguments, done.stderr)
        return done.stdout.strip()

    def try_yt(self, *arguments: str, program: Path = YT) -> subprocess.CompletedProcess[str]:
        """A run of the unmodified client, or of another ``program`` that uses its library."""
        return subprocess.run(
            [str(program), *arguments], env=yt_environment(self.scheduler.listen, self.place), capture_output=True,
            text=True, timeout=250, check=False,
        )  # fmt: skip

    def set_tree(self, **values: object) -> None:
        edits = [{"path": [key], "value": value} for key, value in values.items()]
        with httpx2.Client(trust_env=False, verify=False, timeout=250) as client:
            answer = client.patch(f"{self.url}/api/v1/trees/default", json={"edits": edits})
        assert answer.status_code == 200, answer.text

    # --- what the scheduler says

    def operation(self, operation_id: str) -> Any:
        return self.get(f"/api/v1/operations/{operation_id}")

    def await_state(self, operation_id: str, state: str) -> Any:
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
        self.wait(lambda: not any(node["jobs"] for node in self.nodes_view()), "the scheduler has no jobs", WAIT_S)
        self.wait(lambda: not any(any(node_states(node).values()) for node in self.nodes), "no node has jobs", WAIT_S)

    def nodes_view(self) -> list[dict[str, Any]]:
        return [self.get(f"/api/v1/nodes/{node.node_id}") for node in self.nodes]

    def abort(self, operation_id: str) -> None:
        self.post(f"/api/v1/operations/{operation_id}/abort", {})

    # --- what the kernel says

    def pids(self, cgroup: str) -> list[int]:
        try:
            text = Path(self.hierarchies.cpu_root, cgroup, "cgroup.procs").read_text(encoding="ascii")
        except OSError:
            return []
        return [int(word) for word in text.split()]

    def quota_cores(self, cgroup: str) -> float:
        return read_cores(self.hierarchies, cgroup)

    def keeper_of(self, job: Mapping[str, Any]) -> int:
        """The process that keeps a living job: its parent."""
        return psutil.Process(self.main_pid(job)).ppid()

    def main_pid(self, job: Mapping[str, Any]) -> int:
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
        for node in self._cluster.nodes:
            tree = JobCgroupTree(self._cluster.hierarchies, node.cgroup_root)
            for job_id in tree.list_job_ids():
                used = tree.read_totals(job_id).cpu_seconds
                if used is not None:  # it may have ended between the two looks
                    self.seconds[tree.path(job_id)] = used

    def of(self, jobs: list[dict[str, Any]]) -> float:
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
        self.mode: Network = "pass"
        self.delay_s = 0.0
        self.requests: list[tuple[str, dict[str, Any]]] = []
        self._servers: set[asyncio.StreamWriter] = set()
        self._lost: set[asyncio.StreamWriter] = set()
        """Those of ``cut_half_open``."""
        self._loop = asyncio.new_event_loop()
        self._listener = self._loop.run_until_complete(asyncio.start_server(self._serve, "127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.sockets[0].getsockname()[1]}"
        self._thread = threading.Thread(target=self._loop.run_forever)

    def __enter__(self) -> Proxy:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _end(self) -> None:
        self._listener.close()
        self.mode = "refuse"
        while others := asyncio.all_tasks() - {asyncio.current_task()}:
            await asyncio.wait(others)

    def cut_half_open(self) -> None:
        """All connections die without a word to the agent: its next request on one of them is never answered."""

        def lose() -> None:
            self._lost |= self._servers
            for server in self._servers:
                server.close()

        self._loop.call_soon_threadsafe(lose)

    def heartbeats(self) -> list[dict[str, Any]]:
        return [body for path, body in list(self.requests) if path == "/api/v1/heartbeats"]

    async def _serve(self, requests: asyncio.StreamReader, client: asyncio.StreamWriter) -> None:
        with contextlib.closing(client), contextlib.suppress(OSError):
            while self.mode == "cut":
                await asyncio.sleep(0.01)
            host, _, port = self._find_target().rpartition(":")
            answers, server = await asyncio.open_connection(host, int(port))
            with contextlib.closing(server):
                self._servers.add(server)
                ways = [
                    asyncio.create_task(self._pass_requests(requests, server)),
                    asyncio.create_task(self._pass_answers(answers, server, client)),
                ]
                await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
                for way in ways:
                    way.cancel()
                self._servers.discard(server)

    async def _receive(self, reader: asyncio.StreamReader, *held_by: Network) -> bytes:
        """What comes next, once the network lets it through; nothing at the end."""
        while self.mode != "refuse":
            if self.mode in held_by:
                await asyncio.sleep(0.01)
                continue
            with contextlib.suppress(TimeoutError):
                return await asyncio.wait_for(reader.read(65_536), 0.02)
        return b""

    async def _pass_requests(self, requests: asyncio.StreamReader, server: asyncio.StreamWriter) -> None:
        whole = b""
        while data := await self._receive(requests, "cut"):
            if server in self._lost:
                continue
            server.write(data)
            whole += data
            while b"\r\n\r\n" in whole:
                head, _, rest = whole.partition(b"\r\n\r\n")
                length = re.search(rb"(?i)content-length: *(\d+)", head)
                size = int(length[1]) if length else 0
                if len(rest) < size:
                    break
                whole = rest[size:]
                if size:
                    self.requests.append((head.split()[1].decode(), json.loads(rest[:size])))

    async def _pass_answers(
        self, answers: asyncio.StreamReader, server: asyncio.StreamWriter, client: asyncio.StreamWriter
    ) -> None:
        while data := await self._receive(answers, "cut", "no answers"):
            self._loop.call_later(self.delay_s, client.write, data)
        while server in self._lost:
            await asyncio.sleep(1.0)  # until the agent gives up
