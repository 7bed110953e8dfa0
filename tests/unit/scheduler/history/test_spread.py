"""Rates where heartbeats come less often than points: spread over the time between two heartbeats."""

from __future__ import annotations

import math
from pathlib import Path

import msgspec
import pytest
from history_ticks import integral
from scheduler_world import World

from cpumond.scheduler.history.collector import Collector
from cpumond.scheduler.history.model import OPERATION, POOL, HistoryView, Key
from cpumond.scheduler.history.store import HistoryStore
from cpumond.scheduler.model import ROOT_POOL

COUNTERS = ("cpu_seconds", "ordered_cpu_seconds")
ROOT = Key(POOL, "default", ROOT_POOL)


class Play:
    """A world with a history; each node tells its jobs' counters every ``heartbeat_s`` from its first second on."""

    def __init__(self, folder: Path, tick_s: float, heartbeat_s: float, first_s: list[float]) -> None:
        self.world = World()
        self.world.create_pool("a")
        self.tick_s, self.heartbeat_s, self.first_s = tick_s, heartbeat_s, first_s
        self.operations = []
        for number in range(len(first_s)):
            self.world.node(f"n{number}", 2.0)
            self.operations.append(self.world.start("a", cpu_limit=2.0))
        self.world.settle_down()
        self.start = self.world.now
        self.collector = Collector(self.start, 1000)
        self.store = HistoryStore(str(folder / "history.db"), 1e6, tick_s, 2**24, self.start)
        for number in range(len(first_s)):
            self.tell(f"n{number}", 0.0)

    def run(self, until_s: float, cores: float = 1.0) -> None:
        """Every job uses ``cores``."""
        beats = [
            (first + number * self.heartbeat_s, node)
            for node, first in enumerate(self.first_s)
            for number in range(int((until_s - first) / self.heartbeat_s + 1e-9) + 1)
        ]
        ticks = [(number * self.tick_s, -1) for number in range(1, int(until_s / self.tick_s + 1e-9) + 1)]
        for at, node in sorted(beats + ticks):
            self.world.now = self.start + at
            if node < 0:
                self.take(at)
            else:
                self.tell(f"n{node}", cores * at)

    def take(self, at: float) -> None:
        self.world.now = self.start + at
        tick = self.collector.collect(self.world.state, self.world.now)
        assert tick is not None
        self.store.add(tick)

    def tell(self, node: str, used: float) -> None:
        heartbeat = self.world.nodes[node].heartbeat()
        jobs = [msgspec.structs.replace(job, **dict.fromkeys(COUNTERS, used)) for job in heartbeat.jobs]
        self.world.hear(msgspec.structs.replace(heartbeat, jobs=jobs))

    def read(self, key: Key, since_s: float = 0.0, until_s: float = math.inf, most: int = 1000) -> HistoryView:
        until = min(self.start + until_s, self.world.now)
        return self.store.read(key, self.start + since_s, until, most)


@pytest.mark.parametrize(("tick_s", "heartbeat_s"), [(10.0, 15.0), (10.0, 35.0), (0.2, 1.0), (10.0, 10.0)])
def test_a_point_without_a_heartbeat_is_no_zero_and_the_next_one_is_no_double(tmp_path, tick_s, heartbeat_s):
    play = Play(tmp_path, tick_s, heartbeat_s, [0.4 * heartbeat_s])
    play.run(12 * heartbeat_s)
    for key in (Key(OPERATION, "default", play.operations[0]), Key(POOL, "default", "a"), ROOT):
        used = play.read(key).columns["used_cores"]
        known = [value for value in used if value is not None]
        assert known == pytest.approx([1.0] * len(known), abs=0.01), key
        assert used[: len(known)] == known  # what is not known yet is at the end
        assert 0 <= len(used) - len(known) <= heartbeat_s / tick_s + 1


def test_the_sum_stays_as_the_node_told_it(tmp_path):
    play = Play(tmp_path, 10.0, 25.0, [25.0])
    play.run(310.0)
    assert play.store.sum_up(play.start, play.world.now, None, 10).sums[ROOT].used == pytest.approx(300.0)
    (job,) = play.world.jobs_of(play.operations[0])
    play.world.now = play.start + 315.0
    play.world.nodes["n0"].finish(job.id, **dict.fromkeys(COUNTERS, 315.0))
    play.world.settle_down()
    play.take(320.0)
    play.take(330.0)
    for key in (ROOT, Key(OPERATION, "default", play.operations[0])):
        assert integral(play.read(key), "used_cores") == pytest.approx(315.0)


def test_two_nodes_whose_heartbeats_come_a_little_less_often_than_points(tmp_path):
    play = Play(tmp_path, 0.2, 0.25, [0.03, 0.17])
    play.run(10.0)
    used = [value for value in play.read(ROOT).columns["used_cores"] if value is not None]
    assert used == pytest.approx([2.0] * len(used), rel=0.01)
    assert len(used) > 45


def test_the_newest_point_is_right_where_heartbeats_come_often(tmp_path):
    play = Play(tmp_path, 10.0, 1.0, [0.1, 0.3, 0.6, 0.8])
    play.run(200.0)
    assert play.read(ROOT).columns["used_cores"] == pytest.approx([4.0] * 20, rel=0.01)


def test_coarse_points_have_the_same_rates(tmp_path):
    play = Play(tmp_path, 10.0, 45.0, [45.0])
    play.store.keep_s = (100.0, 1000.0)
    play.run(6000.0)
    view = play.read(ROOT)
    assert max(view.intervals) >= 60.0
    known = [value for value in view.columns["used_cores"] if value is not None]
    assert known == pytest.approx([1.0] * len(known), rel=0.05)
    assert len(view.times) - len(known) <= 6


def test_a_part_of_the_history_has_the_rates_of_the_whole(tmp_path):
    play = Play(tmp_path, 10.0, 35.0, [7.0])
    play.run(700.0)
    part = play.read(ROOT, 203.0, 401.0).columns["used_cores"]
    assert len(part) >= 19
    assert part == pytest.approx([1.0] * len(part), abs=0.01)


def test_a_last_point_of_many_that_is_not_known_yet_does_not_pull_the_line_down(tmp_path):
    play = Play(tmp_path, 1.0, 15.0, [15.0])
    play.run(607.0)
    used = play.read(ROOT, most=60).columns["used_cores"]
    known = [value for value in used if value is not None]
    assert 50 < len(known) <= len(used) <= 60
    assert known == pytest.approx([1.0] * len(known), abs=0.01)


def test_a_node_that_was_silent_tells_of_all_that_time(tmp_path):
    play = Play(tmp_path, 10.0, 1.0, [0.5])
    play.run(100.0)
    for number in range(11, 16):
        play.take(10.0 * number)
    assert play.read(ROOT).columns["used_cores"][-5:] == [None] * 5
    play.world.now = play.start + 154.0
    play.tell("n0", 154.0)
    play.take(160.0)
    used = play.read(ROOT).columns["used_cores"]
    assert [*used[5:9], *used[10:15]] == pytest.approx([1.0] * 9, abs=0.01)
