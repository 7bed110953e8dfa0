"""Jobs and pins of the control socket: on disk before they are acknowledged."""

import os

import pytest
import structlog
from fake_node import FakeNode

from cpumond.agent import control
from cpumond.agent.registry import RegisteredJobs
from cpumond.agent.state_file import Pin
from cpumond.core.answers import RegisteredJob
from cpumond.core.errors import CreateError
from cpumond.testing import v2_cgroup

JOB = RegisteredJob("a", "jobs/a", "op", 2.0, {"mode": "shadow"})


@pytest.fixture
def directory(tmp_path):
    return str(tmp_path)


def reopen(directory):
    registered = RegisteredJobs(directory)
    registered.load()
    return registered


def test_what_was_acknowledged_is_there_after_a_crash(directory):
    registered = reopen(directory)
    assert not registered.remove("a")
    assert os.listdir(directory) == []
    registered.add(RegisteredJob("a", "jobs/a", "op", 3.0))
    registered.add(JOB)
    registered.add(RegisteredJob("b", "jobs/b"))
    registered.pin("a", Pin(1.0))
    assert registered.remove("b")
    again = reopen(directory)
    assert (again.content.jobs, again.content.pins) == ({"a": JOB}, {"a": Pin(1.0)})
    [found] = again.found_jobs()
    fields = (found.job_id, found.operation_id, found.path, found.cpu_limit_cores, found.source, found.layer)
    assert fields == ("a", "op", "jobs/a", 2.0, None, {"mode": "shadow"})


def test_a_pin_is_replaced_ended_and_over_in_time(directory):
    registered = reopen(directory)
    registered.pin("a", Pin(1.0, 100.0))
    registered.pin("a", Pin(2.0, 200.0))
    registered.pin("b", Pin(3.0))
    assert registered.current_pins(199.0, 99.0) == {"a": Pin(2.0, 200.0), "b": Pin(3.0)}
    assert registered.current_pins(200.0, 100.0) == {"b": Pin(3.0)}
    registered.pin("b", None)
    registered.pin("nobody", None)
    assert reopen(directory).current_pins(0.0, 0.0) == {"a": Pin(2.0, 200.0)}


def test_what_cannot_be_saved_is_not_acknowledged_and_not_done(directory):
    registered = reopen(directory)
    registered.add(JOB)
    os.mkdir(f"{registered.path}.new")
    calls = ((registered.add, RegisteredJob("b", "jobs/b")), (registered.remove, "a"), (registered.pin, "a", Pin(1.0)))
    for call, *arguments in calls:
        with pytest.raises(CreateError):
            call(*arguments)
    assert (registered.content.jobs, registered.content.pins) == ({"a": JOB}, {})


def test_a_damaged_registry_is_kept_aside_and_said(directory):
    registered = reopen(directory)
    registered.add(JOB)
    with open(registered.path, "a") as file:
        file.write(" ")
    with structlog.testing.capture_logs() as logs:
        again = reopen(directory)
    assert again.found_jobs() == []
    [record] = logs
    assert (record["event"], record["log_level"]) == ("registry_damaged", "error")
    assert os.path.exists(record["kept_as"])
    again.add(JOB)
    assert reopen(directory).content.jobs == {"a": JOB}


@pytest.mark.parametrize("by_s", [-2 * 86400.0, 2 * 86400.0])
def test_a_clock_that_is_set_delays_no_answer_and_moves_the_end_of_no_pin(tmp_path, by_s):
    node = FakeNode(tmp_path, {"a": v2_cgroup()}).run(3, 0.5)
    pinned = control.pin_job(node.agent, "a", {"cpu_limit": 2.0, "ttl_s": 60.0})
    node.clock.set_wall(by_s)
    assert node.tick(0.5).jobs[0].current_cores == pinned.current_cpu_limit == 2.0
    assert control.explain_job(node.agent, "a").pinned_cpu_limit == 2.0
    node.clock.advance(60.0)
    node.agent.rescan_now()
    assert control.explain_job(node.agent, "a").pinned_cpu_limit is None
    node.clock.set_wall(-by_s)  # and it is not back when the clock is right again
    node.agent.rescan_now()
    assert control.explain_job(node.agent, "a").pinned_cpu_limit is None
