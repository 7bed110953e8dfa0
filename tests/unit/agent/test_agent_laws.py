"""Laws of the agent over any order of events: nothing above what was found, what is reported is in force, all back."""

import os
import shutil
import tempfile
from pathlib import Path

import structlog
from examples import examples
from fake_node import QUICK, FakeNode, source
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from cpumond.agent import control
from cpumond.core.errors import RefusedError
from cpumond.testing import make_tree, v2_cgroup

JOBS = {
    "a": v2_cgroup(quota="400000 100000", cpu_max_burst="90000\n", cpu_weight="300\n"),
    "b": v2_cgroup(),
    "c": v2_cgroup(quota="50001 33333", cpu_max_burst="1\n"),
}
MORE = '[discovery]\nrescan_period = "1s"\n[writes]\ndrift_backoff = "2s"\noverride_ttl = "4s"\ndrift_max = 3\n'
MEMORY = "/dev/shm"


class AgentOverTime(RuleBasedStateMachine):
    """Three jobs; another program writes only to ``foreign``."""

    def __init__(self) -> None:
        super().__init__()
        # In memory where there is such a place: every change of a limit is synced to disk before.
        self.place = Path(tempfile.mkdtemp(prefix="cpumond-laws-", dir=MEMORY if os.access(MEMORY, os.W_OK) else None))
        self.logs = structlog.testing.capture_logs()
        self.records = self.logs.__enter__()
        self.mode = "reclaim"
        self.actuator = "quota"
        self.paused = False
        self.fresh = False
        self.node = FakeNode(self.place, {**JOBS, "foreign": JOBS["a"]}, self.config())
        make_tree(self.node.root / "outside", v2_cgroup(quota="400000 100000"))
        self.found = {job: self.node.files(job) for job in JOBS}
        self.outside = (self.node.root / "outside" / "cpu.max").read_text()

    def config(self) -> str:
        monitor = QUICK.replace('mode = "reclaim"', f'mode = "{self.mode}"\nactuator = "{self.actuator}"')
        return monitor + source("jobs/b") + source("*", "from-cgroup") + source("jobs/*", "from-cgroup") + MORE

    @initialize()
    def start(self) -> None:
        self.node.start()

    @rule(
        ticks=st.integers(1, 6), usage=st.sampled_from([0.0, 0.3, 1.4, 4.0]), throttled=st.sampled_from([0.0, 0.0, 1.0])
    )
    def time_passes(self, ticks: int, usage: float, throttled: float) -> None:
        for _ in range(ticks):
            self.node.tick(usage, dict.fromkeys(self.node.names(), throttled))
        self.fresh = True

    @rule()
    def a_tick_is_late(self) -> None:
        before = {job: self.node.files(job) for job in JOBS}
        self.node.tick(seconds=10.0, late_s=9.0)
        after = {job: self.node.files(job) for job in JOBS}
        if self.fresh:
            assert before == after
        self.fresh = True

    @rule(mode=st.sampled_from(["off", "shadow", "up-only", "reclaim", "reclaim"]))
    def the_mode_changes(self, mode: str) -> None:
        self.mode = mode
        self.reload()

    @rule(actuator=st.sampled_from(["quota", "weight", "guarantee"]))
    def the_actuator_changes(self, actuator: str) -> None:
        self.actuator = actuator
        self.reload()

    def reload(self) -> None:
        self.node.reload(self.config())
        self.node.tick(1.0)
        self.fresh = False

    @rule()
    def pause_or_go_on(self) -> None:
        pause = self.node.directory / "run" / "pause"
        self.paused = not self.paused
        if self.paused:
            pause.touch()
        else:
            pause.unlink()
            self.fresh = False  # what waited is written with the next tick

    @rule()
    def the_agent_is_killed_and_started_again(self) -> None:
        self.node.config_text = self.config()
        self.node.kill_and_restart()
        self.fresh = False

    @rule()
    def the_agent_ends_and_is_started_again(self) -> None:
        self.node.agent.close()
        assert {job: self.node.files(job) for job in JOBS} == self.found
        self.node.config_text = self.config()
        self.node.agent = self.node.make_agent()
        self.node.start()
        self.fresh = False

    @rule(cores=st.sampled_from([0.5, 0.6, 0.7]))
    def a_job_is_pinned(self, cores: float) -> None:
        try:
            control.pin_job(self.node.agent, "jobs/a", {"cpu_limit": cores})
        except RefusedError:
            has_child = (self.node.root / "jobs" / "a" / "child").exists()
            assert self.mode in ("off", "shadow") or (has_child and self.actuator != "guarantee")
        self.fresh = False

    @rule(job=st.sampled_from(["a", "foreign"]))
    def a_job_is_unpinned(self, job: str) -> None:
        control.unpin_job(self.node.agent, f"jobs/{job}")
        self.fresh = False

    @rule()
    def a_job_gets_or_loses_a_child(self) -> None:
        child = self.node.root / "jobs" / "a" / "child"
        if child.exists():
            child.rmdir()
        else:
            child.mkdir()
        self.node.tick(1.0)
        self.fresh = False

    @rule(quota=st.sampled_from(["max 100000", "300000 100000", "70001 100000"]))
    def the_quota_above_changes(self, quota: str) -> None:
        (self.node.root / "jobs" / "cpu.max").write_text(quota + "\n")
        self.node.tick(1.0)
        self.fresh = False

    @rule(quota=st.sampled_from(["max 100000", "200000 100000", "350000 50000"]))
    def a_job_ends_and_another_one_gets_its_place(self, quota: str) -> None:
        self.node.remove("b")
        self.node.tick()
        self.node.make("b", quota=quota)
        self.found["b"] = self.node.files("b")
        self.node.tick()
        self.fresh = False

    @rule(quota=st.sampled_from(["max 100000", "600000 100000", "200000 100000", "60000 100000", "1000 100000"]))
    def somebody_else_writes(self, quota: str) -> None:
        self.node.write("foreign", "cpu.max", quota + "\n")
        self.node.tick(1.0)
        self.fresh = False

    @precondition(lambda self: self.node.agent.context.last is not None)
    @invariant()
    def nothing_is_above_what_was_found_and_nothing_else_changes(self) -> None:
        for job, files in self.found.items():
            quota, period = files["cpu.max"].split()
            found_cores = float("inf") if quota == "max" else int(quota) / int(period)
            assert self.node.cores(job) <= found_cores
            assert int(self.node.read(job, "cpu.max.burst")) <= int(files["cpu.max.burst"])
            assert int(self.node.read(job, "cpu.weight")) <= int(files["cpu.weight"])
        assert (self.node.root / "outside" / "cpu.max").read_text() == self.outside
        assert not [record for record in self.records if record["event"] in ("tick_failed", "agent_error")]

    @precondition(lambda self: self.fresh)
    @invariant()
    def what_is_reported_is_in_force(self) -> None:
        for name in [*JOBS, "foreign"]:
            view = self.node.job(name)
            if not (view.mode in ("reclaim", "up-only") and not view.refused):
                if name != "foreign":
                    assert self.node.files(name) == self.found[name]
                continue
            if self.actuator == "guarantee" and name != "foreign":
                assert self.node.files(name) == self.found[name]
            if self.actuator != "quota":
                if name != "foreign":
                    assert self.node.read(name) == self.found[name]["cpu.max"]
                continue
            given = min(self.node.cores(name), view.state.hard_cores)
            assert abs(view.current_cores - given) < 0.011, name
            if name != "foreign":
                assert self.node.read(name, "cpu.weight") == self.found[name]["cpu.weight"]

    def teardown(self) -> None:
        try:
            self.node.agent.close()
            assert {job: self.node.files(job) for job in JOBS} == self.found
            assert not [record for record in self.records if record["event"] == "restore_failed"]
        finally:
            self.logs.__exit__(None, None, None)
            shutil.rmtree(self.place)


AgentOverTime.TestCase.settings = examples(40, stateful_step_count=25)
TestAgentOverTime = AgentOverTime.TestCase
