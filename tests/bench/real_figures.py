"""The pure parts of ``real_services.py``: arrivals, figures of a run, comparison of arms, the table.

A *run* is one arm in one round. All arms of a round have the same arrivals, so a run is compared with the run of arm
``nothing`` in its own round.
"""

from __future__ import annotations

import math
import random
from array import array
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean, median
from typing import Final, NamedTuple

import msgspec

BASE: Final = "nothing"
AGAIN: Final = "nothing-again"
"""The second run of ``BASE`` in each round: how far two runs of the same are apart is the noise."""
PLAIN: Final = "overcommit-low"
"""The arm that batch work is compared with."""
PERIOD_S: Final = 0.1
"""The kernel's period of a quota."""


# --- Load


class Phase(NamedTuple):
    """Part of a cycle: ``seconds`` long, from ``first`` to ``last`` of the order, in a straight line."""

    name: str
    seconds: float
    first: float
    last: float


CYCLE: Final = (
    Phase("low", 12.0, 0.08, 0.08), Phase("idle", 8.0, 0.0, 0.0), Phase("burst", 2.0, 0.8, 0.8),
    Phase("low", 8.0, 0.15, 0.15), Phase("ramp", 12.0, 0.15, 0.75), Phase("steady", 6.0, 0.4, 0.4),
    Phase("idle", 9.0, 0.01, 0.01), Phase("spike", 0.6, 0.95, 0.95), Phase("low", 4.4, 0.1, 0.1),
    Phase("burst", 2.0, 0.85, 0.85), Phase("low", 2.0, 0.1, 0.1),
)  # fmt: skip
CYCLE_S: Final = sum(phase.seconds for phase in CYCLE)
SETTLE: Final = Phase("settle", 18.0, 0.1, 0.1)
"""Before the cycle; its requests are sent and not counted."""


def find_phase(at_s: float) -> tuple[str, float]:
    """The phase of a time in the cycle, which repeats, and the share of the order that is wanted then, in [0, 1]."""
    begin_s, at_s = 0.0, at_s % CYCLE_S
    for phase in CYCLE:
        if at_s < begin_s + phase.seconds:
            break
        begin_s += phase.seconds
    gone = min((at_s - begin_s) / phase.seconds, 1.0)
    return phase.name, phase.first + (phase.last - phase.first) * gone


class Arrivals(NamedTuple):
    """Requests of one server: seconds after the start, ascending, and the phase of each."""

    due_s: array[float]
    phases: list[str]


def make_arrivals(seed: str, rate: float, seconds: float, shift_s: float = 0.0) -> Arrivals:
    """Arrivals at random (a Poisson process that follows the cycle from ``shift_s`` on), of ``SETTLE`` and ``seconds``
    after it. ``rate``: requests a second that use all the server ordered."""
    choose, at_s = random.Random(seed), 0.0
    due_s, phases = array("d"), list[str]()
    while (at_s := at_s + choose.expovariate(rate)) < SETTLE.seconds + seconds:
        is_settling = at_s < SETTLE.seconds
        name, share = (SETTLE.name, SETTLE.first) if is_settling else find_phase(at_s - SETTLE.seconds + shift_s)
        if choose.random() < share:
            due_s.append(at_s)
            phases.append(name)
    return Arrivals(due_s, phases)


# --- Figures of a run


class Latency(msgspec.Struct, frozen=True):
    """Milliseconds from due to answered; a failed request counts with the time until it failed."""

    requests: int
    failed: int
    p50: float
    p95: float
    p99: float
    p999: float
    most: float


def find_quantile(ordered: Sequence[float], share: float) -> float:
    """Of ascending values, by nearest rank; 0 of none."""
    return ordered[max(math.ceil(share * len(ordered)) - 1, 0)] if ordered else 0.0


def summarise(latencies_s: Sequence[float]) -> Latency:
    """``latencies_s`` as the load generator writes them: below 0 where the request failed."""
    ordered = sorted(abs(each) * 1e3 for each in latencies_s)
    p50, p95, p99, p999, most = (round(find_quantile(ordered, share), 3) for share in (0.5, 0.95, 0.99, 0.999, 1.0))
    return Latency(len(ordered), sum(each < 0.0 for each in latencies_s), p50, p95, p99, p999, most)


def split_phases(latencies_s: Sequence[float], phases: Sequence[str]) -> dict[str, Latency]:
    """One for each phase, and "" for all of them; without ``SETTLE``."""
    by_phase: dict[str, list[float]] = {"": []}
    for latency_s, phase in zip(latencies_s, phases, strict=True):
        if phase != SETTLE.name:
            by_phase[""].append(latency_s)
            by_phase.setdefault(phase, []).append(latency_s)
    return {phase: summarise(found) for phase, found in by_phase.items()}


class ServerRun(msgspec.Struct, frozen=True):
    """One server in a run; cores are means over its time. ``freed_cores``: of its order, what it could not use (quota)
    or did not have guaranteed. ``held_back``: throttled periods while its quota was below its order; ``nr_periods``,
    ``nr_throttled``, ``throttled_s`` are the kernel's, by the order as well."""

    order_cores: float
    used_cores: float
    freed_cores: float
    held_back: int
    nr_periods: int
    nr_throttled: int
    throttled_s: float
    latency: Mapping[str, Latency]

    @property
    def whole(self) -> Latency:
        return self.latency[""]


class Run(msgspec.Struct, frozen=True):
    """One arm in one round; ``idle_cores``, used in the idle class, are in ``batch_cores``. ``others_cores``: used on
    this machine by anything that the benchmark did not start."""

    arm: str
    round: int
    seconds: float
    servers: Mapping[str, ServerRun]
    others_cores: float = 0.0
    batch_cores: float = 0.0
    idle_cores: float = 0.0
    batch_files: int = 0
    agent_cores: float = 0.0
    load_cores: float = 0.0

    @property
    def freed_ratio(self) -> float:
        """Of all that was ordered and not used."""
        unused = sum(each.order_cores - each.used_cores for each in self.servers.values())
        return sum(each.freed_cores for each in self.servers.values()) / unused if unused > 0.0 else 0.0

    @property
    def held_back_ratio(self) -> float:
        """Share of the periods, a mean over servers."""
        return fmean(each.held_back * PERIOD_S / self.seconds for each in self.servers.values())


# --- What the batch may use


def compute_free(capacity: float, system: float, limits: Sequence[float]) -> float:
    """Cores beside the servers' present limits and what the system needs; never nothing, for a quota."""
    return max(capacity - system - sum(limits), 0.01)


def compute_suppressed(capacity: float, threshold: float, others: float) -> float:
    """Cores up to ``threshold`` of the machine, less what all others use."""
    return max(capacity * threshold - others, 0.01)


def compute_percentile_limit(order: float, floor: float, seen: Sequence[float]) -> float:
    """The 90th percentile of the use in each second and 15 % more, at least ``floor``, at most the order."""
    return min(max(find_quantile(sorted(seen), 0.9) * 1.15, floor), order) if seen else order


# --- Comparison


def drop_runs(runs: Sequence[Run], most_others: float) -> tuple[list[Run], list[Run]]:
    """Those that count, and those dropped since others used more than ``most_others`` cores meanwhile."""
    kept = [run for run in runs if run.others_cores <= most_others]
    return kept, [run for run in runs if run.others_cores > most_others]


def pair(runs: Sequence[Run], arm: str, base: str) -> Iterator[tuple[Run, Run]]:
    """The runs of ``arm`` and of ``base`` in the same round, where both count."""
    bases = {run.round: run for run in runs if run.arm == base}
    return ((run, bases[run.round]) for run in runs if run.arm == arm and run.round in bases)


def list_ratios(runs: Sequence[Run], arm: str, server: str, base: str = BASE) -> list[float]:
    """p99 of the server in ``arm``, as a multiple of that in ``base`` in the same round; one for each round."""
    return [
        run.servers[server].whole.p99 / other.servers[server].whole.p99
        for run, other in pair(runs, arm, base)
        if other.servers[server].whole.p99 > 0.0
    ]


def find_noise(runs: Sequence[Run], server: str) -> float:
    """The worst ratio of ``nothing`` to ``nothing`` in a round, the larger p99 to the smaller; 1 of none."""
    return max((max(each, 1.0 / each) for each in list_ratios(runs, AGAIN, server) if each > 0.0), default=1.0)


class Bound(NamedTuple):
    """What is asked of an arm. ``figure``: "p99" (to ``nothing``, of each server), "freed", "held back" or "batch"
    (files, to ``PLAIN``). ``is_least``: the figure may not be below ``value``, else not above it; with ``or_noise`` the
    noise of a server is its bound where that is larger."""

    arm: str
    figure: str
    value: float
    is_least: bool = False
    or_noise: bool = False


BOUNDS: Final = (
    Bound("guarantee", "p99", 1.25, or_noise=True),
    Bound("guarantee", "batch", 0.95, is_least=True),
    Bound("guarantee-ceiling", "p99", 1.25, or_noise=True),
    Bound("guarantee-ceiling", "batch", 0.80, is_least=True),
    Bound("early-restore", "p99", 2.0),
    Bound("early-restore", "freed", 0.60, is_least=True),
    Bound("early-restore", "held back", 0.005),
    Bound("early-restore-sensitive", "p99", 1.5),
    Bound("early-restore-sensitive", "freed", 0.40, is_least=True),
    Bound("early-restore-sensitive", "held back", 0.001),
)


def list_figures(runs: Sequence[Run], bound: Bound) -> list[tuple[str, float, float]]:
    """(what, its median over rounds, the bound) for each value that a bound is about; none where nothing counts."""
    found = [run for run in runs if run.arm == bound.arm]
    if not found:
        return []
    if bound.figure == "p99":
        ratios = {server: list_ratios(runs, bound.arm, server) for server in found[0].servers}
        noise = {server: find_noise(runs, server) if bound.or_noise else 0.0 for server in ratios}
        return [
            (f"p99 of {server} to {BASE}", median(values), max(bound.value, noise[server]))
            for server, values in ratios.items()
            if values
        ]
    if bound.figure == "batch":
        pairs = pair(runs, bound.arm, PLAIN)
        shares = [run.batch_files / plain.batch_files for run, plain in pairs if plain.batch_files]
        return [(f"files to {PLAIN}", median(shares), bound.value)] if shares else []
    values = [run.freed_ratio if bound.figure == "freed" else run.held_back_ratio for run in found]
    return [(bound.figure, median(values), bound.value)]


def judge(runs: Sequence[Run], bounds: Sequence[Bound] = BOUNDS) -> list[str]:
    """A line for each bound on what was measured."""
    lines = []
    for bound in bounds:
        for what, value, limit in list_figures(runs, bound):
            is_met = value >= limit if bound.is_least else value <= limit
            side, digits = "at least" if bound.is_least else "at most", 4 if bound.figure == "held back" else 2
            result = "ok" if is_met else "MISSED"
            lines.append(f"{bound.arm}: {what}, {side} {limit:.{digits}f}: {value:.{digits}f} {result}")
    return lines


# --- Table


def show_rows(rows: Sequence[Sequence[str]]) -> list[str]:
    """A table in Markdown; the first row is its head, the first column is to the left, the others to the right."""
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = (cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))
        lines.append(f"| {row[0].ljust(widths[0])} | {' | '.join(cells)} |")
    rule = "|".join("-" * (width + 1) + ":" for width in widths[1:])
    return [lines[0], f"|{'-' * (widths[0] + 2)}|{rule}|", *lines[1:]]


def show_latency(runs: Sequence[Run], arm: str, server: str) -> str:
    """Medians over rounds of p50, p99 and p99.9 in ms, and of the ratio of p99 to ``nothing``."""
    found = [run.servers[server].whole for run in runs if run.arm == arm]
    if not found:
        return "-"
    columns = zip(*((each.p50, each.p99, each.p999) for each in found), strict=True)
    ratios = list_ratios(runs, arm, server)
    ratio = f"{median(ratios):.2f}" if ratios else "-"
    return " / ".join(f"{median(column):.1f}" for column in columns) + f" ({ratio})"


def show_rest(runs: Sequence[Run], dropped: Sequence[Run], arm: str) -> list[str]:
    """Cells for what is freed, held back, done in the batch, and used by others."""
    found = [run for run in runs if run.arm == arm]
    lost = [run for run in dropped if run.arm == arm]
    others = f"{max(run.others_cores for run in (*found, *lost)):.2f}"
    rounds = f"{len(found)}" + (f", {len(lost)} dropped" if lost else "")
    if not found:
        return ["-", "-", "-", "-", others, rounds]
    files = f"{median(run.batch_files for run in found):g} in {median(run.seconds for run in found):.0f} s"
    idle_cores = median(run.idle_cores for run in found)
    return [
        f"{median(run.freed_ratio for run in found):.2f}",
        f"{median(run.held_back_ratio for run in found):.2%}",
        f"{median(run.batch_cores for run in found):.2f}" + (f", {idle_cores:.2f} idle" if idle_cores else ""),
        files if any(run.batch_files for run in found) else "-",
        others,
        rounds,
    ]


def show(runs: Sequence[Run], most_others: float) -> str:
    """The tables and the bounds. ``runs`` may be of several sessions whose rounds have numbers of their own."""
    kept, dropped = drop_runs(runs, most_others)
    arms = list(dict.fromkeys(run.arm for run in runs))
    servers = list(dict.fromkeys(server for run in runs for server in run.servers))
    latencies = [["p50 / p99 / p99.9, ms", *servers]]
    latencies += [[arm, *(show_latency(kept, arm, server) for server in servers)] for arm in arms]
    rest = [["medians", "freed of unused", "held back", "batch cores", "files", "others' cores, most", "rounds"]]
    rest += [[arm, *show_rest(kept, dropped, arm)] for arm in arms]
    failed = sum(server.whole.failed for run in kept for server in run.servers.values())
    lines = [*show_rows(latencies), "", *show_rows(rest), ""]
    lines.append(f"In brackets: the median of the ratios of p99 to that of {BASE} in the same round.")
    if any(pair(kept, AGAIN, BASE)):
        noise = ", ".join(f"{server} {find_noise(kept, server):.2f}" for server in servers)
        lines.append(f"Noise, the worst ratio of {BASE} to {BASE} in a round: {noise}.")
    lines += [f"{failed} requests failed."] if failed else []
    lines += [
        f"Dropped, others used more than {most_others:g} cores: {run.arm}, round {run.round}: {run.others_cores:.2f}"
        for run in dropped
    ]
    return "\n".join([*lines, *judge(kept)])
