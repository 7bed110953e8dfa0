"""What cpumond and others cost real servers: PostgreSQL, nginx, Redis and Node.js, each in a cgroup with a quota.

The servers order 0.5, 0.5, 0.3 and 0.5 cores and get open load in bursts; a latency counts from the time at which the
request was due. Arms run in turns, all with the same arrivals in a round; ``nothing`` runs twice, to show the noise.
Limits, throttling and use are read from the cgroups by this program. docs/real-servers.md has more.

    python tests/bench/real_services.py [--rounds 5] [--seconds 66] [--arms nothing,peak,guarantee] [--json FILE]
    python tests/bench/real_services.py --show FILE...

Needs root, two CPUs, and Debian's postgresql, nginx-light, redis-server, nodejs and gcc. A run with more than 0.2 cores
of other load is dropped from the table.
"""

import argparse
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import msgspec

sys.path.insert(0, str(Path(__file__).parents[1]))

from real_arms import (
    ARMS,
    FILES_OF_JOB,
    FLOOR_CORES,
    Arm,
    Batch,
    Jobs,
    Managed,
    Work,
    describe,
    explain_refusal,
    find_idle_parent,
)
from real_figures import (
    AGAIN,
    BASE,
    CYCLE_S,
    SETTLE,
    Run,
    ServerRun,
    compute_percentile_limit,
    make_arrivals,
    show,
    split_phases,
)
from real_servers import (
    SERVERS,
    TOP,
    Generator,
    Groups,
    MissingError,
    Server,
    build,
    find_leftovers,
    measure_cost_s,
    read_busy_s,
)

from cpumond.cluster import remove_cgroups
from cpumond.core.errors import CpumondError
from cpumond.host.cgroup.mounts import open_hierarchies

LOOK_S, SECOND_S, MINUTE_S = 0.05, 1.0, 60.0
"""How often limits are read, use is noted, and a percentile becomes a limit."""
GOVERN_S = {"free": 0.2, "suppressed": 1.0}
"""How often the quota of a batch moves."""
TOP_SHARES, LOAD_SHARES, AGENT_SHARES, SERVER_SHARES = 16_384, 8_192, 2_048, 1_024
START_S = 1.0
"""For load generators, to connect before the first request is due."""


class Counters(NamedTuple):
    """Everything that only grows, at one moment."""

    at_s: float
    busy_s: float
    own_s: float
    batch_s: float
    idle_s: float
    agent_s: float
    load_s: float
    files: int
    used_s: dict[str, float]
    throttling: dict[str, tuple[int, int, float]]


class Watched:
    """One server during a run: the limit that it has, and what that freed and held back since ``reset``."""

    def __init__(self, server: Server, groups: Groups) -> None:
        self.server, self.groups = server, groups
        self.freed_s, self.held_back = 0.0, 0
        self.limit = server.order
        self._throttled = groups.read_throttling(server.group)[1]

    def reset(self) -> None:
        self.freed_s, self.held_back = 0.0, 0

    def look(self, passed_s: float, guarantee: float | None) -> None:
        """The limit of the last look has held for ``passed_s``. ``guarantee``: what the agent's report says instead."""
        freed = max(self.server.order - self.limit, 0.0)
        throttled = self.groups.read_throttling(self.server.group)[1]
        self.freed_s += freed * passed_s
        if freed > 1e-6 and guarantee is None:
            self.held_back += throttled - self._throttled
        self._throttled = throttled
        self.limit = self.groups.quota_cores(self.server.group) if guarantee is None else guarantee


class Clock:
    def __init__(self, period_s: float) -> None:
        self.period_s, self._last_s = period_s, time.monotonic()

    def take(self) -> float:
        """Seconds since the last time, once they are a period; else 0."""
        passed_s = time.monotonic() - self._last_s
        if passed_s < self.period_s:
            return 0.0
        self._last_s += passed_s
        return passed_s


class Session:
    """Servers that run, and arms one after the other. ``history``: use in each second under full limits, by server."""

    def __init__(self, groups: Groups, idle: Groups, folder: Path, servers: Sequence[Server], seconds: float) -> None:
        self.groups, self.idle, self.directory = groups, idle, folder
        self.servers, self.seconds = servers, seconds
        self.capacity = float(len(os.sched_getaffinity(0)))
        self.program = build(folder)
        self.costs_s = {each.name: measure_cost_s(groups, self.program, each) for each in servers}
        self.history: dict[str, list[float]] = {each.name: [] for each in servers}
        self.work = Work(groups, idle, folder)

    def reset(self) -> None:
        """Everything as ordered, whatever the last arm left."""
        for server in self.servers:
            self.groups.write(server.group, "shares", SERVER_SHARES)
            self.groups.set_quota(server.group, server.order)

    def run(self, name: str, arm: Arm, number: int) -> Run:
        self.reset()
        with ExitStack() as stack:
            stack.callback(self.reset)
            managed = self.start_agent(name, arm, stack)
            self.start_batch(arm, managed, stack)
            start_s = time.monotonic() + START_S
            phases, generators = [], []
            for index, server in enumerate(self.servers):
                shift_s = index * CYCLE_S / len(self.servers)
                rate = server.order / self.costs_s[server.name]
                arrivals = make_arrivals(f"{number} {server.name}", rate, self.seconds, shift_s)
                phases.append(arrivals.phases)
                generators.append(Generator(self.groups, self.program, server, arrivals.due_s, start_s))
                stack.callback(generators[-1].stop)

            def check() -> None:
                self.work.check()
                for each in (managed, *generators):
                    if each is not None:
                        each.check()

            watched = [Watched(server, self.groups) for server in self.servers]
            begin_s = start_s + SETTLE.seconds
            self.follow(arm, watched, managed, begin_s, check)
            for each in watched:
                each.reset()
            first = self.read_counters()
            self.follow(arm, watched, managed, begin_s + self.seconds, check)
            last = self.read_counters()
            latencies_s = [each.read() for each in generators]
        servers = {
            each.server.name: make_server_run(each, first, last, found, names)
            for each, found, names in zip(watched, latencies_s, phases, strict=True)
        }
        return make_run(name, number, servers, first, last)

    def start_agent(self, name: str, arm: Arm, stack: ExitStack) -> Managed | None:
        if arm.monitor is None:
            return None
        managed = Managed(self.groups, self.directory / name, arm.monitor, self.capacity)
        stack.callback(managed.stop)
        managed.start(len(self.servers))
        return managed

    def start_batch(self, arm: Arm, managed: Managed | None, stack: ExitStack) -> None:
        if isinstance(arm.batch, Batch):
            stack.callback(self.work.stop)
            self.work.start(arm.batch)
        elif isinstance(arm.batch, Jobs):
            assert managed is not None
            managed.run(arm.batch, self.work.list_words(FILES_OF_JOB))

    def follow(
        self, arm: Arm, watched: Sequence[Watched], managed: Managed | None, until_s: float, check: Callable[[], None]
    ) -> None:
        """Read limits, and do what the arm has the benchmark do, until a time."""
        room = arm.batch.room if isinstance(arm.batch, Batch) else ""
        look, second, minute = Clock(0.0), Clock(SECOND_S), Clock(MINUTE_S)
        govern = Clock(GOVERN_S[room]) if room else None
        used_s = {each.server.name: self.groups.read_used_s(each.server.group) for each in watched}
        guarantees: Mapping[str, float] = {}
        is_first = True
        while time.monotonic() < until_s:
            passed_s = second.take()
            if arm.is_guarantee and managed is not None and (passed_s or is_first):
                guarantees = managed.read_guarantees()
            looked_s = look.take()
            for each in watched:
                each.look(looked_s, guarantees.get(each.server.group))
            if govern is not None and (governed_s := govern.take()):
                self.work.govern(room, self.capacity, [each.limit for each in watched], governed_s)
            if passed_s:
                check()
                self.note_use(arm, watched, used_s, passed_s)
            if arm.is_percentile and (minute.take() or is_first):
                self.write_percentiles()
            is_first = False
            time.sleep(LOOK_S)

    def note_use(self, arm: Arm, watched: Sequence[Watched], used_s: dict[str, float], passed_s: float) -> None:
        """For the percentile; under an agent's limits it would see what these allow."""
        for each in watched:
            name, now_s = each.server.name, self.groups.read_used_s(each.server.group)
            if arm.monitor is None and arm.batch is None:
                self.history[name].append((now_s - used_s[name]) / passed_s)
            used_s[name] = now_s

    def write_percentiles(self) -> None:
        for server in self.servers:
            limit = compute_percentile_limit(server.order, FLOOR_CORES, self.history[server.name])
            self.groups.set_quota(server.group, limit)

    def read_counters(self) -> Counters:
        groups, idle_s = self.groups, self.work.read_idle_s()
        return Counters(
            time.monotonic(), read_busy_s(),
            groups.read_used_s("") + idle_s + time.process_time(),
            self.work.read_used_s() + idle_s, idle_s, groups.read_used_s("agent"), groups.read_used_s("load"),
            self.work.count_files(),
            {each.name: groups.read_used_s(each.group) for each in self.servers},
            {each.name: groups.read_throttling(each.group) for each in self.servers},
        )  # fmt: skip


def make_server_run(
    watched: Watched, first: Counters, last: Counters, latencies_s: Sequence[float], phases: Sequence[str]
) -> ServerRun:
    name, passed_s = watched.server.name, last.at_s - first.at_s
    periods, throttled, throttled_s = (
        after - before for before, after in zip(first.throttling[name], last.throttling[name], strict=True)
    )
    return ServerRun(
        order_cores=watched.server.order,
        used_cores=(last.used_s[name] - first.used_s[name]) / passed_s,
        freed_cores=watched.freed_s / passed_s,
        held_back=watched.held_back,
        nr_periods=int(periods),
        nr_throttled=int(throttled),
        throttled_s=throttled_s,
        latency=split_phases(latencies_s, phases),
    )


def make_run(name: str, number: int, servers: Mapping[str, ServerRun], first: Counters, last: Counters) -> Run:
    passed_s = last.at_s - first.at_s
    busy_s, own_s = last.busy_s - first.busy_s, last.own_s - first.own_s
    return Run(
        name, number, passed_s, servers,
        others_cores=max(busy_s - own_s, 0.0) / passed_s,
        batch_cores=(last.batch_s - first.batch_s) / passed_s,
        idle_cores=(last.idle_s - first.idle_s) / passed_s,
        batch_files=last.files - first.files,
        agent_cores=(last.agent_s - first.agent_s) / passed_s,
        load_cores=(last.load_s - first.load_s) / passed_s,
    )  # fmt: skip


def choose_arms(given: str, hierarchy: str) -> dict[str, Arm]:
    """The arms of a session, the second ``nothing`` last; without names all that can run, with the others' reasons
    printed. Raises MissingError where one is named that cannot run."""
    names = given.split(",") if given else [name for name in ARMS if name != AGAIN]
    if unknown := [name for name in names if name not in ARMS]:
        raise MissingError(f"no such arm: {', '.join(unknown)}; there are {', '.join(ARMS)}")
    refused = {name: why for name in names if (why := explain_refusal(ARMS[name], hierarchy))}
    if refused and given:
        raise MissingError("; ".join(f"arm {name} cannot run: {why}" for name, why in refused.items()))
    for name, why in refused.items():
        print(f"left out: {name}: {why}", file=sys.stderr)
    chosen = [name for name in names if name not in refused and name != AGAIN]
    return {name: ARMS[name] for name in (*chosen, *([AGAIN] if BASE in chosen else []))}


def measure(options: argparse.Namespace, stack: ExitStack) -> list[Run]:
    """All rounds. Raises MissingError for what this machine lacks."""
    if os.geteuid() != 0:
        raise MissingError("run it as root: it makes cgroups and writes quotas")
    if missing := sorted({package for server in SERVERS.values() for package in server.list_missing()}):
        raise MissingError(f"missing: apt-get install --no-install-recommends {' '.join(missing)}")
    hierarchies = open_hierarchies()
    arms = choose_arms(options.arms, hierarchies.cpu_root)
    directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="cpumond-real-")))
    for name in find_leftovers(os.listdir(hierarchies.cpu_root)):
        remove_cgroups(name)
    top = f"{TOP}{os.getpid()}"
    groups, idle = (stack.enter_context(Groups(hierarchies, name)) for name in (top, f"{top}-idle"))
    stack.callback(remove_cgroups, find_idle_parent(groups))
    groups.write("", "shares", TOP_SHARES)
    if any(isinstance(arm.batch, Batch) and arm.batch.is_idle for arm in arms.values()):
        idle.write("", "cpu.idle", 1)
    for name, shares in (("load", LOAD_SHARES), ("agent", AGENT_SHARES)):
        groups.make(name)
        groups.write(name, "shares", shares)
    servers = [kind(groups, directory) for kind in SERVERS.values()]
    for server in servers:
        stack.callback(server.stop)
        server.start()
    session = Session(groups, idle, directory, servers, options.seconds)
    costs = ", ".join(f"{name} {cost_s * 1e3:.3g}" for name, cost_s in session.costs_s.items())
    print(f"ms of CPU for a request: {costs}", file=sys.stderr)
    runs: list[Run] = []
    for number in range(1, options.rounds + 1):
        for name in list(arms) if number % 2 else reversed(arms):
            runs.append(session.run(name, arms[name], number))
            print(f"round {number}: {name}: others used {runs[-1].others_cores:.2f} cores", file=sys.stderr, flush=True)
            if options.json:
                Path(options.json).write_bytes(msgspec.json.format(msgspec.json.encode(runs), indent=1) + b"\n")
    return runs


def read_runs(paths: Sequence[str]) -> list[Run]:
    """Of earlier sessions, whose rounds are numbered on."""
    runs: list[Run] = []
    for path in paths:
        before = max((run.round for run in runs), default=0)
        found = msgspec.json.decode(Path(path).read_bytes(), type=list[Run])
        runs += [msgspec.structs.replace(run, round=run.round + before) for run in found]
    return runs


def end(number: int, _: object) -> None:
    """End at the first signal, with everything removed, whatever signals follow."""
    for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(each, signal.SIG_IGN)
    sys.exit(128 + number)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=f"{__doc__}\nArms:\n{describe(ARMS)}", formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=CYCLE_S, help="measured of each arm in each round")
    parser.add_argument("--arms", default="", help="names with commas between them; default: all that can run")
    parser.add_argument("--others", type=float, default=0.2, help="runs with more cores of other load are dropped")
    parser.add_argument("--json", metavar="FILE", help="written after each run")
    parser.add_argument("--show", nargs="+", metavar="FILE", help="only print the table of earlier sessions")
    options = parser.parse_args()
    for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(each, end)
    try:
        with ExitStack() as stack:
            runs = read_runs(options.show) if options.show else measure(options, stack)
    except (MissingError, CpumondError) as error:
        print(error, file=sys.stderr)
        return 2
    print(show(runs, options.others))
    return 0


if __name__ == "__main__":
    sys.exit(main())
