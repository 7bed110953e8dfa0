"""Workloads of a host with cgroup v2 (plain files): which, what they ordered, what they used, what is left out."""

import contextlib
import errno
import math
import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cpumond.agent.discovery.workloads import Workload, pick_workloads
from cpumond.cli.agent.estimate_findings import WorkloadRow, describe, render_text
from cpumond.cli.agent.estimate_watch import GLANCE_S, HostWatch, list_leaves, watch_host
from cpumond.core.errors import CgroupReadError, UnavailableError
from cpumond.core.job_cgroups import list_above
from cpumond.monitor.model import MonitorSettings
from cpumond.monitor.rules import RULES
from cpumond.testing import make_tree, make_v2_host, v2_cgroup

SETTINGS = {rule: MonitorSettings(limit_rule=rule) for rule in RULES}
ID = "3f9ab1c2d4e5" + "0" * 52
POD = "kubepods.slice/kubepods-pod8f0d1234_0a1b_4c2d_9e3f_123456789abc.slice"
WatchTree = Callable[..., HostWatch]
NO_FILE = {"cpu.stat": "usage_usec 0\n", "cgroup.procs": "7\n"}


@pytest.fixture
def watch_tree(tmp_path: Path) -> Iterator[WatchTree]:
    """Makes watches of hosts with these cgroups, which end with the test."""
    with contextlib.ExitStack() as stack:

        def make(tree: dict[str, object], root: str = "") -> HostWatch:
            watch = HostWatch(root, SETTINGS, 60.0, make_v2_host(tmp_path / (root or "all"), tree))
            return stack.enter_context(contextlib.closing(watch))

        yield make


def look(watch: HostWatch) -> None:
    watch.rescan()
    watch.sample()


def find_mount(watch: HostWatch) -> Path:
    return Path(watch.hierarchies.cpu_root)


def use(watch: HostWatch, path: str, usage_usec: int) -> None:
    file = find_mount(watch) / path / "cpu.stat"
    file.write_text(f"usage_usec {usage_usec}\nnr_periods 0\nnr_throttled 0\nthrottled_usec 0\n")


def test_orders_are_quotas_wherever_they_are(watch_tree: WatchTree) -> None:
    scope = f"libpod-{ID}.scope"
    tree = {
        "system.slice": {
            **v2_cgroup(),
            f"docker-{ID}.scope": v2_cgroup(quota="150000 100000"),
            "sshd.service": NO_FILE,
        },
        "machine.slice": {**v2_cgroup(), scope: {**v2_cgroup(), "container": v2_cgroup(quota="50000 100000")}},
        "capped": {**v2_cgroup(quota="25000 100000"), "inner": {**v2_cgroup(quota="300000 100000"), **NO_FILE}},
        "slurm": {**v2_cgroup(), "uid_5": {**v2_cgroup(), "job_7": {**v2_cgroup(), "step_0": v2_cgroup(quota="7 10")}}},
    }  # fmt: skip
    watch = watch_tree(tree)
    (find_mount(watch) / "slurm/uid_5/job_7/step_0/cpu.max").write_text("200000 100000\n")
    look(watch)
    for path in ("system.slice/sshd.service", f"system.slice/docker-{ID}.scope"):
        use(watch, path, 500_000)
    threading.Event().wait(0.01)
    watch.sample()
    found = watch.conclude()
    rows = {row.workload.path: row for row in found.rows}
    orders = {path: row.estimate.ordered_cores if row.is_limited else math.inf for path, row in rows.items()}
    assert orders == {
        f"system.slice/docker-{ID}.scope": 1.5, "system.slice/sshd.service": math.inf,
        f"machine.slice/{scope}/container": 0.5, "capped/inner": 0.25, "slurm/uid_5/job_7": 2.0,
    }  # fmt: skip
    assert rows["system.slice/sshd.service"].estimate.used_cpu_s == pytest.approx(0.5)
    assert found.total().used_cpu_s == pytest.approx(1.0)
    assert list_leaves(watch.hierarchies.cpu_root, "slurm/uid_5") == ["slurm/uid_5/job_7/step_0"]


def test_what_begins_and_what_ends(watch_tree: WatchTree) -> None:
    watch = watch_tree({"docker": {**v2_cgroup(), ID: v2_cgroup(quota="100000 100000")}})
    look(watch)
    threading.Event().wait(0.01)
    watch.sample(is_check=False)
    watch.sample()
    mount = find_mount(watch)
    shutil.rmtree(mount / "docker" / ID)
    make_tree(mount / "docker" / ("1" * 64), v2_cgroup())
    look(watch)
    assert "1 workload, " in watch.describe_progress()
    threading.Event().wait(0.01)
    watch.sample()
    found = watch.conclude()
    assert {(row.workload.name, row.is_gone) for row in found.rows} == {(ID[:12], True), ("1" * 12, False)}
    assert any(note.startswith("some workloads ended") for note in found.notes)


def test_a_new_quota_is_a_new_order(watch_tree: WatchTree) -> None:
    watch = watch_tree({"docker": {**v2_cgroup(), ID: v2_cgroup(quota="100000 100000")}})
    look(watch)
    (find_mount(watch) / "docker" / ID / "cpu.max").write_text("300000 100000\n")
    watch.rescan()
    threading.Event().wait(0.01)
    watch.sample()
    (row,) = watch.conclude().rows
    assert row.estimate.ordered_cores == 3.0


def test_a_pods_pause_and_what_cannot_be_read_are_left_out(
    watch_tree: WatchTree, monkeypatch: pytest.MonkeyPatch
) -> None:
    slices, pod = POD.split("/")
    held = {f"cri-containerd-{digit * 64}.scope": v2_cgroup() for digit in "ab"}
    watch = watch_tree({slices: {**v2_cgroup(), pod: {**v2_cgroup(), **held}}, "odd": {**NO_FILE}})
    (find_mount(watch) / "odd" / "cpu.stat").write_text("usage_usec many\n")
    monkeypatch.setattr("cpumond.cli.agent.estimate_watch.is_pause", lambda directory: directory.endswith("a.scope"))
    watch_twice(watch)
    watch.rescan()
    found = watch.conclude()
    assert [row.workload.name.partition("/")[2] for row in found.rows] == ["b" * 12]
    assert any(note.startswith("left out odd: cannot read ") for note in found.named_notes)


def test_nothing_is_known_before_the_second_sample(watch_tree: WatchTree) -> None:
    watch = watch_tree({"docker": {**v2_cgroup(), ID: v2_cgroup()}})
    look(watch)
    with pytest.raises(UnavailableError, match="stopped before the second sample"):
        watch.conclude()
    assert watch.tick_s == pytest.approx(GLANCE_S)


def watch_twice(watch: HostWatch) -> dict[str, WorkloadRow]:
    look(watch)
    threading.Event().wait(0.01)
    watch.sample()
    return {row.workload.path: row for row in watch.conclude().rows}


def test_a_quota_that_several_share_is_no_order_of_each(watch_tree: WatchTree) -> None:
    job = {**v2_cgroup(), "cgroup.procs": "7\n"}
    jobs = {f"j{number}.service": job for number in range(10)}
    one = {**v2_cgroup(quota="50000 100000"), "cgroup.procs": "7\n"}
    tree = {"batch.slice": {**v2_cgroup(quota="1000 100000"), **jobs}, "other.slice": {**v2_cgroup(), "a.service": one}}
    watch = watch_tree(tree)
    rows = watch_twice(watch)
    found = watch.conclude()
    shared = [row for path, row in rows.items() if path.startswith("batch")]
    assert [(row.is_limited, row.is_shared) for row in shared] == [(False, True)] * 10
    assert [row.estimate.ordered_cores for row in shared] == pytest.approx([0.01] * 10)
    own = rows["other.slice/a.service"]
    assert own.is_limited
    # A workload is watched from its own first sample on, all together from the first of all.
    assert found.total(True).ordered_cores * found.length_s == pytest.approx(0.5 * own.estimate.watched_s)
    assert "10 of these are under a limit that others share" in " ".join(describe(found))
    assert "0.01 (shared)" in render_text(found, 20, None, False)


def test_a_quota_above_the_root_may_be_shared_with_what_is_not_seen(watch_tree: WatchTree) -> None:
    tree = {"a.slice": {**v2_cgroup(quota="1000 100000"), "a-b.slice": {**v2_cgroup(), "x.service": v2_cgroup()}}}
    for root, is_limited in (("a.slice", True), ("a.slice/a-b.slice", False), ("", True)):
        watch = watch_tree(tree, root)
        (row,) = watch_twice(watch).values()
        assert (row.is_limited, row.is_shared) == (is_limited, not is_limited)


def test_cpus_that_several_share_are_no_order_of_each(watch_tree: WatchTree, monkeypatch: pytest.MonkeyPatch) -> None:
    cpus = {"": 8, "batch.slice": 4, "batch.slice/own.service": 2}

    def read(_: object, path: str) -> int:
        return next(cpus[place] for place in (path, *list_above(path), "") if place in cpus)

    monkeypatch.setattr("cpumond.cli.agent.estimate_watch.read_cpus", read)
    jobs = {name: v2_cgroup() for name in ("own.service", "a.service", "b.service")}
    watch = watch_tree({"batch.slice": {**v2_cgroup(), **jobs}, "x.slice": {"free.service": v2_cgroup()}})
    rows = {row.workload.name: row for row in watch_twice(watch).values()}
    orders = {name: (row.estimate.ordered_cores, row.is_limited, row.is_shared) for name, row in rows.items()}
    assert orders == {
        "own.service": (2.0, True, False), "a.service": (4.0, False, True), "b.service": (4.0, False, True),
        "free.service": (8.0, False, False),
    }  # fmt: skip


def test_what_ends_while_orders_are_read_keeps_its_own(watch_tree: WatchTree, monkeypatch: pytest.MonkeyPatch) -> None:
    watch = watch_tree({"docker": {**v2_cgroup(), ID: v2_cgroup(quota="100000 100000")}})
    watch_twice(watch)
    mount = find_mount(watch)

    def pick(*arguments: Any) -> list[Workload]:
        found = pick_workloads(*arguments)
        shutil.rmtree(mount / "docker" / ID)
        return found

    monkeypatch.setattr("cpumond.cli.agent.estimate_watch.pick_workloads", pick)
    watch.rescan()
    (row,) = watch.conclude().rows
    assert (row.is_limited, row.estimate.ordered_cores) == (True, 1.0)


def test_what_could_not_be_opened_is_tried_again(watch_tree: WatchTree, monkeypatch: pytest.MonkeyPatch) -> None:
    watch = watch_tree({"docker": {**v2_cgroup(), ID: v2_cgroup()}})

    def refuse(*_: object) -> None:
        raise CgroupReadError("docker", OSError(errno.EMFILE, "too many"))

    with monkeypatch.context() as patch:
        patch.setattr("cpumond.cli.agent.estimate_watch.open_cgroup", refuse)
        watch.rescan()
    assert f"docker/{ID}" in watch.problems
    assert len(watch_twice(watch)) == 1
    assert watch.problems == {}


def test_what_ended_is_kept_in_bounds(watch_tree: WatchTree, monkeypatch: pytest.MonkeyPatch) -> None:
    """One row for each path, and from a number on one for all of them; the sums stay."""
    monkeypatch.setattr("cpumond.cli.agent.estimate_watch.MAX_ENDED", 2)
    watch = watch_tree({"jobs": {**v2_cgroup(), "stays": {**v2_cgroup(), "cgroup.procs": "7\n"}}})
    mount = find_mount(watch)
    for name in ("a", "b", "a", "c", "d", "b"):
        make_tree(mount / "jobs" / name, {**v2_cgroup(), "cgroup.procs": "7\n"})
        look(watch)
        use(watch, f"jobs/{name}", 1_000_000)
        threading.Event().wait(0.01)
        watch.sample()
        shutil.rmtree(mount / "jobs" / name)
        watch.rescan()
    rows = watch.conclude().rows
    used = {row.workload.name: row.estimate.used_cpu_s for row in rows}
    assert used == pytest.approx({"a": 2.0, "b": 2.0, "others that ended, without a limit": 2.0, "stays": 0.0})
    assert [row.workload.name for row in rows if row.is_gone] == ["a", "b", "others that ended, without a limit"]
    assert watch.conclude().total().used_cpu_s == pytest.approx(6.0)


def test_the_reckoning_at_the_end_can_be_interrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    watch = HostWatch("", SETTINGS, 60.0, make_v2_host(tmp_path, {"docker": {**v2_cgroup(), ID: v2_cgroup()}}))
    monkeypatch.setattr("cpumond.cli.agent.estimate_watch.HostWatch", lambda *_: watch)
    monkeypatch.setattr(watch, "conclude", lambda: os.kill(os.getpid(), signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        watch_host("", 0.0, SETTINGS)
