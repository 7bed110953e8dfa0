"""What a simulation of a large cluster takes, and what heartbeats feel of it.

A running scheduler with 10 000 operations on 3000 nodes that send a heartbeat every 5 s each, spread evenly, whatever
the answers take. The time of each heartbeat is measured, in turns, without and with a simulation of one more operation
beside it; forecasts in the background go on in both. Printed: how old the first answer's forecasts are and when it was
there, when the exact one was, and the 99th percentile of a heartbeat in both.

    python tests/bench/what_if.py [--nodes 3000] [--operations 10000] [--period 5] [--rounds 3] [--check]
"""

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import scheduler

CALM_S = 20.0


class Beats:
    """Heartbeats of all nodes, each at its time, over as many connections as it takes."""

    def __init__(self, port: int, nodes: scheduler.Nodes, period_s: float) -> None:
        self.port, self.nodes, self.period_s = port, nodes, period_s
        self.took_s: list[float] = []
        self.idle: list[scheduler.Connection] = []

    async def go_on(self) -> None:
        count, number, begun = len(self.nodes.jobs), 0, time.perf_counter()
        tasks: set[asyncio.Task[None]] = set()
        while True:
            due = begun + number * self.period_s / count
            await asyncio.sleep(max(due - time.perf_counter(), 0.0))
            task = asyncio.ensure_future(self._beat(number % count, due))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
            number += 1

    async def _beat(self, node: int, due: float) -> None:
        if self.idle:
            connection = self.idle.pop()
        else:
            connection = scheduler.Connection(self.port)
            await connection.open()
        body = self.nodes.heartbeat(node)
        try:
            answer = await connection.post("/api/v1/heartbeats", body)
        except (OSError, asyncio.IncompleteReadError):  # it was idle for too long, and closed
            connection = scheduler.Connection(self.port)
            await connection.open()
            answer = await connection.post("/api/v1/heartbeats", body)
        self.nodes.obey(node, answer)
        self.took_s.append(time.perf_counter() - due)
        self.idle.append(connection)

    def take(self) -> list[float]:
        found, self.took_s = self.took_s, []
        return found


async def simulate(port: int) -> tuple[float, float, list[str]]:
    """Seconds to the first line and to the last one of the answer, and what it says."""
    spec = {"pool": "pool-40", "tasks": {"main": {"job_count": 50, "cpu_limit": 1.0, "command": "true"}}}
    body = json.dumps({"spec": spec}).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**26)
    head = "POST /api/v1/simulate HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n"
    head += f"Content-Length: {len(body)}\r\n\r\n"
    begun = time.perf_counter()
    writer.write(head.encode() + body)
    first_s, lines, told = 0.0, [], b""
    while line := await reader.readline():
        if line.startswith(b"{"):
            told = line
            if not first_s:
                first_s, lines = time.perf_counter() - begun, json.loads(line).get("lines", [])
    writer.close()
    answer: dict[str, Any] = json.loads(told)
    assert answer.get("answer"), told[:1000]
    return first_s, time.perf_counter() - begun, [*lines, *answer["answer"]["lines"]]


async def bench(given: argparse.Namespace, port: int) -> bool:
    nodes = scheduler.Nodes(given.nodes, float(given.jobs), 0.1, differences=True)
    async with scheduler.connected(port) as connections:
        await scheduler.make_cluster(connections, given)
        late = given.operations * 35 // 100
        await scheduler.start_operations(connections, given, range(given.operations - late))
        await scheduler.wait_for_updates(port)
        await scheduler.fill(connections, nodes, 1, 1.0, port)
        await scheduler.start_operations(connections, given, range(given.operations - late, given.operations))
        await scheduler.wait_for_updates(port, 3)
    beats = Beats(port, nodes, given.period)
    going = asyncio.ensure_future(beats.go_on())
    await asyncio.sleep(given.before)
    calm: list[float] = []
    busy: list[float] = []
    firsts: list[float] = []
    exacts: list[float] = []
    for _ in range(given.rounds):
        beats.take()
        await asyncio.sleep(CALM_S)
        calm.append(percentile(beats.take()))
        first_s, exact_s, lines = await simulate(port)
        busy.append(percentile(beats.take()))
        firsts.append(first_s)
        exacts.append(exact_s)
        print(
            f"first answer {first_s:.3f} s, exact {exact_s:.1f} s, p99 {calm[-1] * 1e3:.1f} and {busy[-1] * 1e3:.1f} ms"
        )
        print(f"  {'; '.join(lines)}", flush=True)
    going.cancel()
    good = scheduler.show_ratio("first answer to 1 s", firsts, at_most=1.0)
    good &= scheduler.show_ratio("exact answer to 30 s", [each / 30.0 for each in exacts], at_most=1.0)
    return good & scheduler.show_ratio("p99 of heartbeats, with a simulation to without", busy, calm, at_most=1.1)


def percentile(values: list[float]) -> float:
    return statistics.quantiles(values, n=100)[98]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=3000)
    parser.add_argument("--jobs", type=int, default=20)
    parser.add_argument("--pools", type=int, default=1000)
    parser.add_argument("--operations", type=int, default=10_000)
    parser.add_argument("--period", type=float, default=5.0, help="seconds between heartbeats of a node")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--before", type=float, default=60.0, help="seconds before the first simulation")
    parser.add_argument("--check", action="store_true", help="exit code 1 when a ratio is out of its bound")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "scheduler.toml"
        config.write_text(
            f'state_dir = "{folder}/state"\nmax_operation_count = 100000\n'
            'node_heartbeat_timeout = "600s"\n[api]\nlisten = "127.0.0.1:0"\n'
            'rate_limit = 0\n[log]\nlevel = "info"\nformat = "json"\n'
        )
        words = [sys.executable, "-m", "cpumond", "scheduler", "--config", str(config)]
        file = Path(folder) / "log"
        with file.open("w") as log, subprocess.Popen(words, stdout=log, stderr=log) as process:
            try:
                good = asyncio.run(bench(given, scheduler.wait_for_port(file, process, "started")))
            finally:
                process.terminate()
    if given.check and not good:
        sys.exit(1)


if __name__ == "__main__":
    main()
