"""A real Prometheus server scrapes a running scheduler and agent: each panel of each dashboard has data."""

import json
import math
import os
import re
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx2
import pytest
import yaml
from documents import list_metrics
from prometheus_server import Prometheus, find_program
from test_prometheus_rules import read_board, read_rules
from waiting import PATIENCE, wait_until

from cpumond.cluster import Cluster
from cpumond.host.cgroup.mounts import Hierarchies

pytestmark = [pytest.mark.prometheus, pytest.mark.cgroup]

CONFIG = Path(__file__).resolve().parents[2] / "config"
RULE_FILES = ("alerts.yml", "recording.yml")
TOKEN = "dashboards"  # noqa: S105 - of the cluster of this test
DATA_S = 45.0 * PATIENCE
"""Within this time each panel must have data; rates need some scrapes, limits some checks."""

RANGES = {"$__rate_interval": "8s", "$__range": "20s", "$__interval": "2s"}
SCRAPE = """
global:
  scrape_interval: 1s
  scrape_timeout: 1s
  evaluation_interval: 1s
rule_files: ["{rules}/*.yml"]
scrape_configs:
  - job_name: cpumond-agent
    static_configs: [{{targets: ["127.0.0.1:{agent}"]}}]
  - job_name: cpumond-scheduler
    authorization: {{credentials: "{token}"}}
    static_configs: [{{targets: ["{scheduler}"]}}]
"""


@pytest.fixture(scope="module")
def cluster(hierarchies: Hierarchies, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """One node, an integral pool whose short jobs start all the time, and one with a job that sleeps, by rule peak."""
    find_program("prometheus")
    with Cluster(
        tmp_path_factory.mktemp("cluster"), 1, check_period="250ms", token=TOKEN,
        cgroup_prefix=f"cpumond-test-dashboards-{os.getpid()}", web=True,
        monitor={"smoothing_factor": 1.0, "vote_window_size": 2, "vote_decision_threshold": 1,
                 "decrease_coefficient": 0.5},
    ) as whole:  # fmt: skip
        amounts = {"resource_flow": {"cpu": 0.2}, "burst_guarantee_resources": {"cpu": 0.4}}
        whole.create_pool("bursts", integral_guarantees={"guarantee_type": "burst", **amounts})
        whole.create_pool("steady", strong_guarantee_resources={"cpu": 0.3})
        whole.start_operation("bursts", "sleep 1", job_count=1000, cpu_limit=0.2)
        sleeping = whole.start_operation("steady", ["sleep", "1000"], cpu_limit=0.3, monitor={"limit_rule": "peak"})
        whole.wait(lambda: whole.jobs(sleeping, "running"), "the sleeping job runs")
        add_engine(whole)
        yield whole


def add_engine(cluster: Cluster) -> None:
    node = cluster.nodes[0]
    drop_in = Path(node.config_path).parent / "conf.d" / "engine.toml"
    drop_in.parent.mkdir(exist_ok=True)
    drop_in.write_text(f'[[source]]\nkind = "docker"\nsocket = "{drop_in.parent}/no.sock"\n', encoding="utf-8")
    os.kill(node.pid, signal.SIGHUP)


@pytest.fixture(scope="module")
def prometheus(cluster: Cluster) -> Iterator[Prometheus]:
    """The server with our rules, once it has scraped both a few times."""
    with tempfile.TemporaryDirectory(prefix="cpumond-prometheus-") as directory:
        rules = Path(directory, "rules")
        rules.mkdir()
        for name in RULE_FILES:
            shutil.copyfile(CONFIG / "prometheus" / name, rules / name)
        agent_port = urlsplit(cluster.nodes[0].metrics_url).port
        scrape = SCRAPE.format(rules=rules, agent=agent_port, scheduler=cluster.scheduler.listen, token=TOKEN)
        server = Prometheus(Path(directory), scrape)
        try:
            # Targets are discovered some seconds after the start.
            wait_until(lambda: server.query("count(count_over_time(up[1m]) >= 3) == 2"), "Prometheus scrapes", 60)
            yield server
        finally:
            server.stop()


def list_rules() -> list[dict[str, Any]]:
    return [rule for name in RULE_FILES for rule in read_rules(name)]


def list_options(prometheus: Prometheus, query: str, values: dict[str, str]) -> list[str]:
    """What Grafana offers for a variable ``label_values(series, label)``."""
    found = re.fullmatch(r"label_values\((.+), (\w+)\)", query)
    assert found is not None, query
    options: list[str] = prometheus.get(f"label/{found[2]}/values", **{"match[]": fill_in(found[1], values)})
    return options


def fill_in(expression: str, values: dict[str, str]) -> str:
    """An expression as Grafana sends it."""
    for name, value in {**RANGES, **values}.items():
        expression = re.sub(rf"{re.escape(name)}\b", value, expression)
    assert "$" not in expression, f"a variable that is not known: {expression}"
    return expression


def find_without_data(
    prometheus: Prometheus, board: dict[str, Any], wanted: dict[str, str], within_s: float
) -> list[str]:
    """The panels' expressions without a sample that is a number, with ``wanted`` chosen in its variables."""
    values: dict[str, str] = {}
    for variable in board["templating"]["list"]:
        if variable["type"] == "query":
            name = variable["name"]
            assert wanted[name] in list_options(prometheus, variable["query"]["query"], values), name
            values[f"${name}"] = wanted[name]
    pending = {
        (panel["title"], fill_in(target["expr"], values))
        for panel in board["panels"]
        for target in panel.get("targets", [])
    }
    assert len(pending) > 20
    pause, deadline_s = threading.Event(), time.monotonic() + within_s
    while True:
        pending = {item for item in pending if not any(math.isfinite(value) for _, value in prometheus.query(item[1]))}
        if not pending or time.monotonic() >= deadline_s:
            return [f"{title}: {expr}" for title, expr in sorted(pending)]
        pause.wait(0.2)


@pytest.fixture
def wanted(cluster: Cluster) -> dict[str, str]:
    operations = cluster.get("/api/v1/operations?pool=steady")["operations"]
    [job] = cluster.jobs(operations[0]["id"], "running")
    node = urlsplit(cluster.nodes[0].metrics_url).netloc
    return {"node": node, "tree": "default", "pool": "bursts", "job_id": job["id"]}


def test_both_targets_are_up_and_the_rules_are_good(prometheus: Prometheus) -> None:
    up = {"cpumond-agent": 1.0, "cpumond-scheduler": 1.0}
    # A scrape that took longer than a second on a busy machine counts as one of a target that is down.
    wait_until(lambda: {labels["job"]: value for labels, value in prometheus.query("up")} == up, "both are up")

    def evaluated() -> list[dict[str, Any]]:
        rules = [rule for group in prometheus.get("rules")["groups"] for rule in group["rules"]]
        return rules if all(rule["health"] != "unknown" for rule in rules) else []

    rules = wait_until(evaluated, "all rules are evaluated")
    assert {rule["name"] for rule in rules} == {rule.get("alert") or rule["record"] for rule in list_rules()}
    assert [(rule["name"], rule["lastError"]) for rule in rules if rule["health"] != "ok"] == []
    assert prometheus.log() == ""


@pytest.mark.parametrize("name", [path.stem for path in sorted((CONFIG / "grafana").glob("*.json"))])
def test_every_panel_has_data(prometheus: Prometheus, wanted: dict[str, str], name: str) -> None:
    missing = find_without_data(prometheus, read_board(CONFIG / "grafana" / f"{name}.json"), wanted, DATA_S)
    assert not missing, "without data:\n" + "\n".join(missing)


OF_SEVERAL = {f"cpumond_scheduler_{name}" for name in ("leads", "lead_unknown", "lost_leads_total")}
"""What schedulers have that share a store: ``test_leading.py`` finds them there."""


def test_every_metric_of_the_rules_is_there(prometheus: Prometheus) -> None:
    """An alert about a metric that nobody has would never fire."""
    expressions = [re.sub(r'"[^"]*"', "", rule["expr"]) for rule in list_rules()]
    names = {name for expr in expressions for name in re.findall(r"\b(?:cpumond[\w:]*|up)\b", expr)}
    assert len(names) > 30
    assert names >= OF_SEVERAL
    for name in sorted(names - OF_SEVERAL):
        wait_until(lambda name=name: prometheus.query(f"count({name})"), f"{name} is there")


def test_every_metric_that_documents_name_is_there(cluster: Cluster) -> None:
    """Those that need a budget, a forecast, a held-off node or a refused term are in the text of an exporter."""
    with httpx2.Client(trust_env=False, timeout=250, headers={"Authorization": f"Bearer {TOKEN}"}) as client:
        texts = [client.get(url).text for url in (cluster.nodes[0].metrics_url, f"{cluster.url}/metrics")]
    known = set(re.findall(r"^# TYPE (\w+)", "\n".join(texts), re.MULTILINE)) | OF_SEVERAL
    package = CONFIG.parent / "cpumond"
    source = "".join(path.read_text(encoding="utf-8") for path in package.rglob("exporter.py"))
    known |= {name.removesuffix("_total") for name in known} | set(re.findall(r"\bcpumond_\w+", source))
    named = {name for name in list_metrics() if name not in known}
    assert sorted(name for name in named if not any(each.startswith(name) for each in known)) == []


@pytest.mark.parametrize("part", ["scheduler", "agent"])
def test_promtool_finds_nothing_to_say(cluster: Cluster, part: str) -> None:
    """Names, types and help texts are as Prometheus wants them."""
    program = find_program("promtool")
    url = cluster.nodes[0].metrics_url if part == "agent" else f"{cluster.url}/metrics"
    headers = {"Authorization": f"Bearer {TOKEN}"} if part == "scheduler" else {}
    with httpx2.Client(trust_env=False, verify=False, timeout=250, headers=headers) as client:
        text = client.get(url).raise_for_status().text
    done = subprocess.run(
        [program, "check", "metrics"], input=text, capture_output=True, text=True, timeout=250, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_what_grafana_is_given_leads_to_what_is_installed() -> None:
    """The provider reads the folder that the Debian package fills; every dashboard takes the source of its type."""
    given = {
        path.parent.name: yaml.safe_load(path.read_text()) for path in CONFIG.glob("grafana/provisioning/*/*.yaml")
    }
    (provider,), (source,) = given["dashboards"]["providers"], given["datasources"]["datasources"]
    rules = (CONFIG.parent / "packaging/debian/rules").read_text()
    assert f"$(ROOT){provider['options']['path']} config/grafana/*.json" in rules
    configured = yaml.safe_load((CONFIG / "prometheus/prometheus.yml").read_text())["global"]["scrape_interval"]
    assert source["jsonData"]["timeInterval"] == configured
    for path in CONFIG.glob("grafana/*.json"):
        variables = {each["name"]: each for each in json.loads(path.read_text())["templating"]["list"]}
        assert variables["datasource"]["query"] == source["type"], path.name
