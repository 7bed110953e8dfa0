"""What the running scheduler costs: heartbeats per second over loopback HTTP, and the time of an update.

Starts ``cpumond scheduler`` with pools, operations and played nodes; every node sends its full state with its jobs, a
few at a time, as fast as the scheduler answers. Beside it, in the same run, a bare application of the same server
libraries that reads the same bodies and answers nothing: the ratio of the two is the figure to compare, seconds depend
on the machine. The time of updates is what the service itself says (`cpumond_scheduler_update_seconds_total`).

    python tests/bench/scheduler.py [--nodes 1000] [--jobs 20] [--pools 1000] [--operations 10000] [--seconds 10]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

CONNECTIONS = 8
FLOOR = """
import socket, sys, uvicorn
from starlette.applications import Starlette
from starlette.responses import Response
from starlette.routing import Route
async def read(request):
    await request.body()
    return Response(b'{"accepted":true}', media_type="application/json")
app = Starlette(routes=[Route("/{rest:path}", read, methods=["GET", "POST"])])
server = uvicorn.Server(uvicorn.Config(app, log_level="error", access_log=False))
server.run([socket.socket(fileno=int(sys.argv[1]))])
"""
Post = Callable[[str, bytes], Awaitable[bytes]]


class Connection:
    """A keep-alive connection that costs this process as little as possible."""

    def __init__(self, port: int) -> None:
        self.port = port

    async def open(self) -> None:
        self.reader, self.writer = await asyncio.open_connection("127.0.0.1", self.port)

    async def post(self, path: str, body: bytes) -> bytes:
        return await self.request("POST", path, body)

    async def request(self, method: str, path: str, body: bytes) -> bytes:
        head = f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(body)}\r\n\r\n"
        self.writer.write(head.encode() + body)
        answer = await self.reader.readuntil(b"\r\n\r\n")
        found = re.search(rb"content-length: (\d+)", answer, re.IGNORECASE)
        assert found is not None, answer
        content = await self.reader.readexactly(int(found[1]))
        if not answer.startswith(b"HTTP/1.1 20"):
            raise RuntimeError(f"{path}: {answer.splitlines()[0].decode()}: {content.decode()[:500]}")
        return content


@asynccontextmanager
async def connected(port: int) -> AsyncIterator[list[Connection]]:
    connections = [Connection(port) for _ in range(CONNECTIONS)]
    await asyncio.gather(*(each.open() for each in connections))
    yield connections
    for each in connections:
        each.writer.close()


async def spread(connections: list[Connection], work: list[tuple[str, bytes]]) -> list[bytes]:
    """Send all of ``work``, each connection one request at a time; the answers in order."""
    answers: list[bytes] = [b""] * len(work)
    numbers = iter(range(len(work)))

    async def send(connection: Connection) -> None:
        for n in numbers:
            answers[n] = await connection.post(*work[n])

    await asyncio.gather(*(send(each) for each in connections))
    return answers


def heartbeat(node: int, sequence: int, cores: float, jobs: list[dict[str, Any]]) -> bytes:
    beat = {
        "node_id": f"node-{node}",
        "incarnation": "bench",
        "sequence": sequence,
        "sent_at": 0.0,
        "cpu_capacity": cores,
        "jobs": jobs,
    }
    return json.dumps(beat, separators=(",", ":")).encode()


async def measure(
    connections: list[Connection], make: Callable[[int, int], bytes], nodes: int, seconds: float
) -> float:
    """Heartbeats per second, nodes in turns."""
    end = time.perf_counter() + seconds
    count = 0
    sequence = 1_000

    async def send(connection: Connection, mine: range) -> None:
        nonlocal count
        turn = sequence
        while time.perf_counter() < end:
            turn += 1
            for node in mine:
                await connection.post("/api/v1/heartbeats", make(node, turn))
                count += 1
                if time.perf_counter() >= end:
                    return

    began = time.perf_counter()
    await asyncio.gather(*(send(each, range(n, nodes, CONNECTIONS)) for n, each in enumerate(connections)))
    return count / (time.perf_counter() - began)


async def read_metrics(port: int) -> dict[str, float]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET /metrics HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n")
    text = (await reader.read()).decode()
    writer.close()
    return {
        name: float(value) for name, value in re.findall(r"^(cpumond_scheduler_\w+) ([\d.e+-]+)", text, re.MULTILINE)
    }


async def bench(arguments: argparse.Namespace, port: int, pid: int, floor_port: int) -> None:
    nodes, per_node = arguments.nodes, arguments.jobs
    cores = float(per_node)
    async with connected(port) as connections, connected(floor_port) as floor:
        began = time.perf_counter()
        tops = max(arguments.pools // 30, 1)
        options = {
            "max_operation_count_per_pool": 100_000,
            "max_running_operation_count_per_pool": 100_000,
            "max_running_operation_count": 1_000_000,
        }
        edits = [{"path": [name], "value": value} for name, value in options.items()]
        body = json.dumps({"edits": edits}).encode()
        await connections[0].request("PATCH", "/api/v1/trees/default", body)
        pools = [
            (
                "/api/v1/trees/default/pools",
                json.dumps({"name": f"pool-{n}", "parent": "<Root>" if n < tops else f"pool-{n % tops}"}).encode(),
            )
            for n in range(arguments.pools)
        ]
        await spread(connections[:1], pools)
        registrations = [
            {
                "node_id": f"node-{n}",
                "incarnation": "bench",
                "resources": {"cpu": cores, "memory": 2**38, "user_slots": 1000},
            }
            for n in range(nodes)
        ]
        await spread(connections, [("/api/v1/nodes", json.dumps(each).encode()) for each in registrations])
        wanted = max(2 * nodes * per_node // max(arguments.operations, 1), 1)
        specs = [
            {
                "pool": f"pool-{tops + n % max(arguments.pools - tops, 1)}",
                "tasks": {"t": {"job_count": wanted, "command": "true"}},
            }
            for n in range(arguments.operations)
        ]
        await spread(connections, [("/api/v1/operations", json.dumps({"spec": each}).encode()) for each in specs])
        print(
            f"{arguments.pools} pools, {arguments.operations} operations, {nodes} nodes: "
            f"{time.perf_counter() - began:.1f} s to make"
        )
        before = await read_metrics(port)
        while (await read_metrics(port))["cpumond_scheduler_updates_total"] < before[
            "cpumond_scheduler_updates_total"
        ] + 2:
            await asyncio.sleep(0.2)
        began = time.perf_counter()
        beats = [("/api/v1/heartbeats", heartbeat(n, 1, cores, [])) for n in range(nodes)]
        answers = [json.loads(each) for each in await spread(connections, beats)]
        started = sum(len(answer["start"]) for answer in answers)
        print(f"{started} jobs placed on {nodes} nodes in {time.perf_counter() - began:.2f} s of heartbeats")
        jobs = [
            [
                {
                    "job_id": order["job_id"],
                    "operation_id": order["operation_id"],
                    "task": order["task"],
                    "from_scheduler": True,
                    "cpu_limit": order["cpu_limit"],
                    "current_cpu_limit": order["cpu_limit"],
                    "smoothed_cpu_usage": 0.5,
                }
                for order in answer["start"]
            ]
            for answer in answers
        ]

        def make(node: int, sequence: int) -> bytes:
            return heartbeat(node, sequence, cores, jobs[node])

        prepared = [[make(node, sequence) for sequence in range(1001, 1003)] for node in range(nodes)]
        floor_rate = await measure(
            floor, lambda node, sequence: prepared[node][sequence % 2], nodes, arguments.seconds / 2
        )
        first, cpu_before = await read_metrics(port), cpu_seconds(pid)
        rate = await measure(connections, make, nodes, arguments.seconds)
        last, cpu_after = await read_metrics(port), cpu_seconds(pid)
        updates = last["cpumond_scheduler_updates_total"] - first["cpumond_scheduler_updates_total"]
        update_s = (
            last["cpumond_scheduler_update_seconds_total"] - first["cpumond_scheduler_update_seconds_total"]
        ) / updates
        print(
            f"heartbeats of {per_node} jobs: {rate:.0f}/s; bare application {floor_rate:.0f}/s; "
            f"ratio {rate / floor_rate:.2f}"
        )
        print(
            f"scheduler process: {cpu_after - cpu_before:.1f} s of CPU for "
            f"{rate * arguments.seconds:.0f} heartbeats and {updates:.0f} updates"
        )
        print(f"time of an update while they come in: {update_s:.3f} s (heartbeats go on during its computation)")
        first = await read_metrics(port)
        await asyncio.sleep(arguments.seconds / 2)
        last = await read_metrics(port)
        updates = last["cpumond_scheduler_updates_total"] - first["cpumond_scheduler_updates_total"]
        update_s = (
            last["cpumond_scheduler_update_seconds_total"] - first["cpumond_scheduler_update_seconds_total"]
        ) / updates
        print(f"time of an update when nothing comes in: {update_s:.3f} s; resident memory {memory_mib(pid):.0f} MiB")


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def memory_mib(pid: int) -> float:
    found = re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found[1]) / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=1000)
    parser.add_argument("--jobs", type=int, default=20)
    parser.add_argument("--pools", type=int, default=1000)
    parser.add_argument("--operations", type=int, default=10_000)
    parser.add_argument("--seconds", type=float, default=10.0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, socket.socket(proto=socket.IPPROTO_TCP) as floor_socket:
        floor_socket.bind(("127.0.0.1", 0))
        floor_socket.listen(64)
        config = Path(folder) / "scheduler.toml"
        config.write_text(
            f'state_dir = "{folder}/state"\nmax_operation_count = 100000\n[api]\nlisten = "127.0.0.1:0"\n'
            'rate_limit = 0\n[log]\nlevel = "info"\nformat = "json"\n'
        )
        log = (Path(folder) / "log").open("w+")
        fd = floor_socket.fileno()
        floor = subprocess.Popen([sys.executable, "-c", FLOOR, str(fd)], pass_fds=[fd])
        scheduler = subprocess.Popen(
            [sys.executable, "-m", "cpumond", "scheduler", "--config", str(config)], stdout=log, stderr=log
        )
        try:
            port = wait_for_port(Path(folder) / "log", scheduler)
            asyncio.run(bench(arguments, port, scheduler.pid, floor_socket.getsockname()[1]))
        finally:
            for process in (scheduler, floor):
                process.terminate()
                process.wait()


def wait_for_port(log: Path, process: subprocess.Popen[bytes]) -> int:
    """The port in the line that says it listens."""
    while process.poll() is None:
        found = re.search(r'"listen":\s*"[^"]*:(\d+)"', log.read_text())
        if found is not None:
            return int(found[1])
        time.sleep(0.05)
    raise SystemExit(f"the scheduler ended: {log.read_text()}")


if __name__ == "__main__":
    main()
