"""The metrics text: what it says, what bounds it, and that odd names do not break it."""

import asyncio
import math
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from cpumond import __version__
from cpumond.agent import exporter
from cpumond.agent.config import Metrics
from cpumond.agent.discovery import FoundJob
from cpumond.agent.snapshot import TickSnapshot
from cpumond.agent.state_file import SERVICE_RESULTS
from cpumond.agent.totals import RunTotals
from cpumond.agent.tracked import TrackedView
from cpumond.core.answers import AssignedView, LinkView, ReporterStats
from cpumond.host.cgroup.settings import CpuSettings
from cpumond.monitor.model import CpuReading, Decision, HeldBack, JobState, MonitorSettings
from cpumond.scheduler.model import Rules
from cpumond.scheduler.program import exporter as scheduler_exporter
from cpumond.scheduler.service import Clock, Scheduler
from cpumond.scheduler.store.sqlite import open_sqlite_store

STATE = JobState(
    4.0, 1.5, 4.0, 0.0, smoothed_cores=0.75, base=CpuReading(total_cpu_s=120.5, at_s=5.0, throttled_s=2.25),
    smoothed_cpu_s=11.0, preemptible_cpu_s=12.0, max_cpu_s=13.0,
)  # fmt: skip
DECISION = Decision("hold", 1.5, 1.5, usage_cores=0.5, throttled_ratio=0.1)


def make_job(job_id: str = "job", operation_id: str = "op", **changes: object) -> TrackedView:
    """A job of 4 cores held at 1.5."""
    view = TrackedView(
        FoundJob(job_id, operation_id, f"jobs/{job_id}", 4.0), "reclaim", "", MonitorSettings(), STATE, DECISION,
        4.0, 1.5, CpuSettings(150_000, 100_000), "applied", "", False, None, None, 0, 0, 1.75,
    )  # fmt: skip
    return msgspec.structs.replace(view, **changes)


def make_snapshot(*jobs: TrackedView, tick: int = 1, **changes: object) -> TickSnapshot:
    """A tick with these jobs; every counter has a value of its own."""
    totals = RunTotals()
    snapshot = TickSnapshot(
        tick, 1.7e9, 1000.0, 0.01, "node", "v2", 1.0, jobs,
        {kind: number for number, kind in enumerate(totals.decisions, 1)}, {"raise": 7, "lower": 8},
        {"late_ticks": 11, "rebaselines": 12, "restores": 13, "write_errors": 14, "writes": 15, "errors": 16,
         "jobs_gone": 17, "shed_checks": 18, "failed_restores": 19, "lost_files": 20},
        tuple(totals.tick_buckets), 0.0, (), False, 1, 0,
        service_ends={result: 30 + number for number, result in enumerate(SERVICE_RESULTS)}, capacity_cores=16.0,
        throttled_cpu_s=2.5, late_cpu_s=1.25,
    )  # fmt: skip
    return msgspec.structs.replace(snapshot, **changes)


def encode(snapshot: TickSnapshot | None, settings: Metrics | None = None, stats: ReporterStats | None = None) -> str:
    metrics = exporter.AgentMetrics(lambda: snapshot, lambda: settings or Metrics(), lambda: stats or ReporterStats())
    return metrics.encode().decode()


def test_the_pressure_of_the_host_and_of_jobs_is_read_when_it_is_asked_for(tmp_path):
    some = "some avg10=0.00 avg60=0.00 avg300=0.00 total={}\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=0\n"
    host = tmp_path / "host"
    host.write_text(some.format(2_500_000))
    (tmp_path / "jobs" / "a").mkdir(parents=True)
    own = tmp_path / "jobs" / "a" / "cpu.pressure"
    own.write_text(some.format(1_500_000))
    jobs = [make_job("a"), make_job("b")]
    samples = read_samples(exporter.write_pressure(jobs, str(tmp_path), str(host)))
    assert samples == {
        ("cpumond_node_cpu_pressure_seconds_total", frozenset({("kind", "some")})): 2.5,
        ("cpumond_job_cpu_pressure_seconds_total", frozenset({("job_id", "a")})): 1.5,
    }
    snapshots = (make_snapshot(make_job("a"), tick=tick) for tick in range(1, 9))
    metrics = exporter.AgentMetrics(lambda: next(snapshots), Metrics, ReporterStats, str(tmp_path))
    for seconds in (1.5, 3.0):
        own.write_text(some.format(int(seconds * 1e6)))
        assert value(metrics.encode().decode(), "cpumond_job_cpu_pressure_seconds_total", job_id="a") == seconds
    own.unlink()
    host.unlink()
    assert "cpumond_job_cpu_pressure_seconds_total" not in metrics.encode().decode()
    assert exporter.write_pressure(jobs, str(tmp_path), str(host)) == ""
    assert exporter.write_pressure(jobs, None, str(host)) == ""


def read_samples(text: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """Values by name and labels; fails where one comes twice."""
    samples: dict[tuple[str, frozenset[tuple[str, str]]], float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            key = sample.name, frozenset(sample.labels.items())
            assert key not in samples, f"{key} comes twice"
            samples[key] = sample.value
    return samples


def read_names(text: str) -> set[str]:
    return {family.name for family in text_string_to_metric_families(text)}


def value(text: str, name: str, **labels: str) -> float:
    return read_samples(text)[name, frozenset(labels.items())]


def labels_of(text: str, name: str, label: str) -> list[str]:
    return [s.labels[label] for f in text_string_to_metric_families(text) for s in f.samples if s.name == name]


def test_what_a_node_offers_is_what_its_own_jobs_leave():
    """Each job ordered 4 cores, has 1.5 and uses 0.75 on average."""

    def offered(*jobs: TrackedView, capacity_cores: float = 16.0) -> float:
        text = encode(make_snapshot(*jobs, capacity_cores=capacity_cores))
        return value(text, "cpumond_node_offered_cores")

    own = [make_job("a"), make_job("b")]
    assert offered() == 0.0
    assert offered(*own) == 5.0
    assert offered(*own, make_job("guest", labels={"reclaimed_cpu": "500"})) == 5.0, "who runs on it does not count"
    assert offered(*own, make_job("raised", current_cores=6.0)) == 5.0
    assert offered(*own, capacity_cores=4.0) == 1.0, "limits may be more than the node has"
    assert offered(*own, capacity_cores=2.0) == 0.0
    jobs = own[0], make_job("guest", labels={"reclaimed_cpu": "1"}), make_job("new", decision=None)
    text = encode(make_snapshot(*jobs))
    assert value(text, "cpumond_node_unused_cores") == 16.0 - 0.5, "by what was measured"
    without = make_job("without", unlimited=True, current_cores=4.0)
    assert offered(*own, without, capacity_cores=4.0) == 0.25, "what has no limit takes what it uses"


HELD = HeldBack(9, 1.9, 4.0, 2.4, 0.2)
LEARNED = msgspec.structs.replace(STATE, peak_cores=1.25, caution=3.0, watched_s=600.0, held=HELD)
PEAK = make_job("p", settings=MonitorSettings(limit_rule="peak"), state=LEARNED)


JOB_VALUES = {
    "cpumond_job_cpu_limit_cores": 4.0, "cpumond_job_current_cpu_limit_cores": 1.5,
    "cpumond_job_monitor_cpu_limit_cores": 1.5, "cpumond_job_cpu_usage_cores": 0.5,
    "cpumond_job_smoothed_cpu_usage_cores": 0.75, "cpumond_job_throttled_ratio": 0.1,
    "cpumond_job_cpu_seconds_total": 120.5, "cpumond_job_throttled_seconds_total": 2.25,
    "cpumond_job_late_cpu_seconds_total": 1.75, "cpumond_job_aggregated_smoothed_cpu_seconds_total": 11.0,
    "cpumond_job_aggregated_max_cpu_seconds_total": 13.0,
    "cpumond_job_aggregated_preemptible_cpu_seconds_total": 12.0,
}  # fmt: skip
PEAK_VALUES = {
    "cpumond_job_peak_cores": 1.25, "cpumond_job_peak_half_life_seconds": 40.0,
    "cpumond_job_throttle_budget_ratio": 0.004, "cpumond_job_held_back_total": 9.0,
    "cpumond_job_held_back_seconds_total": 1.9, "cpumond_job_watched_seconds_total": 600.0,
}  # fmt: skip


def test_a_job_has_its_values_and_more_under_rule_peak():
    samples = read_samples(encode(make_snapshot(make_job("d"), PEAK)))
    of_job = {"d": {}, "p": {}}
    for (name, labels), number in samples.items():
        if labels in ({("job_id", "d")}, {("job_id", "p")}):
            of_job[dict(labels)["job_id"]][name] = number
    assert of_job == {"d": JOB_VALUES, "p": {**JOB_VALUES, **PEAK_VALUES}}
    without = encode(make_snapshot(PEAK), Metrics(job_series="off")) + encode(make_snapshot(make_job("d")))
    assert [name for name in PEAK_VALUES if name in without] == []


def test_what_is_not_known_yet_of_a_peak_is_left_out():
    new = msgspec.structs.replace(PEAK, state=STATE)
    text = encode(make_snapshot(new))
    assert labels_of(text, "cpumond_job_peak_cores", "job_id") == []
    assert value(text, "cpumond_job_held_back_seconds_total", job_id="p") == 0.0


def make_assigned_snapshot() -> TickSnapshot:
    """A tick of a node of a scheduler, with everything that only such a node has."""
    link = LinkView("http://head:9757", True, "default", "", ReporterStats(41, 42, 43), 7, 44)
    counters = {"completed": 1, "failed": 2, "aborted": 3, "lost": 4, "overdraft": 5}
    assigned = AssignedView("none", {"running": 6}, counters, (1, 0), 0.5, "")
    return make_snapshot(make_job(), link=link, assigned=assigned)


AGENT_VALUES: dict[str, float] = {
    "cpumond_ticks_total": 5, "cpumond_last_tick_timestamp_seconds": 1.7e9, "cpumond_late_ticks_total": 11,
    "cpumond_rebaselines_total": 12, "cpumond_fast_restores_total": 13, "cpumond_fast_restores_failed_total": 19,
    "cpumond_service_ends_total result=success": 30, "cpumond_service_ends_total result=watchdog": 31,
    "cpumond_node_capacity_cores": 16.0, "cpumond_node_throttled_cpu_seconds_total": 2.5,
    "cpumond_node_late_cpu_seconds_total": 1.25, "cpumond_write_errors_total": 14, "cpumond_cgroup_writes_total": 15,
    "cpumond_errors_total": 16, "cpumond_jobs_gone_total": 17, "cpumond_shed_checks_total": 18,
    "cpumond_lost_files_total": 20, "cpumond_decisions_total kind=grow": 1,
    "cpumond_decisions_total kind=restore": 3, "cpumond_foreign_writes_total kind=raise": 7,
    "cpumond_foreign_writes_total kind=lower": 8, "cpumond_reports_sent_total": 21,
    "cpumond_reports_failed_total": 22, "cpumond_reports_superseded_total": 23, "cpumond_problems": 2,
    "cpumond_writes_paused": 1, "cpumond_empty_rescans": 4, "cpumond_check_stride": 8,
}  # fmt: skip
SCHEDULER_VALUES: dict[str, float] = {
    "cpumond_scheduler_registered": 1, "cpumond_scheduler_heartbeats_total": 41,
    "cpumond_scheduler_heartbeats_failed_total": 42, "cpumond_scheduler_address url=http://head:9757": 1,
    "cpumond_scheduler_term": 7, "cpumond_scheduler_terms_refused_total": 44,
    "cpumond_assigned_jobs state=running": 6, "cpumond_assigned_jobs_ended_total state=lost": 4,
    "cpumond_overdraft_aborts_total": 5, "cpumond_job_start_seconds_count": 1, "cpumond_executor_broken": 0,
}  # fmt: skip


def test_what_the_agent_counts_and_a_node_of_a_scheduler_besides():
    snapshot = make_snapshot(tick=5, problems=("a", "b"), paused=True, empty_rescans=4, stride=8)
    agent = encode(snapshot, stats=ReporterStats(21, 22, 23))
    for expected, text in ((AGENT_VALUES, agent), (SCHEDULER_VALUES, encode(make_assigned_snapshot()))):
        samples = read_samples(text).items()
        found = {" ".join([name, *map("=".join, labels)]): number for (name, labels), number in samples}
        assert {name: found.get(name) for name in expected} == expected


def test_no_name_is_exported_by_the_scheduler_too(tmp_path: Path):
    """A query by name alone would draw two things as one."""
    store = open_sqlite_store(str(tmp_path / "scheduler.db"))

    async def work() -> str:
        scheduler = Scheduler(Rules(), store, Clock())
        await scheduler.update_all()
        return scheduler_exporter.MetricsText(scheduler, 100).encode().decode()

    others = read_names(asyncio.run(work()))
    store.close()
    assert {"cpumond_scheduler_updates", "cpumond_pool_usage_ratio"} <= others
    assert read_names(encode(make_assigned_snapshot())) & others == set()


def test_the_histogram_of_tick_durations():
    totals = RunTotals()
    for duration_s in (0.0005, 0.001, 0.02, 9.0):
        totals.add_tick(duration_s)
    text = encode(make_snapshot(tick_buckets=tuple(totals.tick_buckets), tick_seconds=totals.tick_seconds))
    name = "cpumond_tick_duration_seconds"
    found = {bound: value(text, f"{name}_bucket", le=bound) for bound in ("0.001", "0.01", "0.025", "2.5", "+Inf")}
    assert found == {"0.001": 2, "0.01": 2, "0.025": 3, "2.5": 3, "+Inf": 4}
    assert (value(text, f"{name}_count"), value(text, f"{name}_sum")) == (4, pytest.approx(9.0215))


def test_own_cost_and_build_are_there_before_the_first_tick():
    text = encode(None)
    assert labels_of(text, "cpumond_build_info", "version") == [__version__]
    assert value(text, "cpumond_process_cpu_seconds_total") > 0
    assert value(text, "cpumond_process_resident_memory_bytes") > 2**20
    assert value(text, "cpumond_process_open_fds") > 2
    assert "cpumond_ticks" not in read_names(text)


def test_names_follow_the_conventions():
    """Base units as suffix, counters with _total, a sentence of help for each family."""
    text = encode(make_snapshot(make_job()))
    described = dict(re.findall(r"^# HELP (\S+) (.*)$", text, re.MULTILINE))
    kinds = dict(re.findall(r"^# TYPE (\S+) (.*)$", text, re.MULTILINE))
    assert set(described) == set(kinds)
    for name, kind in kinds.items():
        assert re.fullmatch(r"cpumond_[a-z][a-z_]*[a-z]", name)
        assert name.endswith("_total") == (kind == "counter"), name
        assert not re.search(r"_(ms|us|millis|micros|percent|kb|mb|minutes|count|sum|bucket)(_|$)", name), name
        assert described[name].endswith("."), name
        assert described[name].strip() == described[name] != "", name


@pytest.mark.parametrize(
    "name",
    ['say "hi"', r"C:\new\table", "two\nlines", "trailing\\", "задача-1", "{a=1,b}", "tab\there", "", "😀", '",x="'],
)
def test_an_odd_name_reads_back_as_it_was(name):
    text = encode(make_snapshot(make_job(name, f"op {name}", mode="up-only", override_left_s=5.0)))
    said = {"job_id": name, "operation_id": f"op {name}", "cgroup": f"jobs/{name}", "mode": "up-only",
            "status": "overridden", "limit_rule": "document"}  # fmt: skip
    assert value(text, "cpumond_job_info", **said) == 1.0
    assert value(text, "cpumond_job_cpu_limit_cores", job_id=name) == 4.0
    assert value(text, "cpumond_operation_jobs", operation_id=f"op {name}") == 1.0


@given(st.text())
def test_a_name_takes_one_line_whatever_it_is(name):
    """A label ends at a quote that is not escaped, a sample at a newline; neither comes from a name."""
    label = r'[a-z_]+="([^"\\]|\\["\\n])*"'
    for line in exporter.write_series([make_job(name, name)], Metrics()).split("\n"):
        if line and not line.startswith("#"):
            assert re.fullmatch(rf"[a-z_]+\{{{label}(,{label})*\}} \S+", line), line


def test_a_name_that_is_no_unicode_does_not_take_all_metrics_away():
    text = encode(make_snapshot(make_job("raw\udcff"), make_job("fine")))
    assert labels_of(text, "cpumond_job_cpu_limit_cores", "job_id") == ["raw?", "fine"]


@given(st.floats())
def test_a_value_reads_back_exactly(number):
    job = make_job(state=msgspec.structs.replace(STATE, smoothed_cores=number))
    text = exporter.write_series([job], Metrics())
    found = value(text, "cpumond_job_smoothed_cpu_usage_cores", job_id="job")
    assert found == number or (math.isnan(found) and math.isnan(number))


def test_a_value_that_is_not_known_is_left_out():
    """A counter that would be 0 for a moment would look like a restart to Prometheus, and count everything again."""
    state = msgspec.structs.replace(STATE, smoothed_cores=None, base=None)
    text = encode(make_snapshot(make_job(state=state, decision=None)))
    present = {name for name, labels in read_samples(text) if ("job_id", "job") in labels}
    assert {**exporter.JOB_GAUGES, **exporter.JOB_COUNTERS}.keys() - present == {
        "cpumond_job_cpu_usage_cores", "cpumond_job_smoothed_cpu_usage_cores", "cpumond_job_throttled_ratio",
        "cpumond_job_cpu_seconds_total", "cpumond_job_throttled_seconds_total",
    }  # fmt: skip


# ---- what bounds the number of series


def test_the_top_jobs_are_those_with_most_cpu_reclaimed():
    jobs = [make_job(f"j{limit}", current_cores=float(limit)) for limit in (3, 1, 4, 2)]
    chosen = exporter.choose_jobs(jobs, Metrics(job_series="top", max_jobs=2))
    assert [job.found.job_id for job in chosen] == ["j1", "j2"]


@pytest.mark.parametrize(("series", "maximum"), [("off", 1000), ("all", 0), ("top", 2), ("all", 3)])
def test_totals_count_every_job_whatever_has_series(series, maximum):
    jobs = [make_job(f"j{number}", f"op{number % 2}") for number in range(8)]
    text = encode(make_snapshot(*jobs), Metrics(job_series=series, max_jobs=maximum))
    totals = {"jobs": 8, "cpu_limit_cores": 32.0, "current_cpu_limit_cores": 12.0, "reclaimed_cores": 20.0,
              "cpu_usage_cores": 4.0, "smoothed_cpu_usage_cores": 6.0}  # fmt: skip
    assert {name: value(text, f"cpumond_node_{name}") for name in totals} == totals
    expected = 0 if series == "off" else maximum
    assert len(labels_of(text, "cpumond_job_info", "job_id")) == expected
    assert len(labels_of(text, "cpumond_job_cpu_seconds_total", "job_id")) == expected


def test_operations_beyond_the_maximum_are_one_series_and_sums_match():
    jobs = [make_job(f"j{number}", name) for number, name in enumerate("abcadb")]
    groups = exporter.choose_operations(jobs, 2)
    assert {name: len(group) for name, group in groups.items()} == {"a": 2, "b": 2, exporter.OTHERS: 2}
    jobs = [make_job(f"j{number}", f"op{number % 7}", current_cores=0.5 * number) for number in range(20)]
    for limit in (0, 3, 100):
        samples = read_samples(encode(make_snapshot(*jobs), Metrics(max_jobs=limit)))
        for name in exporter.SUMS:
            parts = [number for (found, _), number in samples.items() if found == f"cpumond_operation_{name}"]
            assert len(parts) == min(limit + 1, 7)
            assert sum(parts) == samples[f"cpumond_node_{name}", frozenset()]
        reclaimed = sum(max(4.0 - 0.5 * number, 0.0) for number in range(20))
        assert samples["cpumond_node_reclaimed_cores", frozenset()] == reclaimed


def test_jobs_by_status_add_up():
    changes = {
        "reclaim": {}, "contested": {"contested": True}, "overridden": {"override_left_s": 5.0},
        "pinned": {"pinned_cores": 1.0}, "refused": {"refused": "outside"}, "shadow": {"mode": "shadow"},
        "off": {"mode": "off"}, "up-only": {"mode": "up-only"},
    }  # fmt: skip
    text = encode(make_snapshot(*(make_job(status, **each) for status, each in changes.items())))
    [family] = [each for each in text_string_to_metric_families(text) if each.name == "cpumond_jobs_by_status"]
    assert {sample.labels["status"]: sample.value for sample in family.samples} == dict.fromkeys(changes, 1.0)


# ---- throttling caused by the agent, the only kind that alerts are about


@pytest.mark.parametrize(("changes", "expected"), [
    ({}, True),
    ({"mode": "up-only"}, True),
    ({"pinned_cores": 1.5}, True),
    ({"decision": None}, False),
    ({"decision": Decision("hold", 1.5, 1.5, throttled_ratio=0.0)}, False),
    ({"current_cores": 4.0}, False),
    ({"mode": "shadow"}, False),
    ({"refused": "outside managed_roots"}, False),
    ({"contested": True}, False),
    ({"override_left_s": 10.0}, False),
    ({"state": msgspec.structs.replace(STATE, hard_cores=1.5)}, False),  # it is the quota above it
])  # fmt: skip
def test_only_throttling_at_a_limit_of_ours_counts(changes, expected):
    job = make_job(**changes)
    assert exporter.is_throttled_by_us(job) is expected
    text = encode(make_snapshot(job, make_job("other", "op2", decision=None)))
    assert value(text, "cpumond_node_throttled_jobs") == expected
    assert value(text, "cpumond_operation_throttled_jobs", operation_id="op") == expected


# ---- once per tick


def test_a_tick_is_encoded_once_and_nothing_is_kept_before_the_first():
    snapshots: list[TickSnapshot | None] = [None]
    encodings = []
    metrics = exporter.AgentMetrics(lambda: snapshots[-1], Metrics, lambda: encodings.append(1) or ReporterStats())
    assert metrics.encode() != b""
    metrics.encode()
    assert len(encodings) == 2
    snapshots.append(make_snapshot(*(make_job(f"j{number}") for number in range(200))))
    start = threading.Barrier(8)

    def scrape() -> bytes:
        start.wait(60.0)
        return metrics.encode()

    with ThreadPoolExecutor(8) as pool:
        texts = [future.result() for future in [pool.submit(scrape) for _ in range(8)]]
    assert len(encodings) == 3, "scrapes at the same moment share one"
    assert all(text is texts[0] for text in texts)
    snapshots.append(make_snapshot(make_job("two"), tick=2))
    assert b'job_id="two"' in metrics.encode()
