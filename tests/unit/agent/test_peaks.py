"""What rule ``peak`` learned about a job: kept over the agent's end, and carried over a reload of the rule."""

import os
from pathlib import Path

import msgspec
import pytest
from fake_node import FakeNode, source
from hypothesis import given
from hypothesis import strategies as st

from cpumond.agent import peaks
from cpumond.agent.peaks import PEAKS_FILE, STORE_S, PeakFile, Peaks, learn, recall
from cpumond.agent.state_file import load, save
from cpumond.monitor.model import FIRST_CAUTION, CpuReading, JobState, MonitorSettings, start_state
from cpumond.monitor.peak import find_half_life_s, find_peak
from cpumond.monitor.policy import rebase
from cpumond.monitor.rules import check
from cpumond.testing import v2_cgroup

FOUR = v2_cgroup(quota="400000 100000")
PEAK = '[monitor]\nmode = "reclaim"\nlimit_rule = "peak"\nmin_cpu_limit = 0.5\nthrottle_poll = 0\n'
DOCUMENT = """[monitor]
mode = "reclaim"
smoothing_factor = 1.0
vote_window_size = 2
vote_decision_threshold = 1
decrease_coefficient = 0.8
min_cpu_limit = 0.5
"""


def path_of(node: FakeNode) -> Path:
    return node.directory / "state" / PEAKS_FILE


def state_of(node: FakeNode, name: str = "a") -> JobState:
    return node.agent.table.jobs[f"jobs/{name}"].state


def learn_something(node: FakeNode, held: bool = True) -> FakeNode:
    """Job a uses one core of its four for a while and is held back at the limit for that."""
    node.ticks(70, {"a": 1.0})
    assert 1.05 <= node.cores("a") < 1.11  # smaller cuts are no write
    if held:
        node.tick({"a": 1.1}, {"a": 0.8})
        assert node.cores("a") == 4.0
        node.ticks(2, {"a": 1.2})
    return node


def store(node: FakeNode) -> None:
    """As the loop does between two ticks when it is due, until the thread is done."""
    node.clock.advance(STORE_S)
    node.agent.store_peaks()
    finish(node)


def finish(node: FakeNode) -> None:
    thread = node.agent.context.peaks._thread
    if thread is not None:
        thread.join(100)
        assert not thread.is_alive()


def make_peak_node(make_node, jobs: tuple[str, ...] = ("a",)) -> FakeNode:
    return make_node(dict.fromkeys(jobs, FOUR), config=PEAK + source()).start()


def make_learned_node(make_node) -> FakeNode:
    """What it has learned is on disk."""
    node = learn_something(make_peak_node(make_node))
    store(node)
    return node


@pytest.mark.parametrize("end", ["killed", "closed"])
def test_a_job_goes_on_with_its_caution_and_its_faded_peak(make_node, end):
    """After a kill, which keeps its limit, and after an end, which gives it back; new jobs begin as any other."""
    node = learn_something(make_peak_node(make_node, ("a", "again")))
    node.ticks(16, {"a": 0.5})
    before, known = state_of(node), node.cores("a")
    assert before.held.count == 1
    assert before.caution > 2.3
    assert before.peak_cores > 0.5
    assert known < 4.0
    store(node)
    if end == "killed":
        node.drop_agent()
    else:
        node.agent.close()
        assert node.read("a") == "400000 100000"
        known = 4.0
    node.clock.advance(7.0)
    node.remove("again")
    for name in ("again", "new"):
        node.make(name, quota="400000 100000")
    node.agent = node.make_agent()
    node.start()
    for name in ("again", "new"):
        assert (state_of(node, name).caution, state_of(node, name).peak_cores) == (2.0, None)
    after = state_of(node)
    assert (after.limit_cores, node.cores("a")) == (known, known)
    assert (after.caution, after.watched_s, after.held) == (before.caution, before.watched_s, before.held)
    half_life_s = find_half_life_s(before, node.job("a").settings)
    passed_s = STORE_S + 7.0
    assert after.peak_cores == pytest.approx(before.peak_cores * 2 ** (-passed_s / half_life_s))
    assert after.peak_at_s == pytest.approx(before.peak_at_s)


@pytest.mark.parametrize("case", ["damaged", "no state file", "impossible", "other boot", "other hierarchy", "gone"])
def test_a_file_that_cannot_be_used_is_a_line_in_the_log_and_no_more(make_node, logs, case):
    node = make_learned_node(make_node)
    content, path = load(str(path_of(node)), Peaks), path_of(node)
    if case == "damaged":
        path.write_bytes(path.read_bytes()[:-3])
    elif case == "no state file":
        path.write_bytes(b"\x00" * 5000)
    elif case == "impossible":
        jobs = {name: msgspec.structs.replace(each, caution=8.0) for name, each in content.jobs.items()}
        save(str(path), msgspec.structs.replace(content, jobs=jobs))
    elif case == "other boot":
        save(str(path), msgspec.structs.replace(content, boot_id="another"))
    elif case == "other hierarchy":
        save(str(path), msgspec.structs.replace(content, root=(1, 1)))
    else:
        path.unlink()
    node.kill_and_restart()
    assert (state_of(node).caution, state_of(node).peak_cores) == (2.0, None)
    assert [record["event"] for record in logs].count("peaks_begin_anew") == 2  # the first start had none either
    assert node.snapshot().problems == ()
    node.ticks(3, {"a": 1.0})
    store(node)
    assert load(str(path), Peaks).jobs["jobs/a"].watched_s == 3.0


@pytest.mark.parametrize("by_s", [-3600.0, 3600.0])
def test_a_wall_clock_that_was_set_changes_nothing_that_was_learned(make_node, by_s):
    nodes = [make_learned_node(make_node), make_learned_node(make_node)]
    node = nodes[1]
    content = load(str(path_of(node)), Peaks)
    save(str(path_of(node)), msgspec.structs.replace(content, clock_offset_s=content.clock_offset_s - by_s))
    kept, after = (state_of(each.kill_and_restart()) for each in nodes)
    assert (after.peak_cores, after.caution) == (kept.peak_cores, kept.caution)
    assert (after.peak_at_s, after.held.at_s) == (kept.peak_at_s, kept.held.at_s)


def test_times_of_another_time_namespace_are_told_by_the_wall_clock(make_node):
    node = make_learned_node(make_node)
    before = state_of(node)
    content = load(str(path_of(node)), Peaks)
    jobs = {path: peaks._shift(each, 5000.0) for path, each in content.jobs.items()}
    offset_s = content.clock_offset_s - 5000.0
    save(str(path_of(node)), msgspec.structs.replace(content, jobs=jobs, clock_offset_s=offset_s))
    node.kill_and_restart()
    after = state_of(node)
    assert after.peak_cores < before.peak_cores  # it has faded for as long as passed
    assert (after.peak_at_s, after.held.at_s) == pytest.approx((before.peak_at_s, before.held.at_s))


def test_it_is_written_when_it_is_due_and_something_changed(make_node, monkeypatch, logs):
    node = learn_something(make_peak_node(make_node))
    node.agent.context.peaks.due_s = node.clock.monotonic_s() + STORE_S
    node.agent.store_peaks()
    assert not path_of(node).exists()
    with monkeypatch.context() as patch:
        patch.delattr(peaks, "learn")
        store(node)
    assert "learn" in node.agent.context.peaks.problem
    assert "peaks_thread_failed" in [record["event"] for record in logs]
    store(node)
    assert node.agent.context.peaks.problem == ""
    first = os.stat(path_of(node)).st_ino
    store(node)
    assert os.stat(path_of(node)).st_ino == first
    node.ticks(2, {"a": 1.0})
    node.agent.store_peaks()  # changed, and not due yet
    finish(node)
    assert os.stat(path_of(node)).st_ino == first
    node.agent.writer.is_ousted = True
    store(node)
    assert os.stat(path_of(node)).st_ino == first, "it is another agent's now"
    node.agent.writer.is_ousted = False
    store(node)
    assert os.stat(path_of(node)).st_ino != first


def test_an_agent_that_never_read_the_file_or_was_ousted_does_not_write_it(make_node, tmp_path):
    text = "all that an agent before it knew"
    (tmp_path / PEAKS_FILE).write_text(text)
    PeakFile(str(tmp_path), str(tmp_path), (0, 0)).close([])
    assert (tmp_path / PEAKS_FILE).read_text() == text
    node = learn_something(make_peak_node(make_node), held=False)
    node.agent.writer.is_ousted = True
    assert not path_of(node.end()).exists()


def test_under_the_documents_rule_there_is_no_file_and_no_thread(make_node):
    node = make_node({"a": FOUR}, config=DOCUMENT + source()).run(8)
    store(node)
    assert not path_of(node.end()).exists()
    assert node.agent.context.peaks._thread is None


def test_jobs_that_are_gone_are_dropped_and_unnamed_living_ones_kept(make_node):
    node = make_peak_node(make_node, ("a", "b", "c"))
    node.ticks(3, 1.0)
    store(node)
    assert load(str(path_of(node)), Peaks).jobs.keys() == {"jobs/a", "jobs/b", "jobs/c"}
    watched_s = state_of(node, "b").watched_s
    node.reload(PEAK + source("jobs/a"))
    node.remove("c")
    node.ticks(2, 1.0)
    assert len(node.agent.table) == 1
    store(node)
    assert load(str(path_of(node)), Peaks).jobs.keys() == {"jobs/a", "jobs/b"}
    node.reload(PEAK + source())
    node.tick(1.0)
    assert state_of(node, "b").watched_s == watched_s
    node.remove("b")
    node.ticks(2, 1.0)
    store(node)
    assert load(str(path_of(node)), Peaks).jobs.keys() == {"jobs/a"}


def test_a_job_that_starts_again_begins_with_the_caution_of_the_one_before(make_node, monkeypatch):
    node = learn_something(make_peak_node(make_node, ("a", "b")))
    node.remove("a")
    node.ticks(2)
    node.make("a", quota="400000 100000")
    node.make("c", quota="400000 100000")
    node.ticks(1)
    assert state_of(node).caution > FIRST_CAUTION
    assert (state_of(node).peak_cores, state_of(node, "c").caution) == (None, FIRST_CAUTION)
    node.remove("a")
    node.ticks(2)
    store(node)
    node.kill_and_restart()
    node.make("a", quota="400000 100000")
    node.ticks(1)
    assert state_of(node).caution > FIRST_CAUTION, "over the agent's end"
    monkeypatch.setattr(peaks, "MAX_CAUTIONS", 1)
    for name in ("a", "b"):
        node.remove(name)
        node.ticks(2)
    for name in ("a", "b"):
        node.make(name, quota="400000 100000")
    node.ticks(1)
    assert state_of(node).caution == FIRST_CAUTION, "the oldest is forgotten first"


def test_a_file_that_somebody_removes_is_written_anew_and_said(make_node):
    node = make_learned_node(make_node)
    path_of(node).unlink()
    node.tick({"a": 1.0})
    assert str(path_of(node)) in node.agent.context.places.problem
    node.agent.store_peaks()
    finish(node)
    assert load(str(path_of(node)), Peaks).jobs.keys() == {"jobs/a"}
    assert node.agent.context.places.lost_total == 1
    node.tick({"a": 1.0})
    assert node.agent.context.places.lost_total == 1


def test_a_disk_that_refuses_is_said_once_and_asked_again(make_node, logs):
    node = learn_something(make_peak_node(make_node))
    obstacle = path_of(node).with_suffix(".state.new")
    obstacle.mkdir()
    for _ in range(3):
        store(node)
        node.tick({"a": 1.0})
        assert any(PEAKS_FILE in problem for problem in node.snapshot().problems)
    assert [record["event"] for record in logs].count("peaks_not_written") == 1
    obstacle.rmdir()
    store(node)
    node.tick({"a": 1.0})
    assert node.snapshot().problems == ()
    assert load(str(path_of(node)), Peaks).jobs.keys() == {"jobs/a"}
    obstacle.mkdir()
    assert node.end().read("a") == "400000 100000", "it keeps no limit low at the end"
    assert [record["event"] for record in logs].count("peaks_not_written") == 2


def test_a_disk_that_does_not_answer_holds_up_no_tick_and_not_the_end(make_node, logs, monkeypatch):
    """A pipe without a reader: opening it waits."""
    monkeypatch.setattr(peaks, "LAST_WRITE_S", 0.01)
    node = learn_something(make_peak_node(make_node))
    pipe = path_of(node).with_suffix(".state.new")
    os.mkfifo(pipe)
    try:
        for _ in range(3):
            node.clock.advance(STORE_S)
            node.agent.store_peaks()
            node.ticks(2, {"a": 1.0})
        assert node.agent.context.peaks._thread.is_alive()
        assert any("it takes the disk more than 10 s" in problem for problem in node.snapshot().problems)
        assert [record["event"] for record in logs].count("peaks_not_written") == 1
        node.agent.close()
        assert node.read("a") == "400000 100000"
    finally:
        reader = os.open(pipe, os.O_RDONLY)
        finish(node)
        os.close(reader)


S = MonitorSettings(limit_rule="peak", throttle_poll_s=0.0)
HARD = 8.0
steps = st.lists(st.tuples(st.floats(0, 0.99 * HARD), st.integers(0, 10), st.floats(0.1, 20)), min_size=3, max_size=25)


def follow(state: JobState, taken: list[tuple[float, int, float]]) -> list[JobState]:
    """The states after each of ``taken``: cores used, throttled periods, seconds."""
    states = []
    for cores, throttled, seconds in taken:
        base = state.base or CpuReading(0.0, state.started_at_s)
        reading = CpuReading(
            base.total_cpu_s + cores * seconds, base.at_s + seconds, 0, base.nr_periods + 200,
            base.nr_throttled + throttled,
        )  # fmt: skip
        state, _ = check(state, reading, reading.at_s, S)
        states.append(state)
    return states


def forget(state: JobState) -> JobState:
    """What the next agent knows of a job whose limit it adopts, without the file."""
    fresh = start_state(state.hard_cores, state.started_at_s, state.limit_cores)
    fresh = msgspec.structs.replace(fresh, hold_until_s=state.hold_until_s)
    return rebase(fresh, state.base)


@given(steps, steps)
def test_what_is_recalled_at_once_decides_as_if_nothing_had_been(first, later):
    before = follow(start_state(HARD, 0.0), first)[-1]
    assert before.base is not None
    now_s = before.base.at_s
    after = recall(forget(before), learn(5, before, now_s), S, now_s)
    for one, other in zip(follow(before, later), follow(after, later), strict=True):
        for name in ("limit_cores", "peak_cores", "peak_at_s", "caution", "watched_s", "held", "hold_until_s"):
            assert getattr(one, name) == getattr(other, name), name


@given(steps, st.floats(0.0, 1e9), st.floats(0.5, HARD))
def test_a_peak_fades_with_time_and_is_no_more_than_the_jobs_cpu(first, passed_s, hard):
    before = follow(start_state(HARD, 0.0), first)[-1]
    assert before.base is not None
    now_s = before.base.at_s + passed_s
    after = recall(start_state(hard, now_s), learn(5, before, before.base.at_s + 1.0), S, now_s)
    assert (after.caution, after.held) == (before.caution, before.held)
    unheld = start_state(hard, now_s)
    assert recall(unheld, learn(1, unheld, now_s), S, now_s + passed_s) == unheld
    faded = find_peak(before, S) * 2 ** (-passed_s / find_half_life_s(before, S))
    assert (after.peak_cores, after.limit_cores) == (pytest.approx(min(faded, hard)), hard)


def names_of_writes(node: FakeNode) -> dict[str, int]:
    """When each settings file of job a was last written, in ns."""
    folder = node.root / "jobs" / "a"
    return {name: os.stat(folder / name).st_mtime_ns for name in ("cpu.max", "cpu.max.burst", "cpu.weight")}


@pytest.mark.parametrize("burst", ["burst_ratio = 0.5\n", ""])
@pytest.mark.parametrize(("old", "new"), [(DOCUMENT, PEAK), (PEAK, DOCUMENT)])
def test_another_rule_starts_from_the_present_limit_and_writes_none(make_node, old, new, burst):
    node = make_node({"a": FOUR}, config=old + burst + source()).run(30, {"a": 1.9})
    limit = node.cores("a")
    assert 1.9 <= limit < 4.0
    written = names_of_writes(node)
    quota = node.read("a")
    node.reload(new + burst + source())
    node.tick({"a": 1.9})
    state = state_of(node)
    assert (state.limit_cores, state.window, state.peak_cores) == (pytest.approx(limit), (), None)
    assert node.job("a").settings.limit_rule != ("document" if old is DOCUMENT else "peak")
    node.tick({"a": 1.9})
    assert node.read("a") == quota
    changed = {name for name, at in names_of_writes(node).items() if at != written[name]}
    # Without an option of its own the burst is the rule's.
    assert changed == (set() if burst else {"cpu.max.burst"})
    node.ticks(20, {"a": 1.9})
    assert node.cores("a") >= 1.9


def test_another_actuator_starts_from_the_limit_in_force_with_the_caution(make_node):
    node = learn_something(make_peak_node(make_node))
    node.ticks(20, {"a": 0.5})
    before = state_of(node)
    assert node.cores("a") < 4.0
    node.reload(PEAK + 'actuator = "weight"\n' + source())
    node.tick({"a": 0.5})
    # The quota goes back, and a weight that was not moved yet is all of it.
    assert node.files("a") == {"cpu.max": "400000 100000", "cpu.max.burst": "0", "cpu.weight": "100"}
    after = state_of(node)
    assert (after.limit_cores, after.peak_cores, after.caution) == (4.0, None, before.caution)
