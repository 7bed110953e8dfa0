"""What is known of a job over time: the points of its graphs, and the sums and figures of a heartbeat."""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from fake_node import QUICK, FakeNode, source

from cpumond.agent import control
from cpumond.core.wire import Heartbeat, JobReport
from cpumond.testing import v2_cgroup

FOUR = v2_cgroup(quota="400000 100000")
PAGE = '[web]\nlisten = "127.0.0.1:0"\nperiod = "2s"\nsamples = 3\n'
NO_RESTORE = QUICK + "throttle_restore_ratio = 0.0\n"

MakeNode = Callable[..., FakeNode]


def samples(node: FakeNode, job: str = "a") -> dict[str, Any]:
    described = msgspec.to_builtins(control.explain_job(node.agent, job).samples)
    assert {len(column) for name, column in described.items() if name != "period_s"} == {len(described["at"])}
    return described


def report(node: FakeNode, job: str = "a") -> JobReport:
    """The job in a heartbeat of now, as a receiver takes it."""
    beat = node.agent.loop.publisher.make_heartbeat()
    read = msgspec.json.decode(msgspec.json.encode(beat), type=Heartbeat)
    return next(each for each in read.jobs if each.job_id == job)


def test_a_sample_is_the_mean_of_its_period_and_the_state_at_its_end(make_node: MakeNode):
    node = make_node({"a": FOUR}, config=NO_RESTORE + source() + PAGE).start()
    for usage in (1.0, 0.4, 0.2, 0.4):
        node.tick(usage)
    told = samples(node)
    end = node.clock.wall_s()
    assert (told["period_s"], told["at"]) == (2.0, pytest.approx([end - 2, end], abs=0.001))
    assert told["usage"] == pytest.approx([0.7, 0.3])
    assert told["smoothed"] == pytest.approx([0.4, 0.4])  # smoothing_factor = 1: the last usage
    assert (told["limit"], told["floor"]) == ([2.0, 0.5], [0.5, 0.5])
    assert (told["lower_bound"], told["upper_bound"]) == (pytest.approx([1.2, 0.3]), pytest.approx([1.8, 0.45]))
    assert told["votes_sum"] == [-2, -2]
    for ratio in (0.0, 0.0, 0.9, 0.3, 0.0, 0.1):
        node.tick(0.5, {"a": ratio})
    told = samples(node)
    end = node.clock.wall_s()
    assert told["at"] == pytest.approx([end - 4, end - 2, end], abs=0.001), "the newest are kept"
    assert told["throttled_ratio"] == pytest.approx([0.0, 0.9, 0.1]), "the greatest of each period"


def test_a_job_that_is_looked_at_less_often_than_another_has_fewer(make_node: MakeNode):
    slow = source("jobs/slow", more="job-cpu-monitor = { check_period = 4000 }\n")
    page = PAGE.replace("2s", "100ms").replace("samples = 3", "samples = 100")
    node = make_node({"slow": FOUR, "b": FOUR}, config=QUICK + slow + source() + page).run(12, {"slow": 1.0, "b": 2.0})
    assert samples(node, "slow")["usage"] == pytest.approx([1.0] * 3)
    assert samples(node, "slow")["period_s"] == 4.0
    assert samples(node, "b")["usage"] == pytest.approx([2.0] * 12)
    assert samples(node, "b")["period_s"] == 1.0, "never more often than the check"


def test_a_late_tick_is_in_the_mean_although_it_decides_nothing(make_node: MakeNode):
    node = make_node({"a": FOUR}, config=QUICK + source() + PAGE).run(2, 1.0)
    node.tick(3.0, seconds=10.0, late_s=9.0)
    node.ticks(2, 0.5)
    # 10 s of 3 cores and at least 1 s of 0.5, whatever the monitor made of them.
    assert samples(node)["usage"][1] == pytest.approx(3.0, abs=0.5)


def test_counters_that_begin_anew_leave_a_gap(make_node: MakeNode):
    node = make_node({"a": FOUR}, config=QUICK + source() + PAGE.replace("2s", "1s")).run(2, 1.0)
    node.forget_counters("a")
    node.tick(0.1)
    assert len(samples(node)["at"]) == 2
    node.tick(0.3)
    assert samples(node)["usage"] == pytest.approx([1.0, 1.0, 0.3])


@pytest.mark.parametrize(("page", "kept"), [
    ("", 0),
    ("[web]\nsamples = 3\n", 0),
    (PAGE.replace("samples = 3", "samples = 0"), 0),
    ('[scheduler]\nurl = "http://127.0.0.1:9"\n[web]\nperiod = "1s"\n', 8),
], ids=["no page", "no address", "no samples", "for the scheduler"])  # fmt: skip
def test_none_are_kept_where_nobody_sees_them(page: str, kept: int, make_node: MakeNode):
    node = make_node({"a": FOUR}, config=QUICK + source() + page).run(8, 1.0)
    assert len(samples(node)["at"]) == kept
    assert (node.agent.table.find("a").samples is None) == (kept == 0)  # type: ignore[union-attr]


def test_a_reload_keeps_the_newest_of_them(make_node: MakeNode, logs: list[dict[str, Any]]):
    node = make_node({"a": FOUR}, config=QUICK + source() + PAGE).run(6, 1.0)
    before = samples(node)["at"]
    assert len(before) == 3
    node.reload(QUICK + source() + PAGE.replace("samples = 3", "samples = 2"))
    assert samples(node)["at"] == before[-2:]
    node.reload(QUICK + source() + PAGE.replace("samples = 3", "samples = 0"))
    node.ticks(4, 1.0)
    assert samples(node)["at"] == []
    assert not [record for record in logs if record["event"] == "needs_restart"]
    node.reload(QUICK + source() + PAGE.replace("127.0.0.1:0", "").replace("2s", "1s"))
    assert [record["key"] for record in logs if record["event"] == "needs_restart"] == ["web"]
    assert (node.agent.config.web.listen, node.agent.config.web.period_s) == ("127.0.0.1:0", 1.0), "it does not move"


def test_a_heartbeat_has_what_the_last_check_saw_and_what_was_summed_up(make_node: MakeNode):
    node = make_node({"a": FOUR}, config=NO_RESTORE + source()).start()
    first = report(node)
    assert (first.cpu_usage, first.min_cpu_limit, first.votes_sum, first.throttled_ratio) == (None, None, None, None)
    assert (first.ordered_cpu_seconds, first.throttled_cpu_seconds, first.late_cpu_seconds) == (0.0, 0.0, 0.0)
    node.tick(0.5, {"a": 0.5})  # at its full limit
    node.tick(0.5)  # lowered
    node.tick(0.25, {"a": 0.2})
    told = report(node)
    assert (told.ordered_cpu_seconds, told.throttled_cpu_seconds) == (12.0, pytest.approx(0.7))
    assert (told.late_cpu_seconds, told.reclaimed_cpu_seconds) == (pytest.approx(0.2), pytest.approx(2.0 + 3.0))
    assert (told.cpu_usage, told.min_cpu_limit, told.votes_sum) == (pytest.approx(0.25), 0.5, -2)
    assert (told.throttled_ratio, told.cpu_seconds) == (pytest.approx(0.2), pytest.approx(1.25))


def test_what_would_have_been_late_in_shadow_is_not_counted_afterwards(make_node: MakeNode):
    shadow = NO_RESTORE.replace("reclaim", "shadow") + source()
    node = make_node({"a": FOUR}, config=NO_RESTORE + source()).start()

    def late(config: str) -> float | None:
        node.reload(config)
        node.ticks(4, 0.1)
        node.tick(0.1, {"a": 1.0})
        sums, told = control.explain_job(node.agent, "a").aggregated, report(node)
        assert (sums.max_cpu_s, sums.throttled_cpu_s, sums.late_cpu_s, sums.preempted_cpu_s) == (
            told.ordered_cpu_seconds, told.throttled_cpu_seconds, told.late_cpu_seconds, told.reclaimed_cpu_seconds,
        )  # fmt: skip
        return told.late_cpu_seconds

    assert [late(NO_RESTORE + source()), late(shadow), late(NO_RESTORE + source())] == [1.0, 1.0, 2.0]
    assert node.end().reports.heartbeats[-1].jobs[0].late_cpu_seconds == 2.0
