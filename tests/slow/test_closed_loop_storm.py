"""The closed loop in one fault after the other, with slow answers, and with old messages that come again."""

# ruff: noqa: F811 - fixtures of another file are arguments here

import contextlib
import os
import signal
from collections.abc import Callable
from typing import Any

import httpx2
import pytest
from closed_loop import WAIT_S, Proxy, runs
from test_closed_loop_faults import counts, gates, network  # noqa: F401 - fixtures

pytestmark = pytest.mark.cgroup


def test_slow_answers_cost_time_only(network, gates):
    loop = network.loop
    for proxy in network.proxies:
        proxy.delay_s = 0.4
    operation = loop.start_operation("p", f"echo $CPUMOND_JOB_ID >> '{gates.directory}/starts'", 8, cpu_limit=0.2)
    loop.await_state(operation, "completed")
    assert (counts(loop, operation), len(set(gates.starts)), len(gates.starts)) == ({"completed": 8}, 8, 8)


def test_old_messages_that_come_again_change_nothing(network, gates):
    loop, node = network.loop, network.loop.nodes[0]
    operation = loop.start_operation("p", gates.command, 2)
    first, second = loop.await_running(operation, 2)
    gates.end(first["id"])
    loop.wait(lambda: counts(loop, operation) == {"active": 1, "completed": 1}, "the first is done", WAIT_S)
    pid = loop.main_pid(second)
    node.kill()
    node.start()
    runs = [proxy.heartbeats()[0]["incarnation"] for proxy in network.proxies]
    loop.wait(lambda: network.proxies[0].heartbeats()[-1]["incarnation"] != runs[0], "the node is back", WAIT_S)
    before = [(job["id"], job["state"], job["finish_time"]) for job in loop.jobs(operation)]
    with httpx2.Client(base_url=loop.url, trust_env=False, verify=False, timeout=60.0) as client:
        for proxy in network.proxies:
            # The newest may still be on its way.
            for path, body in reversed(list(proxy.requests)[:-2]):
                answer = client.post(path, json=body)
                if path == "/api/v1/heartbeats":
                    assert answer.json()["accepted"] is False, answer.text
                elif body["incarnation"] == runs[0]:
                    assert answer.status_code == 422
                    assert "was replaced by the later run" in answer.text
    after = [(job["id"], job["state"], job["finish_time"]) for job in loop.jobs(operation)]
    assert (after, loop.main_pid(second)) == (before, pid)
    gates.end(second["id"])
    loop.await_state(operation, "completed")
    assert counts(loop, operation) == {"completed": 2}
    assert sorted(gates.starts) == sorted([first["id"], second["id"]])


def test_a_storm_of_faults_repeats_no_job_and_loses_no_work(network, gates):
    loop, (left, right) = network.loop, network.proxies
    first, second = loop.nodes
    place, total = f"'{gates.directory}'", 40
    command = f"echo $CPUMOND_JOB_ID >> {place}/starts; sleep 0.5; echo $CPUMOND_JOB_ID >> {place}/ends"
    operation = loop.start_operation("p", command, total, cpu_limit=0.25, max_failed_job_count=1)

    def pass_later(proxy: Proxy, mode: Any, condition: Callable[[], Any]) -> None:
        proxy.mode = mode
        loop.wait(condition, f"the network was bad: {mode}", WAIT_S)
        proxy.mode = "pass"

    def lose_answers() -> None:
        sent = len(right.heartbeats())
        pass_later(right, "no answers", lambda: len(right.heartbeats()) > sent + 1)

    def refuse() -> None:
        pass_later(left, "refuse", lambda: not loop.get(f"/api/v1/nodes/{first.node_id}")["is_online"])

    faults: list[Callable[[], object]] = [
        first.kill, first.start, loop.scheduler.kill, loop.scheduler.start, lose_answers,
        lambda: [kill_if_there(pid) for pid in second.find_keepers()],
        refuse, left.cut_half_open, second.stop, second.start, loop.scheduler.kill, second.kill, second.start,
        loop.scheduler.start,
    ]  # fmt: skip
    for fault in faults:
        fault()
        if all(runs(process) for process in (loop.scheduler, *loop.nodes)):
            goal = min(len(gates.starts) + 3, total)
            loop.wait(lambda: len(gates.starts) >= goal, "it goes on", WAIT_S)  # noqa: B023
    loop.await_state(operation, "completed")
    loop.await_no_jobs()
    done = {job["id"] for job in loop.jobs(operation) if job["state"] == "completed"}
    assert len(set(gates.starts)) == len(gates.starts) >= total
    assert len(done) >= total
    assert done <= set((gates.directory / "ends").read_text().split())
    view = loop.operation(operation)["jobs"]
    assert (view["completed"], view["failed"]) == (total, 0)
    for node in loop.nodes:
        assert not node.log_events("assigned_jobs_failed")
        assert not node.log_events("tick_failed")


def kill_if_there(pid: int) -> None:
    """SIGKILL; the first process of a new keeper ends at once."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
