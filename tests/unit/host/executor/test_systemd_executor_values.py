"""The executor of kind "systemd", as far as it needs no bus: what it says to systemd and makes of the answers."""

import io
from typing import Any

import pytest

from cpumond.host.executor.model import ExecutorError, Launch, NotStarted
from cpumond.host.executor.systemd.executor import SystemdExecutor
from cpumond.host.executor.systemd.journal import read_export
from cpumond.host.executor.systemd.unit import (
    check_launch,
    explain_start_failure,
    find_program,
    make_ended,
    read_state,
    unit_name,
    unit_path,
    unit_properties,
)

NEVER = 2**64 - 1


def launch(**changes: Any) -> Launch:
    values: dict[str, Any] = {
        "job_id": "one", "argv": ["sleep", "1"], "environment": {"PATH": "/usr/bin:/bin"}, "user": "",
        "working_directory": "/there", "cpu_limit": 1.5, "memory_limit": 0, "directory": "/jobs/one",
        "max_log_bytes": 4096,
    }  # fmt: skip
    return Launch(**{**values, **changes})


def properties(version: int = 252, user: str = "", **changes: Any) -> dict[str, Any]:
    return {name: value for name, _, value in unit_properties(launch(**changes), user, version)}


def state(**told: Any) -> Any:
    return read_state({"LoadState": "loaded", "ActiveState": "active", **told}, {})


def test_the_unit_of_a_job():
    assert unit_name("a.b_c-1") == "cpumond-job-a.b_c-1.service"
    assert unit_path("cpumond-job-a.b_c-1.service").endswith("/unit/cpumond_2djob_2da_2eb_5fc_2d1_2eservice")


@pytest.mark.parametrize("job_id", ["", "a/b", "a b", "é", "a@b", "x" * 201, "a\n"])
def test_an_id_that_names_no_unit_is_refused(job_id):
    with pytest.raises(ExecutorError, match="cannot name a unit"):
        unit_name(job_id)


@pytest.mark.parametrize(("changes", "words"), [
    ({}, ""),
    ({"argv": []}, "its command is empty"),
    ({"argv": [""]}, "its command is empty"),
    ({"argv": ["a", "b\0c"]}, "zero byte"),
    ({"environment": {"A": "\0"}}, "zero byte"),
    ({"argv": ["\udcff"]}, "UTF-8"),
    ({"argv": ["x" * 3_000_000]}, "3000"),
    ({"working_directory": "work"}, "'work' is not absolute"),
])  # fmt: skip
def test_what_cannot_be_said_over_the_bus(changes, words):
    problem = check_launch(launch(**changes))
    assert words in problem
    assert bool(problem) == bool(words)


ABSENT = object()


@pytest.mark.parametrize(("changes", "expected"), [
    ({}, {"Slice": "cpumond-jobs.slice", "NoNewPrivileges": True, "TasksMax": ABSENT, "User": ABSENT}),
    ({}, {"CPUWeight": 150, "OOMScoreAdjust": ABSENT}),
    ({"cpu_limit": 0.001}, {"CPUWeight": 1}),
    ({"cpu_limit": 128.0}, {"CPUWeight": 10_000}),
    ({"has_ceiling": False}, {"CPUWeight": 150, "CPUQuotaPerSecUSec": ABSENT, "CPUQuotaPeriodUSec": ABSENT}),
    ({"reclaimed": True},
     {"Slice": "cpumond_reclaimed.slice", "OOMScoreAdjust": 1000, "CPUQuotaPerSecUSec": 1_500_000}),
    ({"cpu_limit": 0.25}, {"CPUQuotaPerSecUSec": 250_000, "CPUQuotaPeriodUSec": 100_000, "MemoryMax": ABSENT}),
    ({"cpu_limit": 0.0}, {"CPUQuotaPerSecUSec": 1}),
    ({"memory_limit": 1 << 30}, {"MemoryMax": 1 << 30, "MemorySwapMax": 0}),
    ({"max_tasks": 20}, {"TasksMax": 20}),
    ({"user": "nobody"}, {"User": "nobody"}),
    # Words of the command mean nothing to systemd.
    ({"argv": ["echo", "$HOME", "$$"]}, {"ExecStart": [["echo", ["echo", "$$HOME", "$$$$"], False]]}),
])  # fmt: skip
def test_properties_of_the_unit(changes, expected):
    made = properties(**changes)
    assert {name: made.get(name, ABSENT) for name in expected} == expected


def test_exit_codes_are_no_failures_but_those_of_systemd_itself():
    codes, signals = properties()["SuccessExitStatus"]
    assert {1, 199, 244, 255} <= set(codes)
    assert not set(codes) & set(range(200, 244))
    assert {9, 11, 15} <= set(signals)


@pytest.mark.parametrize(("argv0", "environment", "expected"), [
    ("/bin/true", {"PATH": "/opt"}, ("/bin/true", [])),
    ("./run", {"PATH": "/opt"}, ("/there/run", [])),
    ("sub/run", {}, ("/there/sub/run", [])),
    ("run", {}, ("run", [])),
    ("run", {"PATH": "/opt:relative::/usr/bin"}, ("run", ["/opt", "/usr/bin"])),
])  # fmt: skip
def test_where_systemd_looks_for_the_program(argv0, environment, expected):
    assert find_program(launch(argv=[argv0], environment=environment), 252) == expected


def test_an_old_systemd_is_told_the_path(tmp_path):
    program = tmp_path / "mine"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    wanted = launch(argv=["mine"], environment={"PATH": f"/no/such:{tmp_path}"})
    assert find_program(wanted, 249) == (str(program), [])
    assert "ExecSearchPath" not in properties(249, argv=["mine"], environment={"PATH": str(tmp_path)})
    with pytest.raises(ExecutorError, match="the program 'yours' is not in its PATH"):
        find_program(launch(argv=["yours"], environment={"PATH": str(tmp_path)}), 249)


def test_a_running_unit():
    told = state(
        ActiveEnterTimestamp=5_000_000, ExecMainStartTimestamp=4_900_000, ControlGroup="/a.slice/b.service",
        Job=[0, "/"], CPUUsageNSec=1_500_000_000, MemoryPeak=NEVER,
    )  # fmt: skip
    assert (told.has_run, told.is_over, told.is_gone, told.queued) == (True, False, False, False)
    assert (told.started, told.cgroup, told.cpu_seconds, told.max_memory) == (4.9, "a.slice/b.service", 1.5, None)


@pytest.mark.parametrize(("name", "cgroup"), [
    ("cpumond_reclaimed.slice", "cpumond_reclaimed.slice"),
    ("cpumond-jobs.slice", "cpumond.slice/cpumond-jobs.slice"),
    ("", "cpumond.slice/cpumond-jobs.slice"),
])  # fmt: skip
def test_where_a_unit_was_that_has_no_cgroup_any_more(name, cgroup):
    assert state(Slice=name).slice_cgroup == cgroup


def test_when_a_unit_is_over_and_when_it_is_gone():
    assert not state(ActiveState="inactive", Job=[7, "/job/7"]).is_over, "it waits to be started"
    assert state(ActiveState="inactive", Job=[0, "/"]).is_over
    assert not read_state({"LoadState": "not-found", "ActiveState": "active"}, {}).is_gone, "it runs without its file"


def test_what_signals_told_outlives_the_unit():
    told = read_state(
        {"LoadState": "not-found", "ActiveState": "inactive", "ExecMainCode": 0},
        {"ActiveState": "deactivating", "ExecMainCode": 1, "ExecMainStatus": 6, "ActiveEnterTimestamp": 1},
    )
    assert (told.is_gone, told.is_over, told.has_run, told.main_status) == (True, True, True, 6)


@pytest.mark.parametrize(("told", "has_run"), [
    ({"ActiveEnterTimestamp": 1}, True),
    ({"ExecMainCode": 1, "ExecMainStatus": 3}, True),
    ({"ExecMainCode": 2, "ExecMainStatus": 9}, True),
    ({"ExecMainCode": 1, "ExecMainStatus": 203}, None),
    ({}, False),
])  # fmt: skip
def test_whether_a_program_has_run(told, has_run):
    assert state(ActiveState="failed", **told).has_run is has_run


@pytest.mark.parametrize(("status", "words", "node_fault"), [
    (200, "the working directory /there does not exist, or user nobody may not enter it", False),
    (203, "the program 'prog' does not exist, or user nobody may not run it", False),
    (216, "groups of user 'nobody'", False),
    (217, "the user 'nobody' does not exist on this host", False),
    (219, "its cgroup cannot be created", True),
    (226, "namespaces", True),
    (241, "exit status 241 of systemd", True),
])  # fmt: skip
def test_why_a_unit_did_not_start(status, words, node_fault):
    failed = state(
        ActiveState="failed", ExecMainCode=1, ExecMainStatus=status, User="nobody", WorkingDirectory="/there",
        ExecStart=[["prog", ["prog", "x"], False, 0, 0, 0, 0, 0, 0, 0]],
    )  # fmt: skip
    problem, is_node_fault = explain_start_failure(failed)
    assert words in problem
    assert is_node_fault == node_fault


def test_how_a_job_ended():
    over = state(ExecMainCode=1, ExecMainStatus=3, ExecMainExitTimestamp=7_000_000, CPUUsageNSec=10**9)
    later = state(CPUUsageNSec=2 * 10**9)
    end = make_ended("one", over, later, 4096, 0)
    assert (end.exit_code, end.signal, end.finish_time) == (3, None, 7.0)
    assert (end.cpu_seconds, end.max_memory, end.oom_killed, end.problem) == (2.0, 4096, False, "")
    dumped = make_ended("one", state(ExecMainCode=3, ExecMainStatus=11), state(), None, 0)
    assert (dumped.exit_code, dumped.signal) == (None, 11)


@pytest.mark.parametrize(("result", "kills"), [("oom-kill", 0), ("signal", 1)])
def test_too_little_memory(result, kills):
    killed = state(ActiveState="failed", Result=result, ExecMainCode=2, ExecMainStatus=9)
    assert make_ended("one", killed, state(), None, kills).oom_killed


def test_nobody_knows_how_a_unit_ended_that_is_gone():
    gone = read_state({}, {})
    end = make_ended("one", gone, gone, None, 0)
    assert (end.exit_code, end.signal) == (None, None)
    assert "its end is unknown" in end.problem


def test_the_journals_export_format():
    text = b"__CURSOR=x\nMESSAGE=a=b\n\nMESSAGE\n" + (5).to_bytes(8, "little") + b"a\nb\n\xff\n_LINE_BREAK=eof\n\n"
    entries = list(read_export(io.BytesIO(text)))
    assert entries == [{b"__CURSOR": b"x", b"MESSAGE": b"a=b"}, {b"MESSAGE": b"a\nb\n\xff", b"_LINE_BREAK": b"eof"}]
    assert list(read_export(io.BytesIO(b""))) == []


@pytest.fixture
def executor():
    made = SystemdExecutor(None, "/run")  # type: ignore[arg-type]
    yield made
    made.close()
    made.close()


def test_what_cannot_be_started_is_told_by_poll(executor):
    executor.start(launch(job_id="a/b"))
    executor.start(launch(argv=[]))
    first, second = executor.poll()
    assert isinstance(first, NotStarted)
    assert "'a/b' cannot name a unit" in first.problem
    assert (second.problem, second.node_fault) == ("its command is empty", False)
    assert executor.poll() == []


def test_without_a_connection_nothing_starts_and_nothing_raises(executor):
    executor.start(launch())
    executor.interrupt("one")
    executor.kill("one")
    [event] = executor.poll()
    assert isinstance(event, NotStarted)
    assert event.node_fault


def test_no_bus_is_said_with_advice(executor, monkeypatch, tmp_path):
    monkeypatch.setenv("DBUS_SYSTEM_BUS_ADDRESS", f"unix:path={tmp_path}/no-such-socket")
    with pytest.raises(ExecutorError, match=r"system bus cannot be reached: No such file.*executor\.kind"):
        executor.recover(["one"])
    assert executor.poll() == []
