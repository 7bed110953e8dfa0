"""Operations of one short job through a running scheduler: how many per second, and how long they wait to start.

Clients submit over HTTP as fast as they are answered, each the next operation after the answer to the last; nodes ask
as often as the scheduler tells them, report a job as begun when they are told of it and as completed with their next
heartbeat. In the same run a bare application answers the same requests, and a file in the same folder is extended and
flushed by fsync: rates are compared with these two.

    python tests/bench/throughput.py [--clients 16] [--nodes 200] [--slots 40] [--seconds 60] [--store postgresql]
"""

import argparse
import asyncio
import json
import os
import statistics
import tempfile
import time
from contextlib import ExitStack

from scheduler import Connection, cpu_seconds, read_metrics, set_tree, start_scheduler

POOLS = 20
BARE_S = 3.0
WRITES = "cpumond_scheduler_store_writes_total"


class Load:
    """Times of operations, by id; the time is that of ``time.perf_counter``."""

    def __init__(self, clients: int, nodes: int) -> None:
        self.clients, self.nodes = clients, nodes
        self.submitted: dict[str, float] = {}
        """When the client began to send it, of those that were acknowledged."""
        self.took_s: list[float] = []
        self.started: dict[str, float] = {}
        self.ended = 0
        self.beats_s: list[float] = []
        self.periods_s: list[float] = []

    async def submit(self, port: int, number: int, end: float) -> None:
        connection = Connection(port)
        await connection.open()
        spec = {"pool": f"pool-{number % POOLS}", "tasks": {"t": {"job_count": 1, "command": "true"}}}
        body = json.dumps({"spec": spec}).encode()
        while (began := time.perf_counter()) < end:
            answer = json.loads(await connection.post("/api/v1/operations", body))
            self.took_s.append(time.perf_counter() - began)
            self.submitted[answer["id"]] = began
        connection.writer.close()

    async def run_node(self, port: int, number: int, stopping: asyncio.Event) -> None:
        connection = Connection(port)
        await connection.open()
        running: list[dict[str, object]] = []
        finished: dict[str, dict[str, object]] = {}
        sequence, period_s = 0, 1.0
        await asyncio.sleep(number / self.nodes)
        while not stopping.is_set():
            sequence += 1
            beat = {
                "node_id": f"node-{number}",
                "incarnation": "bench",
                "sequence": sequence,
                "sent_at": 0.0,
                "cpu_capacity": 64.0,
                "jobs": [],
                "finished_jobs": list(finished.values()),
            }
            began = time.perf_counter()
            answer = json.loads(await connection.post("/api/v1/heartbeats", json.dumps(beat).encode()))
            now = time.perf_counter()
            self.beats_s.append(now - began)
            for job_id in answer["acknowledged"]:
                self.ended += finished.pop(job_id, None) is not None
            for order in answer["start"]:
                self.started.setdefault(order["operation_id"], now)
                running.append(order)
            for order in running:
                told = {name: order[name] for name in ("job_id", "operation_id", "task")}
                finished[order["job_id"]] = {**told, "state": "completed", "exit_code": 0}
            running = []
            period_s = answer.get("period_s") or period_s
            self.periods_s.append(period_s)
            try:
                await asyncio.wait_for(stopping.wait(), max(period_s - (now - began), 0.0))
            except TimeoutError:
                continue
        connection.writer.close()


async def make_cluster(port: int, nodes: int, slots: int) -> None:
    connection = Connection(port)
    await connection.open()
    await set_tree(
        connection,
        max_operation_count_per_pool=100_000,
        max_running_operation_count_per_pool=100_000,
        max_running_operation_count=100_000,
        max_operation_count=100_000,
    )
    for number in range(POOLS):
        await connection.post("/api/v1/trees/default/pools", json.dumps({"name": f"pool-{number}"}).encode())
    for number in range(nodes):
        resources = {"cpu": float(slots), "memory": 2**40, "user_slots": slots}
        about = {"node_id": f"node-{number}", "incarnation": "bench", "resources": resources}
        await connection.post("/api/v1/nodes", json.dumps(about).encode())
    connection.writer.close()


async def measure_bare(port: int, clients: int) -> float:
    """Requests per second of the bare application."""
    count, end = 0, time.perf_counter() + BARE_S
    body = json.dumps({"spec": {"pool": "pool-0", "tasks": {"t": {"job_count": 1, "command": "true"}}}}).encode()

    async def send() -> None:
        nonlocal count
        connection = Connection(port)
        await connection.open()
        while time.perf_counter() < end:
            await connection.post("/api/v1/operations", body)
            count += 1
        connection.writer.close()

    await asyncio.gather(*(send() for _ in range(clients)))
    return count / BARE_S


def measure_fsyncs() -> float:
    """Writes of 4 KiB with fsync per second, one after another."""
    with tempfile.NamedTemporaryFile() as file:
        count, end = 0, time.perf_counter() + BARE_S / 3
        while time.perf_counter() < end:
            file.write(bytes(4096))
            file.flush()
            os.fsync(file.fileno())
            count += 1
    return count / (BARE_S / 3)


def describe(values: list[float]) -> str:
    """Median and 99th percentile, in milliseconds."""
    if len(values) < 2:
        return "none"
    return f"p50 {statistics.median(values) * 1e3:.1f} ms, p99 {statistics.quantiles(values, n=100)[98] * 1e3:.1f} ms"


async def bench(arguments: argparse.Namespace, port: int, pid: int, floor_port: int) -> None:
    load = Load(arguments.clients, arguments.nodes)
    bare, fsyncs = await measure_bare(floor_port, arguments.clients), measure_fsyncs()
    await make_cluster(port, arguments.nodes, arguments.slots)
    stopping = asyncio.Event()
    nodes = [asyncio.ensure_future(load.run_node(port, n, stopping)) for n in range(arguments.nodes)]
    before, cpu_s, own_s = await read_metrics(port), cpu_seconds(pid), time.process_time()
    began = time.perf_counter()
    end = began + arguments.seconds
    await asyncio.gather(*(load.submit(port, number, end) for number in range(arguments.clients)))
    took_s, counted_s, own_s = time.perf_counter() - began, cpu_seconds(pid) - cpu_s, time.process_time() - own_s
    submitted, started, ended = len(load.submitted), len(load.started), load.ended
    after = await read_metrics(port)
    while load.ended < submitted and time.perf_counter() < end + 30.0:
        await asyncio.sleep(0.2)
    stopping.set()
    await asyncio.gather(*nodes)
    waits = [at - load.submitted[name] for name, at in load.started.items() if name in load.submitted]
    writes = after[WRITES] - before[WRITES]
    print(
        f"{arguments.clients} clients, {arguments.nodes} nodes, {arguments.store}, {took_s:.1f} s; load "
        f"{os.getloadavg()[0]:.1f}; CPU of the scheduler {counted_s / took_s:.2f}, of this program {own_s / took_s:.2f}"
    )
    print(f"bare application: {bare:.0f} requests/s; {fsyncs:.0f} fsyncs/s")
    for what, count in (("submitted", submitted), ("started", started), ("ended", ended)):
        rate = count / took_s
        print(f"{what}: {rate:.0f}/s = {rate / bare:.3f} of the bare application, {rate / fsyncs:.2f} of the fsyncs")
    print(
        f"CPU for each operation, from its submission to its end: {counted_s / max(ended, 1) * 1e3:.3f} ms; "
        f"{submitted} submissions, {started} starts and {ended} ends in {writes:.0f} writes"
    )
    print(
        f"answer to a submission: {describe(load.took_s)}; heartbeat: {describe(load.beats_s)}, each "
        f"{statistics.median(load.periods_s):.2f} s; from submission to start: {describe(waits)}"
    )
    print(f"operations that were acknowledged and did not end: {len(load.submitted) - load.ended}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--nodes", type=int, default=200)
    parser.add_argument("--slots", type=int, default=40, help="jobs that a node may run at a time")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--store", choices=["sqlite", "postgresql"], default="sqlite", help="one of its own, here")
    arguments = parser.parse_args()
    with ExitStack() as stack:
        port, pid, floor_port = start_scheduler(stack, arguments.store)
        asyncio.run(bench(arguments, port, pid, floor_port))


if __name__ == "__main__":
    main()
