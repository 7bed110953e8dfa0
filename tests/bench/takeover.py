"""A thousand nodes through a take-over: when each is back, and how many requests come in any second.

Starts PostgreSQL, two ``cpumond scheduler`` on it and played nodes, each with a connection of its own, a heartbeat per
period and the decisions of a real agent about where to send it (``core/route.py``). Then the leader is killed, or
stopped with SIGSTOP, and later woken: it must refuse everything. Prints per fault: when the first and the last node
were back, the most requests in any one second at one scheduler and at both, as multiples of the normal rate.

    python tests/bench/takeover.py [--nodes 1000] [--period 1.0] [--lease 10] [--fault kill|stop|both] [--check]
"""

import argparse
import asyncio
import bisect
import json
import os
import random
import re
import resource
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cpumond.cluster.postgresql import PostgresServer
from cpumond.core.decode import ContentError, decode_json
from cpumond.core.route import Route, Terms, is_standby, standby_period_s
from cpumond.core.term import LEADER_HEADER, TERM_HEADER, parse_term

TIMEOUT_S = 5.0
"""As an agent's ``[scheduler] timeout``."""
RETRY_MAX_S = 30.0
BACK_S = 15.0
STORM = 2.0
"""Multiple of the normal rate that no second may reach."""
SETTLE_S = 5.0


class Pair:
    """Two schedulers on one database, by their addresses."""

    def __init__(self, place: Path, conninfo: str, lease_s: float) -> None:
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        for name in ("one", "two"):
            with socket.create_server(("127.0.0.1", 0)) as free:
                port = free.getsockname()[1]
            config = place / f"{name}.toml"
            config.write_text(
                f'state_dir = "{place / name}"\n[api]\nlisten = "127.0.0.1:{port}"\nrate_limit = 0\n[store]\n'
                f'kind = "postgresql"\nconninfo = "{conninfo}"\nlease = "{lease_s}s"\n[history]\nlength = "0s"\n'
            )
            command = [sys.executable, "-m", "cpumond", "scheduler", "--config", str(config)]
            with open(place / f"{name}.log", "wb") as log:
                self.processes[f"http://127.0.0.1:{port}"] = subprocess.Popen(command, stdout=log, stderr=log)

    async def find_leader(self, but: str = "") -> str:
        """The address of the one that leads, as soon as one ``but`` this one does."""
        while True:
            for url in self.processes:
                if url == but:
                    continue
                try:
                    _, _, content = await asyncio.wait_for(Connection(url).ask("GET", "/readyz", b""), TIMEOUT_S)
                except (OSError, EOFError, TimeoutError):
                    continue
                if json.loads(content).get("role") == "leader":
                    return url
            await asyncio.sleep(0.1)

    def close(self) -> None:
        for process in self.processes.values():
            process.send_signal(signal.SIGCONT)
            process.kill()
            process.wait()


class Connection:
    """A keep-alive connection that costs this process as little as possible."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Connect where that is not so. Raises OSError."""
        if self._streams is None:
            host, _, port = self._url.removeprefix("http://").rpartition(":")
            self._streams = await asyncio.open_connection(host, int(port))
        return self._streams

    async def ask(self, method: str, path: str, body: bytes) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and content. Raises OSError or EOFError."""
        reader, writer = await self.open()
        head = f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        return int(first.split()[1]), headers, await reader.readexactly(int(headers.get("content-length", 0)))

    def close(self) -> None:
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None


class Node:
    """A node without jobs. ``requests``: when and to whom; ``taken``: when who took its heartbeat, in which term."""

    def __init__(self, number: int, urls: list[str], period_s: float) -> None:
        self.id = f"node-{number}"
        self._rng = random.Random(number)
        self._route = Route(urls, RETRY_MAX_S, self._rng)
        self._terms = Terms()
        self._period_s = period_s
        self._connection = Connection(urls[0])
        self._is_registered = False
        self._sequence = 0
        self.requests: list[tuple[float, str]] = []
        self.taken: list[tuple[float, str, int]] = []

    async def run(self) -> None:
        beat_at_s = time.monotonic() + self._rng.uniform(0.0, self._period_s)
        while True:
            await asyncio.sleep(max(beat_at_s - time.monotonic(), 0.0))
            self._sequence += 1
            while (wait_s := await self._attempt()) is not None:
                await asyncio.sleep(wait_s)
            # As an agent's tick: in its own time, however long the last one took.
            beat_at_s += self._period_s * (1 + max(0, int((time.monotonic() - beat_at_s) / self._period_s)))

    async def _attempt(self) -> float | None:
        """Send what is due; seconds to the next attempt, None when the heartbeat was taken."""
        url, began_at_s, status, headers, content = self._route.current, time.monotonic(), 0, dict[str, str](), b""
        try:
            # Not wait_for, which may swallow a cancellation.
            async with asyncio.timeout(TIMEOUT_S):
                status, headers, content = await self._send(url)
        except (OSError, EOFError, TimeoutError):
            self._connection.close()
        now_s, leader = time.monotonic(), headers.get(LEADER_HEADER)
        if status and not self._terms.accept(parse_term(headers.get(TERM_HEADER))):
            status = 0
        wait_s: float | None = None
        if status == 200:
            if not self._is_registered:
                self._is_registered = True
                return 0.0
            self._route.taken()
            self.taken.append((now_s, url, self._terms.highest or 0))
        elif is_standby(status, leader, read_error(content)):
            wait_s = self._route.standby(leader, standby_period_s(self._period_s), began_at_s, now_s)
        elif status == 409 and b'"register":true' in content:
            self._is_registered, wait_s = False, 0.0
        else:
            wait_s = self._route.unanswered(began_at_s, now_s)
        if self._route.current != url:
            self._connection.close()
            self._connection = Connection(self._route.current)
        return wait_s

    async def _send(self, url: str) -> tuple[int, dict[str, str], bytes]:
        who = f'{{"node_id":"{self.id}","incarnation":"bench",'
        body, path = f'{who}"resources":{{"cpu":8.0}}}}', "/api/v1/nodes"
        if self._is_registered:
            path = "/api/v1/heartbeats"
            body = f'{who}"sequence":{self._sequence},"sent_at":0.0,"cpu_capacity":8.0,"jobs":[]}}'
        await self._connection.open()
        self.requests.append((time.monotonic(), url))
        return await self._connection.ask("POST", path, body.encode())


def read_error(content: bytes) -> str:
    try:
        return str(decode_json(content, dict[str, object]).get("error", ""))
    except ContentError:
        return ""


def count_most(times: list[float], window_s: float = 1.0) -> int:
    """The most of ``times``, which are sorted, in any window."""
    return max((n + 1 - bisect.bisect_left(times, at - window_s) for n, at in enumerate(times)), default=0)


async def take_over(pair: Pair, nodes: list[Node], fault: str, period_s: float, lease_s: float) -> list[str]:
    """Let the leader fail, and print what follows; what was not as it should be."""
    old = await pair.find_leader()
    await asyncio.sleep(SETTLE_S)
    process, fault_at_s = pair.processes[old], time.monotonic()
    process.send_signal(signal.SIGKILL if fault == "kill" else signal.SIGSTOP)
    new = await pair.find_leader(but=old)
    led_s = time.monotonic() - fault_at_s
    await asyncio.sleep(BACK_S + lease_s)
    back = sorted(
        min((at for at, url, _ in node.taken if at > fault_at_s and url == new), default=float("inf")) - fault_at_s
        for node in nodes
    )
    rate = len(nodes) / period_s
    sent = [request for node in nodes for request in node.requests if request[0] > fault_at_s]
    storms = {url: count_most(sorted(at for at, to in sent if to == url)) / rate for url in sorted(pair.processes)}
    both = count_most(sorted(at for at, _ in sent)) / rate
    told = ", ".join(f"{'old' if url == old else 'new'} leader {most:.2f}" for url, most in storms.items())
    print(
        f"{fault:4}: another one leads after {led_s:.1f} s; nodes are back after {back[0]:.1f} to {back[-1]:.1f} s "
        f"(median {statistics.median(back):.1f} s); most requests in a second, as multiples of the normal {rate:.0f}: "
        f"{told}, both together {both:.2f}",
        flush=True,
    )
    wrong = [f"{fault}: the last was back after {back[-1]:.1f} s, more than {BACK_S:g}"] if back[-1] > BACK_S else []
    wrong += [f"{fault}: {most:.2f} times the normal rate at {url}" for url, most in storms.items() if most > STORM]
    if fault == "stop":
        wrong += await wake(pair, nodes, old)
    return wrong


async def wake(pair: Pair, nodes: list[Node], old: str) -> list[str]:
    """Continue the stopped leader: it must answer as a standby, and nobody may have followed it."""
    woken_at_s = time.monotonic()
    pair.processes[old].send_signal(signal.SIGCONT)
    status, _, content = await asyncio.wait_for(Connection(old).ask("GET", "/api/v1/me", b""), TIMEOUT_S)
    answer_s = time.monotonic() - woken_at_s
    await asyncio.sleep(SETTLE_S)
    followed = sum(at > woken_at_s and url == old for node in nodes for at, url, _ in node.taken)
    print(f"woken: status {status} after {answer_s:.2f} s ({read_error(content)}); heartbeats it took: {followed}")
    return [] if (status, followed) == (503, 0) else [f"woken: status {status}, {followed} heartbeats taken"]


@contextmanager
def started(lease_s: float) -> Iterator[Pair]:
    with tempfile.TemporaryDirectory(prefix="cpumond-takeover-") as place, PostgresServer() as server:
        pair = Pair(Path(place), server.conninfo(), lease_s)
        try:
            yield pair
        except BaseException:
            for log in Path(place).glob("*.log"):
                print(f"{log.name}: {re.sub('(?s).*(?=.{2000}$)', '', log.read_text())}", file=sys.stderr)
            raise
        finally:
            pair.close()


async def measure(options: argparse.Namespace, fault: str) -> list[str]:
    with started(options.lease) as pair:
        await asyncio.wait_for(pair.find_leader(), 60.0)
        nodes = [Node(number, list(pair.processes), options.period) for number in range(options.nodes)]
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(node.run()) for node in nodes]
            while not all(node.taken for node in nodes):
                await asyncio.sleep(0.2)
            wrong = await take_over(pair, nodes, fault, options.period, options.lease)
            for task in running:
                task.cancel()
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=1000)
    parser.add_argument("--period", type=float, default=1.0, help="seconds between two heartbeats of a node")
    parser.add_argument("--lease", type=float, default=10.0)
    parser.add_argument("--fault", choices=["kill", "stop", "both"], default="both")
    parser.add_argument("--check", action="store_true", help="exit with 1 where a node is late or there is a storm")
    options = parser.parse_args()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(max(soft, 4 * options.nodes + 100), hard), hard))
    wrong: list[str] = []
    for fault in ("kill", "stop") if options.fault == "both" else (options.fault,):
        wrong += asyncio.run(measure(options, fault))
    for text in wrong:
        print(f"not as it should be: {text}")
    return 1 if options.check and wrong else 0


if __name__ == "__main__":
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    sys.exit(main())
