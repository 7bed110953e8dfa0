"""Servers, their cgroups and their load, for ``real_services.py``: PostgreSQL, nginx, Redis and Node.js of Debian."""

from __future__ import annotations

import contextlib
import math
import os
import random
import re
import shutil
import signal
import socket
import struct
import subprocess
import time
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Self

from real_cgroups import CgroupTree

from cpumond.cluster import remove_cgroups
from cpumond.cluster.ports import pick_port
from cpumond.cluster.postgresql import PostgresServer, find_postgresql
from cpumond.core.job_cgroups import IDLE_NAME
from cpumond.host.cgroup.mounts import Hierarchies

START_S = 60.0
CONNECTIONS = 24
TOP = "cpumond-real-"
"""Begins the name of a session's cgroups; the process id follows."""


class MissingError(Exception):
    """Something that the benchmark needs is not installed, or a program did not start; a sentence."""


# --- Cgroups


class Groups(CgroupTree):
    """Real cgroups in one top cgroup, read and written; ``close`` ends every process in them and removes them."""

    def command(self, name: str, words: Sequence[str]) -> list[str]:
        """A command that runs ``words`` in a cgroup, and is killed when the thread that starts it ends."""
        files = " ".join(os.path.join(root, self.top, name, "cgroup.procs") for root in self.roots)
        script = f'for procs in {files}; do echo 0 > "$procs" || exit 1; done; exec setpriv --pdeathsig KILL -- "$@"'
        return ["sh", "-c", script, "sh", *words]

    def enter(self, name: str, pid: int) -> None:
        """Move a process; one that has ended is no error."""
        for root in self.roots:
            with contextlib.suppress(ProcessLookupError), open(f"{root}/{self.top}/{name}/cgroup.procs", "w") as file:
                file.write(str(pid))

    def set_quota(self, name: str, cores: float | None) -> None:
        """None: no quota. The burst that an agent left goes first: the kernel takes no quota below it."""
        with contextlib.suppress(FileNotFoundError):  # kernels before 5.14
            self.write(name, "burst_us", 0)
        period_us = int(self.read(name, "period_us"))
        self.write(name, "quota_us", -1 if cores is None else max(round(cores * period_us), 1000))

    def read_used_s(self, name: str) -> float:
        """CPU seconds of a cgroup and all below it; 0 where it is not there."""
        return read_used_s(self.hierarchies, f"{self.top}/{name}")

    def read_throttling(self, name: str) -> tuple[int, int, float]:
        """nr_periods, nr_throttled, and for how many seconds the quota kept its threads waiting."""
        stat = dict(line.split() for line in self.read(name, "cpu.stat").splitlines())
        return int(stat["nr_periods"]), int(stat["nr_throttled"]), self.throttled_s(name)

    def close(self) -> None:
        remove_cgroups(self.top)

    def __enter__(self) -> Self:
        return self


def find_leftovers(names: Sequence[str], proc: str = "/proc") -> list[str]:
    """Of the names of cgroups in the root those that a session made which was killed: its process is gone."""
    found = ((name, re.match(rf"(?:{IDLE_NAME}-)?{TOP}(\d+)(?:-|$)", name)) for name in names)
    return [name for name, parts in found if parts and not os.path.exists(f"{proc}/{parts[1]}")]


def read_used_s(hierarchies: Hierarchies, path: str) -> float:
    """CPU seconds of any cgroup, by its path in the hierarchy; 0 where it is not there."""
    is_v2 = hierarchies.cpu_version == 2
    try:
        with open(os.path.join(hierarchies.cpuacct_root, path, "cpu.stat" if is_v2 else "cpuacct.usage")) as source:
            text = source.read()
    except OSError:  # it has gone
        return 0.0
    return int(text.split()[1]) / 1e6 if is_v2 else int(text) / 1e9


def read_busy_s() -> float:
    """CPU seconds of the whole machine since its start, with those that a hypervisor took (steal)."""
    with open("/proc/stat", encoding="ascii") as file:
        user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, file.readline().split()[1:9])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


# --- Servers


class Server:
    """One server: ``order`` cores, and what a client says to it. ``packages`` of Debian, by program."""

    name = ""
    protocol = ""
    order = 0.5
    connections = CONNECTIONS
    packages: tuple[tuple[str, str], ...] = ()

    def __init__(self, groups: Groups, directory: Path) -> None:
        self.groups = groups
        self.group = f"server-{self.name}"
        self.directory = directory / self.name
        self.port = pick_port()
        self.messages = directory / f"{self.name}.messages"
        self._process: subprocess.Popen[bytes] | None = None

    @classmethod
    def list_missing(cls) -> list[str]:
        return [package for program, package in cls.packages if not shutil.which(program)]

    def make_command(self) -> list[str]:
        """Write its files; what starts it in the foreground."""
        raise NotImplementedError

    def make_greeting(self) -> bytes:
        """The first message on each connection; empty: none."""
        return b""

    def make_requests(self) -> Iterator[bytes]:
        """Always the same ones."""
        raise NotImplementedError

    def fill(self) -> None:
        """Data of a server that runs."""

    def start(self) -> None:
        """Start it without a quota, fill it, and write the messages for the load generator. Raises MissingError."""
        self.groups.make(self.group)
        self.directory.mkdir()
        self.launch()
        self.fill()
        messages = [self.make_greeting(), *self.make_requests()]
        self.messages.write_bytes(b"".join(struct.pack("=I", len(each)) + each for each in messages))

    def launch(self) -> None:
        log_path = self.directory / "log"
        with open(log_path, "ab") as log:
            self._process = subprocess.Popen(
                self.groups.command(self.group, self.make_command()),
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
        deadline_s = time.monotonic() + START_S
        while time.monotonic() < deadline_s and self._process.poll() is None:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", self.port)) == 0:
                    return
            time.sleep(0.05)
        raise MissingError(f"{self.name} does not start: {log_path.read_text(errors='replace').strip()[-500:]}")

    def check(self) -> None:
        """Raises MissingError when it has ended."""
        if self._process is not None and self._process.poll() is not None:
            text = (self.directory / "log").read_text(errors="replace")
            raise MissingError(f"{self.name} ended with {self._process.returncode}: {text.strip()[-500:]}")

    def stop(self) -> None:
        """End it; the rest of its cgroup is ended with that."""
        if self._process is not None and self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


class PostgreSQL(Server):
    """pgbench's tables and its transaction as one message; each fifth request counts over 2000 rows of an index."""

    name, protocol = "postgresql", "postgresql"
    accounts = 500_000
    transaction = (
        "BEGIN; UPDATE pgbench_accounts SET abalance = abalance + {delta} WHERE aid = {account}; "
        "SELECT abalance FROM pgbench_accounts WHERE aid = {account}; "
        "INSERT INTO pgbench_history (tid, bid, aid, delta, mtime) "
        "VALUES ({teller}, {branch}, {account}, {delta}, CURRENT_TIMESTAMP); END"
    )
    count = (
        "SELECT bid, count(*), sum(abalance) FROM pgbench_accounts "
        "WHERE aid BETWEEN {first} AND {first} + 2000 GROUP BY bid"
    )

    @classmethod
    def list_missing(cls) -> list[str]:
        programs = find_postgresql()
        return [] if programs and os.path.exists(os.path.join(programs, "pgbench")) else ["postgresql"]

    def launch(self) -> None:
        self._server = PostgresServer(
            "shared_buffers = 256MB", "max_connections = 60", "fsync = off",
            "autovacuum_naptime = 20s", "checkpoint_timeout = 60s",
        )  # fmt: skip
        self.port = self._server.port
        self._server.prefix = tuple(self.groups.command(self.group, ["env"]))
        self._server.make()
        self._server.start()

    def fill(self) -> None:
        where = ("-h", "127.0.0.1", "-p", str(self.port), "-U", "cpumond")
        self._server.run("createdb", *where, "bench")
        self._server.run("pgbench", *where, "-i", "-q", "-s", str(self.accounts // 100_000), "bench")

    def check(self) -> None:
        if not self._server.pid:
            raise MissingError("postgresql has ended")

    def stop(self) -> None:
        if hasattr(self, "_server"):
            self._server.close()

    def make_greeting(self) -> bytes:
        words = b"user\0cpumond\0database\0bench\0\0"
        return struct.pack("!II", len(words) + 8, 3 << 16) + words

    def make_requests(self) -> Iterator[bytes]:
        choose = random.Random(self.name)
        for number in range(1500):
            text = self.count.format(first=choose.randint(1, self.accounts - 2000))
            if number % 5:
                text = self.transaction.format(
                    account=choose.randint(1, self.accounts), delta=choose.randint(-5000, 5000),
                    teller=choose.randint(1, 50), branch=choose.randint(1, 5),
                )  # fmt: skip
            query = text.encode() + b"\0"
            yield b"Q" + struct.pack("!I", len(query) + 4) + query


class Nginx(Server):
    """Pages of 40 KB, compressed at each request by one of two workers."""

    name, protocol = "nginx", "http"
    packages = (("nginx", "nginx-light"),)
    pages = 20
    configuration = """
        daemon off; user root; worker_processes 2; pid {place}/pid; error_log {place}/log;
        events {{ worker_connections 256; }}
        http {{
            access_log {place}/access.log; keepalive_requests 1000000000; keepalive_timeout 1d;
            types {{ text/html html; }} gzip on; gzip_comp_level 4;
            client_body_temp_path {place}/body; proxy_temp_path {place}/proxy; fastcgi_temp_path {place}/fastcgi;
            uwsgi_temp_path {place}/uwsgi; scgi_temp_path {place}/scgi;
            server {{ listen 127.0.0.1:{port} reuseport; root {place}; }}
        }}
    """

    def make_command(self) -> list[str]:
        choose = random.Random(self.name)
        words = ["".join(choose.choices("abcdefghijklmnopqrstuvwxyz", k=choose.randint(2, 10))) for _ in range(2000)]
        for number in range(self.pages):
            (self.directory / f"{number}.html").write_text(f"<p>{' '.join(choose.choices(words, k=6000))}</p>")
        path = self.directory / "nginx.conf"
        path.write_text(self.configuration.format(place=self.directory, port=self.port))
        return ["nginx", "-p", str(self.directory), "-c", str(path), "-e", str(self.directory / "log")]

    def make_requests(self) -> Iterator[bytes]:
        for number in range(self.pages):
            yield f"GET /{number}.html HTTP/1.1\r\nHost: bench\r\nAccept-Encoding: gzip\r\n\r\n".encode()


class Redis(Server):
    """Counters and ranges of sorted sets; a snapshot (a fork) each minute."""

    name, protocol, order, connections = "redis", "redis", 0.3, 16
    packages = (("redis-server", "redis-server"),)
    sets, members = 50, 100_000

    def make_command(self) -> list[str]:
        return [
            "redis-server", "--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(self.directory),
            "--save", "", "--daemonize", "no", "--appendonly", "no",
        ]  # fmt: skip

    def fill(self) -> None:
        choose = random.Random(self.name)
        with socket.create_connection(("127.0.0.1", self.port), START_S) as connection:
            for first in range(0, self.members, 1000):
                numbers = range(first, first + 1000)
                connection.sendall(
                    b"".join(
                        self._word("ZADD", f"set:{number % self.sets}", str(choose.random()), f"member:{number}")
                        for number in numbers
                    )
                )
                answer = b""
                while answer.count(b"\n") < len(numbers):
                    answer += connection.recv(65536)

    @staticmethod
    def _word(*words: str) -> bytes:
        return f"*{len(words)}\r\n".encode() + b"".join(f"${len(word)}\r\n{word}\r\n".encode() for word in words)

    def make_requests(self) -> Iterator[bytes]:
        choose = random.Random(f"{self.name} requests")
        for number in range(1000):
            name = f"set:{choose.randrange(self.sets)}"
            if number % 2:
                yield self._word("ZRANGE", name, "0", "400", "WITHSCORES")
            elif number % 4:
                yield self._word("INCR", f"counter:{choose.randrange(10_000)}")
            else:
                yield self._word("SORT", name, "BY", "nosort", "LIMIT", "0", "300")


class Node(Server):
    """A service that makes, sorts and writes out 300 objects as JSON; its collector and compilers run beside it."""

    name, protocol = "node", "http"
    packages = (("node", "nodejs"),)
    program = """
        const http = require('http');
        const server = http.createServer((request, response) => {
          const seed = Number(request.url.slice(1)) || 1;
          const rows = Array.from({ length: 300 }, (_, id) => ({
            id, name: `user${(id * seed) % 997}`, score: (id * seed * 7919) % 10007, tags: [`a${id}`, `b${seed}`],
          }));
          rows.sort((one, other) => one.score - other.score || one.name.localeCompare(other.name));
          const body = JSON.stringify({ first: rows.slice(0, 50), size: JSON.stringify(rows).length });
          response.writeHead(200, { 'Content-Type': 'application/json', 'Content-Length': Buffer.byteLength(body) });
          response.end(body);
        });
        server.keepAliveTimeout = 0;
        server.listen(Number(process.argv[2]), '127.0.0.1');
    """

    def make_command(self) -> list[str]:
        path = self.directory / "server.js"
        path.write_text(self.program)
        return ["node", str(path), str(self.port)]

    def make_requests(self) -> Iterator[bytes]:
        for number in range(1, 200):
            yield f"GET /{number} HTTP/1.1\r\nHost: bench\r\n\r\n".encode()


SERVERS: dict[str, type[Server]] = {each.name: each for each in (PostgreSQL, Nginx, Redis, Node)}


# --- Load


class Generator:
    """Open-loop load on one server, by ``open_loop.c``."""

    def __init__(self, groups: Groups, program: Path, server: Server, due_s: array[float], start_s: float) -> None:
        self._server = server
        self._result = server.directory / "latencies"
        due = server.directory / "due"
        due.write_bytes(due_s.tobytes())
        words = [str(program), server.protocol, str(server.port), str(server.connections), str(server.messages)]
        self._process = subprocess.Popen(
            groups.command("load", [*words, str(due), repr(start_s), str(self._result)]),
            stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True,
        )  # fmt: skip

    def check(self) -> None:
        """Raises MissingError when it has ended before its time."""
        if self._process.poll():
            self.read()

    def read(self) -> list[float]:
        """Wait for the last answer; seconds of each request, below 0 where it failed. Raises MissingError."""
        _, said = self._process.communicate(timeout=120.0)
        if self._process.returncode:
            self._server.check()
            raise MissingError(f"load on {self._server.name} failed: {said.decode(errors='replace').strip()[-500:]}")
        latencies = array("f")
        latencies.frombytes(self._result.read_bytes())
        return latencies.tolist()

    def stop(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.communicate()


def build(directory: Path) -> Path:
    """Compile the load generator; its path."""
    program = directory / "open_loop"
    subprocess.run(["gcc", "-O2", "-o", str(program), str(Path(__file__).with_name("open_loop.c"))], check=True)
    return program


def measure_cost_s(groups: Groups, program: Path, server: Server) -> float:
    """CPU seconds of one request without a quota, at about a third of what was ordered."""
    choose, rate, cost_s = random.Random("cost"), 50.0, math.inf
    groups.set_quota(server.group, None)
    for seconds in (2.0, 3.0, 5.0):
        due_s = array("d", sorted(choose.uniform(0.0, seconds) for _ in range(max(round(rate * seconds), 1))))
        before_s = groups.read_used_s(server.group)
        generator = Generator(groups, program, server, due_s, time.monotonic() + 0.5)
        try:
            latencies_s = generator.read()
        finally:
            generator.stop()
        if all(each < 0.0 for each in latencies_s):
            raise MissingError(f"{server.name} answers no request as it should")
        cost_s = (groups.read_used_s(server.group) - before_s) / len(due_s)
        rate = 0.35 * server.order / cost_s
    return cost_s


def find_compiler() -> str:
    """The compiler proper of gcc, one process without an assembler. Raises MissingError."""
    said = subprocess.run(["gcc", "-print-prog-name=cc1"], stdout=subprocess.PIPE, text=True, check=True).stdout.strip()
    if not os.path.isabs(said):
        raise MissingError("gcc has no cc1: install Debian's gcc")
    return said


def write_unit(path: Path, functions: int = 4) -> None:
    """A C file that takes a compiler some tenths of a second."""
    choose, lines = random.Random("unit"), ["extern int sink(int, double);"]
    for number in range(functions):
        lines.append(f"int work{number}(int *a, int n, double x) {{ int s = {number};")
        for _ in range(12):
            step, factor = choose.randint(1, 7), choose.randint(2, 99)
            lines += [
                f"for (int i = 0; i < n; i += {step}) {{ s += a[i] * {factor}; if (s % {factor} == 1) x *= 1.5 + s; }}",
                f"switch (s & 7) {{ case 1: s ^= n; break; case {choose.randint(2, 6)}: s = sink(s, x); break; }}",
            ]
        lines.append("return sink(s, x); }")
    path.write_text("\n".join(lines) + "\n", encoding="ascii")


def count_lines(path: Path) -> int:
    """Lines of a file that others append to; 0 where there is none."""
    return len(re.findall("\n", path.read_text(encoding="ascii"))) if path.exists() else 0
