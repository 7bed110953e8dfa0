"""The closed loop where something goes wrong: processes that die, networks that fail, nodes that are overdrawn."""

import contextlib
import os
import resource
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from closed_loop import MIB, WAIT_S, Loop, Proxy, configure, is_alive, restart
from waiting import wait_until

from cpumond.host.cgroup.mounts import Hierarchies

pytestmark = pytest.mark.cgroup

OFFLINE_S = 1.0
GONE_S = 6.0
KEPT = {"enable_cpu_reclaim": False}
SHRINKING = {"min_cpu_limit": 0.2, "decrease_coefficient": 0.5, "smoothing_factor": 0.5}


class Gates:
    """Jobs that write their id into a file when they start and end with the exit code that they are told."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        directory.mkdir()
        place = f"'{directory}'"
        self.command = (
            f"echo $CPUMOND_JOB_ID >> {place}/starts; mkfifo {place}/$CPUMOND_JOB_ID; "
            f"read code < {place}/$CPUMOND_JOB_ID; exit $code"
        )

    @property
    def starts(self) -> list[str]:
        file = self.directory / "starts"
        return file.read_text().split() if file.exists() else []

    def end(self, job_id: str, code: int = 0) -> None:
        fd = wait_until(lambda: self._open(job_id), f"job {job_id} waits", WAIT_S)
        os.write(fd, f"{code}\n".encode())
        os.close(fd)

    def _open(self, job_id: str) -> int | None:
        with contextlib.suppress(OSError):
            return os.open(self.directory / job_id, os.O_WRONLY | os.O_NONBLOCK)
        return None


@pytest.fixture
def gates(tmp_path: Path) -> Gates:
    return Gates(tmp_path / "gates")


@pytest.fixture
def own(tmp_path: Path, hierarchies: Hierarchies) -> Iterator[Loop]:
    """A node of this test's own; the scheduler repairs no overcommit."""
    config = 'allowed_node_resources_overcommit_duration = "1h"\n'
    with Loop(tmp_path / "loop", hierarchies, cpu=2.0, scheduler_config=config) as cluster:
        cluster.create_pool("p")
        yield cluster
    assert cluster.leftovers() == []


class Network:
    """Two nodes, each with a proxy between it and the scheduler."""

    def __init__(self, loop: Loop, proxies: list[Proxy]) -> None:
        self.loop = loop
        self.proxies = proxies

    def proxy_of(self, job: dict[str, Any]) -> Proxy:
        return self.proxies[[node.node_id for node in self.loop.nodes].index(job["node_id"])]

    def is_online(self, job: dict[str, Any]) -> bool:
        return bool(self.loop.get(f"/api/v1/nodes/{job['node_id']}")["is_online"])


@pytest.fixture
def network(tmp_path: Path, hierarchies: Hierarchies) -> Iterator[Network]:
    loop = Loop(
        tmp_path / "loop", hierarchies, nodes=2, cpu=1.0, scheduler_config=f'node_heartbeat_timeout = "{OFFLINE_S}s"\n',
        agent_config='[scheduler]\ntimeout = "700ms"\nretry_max = "300ms"\n',
    )  # fmt: skip
    with contextlib.ExitStack() as stack:
        proxies = [stack.enter_context(Proxy(lambda: loop.scheduler.listen)) for _ in loop.nodes]
        for node, proxy in zip(loop.nodes, proxies, strict=True):
            configure(node, f'[scheduler]\nurl = "{proxy.url}"\n')
        stack.enter_context(loop)
        loop.create_pool("p")
        yield Network(loop, proxies)
    assert loop.leftovers() == []


def counts(loop: Loop, operation: str) -> dict[str, int]:
    """How the jobs of an operation ended, and how many live; without zeros."""
    jobs = loop.operation(operation)["jobs"]
    return {name: jobs[name] for name in ("active", "completed", "failed", "aborted", "lost") if jobs[name]}


def job_of(loop: Loop, operation: str, job_id: str) -> dict[str, Any]:
    [found] = [job for job in loop.jobs(operation) if job["id"] == job_id]
    return found


def test_a_killed_agent_finds_its_jobs_again(own, gates):
    operation = own.start_operation("p", gates.command, monitor=SHRINKING, max_failed_job_count=1)
    [job] = own.await_running(operation)
    own.wait(lambda: own.quota_cores(job["cgroup"]) < 0.5, "its limit is down", WAIT_S)
    pid, node = own.main_pid(job), own.nodes[0]
    node.kill()
    assert is_alive(pid)
    node.start()
    assert node.log_events("jobs_adopted")[-1]["adopted"] == 1
    found = own.wait(
        lambda: [each for each in node.get("/v1/status")["jobs"] if each["job_id"] == job["id"]], "it is seen"
    )
    assert (found[0]["cpu_limit"], own.main_pid(job)) == (1.0, pid)
    own.wait(lambda: job_of(own, operation, job["id"])["state"] == "running", "the scheduler has it")
    assert node.stop() == 0
    # The agent gave back what was ordered, not what the one that was killed had left.
    assert (own.quota_cores(job["cgroup"]), own.main_pid(job)) == (1.0, pid)
    node.start()
    gates.end(job["id"], 3)
    failed = own.await_state(operation, "failed")
    assert "exit code 3" in failed["error"]
    assert job_of(own, operation, job["id"])["exit_code"] == 3
    assert gates.starts == [job["id"]]


def test_jobs_that_end_without_an_agent_are_reported_with_exit_codes(own, gates):
    operation = own.start_operation("p", gates.command, 2, max_failed_job_count=2)
    good, bad = own.await_running(operation, 2)
    keeper, node = own.keeper_of(good), own.nodes[0]
    node.kill()
    gates.end(good["id"])
    gates.end(bad["id"], 7)
    # It does not stay when it has nothing to do.
    own.wait(lambda: not is_alive(keeper), "the keeper has ended", WAIT_S)
    node.start()
    own.wait(lambda: counts(own, operation) == {"active": 1, "completed": 1, "failed": 1}, "both ends are counted")
    assert job_of(own, operation, bad["id"])["exit_code"] == 7
    [again] = own.await_running(operation)
    gates.end(again["id"])
    own.await_state(operation, "completed")
    assert counts(own, operation) == {"completed": 2, "failed": 1}
    assert gates.starts == [*sorted([good["id"], bad["id"]], key=gates.starts.index), again["id"]]


def test_an_agent_that_cannot_write_starts_nothing_and_keeps_what_runs(own, gates):
    """A full disk, played by a limit on the size of files: the agent's writes end in the middle of a file."""
    running = own.start_operation("p", gates.command, monitor=SHRINKING)
    [job] = own.await_running(running)
    pid, node = own.main_pid(job), own.nodes[0]
    resource.prlimit(node.pid, resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
    blocked = own.start_operation("p", "true  # " + "x" * 8192, max_failed_job_count=1)
    own.wait(lambda: "could not be" in node.get("/v1/status")["executor"]["problem"], "the node says so", WAIT_S)
    view = own.operation(blocked)
    assert view["state"] == "running", "the node's fault is not the operation's"
    assert {each["state"] for each in own.jobs(blocked)} <= {"aborted", "running", "starting"}
    own.wait(
        lambda: own.get(f"/api/v1/nodes/{node.node_id}")["capacity"]["user_slots"] == 0, "it offers nothing", WAIT_S
    )
    assert (is_alive(pid), job_of(own, running, job["id"])["state"]) == (True, "running")
    gates.end(job["id"])
    own.await_state(running, "completed")
    # With room again, the next run of the agent starts what waits.
    node.kill()
    node.start()
    own.await_state(blocked, "completed")


@pytest.mark.parametrize("fault", ["cut", "half-open"])
def test_a_network_that_fails_for_a_short_time_loses_nothing(network, gates, fault):
    loop = network.loop
    operation = loop.start_operation("p", gates.command)
    [job] = loop.await_running(operation)
    proxy, pid = network.proxy_of(job), loop.main_pid(job)
    if fault == "half-open":
        taken = len(proxy.heartbeats())
        proxy.cut_half_open()
        loop.wait(lambda: len(proxy.heartbeats()) > taken, "heartbeats come over another connection", WAIT_S)
    else:
        proxy.mode = fault
        loop.wait(lambda: not network.is_online(job), "the node is offline")
        gates.end(job["id"])
        loop.wait(lambda: not is_alive(pid), "it ended meanwhile")
        assert loop.operation(operation)["state"] == "running"
        proxy.mode = "pass"
    if fault == "half-open":
        gates.end(job["id"])
    loop.await_state(operation, "completed")
    assert (counts(loop, operation), gates.starts) == ({"completed": 1}, [job["id"]])
    loop.await_no_jobs()


def test_a_job_of_a_node_away_too_long_runs_elsewhere_and_ends_on_return(network, gates):
    loop = network.loop
    loop.set_tree(node_reconnection_timeout=GONE_S * 1000)
    operation = loop.start_operation("p", gates.command)
    [job] = loop.await_running(operation)
    proxy, pid = network.proxy_of(job), loop.main_pid(job)
    proxy.mode = "cut"
    other = loop.wait(lambda: [each for each in loop.await_running(operation) if each["id"] != job["id"]], "another")[0]
    assert other["node_id"] != job["node_id"]
    assert counts(loop, operation) == {"active": 1, "lost": 1}
    assert "silent" in job_of(loop, operation, job["id"])["reason"]
    [lost] = loop.scheduler.log_events("nodes_lost")
    assert (lost["nodes"], lost["jobs"]) == ([job["node_id"]], 1)
    # Nobody can reach it there.
    assert is_alive(pid)
    proxy.mode = "pass"
    loop.wait(lambda: not is_alive(pid), "the replaced job is stopped", WAIT_S)
    loop.wait(lambda: network.is_online(job), "its node is back")
    assert is_alive(loop.main_pid(other))
    gates.end(other["id"])
    loop.await_state(operation, "completed")
    assert counts(loop, operation) == {"completed": 1, "lost": 1}
    assert gates.starts == [job["id"], other["id"]]
    loop.await_no_jobs()


def test_jobs_reserve_less_memory_than_allowed_until_their_node_is_short(own, tmp_path):
    """MEM-8 and MEM-9, in a quarter of the size."""
    node, limit, gate = own.nodes[0], 128 * MIB, tmp_path / "gate"
    configure(node, f'[resources]\nmemory = {2 * limit}\nresource_adjustment_period = "100ms"\n')
    restart(node)

    def start(command: str, count: int, **options: Any) -> str:
        task = {"job_count": count, "command": command, "cpu_limit": 0.1, "memory_limit": limit, **options}
        spec = {"pool": "p", "tasks": {"main": task}, "job_cpu_monitor": KEPT}
        return str(own.post("/api/v1/operations", {"spec": spec})["id"])

    for options, running in (({}, 4), ({"memory_reserve_factor": 1.0}, 2)):
        operation = start("sleep 1000", 6, **options)
        jobs = own.await_running(operation, running)
        assert {job["memory_reserve"] for job in jobs} == {2 * limit // running}
        assert len(own.jobs(operation)) == running, "there is no room for more"
        own.abort(operation)
        own.await_no_jobs()
    # Three take 108 MiB of 256, the last one goes; its successor reserves 128 and is within that, so another one goes.
    hungry = (
        f"{sys.executable} -S -c \"import os, time\ndata = bytearray(b'x') * {100 * MIB}\n"
        f"while not os.path.exists('{gate}'): time.sleep(0.05)\""
    )
    operation = start(hungry, 3)
    own.wait(lambda: len(own.jobs(operation, "aborted")) == 2, "two are aborted", WAIT_S)
    aborted = own.jobs(operation, "aborted")
    assert all(job["reason"].startswith("resource_overdraft: above its memory reserve: ") for job in aborted)
    running = own.wait(lambda: len(found := own.jobs(operation, "running")) == 2 and found, "two run", WAIT_S)
    assert sorted(job["memory_reserve"] for job in running) == [limit // 2, limit]
    details = own.wait(
        lambda: (seen := own.operation(operation))["over_reserve_count"] and seen, "one is above", WAIT_S
    )
    assert (details["over_reserve_count"], counts(own, operation)) == (1, {"active": 2, "aborted": 2})
    why = own.run("operation", "why", operation).stdout
    assert "it waits for memory: 128 MiB of memory_limit 128 MiB are reserved" in why
    assert "1 job uses more memory than reserved" in why
    gate.touch()
    own.await_state(operation, "completed")
    assert counts(own, operation) == {"completed": 3, "aborted": 2}
