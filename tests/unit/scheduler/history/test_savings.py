"""Savings: what runs beyond the orders that fit, weeks, and the interval of the control group against a known truth."""

import math
import random
from datetime import UTC, datetime
from pathlib import Path

import pytest
from scheduler_world import PlayedNode, World

from cpumond.core.wire import AgentAbout
from cpumond.scheduler.history import savings
from cpumond.scheduler.history.collector import Collector
from cpumond.scheduler.history.extras import split_orders
from cpumond.scheduler.history.model import DAY_S, HOUR_S
from cpumond.scheduler.history.report import list_pools
from cpumond.scheduler.history.store import HistoryStore


@pytest.mark.parametrize(
    ("orders", "capacity", "parts"),
    [
        ([], 4.0, []),
        ([2.0, 2.0], 4.0, [0.0, 0.0]),
        ([4.0, 4.0, 2.0], 6.0, [0.0, 0.5, 1.0]),
        ([8.0], 4.0, [0.5]),
        ([1.0, 0.0, 1.0], 0.0, [1.0, 0.0, 1.0]),
    ],
)
def test_the_part_beyond_what_fits(orders: list[float], capacity: float, parts: list[float]) -> None:
    assert split_orders(orders, capacity) == parts


def test_weeks_begin_on_monday() -> None:
    wednesday, tuesday = datetime(2026, 3, 4, 12, tzinfo=UTC), datetime(2026, 3, 10, 6, tzinfo=UTC)
    monday = datetime(2026, 3, 9, tzinfo=UTC)
    first, second = savings.list_weeks(wednesday.timestamp(), tuesday.timestamp())
    assert first == (wednesday.timestamp(), monday.timestamp())
    assert second == (monday.timestamp(), tuesday.timestamp())


@pytest.mark.parametrize(("freedom", "quantile"), [(1, 12.7062), (4, 2.7764), (10, 2.2281), (11, 2.2010), (31, 2.0395)])
def test_students_quantile(freedom: int, quantile: float) -> None:
    assert savings.student_95(freedom) == pytest.approx(quantile, abs=0.01)


def draw_days(seed: int, effect: float) -> list[savings.DaySums]:
    """Operations of very different sizes, whose jobs are alike; what lowering does differs from day to day."""
    rng = random.Random(seed)
    days = []
    for _ in range(14):
        its_effect, sums = effect * rng.lognormvariate(-0.125, 0.5), [0.0] * 4
        for _ in range(10):
            usual, size = 0.01 * rng.lognormvariate(0.0, 0.8), rng.lognormvariate(0.0, 1.0)
            for _ in range(rng.randint(1, 30)):
                ordered = size * rng.lognormvariate(0.0, 0.3)
                is_control = rng.random() < 0.15
                ratio = usual * rng.lognormvariate(0.0, 0.5) + (0.0 if is_control else its_effect)
                sums[0 if is_control else 2] += ratio * ordered
                sums[1 if is_control else 3] += ordered
        days.append(savings.DaySums(*sums))
    return days


def covers(seed: int, effect: float) -> bool:
    found = savings.compare(draw_days(seed, effect))
    assert found.low is not None
    assert found.high is not None
    assert found.high - found.low < 0.02 + effect  # it is of use, too
    return found.low <= effect <= found.high


@pytest.mark.parametrize("effect", [0.0, 0.005, 0.05])
def test_the_interval_covers_the_truth(effect: float) -> None:
    assert sum(covers(seed, effect) for seed in range(20)) >= 18


def test_the_interval_is_around_the_difference_of_all_days() -> None:
    days = [savings.DaySums(control, 10.0, others, 10.0) for control, others in ((3.0, 5.0), (3.2, 5.4), (2.8, 4.6))]
    found = savings.compare(days)
    # Nothing is cut off: Student's interval of the mean of the differences 0.2, 0.22 and 0.18.
    reach = 4.303 * 0.02 / math.sqrt(3.0)
    assert (found.low, found.high) == pytest.approx((0.2 - reach, 0.2 + reach))
    alone = savings.DaySums(0.0, 0.0, 90.0, 100.0)
    found = savings.compare([*days, alone])
    assert (found.control, found.others) == pytest.approx((0.3, 105.0 / 130.0))
    assert found.low is not None
    assert found.high is not None
    assert found.low <= found.others - found.control <= found.high
    found = savings.compare([days[0], alone])
    assert (found.low, found.high) == (None, None)


class Site:
    def __init__(self, directory: Path) -> None:
        self.world = World()
        self.store = HistoryStore(str(directory / "history.db"), 1e6, 10.0, 2**28, self.world.now)
        self.collector = Collector(self.world.now, 1000)

    def step(self, seconds: float = 10.0) -> None:
        self.world.step(seconds)
        self.take()

    def take(self) -> None:
        tick = self.collector.collect(self.world.state, self.world.now)
        assert tick is not None
        self.store.add(tick)

    def view(self, price: float = 0.0) -> savings.SavingsView:
        times = (0.0, self.world.now)
        weeks = [(times, self.store.sum_days(*times))]
        days = self.store.read_days(savings.list_arms(weeks), *times)
        known = {name: list(list_pools(tree)) for name, tree in self.world.state.trees.items()}
        return savings.make_savings(known, weeks, days, None, price, "EUR")


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


def use(site: Site, node: PlayedNode, steps: int) -> None:
    for _ in range(steps):
        for played in node.jobs.values():
            played.cpu_seconds = (played.cpu_seconds or 0.0) + 5.0
            played.ordered_cpu_seconds = (played.ordered_cpu_seconds or 0.0) + 10.0 * played.order.cpu_limit
        site.step()


def test_use_beyond_the_requests_is_counted_for_its_pool_and_those_above(site: Site) -> None:
    world = site.world
    node = world.node("n1", 4.0)
    world.create_pool("team")
    world.create_pool("late", "team")
    first = world.start("team", jobs=2, cpu=2.0)
    site.step()
    for job in world.jobs_of(first):
        node.limit(job.id, 1.0)
    site.step()
    world.start("late", cpu=1.0)
    site.step()
    use(site, node, 360)
    [tree] = site.view(price=2.0).trees
    rows = {row.name: row for row in tree.total}
    assert set(rows) == {"<Root>", "team", "late"}
    for row in rows.values():
        assert (row.extra_used, row.extra_ordered) == pytest.approx((0.5, 1.0), rel=0.01)
        assert (row.extra_jobs, row.money) == (1.0, pytest.approx(2.0 * row.gain))
    assert (rows["late"].parent, rows["team"].parent) == ("team", "<Root>")
    assert tree.comparison is None
    assert savings.at_price(site.view(), 3.0).trees[0].total[0].money == pytest.approx(3.0 * rows["late"].gain)


def run_beyond_orders(site: Site) -> tuple[PlayedNode, str]:
    """Two jobs of a core each on a node of one: the later one is extra."""
    world = site.world
    node = world.node("n1", 1.0)
    world.create_pool("team")
    first = world.start("team")
    site.step()
    node.limit(world.jobs_of(first)[0].id, 0.0)
    site.step()
    extra = world.start("team")
    site.step()
    return node, world.jobs_of(extra)[0].id


def test_a_scheduler_that_takes_over_does_not_count_what_was_before(site: Site) -> None:
    node, _ = run_beyond_orders(site)
    use(site, node, 360)
    before = site.view().trees[0].total[0]
    assert (before.extra_used, before.extra_jobs) == (pytest.approx(0.5, rel=0.02), 1.0)
    site.world.restart()
    site.collector = Collector(site.world.now, 1000)
    site.world.now += 10.0
    site.take()  # before the node has told anything
    use(site, node, 36)
    after = site.view().trees[0].total[0]
    assert after.extra_used == pytest.approx(1.1 * before.extra_used, rel=0.02)
    assert after.extra_ordered == pytest.approx(1.1 * before.extra_ordered, rel=0.02)
    assert after.extra_jobs == 1.0


def test_counters_that_a_crash_of_the_agent_set_back_take_nothing_away(site: Site) -> None:
    node, extra = run_beyond_orders(site)
    use(site, node, 36)
    before = site.view().trees[0].total[0]
    node.jobs[extra].ordered_cpu_seconds = 0.0
    site.step()
    use(site, node, 36)
    assert site.view().trees[0].total[0].extra_ordered == pytest.approx(2.0 * before.extra_ordered, rel=0.05)


def test_pools_that_are_gone_are_forgotten(site: Site) -> None:
    node = site.world.node("n1", 64.0)
    for number in range(20):
        operation = site.world.start("", user=f"user-{number}")
        site.step()
        assert len(site.world.tree().pools) == 1
        for job_id in list(node.jobs):
            node.finish(job_id)
        site.step()
        assert site.world.record(operation).is_finished
    assert len(site.collector._seen) == len(site.world.tree().pools) + 1


def test_orders_of_others_leave_less_that_fits(site: Site) -> None:
    node = site.world.node("n1", 4.0)
    node.has(3.0)
    site.world.create_pool("team")
    operation = site.world.start("team", cpu=1.0)
    site.step()
    [job] = site.world.jobs_of(operation)
    assert site.view().trees[0].total[0].extra_jobs == 0.0
    node.has(1.0, "another")
    site.step()
    site.step()
    assert job.is_active
    assert site.view().trees[0].total[0].extra_jobs == 1.0


def test_a_job_that_ended_before_its_mode_was_known_is_in_neither_group(site: Site) -> None:
    node = site.world.node("n1", 64.0)
    site.world.create_pool("team")
    site.world.state.nodes["n1"].about = AgentAbout("0.2.0", "quota", "quota", control_group_ratio=0.5)
    site.world.start("team")
    site.world.update()
    node.beat()
    [job_id] = node.jobs
    node.finish(job_id, ordered_cpu_seconds=3.0)
    site.step()
    assert not site.world.tree().trial


def test_jobs_of_the_control_group_are_compared_with_others_of_their_hosts(site: Site) -> None:
    world = site.world
    world.now = 20 * DAY_S - 25.0  # two of the steps below end before midnight, two after it
    world.create_pool("team", max_running_operation_count=100, max_operation_count=100)
    nodes = [world.node(f"n{number}", 64.0) for number in range(2)]
    world.state.nodes["n0"].about = AgentAbout("0.2.0", "quota", "quota", control_group_ratio=0.5)
    for _ in range(60):
        world.start("team", jobs=2, cpu=1.0)
    site.step()
    for _ in range(3):
        for node in nodes:
            for number, played in enumerate(node.jobs.values()):
                is_control = number % 2 == 0
                played.mode = "control" if is_control else "reclaim"
                held_back = 0.0 if is_control else 0.1
                played.ordered_cpu_seconds = (played.ordered_cpu_seconds or 0.0) + 10.0
                played.throttled_cpu_seconds = (played.throttled_cpu_seconds or 0.0) + held_back
        site.step()
    [tree] = site.view().trees
    found = tree.comparison
    assert found is not None
    # One of the two nodes has a control group: what runs on the other is in neither arm.
    in_all = sum(job.ordered_cpu_seconds or 0.0 for job in nodes[0].jobs.values()) / HOUR_S
    assert found.control_ordered + found.others_ordered == pytest.approx(in_all)
    assert (found.held_back.control, found.held_back.others) == pytest.approx((0.0, 0.01))
    assert found.held_back.low is not None
    assert found.held_back.low > 0.0
    assert found.days == 2
    assert "throttled for 1.00 % of their requested core-hours, jobs of the control group for 0.00 %" in found.sentence
