"""Workloads of a host with cgroup v2 (plain files): which, what they ordered, what they used, what is left out."""

from __future__ import annotations

import math
import shutil
import threading
from pathlib import Path

import pytest

from cpumond.cli.estimate_watch import GLANCE_S, HostWatch, list_leaves
from cpumond.errors import UnavailableError
from cpumond.monitor.model import MonitorSettings
from cpumond.monitor.rules import RULES
from cpumond.testing import make_tree, make_v2_host, v2_cgroup

SETTINGS = {rule: MonitorSettings(limit_rule=rule) for rule in RULES}
ID = "3f9ab1c2d4e5" + "0" * 52
POD = "kubepods.slice/kubepods-pod8f0d1234_0a1b_4c2d_9e3f_123456789abc.slice"
NO_FILE = {"cpu.stat": "usage_usec 0\n", "cgroup.procs": "1\n"}


def watch_tree(tmp_path: Path, tree: dict[str, object], root: str = "") -> HostWatch:
    """The watch of a host with ``tree`` below its cgroup2 mount."""
    return HostWatch(root, SETTINGS, 60.0, make_v2_host(tmp_path, tree))


def find_mount(watch: HostWatch) -> Path:
    return Path(watch.hierarchies.cpu_root)


def use(watch: HostWatch, path: str, usage_usec: int) -> None:
    """The counter of a cgroup has gone on."""
    file = find_mount(watch) / path / "cpu.stat"
    file.write_text(f"usage_usec {usage_usec}\nnr_periods 0\nnr_throttled 0\nthrottled_usec 0\n")


def test_orders_are_quotas_wherever_they_are(tmp_path: Path) -> None:
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
    watch = watch_tree(tmp_path, tree)
    (find_mount(watch) / "slurm/uid_5/job_7/step_0/cpu.max").write_text("200000 100000\n")
    watch.rescan()
    watch.sample()
    for path in ("system.slice/sshd.service", f"system.slice/docker-{ID}.scope"):
        use(watch, path, 500_000)
    threading.Event().wait(0.01)
    watch.sample()
    found = watch.conclude()
    rows = {row.workload.path: row for row in found.rows}
    orders = {path: row.estimate.ordered_cores if row.is_limited else math.inf for path, row in rows.items()}
    assert orders == {
        f"system.slice/docker-{ID}.scope": 1.5,
        "system.slice/sshd.service": math.inf,
        f"machine.slice/{scope}/container": 0.5,
        "capped/inner": 0.25,
        "slurm/uid_5/job_7": 2.0,
    }
    assert rows["system.slice/sshd.service"].estimate.used_cpu_s == pytest.approx(0.5)
    assert found.total().used_cpu_s == pytest.approx(1.0)
    assert list_leaves(watch.hierarchies.cpu_root, "slurm/uid_5") == ["slurm/uid_5/job_7/step_0"]
    watch.close()


def test_what_begins_and_what_ends(tmp_path: Path) -> None:
    watch = watch_tree(tmp_path, {"docker": {**v2_cgroup(), ID: v2_cgroup(quota="100000 100000")}})
    watch.rescan()
    watch.sample()
    threading.Event().wait(0.01)
    watch.sample(is_check=False)
    watch.sample()
    mount = find_mount(watch)
    shutil.rmtree(mount / "docker" / ID)
    make_tree(mount / "docker" / ("1" * 64), v2_cgroup())
    watch.rescan()
    watch.sample()
    assert "1 workload, " in watch.describe_progress()
    threading.Event().wait(0.01)
    watch.sample()
    found = watch.conclude()
    assert {(row.workload.name, row.is_gone) for row in found.rows} == {(ID[:12], True), ("1" * 12, False)}
    assert any(note.startswith("some workloads ended") for note in found.notes)
    watch.close()


def test_a_new_quota_is_a_new_order(tmp_path: Path) -> None:
    watch = watch_tree(tmp_path, {"docker": {**v2_cgroup(), ID: v2_cgroup(quota="100000 100000")}})
    watch.rescan()
    watch.sample()
    (find_mount(watch) / "docker" / ID / "cpu.max").write_text("300000 100000\n")
    watch.rescan()
    threading.Event().wait(0.01)
    watch.sample()
    (row,) = watch.conclude().rows
    assert row.estimate.ordered_cores == 3.0
    watch.close()


def test_a_pods_pause_and_what_cannot_be_read_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slices, pod = POD.split("/")
    held = {f"cri-containerd-{digit * 64}.scope": v2_cgroup() for digit in "ab"}
    watch = watch_tree(tmp_path, {slices: {**v2_cgroup(), pod: {**v2_cgroup(), **held}}, "odd": {**NO_FILE}})
    (find_mount(watch) / "odd" / "cpu.stat").write_text("usage_usec many\n")
    monkeypatch.setattr("cpumond.cli.estimate_watch.is_pause", lambda directory: directory.endswith("a.scope"))
    watch.rescan()
    watch.sample()
    threading.Event().wait(0.01)
    watch.sample()
    watch.rescan()
    found = watch.conclude()
    assert [row.workload.name.partition("/")[2] for row in found.rows] == ["b" * 12]
    assert any(note.startswith("left out odd: cannot read ") for note in found.named_notes)
    watch.close()


def test_nothing_is_known_before_the_second_sample(tmp_path: Path) -> None:
    watch = watch_tree(tmp_path, {"docker": {**v2_cgroup(), ID: v2_cgroup()}})
    watch.rescan()
    watch.sample()
    with pytest.raises(UnavailableError, match="stopped before the second sample"):
        watch.conclude()
    assert watch.tick_s == pytest.approx(GLANCE_S)
    watch.close()


@pytest.mark.parametrize(
    ("root", "said"), [("", "no cgroup in .* looks like a workload"), ("no", "there is no cgroup")]
)
def test_without_a_workload_there_is_nothing_to_do(tmp_path: Path, root: str, said: str) -> None:
    with pytest.raises(UnavailableError, match=said):
        watch_tree(tmp_path, {"empty": v2_cgroup()}, root).rescan()
