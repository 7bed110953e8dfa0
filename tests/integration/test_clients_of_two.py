"""Commands, doctor, `yt`, the page and an agent's link with two real schedulers on one PostgreSQL."""

import contextlib
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from commands import run_command
from postgresql import make_schema
from scheduler_process import PlayedNode, SchedulerProcess, clean_environment
from waiting import wait_until

from cpumond.cluster.postgresql import PostgresServer

Pair = tuple[SchedulerProcess, SchedulerProcess]


@pytest.fixture(scope="module")
def schedulers(tmp_path_factory: pytest.TempPathFactory, postgresql: PostgresServer) -> Iterator[Pair]:
    conninfo = make_schema(postgresql)
    with contextlib.ExitStack() as stack:
        made = [stack.enter_context(SchedulerProcess(tmp_path_factory.mktemp(name))) for name in ("first", "second")]
        for scheduler in made:
            scheduler.write_config(f'[store]\nkind = "postgresql"\nconninfo = "{conninfo}"')
            scheduler.start()
            if scheduler is made[0]:
                wait_until(lambda: read_role(made[0]) == "leader", "the first one leads")
        made[0].create_pool("only-here")
        PlayedNode(made[0], "node-1").register()
        yield made[0], made[1]


@pytest.fixture
def pair(schedulers: Pair) -> Pair:
    """The one that leads, and the standby: on a busy host the lead may have gone to the other one."""
    wait_until(lambda: sorted(map(read_role, schedulers)) == ["leader", "standby"], "one of them leads")
    leads_first = read_role(schedulers[0]) == "leader"
    return schedulers if leads_first else schedulers[::-1]


def read_role(scheduler: SchedulerProcess) -> Any:
    return scheduler.get("/readyz")["role"]


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return run_command(list(arguments), {**clean_environment(), **environment})


def test_commands_follow_a_standby_to_the_leader(pair: Pair):
    leader, standby = pair
    for address in (standby.address, f"127.0.0.1:1,{standby.url}", f"{standby.url},{leader.url}"):
        done = run("node", "list", "--json", CPUMOND_SCHEDULER=address)
        assert [node["id"] for node in json.loads(done.stdout)["nodes"]] == ["node-1"], done.stderr
    done = run("pool", "create", "by-way-of-the-standby", "--scheduler", standby.address)
    assert done.returncode == 0, done.stderr
    assert leader.get("trees/default/pools/by-way-of-the-standby")["name"] == "by-way-of-the-standby"


def test_doctor_says_which_one_leads(pair: Pair, tmp_path: Path):
    leader, standby = pair
    config = tmp_path / "cpumond.toml"
    urls = [standby.url, leader.url, "http://127.0.0.1:1"]
    config.write_text(
        f'state_dir = "{tmp_path / "s"}"\nruntime_dir = "{tmp_path / "r"}"\n[scheduler]\nurl = {json.dumps(urls)}\n'
    )
    found = json.loads(run("doctor", "--config", str(config), "--json").stdout)
    term = leader.get("/readyz")["term"]
    told = [(each["level"], each["text"]) for each in found["findings"] if each["check"] == "scheduler"]
    assert [level for level, _ in told][:3] == ["ok", "ok", "warn"]
    assert [f"standby in term {term}" in told[0][1], f"leader in term {term}" in told[1][1]] == [True, True]


def test_yt_is_told_by_a_standby_to_ask_again(pair: Pair):
    _, standby = pair
    done = standby.yt("exists", "//sys/pool_trees/default", bindings=False)
    assert done.returncode != 0
    assert f"the scheduler at {pair[0].address} leads" in done.stderr


@pytest.mark.browser
def test_the_page_of_a_real_standby_goes_to_the_leader(pair: Pair, page: Any):
    leader, standby = pair
    page.allow(r"503 GET .*/api/v1/")
    page.clock.install()
    page.goto(f"{standby.url}/#/pools/default")
    sync_api = pytest.importorskip("playwright.sync_api")
    sync_api.expect(page.locator("header .stale")).to_contain_text(f"the leader is {leader.address}")
    page.clock.run_for(7_000)
    sync_api.expect(page.get_by_text("only-here")).to_be_visible()
    assert page.url == f"{leader.url}/#/pools/default"
