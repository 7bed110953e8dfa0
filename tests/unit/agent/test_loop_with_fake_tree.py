"""The agent driven tick by tick over a fake unified hierarchy: time, failures, reports, other writers, policy."""

import errno
import math
import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from fake_node import QUICK, FakeNode, source

from cpumond.agent import control, tracked
from cpumond.agent.config import finish_config, parse_config_text
from cpumond.agent.limits import writer
from cpumond.agent.limits.written import WRITTEN_FILE
from cpumond.agent.report.log import SilentReporter
from cpumond.agent.service import Agent
from cpumond.agent.state_file import Originals, load
from cpumond.agent.tick import choose_stride
from cpumond.agent.tracked import Tracked
from cpumond.core.answers import AddedJob, RemovedJob
from cpumond.core.errors import ConfigError, CreateError, RefusedError, UnavailableError
from cpumond.core.wire import Heartbeat
from cpumond.host.cgroup import Cgroup, open_cgroup
from cpumond.host.cgroup.mounts import open_hierarchies
from cpumond.host.cgroup.settings import CpuSettings
from cpumond.testing import make_tree, v2_cgroup, write_mountinfo

FOUR = v2_cgroup(quota="400000 100000")


def lowered(make_node: Callable[..., FakeNode], config: str = QUICK + source()) -> FakeNode:
    """A node whose job ordered 4 cores, uses none and has been lowered to its floor."""
    return make_node({"a": FOUR}, config=config).run(8)


@pytest.fixture
def node(make_node: Callable[..., FakeNode]) -> FakeNode:
    return lowered(make_node)


def kinds(node: FakeNode, job: str) -> str:
    decision = node.job(job).decision
    assert decision is not None
    return decision.kind


def ring(node: FakeNode, job: str) -> list[tuple[str, str]]:
    tracked = node.agent.table.find(job)
    assert tracked is not None
    return [(record.kind, record.result) for record in tracked.ring.records()]


# ---- the tick


def test_what_holds_the_agent_or_pid_1_is_never_lowered(make_node, monkeypatch):
    monkeypatch.setattr(tracked.files, "find_vital", lambda _: {"jobs/a": "PID 1 runs in it"})
    node = make_node({"a": FOUR, "b": FOUR}).run(8)
    assert (node.cores("a"), node.cores("b")) == (4.0, 0.5)
    assert node.job("a").refused == "PID 1 runs in it"


def test_a_floor_that_a_reload_raises_holds_at_once(make_node):
    """Not only for what would still be taken; a limit that another program decides about is left to it."""
    node = make_node({"a": FOUR, "pinned": FOUR}).run(8)
    control.pin_job(node.agent, "pinned", {"cpu_limit": 0.3})
    node.tick()
    assert (node.cores("a"), node.cores("pinned")) == (0.5, 0.3)
    node.reload(QUICK.replace("min_cpu_limit = 0.5", "min_cpu_limit = 1.5") + source())
    node.ticks(2)
    assert (node.cores("a"), node.cores("pinned")) == (1.5, 0.3)
    node.ticks(6)
    assert node.cores("a") == 1.5
    node.reload(QUICK + source())
    node.ticks(8)
    assert node.cores("a") == 0.5


def press(node: FakeNode, job: str, total_s: float) -> None:
    node.write(job, "cpu.pressure", f"some avg10=0.00 avg60=0.00 avg300=0.00 total={int(total_s * 1e6)}\n")


def test_a_job_under_pressure_gets_its_full_limit_back_in_that_check(make_node, logs):
    node = make_node({"a": FOUR, "b": FOUR}, config=QUICK + "pressure_restore_ratio = 0.3\n" + source())
    press(node, "a", 7.0)
    node.run(8)
    assert (node.cores("a"), node.cores("b")) == (0.5, 0.5)
    press(node, "a", 7.3)
    node.tick(0.1)
    assert node.cores("a") == 0.5
    press(node, "a", 7.7)
    node.tick(0.1)
    assert (node.cores("a"), node.cores("b")) == (4.0, 0.5)
    assert node.agent.context.totals.restores == node.job("a").restores == 1
    decisions = control.explain_job(node.agent, "a").decisions
    assert (decisions[-1].kind, decisions[-1].throttled_ratio) == ("restore", 0.0)
    assert decisions[-1].pressure_ratio == pytest.approx(0.4, abs=1e-5)
    [missed] = [record for record in logs if record["event"] == "pressure_unknown"]
    assert missed["job_id"] == "b"
    assert "cpu.pressure" in missed["error"]


@pytest.mark.parametrize(
    ("seconds", "late_s", "suspended_s", "kind"),
    [(5.0, 4.0, 0.0, "base"), (4.0, 3.0, 0.0, "shrink"), (1.0, 0.0, 3600.0, "base")],
    ids=["too late", "three periods late", "suspended"],
)
def test_a_late_tick_or_a_suspend_is_a_new_baseline(make_node, seconds, late_s, suspended_s, kind):
    node = make_node({"a": FOUR}).run(3)
    before = node.cores("a")
    node.clock.suspend(suspended_s)
    node.tick(seconds=seconds, late_s=late_s)
    assert (kinds(node, "a"), node.agent.context.totals.rebaselines) == (kind, int(kind == "base"))
    assert (node.cores("a") < before) == (kind == "shrink")
    node.tick()
    assert kinds(node, "a") != "base"


@pytest.mark.parametrize(
    ("stride", "used", "after"), [(1, 0.11, 2), (16, 0.11, 16), (2, 0.1, 2), (2, 0.04, 2), (2, 0.03, 1), (1, 0.03, 1)]
)
def test_checks_are_taken_up_again_only_far_below_the_budget(stride, used, after):
    assert choose_stride(stride, used, 0.1) == after


def test_over_its_budget_the_agent_looks_at_each_job_less_often_and_back(make_node, logs):
    config = QUICK + source()
    node = make_node({"a": FOUR, "b": FOUR}, config=config + "[cost]\ncpu_budget_ratio = 1e-9\n").run(60, 2.0)
    assert node.snapshot().stride == 16
    assert node.agent.context.totals.shed_checks > 0
    node.reload(config + "[cost]\ncpu_budget_ratio = 64.0\n")
    node.ticks(60, 2.0)
    assert node.snapshot().stride == 1
    assert [record["every"] for record in logs if record["event"] == "checks_shed"] == [2, 4, 8, 16, 8, 4, 2, 1]


def test_what_other_threads_cost_sheds_no_checks(make_node, logs):
    node = make_node({"a": FOUR}, config=QUICK + source() + "[cost]\ncpu_budget_ratio = 0.02\n").start()

    def burn() -> None:
        while time.thread_time() < 1.0:
            pass

    answering = threading.Thread(target=burn)
    answering.start()
    answering.join()
    node.ticks(25, 2.0)
    assert [record for record in logs if record["event"] == "checks_shed"] == []


def test_more_jobs_than_max_jobs_are_left_out_and_said(make_node):
    config = QUICK + source() + "[discovery]\nmax_jobs = 2\n"
    node = make_node(dict.fromkeys("abc", FOUR), config=config).start()
    snapshot = node.tick()
    assert len(snapshot.jobs) == 2
    assert any("max_jobs = 2" in problem for problem in snapshot.problems)


def test_sources_that_match_nothing_are_a_problem_after_some_rescans(make_node):
    config = QUICK + source("nothing/*") + '[discovery]\nempty_rescans = 2\nrescan_period = "1s"\n'
    node = make_node({}, config=config).start()
    node.tick()
    assert "no cgroup matches any source (nothing/*)" in node.tick().problems[0]


# ---- one broken job


@pytest.mark.parametrize(
    ("file", "text"),
    [("cpu.stat", "usage_usec many\n"), ("cpu.stat", ""), ("cpu.max", "all the time\n"), ("cpu.max", "")],
)
def test_one_broken_job_does_not_disturb_the_others_and_is_said_once(make_node, logs, file, text):
    node = make_node({"a": FOUR, "broken": FOUR, "c": FOUR}).run(2)
    for _ in range(6):
        node.clock.advance(1.0)
        for job in ("a", "c"):
            node.use(job, 0.1)
        node.write("broken", file, text)
        node.agent.loop.tick(node.clock.monotonic_s())
    assert node.cores("a") == node.cores("c") == 0.5
    warnings = [record for record in logs if record["event"] == "job_error"]
    assert len({(record["job_id"], record["error"]) for record in warnings}) == len(warnings) <= 2
    assert not [record for record in logs if record["event"] == "tick_failed"]


@pytest.mark.parametrize("text", ["lots 100000\n", "", "max\n", "1 2 3\n"])
def test_a_quota_above_that_cannot_be_read_disturbs_only_the_jobs_below_it(make_node, text):
    node = make_node({"a": FOUR}, config=QUICK + source("jobs/*") + source("jobs/group/*"))
    make_tree(node.root / "jobs" / "group", {**v2_cgroup(), "b": v2_cgroup(quota="400000 100000")})
    node.start()
    node.write("group", "cpu.max", text)
    node.agent.rescan_now()
    node.ticks(8)
    assert node.cores("a") == 0.5


def test_a_job_that_cannot_be_opened_is_a_problem_and_opened_when_it_can(make_node):
    node = make_node({"a": FOUR, "b": {"cpu.stat": "usage_usec 0\n"}}, config=QUICK + source() + RESCAN).start()
    snapshot = node.tick()
    assert [job.found.job_id for job in snapshot.jobs] == ["a"]
    assert any("cgroup.subtree_control" in problem for problem in snapshot.problems)
    node.write("b", "cpu.max", "max 100000\n")
    snapshot = node.tick()
    assert [job.found.job_id for job in snapshot.jobs] == ["a", "b"]
    assert snapshot.problems == ()


# ---- reports


def test_a_heartbeat_holds_every_job_and_its_sequence_grows(make_node):
    node = make_node({"light": FOUR, "busy": FOUR}).run(12, {"light": 0.1, "busy": 3.9})
    beats = node.reports.heartbeats
    assert all([job.job_id for job in beat.jobs] == ["busy", "light"] for beat in beats)
    sequences = [beat.sequence for beat in beats]
    assert sequences == sorted(set(sequences))
    assert len({beat.incarnation for beat in beats}) == 1
    busy, light = beats[-1].jobs
    assert (light.cpu_limit, light.current_cpu_limit, light.mode) == (4.0, 0.5, "reclaim")
    assert (busy.cpu_limit, busy.current_cpu_limit) == (4.0, 4.0)
    assert msgspec.convert(msgspec.to_builtins(beats[-1]), Heartbeat) == beats[-1]
    node.kill_and_restart()
    assert node.reports.heartbeats[-1].incarnation != beats[0].incarnation


def test_the_last_heartbeat_gives_everything_back(node):
    assert node.end().reports.heartbeats[-1].jobs[0].current_cpu_limit == 4.0
    assert node.read("a") == "400000 100000"
    assert node.reports.closed == 1


def test_a_heartbeat_is_sent_on_each_change_and_each_report_period(make_node):
    node = make_node({"a": FOUR}, config=QUICK + source() + '[report]\nkind = "none"\nreport_period = "5s"\n').start()
    sent = []
    for _ in range(16):
        before = len(node.reports.heartbeats)
        node.tick(0.1)
        sent.append(len(node.reports.heartbeats) - before)
    # Two checks fill the window, three changes lead to the floor, then one report each five seconds.
    assert sent == [0, 1, 1, 1, 0, 0, 0, 0, 1, 0, 0, 0, 0, 1, 0, 0]


def test_a_job_in_shadow_mode_is_reported_with_its_full_limit(make_node):
    node = lowered(make_node, QUICK.replace("reclaim", "shadow") + source())
    assert node.read("a") == "400000 100000"
    report = node.reports.heartbeats[-1].jobs[0]
    assert (report.mode, report.current_cpu_limit) == ("shadow", 4.0)
    assert node.job("a").state.limit_cores == 0.5


# ---- policy

RESCAN = '[discovery]\nrescan_period = "1s"\n'


def test_the_pause_file_stops_all_writes_at_once(make_node):
    node = make_node({"a": FOUR}).run(2)
    pause = node.directory / "run" / "pause"
    pause.touch()
    before = node.files("a")
    snapshot = node.ticks(6)
    assert node.files("a") == before
    assert snapshot.paused
    assert (node.job("a").result, node.job("a").current_cores) == ("paused", node.cores("a"))
    pause.unlink()
    node.ticks(6)
    assert node.cores("a") == 0.5
    pause.touch()
    assert node.end().cores("a") == 4.0, "in the end all goes back"


def test_what_a_reload_cannot_change_is_kept_and_said(make_node, logs):
    node = make_node({"a": FOUR}).start()
    node.agent.use_config(msgspec.structs.replace(node.read_config(), node_id="other"))
    assert {record["key"] for record in logs if record["event"] == "needs_restart"} == {"node_id"}
    for key in ("state_dir", "runtime_dir", "mountinfo"):
        elsewhere = msgspec.structs.replace(node.read_config(), **{key: str(node.directory / "elsewhere")})
        with pytest.raises(ConfigError, match=f"{key}: cannot change from .* while the agent runs"):
            node.agent.use_config(elsewhere)
    (node.directory / "run" / "pause").touch()
    assert node.tick().paused
    assert node.reports.heartbeats[-1].node_id == "node"


def test_a_job_with_child_cgroups_is_restored_until_they_are_gone(make_node):
    node = lowered(make_node, QUICK + source() + RESCAN)
    child = node.root / "jobs" / "a" / "child"
    child.mkdir()
    node.tick()
    assert (node.read("a"), node.job("a").status, node.job("a").current_cores) == ("400000 100000", "refused", 4.0)
    child.rmdir()
    node.tick(4.0)
    assert node.job("a").current_cores == node.cores("a") == 4.0
    node.ticks(8)
    assert node.cores("a") == node.job("a").current_cores == 0.5


def test_a_job_that_is_managed_no_more_gets_its_limit_back_at_once(node):
    node.agent.use_config(msgspec.structs.replace(node.read_config(), managed_roots=["jobs/b"]))
    node.tick()
    assert (node.read("a"), node.job("a").status, node.job("a").current_cores) == ("400000 100000", "refused", 4.0)


def test_a_limit_is_held_to_what_each_thread_needs(make_node):
    node = make_node({"a": FOUR}, config=QUICK + "min_cores_per_thread = 0.4\n" + source()).start()
    node.write("a", "cgroup.threads", "7\n8\n9\n")
    node.ticks(8)
    assert node.cores("a") == node.job("a").current_cores == pytest.approx(1.2)
    assert "min_cores_per_thread" in control.explain_job(node.agent, "a").notes[0]
    # More threads than the limit has room for now: it is not lowered, and not raised for them either.
    node.write("a", "cgroup.threads", "7\n" * 100)
    node.ticks(4)
    assert node.cores("a") == pytest.approx(1.2)
    node.write("a", "cgroup.threads", "7\n")
    node.ticks(4)
    assert node.cores("a") == 0.5


# ---- other writers


def test_a_burst_of_somebody_else_is_kept_under_each_quota_and_put_back(make_node):
    node = make_node({"a": FOUR}).run(4)
    assert node.cores("a") < 4.0
    node.write("a", "cpu.max.burst", "90000\n")
    node.ticks(4)
    # A fake tree refuses nothing: a lower quota without a burst of its own does not look at it.
    node.write("a", "cpu.max", "300000 100000\n")
    node.tick()
    assert node.agent.table.find("a").original.burst_us == 90_000
    node.agent.loop.limits.give_back(node.agent.table.find("a"))
    node.ticks(8)
    assert (node.read("a"), node.read("a", "cpu.max.burst")) == ("50000 100000", "50000")
    node.write("a", "cpu.max.burst", "20000\n")
    node.ticks(3, 0.5)
    assert (node.cores("a") > 0.5, node.read("a", "cpu.max.burst")) == (True, "20000")
    node.agent.close()
    assert (node.read("a"), node.read("a", "cpu.max.burst")) == ("300000 100000", "20000")


@pytest.mark.parametrize("quota_us", [10_000, 49_900, 50_100, 399_000])
def test_a_lower_foreign_limit_is_the_new_original(make_node, logs, quota_us):
    node = lowered(make_node, QUICK + source() + '[writes]\noverride_ttl = "5s"\n')
    node.write("a", "cpu.max", f"{quota_us} 100000\n")
    node.tick()
    ordered = quota_us / 1e5
    job = node.job("a")
    assert (job.status, job.ordered_cores, job.current_cores) == ("overridden", ordered, ordered)
    report = node.reports.heartbeats[-1].jobs[0]
    assert (report.cpu_limit, report.current_cpu_limit, job.state.hard_cores) == (ordered, ordered, ordered)
    content = load(node.agent.writer.path, Originals)
    assert content is not None
    assert content.cgroups["jobs/a"].settings.quota_us == quota_us
    node.ticks(3)
    assert node.cores("a") == ordered
    node.ticks(12)
    assert (node.cores("a"), node.job("a").status) == (min(ordered, 0.5), "reclaim")
    node.tick(0.5, {"a": 1.0})
    assert node.cores("a") == ordered
    assert node.end().read("a") == f"{quota_us} 100000"


@pytest.mark.parametrize("usage", [0.0, 4.0])
def test_an_order_between_the_look_and_the_write_is_not_written_over(make_node, monkeypatch, usage):
    node = make_node({"a": FOUR}).run(1 if usage == 0.0 else 8)
    secure = node.agent.writer.secure

    def order_meanwhile(jobs: list[Tracked]) -> None:
        secure(jobs)
        node.write("a", "cpu.max", "120000 100000\n")

    monkeypatch.setattr(node.agent.writer, "secure", order_meanwhile)
    while node.job("a").result != "overridden":
        node.tick(usage, {"a": 1.0} if usage else None)
    assert (node.cores("a"), node.job("a").ordered_cores) == (1.2, 1.2)
    assert node.end().cores("a") == 1.2


@pytest.mark.parametrize("quota_us", [10_000, 120_000])
def test_an_order_between_a_kill_and_the_next_look_is_kept(node, quota_us):
    node.write("a", "cpu.max", f"{quota_us} 100000\n")
    node.kill_and_restart()
    node.ticks(8)
    job = node.job("a")
    assert (node.cores("a"), job.status, job.ordered_cores) == (quota_us / 1e5, "overridden", quota_us / 1e5)
    assert node.end().read("a") == f"{quota_us} 100000"


def test_where_nothing_is_known_of_what_was_written_no_job_is_left_low(node):
    (node.directory / "run" / WRITTEN_FILE).write_bytes(b"\xff 1 2 3\n")
    node.write("a", "cpu.max", "45000 100000\n")
    node.kill_and_restart()
    assert node.end().cores("a") == 4.0


def test_without_a_time_for_overrides_an_order_is_lowered_once_on_disk(make_node, monkeypatch):
    node = lowered(make_node, QUICK + source() + "[writes]\noverride_ttl = 0\n")

    def refuse(*_: object, **__: object) -> None:
        raise CreateError("no space left")

    monkeypatch.setattr(writer, "save", refuse)
    node.write("a", "cpu.max", "200000 100000\n")
    node.ticks(8)
    assert (node.cores("a"), node.job("a").result) == (2.0, "failed")
    monkeypatch.undo()
    node.ticks(8)
    assert (node.cores("a"), node.job("a").status, node.job("a").ordered_cores) == (0.5, "reclaim", 2.0)
    assert node.end().cores("a") == 2.0


def test_a_limit_that_could_not_be_written_again_is_tried_again(node, monkeypatch, refuse_writes):
    refuse_writes()
    node.reload(QUICK.replace("min_cpu_limit = 0.5", "min_cpu_limit = 1.0") + source())
    node.ticks(4)
    assert ring(node, "a")[-1] == ("reapply", "failed")
    assert (node.cores("a"), node.job("a").current_cores) == (0.5, 0.5)
    monkeypatch.undo()
    node.ticks(6)
    assert (node.cores("a"), ring(node, "a")[-1]) == (1.0, ("reapply", "applied"))


def test_a_restore_that_failed_when_its_source_went_is_done_in_the_end(node, monkeypatch, refuse_writes, logs):
    refuse_writes()
    node.reload(QUICK)
    node.tick()
    monkeypatch.undo()
    assert [record["event"] for record in logs if record["log_level"] == "error"] == ["restore_failed"]
    assert node.cores("a") == 0.5
    assert node.end().read("a") == "400000 100000"


def test_a_foreign_write_just_before_a_request_of_the_socket_is_not_missed(make_node):
    node = make_node({"a": FOUR, "b": FOUR}).run(8)
    node.write("a", "cpu.max", "200000 100000\n")
    control.pin_job(node.agent, "b", {"cpu_limit": 1.0})
    node.tick()
    assert (node.cores("a"), node.job("a").status) == (2.0, "overridden")


def test_a_foreign_write_among_too_many_events_is_not_missed(make_node):
    node = make_node({"a": FOUR, "b": FOUR}).run(8)
    kept = int(Path("/proc/sys/fs/inotify/max_queued_events").read_text())
    if kept > 100_000:
        pytest.skip(f"the kernel keeps {kept} events here")
    files = [os.open(node.root / "jobs" / job / "cpu.max", os.O_WRONLY) for job in ("a", "b")]
    for number in range(kept + 10):
        os.pwrite(files[number % 2], b"5", 0)
    for file in files:
        os.close(file)
    node.make("c", quota="400000 100000")
    node.write("a", "cpu.max", "200000 100000\n")
    node.write("b", "cpu.max", "50000 100000\n")
    node.tick(4.0)
    assert (node.job("a").status, node.job("b").status, node.job("c").status) == ("overridden", "reclaim", "reclaim")


@pytest.mark.parametrize(("call", "code", "sysctl"), [
    ("asyncinotify.Inotify.add_watch", errno.ENOSPC, "fs.inotify.max_user_watches"),
    ("cpumond.agent.watch.Inotify", errno.EMFILE, "fs.inotify.max_user_instances"),
])  # fmt: skip
def test_without_watches_limits_are_looked_at_with_each_rescan(make_node, monkeypatch, logs, call, code, sysctl):
    def refuse(*_: object, **__: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(call, refuse)
    node = make_node({"a": FOUR}, config=QUICK + source() + RESCAN).run(8)
    node.write("a", "cpu.max", "200000 100000\n")
    node.make("b", quota="400000 100000")
    snapshot = node.tick(4.0)
    assert (node.job("a").status, node.job("b").status) == ("overridden", "reclaim")
    assert [sysctl in problem for problem in snapshot.problems] == [True]
    assert len([line for line in logs if line["event"] == "inotify_used_up"]) == 1


def test_a_limit_set_while_the_agent_opens_its_cgroup_is_not_missed(make_node, monkeypatch):
    node = make_node({}, config=QUICK + source(cpu_limit="from-cgroup")).start()
    node.make("a")
    written: list[str] = []

    class Slow:
        """Whoever made the cgroup sets its limit just after the agent has read that there is none."""

        def __init__(self, cgroup: Cgroup) -> None:
            self.cgroup = cgroup

        def __getattr__(self, name: str) -> object:
            return getattr(self.cgroup, name)

        def read_settings(self) -> CpuSettings | None:
            found = self.cgroup.read_settings()
            if not written:
                written.append("300000 100000")
                node.write("a", "cpu.max", f"{written[0]}\n")
            return found

    monkeypatch.setattr("cpumond.agent.table.open_cgroup", lambda *place: Slow(open_cgroup(*place)))
    node.ticks(8)
    assert (node.job("a").ordered_cores, node.cores("a")) == (3.0, 0.5)
    assert node.end().read("a") == written[0]


def test_a_directory_made_again_is_watched_again_and_looked_at_once_more(make_node):
    node = make_node({"a": FOUR}, config=QUICK + source("jobs/*/*"))
    group = node.root / "jobs" / "group"
    make_tree(group, {"b": v2_cgroup(quota="400000 100000")})
    node.start()
    os.rename(group, node.directory / "kept")
    group.mkdir()
    assert node.tick().jobs == ()
    make_tree(group, {"c": v2_cgroup(quota="400000 100000")})
    assert [job.found.path for job in node.tick().jobs] == ["jobs/group/c"]


# ---- state on disk


def take_away(state_dir: Path) -> None:
    """Remove it, and put something there that keeps it from being made anew."""
    shutil.rmtree(state_dir)
    state_dir.touch()


def test_without_its_state_on_disk_nothing_is_changed_and_it_is_said(make_node, logs):
    node = make_node({"a": FOUR}).start()
    take_away(node.directory / "state")
    node.ticks(8)
    assert node.read("a") == "400000 100000"
    assert node.job("a").current_cores == 4.0
    errors = [record["error"] for record in logs if record["event"] == "agent_error"]
    assert len(errors) == 1
    assert "state_dir" in errors[0]
    (node.directory / "state").unlink()
    node.ticks(8)
    assert node.cores("a") == 0.5


def test_a_lowered_job_is_restored_without_a_writable_state_dir(make_node):
    node = make_node({"a": FOUR, "b": FOUR}).run(8)
    take_away(node.directory / "state")
    node.tick({"a": 0.5}, {"a": 1.0})
    assert node.read("a") == "400000 100000"
    assert node.end().read("b") == "400000 100000"


@pytest.mark.parametrize("config", [
    QUICK.replace("reclaim", "off") + source(),
    QUICK.replace("reclaim", "shadow") + source(),
    QUICK + 'actuator = "weight"\n' + source(),
    QUICK + source("jobs/b"),
], ids=["off", "shadow", "weight", "no source"])  # fmt: skip
def test_a_restart_puts_back_what_it_would_not_move_itself(node, config):
    node.config_text = config
    node.kill_and_restart()
    assert (node.read("a"), node.read("a", "cpu.weight")) == ("400000 100000", "100")


@pytest.mark.parametrize("content", [b"", b"cpumond-state 1 sha256=00\n{}", b"\xff\xfe", b"cpumond-state 9 x\n"])
def test_a_damaged_state_file_is_kept_aside_and_limits_are_restored(make_node, logs, content):
    config = QUICK + source("jobs/number") + source("jobs/free", cpu_limit="from-cgroup")
    node = make_node({"number": FOUR, "free": FOUR}, config=config).run(8)
    for directory in ("state", "run"):
        (node.directory / directory / "originals.state").write_bytes(content)
    node.kill_and_restart()
    assert (node.cores("number"), node.cores("free")) == (4.0, 0.5)
    assert (node.directory / "state" / "originals.state.damaged-0").read_bytes() == content
    assert [record for record in logs if record["event"] == "state_damaged"]
    assert any("damaged" in problem for problem in node.snapshot().problems)
    assert {record["job_id"] for record in logs if record["event"] == "original_unknown"} == {"number", "free"}


@pytest.mark.parametrize("lost", ["damaged", "deleted"])
def test_the_copy_of_a_lost_state_file_gives_every_job_its_limit(make_node, logs, lost):
    config = QUICK + source("jobs/number") + source("jobs/free", cpu_limit="from-cgroup")
    node = make_node({"number": FOUR, "free": FOUR}, config=config).run(8)
    state = node.directory / "state" / "originals.state"
    assert (node.directory / "run" / "originals.state").read_bytes() == state.read_bytes()
    if lost == "damaged":
        state.write_bytes(b"")
    else:
        state.unlink()
    node.kill_and_restart()
    assert [node.job(name).state.hard_cores for name in ("number", "free")] == [4.0, 4.0]
    assert [node.cores(name) for name in ("number", "free")] == ([4.0, 4.0] if lost == "damaged" else [0.5, 0.5])
    assert bool([record for record in logs if record["event"] == "state_damaged"]) == (lost == "damaged")
    node.agent.close()
    assert [node.read(name) for name in ("number", "free")] == ["400000 100000"] * 2


def test_a_damaged_state_file_says_nothing_about_cgroups_made_later(node):
    for directory in ("state", "run"):
        (node.directory / directory / "originals.state").write_bytes(b"")
    node.kill_and_restart()
    node.make("small", quota="200000 100000")
    node.ticks(2, 2.0)
    assert node.read("small") == "200000 100000"
    assert node.job("small").state.hard_cores == 2.0


def test_limits_after_a_damaged_state_file_are_written_once_the_disk_works(node):
    state = node.directory / "state"
    (state / "originals.state").write_bytes(b"")
    (node.directory / "run" / "originals.state").write_bytes(b"")
    node.drop_agent()
    node.agent = node.make_agent()
    (state / "originals.state.new").mkdir()  # nothing can be saved
    node.run(2, 0.4)
    assert node.cores("a") == 0.5
    (state / "originals.state.new").rmdir()
    node.ticks(10, 0.4)
    assert node.cores("a") >= 0.5
    assert ("reapply", "applied") in ring(node, "a")


def test_a_limit_that_cannot_be_put_back_stays_on_disk_and_is_tried_again(make_node, logs):
    node = make_node({"a": FOUR, "b": FOUR}, config=QUICK + source() + RESCAN).run(8)
    burst = node.root / "jobs" / "a" / "cpu.max"
    os.rename(burst, burst.with_suffix(".kept"))
    burst.mkdir()  # neither read nor written any more
    node.reload(QUICK.replace("reclaim", "off") + source() + RESCAN)
    node.tick()
    assert node.read("b") == "400000 100000"
    burst.rmdir()
    os.rename(burst.with_suffix(".kept"), burst)
    node.tick()
    assert node.read("a") == "400000 100000"
    assert not [record for record in logs if record["event"] == "tick_failed"]


# ---- control socket


def add(node: FakeNode, cgroup: str, **more: object) -> AddedJob:
    return control.add_job(node.agent, {"cgroup": cgroup, **more})


def test_a_registered_job_is_followed_at_once_and_over_a_restart(make_node):
    node = make_node({"a": FOUR}, config=QUICK).start()
    assert add(node, "jobs/a", cpu_limit=3.0, job_id="mine", operation_id="op").cpu_limit == 3.0
    node.ticks(8)
    node.kill_and_restart()
    assert (node.job("a").found.job_id, node.job("a").ordered_cores, node.cores("a")) == ("mine", 3.0, 0.5)
    assert control.remove_job(node.agent, "mine") == RemovedJob("mine")
    assert node.read("a") == "400000 100000"
    assert control.list_registered(node.agent).jobs == []
    with pytest.raises(UnavailableError, match="nothing to remove"):
        control.remove_job(node.agent, "mine")


@pytest.mark.parametrize(("cgroup", "body", "error", "match"), [
    ("elsewhere", {}, RefusedError, "outside managed_roots"),
    ("jobs", {}, RefusedError, "child cgroups"),
    ("jobs/none", {}, UnavailableError, "does not exist; create it first"),
    ("", {}, ConfigError, "must be a path below"),
    ("jobs/../elsewhere", {}, ConfigError, "without '..'"),
    ("jobs/a", {"cpu_limit": 0}, ConfigError, "cpu_limit must be a number"),
    ("jobs/a", {"cpu_limit": -1.5}, ConfigError, "cpu_limit must be a number"),
    ("jobs/a", {"cpu_limit": True}, ConfigError, "cpu_limit must be a number"),
    ("jobs/a", {"cpu_limit": "2"}, ConfigError, "cpu_limit must be a number"),
    ("jobs/a", {"job_cpu_monitor": {"vote_window": 3}}, ConfigError, "unknown key"),
    ("jobs/a", {"job_cpu_monitor": [1]}, ConfigError, "must be a table"),
    ("jobs/a", {"job_cpu_monitor": {"vote_window_size": 2, "vote_decision_threshold": 2}}, ConfigError, "never"),
    ("jobs/a", {"job_id": "b"}, ConfigError, "already"),
    ("jobs/a", {"job_id": "x" * 5000}, ConfigError, "job_id"),
])  # fmt: skip
def test_a_job_that_cannot_be_managed_is_refused_and_not_kept(make_node, cgroup, body, error, match):
    node = make_node({"a": FOUR, "b": FOUR}, config=QUICK + source("jobs/b"))
    make_tree(node.root / "elsewhere", v2_cgroup())
    node.start()
    with pytest.raises(error, match=match):
        add(node, cgroup, **body)
    assert control.list_registered(node.agent).jobs == []


def test_options_of_a_registered_job_without_effect_are_reported(make_node, logs):
    node = make_node({"a": FOUR, "b": FOUR}, config=QUICK).start()
    options = {"limit_rule": "peak", "vote_mode": "ytsaurus", "reserve_ratio": 0.2}
    warnings = ['job_cpu_monitor.vote_mode has no effect under limit_rule = "peak"']
    assert add(node, "jobs/a", job_cpu_monitor=options).warnings == warnings
    assert [record["error"] for record in logs if record["event"] == "option_without_effect"] == warnings
    assert add(node, "jobs/b", job_cpu_monitor={"vote_mode": "ytsaurus"}).warnings == []


def test_a_cgroup_is_one_registered_job(make_node):
    node = make_node({"a": FOUR}, config=QUICK).start()
    add(node, "jobs/a", job_id="one", cpu_limit=3.0)
    with pytest.raises(ConfigError, match="one"):
        add(node, "jobs/a", job_id="two")
    assert add(node, "jobs/a", job_id="one", cpu_limit=2.0).cpu_limit == 2.0
    assert [job.job_id for job in control.list_registered(node.agent).jobs] == ["one"]


def test_a_registered_job_overrides_what_a_source_says_about_its_cgroup(make_node):
    node = make_node({"a": FOUR}).start()
    add(node, "jobs/a", job_id="mine", cpu_limit=2.0, job_cpu_monitor={"mode": "shadow"})
    node.ticks(8)
    assert (node.job("a").mode, node.read("a")) == ("shadow", "400000 100000")
    control.remove_job(node.agent, "mine")
    node.ticks(10)
    assert (node.job("a").found.job_id, node.cores("a")) == ("a", 0.5)


def test_a_pin_holds_a_limit_until_unpin_and_over_a_restart(make_node):
    node = make_node({"a": FOUR}).run(4)
    assert control.pin_job(node.agent, "a", {"cpu_limit": 1.5}).status == "pinned"
    assert node.cores("a") == 1.5
    node.ticks(6)
    node.kill_and_restart()
    node.ticks(6)
    assert (node.cores("a"), node.job("a").status) == (1.5, "pinned")
    control.unpin_job(node.agent, "a")
    node.ticks(8)
    assert (node.cores("a"), node.job("a").status) == (0.5, "reclaim")


def shade(node: FakeNode) -> None:
    node.reload(QUICK.replace("reclaim", "shadow") + source())


def override(node: FakeNode) -> None:
    node.write("a", "cpu.max", "400000 100000\n")


@pytest.mark.parametrize("hinder", [shade, override])
def test_a_pin_is_in_force_again_after_what_hinders_it(make_node, hinder):
    config = QUICK + source() + RESCAN + '[writes]\noverride_ttl = "3s"\n'
    node = make_node({"a": FOUR}, config=config).start()
    control.pin_job(node.agent, "a", {"cpu_limit": 1.5})
    hinder(node)
    node.ticks(2)
    assert node.cores("a") == 4.0
    node.reload(config)
    node.ticks(5)
    assert (node.cores("a"), node.job("a").status) == (1.5, "pinned")


def test_a_pin_of_a_paused_agent_is_written_when_the_pause_is_over(make_node):
    node = make_node({"a": FOUR}, config=QUICK + source() + RESCAN).start()
    pause = node.directory / "run" / "pause"
    pause.touch()
    control.pin_job(node.agent, "a", {"cpu_limit": 1.5})
    node.ticks(3)
    assert node.cores("a") == 4.0
    pause.unlink()
    node.ticks(2)
    assert node.cores("a") == 1.5


def test_a_pin_with_a_time_ends_by_itself(make_node):
    node = make_node({"a": FOUR}, config=QUICK + source() + RESCAN).start()
    control.pin_job(node.agent, "a", {"ttl_s": 5.0})
    node.ticks(4)
    assert node.cores("a") == 4.0
    node.ticks(8)
    assert (node.cores("a"), node.job("a").status) == (0.5, "reclaim")


def test_a_floor_that_a_reload_raises_leaves_a_pin_below_it(make_node):
    node = make_node({"a": FOUR}).start()
    control.pin_job(node.agent, "a", {"cpu_limit": 0.6})
    (node.directory / "run" / "pause").touch()
    node.reload(QUICK.replace("min_cpu_limit = 0.5", "min_cpu_limit = 1.0") + source())
    node.ticks(3)
    assert (node.job("a").state.limit_cores, node.job("a").status, node.cores("a")) == (0.6, "pinned", 0.6)


@pytest.mark.parametrize("body", [
    {"cpu_limit": 0}, {"cpu_limit": 4.1}, {"cpu_limit": "1"}, {"cpu_limit": True}, {"cpu_limit": math.nan},
    {"cpu_limit": 1e-7}, {"ttl_s": "soon"}, {"ttl_s": -1}, {"ttl_s": 0}, {"ttl_s": True}, {"ttl_s": [1]},
    {"ttl_s": math.inf},
])  # fmt: skip
def test_a_pin_that_makes_no_sense_is_refused(make_node, body):
    node = make_node({"a": FOUR}).start()
    words = {"cpu_limit": "a pinned limit must be in .* cores, got ", "ttl_s": "ttl_s must be a number of seconds > 0"}
    with pytest.raises(ConfigError, match=words[next(iter(body))]):
        control.pin_job(node.agent, "a", body)
    assert node.tick(4.0).jobs[0].status == "reclaim"


def test_what_is_never_written_is_not_pinned(make_node):
    node = make_node({"a": FOUR}, config=QUICK.replace("reclaim", "shadow") + source()).start()
    with pytest.raises(RefusedError, match="mode is shadow"):
        control.pin_job(node.agent, "a", {"cpu_limit": 1.0})
    with pytest.raises(UnavailableError, match="no job 'nobody'"):
        control.pin_job(node.agent, "nobody", {"cpu_limit": 1.0})


def test_a_cgroup_that_is_half_made_is_looked_for_again_at_the_next_tick(tmp_path):
    for controller in ("cpu", "cpuacct"):
        make_tree(tmp_path / controller / "jobs", {})
    mountinfo = write_mountinfo(tmp_path / "mountinfo", {f"{tmp_path}/cpu": "cpu", f"{tmp_path}/cpuacct": "cpuacct"})
    text = f'state_dir = "{tmp_path}/state"\nruntime_dir = "{tmp_path}/run"\nmountinfo = "{mountinfo}"\n' + source()
    for name in ("state", "run"):
        (tmp_path / name).mkdir()
    agent = Agent(finish_config(parse_config_text(text, "c.toml"), ""), open_hierarchies(mountinfo), SilentReporter())
    agent.start()
    files = {"cpu.stat": "nr_periods 0\nnr_throttled 0\nthrottled_time 0\n", "cpu.shares": "1024\n"}
    quota = {"cpu.cfs_quota_us": "-1\n", "cpu.cfs_period_us": "100000\n"}
    make_tree(tmp_path / "cpu" / "jobs" / "a", files | quota)
    agent.loop.tick(agent.clock.monotonic_s())
    assert len(agent.table) == 0
    make_tree(tmp_path / "cpuacct" / "jobs" / "a", {"cpuacct.usage": "0\n"})
    agent.loop.tick(agent.clock.monotonic_s())
    assert len(agent.table) == 1
    agent.close()


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize(("more", "given"), [("", 4.0), ('actuator = "guarantee"\n', 0.5), ('mode = "shadow"\n', 4.0)])
def test_a_kernel_without_quotas_is_named_and_its_jobs_stay(tmp_path, make_node, version, more, given):
    """CONFIG_CFS_BANDWIDTH off: v1 has no cpu.stat then, v2 one without throttling."""
    text = (QUICK.replace('mode = "reclaim"\n', "") if "mode" in more else QUICK) + more + source()
    if version == 2:
        node = make_node({"a": {"cpu.stat": "usage_usec 0\n", "cpu.weight": "100\n"}}, config=text)
        agent = node.agent
    else:
        make_tree(tmp_path / "cpuset", {"cpuset.effective_cpus": "0-7\n"})
        make_tree(tmp_path / "cpu/jobs/a", {"cpu.shares": "1024\n"})
        make_tree(tmp_path / "cpuacct/jobs/a", {"cpuacct.usage": "0\n"})
        node = make_node({}, config=text)
        write_mountinfo(node.mountinfo, {f"{tmp_path}/{name}": name for name in ("cpu", "cpuacct", "cpuset")})
        agent = node.agent = node.make_agent()
    node.start()
    opened = agent.table.find("a")
    for _ in range(8):
        node.clock.advance(1.0)
        agent.rescan_now()
        agent.loop.tick(node.clock.monotonic_s(), 0.0)
    job = node.job("a")
    assert agent.table.find("a") is opened
    assert (job.current_cores, agent.table.closed_total, agent.writer.writes_total) == (given, 0, 0)
    missing = "cpu.max" if version == 2 else "cpu.cfs_quota_us"
    assert (f"{missing} does not exist: this kernel has no CFS bandwidth" in job.refused) is ("actuator" not in more)
    agent.close()


def test_under_a_covered_mount_limits_go_up_and_not_down(make_node, monkeypatch):
    node = lowered(make_node, QUICK + source() + RESCAN)
    monkeypatch.setattr("cpumond.host.cgroup.mounts.Hierarchies.list_covered", lambda _: ["/sys/fs/cgroup/cpu"])
    node.ticks(2)
    node.tick({"a": 0.5}, {"a": 1.0})
    assert (node.cores("a"), node.job("a").result) == (4.0, "applied")
    node.ticks(8)
    assert (node.cores("a"), node.job("a").result) == (4.0, "paused")
    monkeypatch.undo()
    node.ticks(8)
    assert node.cores("a") == 0.5
