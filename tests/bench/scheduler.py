"""What the running scheduler costs: heartbeats per second over loopback HTTP, and the time of an update.

Starts ``cpumond scheduler`` with pools, operations and played nodes that obey; every node sends its full state with its
jobs, a few at a time, as fast as the scheduler answers. Beside it, in the same run, a bare application of the same
server libraries that reads the same bodies and answers nothing. Seconds depend on the machine and on what else runs
there, so the figures to compare are ratios of slices that follow one another, their median over all rounds.

With ``--starve N`` N per cent of the operations come when the cluster is full: they have a fair share and no job. The
same cluster is measured with a starvation time-out that is far off and with one that is over, in turns. ``--changed``:
of how many per cent of its jobs a node reports other figures than before; ``--differences``: it reports those alone.
``--paced``: nodes send heartbeats as often as the scheduler tells them, for so many seconds, and nothing else is
measured: whether any is late by more than its period, and the scheduler's memory.

    python tests/bench/scheduler.py [--nodes 1000] [--jobs 20] [--pools 1000] [--operations 10000] [--seconds 15]
        [--rounds 5] [--starve 35] [--changed 100] [--differences] [--store postgresql] [--check]
    python tests/bench/scheduler.py --paced --nodes 10000 --jobs 10 --differences --seconds 120
"""

import argparse
import asyncio
import heapq
import itertools
import json
import os
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import NamedTuple

from cpumond.cluster.postgresql import PostgresServer

CONNECTIONS = 8
FIRST_PERIOD_S = 5.0
"""Over which nodes come, and between two heartbeats of one that was told none yet."""
FAR_MS = 86_400_000
"""A starvation time-out that no run reaches."""
FLOOR = """
import socket, sys, uvicorn
from starlette.applications import Starlette
from starlette.responses import Response
from starlette.routing import Route
async def read(request):
    await request.body()
    return Response(b'{"accepted":true}', media_type="application/json")
app = Starlette(routes=[Route("/{rest:path}", read, methods=["GET", "POST"])])
server = uvicorn.Server(uvicorn.Config(app, log_level="error", access_log=False, timeout_keep_alive=600))
server.run([socket.socket(fileno=int(sys.argv[1]))])
"""


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


class Nodes:
    """Nodes that run and stop what they are told to, and say so once. Of ``changed`` of a node's jobs (a share) each
    heartbeat tells another usage; with ``differences`` of those alone."""

    def __init__(self, count: int, cores: float, changed: float = 1.0, differences: bool = False) -> None:
        self.cores = cores
        self.changed = changed
        self.differences = differences
        self.bases = [0] * count
        """The sequence of the last heartbeat that was taken, 0 when jobs came or went since."""
        self.sequences = [0] * count
        self.jobs: list[dict[str, str]] = [{} for _ in range(count)]
        """Node -> job -> the beginning of its report, as JSON; its usage follows."""
        self.finished: list[list[dict[str, str]]] = [[] for _ in range(count)]

    def heartbeat(self, node: int) -> bytes:
        self.sequences[node] = sequence = self.sequences[node] + 1
        head = f'{{"node_id":"node-{node}","incarnation":"bench","sequence":{sequence},"sent_at":0.0,'
        jobs, base, tail = list(self.jobs[node].values()), self.bases[node], ""
        changed = round(len(jobs) * self.changed)
        if self.differences and base:
            jobs, tail = jobs[:changed], f',"base":{base},"job_count":{len(jobs)}'
        said = ",".join(f"{job}{0.5 + (sequence % 9 if n < changed else 0) / 20}}}" for n, job in enumerate(jobs))
        finished = json.dumps(self.finished[node])
        return f'{head}"cpu_capacity":{self.cores},"jobs":[{said}],"finished_jobs":{finished}{tail}}}'.encode()

    def obey(self, node: int, answer: bytes) -> int:
        """How many jobs it starts."""
        if b'"start":[]' in answer and b'"stop":[]' in answer and not self.finished[node]:
            self.bases[node] = self.sequences[node]
            return 0
        self.bases[node] = 0
        told = json.loads(answer)
        assert told["accepted"], told
        jobs = self.jobs[node]
        self.finished[node] = [each for each in self.finished[node] if each["job_id"] not in told["acknowledged"]]
        for order in told["stop"]:
            stopped = jobs.pop(order["job_id"], None)
            if stopped is not None:
                report = json.loads(f"{stopped}0.5}}")
                ended = {name: report[name] for name in ("job_id", "operation_id", "task")}
                self.finished[node].append({**ended, "state": "aborted"})
        for order in told["start"]:
            report = {name: order[name] for name in ("job_id", "operation_id", "task", "cpu_limit")}
            report |= {"from_scheduler": True, "current_cpu_limit": order["cpu_limit"]}
            text = json.dumps(report, separators=(",", ":"))
            jobs.setdefault(order["job_id"], f'{text[:-1]},"smoothed_cpu_usage":')
        return len(told["start"])


async def measure(
    connections: list[Connection], nodes: Nodes, seconds: float, obey: bool = True, among: int | None = None
) -> float:
    """Heartbeats per second, all nodes (or the first ``among``) in turns."""
    end = time.perf_counter() + seconds
    count = 0

    async def send(connection: Connection, mine: range) -> None:
        nonlocal count
        while True:
            for node in mine:
                answer = await connection.post("/api/v1/heartbeats", nodes.heartbeat(node))
                if obey:
                    nodes.obey(node, answer)
                count += 1
                if time.perf_counter() >= end:
                    return

    began = time.perf_counter()
    shares = [range(n, among or len(nodes.jobs), CONNECTIONS) for n in range(CONNECTIONS)]
    await asyncio.gather(*(send(each, mine) for each, mine in zip(connections, shares, strict=True) if mine))
    return count / (time.perf_counter() - began)


async def read_metrics(port: int) -> dict[str, float]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET /metrics HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n")
    text = (await reader.read()).decode()
    writer.close()
    return {key: float(value) for key, value in re.findall(r"^(cpumond_scheduler_\w+) ([\d.e+-]+)", text, re.MULTILINE)}


async def set_tree(connection: Connection, **options: int) -> None:
    edits = [{"path": [name], "value": value} for name, value in options.items()]
    await connection.request("PATCH", "/api/v1/trees/default", json.dumps({"edits": edits}).encode())


async def wait_for_updates(port: int, count: int = 2) -> None:
    """Until so many updates were made from now on."""
    name = "cpumond_scheduler_updates_total"
    first = (await read_metrics(port))[name]
    while (await read_metrics(port))[name] < first + count:
        await asyncio.sleep(0.1)


async def count_starving(connection: Connection) -> int:
    found, offset = 0, 0
    while True:
        page = json.loads(await connection.request("GET", f"/api/v1/operations?limit=1000&offset={offset}", b""))
        trees = [tree for each in page["operations"] for tree in each["trees"].values()]
        found += sum(tree["starvation_status"] != "non_starving" for tree in trees)
        offset += 1000
        if len(page["operations"]) < 1000:
            return found


async def start_operations(connections: list[Connection], arguments: argparse.Namespace, numbers: range) -> None:
    """They want all slots twice over, together with what they want of them."""
    tops = max(arguments.pools // 30, 1)
    wanted = max(-(-2 * arguments.nodes * arguments.jobs // max(len(numbers), 1)), 1)
    specs = [
        {
            "pool": f"pool-{tops + n % max(arguments.pools - tops, 1)}",
            "tasks": {"t": {"job_count": wanted, "command": "true"}},
        }
        for n in numbers
    ]
    await spread(connections, [("/api/v1/operations", json.dumps({"spec": each}).encode()) for each in specs])


def register(node: int, cores: float) -> bytes:
    resources = {"cpu": float(cores), "memory": 2**38, "user_slots": 1000}
    return json.dumps({"node_id": f"node-{node}", "incarnation": "bench", "resources": resources}).encode()


async def make_cluster(connections: list[Connection], arguments: argparse.Namespace) -> None:
    await set_tree(
        connections[0],
        max_operation_count_per_pool=100_000,
        max_running_operation_count_per_pool=100_000,
        max_running_operation_count=1_000_000,
        fair_share_starvation_timeout=FAR_MS,
    )
    tops = max(arguments.pools // 30, 1)
    pools = [
        (
            "/api/v1/trees/default/pools",
            json.dumps({"name": f"pool-{n}", "parent": "<Root>" if n < tops else f"pool-{n % tops}"}).encode(),
        )
        for n in range(arguments.pools)
    ]
    await spread(connections[:1], pools)
    if not arguments.paced:
        registrations = [register(n, arguments.jobs) for n in range(arguments.nodes)]
        await spread(connections, [("/api/v1/nodes", each) for each in registrations])


async def fill(connections: list[Connection], nodes: Nodes, batches: int, seconds: float, port: int) -> list[float]:
    """The first heartbeats in batches, between these usual ones of the nodes that are full: the time of a first one as
    a multiple of a usual one, batch by batch; the first batch is not compared."""
    ratios: list[float] = []
    started, total_s = 0, 0.0
    bounds = [len(nodes.jobs) * number // (batches + 1) for number in range(batches + 2)]
    for low, high in itertools.pairwise(bounds):
        rate = 0.0
        if low:
            await wait_for_updates(port)
            rate = await measure(connections, nodes, seconds, among=low)
        beats = [("/api/v1/heartbeats", nodes.heartbeat(node)) for node in range(low, high)]
        began = time.perf_counter()
        answers = await spread(connections, beats)
        took_s = time.perf_counter() - began
        total_s += took_s
        started += sum(nodes.obey(node, answer) for node, answer in zip(range(low, high), answers, strict=True))
        if low and high > low:
            ratios.append(took_s / (high - low) * rate)
    print(f"first heartbeats: {started} jobs placed on {len(nodes.jobs)} nodes in {total_s:.2f} s")
    return ratios


class Paced(NamedTuple):
    """One heartbeat: how often its node sends them, how long after its time it was answered, how long that took."""

    period_s: float
    late_s: float
    took_s: float


async def follow_pace(connections: list[Connection], nodes: Nodes, seconds: float) -> list[Paced]:
    """The heartbeats that were answered in this time, each node's as often as its last answer said."""
    begun = time.perf_counter()
    due = [(begun + FIRST_PERIOD_S * node / len(nodes.jobs), node, FIRST_PERIOD_S) for node in range(len(nodes.jobs))]
    found: list[Paced] = []

    async def send(connection: Connection) -> None:
        while due and due[0][0] < begun + seconds:
            at, node, period_s = heapq.heappop(due)
            await asyncio.sleep(max(at - time.perf_counter(), 0.0))
            if not nodes.sequences[node]:
                await connection.post("/api/v1/nodes", register(node, nodes.cores))
            sent = time.perf_counter()
            answer = await connection.post("/api/v1/heartbeats", nodes.heartbeat(node))
            answered = time.perf_counter()
            nodes.obey(node, answer)
            found.append(Paced(period_s, answered - at, answered - sent))
            told = re.search(rb'"period_s":([\d.]+)', answer)
            period_s = period_s if told is None else float(told[1])
            heapq.heappush(due, (max(at + period_s, sent), node, period_s))

    await asyncio.gather(*(send(each) for each in connections))
    return found


async def bench_paced(arguments: argparse.Namespace, port: int, pid: int) -> bool:
    """Whether no heartbeat is late by more than its period, after the first ones."""
    nodes = Nodes(arguments.nodes, float(arguments.jobs), arguments.changed / 100, arguments.differences)
    async with connected(port) as connections:
        await make_cluster(connections, arguments)
        await start_operations(connections, arguments, range(arguments.operations))
        await wait_for_updates(port)
        for name in ("first", "next"):
            before, cpu_s, own_s, began = await read_metrics(port), cpu_seconds(pid), time.process_time(), time.time()
            found = await follow_pace(connections, nodes, arguments.seconds / 2)
            took_s = time.time() - began
            took = sorted(each.took_s for each in found)
            late = sorted(each.late_s / each.period_s for each in found)
            period_s = statistics.median(each.period_s for each in found[-99:])
            updates_s = update_time(before, await read_metrics(port))
            cpu, own = (cpu_seconds(pid) - cpu_s) / took_s, (time.process_time() - own_s) / took_s
            p50_ms, p99_ms = (1e3 * took[len(took) * percent // 100] for percent in (50, 99))
            print(
                f"{name} {took_s:.0f} s: {len(found) / took_s:.0f} heartbeats/s, {sum(map(len, nodes.jobs))} jobs on "
                f"{arguments.nodes} nodes, at the end each {period_s:.2f} s; CPU {cpu:.2f}, of this program {own:.2f}; "
                f"load {os.getloadavg()[0]:.1f}"
            )
            print(
                f"  answered after {p50_ms:.1f} ms, p99 {p99_ms:.1f} ms; late by more than a period: "
                f"{sum(each > 1.0 for each in late)}, at most {late[-1]:.2f} periods; an update {updates_s:.2f} s; "
                f"memory {memory_mib(pid):.0f} MiB"
            )
        return late[-1] <= 1.0


async def bench(arguments: argparse.Namespace, port: int, pid: int, floor_port: int) -> bool:
    """Whether all ratios are within their bounds."""
    nodes = Nodes(arguments.nodes, float(arguments.jobs), arguments.changed / 100, arguments.differences)
    empty_mib = memory_mib(pid)
    slice_s = arguments.seconds / arguments.rounds
    late = arguments.operations * arguments.starve // 100
    modes = ["bare", "calm", "starving"] if late else ["bare", "calm"]
    async with connected(port) as connections, connected(floor_port) as floor:
        began = time.perf_counter()
        await make_cluster(connections, arguments)
        await start_operations(connections, arguments, range(arguments.operations - late))
        print(
            f"{arguments.pools} pools, {arguments.operations - late} operations, {arguments.nodes} nodes: "
            f"{time.perf_counter() - began:.1f} s to make"
        )
        await wait_for_updates(port)
        firsts = await fill(connections, nodes, arguments.rounds, slice_s / 2, port)
        await start_operations(connections, arguments, range(arguments.operations - late, arguments.operations))
        await wait_for_updates(port, 3)
        rates: dict[str, list[float]] = {mode: [] for mode in modes}
        costs: dict[str, list[float]] = {mode: [] for mode in modes}
        updates: list[float] = []
        for number in range(arguments.rounds):
            for mode in modes:
                if mode == "bare":
                    rates[mode].append(await measure(floor, nodes, slice_s / 2, obey=False))
                    continue
                if late:
                    await set_tree(connections[0], fair_share_starvation_timeout=FAR_MS if mode == "calm" else 1)
                    await wait_for_updates(port, 3)
                if mode == "starving" and not number:
                    starving = await count_starving(connections[0])
                    print(f"{late} more operations on the full cluster: {starving} of {arguments.operations} starve")
                before, cpu_before = await read_metrics(port), cpu_seconds(pid)
                rates[mode].append(await measure(connections, nodes, slice_s))
                costs[mode].append((cpu_seconds(pid) - cpu_before) / (rates[mode][-1] * slice_s))
                updates.append(update_time(before, await read_metrics(port)))
        middle = {mode: statistics.median(rates[mode]) for mode in modes}
        print(f"bare application: {middle['bare']:.0f} heartbeats/s")
        for mode in modes[1:]:
            print(
                f"{mode}: {middle[mode]:.0f} heartbeats/s of {arguments.jobs} jobs, "
                f"{statistics.median(costs[mode]) * 1e3:.3f} ms of CPU for each, updates included"
            )
        print(f"time of an update while heartbeats come in: {statistics.median(updates):.3f} s, they go on meanwhile")
        before = await read_metrics(port)
        await asyncio.sleep(slice_s)
        idle_s = update_time(before, await read_metrics(port))
        mib, jobs = memory_mib(pid), sum(map(len, nodes.jobs))
        print(
            f"time of an update when nothing comes in: {idle_s:.3f} s; resident memory {mib:.0f} MiB, "
            f"{empty_mib:.0f} MiB when empty, {(mib - empty_mib) * 1024 / max(jobs, 1):.2f} KiB for each of {jobs} jobs"
        )
        good = show_ratio("heartbeats/s, calm to bare", rates["calm"], rates["bare"], at_least=0.25)
        if late:
            good &= show_ratio("heartbeats/s, starving to calm", rates["starving"], rates["calm"], at_least=0.7)
        if jobs >= 6 * arguments.operations:  # a cluster with few jobs has more of operations and nodes for each
            good &= show_ratio("memory to jobs, KiB", [(mib - empty_mib) * 1024 / jobs], at_most=2.0)
        text = f"time of a first heartbeat, {arguments.jobs} jobs placed, to a usual one"
        return good & show_ratio(text, firsts, at_most=10.0)


def show_ratio(
    what: str,
    numbers: list[float],
    others: list[float] | None = None,
    at_least: float | None = None,
    at_most: float | None = None,
) -> bool:
    """The median over the rounds; whether it is within the bound."""
    ratios = numbers if others is None else [a / b for a, b in zip(numbers, others, strict=True)]
    middle = statistics.median(ratios)
    is_good = (at_least is None or middle >= at_least) and (at_most is None or middle <= at_most)
    bound = f"at least {at_least:g}" if at_least is not None else f"at most {at_most:g}"
    all_of_them = ", ".join(f"{ratio:.2f}" for ratio in ratios)
    print(f"ratio of {what}: {middle:.2f} ({bound}: {'yes' if is_good else 'NO'}; rounds: {all_of_them})")
    return is_good


def update_time(before: dict[str, float], after: dict[str, float]) -> float:
    """Mean seconds of the updates between two readings."""
    count, total = ("cpumond_scheduler_updates_total", "cpumond_scheduler_update_seconds_total")
    return (after[total] - before[total]) / max(after[count] - before[count], 1.0)


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
    parser.add_argument("--seconds", type=float, default=15.0, help="of heartbeats in each state, all rounds together")
    parser.add_argument("--rounds", type=int, default=5, help="how often the states take turns")
    parser.add_argument("--starve", type=int, default=0, metavar="PERCENT", help="of operations find the cluster full")
    parser.add_argument(
        "--changed", type=int, default=100, metavar="PERCENT", help="of a node's jobs, from heartbeat to heartbeat"
    )
    parser.add_argument("--differences", action="store_true", help="heartbeats tell what changed alone")
    parser.add_argument("--paced", action="store_true", help="heartbeats as often as the scheduler tells nodes")
    parser.add_argument("--store", choices=["sqlite", "postgresql"], default="sqlite", help="one of its own, here")
    parser.add_argument("--check", action="store_true", help="exit code 1 when a ratio is out of its bound")
    arguments = parser.parse_args()
    if not 0 <= arguments.starve < 100 or arguments.rounds < 1:
        parser.error("--starve is 0 to 99 per cent, --rounds at least 1")
    with ExitStack() as stack:
        port, pid, floor_port = start_scheduler(stack, arguments.store)
        measured = bench_paced(arguments, port, pid) if arguments.paced else bench(arguments, port, pid, floor_port)
        good = asyncio.run(measured)
    if arguments.check and not good:
        raise SystemExit(1)


def start_scheduler(stack: ExitStack, store: str) -> tuple[int, int, int]:
    """A scheduler with a store of its own ("sqlite" or "postgresql"), and a bare application, until ``stack`` ends: the
    scheduler's port, its process, and the port of the bare application."""
    folder = stack.enter_context(tempfile.TemporaryDirectory())
    floor_socket = stack.enter_context(socket.socket(proto=socket.IPPROTO_TCP))
    text = ""
    if store == "postgresql":
        server = stack.enter_context(PostgresServer())
        text = f'[store]\nkind = "postgresql"\nconninfo = "{server.conninfo()}"\n'
    floor_socket.bind(("127.0.0.1", 0))
    floor_socket.listen(64)
    config = Path(folder) / "scheduler.toml"
    config.write_text(
        f'state_dir = "{folder}/state"\nmax_operation_count = 100000\n[api]\nlisten = "127.0.0.1:0"\n'
        f'rate_limit = 0\n{text}[log]\nlevel = "info"\nformat = "json"\n'
    )
    log = stack.enter_context((Path(folder) / "log").open("w+"))
    fd = floor_socket.fileno()
    floor = subprocess.Popen([sys.executable, "-c", FLOOR, str(fd)], pass_fds=[fd])
    stack.callback(end, floor)
    scheduler = subprocess.Popen(
        [sys.executable, "-m", "cpumond", "scheduler", "--config", str(config)], stdout=log, stderr=log
    )
    stack.callback(end, scheduler)
    port = wait_for_port(Path(folder) / "log", scheduler, "leads" if text else "started")
    return port, scheduler.pid, floor_socket.getsockname()[1]


def end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    process.wait()


def wait_for_port(log: Path, process: subprocess.Popen[bytes], event: str) -> int:
    """The port in the line that says it listens, when the log has the event after which it answers."""
    while process.poll() is None:
        text = log.read_text()
        found = re.search(r'"listen":\s*"[^"]*:(\d+)"', text)
        if found is not None and f'"event":"{event}"' in text.replace(" ", ""):
            return int(found[1])
        time.sleep(0.05)
    raise SystemExit(f"the scheduler ended: {log.read_text()}")


if __name__ == "__main__":
    main()
