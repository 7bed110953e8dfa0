"""What ``cpumond estimate`` says of its findings, and how it reads the series of a Prometheus."""

import json
import math
from pathlib import Path
from typing import Any, Final

import pytest
from html_page import HtmlPage

from cpumond.agent.config import load_config
from cpumond.agent.discovery.workloads import Workload
from cpumond.cli import run
from cpumond.cli.agent import estimate_prometheus
from cpumond.cli.agent.estimate import read_rule_settings
from cpumond.cli.agent.estimate_findings import (
    Findings,
    WorkloadRow,
    describe,
    hide_names,
    render_config,
    render_json,
    render_text,
)
from cpumond.cli.render.estimate import render_page
from cpumond.core.errors import UnavailableError
from cpumond.monitor.estimate import Timeline, estimate
from cpumond.monitor.model import CpuReading, MonitorSettings, compute_mode
from cpumond.monitor.rules import RULES

SETTINGS = {rule: MonitorSettings(limit_rule=rule) for rule in RULES}
ID = "3f9ab1c2d4e5" + "0" * 52
MARKUP = "<img src=x>\u202e"


def make_row(path: str, kind: Any, name: str, use: float, hard: float, is_limited: bool | None = True) -> WorkloadRow:
    readings = [CpuReading(use * number, float(number)) for number in range(601)]
    settings = {} if is_limited is None else SETTINGS
    return WorkloadRow(Workload(path, kind, name), estimate(readings, hard, settings), is_limited)


def make_findings(*rows: WorkloadRow, **more: Any) -> Findings:
    timeline = Timeline(0.0, 600.0)
    for number in range(601):
        timeline.add(float(number), 1.0, (1.0, 4.0, 3.0, 2.0))
    return Findings("cgroups", "this host", 600.0, 600.0, 1.0, 8.0, list(rows), timeline, **more)


WEB = make_row(f"docker/{ID}", "docker", ID[:12], 0.5, 4.0)
JOB = make_row("slurm/uid_0/job_7", "slurm", "job 7", 3.0, 4.0)
FREE = make_row("system.slice/a.service", "unit", MARKUP, 0.25, 8.0, False)
UNKNOWN = make_row("other", "cgroup", "other", 0.125, 0.0, None)


LOST = "If a scheduler started jobs of 2 min on it, they would lose 0 % of their work."


def test_the_whole_in_sentences() -> None:
    said = describe(make_findings(WEB, JOB, FREE))
    assert said[0] == "3 workloads of this host, 10 min, a sample every 1 s; nothing was written."
    assert said[1] == "2 workloads with a limit requested 8 cores and used 3.5 (44%)."
    assert said[2].startswith("Rule document: ")
    assert said[3] == "Rule peak: 3.84 cores reclaimable (48%), held back 0 % of the time, at most 0 %. " + LOST
    assert said[4].startswith("1 workload without a limit used 0.25 cores. Each could use the whole host of 8 cores")
    assert said[5].startswith("Confidence: low (only 10m watched")
    assert len(describe(make_findings(UNKNOWN))) == 3


def test_the_table_is_cut_and_says_so() -> None:
    text = render_text(make_findings(WEB, JOB, FREE, UNKNOWN, notes=["one"], named_notes=["two"]), 2, None, False)
    assert "and 2 workloads more; --top or --json shows all" in text
    assert "Note: one\nNote: two\n" in text
    assert "job 7" in text
    assert "other" not in text.partition("workload ")[2].partition("total")[0]
    assert "unknown" in render_text(make_findings(UNKNOWN), 20, None, False)


def test_the_keys_of_the_json() -> None:
    found = json.loads(render_json(make_findings(WEB, FREE, UNKNOWN)))
    assert set(found) == {
        "version", "source", "place", "watched_s", "asked_s", "resolution_s", "host_cores", "confidence",
        "confidence_reasons", "notes", "total", "total_limited", "total_unlimited", "workloads",
    }  # fmt: skip
    sums = {"watched_s", "missing_s", "ordered_cores", "used_cores", "used_cpu_s", "rules"}
    assert set(found["total"]) == sums
    web, free, unknown = found["workloads"]
    assert set(web) == sums | {
        "name", "kind", "detail", "cgroup", "host", "is_limited", "is_gone", "is_shared", "confidence",
        "confidence_reasons", "used_most_cores",
    }  # fmt: skip
    assert set(web["rules"]) == {"document", "peak"}
    assert set(web["rules"]["peak"]) == {
        "reclaimable_cores", "reclaimable_ratio", "held_back_ratio", "held_back_most_ratio", "limit_cores",
        "lost_work_ratio",
    }  # fmt: skip
    assert (free["is_limited"], unknown["is_limited"], unknown["rules"]) == (False, None, {})
    assert found["total"]["used_cores"] == pytest.approx(0.875)
    assert found["total_limited"]["ordered_cores"] == pytest.approx(4.0)


def test_names_that_are_no_text_do_not_break_the_json() -> None:
    odd = make_row("odd\udcff", "cgroup", "odd\udcff", 0.1, 1.0)
    assert json.loads(render_json(make_findings(odd)))["workloads"][0]["kind"] == "cgroup"


def test_the_page_shows_names_as_text() -> None:
    page = HtmlPage(render_page(make_findings(WEB, FREE, notes=[MARKUP])))
    assert "<img src=x>\\u202e" in page.texts("th")
    assert "Note: <img src=x>\\u202e" in page.texts("p")
    assert HtmlPage(render_page(make_findings())).texts("h1") == ["What cpumond would reclaim"]


def test_without_names_there_are_none() -> None:
    hidden = hide_names(make_findings(WEB, JOB, named_notes=["left out secret"]))
    for text in (render_json(hidden), render_text(hidden, 20, None, False), render_page(hidden)):
        assert ID[:6] not in text
        assert "job 7" not in text
        assert "this host" not in text
        assert "secret" not in text
        assert "workload 2" in text


@pytest.mark.parametrize("assignments", [
    (),
    ("min_cpu_limit=0.25", "peak_memory=10s", "throttle_vote=true"),
    ("min_cpu_limit=1", "min_cpu_limit=0.25", "peak_memory=10000", "throttle_vote=true", "vote_mode=document"),
    ("min_cpu_limit=2.5e-1", "peak_memory=1e4", "throttle_vote=true", "mode=reclaim", "enable_cpu_reclaim=true"),
])  # fmt: skip
def test_the_configuration_is_one(tmp_path: Path, assignments: tuple[str, ...]) -> None:
    paths = ('a"b', "a\\b", "c*d", "top/x y", "top/ключ", "new\nline", "tab\t")
    odd = [make_row(path, "cgroup", path, 0.1, 1.0) for path in paths]
    text = render_config(make_findings(WEB, JOB, FREE, *odd, assignments=assignments), lambda path: [path])
    path = tmp_path / "jobs.toml"
    path.write_text(text)
    config = load_config(str(path))
    assert config.monitor["mode"] == "shadow"
    assert [source.pattern for source in config.source][:2] == ["docker/[0-9a-f][0-9a-f]*", "slurm/uid_*/job_*"]
    assert {"docker", "slurm", "system.slice", "top", "c*d", "a\\b"} <= set(config.managed_roots)
    assert all(len(line) < 300 for line in text.splitlines())
    settings = config.resolve_settings(None, "", {})
    assert compute_mode(settings) == "shadow"
    if assignments:
        assert (settings.min_cpu_limit, settings.peak_memory_s, settings.throttle_vote) == (0.25, 10.0, True)


def test_values_that_only_repeat_the_last_one_before_a_gap_are_left_out() -> None:
    usage = {0.0: 1.0, 30.0: 2.0, 60.0: 2.0, 90.0: 3.0, 120.0: 3.0, 150.0: 3.0, 600.0: 9.0, 630.0: 9.5}
    assert estimate_prometheus.list_times(usage, 30.0) == [0.0, 30.0, 60.0, 90.0, 600.0, 630.0]
    assert estimate_prometheus.list_times({0.0: 1.0}, 30.0) == [0.0]
    assert estimate_prometheus.list_times({}, 30.0) == []
    ended = {0.0: 1.0, 30.0: 2.0, 60.0: 2.0, 90.0: 2.0}
    assert estimate_prometheus.list_times(ended, 30.0, 130.0) == [0.0, 30.0, 60.0, 90.0]
    assert estimate_prometheus.list_times(ended, 30.0, 600.0) == [0.0, 30.0]


def test_between_two_samples_use_is_even() -> None:
    before, now = CpuReading(10.0, 100.0, 0, 50, 0), CpuReading(16.0, 130.0, 0, 350, 30)
    filled = list(estimate_prometheus.interpolate(before, now, 1.0, 45.0))
    assert len(filled) == 30
    assert filled[-1] is now
    assert [each.at_s for each in filled[:2]] == [101.0, 102.0]
    assert (filled[0].total_cpu_s, filled[14].nr_throttled) == (pytest.approx(10.2), 15)
    assert list(estimate_prometheus.interpolate(None, now, 1.0, 45.0)) == [now]
    assert list(estimate_prometheus.interpolate(before, now, 1.0, 20.0)) == [now]
    assert list(estimate_prometheus.interpolate(now, before, 1.0, 45.0)) == [before]


def reader(**families: list[dict[str, str]]) -> Any:
    """Answers with two points of each series of a family; the value is in the label "value", else 1."""

    def read(expression: str) -> list[tuple[dict[str, str], dict[float, float]]]:
        name = next((name for name in families if name in expression), "")
        rows = []
        for labels in families.get(name, []):
            value = float(labels.get("value", "1"))
            rows.append(({key: text for key, text in labels.items() if key != "value"}, {0.0: value, 30.0: value}))
        return rows

    return read


def test_series_of_cadvisor() -> None:
    usage = [
        {"instance": "h1", "id": f"/docker/{ID}", "name": "web"},
        {"instance": "h1", "id": "/system.slice/a.service"},
        {"instance": "h1", "id": f"/docker/{'b' * 64}", "name": "k8s_POD_x"},
        {"node": "h2", "instance": "h2:1", "namespace": "n", "pod": "p", "container": "c", "image": "c:1"},
        {"node": "h2", "instance": "h2:1", "namespace": "n", "pod": "p", "container": "POD"},
    ]
    quota = [
        {"instance": "h1", "id": f"/docker/{ID}", "value": "150000"},
        {"instance": "h1", "id": "/system.slice/a.service", "value": "-1"},
        {"node": "h2", "instance": "h2:1", "namespace": "n", "pod": "p", "container": "c", "value": "20000"},
    ]
    period = [{"node": "h2", "instance": "h2:1", "namespace": "n", "pod": "p", "container": "c", "value": "50000"}]
    notes: list[str] = []
    quotas = {"container_spec_cpu_quota": quota, "container_spec_cpu_period": period}
    answers = reader(container_cpu_usage_seconds_total=usage, **quotas)
    found = estimate_prometheus.read_cadvisor(answers, "", notes)
    rows = {(row.host, row.workload.kind, row.workload.name): (dict(row.ordered), row.is_limited) for row in found}
    assert rows == {
        ("h1", "docker", "web"): ({0.0: 1.5}, True),
        ("h1", "unit", "a.service"): ({}, None),
        ("h2", "kubernetes", "n/p/c"): ({0.0: 0.4}, True),
    }
    assert notes[0].startswith("1 workload has no limit, and no machine_cpu_cores says")


def test_series_of_agents() -> None:
    families = {
        "cpumond_job_cpu_limit_cores": [{"instance": "h1", "job_id": "a", "value": "4"}],
        "cpumond_job_info": [
            {"instance": "h1", "job_id": "a", "operation_id": "op", "cgroup": f"docker/{ID}", "mode": "reclaim"}
        ],
        "cpumond_job_cpu_seconds_total": [{"instance": "h1", "job_id": "a"}, {"instance": "h1", "job_id": "b"}],
    }
    notes: list[str] = []
    one, other = estimate_prometheus.read_cpumond(reader(**families), "", notes)
    assert one.workload == Workload(f"docker/{ID}", "docker", "a", "operation op")
    assert (one.ordered, one.is_limited) == ({0.0: 4.0, 30.0: 4.0}, True)
    assert (other.workload.name, other.is_limited) == ("b", None)
    assert notes == ["1 job had a limit that cpumond moved: while that limit held a job back, its demand is unknown"]


def test_options_without_effect_are_said(capsys: pytest.CaptureFixture[str]) -> None:
    read_rule_settings(("mode=reclaim", "enable_cpu_reclaim=true", "pressure_restore_ratio=0.5", "min_cpu_limit=1"))
    said = capsys.readouterr().err.splitlines()
    told = [line.split(" has ")[0] for line in said]
    assert told == ["warning: mode", "warning: enable_cpu_reclaim", "warning: pressure_restore_ratio"]


def test_clusters_have_hosts_of_the_same_name() -> None:
    """What differs in a cluster's label is not the same; two that scrape the same are."""
    place = {"node": "n1", "id": f"/docker/{ID}"}
    usage = [{**place, "cluster": name, "job": job} for name in ("a", "b") for job in ("one", "two")]
    quota = [{**place, "cluster": name, "value": value} for name, value in (("a", "100000"), ("b", "200000"))]
    answers = reader(container_cpu_usage_seconds_total=usage, container_spec_cpu_quota=quota)
    found = estimate_prometheus.read_cadvisor(answers, "", [])
    assert {each.host: dict(each.ordered) for each in found} == {"a/n1": {0.0: 1.0}, "b/n1": {0.0: 2.0}}
    usage = [{"instance": "h1", "job_id": "a", "cluster": name} for name in ("a", "b")]
    found = estimate_prometheus.read_cpumond(reader(cpumond_job_cpu_seconds_total=usage), "", [])
    assert {each.host for each in found} == {"a/h1", "b/h1"}


def test_a_period_of_zero_is_that_of_the_kernel() -> None:
    labels = {"instance": "h1", "id": f"/docker/{ID}"}
    families = {
        "container_cpu_usage_seconds_total": [labels],
        "container_spec_cpu_quota": [{**labels, "value": "150000"}],
        "container_spec_cpu_period": [{**labels, "value": "0"}],
    }
    (found,) = estimate_prometheus.read_cadvisor(reader(**families), "", [])
    assert dict(found.ordered) == {0.0: 1.5}


NOW: Final = 1_000_000.0


class FakePrometheus(estimate_prometheus.Prometheus):
    """Containers that use half a core each, scraped each ``scrape_s`` from ``begin_s`` until ``end_s``; the last value
    is given for five minutes more."""

    def __init__(self, scrape_s: float, **spans: tuple[float, float]) -> None:
        super().__init__("http://x")
        self.scrape_s = scrape_s
        self.spans = spans
        self.most = 0

    def _ask(self, path: str, query: dict[str, str]) -> list[Any]:
        names = ("cpu_usage_seconds_total", "cpu_quota", "cpu_period")
        name = next((name for name in names if f"container_{name}" in query["query"].replace("spec_", "")), None)
        start_s, end_s, step_s = (float(query[key]) for key in ("start", "end", "step"))
        found = []
        for each, (begin_s, until_s) in self.spans.items() if name else ():
            result = estimate_prometheus._Result({"instance": "h1", "id": f"/docker/{each * 64}"}, [])
            for number in range(round((end_s - start_s) / step_s) + 1):
                at_s = start_s + number * step_s
                last_s = math.floor((min(at_s, until_s) - 7.0) / self.scrape_s) * self.scrape_s + 7.0
                if at_s - last_s < 300.0 and last_s >= begin_s:
                    is_stamp = query["query"].startswith("timestamp")
                    value = last_s if is_stamp else (last_s - begin_s) / 2 if name == names[0] else 100_000.0
                    result.values.append((at_s, str(value)))
            found += [result] if result.values else []
        self.most = max(self.most, sum(len(each.values) for each in found))
        return found


def read(prometheus: estimate_prometheus.Prometheus, since_s: float, step_s: float) -> Findings:
    return estimate_prometheus.read_history(prometheus, "auto", "", since_s, step_s, NOW, SETTINGS, lambda _: None)


@pytest.mark.parametrize(("scrape_s", "step_s", "until_s", "resolution_s"), [
    (60.0, 1.0, NOW, 60.0),
    (60.0, 30.0, NOW, 60.0),
    (15.0, 30.0, NOW, 30.0),
    (60.0, 1.0, NOW - 3600.0, 60.0),
    (30.0, 30.0, NOW - 80_000.0, 30.0),
    # One sample in all: nothing shows.
    (90_000.0, 1.0, NOW, 30.0),
])  # fmt: skip
def test_no_step_is_shorter_than_a_scrape(scrape_s: float, step_s: float, until_s: float, resolution_s: float) -> None:
    prometheus = FakePrometheus(scrape_s, a=(0.0, until_s))
    if scrape_s > 86_400.0:
        prometheus.spans = {"a": (math.floor((NOW - 7.0) / scrape_s) * scrape_s + 7.0, NOW)}
        notes: list[str] = []
        assert estimate_prometheus._choose(prometheus, "auto", "", 86_400.0, step_s, NOW, notes)[1] == resolution_s
        return
    found = read(prometheus, NOW - until_s + 5400.0, step_s)
    assert found.resolution_s == resolution_s
    (row,) = found.rows
    assert row.estimate.used_cores == pytest.approx(0.5, rel=0.01)
    assert row.estimate.used_most_cores == pytest.approx(0.5, rel=0.01)


def test_what_ended_is_not_watched_any_longer() -> None:
    found = read(FakePrometheus(30.0, a=(0.0, NOW), b=(NOW - 2400.0, NOW - 1800.0)), 3600.0, 30.0)
    watched = {row.workload.path[-1]: row.estimate.watched_s for row in found.rows}
    assert watched == {"a": 3600.0, "b": pytest.approx(600.0, abs=60.0)}


def test_answers_and_all_of_them_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cpumond.cli.agent.estimate_prometheus.MAX_ANSWER", 300)
    prometheus = FakePrometheus(30.0, a=(0.0, NOW), b=(0.0, NOW))
    assert len(read(prometheus, 12_000.0, 30.0).rows) == 2
    assert prometheus.most <= 300
    monkeypatch.setattr("cpumond.cli.agent.estimate_prometheus.MAX_KEPT", 500)
    with pytest.raises(UnavailableError, match="reduce it with --match, a longer --step"):
        read(FakePrometheus(30.0, a=(0.0, NOW), b=(0.0, NOW)), 12_000.0, 30.0)


def test_workloads_of_unknown_order_are_drawn() -> None:
    prometheus = FakePrometheus(30.0, a=(0.0, NOW))
    ask = prometheus._ask
    prometheus._ask = lambda path, query: [] if "spec" in query["query"] else ask(path, query)  # type: ignore[method-assign]
    found = read(prometheus, 3600.0, 30.0)
    assert found.rows[0].is_limited is None
    points = found.timeline.list_points()
    assert points[5][1][0] == pytest.approx(0.5)
    assert sum(values[0] for _, values in points) * found.timeline.bin_s == pytest.approx(found.total().used_cpu_s)


def test_without_a_cgroup_no_configuration_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Series without ``id``: a source would have nothing to find."""
    findings = make_findings(WorkloadRow(Workload("", "container", "n/p/c"), WEB.estimate, True, "h1"))
    monkeypatch.setattr("cpumond.cli.agent.estimate._read_prometheus", lambda *_: findings)
    path = tmp_path / "jobs.toml"
    assert run(["estimate", "--prometheus", "http://x", "--write", str(path)]) == 0
    assert list(tmp_path.iterdir()) == []
    assert f"{path} is not written: the cgroup of no workload is known" in capsys.readouterr().err


def test_a_weight_is_told_to_be_a_quota(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("cpumond.cli.agent.estimate._read_prometheus", lambda *_: make_findings(WEB))
    for options, is_said in (([], False), (["--set", "actuator=weight"], True)):
        assert run(["estimate", "--prometheus", "http://x", *options]) == 0
        assert ("computed as if each limit were a quota" in capsys.readouterr().out) == is_said
