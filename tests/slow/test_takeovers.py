"""Two schedulers, three agents, real jobs: the leader is killed and stopped again and again, and loses its session."""

import base64
import contextlib
import os
import secrets
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from closed_loop import Proxy
from postgresql import run_sql
from scheduler_process import PlayedNode, SchedulerProcess
from takeover import LEASE_S, Pair, kill_the_leader, stop_the_leader, two_schedulers
from waiting import wait_until

from cpumond.cluster import CLUSTER_PREFIX, Cluster
from cpumond.cluster.postgresql import PostgresServer
from cpumond.cluster.processes import ClusterScheduler
from cpumond.core.errors import UnavailableError
from cpumond.scheduler.store.postgresql import HOLDERS, LEAD

pytestmark = [pytest.mark.cgroup, pytest.mark.timeout(3000)]

ROUNDS = 50


@pytest.fixture
def needs_postgresql() -> None:
    try:
        PostgresServer().close()
    except UnavailableError as error:
        pytest.skip(f"needs PostgreSQL: {error}")


@pytest.fixture
def pair(tmp_path_factory: pytest.TempPathFactory, needs_postgresql: None) -> Iterator[Pair]:
    with two_schedulers(tmp_path_factory.mktemp("pair")) as made:
        yield made


def test_killed_again_and_again(pair: Pair, capsys: pytest.CaptureFixture[str]):
    took = [kill_the_leader(pair) for _ in range(ROUNDS)]
    with capsys.disabled():
        print(f"\n{ROUNDS} kills: every node heard after {statistics.median(took):.2f} s, {max(took):.2f} at most")


def test_stopped_again_and_again(pair: Pair, capsys: pytest.CaptureFixture[str]):
    took, answered = zip(*(stop_the_leader(pair) for _ in range(ROUNDS)), strict=True)
    with capsys.disabled():
        print(
            f"\nstopped {ROUNDS} times, lease {LEASE_S:g} s: every node heard after {statistics.median(took):.2f} s, "
            f"{max(took):.2f} at most; 503 after SIGCONT within {max(answered):.3f} s"
        )


@pytest.mark.parametrize("is_killed", [True, False], ids=["killed", "stopped"])
def test_a_command_through_a_take_over_keeps_output_and_exit_code(pair: Pair, tmp_path, is_killed):
    gate, told = tmp_path / "gate", tmp_path / "stderr"
    script = f"seq 1 50000; until [ -e {gate} ]; do sleep 0.1; done; seq 50001 100000; exit 7"
    words = ["run", "--pool", "p", "--cpu-limit", "0.5", "--", "sh", "-c", script]
    kept = {name: value for name, value in os.environ.items() if not name.startswith("CPUMOND")}
    environment = {**kept, "CPUMOND_SCHEDULER": ",".join(pair.cluster.urls), "HOME": str(tmp_path)}
    with told.open("w") as stderr, subprocess.Popen(
        [sys.executable, "-m", "cpumond", *words],
        env=environment, stdout=subprocess.PIPE, stderr=stderr, text=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        assert process.stdout.readline() == "1\n"
        leader, other = pair.leader(), pair.standby()
        began_s = time.monotonic()
        leader.kill() if is_killed else leader.pause()
        pair.wait_led_by(other, began_s)
        gate.touch()  # it ends while only the other scheduler knows of it
        rest = process.stdout.read()
        assert process.wait(150) == 7, told.read_text()
        leader.start() if is_killed else leader.resume()
    assert rest == "".join(f"{number}\n" for number in range(2, 100_001))
    assert "is failed" in told.read_text()


def client_of(scheduler: ClusterScheduler, directory: Path) -> SchedulerProcess:
    """Requests to one scheduler of a cluster, whichever leads."""
    client = SchedulerProcess(directory)
    client.address = scheduler.listen
    return client


def test_a_leader_whose_session_is_ended_starts_nothing_more(tmp_path: Path, needs_postgresql: None):
    # A leader looks into its store with each update, and would notice by that at once: all of it is between two, on a
    # busy machine too.
    cluster = Cluster(
        tmp_path, 1, schedulers=2, lease="300s", scheduler_config='fair_share_update_period = "24s"',
        cgroup_prefix=f"{CLUSTER_PREFIX}{os.getpid()}-session",  # the pair's jobs live in the usual place
    )  # fmt: skip
    target = [cluster.scheduler]
    drop_in = tmp_path / "node-1/conf.d/proxy.toml"
    with Proxy(lambda: target[0].listen) as proxy:
        drop_in.parent.mkdir(parents=True, exist_ok=True)
        drop_in.write_text(f'[scheduler]\nurl = "{proxy.url}"', encoding="utf-8")

        def switch_to(scheduler: ClusterScheduler) -> None:
            proxy.mode, target[0] = "refuse", scheduler
            threading.Event().wait(0.1)
            proxy.mode = "pass"
            heard = len(proxy.heartbeats())
            wait_until(lambda: len(proxy.heartbeats()) > heard + 1, "the agent reports there")

        with cluster, contextlib.ExitStack() as stack:
            old, new = (
                stack.enter_context(contextlib.closing(client_of(scheduler, tmp_path)))
                for scheduler in cluster.schedulers
            )
            late = PlayedNode(old, "late", cpu=100.0)
            late.register()
            old.create_pool("p")
            operation = old.start_operation("p", cpu=50.0)
            old.wait_updates(1)
            assert cluster.database is not None
            conninfo = cluster.database.conninfo()
            end = f"SELECT pg_terminate_backend(pid) {HOLDERS} AND classid::bigint = {LEAD}"
            assert run_sql(conninfo, end) == [(True,)]
            wait_until(lambda: new.request("GET", "status").status_code == 200, "the other scheduler leads")

            switch_to(cluster.schedulers[1])
            switch_to(cluster.schedulers[0])
            refused = wait_until(lambda: cluster.nodes[0].log_events("term_refused"), "the agent refuses an answer")
            assert "term" in refused[0]["error"]

            # It has an operation to start and a node for it, but whatever it decides it has to store first.
            assert old.get("status")["version"]
            answers = [late.send() for _ in range(3)]
            assert not any(answer.json().get("start") for answer in answers), [each.text for each in answers]
            assert answers[-1].status_code == 503
            wait_until(
                lambda: old.request("GET", "status").headers.get("x-cpumond-leader") == cluster.schedulers[1].listen,
                "it names the one that leads",
            )

            late.scheduler = new
            started = wait_until(lambda: late.beat()["start"], "the one that leads starts it")
            assert [order["operation_id"] for order in started] == [operation]


def test_a_scheduler_without_the_key_starts_nothing_with_secrets(tmp_path: Path, needs_postgresql: None):
    """It holds such operations, says so, and what runs goes on; the next one that has the key starts the rest."""
    keys, gate, values = tmp_path / "keys", tmp_path / "gate", tmp_path / "values"
    keys.touch(mode=0o600)
    mine, another = (base64.b64encode(secrets.token_bytes(32)) for _ in range(2))
    keys.write_bytes(mine)
    cluster = Cluster(
        tmp_path / "cluster", 1, cpu=2.0, schedulers=2, lease=f"{LEASE_S:g}s", token="a-token",  # noqa: S106
        scheduler_config=f'secrets_key_file = "{keys}"\n', cgroup_prefix=f"{CLUSTER_PREFIX}{os.getpid()}-keys",
    )  # fmt: skip
    with cluster:
        cluster.create_pool("p")
        keys.write_bytes(another)
        first, second = cluster.schedulers
        second.kill()
        second.start()
        script = f"echo $YT_SECURE_VAULT_word >> {values}; until [ -e {gate} ]; do sleep 0.1; done"
        operation = cluster.start_operation("p", script, 2, 1.5, secure_vault={"word": "swordfish"})
        cluster.wait(values.exists, "its first job has its secret")
        first.kill()
        cluster.wait(lambda: cluster.find_leader() is second, "the other one leads")
        codes = cluster.wait(lambda: [each["code"] for each in cluster.get("/api/v1/alerts")["alerts"]], "an alert")
        assert "secrets_not_readable" in codes
        [job] = cluster.wait(lambda: cluster.jobs(operation, "running"), "the node has told of its job")
        gate.touch()
        cluster.wait(lambda: cluster.jobs(operation, "completed"), "that job ends as it would have")
        other = cluster.start_operation("p", "true")
        cluster.wait(lambda: cluster.get(f"/api/v1/operations/{other}")["state"] == "completed", "others are run")
        assert [each["id"] for each in cluster.jobs(operation)] == [job["id"]]
        keys.write_bytes(mine)
        first.start()
        second.kill()
        cluster.wait(
            lambda: (
                cluster.find_leader() is first
                and cluster.get(f"/api/v1/operations/{operation}")["state"] == "completed"
            ),
            "the rest of it is run by the scheduler that has the key",
        )
    assert values.read_text() == "swordfish\n" * 2
