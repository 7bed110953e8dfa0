"""The files of ``config/prometheus`` and ``config/grafana``: they are good, tested, and each alert has its runbook."""

import itertools
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
RULES = ROOT / "config" / "prometheus"
RUNBOOK = ROOT / "docs" / "runbook.md"
RULE_TESTS = sorted((ROOT / "tests" / "prometheus").glob("*.yml"))
DASHBOARDS = sorted((ROOT / "config" / "grafana").glob("*.json"))


def promtool(*arguments: object) -> str:
    program = shutil.which("promtool")
    if program is None:
        pytest.skip("needs promtool (apt-get install --no-install-recommends prometheus)")
    done = subprocess.run(
        [program, *map(str, arguments)], capture_output=True, text=True, timeout=250, check=False, cwd=ROOT
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def read_rules(name: str) -> list[dict[str, Any]]:
    groups = yaml.safe_load((RULES / name).read_text(encoding="utf-8"))["groups"]
    return [rule for group in groups for rule in group["rules"]]


ALERTS = read_rules("alerts.yml")


def scheduler_of_the_example() -> str:
    """The address that an operator replaces in both files at once."""
    [job] = [
        job
        for job in yaml.safe_load((RULES / "prometheus.yml").read_text(encoding="utf-8"))["scrape_configs"]
        if job["job_name"] == "cpumond-scheduler"
    ]
    [[target]] = [each["targets"] for each in job["static_configs"]]
    return f"http://{target}"


@pytest.mark.prometheus
def test_promtool_accepts_the_rules_and_the_example() -> None:
    answer = promtool("check", "rules", RULES / "recording.yml", RULES / "alerts.yml")
    assert f"{len(ALERTS)} rules found" in answer
    promtool("check", "config", RULES / "prometheus.yml")


@pytest.mark.prometheus
@pytest.mark.parametrize("path", RULE_TESTS, ids=lambda path: path.stem)
def test_alerts_fire_and_are_quiet_as_the_cases_say(path: Path) -> None:
    assert "SUCCESS" in promtool("test", "rules", path)


def test_each_alert_has_a_case_that_fires_and_one_that_does_not() -> None:
    cases = [
        (case["alertname"], bool(case["exp_alerts"]))
        for path in RULE_TESTS
        for test in yaml.safe_load(path.read_text(encoding="utf-8"))["tests"]
        for case in test.get("alert_rule_test", [])
    ]
    names = {rule["alert"] for rule in ALERTS}
    assert set(cases) == set(itertools.product(names, (True, False)))


def test_each_recorded_value_has_a_case() -> None:
    tests = yaml.safe_load((ROOT / "tests" / "prometheus" / "recording.yml").read_text(encoding="utf-8"))["tests"]
    cases = [case["expr"] for test in tests for case in test["promql_expr_test"]]
    assert sorted(cases) == sorted(rule["record"] for rule in read_rules("recording.yml"))


@pytest.mark.parametrize("rule", ALERTS, ids=lambda rule: rule["alert"])
def test_an_alert_says_what_it_is_about(rule: dict[str, Any]) -> None:
    assert re.fullmatch(r"Cpumond[A-Za-z]+", rule["alert"])
    assert re.fullmatch(r"[1-9]\d*[mh]", rule["for"])
    assert rule["labels"]["severity"] in ("info", "warning", "critical")
    annotations = rule["annotations"]
    assert set(annotations) == {"summary", "description", "runbook_url"}
    assert annotations["runbook_url"] == f"{scheduler_of_the_example()}/web/runbook.html#{rule['alert'].lower()}"
    figures = re.findall(r"\$value(.*?)\}\}", " ".join(annotations.values()))
    rounded = ' | printf "%.0f" ', ' | printf "%.2g" ', " | humanizePercentage ", " | humanizeDuration "
    assert set(figures) <= set(rounded), "a figure with all its digits, or 0.1 as 100m"
    assert annotations["summary"].endswith(".")
    assert annotations["description"].endswith(".")
    assert "$labels" in annotations["summary"]


def test_each_alert_has_its_section_in_the_runbook_and_none_is_left_over() -> None:
    sections = re.split(r"^### ", RUNBOOK.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
    titles = [section.partition("\n")[0] for section in sections]
    assert titles == [rule["alert"] for rule in ALERTS]
    assert len(set(titles)) == len(titles) > 20
    for title, section in zip(titles, sections, strict=True):
        for part in ("**Means:**", "**Look:**", "**Do:**", "**Too loud?**"):
            assert part in section, f"{title} has no {part}"


def read_board(path: Path) -> dict[str, Any]:
    board: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return board


def list_targets(board: dict[str, Any]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    return [(panel, target) for panel in board["panels"] for target in panel.get("targets", [])]


def test_the_dashboards_are_there() -> None:
    assert [path.stem for path in DASHBOARDS] == ["node", "pools", "reclaim"]
    boards = [read_board(path) for path in DASHBOARDS]
    assert len({board["uid"] for board in boards}) == len({board["title"] for board in boards}) == len(boards)


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_a_panel_says_what_it_shows(path: Path) -> None:
    board = read_board(path)
    assert board["schemaVersion"] >= 39
    panels = board["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    for panel in panels:
        assert panel["title"], panel["id"]
        if panel["type"] == "row":
            continue
        assert panel["description"].endswith("."), panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]
        assert panel["datasource"]["uid"] == "${datasource}", panel["title"]
        assert panel["targets"], panel["title"]
    for panel, target in list_targets(board):
        assert target["legendFormat"], panel["title"]
        assert target["datasource"]["uid"] == "${datasource}", panel["title"]
    references = [[target["refId"] for target in panel.get("targets", [])] for panel in panels]
    assert all(len(set(each)) == len(each) for each in references)
