"""Core-hour budgets with a real scheduler on a real store: what is counted, told, kept, stored (semantics.md 2.15)."""

import datetime
import re
from typing import Any

import pytest
from scheduler_world import ServedNode, StillClock, World, make_task
from watched_store import make_scheduler

from cpumond.api import overview
from cpumond.api.pool_views import view_pool, view_tree
from cpumond.core.wire import FinishedJob
from cpumond.scheduler.access import Rights
from cpumond.scheduler.answers.causes import Causes
from cpumond.scheduler.answers.operation import explain_operation
from cpumond.scheduler.elements.account import Account, view_budget
from cpumond.scheduler.model import CommandError
from cpumond.scheduler.model.budget import Budget
from cpumond.scheduler.program.exporter import MetricsText
from cpumond.scheduler.rights.users import User
from cpumond.scheduler.settings.commands import ChangePool, ChangeTree, CreatePool, Edit, RemovePool
from cpumond.scheduler.settings.operations import StartOperation, UpdateOperation
from cpumond.scheduler.state.reports import count_held

HOUR_S = 3600.0
NOON_S = datetime.datetime(2026, 11, 10, 12, tzinfo=datetime.UTC).timestamp()
PERIODS = ("month", "week", "day", "rolling")


class Cluster:
    """A node of four cores and two pools, of which "a" may spend ten core-hours a month."""

    def __init__(self, store: Any) -> None:
        self.store, self.clock = store, StillClock(NOON_S)
        self.scheduler = make_scheduler(store, self.clock)
        self.node = ServedNode(self.scheduler)

    async def begin(self, **budget: Any) -> None:
        await self.set_tree(max_unpreemptible_running_job_count=0, fair_share_starvation_timeout=1e9)
        for name, attributes in (("a", {"budget": {"core_hours": 10, **budget}}), ("b", {})):
            await self.scheduler.execute(CreatePool("default", name, "<Root>", attributes), "root")
        await self.node.register()

    async def set_tree(self, **options: Any) -> None:
        edits = tuple(Edit((name,), value) for name, value in options.items())
        await self.scheduler.execute(ChangeTree("default", edits), "root")

    async def set_budget(self, **budget: Any) -> None:
        edits = tuple(Edit(("budget", name), value) for name, value in budget.items())
        await self.scheduler.execute(ChangePool("default", "a", edits), "root")

    async def start(self, pool: str, jobs: int = 4, user: str = "ann") -> str:
        tasks = {"t": make_task(jobs, memory_limit=1)}
        command = StartOperation({"tasks": tasks, "pool": pool, "max_failed_job_count": 99})
        return (await self.scheduler.execute(command, user)).id

    async def begin_full(self, hours: float = 0.0, **budget: Any) -> None:
        """Then an operation of pool "a" fills the node, and so long passes."""
        await self.begin(**budget)
        await self.start("a")
        await self.run()
        await self.run(hours)

    async def run(self, hours: float = 0.0) -> None:
        """Time passes, in which each job uses half of its order; then two rounds."""
        self.clock.at += hours * HOUR_S
        for job in self.node.jobs.values():
            job.ordered_cpu_seconds = self.clock.at - job.started_at
            job.cpu_seconds = job.ordered_cpu_seconds / 2
        for _ in range(2):
            await self.node.beat()
            await self.scheduler.update_all()

    async def events(self) -> list[str]:
        """Those of budgets, oldest first."""
        return [event.text for _, event in reversed(await self.scheduler.event_log.read(["kind:budget"]))]

    def restart(self, ahead_s: float = 0.0) -> None:
        """Killed; another run, whose clock differs, reads what is stored."""
        self.clock = StillClock(self.clock.at + ahead_s)
        self.scheduler = self.node.scheduler = make_scheduler(self.store, self.clock)

    def end(self, number: int) -> None:
        for job_id, job in list(self.node.jobs.items())[:number]:
            facts = {"finish_time": self.clock.at, "ordered_cpu_seconds": job.ordered_cpu_seconds}
            self.node.finish(job_id, start_time=job.started_at, **facts)

    def account(self, name: str = "a") -> Account:
        return next(each for each in self.scheduler.state.budgets.values() if each.name == name)

    def jobs_in(self, pool: str) -> int:
        return sum(job.order.pool == pool for job in self.node.jobs.values())

    def alerts(self) -> list[str]:
        found = overview.find_alerts(self.scheduler.state, self.clock.at).alerts
        return [alert.code for alert in found if "budget" in alert.code]


@pytest.fixture
def cluster(store: Any) -> Cluster:
    return Cluster(store)


async def test_at_80_and_at_100_percent_there_is_an_event_and_an_alert(cluster):
    """`warn`: nothing else follows."""
    await cluster.begin_full(1.9)
    assert (await cluster.events(), cluster.alerts()) == ([], [])
    await cluster.run(0.2)
    low = 'the budget of pool "a" in tree "default" is low: 8.4 of 10 core-hours ordered'
    assert (await cluster.events(), cluster.alerts()) == ([low], ["budget_low"])
    await cluster.run(0.4)
    spent = 'the budget of pool "a" in tree "default" is spent, 10 of 10 core-hours ordered: nothing is withheld'
    assert (await cluster.events(), cluster.alerts()) == ([low, spent], ["budget_spent"])
    cluster.end(2)
    await cluster.start("a")
    await cluster.run(0.1)
    assert cluster.jobs_in("a") == 4
    cluster.restart()
    await cluster.scheduler.update_all()
    assert cluster.alerts() == ["budget_spent"]  # before any node is heard of
    await cluster.node.register()
    await cluster.run()
    assert await cluster.events() == [low, spent]


async def test_stop_lets_what_runs_go_on_and_starts_nothing_and_why_names_it(cluster):
    await cluster.begin_full(2.5, when_spent="stop")
    waiting = await cluster.start("a")
    cluster.end(1)
    await cluster.run()
    assert cluster.jobs_in("a") == 3
    state = cluster.scheduler.state
    element = state.operations[waiting].elements["default"]
    cause = Causes(state.trees["default"]).of(element).cause
    told = "the core-hour budget of pool a is spent: no new job starts until its next period or until it is raised"
    assert (cause.key, cause.text) == ("budget:pool a", told)
    lines = explain_operation(state, element.operation.record, cluster.clock.at, {}).trees[0].lines
    assert any("10 of 10 core-hours ordered this month (100%), spent: no new job starts" in line for line in lines)
    await cluster.set_budget(core_hours=100)  # live
    await cluster.run()
    assert cluster.jobs_in("a") == 4
    assert (await cluster.events())[-1].endswith("is enough again: 10 of 100 core-hours ordered")


async def test_leftover_gives_it_what_others_do_not_want_and_nothing_else(cluster):
    await cluster.begin(when_spent="leftover")
    await cluster.scheduler.execute(
        ChangePool("default", "a", (Edit(("strong_guarantee_resources",), {"cpu": 3}), Edit(("weight",), 9))), "root"
    )
    await cluster.start("a", jobs=9)
    await cluster.run()
    await cluster.run(2.5)
    share = lambda name: cluster.scheduler.state.trees["default"].pools[name].fair_share[1] * 4  # noqa: E731
    assert share("a") == pytest.approx(4)  # nobody else wants anything
    await cluster.start("b", jobs=3)
    await cluster.run()
    assert (share("a"), share("b")) == (pytest.approx(1, abs=1e-3), pytest.approx(3, abs=1e-3))
    cluster.end(4)
    await cluster.run()
    assert (cluster.jobs_in("a"), cluster.jobs_in("b")) == (1, 3)
    await cluster.start("b", jobs=5)
    await cluster.run()
    assert share("a") == pytest.approx(0, abs=1e-3)


async def test_a_user_has_a_budget_over_all_pools_of_a_tree_counted_as_used(cluster):
    await cluster.begin()
    await cluster.set_tree(user_budgets={"ann": {"core_hours": 3, "counts": "used", "when_spent": "stop"}})
    await cluster.start("a", jobs=2)
    await cluster.start("b", jobs=1)
    await cluster.start("b", jobs=1, user="bob")
    await cluster.run()
    await cluster.run(1.0)
    assert cluster.account("ann").spent_s(cluster.clock.at) == pytest.approx(1.5 * HOUR_S)
    await cluster.run(1.0)
    cluster.end(4)
    await cluster.start("a")
    await cluster.start("b", user="bob", jobs=2)
    await cluster.run()
    assert [job.order.user for job in cluster.node.jobs.values()] == ["bob", "bob"]
    tree = cluster.scheduler.state.trees["default"]
    shown = [view_tree(Rights(cluster.scheduler.state, User(name)), tree, cluster.clock.at) for name in ("ann", "bob")]
    assert [[each.name for each in view.budgets] for view in shown] == [["ann", "a"], ["a"]]


async def test_a_new_month_is_counted_anew_and_a_clock_set_back_begins_none(cluster):
    await cluster.begin_full(3.0, when_spent="stop")
    first = datetime.datetime(2026, 12, 1, tzinfo=datetime.UTC).timestamp()
    cluster.end(4)
    await cluster.run((first - cluster.clock.at) / HOUR_S - 1)
    assert cluster.account().spent_s(cluster.clock.at) == pytest.approx(12 * HOUR_S)
    await cluster.run(1.5)
    assert (await cluster.events())[-1].endswith("starts again on 2026-12-01; 12 of 10 core-hours were spent before")
    assert (cluster.account().record.level, cluster.alerts()) == (0, [])
    told = len(await cluster.events())
    cluster.restart(-2 * HOUR_S)
    await cluster.node.register()
    await cluster.start("a")
    await cluster.run()
    await cluster.run(0.1)
    assert len(await cluster.events()) == told
    assert cluster.account().spent_s(cluster.clock.at) == pytest.approx(0.4 * HOUR_S)


async def test_it_is_in_json_and_metrics_and_the_forecast_of_constant_use_holds(cluster):
    await cluster.begin()
    await cluster.set_budget(core_hours=1000)
    await cluster.start("a", jobs=2)
    await cluster.run()
    for _ in range(4):
        await cluster.run(24.0)
    view = view_pool(cluster.scheduler.state.trees["default"].pools["a"], cluster.clock.at).budget
    assert view is not None
    # 2 cores since noon of the 10th: 192 core-hours by noon of the 14th, 1000 after 500 h, at 8 h of the 1st: no more
    assert (view.spent_core_hours, view.level, view.forecast_day) == (pytest.approx(192), "within", None)
    await cluster.set_budget(core_hours=620)
    view = view_budget(cluster.account(), cluster.clock.at)
    told = "192 of 620 core-hours ordered this month (31%), will be spent on 2026-11-23 at the present rate"
    assert view.text == told
    text = MetricsText(cluster.scheduler, 10).encode().decode()
    assert 'cpumond_budget_spent_core_hours{kind="pool",name="a",tree="default"} 192.0' in text


@pytest.mark.parametrize("period", PERIODS)
@pytest.mark.parametrize("hours", [30.0, 100.0, 233.0])
def test_the_forecast_is_the_day_on_which_constant_use_reaches_the_budget(period, hours):
    """As a played future finds it."""
    budget = Budget(core_hours=hours, period=period, rolling_days=9, zone="America/New_York")
    begin = datetime.datetime(2026, 3, 2, 14, tzinfo=datetime.UTC).timestamp()  # the clocks change on the 8th
    days: dict[str, tuple[float, float]] = {}
    said, at = [], begin
    while at < begin + 70 * 24 * HOUR_S:
        day = budget.find_day("", at)
        forecast = budget.forecast_day(days, day, begin, at)
        days[day] = (days.get(day, (0.0, 0.0))[0] + HOUR_S, 0.0)
        at += HOUR_S
        said.append((day, budget.sum_from(budget.first_day(day), days) >= budget.limit_s, forecast))
    for number, (day, _, forecast) in list(enumerate(said))[24 : 40 * 24 : 7]:
        later = [each for each in said[number:] if period == "rolling" or budget.first_day(each[0]) <= day]
        assert forecast == next((then for then, is_spent, _ in later if is_spent), None)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"core_hours": 1, "zone": "Mars/Olympus"}, "/zone: must be a time zone known to this machine"),
        ({"when_spent": "stop"}, "/core_hours: must be given"),
        ({"core_hours": 1, "when_spent": "kill"}, 'must be one of "leftover", "stop", "warn"'),
        ({"core_hour": 1}, 'unknown key; did you mean "core_hours"?'),
        ({"core_hours": 1, "rolling_days": 0}, "rolling_days: must be a whole number in"),
    ],
)
def test_a_wrong_budget_is_refused_in_words(value, words):
    world = World()
    for change in (lambda: world.create_pool("p", budget=value), lambda: world.set_tree(user_budgets={"x-y": value})):
        with pytest.raises(CommandError, match=re.escape(words)):
            change()
    assert not world.state.budgets


async def test_a_move_keeps_the_count_and_a_removed_budget_forgets_it(cluster):
    await cluster.begin()
    await cluster.scheduler.execute(ChangePool("default", "b", (Edit(("budget",), {"core_hours": 50}),)), "root")
    operation = await cluster.start("a")
    await cluster.run()
    await cluster.run(1.0)
    await cluster.scheduler.execute(UpdateOperation(operation, {"pool": "b"}), "root")
    cluster.restart()
    await cluster.node.register()
    await cluster.run(0.5)
    spent = [cluster.account(name).spent_s(cluster.clock.at) / HOUR_S for name in "ab"]
    assert spent == [pytest.approx(4), pytest.approx(2)]
    await cluster.scheduler.execute(RemovePool("default", "a"), "root")
    await cluster.scheduler.update_all()
    assert [key.split()[1] for kind, key, _ in cluster.store.load() if kind == "budget"] == ["pool"]


async def test_jobs_are_settled_when_pools_with_operations_move(cluster):
    await cluster.begin_full(0.5)
    before = cluster.account().record
    await cluster.scheduler.execute(CreatePool("default", "c", "<Root>", {}), "root")
    assert cluster.account().record is before
    await cluster.scheduler.execute(ChangePool("default", "a", (Edit(("parent_name",), "c"),)), "root")
    assert cluster.account().record.days["2026-11-10"] == (pytest.approx(2 * HOUR_S), pytest.approx(HOUR_S))


async def test_a_scheduler_whose_clock_is_back_still_believes_the_nodes(cluster):
    await cluster.begin_full(20.0)
    cluster.restart(-21 * HOUR_S)
    for job in cluster.node.jobs.values():  # meanwhile
        job.ordered_cpu_seconds = 21 * HOUR_S
    await cluster.node.register()
    await cluster.node.beat()
    cluster.end(1)
    await cluster.node.beat()
    assert cluster.account().spent_s(cluster.clock.at) == pytest.approx(84 * HOUR_S)


@pytest.mark.parametrize(
    ("counted", "times", "own_s", "held"),
    [
        (100.0, (5.0, 56.5), 60.0, 103.0),  # it ended between two checks
        (0.0, (5.0, 5.5), 60.0, 1.0),  # before the first check
        (100.0, (5.0, 9e4), 9e5, 220.0),  # its node's clock was set ahead
        (0.0, (5.0, 9e4), 2.0, 4.0),  # and it was short
        (100.0, (9e4, 5.0), 60.0, 100.0),  # its node's clock was set back
        (100.0, (0.0, 51.0), -9e4, 100.0),  # the scheduler's clock was set back
        (100.0, None, 9e5, 100.0),  # it was lost
    ],
)
def test_the_held_cpu_of_a_job_follows_its_agent_and_no_set_clock(counted, times, own_s, held):
    """``counted``: core-seconds by the agent; ``times``: by the node; ``own_s``: since when the scheduler knows it."""
    finished = None if times is None else FinishedJob("j", "o", "failed", start_time=times[0], finish_time=times[1])
    assert count_held(2.0, counted, finished, own_s) == pytest.approx(held)
