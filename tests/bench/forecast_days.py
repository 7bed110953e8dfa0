"""How often operations start within the interval that was foretold: generated days, in virtual time.

A day is lived by the real state with nodes that obey: users of several kinds start operations through the day, run
times are drawn from distributions that the forecast does not know, limits are lowered. At each arrival a forecast is
made of the state as it is then, in a child of the process, from what the state knows of the past; later it is compared
with what happened.

    python tests/bench/forecast_days.py [--starts 1000] [--mix day|bursty|heavy] [--seed 1] [--plot FILE] [--check]
"""

from __future__ import annotations

import argparse
import gc
import math
import random
import statistics
import sys
from pathlib import Path
from typing import Any

import msgspec

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scheduler_world import EASY, World

from cpumond.scheduler.forecast.ahead import Limits, foretell
from cpumond.scheduler.forecast.fork import Child
from cpumond.scheduler.forecast.forward import Course, Forward, Pace
from cpumond.scheduler.forecast.model import Forecast
from cpumond.scheduler.model import OperationRecord, Task
from cpumond.scheduler.operations import StartOperation
from cpumond.scheduler.state.commands import prepare

HOUR_S = 3600.0
WARM_S = 2 * HOUR_S
STEP_S = 5.0
NODES, CORES = 6, 8.0
MIXES: dict[str, dict[str, Any]] = {
    "day": {"sigma": 0.6, "burst": 1, "swing": 0.6},
    "bursty": {"sigma": 0.5, "burst": 6, "swing": 0.2},
    "heavy": {"sigma": 1.3, "burst": 1, "swing": 0.4},
}
USERS = {
    # user: pool, median run time in seconds, jobs, cores of each, share of all arrivals
    "ann": ("research", 400.0, (2, 6), 2.0, 0.3),
    "bob": ("research", 90.0, (1, 8), 1.0, 0.3),
    "cyd": ("reports", 240.0, (1, 4), 2.0, 0.25),
    "dan": ("night", 900.0, (4, 12), 1.0, 0.15),
}
LOAD = 0.97


class Truth:
    """What happens: the forecast knows neither the distributions nor the seed."""

    def __init__(self, rng: random.Random, mix: dict[str, Any]) -> None:
        self.rng, self.mix = rng, mix
        self.run_s: dict[tuple[str, str], float] = {}

    def left_s(self, record: OperationRecord, task: Task, ran_s: float) -> float:
        median_s = USERS[record.user][1]
        return median_s * math.exp(self.rng.gauss(0.0, self.mix["sigma"]))

    def limit_of(self, record: OperationRecord, task: Task) -> tuple[float, float]:
        return self.rng.uniform(0.4, 1.0), 30.0

    def next_arrival(self, after: float) -> tuple[float, OperationRecord] | None:
        return None


def mean_core_s(mix: dict[str, Any]) -> float:
    """Core-seconds of an operation, on average, at the limits that its jobs settle at."""
    spread = math.exp(mix["sigma"] ** 2 / 2.0)
    return sum(
        part * median_s * spread * (low + high) / 2.0 * cores * 0.75
        for _, median_s, (low, high), cores, part in USERS.values()
    )


class Day(Forward):
    """A run ahead that is the truth: operations are started by users, and each start is foretold."""

    def __init__(self, world: World, rng: random.Random, mix: dict[str, Any], starts: int) -> None:
        super().__init__(world.state, world.now, Pace(STEP_S, STEP_S, world.now, {}), Truth(rng, mix))
        self.rng, self.mix, self.wanted = rng, mix, starts
        self.forecasts: dict[str, Forecast] = {}
        self._detail = 0.0
        self._exact_s = math.inf
        rate = LOAD * NODES * CORES / mean_core_s(mix)
        self.gap_s = mix["burst"] / rate
        self._due = self.now

    def live(self) -> Course:
        # Users' arrivals are events of this run's own.
        self._expect_user()
        return self.run(self.now + 60 * HOUR_S, enough=lambda: len(self.forecasts) >= self.wanted)

    def _expect_user(self) -> None:
        hour = (self.now % 86_400.0) / HOUR_S
        swing = 1.0 + self.mix["swing"] * math.sin(2 * math.pi * (hour - 9.0) / 24.0)
        self._at(self.now + self.rng.expovariate(1.0 / self.gap_s) / swing, "arrival")

    def _expect_arrival(self, after: float) -> None:
        pass

    def _arrive(self, like: OperationRecord) -> None:
        for _ in range(self.rng.randint(1, 2 * self.mix["burst"] - 1)):
            self._start()
        self._expect_user()

    _next_arrival: Any = None

    def _start(self) -> None:
        rng = self.rng
        user = rng.choices(list(USERS), [part for *_, part in USERS.values()])[0]
        pool, _, (low, high), cores, _ = USERS[user]
        task = {"job_count": rng.randint(low, high), "cpu_limit": cores}
        spec = {"pool": pool, "title": f"{user}'s {rng.randint(1, 10_000)}", "tasks": {"main": task}}
        change = prepare(self.state, StartOperation(spec), user, self.now, self._new_id)
        self._apply(change)
        if self.now - self.course.began > WARM_S:
            found = self._foretell(change.id)
            if found is not None:
                self.forecasts[change.id] = found

    def _foretell(self, operation_id: str) -> Forecast | None:
        limits = Limits(6 * HOUR_S, 2.0)
        pace = Pace(STEP_S, STEP_S, self._updated_at.get("default", self.now) + STEP_S, dict(self._updated_at))
        child = Child(
            lambda send: foretell(self.state, self.now, pace, limits, len(self.forecasts), send, {operation_id})
        )
        for message in child.read_all():
            for found in msgspec.msgpack.decode(message, type=list[Forecast]):
                return found
        return None


def make_world() -> World:
    world = World(EASY, now=1_700_000_000.0, forbid_immediate_operations_in_root=False)
    world.create_pool("research", weight=3, max_running_operation_count=20)
    world.create_pool("reports", weight=2, strong_guarantee_resources={"cpu": 8}, max_running_operation_count=6)
    world.create_pool("night", weight=1, mode="fifo", max_running_operation_count=3)
    for number in range(NODES):
        world.node(f"n{number}", cpu=CORES, memory=2**36)
    return world


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--starts", type=int, default=1000)
    parser.add_argument("--mix", choices=MIXES, default="day")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--plot")
    parser.add_argument("--check", action="store_true")
    given = parser.parse_args()
    gc.disable()
    day = Day(make_world(), random.Random(given.seed), MIXES[given.mix], given.starts)
    course = day.live()
    rows = []
    for operation_id, found in day.forecasts.items():
        began = course.first_starts.get(operation_id)
        if began is not None and found.start_p10 is not None and found.start_p90 is not None:
            rows.append((found.as_of, found.start_p10, found.start_p50, found.start_p90, began))
    tell(given, rows)


def tell(given: argparse.Namespace, rows: list[tuple[float, ...]]) -> None:
    inside = sum(first - STEP_S <= began <= last + STEP_S for _, first, _, last, began in rows)
    waited = [row for row in rows if row[4] - row[0] > 3 * STEP_S or row[3] - row[0] > 3 * STEP_S]
    inside_waited = sum(first - STEP_S <= began <= last + STEP_S for _, first, _, last, began in waited)
    errors = [abs(began - middle) for _, _, middle, _, began in waited]
    waits = [began - as_of for as_of, *_, began in waited]
    share = inside_waited / max(len(waited), 1)
    print(
        f"mix {given.mix}, seed {given.seed}: {len(rows)} starts, {inside / max(len(rows), 1):.1%} inside; "
        f"{len(waited)} that wait: {share:.1%} inside, waited {statistics.median(waits):.0f} s (median), "
        f"error of the median {statistics.median(errors):.0f} s (median)"
    )
    if given.plot:
        Path(given.plot).write_text(draw(waited, given.mix))
    if given.check and not 0.75 <= share <= 0.85:
        sys.exit(1)


def draw(rows: list[tuple[float, ...]], mix: str) -> str:
    """Foretold intervals and what happened, ordered by the middle of what was foretold, as SVG; time is logarithmic."""
    shown = sorted(rows, key=lambda row: row[2] - row[0])[:: max(len(rows) // 250, 1)]
    width, height, left = 760, 300, 46
    low, high = math.log10(5.0), math.log10(20_000.0)

    def y(seconds: float) -> float:
        return height - 30 - (math.log10(max(seconds, 5.0)) - low) / (high - low) * (height - 50)

    title = f'Starts of a generated day (mix "{mix}"): foretold interval (10 to 90 %), and what happened'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif">',
        f'<g font-size="11"><rect width="{width}" height="{height}" fill="#fff"/>',
        f'<text x="{left}" y="14">{title}</text>',
    ]
    for seconds, label in ((10, "10 s"), (60, "1 min"), (600, "10 min"), (3600, "1 h")):
        at = y(seconds)
        parts.append(
            f'<path d="M{left} {at:.1f}H{width - 8}" stroke="#ddd"/><text x="2" y="{at + 4:.1f}">{label}</text>'
        )
    step = (width - left - 12) / max(len(shown), 1)
    for number, (as_of, first, _, last, began) in enumerate(shown):
        x = left + 4 + number * step
        colour = "#2a7" if first - STEP_S <= began <= last + STEP_S else "#c33"
        parts.append(
            f'<path d="M{x:.1f} {y(first - as_of):.1f}V{y(last - as_of):.1f}" stroke="#9bd" '
            f'stroke-width="{max(step - 1, 1):.1f}"/>'
            f'<circle cx="{x:.1f}" cy="{y(began - as_of):.1f}" r="1.8" fill="{colour}"/>'
        )
    return "\n".join([*parts, "</g></svg>\n"])


if __name__ == "__main__":
    main()
