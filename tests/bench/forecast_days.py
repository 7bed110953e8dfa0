"""How often operations start within the interval that was foretold: generated days, in virtual time.

A day is lived by the real state with nodes that obey: users of several kinds start operations through the day, run
times are drawn from distributions that the forecast does not know, limits are lowered. At each arrival a forecast is
made of the state as it is then, in a child of the process, from what the state knows of the past. Then the intervals
are corrected in the order of time as a scheduler does, each by the starts before it, and compared with what happened.

    python tests/bench/forecast_days.py [--starts 1000] [--mix day|bursty|heavy] [--seed 1] [--save FILE]
    python tests/bench/forecast_days.py --read docs/pictures/forecast.json [--plot docs/pictures/forecast.svg] [--check]
"""

import argparse
import gc
import json
import math
import random
import statistics
import sys
from heapq import heappop, heappush
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scheduler_world import EASY, World

from cpumond.scheduler.answers.ahead import RunBudget, send_forecasts
from cpumond.scheduler.answers.calibration import Calibration, Interval, is_inside
from cpumond.scheduler.model import OperationRecord, Task
from cpumond.scheduler.model.forecast import Forecast
from cpumond.scheduler.settings.operations import StartOperation
from cpumond.scheduler.state.commands import prepare
from cpumond.scheduler.trial import fork
from cpumond.scheduler.trial.fork import Child
from cpumond.scheduler.trial.forward import Course, Forward, Pace

HOUR_S = 3600.0
WARM_S = 4 * HOUR_S
STEP_S = 5.0
AT_ONCE_S = 15.0
NODES, CORES = 6, 8.0
MIXES: dict[str, dict[str, Any]] = {
    "day": {"load": 0.9, "sigma": 0.6, "burst": 1, "swing": 0.5},
    "bursty": {"load": 0.9, "sigma": 0.5, "burst": 6, "swing": 0.2},
    "heavy": {"load": 0.9, "sigma": 1.3, "burst": 1, "swing": 0.4},
}
USERS = {
    # user: pool, median run time in seconds, jobs, cores of each, share of all arrivals
    "ann": ("research", 400.0, (2, 6), 2.0, 0.3),
    "bob": ("research", 90.0, (1, 8), 1.0, 0.3),
    "cyd": ("reports", 240.0, (1, 4), 2.0, 0.25),
    "dan": ("night", 900.0, (4, 12), 1.0, 0.15),
}


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
        part * median_s * spread * (low + high) / 2.0 * cores * 0.7
        for _, median_s, (low, high), cores, part in USERS.values()
    )


class Day(Forward):
    """A run ahead that is the truth: operations are started by users, and each start is foretold."""

    def __init__(self, world: World, rng: random.Random, mix: dict[str, Any], starts: int, budget_s: float) -> None:
        super().__init__(world.state, world.now, Pace(STEP_S, STEP_S, world.now, {}), Truth(rng, mix))
        self.rng, self.mix, self.wanted, self.budget_s = rng, mix, starts, budget_s
        self.forecasts: dict[str, Forecast] = {}
        self._detail = 0.0
        self._exact_s = 0.0
        rate = mix["load"] * NODES * CORES / mean_core_s(mix)
        self.gap_s = mix["burst"] / rate
        self._due = self.now

    def _new_id(self) -> str:
        # Not what a run ahead of this one calls its own.
        return f"day-{next(self._ids)}"

    def live(self) -> Course:
        # Users' arrivals are events of this run's own.
        self._expect_user()
        return self.run(self.now + 120 * HOUR_S, enough=self._is_over)

    def _is_over(self) -> bool:
        return len(self.forecasts) >= self.wanted and self.forecasts.keys() <= self.course.first_starts.keys()

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
        task = {"command": "true", "job_count": rng.randint(low, high), "cpu_limit": cores}
        spec = {"pool": pool, "title": f"{user}'s {rng.randint(1, 10_000)}", "tasks": {"main": task}}
        change = prepare(self.state, StartOperation(spec), user, self.now, self._new_id)
        self._apply(change)
        if self.now - self.course.began > WARM_S and len(self.forecasts) < self.wanted:
            found = self._predict(change.id)
            if found is not None:
                self.forecasts[change.id] = found

    def _predict(self, operation_id: str) -> Forecast | None:
        limits = RunBudget(12 * HOUR_S, self.budget_s)
        pace = Pace(STEP_S, STEP_S, self._updated_at.get("default", self.now) + STEP_S, dict(self._updated_at))
        child = Child(
            lambda send: send_forecasts(self.state, self.now, pace, limits, len(self.forecasts), send, {operation_id})
        )
        for message in child.read_all():
            for found in msgspec.msgpack.decode(message, type=list[Forecast]):
                return found
        return None


def make_world() -> World:
    world = World(EASY, now=1_700_000_000.0 + 7 * HOUR_S, forbid_immediate_operations_in_root=False)
    world.create_pool("research", weight=3, max_running_operation_count=8, max_operation_count=5000)
    world.create_pool(
        "reports",
        weight=2,
        strong_guarantee_resources={"cpu": 8},
        max_running_operation_count=3,
        max_operation_count=5000,
    )
    world.create_pool("night", weight=1, mode="fifo", max_running_operation_count=4, max_operation_count=5000)
    for number in range(NODES):
        world.node(f"n{number}", cpu=CORES, memory=2**36)
    return world


class Start(NamedTuple):
    """A start that was foretold: seconds from the forecast."""

    raw: Interval
    told: Interval
    began: float

    @property
    def waited(self) -> bool:
        """Whether it began later than at once, or was said to: a scheduler foretells nothing of others in time."""
        return self.began > AT_ONCE_S or self.raw.last is None or self.raw.last > AT_ONCE_S


def replay(days: list[list[list[Any]]]) -> list[Start]:
    """What a scheduler that goes on from day to day would have told, with what it knew at each moment."""
    calibration, found = Calibration(), []
    for rows in days:
        known: list[tuple[float, int, Start]] = []
        for number, (as_of, *times, began) in enumerate(sorted(rows, key=itemgetter(0))):
            while known and known[0][0] <= as_of:
                calibration.take(*heappop(known)[2])
            raw = Interval(*times)
            start = Start(raw, calibration.correct_interval(raw, 0.0), began)
            found.append(start)
            if start.waited:
                heappush(known, (as_of + began, number, start))
    return found


def print_accuracy(mix: str, starts: list[Start]) -> float:
    """Print how it went; the part of those that waited, and were foretold a beginning, which began inside."""
    foretold = [each for each in starts if each.told.first is not None]
    waited = [each for each in foretold if each.waited]
    inside = [is_inside(each.told, each.began) for each in waited]
    raw = [is_inside(each.raw, each.began) for each in waited]
    everything = [is_inside(each.told, each.began) for each in foretold]
    known = [each for each in waited if None not in each.told]
    errors = [abs(each.began - (each.told.middle or 0.0)) for each in known]
    spans = [(each.told.last or 0.0) - (each.told.first or 0.0) for each in known]
    print(
        f"mix {mix}: {len(starts)} starts, {len(starts) - len(foretold)} of them foretold to be later than was looked "
        f"ahead, {sum(everything) / len(foretold):.1%} of the others inside; {len(waited)} of these waited "
        f"(median {statistics.median(each.began for each in waited):.0f} s): {sum(inside) / len(waited):.1%} inside, "
        f"{sum(raw) / len(waited):.1%} before; medians: error of the middle {statistics.median(errors):.0f} s, "
        f"length of an interval {statistics.median(spans):.0f} s"
    )
    return sum(inside) / len(waited)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--starts", type=int, default=1000)
    parser.add_argument("--mix", choices=MIXES, default="day")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--budget", type=float, default=0.2, help="CPU seconds of a forecast, if that will do")
    parser.add_argument("--save", type=Path, help="where to add what was foretold and what happened")
    parser.add_argument("--read", type=Path, help="such a file: days that were lived before")
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--check", action="store_true", help="exit code 1 when not 75 to 85 %% are inside")
    given = parser.parse_args()
    days = json.loads(given.read.read_text()) if given.read else [live_a_day(given)]
    if given.save:
        kept = json.loads(given.save.read_text()) if given.save.exists() else []
        given.save.write_text("[\n" + ",\n".join(json.dumps(each) for each in [*kept, *days]) + "\n]\n")
    mixes = {mix: [day["rows"] for day in days if day["mix"] == mix] for mix in MIXES}
    replayed = {mix: replay(rows) for mix, rows in mixes.items() if rows}
    shares = [print_accuracy(mix, starts) for mix, starts in replayed.items()]
    if given.plot:
        given.plot.write_text(draw(replayed))
    if given.check and not all(0.75 <= share <= 0.85 for share in shares):
        sys.exit(1)


def live_a_day(given: argparse.Namespace) -> dict[str, Any]:
    """Rows of a day: when it was foretold, then p10, p50, p90 and what happened, in seconds from then."""
    gc.disable()
    fork.give_way = lambda _: None  # nobody waits for anything else
    day = Day(make_world(), random.Random(given.seed), MIXES[given.mix], given.starts, given.budget)
    course = day.live()
    rows = []
    for operation_id, found in day.forecasts.items():
        began, as_of = course.first_starts[operation_id], found.as_of
        times = (found.start_p10, found.start_p50, found.start_p90, began)
        rows.append([round(as_of - course.began, 1), *(None if at is None else round(at - as_of, 1) for at in times)])
    return {"mix": given.mix, "seed": given.seed, "rows": rows}


def draw(days: dict[str, list[Start]]) -> str:
    """Foretold intervals and what happened, ordered by the middle of what was foretold, as SVG; time is logarithmic."""
    width, height, left = 760, 240, 46
    low, high = math.log10(5.0), math.log10(20_000.0)

    def y(seconds: float) -> float:
        return height - 20 - (math.log10(max(seconds, 5.0)) - low) / (high - low) * (height - 50)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height * len(days)}" font-family="sans-serif">',
        f'<g font-size="11"><rect width="{width}" height="{height * len(days)}" fill="#fff"/>',
    ]
    for row, (mix, starts) in enumerate(days.items()):
        waited = [each for each in starts if each.waited and None not in each.told]
        shown = sorted(waited, key=lambda each: each.told.middle or 0.0)[:: max(len(waited) // 240, 1)]
        share = sum(is_inside(each.told, each.began) for each in waited) / len(waited)
        title = f"Mix {mix}: foretold wait (10 to 90 %), and what happened; {share:.0%} of {len(waited)} inside"
        parts.append(f'<g transform="translate(0 {row * height})"><text x="{left}" y="18">{title}</text>')
        for seconds, label in ((10, "10 s"), (60, "1 min"), (600, "10 min"), (3600, "1 h"), (14400, "4 h")):
            at = y(seconds)
            line = f'<path d="M{left} {at:.1f}H{width - 8}" stroke="#ddd"/>'
            parts.append(f'{line}<text x="2" y="{at + 4:.1f}">{label}</text>')
        step = (width - left - 12) / max(len(shown), 1)
        for number, (_, told, began) in enumerate(shown):
            x = left + 4 + number * step
            colour = "#2a7" if is_inside(told, began) else "#c33"
            parts.append(
                f'<path d="M{x:.1f} {y(told.first or 0.0):.1f}V{y(told.last or 0.0):.1f}" stroke="#9bd" '
                f'stroke-width="{max(step - 1, 1):.1f}"/>'
                f'<circle cx="{x:.1f}" cy="{y(began):.1f}" r="1.8" fill="{colour}"/>'
            )
        parts.append("</g>")
    return "\n".join([*parts, "</g></svg>\n"])


if __name__ == "__main__":
    main()
