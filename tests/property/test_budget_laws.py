"""Core-hour budgets in played months (semantics.md 2.15): each core-second counts once, whatever happens meanwhile."""

from __future__ import annotations

import random
from typing import Any

import pytest
from examples import WHOLE, examples
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from scheduler_world import EASY, PlayedNode, World

from cpumond.scheduler.model import JobRecord, Rules
from cpumond.scheduler.model.budget import CorePair
from cpumond.scheduler.state import budgets
from cpumond.scheduler.state.transaction import Transaction

HOUR_S, DAY_S = 3600.0, 86_400.0
BEGIN_S = 1_790_812_800.0
"""2026-10-01, 00:00 UTC."""
few = examples(40 if WHOLE else 24, suppress_health_check=[HealthCheck.too_slow])
seeds = st.integers(0, 2**32 - 1)
RULES = Rules(spare=EASY.spare, node_heartbeat_timeout_s=8 * HOUR_S, waiting_job_timeout_s=DAY_S)
NAMES = ("top", "a", "b", "ann", "bob")


class KilledError(Exception):
    pass


class Month(World):
    """Budgets on two levels and of users, by several periods, and all that can happen to their scheduler. ``own``: what
    each job came to by its node's last word; ``due``: the same by budget, as it grew where it ran then."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.true_s = BEGIN_S
        self.offset_s = 0.0
        self.clocks: dict[str, float] = {}
        self.began: dict[str, float] = {}
        self.lost: dict[str, float] = {}
        self.own: dict[str, CorePair] = {}
        self.due: dict[str, list[float]] = {name: [0.0, 0.0] for name in NAMES}
        self.kill_in = 0
        self.ended: tuple[JobRecord, ...] = ()
        self.unheard: set[str] = set()
        """Jobs of which no node has told anything since the last take-over."""
        self.happened: dict[str, int] = {}
        super().__init__(
            RULES, BEGIN_S, node_reconnection_timeout=10 * HOUR_S * 1e3, max_operation_count_per_pool=5000,
            max_running_operation_count_per_pool=2000,
        )  # fmt: skip
        self.set_tree(user_budgets={"ann": {"core_hours": 900, "period": "month"}, "bob": {"core_hours": 1e6}})
        self.create_pool("top", budget={"core_hours": 5000, "zone": "Europe/Paris"})
        self.create_pool("a", "top", budget={"core_hours": 100, "period": "rolling", "rolling_days": 7})
        self.create_pool("b", "top", budget={"core_hours": 9, "period": "week", "counts": "used"})
        for number in range(3):
            self.node(f"n{number}", cpu=8)

    # --- who counts what

    def commit(self, change: Transaction) -> None:
        self.ended = change.jobs
        super().commit(change)

    def written(self) -> None:
        for record in self.ended:
            self.count(record.id, record.operation_id, budgets.counted_of(record))
        self.kill_in -= self.kill_in > 0
        if self.kill_in == 1:
            raise KilledError

    def hear(self, heartbeat: Any) -> Any:
        answer = super().hear(heartbeat)
        for report in heartbeat.jobs if answer.accepted else ():
            job = self.state.jobs.get(report.job_id)
            if job is not None:
                before = self.own.get(job.id, (0.0, 0.0))
                told = (report.ordered_cpu_seconds, report.cpu_seconds)
                ordered, used = (known if value is None else value for known, value in zip(before, told, strict=True))
                self.count(job.id, job.element.operation.id, (ordered, used))
        return answer

    def count(self, job_id: str, operation_id: str, told: CorePair) -> None:
        before, record = self.own.get(job_id, (0.0, 0.0)), self.record(operation_id)
        self.own[job_id] = told
        self.unheard.discard(job_id)
        for name in {record.user, record.trees["default"].pool, "top"}:
            for number in (0, 1):
                self.due[name][number] += told[number] - before[number]

    def check(self) -> None:
        """Each budget has what its jobs came to, to the core-second."""
        if self.unheard:
            return
        self.happened["checks"] = self.happened.get("checks", 0) + 1
        found = {}
        for account in self.state.budgets.values():
            pairs = account.grow(*account.live).values()
            found[account.name] = [sum(pair[0] for pair in pairs), sum(pair[1] for pair in pairs)]
        for name in NAMES:
            assert found.get(name, [0.0, 0.0]) == pytest.approx(self.due[name], abs=1e-3), name
        assert self.due["top"][0] == pytest.approx(sum(pair[0] for pair in self.own.values()), abs=1e-3)

    # --- time and nodes

    def pass_time(self, seconds: float) -> None:
        self.true_s += seconds
        self.now = self.true_s + self.offset_s
        for node in self.nodes.values():
            for job_id, job in node.jobs.items():
                ran_s = self.true_s - self.began.setdefault(job_id, self.true_s)
                job.ordered_cpu_seconds = max(job.order.cpu_limit * (int(ran_s) - self.lost.get(job_id, 0.0)), 0.0)
                job.cpu_seconds = job.order.cpu_limit * 0.6 * ran_s

    def end(self, node: PlayedNode, job_id: str, state: Any) -> None:
        clock_s = self.true_s + self.clocks.get(node.id, 0.0)
        job, began = node.jobs[job_id], self.began.get(job_id, self.true_s)
        node.finish(
            job_id, state, start_time=clock_s - (self.true_s - began) - self.random.choice([0.0, 0.0, 5 * HOUR_S]),
            finish_time=clock_s, ordered_cpu_seconds=job.ordered_cpu_seconds,
        )  # fmt: skip

    def meet(self) -> None:
        """What the loop does in a period: nodes, budgets, shares, heartbeats."""
        self.expire()
        self.update()
        self.beat(*(node for node in self.nodes.values() if not node.deaf))

    def take_over(self) -> None:
        """Another scheduler, whose clock may be off by hours, reads what is stored."""
        self.offset_s = self.random.choice([0.0, 0.0, -1.0, 1.0, 0.5, -7.0, 11.0]) * HOUR_S
        self.now = self.true_s + self.offset_s
        self.kill_in = 0
        self.restart()
        ended = [record for jobs in self.state.finished_jobs.values() for record in jobs.values()]
        for record in ended:  # of one that came back after its loss, no word of which was stored yet
            self.count(record.id, record.operation_id, budgets.counted_of(record))
        self.unheard = self.own.keys() - {record.id for record in ended}
        self.meet()

    def happen(self) -> None:
        rng, what = self.random, self.random.random()
        node = rng.choice(list(self.nodes.values()))
        live = [name for name, each in self.state.operations.items() if each.record.state == "running"]
        if what < 0.3:
            self.start(
                rng.choice("ab"), rng.choice(["ann", "bob"]), rng.randint(1, 4), rng.choice([0.5, 1, 2]),
                max_failed_job_count=99,
            )  # fmt: skip
        elif what < 0.55 and node.jobs:
            self.end(node, rng.choice(list(node.jobs)), rng.choice(["completed", "completed", "failed"]))
        elif what < 0.62 and live:
            self.abort(rng.choice(live))
        elif what < 0.7 and live:
            chosen = rng.choice(live)
            if not self.unheard:
                self.set_operation(chosen, pool=rng.choice("ab"))
        elif what < 0.76:
            node.deaf = not node.deaf  # silent, perhaps until it is lost, and back with its jobs
        elif what < 0.8:
            self.lost.update(dict.fromkeys(node.jobs, rng.choice([0.0, 20.0])))
            node.restart_agent()
        elif what < 0.84:
            self.clocks[node.id] = rng.choice([0.0, 3.0, -6.0]) * HOUR_S
        elif what < 0.88:
            self.set_pool("a", budget__core_hours=rng.choice([1, 100, 900]))
        elif what < 0.92:
            self.take_over()
        else:
            self.kill_in = rng.choice([1, 1, 2])

    def live(self) -> Month:
        while self.true_s < BEGIN_S + 31 * DAY_S:
            self.pass_time(self.random.choice([1.0, 600.0, HOUR_S, 4 * HOUR_S, 11 * HOUR_S]))
            try:
                self.happen()
                self.pass_time(1.0)
                self.meet()
            except KilledError:
                self.happened["kills"] = self.happened.get("kills", 0) + 1
                self.take_over()
            self.check()
        for node in self.nodes.values():
            node.deaf = False
        for operation in list(self.state.operations):
            self.kill_in = 0
            self.abort(operation)
        for _ in range(4):
            self.pass_time(1.0)
            self.meet()
        self.check()
        self.restart()
        self.check()
        return self


@few
@given(seeds)
def test_a_month_with_kills_take_overs_and_clock_steps_is_counted_once(seed: int) -> None:
    Month(seed).live()
