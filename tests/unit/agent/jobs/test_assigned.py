"""The jobs that a scheduler ordered, with an executor that does what the test says: orders, room, stops, ends, disk."""

import contextlib
import math
import os
import pwd
import resource
import shutil
import signal
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest
from fake_executor import ME, PlayedExecutor
from fake_node import FakeClock

from cpumond.agent.config import AgentConfig, finish_config, parse_config_text
from cpumond.agent.jobs import assigned as module
from cpumond.agent.jobs import files, launch
from cpumond.agent.jobs.assigned import AssignedJobs
from cpumond.agent.jobs.files import JobFile, JobsDir
from cpumond.agent.jobs.job import SUMS, AssignedJob, Usage
from cpumond.agent.jobs.launch import find_account, make_environment
from cpumond.agent.jobs.memory import MemoryFiles
from cpumond.core.errors import ConfigError, UnavailableError
from cpumond.core.wire import MEMORY_OVERDRAFT, HeartbeatAnswer, JobOrder, LogRequest, StopOrder
from cpumond.host.executor.model import Ended, Event, ExecutorError, Launch, NotStarted, Started

DAMAGED = [b"", b"{", b"[]", b'{"j1": {"ordered_cpu_seconds": "x"}}', b'{"\xff": {}}', b"[" * 5000, b"\0" * 100]
"""What a disk may make of a file."""


class World:
    """One node: configuration, executor, clock, and the jobs."""

    def __init__(self, directory: Path, more: str = "") -> None:
        self.directory = directory
        self.text = (
            f'node_id = "n"\nstate_dir = "{directory}/state"\nruntime_dir = "{directory}/run"\n'
            '[resources]\ncpu = 4.0\nmemory = 1000\nuser_slots = 3\n'
            f'[executor]\nkind = "cgroup"\nallow_root = true\nuser = "{ME}"\n{more}'
        )  # fmt: skip
        self.clock = FakeClock()
        self.offers: list[bool] = []
        self.begin()

    def begin(self) -> None:
        """An agent starts, after another one perhaps."""
        self.executor = PlayedExecutor()
        self.memory: dict[str, int] = {}
        self.memory_limits: dict[str, int] = {}
        self.available: int | None = None
        self.held: dict[str, int] = {}
        memory = MemoryFiles(self.memory.get, self.memory_limits.get, lambda: self.available, self.held.__setitem__)
        self.jobs = AssignedJobs(self.config, self.executor, self.clock, memory)  # type: ignore[arg-type]
        self.jobs.on_offer = self._note_offer
        self.other_cores = 0.0
        self.usage: dict[str, Usage] = {}

    def _note_offer(self) -> None:
        self.offers.append(not self.jobs.problem)

    @property
    def config(self) -> AgentConfig:
        return finish_config(parse_config_text(self.text, "test.toml"), "test.toml")

    def restart(self, *living: str) -> None:
        self.jobs.close()
        self.begin_with(*living)

    def begin_with(self, *living: str) -> None:
        self.begin()
        self.executor.living = {job_id: Started(job_id, f"cpumond-jobs/{job_id}", 150.0) for job_id in living}
        self.load()

    def load(self) -> None:
        self.jobs.load(self.clock.monotonic_s())

    def obey(self, *start: JobOrder, stop: Iterable[StopOrder] = (), acknowledged: Iterable[str] = ()) -> bool:
        answer = HeartbeatAnswer(True, start=list(start), stop=list(stop), acknowledged=list(acknowledged))
        now_s = self.clock.monotonic_s()
        self.jobs.apply_answer(answer, now_s - 0.2, now_s)
        return self.advance()

    def advance(self, seconds: float = 0.0) -> bool:
        self.clock.advance(seconds)
        return self.jobs.advance(self.clock.monotonic_s(), self.count)

    def adjust(self, seconds: float = 0.0) -> bool:
        self.clock.advance(seconds)
        return self.jobs.adjust(self.clock.monotonic_s(), self.count)

    def count(self) -> tuple[dict[str, Usage], float]:
        return self.usage, self.other_cores

    def happen(self, *events: Event) -> bool:
        self.executor.events += events
        return self.advance()

    def run(self, job_id: str, **order: Any) -> None:
        self.obey(make_order(job_id, **order))
        self.happen(Started(job_id, f"cpumond-jobs/{job_id}", 100.0))

    def wait_for_workers(self) -> None:
        """Until what is done in other threads is done."""
        self.jobs._jobs_dir.workers.shutdown(wait=True)
        self.jobs._jobs_dir.workers = ThreadPoolExecutor(2)

    def finished(self, job_id: str) -> dict[str, Any]:
        found = [job for job in self.jobs.finished_jobs() if job.job_id == job_id]
        assert len(found) == 1, self.jobs.finished_jobs()
        return msgspec.to_builtins(found[0])

    def state(self, job_id: str) -> str:
        return self.jobs.jobs[job_id].file.state


def make_order(job_id: str, **fields: Any) -> JobOrder:
    given = {
        "operation_id": "op", "task": "t", "pool": "p", "cpu_limit": 1.0, "memory_limit": 100, "user_slots": 1,
        "command": ["true"], "environment": {}, "user": ME, "job_cpu_monitor": {}, "wait_s": 30.0, **fields,
    }  # fmt: skip
    return JobOrder(job_id=job_id, **given)


def stop(job_id: str, timeout_s: float = 10.0, why: str = "because", kind: str = "preempted") -> StopOrder:
    return StopOrder(job_id, timeout_s, kind, why)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path)
    world.load()
    yield world
    world.jobs.close()


def test_an_ordered_job_is_started_once_and_reported(world: World) -> None:
    order = make_order("j1", cpu_limit=2.0)
    assert world.obey(order)
    world.obey(order)
    assert world.executor.calls == [("start", "j1")]
    assert world.happen(Started("j1", "cpumond-jobs/j1", 100.0))
    assert not world.obey(order, acknowledged=["j1"]), "nothing new is no reason for a heartbeat"
    assert not world.advance(1.0)
    assert world.executor.calls == [("start", "j1")]
    [report] = world.jobs.reports()
    assert (report.job_id, report.from_scheduler, report.task, report.start_time) == ("j1", True, "t", 100.0)
    assert (report.cpu_limit, report.current_cpu_limit, report.cgroup) == (2.0, 2.0, "cpumond-jobs/j1")
    [found] = world.jobs.found_jobs()
    assert (found.path, found.cpu_limit_cores, found.operation_id) == ("cpumond-jobs/j1", 2.0, "op")


def test_the_monitors_figures_are_reported(world: World) -> None:
    world.run("j1", cpu_limit=2.0)
    known = {"smoothed_cpu_usage": 0.3, "mode": "reclaim", "cpu_seconds": 55.0, "cpu_usage": 0.6, "min_cpu_limit": 0.25,
             "votes_sum": -2, "throttled_ratio": 0.125, "reclaimed_cpu_seconds": 7.0, "ordered_cpu_seconds": 9.0,
             "throttled_cpu_seconds": 4.0, "late_cpu_seconds": 3.0}  # fmt: skip
    smoothed, *others = known.items()
    for figures, told in (({}, dict.fromkeys(known) | dict.fromkeys(SUMS, 0.0) | {"mode": ""}), (dict(others), known)):
        smoothed_cores = smoothed[1] if figures else None
        world.jobs.note_usage({"cpumond-jobs/j1": Usage(1.2, smoothed_cores, **figures)})
        [report] = world.jobs.reports()
        assert report.current_cpu_limit == 1.2
        assert {name: getattr(report, name) for name in known} == told


@pytest.mark.parametrize(("options", "layer"), [
    ({"check_period": 100, "min_cpu_limit": 0.1, "enable_cpu_reclaim": True},
     {"check_period": 0.1, "min_cpu_limit": 0.1, "enable_cpu_reclaim": True}),
    ({"nonsense": 1}, {}),
], ids=["times in milliseconds", "without sense, which does not stop the job"])  # fmt: skip
def test_options_of_the_monitor(world: World, options: dict[str, Any], layer: dict[str, Any]) -> None:
    world.run("j1", job_cpu_monitor=options)
    [found] = world.jobs.found_jobs()
    assert found.layer == layer


# --- room


def test_a_job_waits_for_room_and_does_not_hold_up_the_next(world: World) -> None:
    world.run("j1", cpu_limit=3.0)
    world.obey(make_order("big", cpu_limit=2.0), make_order("small", cpu_limit=1.0))
    assert (world.state("big"), world.state("small")) == ("waiting", "starting")
    assert [report.job_id for report in world.jobs.reports()] == ["j1", "small"]
    world.happen(Ended("j1", 200.0, exit_code=0))
    assert world.state("big") == "starting"


@pytest.mark.parametrize(("order", "word"), [
    ({"cpu_limit": 2.5}, "2.5 cpu of 2"),
    ({"memory_limit": 901}, "memory"),
    ({"user_slots": 3}, "user_slots"),
    ({"memory_limit": 200, "reclaimed": True}, "the node had no room for it within 30 s: 200 memory of 100 free"),
])  # fmt: skip
def test_a_job_without_room_gives_up_after_its_time(world: World, order: dict[str, Any], word: str) -> None:
    world.run("j1", cpu_limit=1.0)
    world.other_cores = 1.0
    world.available = 200  # of which j1 ordered 100
    world.obey(make_order("j2", wait_s=30.0, **order))
    assert not world.advance(29.0)
    assert world.advance(2.0)
    finished = world.finished("j2")
    assert finished["state"] == "aborted"
    assert "no room" in finished["reason"]
    assert word in finished["reason"]


# --- stops


def test_a_stop_interrupts_once_and_kills_when_the_time_is_over(world: World) -> None:
    world.run("j1")
    world.obey(stop=[stop("j1", 10.0)])
    world.advance(4.0)
    world.obey(stop=[stop("j1", 10.0)])
    assert world.executor.calls == [("start", "j1"), ("interrupt", "j1")]
    assert world.jobs.next_deadline_s() == world.clock.monotonic_s() + 6.0, "a repeat does not put the kill off"
    world.advance(5.9)
    assert world.executor.calls[-1] == ("interrupt", "j1")
    world.advance(0.2)
    assert world.executor.calls[-1] == ("kill", "j1")
    assert len(world.executor.calls) == 3
    world.advance(1.1)
    assert world.executor.calls[-2:] == [("kill", "j1")] * 2
    world.happen(Ended("j1", 200.0, signal=9, cpu_seconds=3.5, max_memory=77))
    finished = world.finished("j1")
    assert (finished["state"], finished["reason"], finished["exit_code"]) == ("aborted", "because", 137)
    assert (finished["cpu_seconds"], finished["max_memory"], finished["start_time"]) == (3.5, 77, 100.0)
    assert world.jobs.reports() == []


def test_the_size_of_its_stderr_is_reported_but_not_to_older_agents(world: World) -> None:
    world.run("j1")
    world.happen(Ended("j1", 200.0, exit_code=0, stderr_size=7))
    assert world.finished("j1")["stderr_size"] == 7
    [job] = world.jobs.jobs.values()
    assert (job.file.stderr_size, job.file.finished.stderr_size) == (7, msgspec.UNSET)


@pytest.mark.parametrize(
    ("stops", "calls"),
    [([stop("j1", 0.0)], ["kill"]), ([stop("j1", 60.0, kind="graceful"), stop("j1", 0.0)], ["interrupt", "kill"])],
    ids=["at once", "later, with less time"],
)
def test_a_stop_without_time_kills_at_once(world: World, stops: list[StopOrder], calls: list[str]) -> None:
    world.run("j1")
    for each in stops:
        world.obey(stop=[each])
    assert world.executor.calls[1:] == [(call, "j1") for call in calls]


def test_a_job_that_waits_is_stopped_without_being_started(world: World) -> None:
    world.run("j1", cpu_limit=4.0)
    world.obey(make_order("j2", secrets={"KEY": "hunter2"}))
    world.obey(stop=[stop("j2", why="not needed any more")])
    assert (world.finished("j2")["reason"], world.jobs.jobs["j2"].secrets) == ("not needed any more", {})
    world.happen(Ended("j1", 200.0, exit_code=0))
    assert "j2" not in world.executor.launches


def test_a_stop_of_an_unknown_or_ended_job_changes_nothing(world: World) -> None:
    world.run("j1")
    world.happen(Ended("j1", 200.0, exit_code=0))
    world.obey(stop=[stop("j1"), stop("unknown")])
    assert world.executor.calls == [("start", "j1")]
    assert world.finished("j1")["state"] == "completed"


# --- ends

LAST_WORDS = b"first\nNo such module: x\x1b[31m\n\n"
OOM = {"signal": 9, "oom_killed": True}
MIB = 2**20
RESERVES = {"memory_limit": 100 * MIB, "memory_reserve": 50 * MIB}
CHECKED = {"interruptible": True, "interruption_signal": "SIGINT"}
PREEMPTED, TOO_MUCH = "preempted", "resource_overdraft"


@pytest.mark.parametrize(("order", "stopped", "ended", "state", "words"), [
    ({}, "", {"exit_code": 0}, "completed", ""),
    ({}, "", {"exit_code": 3}, "failed", "exit code 3"),
    ({}, "", {"exit_code": 1, "last_words": LAST_WORDS}, "failed", "exit code 1; stderr: No such module: x?[31m"),
    ({}, "", {"signal": 11}, "failed", "killed by SIGSEGV"),
    ({}, "", OOM, "failed", "out of memory: it requested memory_limit = 100 bytes"),
    ({"memory_limit": 0}, "", OOM, "aborted", "the node ran out of memory"),
    ({}, "", {"problem": "its exit code was lost"}, "lost", "its exit code was lost"),
    # Where memory is reserved, one that the kernel kills below its limit has not failed.
    (RESERVES, "", {**OOM, "max_memory": 60 * MIB}, "aborted", f"{MEMORY_OVERDRAFT}{60 * MIB} of {50 * MIB}"),
    (RESERVES, "", {**OOM, "max_memory": 40 * MIB}, "aborted", "the node ran out of memory"),
    (RESERVES, "", {**OOM, "max_memory": 100 * MIB}, "failed", "out of memory: it requested memory_limit"),
    (RESERVES, "", OOM, "failed", "out of memory: it requested memory_limit"),
    # One that is told to stop.
    ({}, PREEMPTED, {"exit_code": 0}, "aborted", "because"),
    ({}, PREEMPTED, {"exit_code": 0, "finish_time": 149.9}, "completed", ""),
    ({"interruptible": True}, PREEMPTED, {"exit_code": 0}, "completed", ""),
    (CHECKED, PREEMPTED, {"exit_code": 0}, "completed", ""),
    (CHECKED, PREEMPTED, {"exit_code": 3}, "failed", "exit code 3"),
    (CHECKED, PREEMPTED, {"signal": 2}, "aborted", "because"),
    (CHECKED, TOO_MUCH, {"exit_code": 3}, "aborted", "because"),
])  # fmt: skip
def test_what_an_end_means(order: dict[str, Any], stopped: str, ended: dict[str, Any], state: str, words: str) -> None:
    """It ran from 100 on, and was told to stop at 150."""
    told = {"stop": stop("j1", kind=stopped), "stopped_at": 150.0} if stopped else {}
    job = AssignedJob(JobFile(make_order("j1", **order), "boot", start_time=100.0, **told), "", 0.0, 0.0)  # type: ignore[arg-type]
    found, reason = job.classify_end(Ended("j1", **{"finish_time": 200.0, **ended}))
    assert (found, reason[: len(words)], bool(reason)) == (state, words, bool(words))


def test_a_job_that_may_have_begun_unseen_is_lost_also_when_stopped(world: World) -> None:
    world.obey(make_order("j1"))
    world.obey(stop=[stop("j1")])
    world.happen(Ended("j1", 200.0, problem="it is not known what became of it"))
    finished = world.finished("j1")
    assert (finished["state"], finished["start_time"]) == ("lost", None)


@pytest.mark.parametrize(("order", "expected"), [
    ({}, (signal.SIGTERM, False)),
    (CHECKED, (signal.SIGINT, False)),
    ({**CHECKED, "signal_root_process_only": True}, (signal.SIGINT, True)),
    ({"interruption_signal": "SIGNEW"}, (signal.SIGTERM, False)),
], ids=["usual", "its own", "the first process", "of a later version"])  # fmt: skip
def test_a_job_is_interrupted_by_its_signal(world: World, order: dict[str, Any], expected: tuple[int, bool]) -> None:
    world.run("j1", **order)
    world.obey(stop=[stop("j1")])
    assert world.executor.signals == {"j1": expected}


@pytest.mark.parametrize(("wanted", "kept"), [(0, 0), (5000, 5000), (2**40, 16 * MIB)])
def test_stderr_is_kept_as_ordered_within_the_bound_of_the_node(world: World, wanted: int, kept: int) -> None:
    world.run("j1", max_stderr_bytes=wanted)
    launch = world.executor.launches["j1"]
    assert (launch.max_stderr_bytes, launch.max_log_bytes) == (kept, 16 * MIB)


def test_an_end_is_repeated_until_it_is_acknowledged(world: World) -> None:
    world.run("j1")
    world.happen(Ended("j1", 200.0, exit_code=0))
    world.advance(100.0)
    assert world.finished("j1")
    world.obey(acknowledged=["j1", "unknown"])
    assert world.jobs.finished_jobs() == []
    world.obey(make_order("j1"))
    assert world.executor.calls == [("start", "j1")], "it was here before"


def test_the_jobs_own_fault_fails_it_and_the_nodes_aborts_it(world: World) -> None:
    world.obey(make_order("j1"), make_order("j2"))
    world.happen(NotStarted("j1", "cannot run 'x': No such file"), NotStarted("j2", "no cgroup", node_fault=True))
    assert (world.finished("j1")["state"], world.finished("j2")["state"]) == ("failed", "aborted")
    assert world.offers == []


def test_a_node_that_can_start_nothing_offers_nothing_for_a_while(world: World) -> None:
    for number in range(3):
        world.obey(make_order(f"j{number}"))
        world.happen(NotStarted(f"j{number}", "no cgroup can be made", node_fault=True))
        world.obey(acknowledged=[f"j{number}"])
    assert world.offers == [False]
    assert "no cgroup can be made" in world.jobs.problem
    world.advance(59.0)
    assert world.offers == [False]
    world.obey(make_order("waits", wait_s=1.5))
    assert world.state("waits") == "waiting"
    world.advance(2.0)
    assert "no cgroup can be made" in world.finished("waits")["reason"]
    assert world.offers == [False, True]
    world.obey(make_order("again"))
    world.happen(NotStarted("again", "no cgroup can be made", node_fault=True))
    assert world.offers == [False, True, False]


# --- what cannot be run


@pytest.mark.parametrize("command", ["", []])
def test_an_order_that_cannot_be_run_fails_with_a_sentence(world: World, command: str | list[str]) -> None:
    world.obey(make_order("j1", command=command))
    assert world.finished("j1")["state"] == "failed"
    assert "no command" in world.finished("j1")["reason"]


def test_a_job_id_that_is_no_name_is_not_taken(world: World) -> None:
    world.obey(make_order("../x"), make_order("a/b"), make_order(".."))
    assert world.jobs.jobs == {}
    assert os.listdir(world.config.executor.jobs_dir) == [".lock"]


def test_a_shell_command_is_run_by_a_shell_and_a_list_as_it_is(world: World) -> None:
    world.obey(make_order("j1", command="echo $X"), make_order("j2", command=["echo", "$X"]))
    shell, *rest = world.executor.launches["j1"].argv
    assert (shell in ("/bin/bash", "/bin/sh"), rest) == (True, ["-c", "echo $X"])
    assert world.executor.launches["j2"].argv == ["echo", "$X"]


def test_a_job_has_a_directory_of_its_own_unless_it_says_where(world: World) -> None:
    world.obey(make_order("j1"), make_order("j2", working_directory="/tmp"))
    where = world.executor.launches["j1"].working_directory
    assert os.stat(where).st_mode & 0o777 == 0o700
    assert world.executor.launches["j2"].working_directory == "/tmp"
    world.happen(NotStarted("j1", "x"), NotStarted("j2", "x"))
    world.wait_for_workers()
    assert not os.path.exists(where)
    assert os.path.exists("/tmp")


def test_the_environment_of_a_job() -> None:
    given = {"X": "1", "PATH": "/mine", "YT_JOB_ID": "another", "YT_JOB_COOKIE": "7"}
    order = make_order("j1", environment=given, cpu_limit=1.5, variables={"YT_JOB_COOKIE": "0"})
    environment = make_environment(order, pwd.getpwnam(ME))
    expected = {"X": "1", "PATH": "/mine", "CPUMOND_JOB_ID": "j1", "YT_JOB_ID": "j1", "CPUMOND_CPU_LIMIT": "1.5",
                "YT_JOB_COOKIE": "0", "YT_FIRST_OUTPUT_TABLE_FD": "1", "HOME": pwd.getpwnam(ME).pw_dir}  # fmt: skip
    assert environment | expected == environment
    assert "CPUMOND_CHECKPOINT" not in environment, "it says nothing of checkpoints"


TOKEN = '\n[scheduler]\nurl = "http://h"\ntoken = "t"\n'  # noqa: S105 - a configuration


def config_of(tmp_path: Path, executor: str) -> AgentConfig:
    text = f'node_id = "n"\nstate_dir = "{tmp_path}/s"\n[executor]\nkind = "cgroup"\n{executor}'
    return finish_config(parse_config_text(text, "t"), "t")


@pytest.mark.parametrize(("executor", "user", "runs_as", "words"), [
    (TOKEN, "nobody", "nobody", ""),
    ("allow_root = true", "root", "root", ""),
    ("allow_root = true", "nobody", "nobody", ""),
    (f"min_uid = 1{TOKEN}", "daemon", "daemon", ""),
    (f'user = "daemon"{TOKEN}', "nobody", "daemon", ""),
    ('user = "nobody"', "root", "nobody", ""),
    ("", "root", "", "allow_root = true"),
    ("", "nobody", "", "requires no tokens"),
    (TOKEN, "daemon", "", "a system account"),
    *(("", user, "", "is unknown on node n") for user in ("no-such-user-here", "", "a\0b")),
])  # fmt: skip
def test_root_runs_jobs_as_the_nodes_user_or_the_operations_or_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, executor: str, user: str, runs_as: str, words: str
) -> None:
    monkeypatch.setattr(launch.os, "geteuid", lambda: 0)
    with pytest.raises(ConfigError, match=words) if words else contextlib.nullcontext():
        name, account = find_account(config_of(tmp_path, executor), user)
        assert (name, account.pw_name) == (runs_as, runs_as)


@pytest.mark.parametrize("user", ["", "root", "daemon"])
def test_an_agent_not_root_runs_jobs_only_as_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, user: str) -> None:
    uid = pwd.getpwnam("nobody").pw_uid
    monkeypatch.setattr(launch.os, "geteuid", lambda: uid)
    name, account = find_account(config_of(tmp_path, 'user = "nobody"'), "root")
    assert (name, account.pw_uid) == ("", uid)
    with pytest.raises(ConfigError, match=r'runs as nobody, not as root.* set \[executor\] user = "nobody"'):
        find_account(config_of(tmp_path, f'user = "{user}"'), "nobody")


# --- the next run of the agent


def test_the_next_agent_finds_running_ended_and_lost_jobs(world: World) -> None:
    for job_id in ("runs", "ended", "gone"):
        world.run(job_id)
    world.happen(Ended("ended", 200.0, exit_code=0))
    world.restart("runs")
    world.happen(Ended("gone", 300.0, exit_code=4))
    [report] = world.jobs.reports()
    assert (report.job_id, report.start_time) == ("runs", 100.0)
    assert world.finished("ended")["state"] == "completed"
    assert world.finished("gone")["exit_code"] == 4
    world.obey(make_order("runs"), make_order("ended"))
    assert world.executor.launches == {}


def test_after_a_boot_of_the_host_running_jobs_are_lost(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.run("j1")
    world.run("j2")
    world.happen(Ended("j2", 200.0, exit_code=0))
    world.jobs.close()
    monkeypatch.setattr(module, "read_boot_id", lambda: "another boot")
    world.begin()
    world.load()
    assert world.finished("j1")["state"] == "lost"
    assert "rebooted" in world.finished("j1")["reason"]
    assert world.finished("j2")["state"] == "completed"


def test_what_this_node_has_not_made_is_left_alone(world: World) -> None:
    jobs_dir = Path(world.config.executor.jobs_dir)
    (jobs_dir / "home" / "docs").mkdir(parents=True)
    (jobs_dir / "half").mkdir()
    (jobs_dir / "half" / "job.json").write_text("{")
    (jobs_dir / "file").write_text("x")
    world.restart()
    world.wait_for_workers()
    assert sorted(os.listdir(jobs_dir)) == [".lock", "file", "half", "home"]
    assert world.jobs.finished_jobs() == []


@pytest.mark.parametrize("name", SUMS)
def test_what_was_summed_up_before_a_restart_is_not_forgotten(name: str, world: World) -> None:
    world.run("j1")
    for told in (7.0, 0.0, None):
        world.jobs.note_usage({"cpumond-jobs/j1": Usage(1.0, **{name: told})})
        assert getattr(world.jobs.reports()[0], name) == 7.0, "it does not fall"
    world.restart("j1")
    assert getattr(world.jobs.reports()[0], name) == 7.0
    world.jobs.note_usage({"cpumond-jobs/j1": Usage(1.0, **{name: 2.0})})
    world.happen(Ended("j1", 300.0, exit_code=0))
    assert world.finished("j1")[name] == 9.0


def test_the_sums_of_a_job_that_ends_are_those_of_the_last_check(world: World) -> None:
    """Also when no heartbeat was sent since."""
    world.run("j1")
    world.usage = {"cpumond-jobs/j1": Usage(1.0, ordered_cpu_seconds=3.0, late_cpu_seconds=0.5)}
    world.happen(Ended("j1", 300.0, exit_code=0))
    told = world.finished("j1")
    assert (told["ordered_cpu_seconds"], told["late_cpu_seconds"]) == (3.0, 0.5)


def kill_agent(world: World, *job_ids: str) -> None:
    """The agent ends without a word, and another one finds the jobs."""
    world.jobs._update_file = lambda *_, **__: None  # type: ignore[method-assign]
    world.restart(*job_ids)


def reported_sums(world: World) -> dict[str, float]:
    """Ordered core-seconds, by job."""
    return {report.job_id: report.ordered_cpu_seconds or 0.0 for report in world.jobs.reports()}


def use(world: World, ordered: float) -> None:
    """What the monitor has counted since this agent began, of one job."""
    sums: dict[str, Any] = dict.fromkeys(SUMS, ordered)
    world.jobs.note_usage({"cpumond-jobs/j1": Usage(1.0, **sums)})


def store(world: World, ordered: float) -> None:
    """Let the monitor count so much, and the sums be written."""
    use(world, ordered)
    world.advance(files.SUMS_PERIOD_S)
    world.wait_for_workers()


def test_an_agent_that_is_killed_loses_only_seconds_of_its_jobs_sums(world: World) -> None:
    world.run("j1")
    for second in range(1, 100):
        use(world, float(second))
        assert not world.advance(1.0), "it is no news for the scheduler"
        world.wait_for_workers()
    kill_agent(world, "j1")
    known = reported_sums(world)["j1"]
    assert 99.0 - files.SUMS_PERIOD_S <= known <= 99.0
    store(world, 5.0)
    assert reported_sums(world)["j1"] == known + 5.0, "what was noted is counted once"
    kill_agent(world, "j1")
    assert reported_sums(world)["j1"] == known + 5.0
    [report] = world.jobs.reports()
    assert {getattr(report, name) for name in SUMS} == {known + 5.0}


def test_the_newer_of_two_files_counts(world: World) -> None:
    world.run("j1")
    store(world, 3.0)
    use(world, 4.0)
    world.restart("j1")
    assert reported_sums(world) == {"j1": 4.0}


@pytest.mark.parametrize("content", DAMAGED)
def test_damaged_sums_are_said_and_rewritten(world: World, content: bytes, capsys: pytest.CaptureFixture[str]) -> None:
    world.run("j1")
    Path(world.jobs.config.executor.jobs_dir, files.SUMS_FILE).write_bytes(content)
    kill_agent(world, "j1")
    assert reported_sums(world) == {"j1": 0.0}
    assert "sums_damaged" in capsys.readouterr().out
    store(world, 3.0)
    kill_agent(world, "j1")
    assert reported_sums(world) == {"j1": 3.0}


@pytest.mark.parametrize("content", DAMAGED)
def test_a_job_whose_file_is_damaged_has_the_file_of_the_step_before(
    world: World, content: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    world.run("j1")
    world.run("j2")
    Path(world.jobs.jobs["j1"].directory, files.JOB_FILE).write_bytes(content)
    world.jobs.close()
    Path(world.jobs.jobs["j1"].directory, files.JOB_FILE).write_bytes(content)
    capsys.readouterr()
    world.begin_with("j1", "j2")
    world.advance()
    assert "job_file_damaged" in capsys.readouterr().out
    assert {job_id: world.state(job_id) for job_id in ("j1", "j2")} == {"j1": "running", "j2": "running"}
    world.obey(make_order("j1"), make_order("j3"))
    assert set(world.executor.launches) == {"j3"}, "it is not started a second time, and new ones are taken"
    world.happen(Ended("j1", 200.0, exit_code=0))
    assert world.finished("j1")["state"] == "completed"


def test_a_jobs_dir_that_is_removed_is_written_anew(world: World) -> None:
    world.run("j1")
    jobs_dir = world.config.executor.jobs_dir
    assert world.jobs.look_after_files() == []
    shutil.rmtree(jobs_dir)
    assert world.jobs.look_after_files() == [jobs_dir]
    assert world.jobs.look_after_files() == []
    other = World(world.directory)
    other.load()
    assert "is in use by another agent" in other.jobs.problem
    kill_agent(world, "j1")
    assert world.state("j1") == "running"
    world.obey(make_order("j1"))
    assert world.executor.launches == {}


def test_a_disk_that_hangs_holds_up_no_tick_and_gathers_nothing(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on, begun = threading.Event(), threading.Semaphore(0)
    writes: list[float] = []
    write = JobsDir._write_sums

    def hang(jobs_dir: JobsDir, sums: dict[str, dict[str, float]]) -> None:
        writes.append(sums["j1"]["ordered_cpu_seconds"])
        begun.release()
        assert go_on.wait(30.0)
        write(jobs_dir, sums)

    world.run("j1")
    monkeypatch.setattr(JobsDir, "_write_sums", hang)
    for second in range(100):
        use(world, float(second))
        world.advance(1.0)
    assert begun.acquire(timeout=100.0)
    assert len(writes) == 1
    go_on.set()
    world.wait_for_workers()
    world.advance()
    world.wait_for_workers()
    assert len(writes) == 2
    assert writes[1] == 99.0, "the newest"
    kill_agent(world, "j1")
    assert reported_sums(world) == {"j1": 99.0}


def test_a_disk_that_refuses_the_sums_is_said_once_and_tried_again(
    world: World, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    world.run("j1")
    use(world, 7.0)
    with monkeypatch.context() as patched:
        patched.setattr(files, "_replace", refuse)
        for _ in range(5):
            world.advance(files.SUMS_PERIOD_S)
            world.wait_for_workers()
    said = capsys.readouterr().out
    assert said.count("sums_not_written") == 1
    assert "No space left on device" in said
    world.advance(files.SUMS_PERIOD_S)
    world.wait_for_workers()
    kill_agent(world, "j1")
    assert reported_sums(world) == {"j1": 7.0}


def test_a_file_is_replaced_as_a_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = str(tmp_path)
    files.write_job_file(directory, files.JobFile(make_order("j1"), "boot"))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            files.write_job_file(directory, files.JobFile(make_order("j1", command=["x" * 9000]), "boot"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)
    found = files.read_job_file(directory)
    assert found is not None
    assert found.order.command == ["true"]


@pytest.mark.usefixtures("logs")
def test_an_error_with_one_job_does_not_lose_the_end_of_another(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    for job_id in ("j1", "j2"):
        world.run(job_id)
    judge = AssignedJob.classify_end
    broken = {"j1": "a mistake"}
    monkeypatch.setattr(AssignedJob, "classify_end", lambda job, event: judge(job, broken.get(event.job_id, event)))
    world.happen(Ended("j1", 200.0, exit_code=0), Ended("j2", 200.0, exit_code=0))
    assert [world.finished(job_id)["state"] for job_id in ("j1", "j2")] == ["lost", "completed"]


def test_a_missing_place_for_jobs_keeps_nothing_else_from_working(tmp_path: Path) -> None:
    world = World(tmp_path, f'jobs_dir = "{tmp_path}/file/jobs"\n')
    (tmp_path / "file").write_text("x")
    world.load()
    assert "no job can be run: " in world.jobs.problem
    assert world.offers == [False]
    assert not world.jobs.knows_jobs
    (tmp_path / "file").unlink()
    world.advance(61.0)
    world.wait_for_workers()
    world.advance()
    assert world.offers == [False, True]
    world.jobs.close()


def test_the_directory_of_jobs_lets_users_through_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        opened = [JobsDir(str(tmp_path / "new"))]
        (tmp_path / "old").mkdir(0o700)
        opened.append(JobsDir(str(tmp_path / "old")))
        for each in opened:
            each.open()
    finally:
        os.umask(before)
    assert [os.stat(tmp_path / name).st_mode & 0o777 for name in ("new", "old")] == [0o711, 0o711]
    with pytest.raises(UnavailableError, match="in use by another agent"):
        JobsDir(str(tmp_path / "new")).open()
    for each in opened:
        each.close()


def test_a_directory_of_jobs_that_others_can_write_is_refused(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    with pytest.raises(ConfigError, match="is writable by others"):
        JobsDir(str(shared)).open()


def test_an_order_whose_directory_was_made_and_no_more_is_begun_anew(world: World) -> None:
    jobs_dir = Path(world.config.executor.jobs_dir)
    (jobs_dir / "j1" / "sandbox").mkdir(parents=True)
    files.write_job_file(str(jobs_dir / "j1"), files.JobFile(make_order("j1"), "boot"))
    world.restart()
    world.obey(make_order("j1"))
    assert world.executor.calls == [("start", "j1")]
    world.wait_for_workers()
    assert sorted(os.listdir(jobs_dir)) == [".lock", "j1"]


def test_a_tree_of_thousands_of_levels_is_removed(tmp_path: Path) -> None:
    top = tmp_path / "sandbox"
    top.mkdir()
    (tmp_path / "kept").write_text("x")
    (top / "link").symlink_to(tmp_path / "kept")
    fd = os.open(top, os.O_RDONLY)
    for _ in range(2100):
        os.mkdir("d", dir_fd=fd)
        inner = os.open("d", os.O_RDONLY, dir_fd=fd)
        os.close(fd)
        fd = inner
    os.close(fd)
    files.remove_tree(str(top))
    assert not top.exists()
    assert (tmp_path / "kept").exists()
    files.remove_tree(str(top))


def test_a_tree_goes_although_others_remove_a_part_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "top").mkdir()
    for number in range(3):
        (tmp_path / "top" / f"file{number}").touch()
    unlink, calls = os.unlink, []

    def be_late(name: str, **more: Any) -> None:
        calls.append(name)
        if len(calls) == 1:
            unlink(name, **more)
        unlink(name, **more)

    monkeypatch.setattr(os, "unlink", be_late)
    files.remove_tree(str(tmp_path / "top"))
    assert calls
    assert os.listdir(tmp_path) == []


def test_an_executor_that_cannot_work_offers_nothing_and_is_tried_again(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.executor.broken = "no bus; start it"
    world.load()
    assert (world.offers, world.jobs.problem) == ([False], "no job can be run: no bus; start it")
    world.obey(make_order("j1", wait_s=20.0))
    assert (world.jobs.is_ready, world.jobs.next_deadline_s()) == (False, math.inf)
    world.executor.broken = ""
    world.advance(30.0)
    assert world.finished("j1")["reason"] == "no job can be run: no bus; start it"
    assert world.executor.calls == []
    world.obey(make_order("j2"))
    world.advance(31.0)
    world.wait_for_workers()
    world.advance()
    assert (world.offers, world.executor.calls) == ([False, True], [])
    world.obey(make_order("j3"))
    assert world.executor.calls == [("start", "j3")]
    world.jobs.close()


# --- logs, overdraft


def run_old_and_new(world: World, old: dict[str, Any], new: dict[str, Any]) -> None:
    world.run("old", **old)
    world.obey(make_order("new", **new))
    world.happen(Started("new", "cpumond-jobs/new", 101.0))


def test_a_log_is_read_while_the_job_lives_and_as_long_as_it_is_kept(world: World) -> None:
    world.executor.log = (b"hello", 5)
    request = LogRequest("r1", "j1", "stdout", 3)
    assert "no log of job j1" in world.jobs.read_log(request).error
    world.run("j1")
    assert world.jobs.read_log(request).content == b"llo"
    world.happen(Ended("j1", world.clock.wall_s(), exit_code=0))
    world.obey(acknowledged=["j1"])
    world.adjust()
    assert world.jobs.read_log(request).total_bytes == 5
    world.adjust(86_500.0)
    assert "no log of job j1" in world.jobs.read_log(request).error
    world.wait_for_workers()
    assert os.listdir(world.config.executor.jobs_dir) == [".lock"]


def test_only_so_many_logs_are_kept(tmp_path: Path) -> None:
    world = World(tmp_path, "max_kept_logs = 2\n")
    world.load()
    for number in range(4):
        world.run(f"j{number}")
        world.happen(Ended(f"j{number}", world.clock.wall_s(), exit_code=0))
        world.obey(acknowledged=[f"j{number}"])
    world.adjust()
    world.wait_for_workers()
    assert sorted(os.listdir(world.config.executor.jobs_dir)) == [".lock", "j2", "j3"]


def test_a_job_that_is_being_stopped_does_not_make_another_one_go(world: World) -> None:
    run_old_and_new(world, {"cpu_limit": 3.0}, {"cpu_limit": 1.0})
    world.usage = {"cpumond-jobs/new": Usage(2.0)}
    world.obey(stop=[stop("new", 1e6)])
    for _ in range(200):
        assert not world.adjust()
        world.clock.advance(5.0)
    assert world.jobs.counters["overdraft"] == 0


def test_a_job_on_reclaimed_cpu_waits_for_memory_that_others_requested(world: World) -> None:
    world.run("ours", memory_limit=300)  # of which it uses 100
    world.memory |= {"cpumond-jobs/ours": 100, "owner": 50, "free": 400}
    world.memory_limits["owner"] = 250
    world.jobs.list_owners = lambda: ["owner", "free"]
    world.available = 599  # 200 and 200 of it are spoken for
    world.obey(make_order("guest", memory_limit=200, reclaimed=True), make_order("ordinary", memory_limit=200))
    assert set(world.executor.launches) == {"ours", "ordinary"}
    world.memory["cpumond-jobs/ours"] = 301  # used, so the rest is free; and what "ordinary" ordered is spoken for
    world.advance(0.9)
    assert "guest" not in world.executor.launches
    world.available = 600
    world.advance(0.2)
    assert "guest" in world.executor.launches


def test_jobs_on_reclaimed_cpu_are_slowed_from_the_memory_others_leave(world: World) -> None:
    world.memory |= {"cpumond-jobs": 300 * MIB, "owner": 100 * MIB}
    world.memory_limits["owner"] = 600 * MIB
    world.jobs.list_owners = lambda: ["owner"]
    world.run("ours", memory_limit=0)
    world.adjust(6.0)
    assert world.held == {}  # no such job
    world.run("guest", reclaimed=True)
    for available, high in ((None, None), (800 * MIB, 600 * MIB), (600 * MIB, 400 * MIB), (0, 64 * MIB)):
        world.available = available
        world.adjust(6.0)
        assert world.held.get("cpumond-jobs") == high


def test_an_overdraft_that_lasts_takes_the_latest_started_job(world: World) -> None:
    run_old_and_new(world, {"cpu_limit": 2.0}, {"cpu_limit": 2.0})
    world.other_cores = 1.0
    for _ in range(119):
        assert not world.adjust()
        world.clock.advance(5.0)
    assert world.adjust(15.0)
    assert world.executor.calls[-1] == ("interrupt", "new")
    world.happen(Ended("new", 900.0, signal=15))
    finished = world.finished("new")
    assert finished["state"] == "aborted"
    assert finished["reason"].startswith("resource_overdraft: Resource usage overdraft adjustment")
    assert world.jobs.counters["overdraft"] == 1


def test_jobs_occupy_their_reserve_and_may_use_more_while_the_node_has_it(world: World) -> None:
    """MEM-8, the agent's part: 1000 bytes hold two jobs that reserve 250 of 500 and one that reserves all of it."""
    reserved = {"memory_limit": 500, "memory_reserve": 250, "cpu_limit": 0.1, "user_slots": 0}
    for job_id, order in (("a", reserved), ("b", reserved), ("c", {**reserved, "memory_reserve": 500})):
        world.run(job_id, **order)
    world.obey(make_order("d", **reserved))
    assert set(world.executor.launches) == {"a", "b", "c"}
    assert world.executor.launches["a"].memory_limit == 500
    assert [report.memory for report in world.jobs.reports()] == [250, 250, 500]
    world.memory |= {"cpumond-jobs/a": 300, "cpumond-jobs/b": 100, "cpumond-jobs/c": 490}
    assert world.adjust(), "a heartbeat says it"
    assert [report.over_reserve for report in world.jobs.reports()] == [True, False, False]
    assert not world.adjust(5.0)
    assert {call for call, _ in world.executor.calls} == {"start"}


@pytest.mark.parametrize(("used", "available", "gone"), [
    ({"a": 400, "b": 400, "c": 190}, None, []),
    ({"a": 400, "b": 400, "c": 210}, None, ["b"]),
    ({"a": 400, "b": 240, "c": 400}, None, ["a"]),
    ({"a": 240, "b": 250, "c": 600}, None, []),
    ({"a": 300, "b": 300, "c": 10}, 2**26 - 301, ["a", "b"]),
    ({"a": 300, "b": 300, "c": 10}, 2**26, []),
])  # fmt: skip
def test_a_node_short_of_memory_aborts_the_latest_above_its_reserve(
    world: World, used: dict[str, int], available: int | None, gone: list[str]
) -> None:
    """1.9: by what the node offers, or by what its host has left; who keeps to its reserve stays."""
    for number, job_id in enumerate("abc"):
        order = make_order(job_id, memory_limit=500, memory_reserve=250, cpu_limit=0.1)
        world.obey(order if job_id != "c" else msgspec.structs.replace(order, memory_reserve=0))
        world.happen(Started(job_id, f"cpumond-jobs/{job_id}", 100.0 + number))
    world.memory |= {f"cpumond-jobs/{job_id}": amount for job_id, amount in used.items()}
    world.available = available
    world.adjust()
    world.advance()
    assert sorted(job_id for call, job_id in world.executor.calls if call == "kill") == gone
    assert world.jobs.counters["overdraft"] == len(gone)
    for job_id in gone:
        world.happen(Ended(job_id, 900.0, signal=9, max_memory=used[job_id]))
        finished = world.finished(job_id)
        assert finished["state"] == "aborted"
        assert finished["reason"].startswith(f"{MEMORY_OVERDRAFT}{used[job_id]} of 250 bytes")


def test_a_job_that_is_still_being_started_is_the_latest_one(world: World) -> None:
    world.run("old", cpu_limit=2.0)
    world.obey(make_order("new", cpu_limit=2.0))
    world.other_cores = 1.0
    world.adjust()
    world.adjust(700.0)
    assert [job_id for job_id, job in world.jobs.jobs.items() if job.file.stop is not None] == ["new"]


def test_an_executor_that_refuses_a_start_aborts_the_job(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: Launch) -> None:
        raise ExecutorError("it is here already")

    monkeypatch.setattr(world.executor, "start", refuse)
    world.obey(make_order("j1"))
    assert world.finished("j1")["state"] == "aborted"
    assert "it is here already" in world.finished("j1")["reason"]


def test_the_view_counts_states(world: World) -> None:
    world.run("j1")
    world.obey(make_order("j2"), stop=[stop("j1")])
    view = world.jobs.view()
    assert view.states == {"waiting": 0, "starting": 1, "running": 0, "stopping": 1, "ended": 0}
    assert view.counters["started"] == 1
    assert sum(view.start_buckets) == 1


def test_room_that_comes_too_late_starts_nothing(world: World) -> None:
    world.other_cores = 100.0
    world.obey(make_order("j1", wait_s=30.0))
    assert not world.advance(29.0)
    world.other_cores = 0.0
    assert world.advance(2.0)
    assert world.finished("j1")["state"] == "aborted"
    assert "it fits now, but too late" in world.finished("j1")["reason"]


# --- checkpoints


def touch(world: World, job_id: str, at: float) -> None:
    environment = world.executor.launches[job_id].environment
    os.utime(environment["CPUMOND_CHECKPOINT"], (at, at))


def checkpoint_of(world: World) -> float | None:
    [report] = world.jobs.reports()
    return report.checkpoint_at


def test_times_that_a_job_made_up_are_not_believed(world: World) -> None:
    world.run("j1", checkpoints=True)
    touch(world, "j1", 99.0)
    assert checkpoint_of(world) is None
    touch(world, "j1", world.clock.wall_s() + 1000.0)
    assert checkpoint_of(world) is None
    for at in (145.0, 150.0):
        touch(world, "j1", at)
        assert checkpoint_of(world) == at
    for at in (120.0, world.clock.wall_s() + 1000.0):
        checkpoint_of(world)
        touch(world, "j1", at)
        assert checkpoint_of(world) == 150.0
    os.unlink(world.executor.launches["j1"].environment["CPUMOND_CHECKPOINT"])
    assert checkpoint_of(world) == 150.0


def test_secrets_of_a_job_are_for_its_start_alone_and_in_no_file(world: World) -> None:
    world.obey(make_order("j0", cpu_limit=4.0), make_order("j1", secrets={"KEY": "hunter2"}, memory_limit=0))
    waiting = world.jobs.jobs["j1"]
    assert (waiting.file.state, waiting.order.secrets, waiting.secrets) == ("waiting", {}, {"KEY": "hunter2"})
    world.happen(Ended("j0", 160.0, exit_code=0))
    launch = world.executor.launches["j1"]
    assert (launch.secrets, launch.environment.get("KEY"), waiting.secrets) == ({"KEY": "hunter2"}, None, {})
    world.happen(Started("j1", "cpumond-jobs/j1", 100.0))
    world.wait_for_workers()
    files = [path for path in world.directory.rglob("*") if path.is_file()]
    assert world.directory / "state/jobs/j1/job.json" in files or any(path.name == "job.json" for path in files)
    assert [path for path in files if b"hunter2" in path.read_bytes()] == []
    assert "hunter2" not in repr((world.jobs.view(), world.jobs.reports(), waiting.file))
