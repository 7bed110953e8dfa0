"""What ``explain``, ``status`` and the graphs say of a job under rule peak, in each of its states."""

import re
from collections.abc import Callable

import msgspec
import pytest
from fake_node import FakeNode, source

from cpumond.agent import control
from cpumond.core.answers import ExplainAnswer, StatusAnswer
from cpumond.core.measures import format_cores
from cpumond.testing import v2_cgroup

SIXTEEN = v2_cgroup(quota="1600000 100000")
PEAK = '[monitor]\nmode = "reclaim"\nlimit_rule = "peak"\nthrottle_poll = 0\n'
PAGE = '[web]\nlisten = "127.0.0.1:0"\nperiod = "1s"\nsamples = 100\n'

NEVER = "The half-life began at 20 s and goes down to 5 s because no lowered limit has held this job back so far"

MakeNode = Callable[..., FakeNode]


@pytest.fixture
def start(make_node: MakeNode) -> Callable[..., FakeNode]:
    def make(options: str = "", more: str = "", config: str = PEAK, after_s: int = 0) -> FakeNode:
        node = make_node({"a": SIXTEEN}, config=config + options + source(cpu_limit=16.0) + more).start()
        for _ in range(after_s):
            node.tick(3.0)
        return node

    return make


def ask(node: FakeNode) -> ExplainAnswer:
    return msgspec.json.decode(msgspec.json.encode(control.explain_job(node.agent, "a")), type=ExplainAnswer)


def why(node: FakeNode) -> str:
    return ask(node).why


def test_held_back_and_just_given_back_and_lowered_again(start):
    node = start(after_s=30)
    limit = node.job("a").state.limit_cores
    node.tick({"a": 4.0}, {"a": 0.2})
    told = ask(node)
    assert told.decisions[-1].kind == "restore"
    assert told.decisions[-1].reason == "20% of the periods throttled, so the full request was restored at once"
    sentence = told.why
    assert "its maximum: the full request was restored at " in sentence
    assert f"because a limit of {format_cores(limit)} held it back; " in sentence
    held = "because a lowered limit held this job back once, 0.2 s in all (0.65 % of its time, budget 0.40 %)"
    assert held in sentence
    assert sentence.endswith("cores, restored after 0.2 s.")
    assert told.next.startswith("lower it to ")
    node.tick(3.0)
    again = ask(node)
    assert again.current_cpu_limit < 16.0
    assert "its usage was at least that 1 s ago" in again.why
    assert again.decisions[-1].reason == "its recent maximum fades, usage 3.00"
    facts = again.facts
    assert facts["held back"] == "1 time, 0.2 s of 32 s watched = 0.62 %, budget 0.40 %"
    assert facts["rule"].startswith("peak: ")


def test_the_time_has_its_zone_and_the_date_of_another_day(start):
    node = start(after_s=30)
    node.tick({"a": 4.0}, {"a": 0.2})
    assert re.search(r"last at \d\d:\d\d:\d\d \S+ from ", why(node))
    node.clock.advance(2 * 86_400.0)
    assert re.search(r"last at \d{4}-\d\d-\d\d \d\d:\d\d:\d\d \S+ from ", why(node))


def test_what_keeps_a_step_from_being_written_is_said(start):
    node = start(after_s=40)
    (node.directory / "run" / "pause").touch()
    node.ticks(3, 0.1)
    assert why(node).endswith(" Writes are paused, so it stays as it is.")
    assert "not written: writes are paused" in ask(node).next
    (node.directory / "run" / "pause").unlink()
    node.tick(0.1)
    control.pin_job(node.agent, "a", {"cpu_limit": 2.0})
    node.ticks(5, 0.1)
    assert why(node) == "The limit of a is 2 of 16 requested cores: an operator pinned it until `cpumond unpin a`."
    assert "not written: it is pinned" in ask(node).next
    shadow = start(config=PEAK.replace("reclaim", "shadow"), after_s=60)
    assert why(shadow).endswith(f"{NEVER} (1 min).")
    shadow.tick(8.0)
    assert "because a lowered limit, were it written, would have held this job back once, 1 s in all" in why(shadow)
    shadow.ticks(3, 0.0)
    assert ask(shadow).next.split(";")[0].endswith(", not written: mode shadow")
    assert ask(start(config=PEAK.replace("reclaim", "up-only"), after_s=30)).next == "hold: it is up-only"


def test_the_status_has_what_the_rule_knows(start):
    node = start(after_s=30)
    node.tick({"a": 4.0}, {"a": 0.2})
    answer = msgspec.json.encode(control.view_agent(node.snapshot()))
    [job] = msgspec.json.decode(answer, type=StatusAnswer).jobs
    assert job.limit_rule == "peak"
    assert job.peak is not None
    state = node.job("a").state
    assert (job.peak.peak_cores, job.peak.caution, job.peak.watched_s) == (state.peak_cores, state.caution, 31.0)
    assert (job.peak.held_count, job.peak.held_s) == (1, pytest.approx(0.2))
    assert job.peak.half_life_s == pytest.approx(5.0 * 2**state.caution)
    assert job.peak.target_cores == pytest.approx(1.05 * (state.peak_cores or 0.0))


def test_a_sample_has_the_peak_of_its_moment_also_after_a_change_of_rule(start):
    document = '[monitor]\nmode = "reclaim"\n' + source(cpu_limit=16.0) + PAGE
    node = start(config='[monitor]\nmode = "reclaim"\n', more=PAGE, after_s=10)
    node.reload(PEAK + source(cpu_limit=16.0) + PAGE)
    node.ticks(5, 3.0)
    by_peak = node.job("a").state.peak_cores
    peaks = ask(node).samples.peak
    assert peaks[-1] == pytest.approx(by_peak, rel=1e-6)
    # The first check after the reload is the new rule's base.
    assert len([peak for peak in peaks if peak is not None]) == 4
    assert peaks[-5] is None
    node.reload(document)
    node.ticks(2, 3.0)
    samples = msgspec.to_builtins(ask(node).samples)
    assert samples["peak"][-2:] == [None, None]
    assert {len(column) for name, column in samples.items() if name != "period_s"} == {len(peaks) + 2}
