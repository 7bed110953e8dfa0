"""Looks between two checks: which jobs, when, and what they leave alone."""

import contextlib
import math
import os
from collections.abc import Callable

import msgspec
import pytest
from fake_node import QUICK, FakeNode, source

from cpumond.agent import control
from cpumond.agent.limits import apply
from cpumond.agent.limits.hold import Contested, Hold, Respected
from cpumond.agent.looks import DRIFT, LookSchedule, can_be_held_back
from cpumond.core.errors import CgroupReadError
from cpumond.host.cgroup.parse import parse_throttled
from cpumond.testing import v2_cgroup

FOUR = v2_cgroup(quota="400000 100000", cpu_max_burst="70000\n")
PEAK = (
    '[monitor]\nmode = "reclaim"\nlimit_rule = "peak"\nmin_cpu_limit = 0.5\npeak_memory = "100ms"\n'
    'early_restore = "off"\n'
    "[cost]\ncpu_budget_ratio = 0\n"
)
MakeNode = Callable[..., FakeNode]


def lowered(make_node: MakeNode, *names: str, config: str = PEAK + source()) -> FakeNode:
    """A node whose jobs use 1 of their 4 cores and have been lowered accordingly."""
    node = make_node(dict.fromkeys(names, FOUR), config=config).run(12, 1.0)
    assert [node.cores(name) for name in names] == pytest.approx([1.05] * len(names))
    return node


def look(node: FakeNode, *throttled: str, seconds: float = 0.2) -> None:
    """Time passes, in which some jobs are throttled all the time and the others do nothing, then comes a look."""
    node.clock.advance(seconds)
    for name in throttled:
        node.use(name, 1.05 * seconds, 1.0, seconds)
    node.agent.loop.limits.look(node.clock.monotonic_s())


def cores(node: FakeNode, *names: str) -> list[float]:
    return [round(node.cores(name), 3) for name in names]


# ---- what a look does


def test_a_look_restores_only_whom_a_lowered_limit_held_back(make_node):
    node = lowered(make_node, "a", "b")
    assert node.files("a") == {"cpu.max": "105000 100000", "cpu.max.burst": "105000", "cpu.weight": "100"}
    look(node)
    assert cores(node, "a", "b") == [1.05, 1.05]
    look(node, "a")
    assert cores(node, "a", "b") == [4.0, 1.05]
    # What was ordered, and no burst but the one that was found.
    assert node.files("a") == {"cpu.max": "400000 100000", "cpu.max.burst": "70000", "cpu.weight": "100"}
    counters = node.snapshot().counters
    assert (counters["looks_restored"], counters["restores"], node.snapshot().decisions["restore"]) == (1, 1, 1)
    assert (node.job("a").current_cores, node.job("a").state.held.count) == (4.0, 1)
    assert node.job("a").state.held.held_s == pytest.approx(0.2)
    record = control.explain_job(node.agent, "a").decisions[-1]
    assert (record.kind, record.result, record.applied_cores, record.by_look) == ("restore", "applied", 4.0, True)
    look(node, "a")  # throttled at what it ordered: that is not our doing
    # The next check starts where the last one ended, and pays for nothing twice.
    node.tick(1.0, seconds=0.4)
    assert node.job("a").state.held.count == 1
    node.ticks(10, 1.0)
    assert node.cores("a") < 2.0
    look(node, "a")
    assert (node.cores("a"), node.snapshot().counters["looks_restored"]) == (4.0, 2)


def test_every_quota_moves_its_burst_and_no_unchanged_value_is_written(make_node):
    node = lowered(make_node, "a")
    writes = node.agent.writer.writes_total
    node.ticks(5, 1.0)
    assert node.agent.writer.writes_total == writes
    node.tick(1.5)
    assert node.files("a")["cpu.max.burst"] == "157500"
    assert node.agent.writer.writes_total == writes + 2  # quota and burst
    look(node, "a")
    assert node.agent.writer.writes_total == writes + 4
    node.agent.close()
    assert node.agent.writer.writes_total == writes + 4
    assert node.files("a") == {"cpu.max": "400000 100000", "cpu.max.burst": "70000", "cpu.weight": "100"}


def test_the_documents_rule_looks_only_where_it_is_asked_to(make_node):
    for poll, back in (("", 2.0), ('throttle_poll = "200ms"\n', 4.0)):
        node = make_node({"a": FOUR}, config=QUICK + poll + source()).run(2, 0.1)
        assert cores(node, "a") == [2.0]
        look(node, "a")
        assert cores(node, "a") == [back]


def test_a_weight_is_restored_when_use_since_the_last_look_is_above_it(make_node, logs):
    config = PEAK.replace("[cost]", 'actuator = "weight"\n[cost]') + source()
    node = make_node({"a": FOUR, "b": FOUR}, config=config).start()
    [missed] = [record for record in logs if record["event"] == "pressure_unknown"]
    assert missed["advice"].startswith("nothing shows that it waits for others")
    node.ticks(12, 1.0)
    for used, weight in ((0.2, "26"), (0.2, "26"), (0.2, "26"), (1.5, "100")):  # 0.525 since the check
        node.clock.advance(0.2)
        node.use("a", used * 0.2, 0.0, 0.2)
        node.use("b", 0.9 * 0.2, 0.0, 0.2)
        node.agent.loop.limits.look(node.clock.monotonic_s())
        assert [node.read(name, "cpu.weight") for name in "ab"] == [weight, "26"]


# ---- looks at use


def look_at_use(node: FakeNode, seconds: float = 0.05, **used: float) -> None:
    """Time passes in which jobs use so many cores, without being throttled, then comes a look."""
    node.clock.advance(seconds)
    for name, cores in used.items():
        node.use(name, cores * seconds, 0.0, seconds)
    node.agent.loop.limits.look(node.clock.monotonic_s())


def early(make_node: MakeNode, kind: str, *names: str) -> FakeNode:
    return lowered(make_node, *names, config=PEAK.replace('"off"', f'"{kind}"') + source())


@pytest.mark.parametrize(
    ("kind", "given", "told", "peak", "charged"),
    [("use", 2.4, "grow", 1.0, 0.0), ("ordered", 4.0, "restore", 2.0, 0.05)],
)
def test_use_above_a_lowered_limit_raises_it_before_the_burst_is_spent(make_node, kind, given, told, peak, charged):
    node = early(make_node, kind, "a", "b")
    caution = node.job("a").state.caution
    look_at_use(node, a=1.1, b=1.0)
    assert cores(node, "a", "b") == [1.05, 1.05]  # as far as the kernel rounds
    look_at_use(node, a=2.0, b=1.0)
    assert cores(node, "a", "b") == [given, 1.05]
    state = node.job("a").state
    assert (state.limit_cores, state.peak_cores, state.held.count) == (pytest.approx(given), pytest.approx(peak), 0)
    assert state.caution == pytest.approx(caution + charged)
    record = control.explain_job(node.agent, "a").decisions[-1]
    assert (record.kind, record.result, record.by_look) == (told, "applied", True)
    assert record.reason.startswith("usage 2.0")
    look_at_use(node, a=4.0)
    node.tick(1.0, seconds=0.4)
    assert node.job("a").state.held.count == 0
    if kind == "use":
        assert node.cores("a") == 4.0, "no check cuts it within a second"
        assert "another 0.6 s (early_restore)" in str(control.explain_job(node.agent, "a"))
    node.tick(1.0)
    assert node.cores("a") < 4.0


def test_use_is_looked_at_where_a_burst_lets_a_job_use_more_than_its_limit(make_node):
    for more in ("burst_ratio = 0\n", 'actuator = "weight"\n', 'early_restore = "off"\n', 'limit_rule = "document"\n'):
        name = more.split(" ")[0]
        kept = "\n".join(line for line in PEAK.splitlines() if not line.startswith((name, "early_restore")))
        node = make_node({"a": FOUR}, config=kept.replace("[cost]", more + "[cost]") + "\n" + source()).run(12, 1.0)
        assert not node.agent.loop.limits.looks._use_parts, more
    node = make_node({"a": {**FOUR, "cpu.max.burst": None}}, config=PEAK.replace('"off"', '"use"') + source())
    os.unlink(node.root / "jobs/a/cpu.max.burst")  # a kernel before 5.14
    node.run(12, 1.0)
    assert node.cores("a") == pytest.approx(1.05)
    assert not node.agent.loop.limits.looks._use_parts


def test_many_jobs_are_looked_at_in_parts_each_as_often(make_node):
    names = [f"j{number}" for number in range(60)]
    node = early(make_node, "use", *names)
    looks, moments, seen = node.agent.loop.limits.looks, 0, dict.fromkeys(names, 0)
    end_s = node.clock.monotonic_s() + 0.2
    before = {use.job.found.path: use.at_s for use in looks._uses.values()}
    while node.clock.monotonic_s() < end_s:
        node.clock.advance(0.0125)
        node.agent.loop.limits.look(node.clock.monotonic_s())
        moments += 1
        for use in looks._uses.values():
            if use.at_s > before[use.job.found.path]:
                before[use.job.found.path] = use.at_s
                seen[use.job.found.path.rpartition("/")[2]] += 1
    assert set(seen.values()) <= {3, 4, 5}, moments


# ---- whose limit it is


@pytest.mark.parametrize("hold", ["pinned", "contested"])
def test_what_a_limit_of_others_held_back_is_not_charged_to_the_rule(make_node, hold):
    config = PEAK.replace("[cost]", "[writes]\noverride_ttl = 0\ndrift_max = 1\n[cost]") + source()
    node = lowered(make_node, "a", config=config)
    caution = node.job("a").state.caution
    if hold == "pinned":
        control.pin_job(node.agent, "a", {"cpu_limit": 2.0})
        look(node, "a")
        assert (cores(node, "a"), node.snapshot().counters["looks_restored"]) == ([2.0], 0)
    else:
        node.agent.table.find("a").hold = Hold(Contested())
    for _ in range(10):
        node.tick(1.0, {"a": 1.0})
    if hold == "pinned":
        control.unpin_job(node.agent, "a")
        node.ticks(2, 1.0)
    assert node.job("a").state.held.count == 0
    assert node.job("a").state.caution <= caution


def test_in_shadow_use_above_the_limit_counts_and_own_throttling_does_not(make_node):
    node = make_node({"a": FOUR}, config=PEAK.replace("reclaim", "shadow") + source()).run(12, 1.0)
    assert (node.cores("a"), node.job("a").state.limit_cores) == (4.0, pytest.approx(1.05))
    node.tick(1.0, {"a": 1.0})
    assert node.job("a").state.held.count == 0
    node.tick(3.0)
    assert node.job("a").state.held.held_s == pytest.approx(0.2)
    node.reload(PEAK + source())
    node.tick(1.0)
    assert node.agent.table.find("a").state.is_written


def test_a_job_that_begins_anew_is_read_at_the_next_tick(make_node):
    slow = source("jobs/a", more='job-cpu-monitor = { check_period = "60s" }')
    node = make_node({"a": FOUR, "b": FOUR}, config=QUICK + slow + source()).start()
    while node.cores("a") == 4.0:
        node.tick(0.5)
    node.ticks(5, 0.5)
    node.reload(PEAK.replace('peak_memory = "100ms"\n', "") + slow + source())
    node.tick(0.5)
    look(node, "a")
    assert cores(node, "a") == [4.0]


def test_a_burst_of_the_run_before_is_not_left_after_a_kill(make_node):
    node = lowered(make_node, "a")
    node.config_text = QUICK + source()
    node.kill_and_restart()
    assert node.files("a") == {"cpu.max": "105000 100000", "cpu.max.burst": "70000", "cpu.weight": "100"}
    writes = node.agent.writer.writes_total
    node.kill_and_restart()
    assert node.agent.writer.writes_total == 0 < writes


def test_a_limit_that_is_as_meant_is_not_recorded_as_written_again(make_node):
    node = lowered(make_node, "a")
    job = node.agent.table.find("a")
    records = len(job.ring.records())
    job.hold = job.hold.write(0.0)
    node.tick(1.0)
    assert len(job.ring.records()) == records
    node.reload(PEAK.replace("min_cpu", "burst_ratio = 0.3\nmin_cpu") + source())
    node.tick(1.0)
    assert (job.ring.records()[-1].kind, node.read("a", "cpu.max.burst")) == ("reapply", "31500")


# ---- a base for looks, and no needless writes


def test_a_value_that_the_kernel_refuses_is_not_decided_each_tick(make_node):
    config = PEAK.replace("min_cpu_limit = 0.5", "min_cpu_limit = 0") + source()
    node = make_node({"a": FOUR}, config=config).run(30)
    assert node.read("a") == "1000 1000000"
    before = node.snapshot().decisions["shrink"]
    node.ticks(20, 0.0)
    assert node.snapshot().decisions["shrink"] <= before + 1
    told = "hold: it is raised to 0.001 cores, the least quota that the kernel accepts; a cut is tried again "
    assert control.explain_job(node.agent, "a").next.startswith(told)


def test_only_jobs_that_the_agent_has_lowered_are_looked_at(make_node):
    node = lowered(make_node, "a", "busy", "pinned", "shadow")
    jobs = {name: node.agent.table.find(name) for name in ("a", "busy", "pinned", "shadow")}
    assert [can_be_held_back(job) for job in jobs.values()] == [True] * 4
    look(node, "busy")
    control.pin_job(node.agent, "pinned", {"cpu_limit": 2.0})
    jobs["shadow"].mode = "shadow"
    assert [can_be_held_back(job) for job in jobs.values()] == [True, False, False, False]
    jobs["a"].hold = Hold(Contested())
    assert not can_be_held_back(jobs["a"])
    jobs["a"].hold = Hold(Respected(math.inf))
    assert not can_be_held_back(jobs["a"])


# ---- which jobs


def test_a_pause_holds_looks_too_and_restores_follow_it(make_node):
    node = make_node({"a": FOUR}, config=PEAK + source())
    os.unlink(node.root / "jobs" / "a" / "cpu.max.burst")  # a kernel without bursts
    node.run(12, 1.0)
    pause = node.directory / "run" / "pause"
    pause.touch()
    look(node, "a")
    held = node.agent.table.find("a").state.held
    assert (cores(node, "a"), held.count) == ([1.05], 0)
    pause.unlink()
    look(node)
    assert cores(node, "a") == [4.0]
    assert not (node.root / "jobs" / "a" / "cpu.max.burst").exists()
    assert node.snapshot().counters["write_errors"] == 0


def test_a_foreign_order_is_not_overwritten_and_the_tick_takes_it(make_node):
    node = lowered(make_node, "a")
    node.write("a", "cpu.max", "90000 100000\n")
    look(node, "a")
    job = node.agent.table.find("a")
    assert (cores(node, "a"), job.state.held.count) == ([0.9], 0)
    node.tick(0.9, seconds=0.8)
    assert (cores(node, "a"), job.original.cores, job.hold.is_free) == ([0.9], 0.9, False)


def test_throttling_is_counted_in_the_period_that_another_program_sets(make_node):
    jobs = {"short": v2_cgroup(quota="200000 50000"), "other": FOUR}
    node = make_node(jobs, config=PEAK + source()).start()
    periods = [node.agent.table.find(name).state.cfs_period_s for name in ("short", "other")]
    assert periods == [0.05, 0.1]
    node.ticks(12, 1.0)
    node.write("other", "cpu.max", "26250 25000\n")
    node.agent.loop.external.read_all = True
    node.tick(1.0)
    assert node.agent.table.find("other").state.cfs_period_s == 0.025
    node.kill_and_restart()
    assert node.agent.table.find("other").state.cfs_period_s == 0.025
    # A quota below 1 ms is none: the period is longer then.
    tiny = make_node({"a": v2_cgroup(quota="4000 1000")}, config=PEAK + source()).run(12, 0.1)
    assert (tiny.read("a"), tiny.agent.table.find("a").state.cfs_period_s) == ("1000 2000", 0.002)


def test_a_cgroup_that_is_gone_or_does_not_answer_is_left_to_the_tick(make_node, monkeypatch):
    node = lowered(make_node, "a", "b", "c")
    gone, broken = node.agent.table.find("a").cgroup, node.agent.table.find("b").cgroup

    def fail() -> int:
        raise CgroupReadError("b", "it does not answer")

    answers = {id(gone): lambda: None, id(broken): fail}
    read = type(gone).read_throttled
    monkeypatch.setattr(type(gone), "read_throttled", lambda self: answers.get(id(self), lambda: read(self))())
    look(node, "a", "b", "c")
    assert cores(node, "a", "b", "c") == [1.05, 1.05, 4.0]
    assert node.agent.table.find("b").last_error.endswith("it does not answer")


def test_a_job_that_left_between_two_ticks_is_not_read_any_more(make_node):
    node = lowered(make_node, "a", "b")
    node.remove("a")
    node.agent.rescan_now()
    look(node, "b")
    assert cores(node, "b") == [4.0]
    assert node.agent.context.totals.errors == 0


def test_a_write_that_the_kernel_refuses_is_not_tried_at_each_look(make_node, monkeypatch):
    node = lowered(make_node, "a")
    cgroup = type(node.agent.table.find("a").cgroup)
    tries = []

    def refuse(self, name, text):
        tries.append((name, text))
        raise OSError(22, "Invalid argument")

    monkeypatch.setattr(cgroup, "write_file", refuse)
    for _ in range(4):
        look(node, "a")
    assert node.snapshot().counters["write_errors"] == 1
    monkeypatch.undo()
    node.tick(1.0, {"a": 1.0}, seconds=0.2)
    assert cores(node, "a") == [4.0]


# ---- when


def test_looks_have_a_rate_of_their_own_and_a_late_one_is_not_made_up_for(make_node):
    node = lowered(make_node, "a")
    now_s = node.clock.monotonic_s()
    schedule = LookSchedule()
    assert schedule.next_s == math.inf
    schedule.refill(node.agent.table, now_s)
    job = node.agent.table.find("a")
    gap_s = 0.2 * DRIFT
    assert schedule.next_s == pytest.approx(now_s + gap_s)
    assert schedule.take_due(now_s + gap_s - 0.001) == []
    assert [item[2] for item in schedule.take_due(now_s + 0.25)] == [job]
    assert schedule.next_s == pytest.approx(now_s + 2 * gap_s)
    schedule.refill(node.agent.table, now_s + 0.3)
    assert schedule.next_s == pytest.approx(now_s + 2 * gap_s)
    schedule.take_due(now_s + 1.7)
    assert schedule.next_s == pytest.approx(now_s + 1.7 + gap_s)
    schedule.refill([], now_s + 2.0)
    assert (schedule.next_s, schedule.take_due(now_s + 9.0)) == (math.inf, [])
    without = make_node({"a": FOUR}, config=QUICK + source()).run(8, 0.1)
    assert (without.cores("a"), without.agent.loop.limits.looks.next_s) == (0.5, math.inf)


def test_each_job_has_its_own_period_and_the_shortest_one_wakes_the_agent(make_node):
    quick = source("jobs/quick", more='job-cpu-monitor = { throttle_poll = "50ms" }')
    never = source("jobs/never", more='job-cpu-monitor = { throttle_poll = "0s" }')
    node = lowered(make_node, "a", "never", "quick", config=PEAK + quick + never + source())
    begin_s, schedule = node.clock.monotonic_s(), node.agent.loop.limits.looks
    schedule.take_due(begin_s)
    found = []
    while schedule.next_s < begin_s + 0.42:
        at_s = schedule.next_s
        found += [(at_s - begin_s, job.found.job_id) for _, _, job in schedule.take_due(at_s)]
    quick_at = [0.05 * DRIFT * number for number in range(1, 9)]
    assert [at_s for at_s, name in found if name == "quick"] == pytest.approx(quick_at)
    assert [at_s for at_s, name in found if name == "a"] == pytest.approx([0.2 * DRIFT, 0.4 * DRIFT])


def test_over_the_budget_looks_are_shed_in_turns(make_node):
    names = "abcdef"
    node = lowered(make_node, *names)
    begin_s, schedule, seen = node.clock.monotonic_s(), node.agent.loop.limits.looks, []
    for turn in range(1, 4):
        seen += [job.found.job_id for _, _, job in schedule.take_due(max(schedule.next_s, begin_s + 0.2), 3)]
        assert len(seen) == 2 * turn
    assert sorted(seen) == list(names)


def test_what_a_check_has_just_seen_is_not_looked_at(make_node, monkeypatch):
    node = lowered(make_node, "a")
    looked = []
    monkeypatch.setattr(apply, "list_changed", lambda watched: looked.append(len(watched)) or [])
    for _ in range(4):
        look(node)
    node.tick(1.0, seconds=0.2)
    node.agent.loop.limits.look(node.clock.monotonic_s() + 0.001)
    assert looked == [1, 1, 1, 1, 0]
    look(node)
    assert looked == [1, 1, 1, 1, 0, 1]


def test_no_gap_between_two_readings_is_longer_than_5_quarters_of_a_period(make_node):
    node = lowered(make_node, "a")
    schedule = node.agent.loop.limits.looks
    next_s, job = schedule.next_s, node.agent.table.find("a")
    checked_s = next_s - 0.3 * 0.2 * DRIFT
    seen = msgspec.structs.replace(job.state.seen, at_s=checked_s)
    job.state = msgspec.structs.replace(job.state, seen=seen)
    schedule.refill(node.agent.table, checked_s)
    assert [item[2] for item in schedule.take_due(next_s)] == [job]


@pytest.mark.parametrize(("raw", "throttled"), [
    (b"nr_periods 12\nnr_throttled 7\nthrottled_time 99\nnr_bursts 0\nburst_time 0\n", 7),
    (b"usage_usec 5\nnr_periods 12\nnr_throttled 1234567890123\nthrottled_usec 9\n", 1234567890123),
    (b"usage_usec 5\nuser_usec 0\n", 0),
    (b"nr_throttled x\n", None),
    (b"nr_throttled 5", None),
])  # fmt: skip
def test_the_count_of_throttled_periods_is_read_from_bytes(raw, throttled):
    with contextlib.nullcontext() if throttled is not None else pytest.raises(ValueError, match=r"invalid|not found"):
        assert parse_throttled(raw) == throttled


@pytest.mark.parametrize(
    ("hold", "mode"), [(Hold(), "reclaim"), (Hold(Contested()), "contested"), (Hold(Respected(1e9, "")), "overridden")]
)
def test_the_scheduler_is_told_whose_the_limit_is(make_node, hold: Hold, mode: str):
    node = lowered(make_node, "a")
    job = node.agent.table.find("a")
    job.hold = hold
    assert (job.usage().mode, job.report().mode) == (mode, mode)
