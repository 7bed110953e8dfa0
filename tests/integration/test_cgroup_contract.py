"""One contract for every kind of cgroup: this machine's real ones, and fake trees of the layouts it does not have."""

import contextlib
import itertools
import math
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from agent_process import AgentProcess
from asyncinotify import Inotify, Mask
from real_cgroups import CgroupTree
from waiting import count_descriptors, wait_until

from cpumond.agent.watch import Watcher
from cpumond.core.errors import CgroupReadError, CgroupWriteError
from cpumond.host.cgroup import Cgroup, open_cgroup
from cpumond.host.cgroup.files import (
    count_threads,
    is_leaf,
    open_pressure,
    read_cpus,
    read_mode_xattr,
    read_pressure,
    read_pressure_s,
)
from cpumond.host.cgroup.mounts import Hierarchies, open_hierarchies
from cpumond.host.cgroup.settings import AncestorCap, CpuSettings, compute_quota_target
from cpumond.testing import make_tree, make_v2_host, v2_cgroup, write_mountinfo

V1_FILES = {
    "cpuacct.usage": "0\n",
    "cpu.stat": "nr_periods 0\nnr_throttled 0\nthrottled_time 0\n",
    "cpu.cfs_quota_us": "-1\n",
    "cpu.cfs_period_us": "100000\n",
    "cpu.cfs_burst_us": "0\n",
    "cpu.shares": "1024\n",
    "tasks": "",
}
FIRST = CpuSettings(None, 100_000, 0, 1024)


class Host:
    """Cgroups of one layout, below ``top``."""

    real = False

    def __init__(self, hierarchies: Hierarchies, top: str, files: dict[str, str]) -> None:
        self.hierarchies = hierarchies
        self.top = top
        self.version = hierarchies.cpu_version
        self._files = files
        self.first = FIRST if self.version == 1 else CpuSettings(None, 100_000, 0, 100)

    def make(self, name: str) -> str:
        make_tree(os.path.join(self.hierarchies.cpu_root, self.top, name), self._files)
        return f"{self.top}/{name}"

    def remove(self, name: str) -> None:
        shutil.rmtree(os.path.join(self.hierarchies.cpu_root, self.top, name))

    def directory(self, name: str) -> str:
        return os.path.join(self.hierarchies.cpu_root, self.top, name)

    def set_quota(self, name: str, quota_us: int | None, period_us: int = 100_000) -> None:
        if self.version == 2:
            self.write(name, "cpu.max", f"{'max' if quota_us is None else quota_us} {period_us}\n")
            return
        self.write(name, "cpu.cfs_quota_us", "-1\n")
        self.write(name, "cpu.cfs_period_us", f"{period_us}\n")
        self.write(name, "cpu.cfs_quota_us", f"{-1 if quota_us is None else quota_us}\n")

    def write(self, name: str, file: str, text: str) -> None:
        with open(os.path.join(self.directory(name), file), "w") as target:
            target.write(text)

    @contextlib.contextmanager
    def open(self, path: str) -> Iterator[Cgroup]:
        cgroup = open_cgroup(self.hierarchies, path)
        assert cgroup is not None
        try:
            yield cgroup
        finally:
            cgroup.close()


class RealHost(Host):
    real = True

    def __init__(self, tree: CgroupTree) -> None:
        super().__init__(tree.hierarchies, tree.top, {})
        self.tree = tree

    def make(self, name: str) -> str:
        return self.tree.make(name)

    def remove(self, name: str) -> None:
        self.tree.remove(name)


def make_v2(directory: Path) -> Host:
    files = {"cpu.stat": "usage_usec 0\n", "cpu.max": "max 100000\n", "cpu.max.burst": "0\n", "cpu.weight": "100\n"}
    tree = {"top": {**files, "cgroup.threads": ""}, "cpuset.cpus.effective": "0-2\n"}
    return Host(open_hierarchies(make_v2_host(directory, tree)), "top", {**files, "cgroup.threads": ""})


def make_v1(directory: Path, kind: str) -> Host:
    root = make_tree(directory / "cpu", {"top": V1_FILES})
    cpuset = make_tree(directory / "cpuset", {"cpuset.cpus": "0-2\n", "top": {"cpuset.cpus": "\n"}})
    if kind == "v1-together":
        mounts = {root: "cpu,cpuacct", cpuset: "cpuset"}
        return Host(open_hierarchies(write_mountinfo(directory / "mountinfo", mounts)), "top", V1_FILES)
    # Hybrid: quotas in v1, CPU time only in the unified hierarchy.
    unified = make_tree(directory / "unified", {"cgroup.controllers": "", "top": {}})
    mounts = {root: "cpu", cpuset: "cpuset", unified: "cgroup2"}
    host = Host(open_hierarchies(write_mountinfo(directory / "mountinfo", mounts)), "top", V1_FILES)
    make = host.make

    def make_both(name: str) -> str:
        make_tree(os.path.join(unified, "top", name), {"cpu.stat": "usage_usec 0\nuser_usec 0\n"})
        return make(name)

    host.make = make_both  # type: ignore[method-assign]
    return host


@pytest.fixture(params=[pytest.param("real", marks=pytest.mark.cgroup), "v2", "v1-together", "v1-hybrid"])
def host(request: pytest.FixtureRequest, tmp_path: Path) -> Host:
    if request.param == "real":
        return RealHost(request.getfixturevalue("cgroups"))
    return make_v2(tmp_path) if request.param == "v2" else make_v1(tmp_path, request.param)


class TestCgroup:
    """What ``cpumond.host.cgroup.Cgroup`` promises."""

    def test_there_is_none(self, host):
        before = count_descriptors()
        assert open_cgroup(host.hierarchies, f"{host.top}/none") is None
        assert open_cgroup(host.hierarchies, "none/at/all") is None
        assert count_descriptors() == before

    def test_a_fresh_one(self, host):
        before = count_descriptors()
        path = host.make("a")
        with host.open(path) as cgroup:
            assert cgroup.path == path
            assert os.path.samefile(cgroup.directory, host.directory("a"))
            assert cgroup.inode == os.stat(host.directory("a")).st_ino
            assert cgroup.read_settings() == host.first
            reading = cgroup.read(5.0)
            assert (reading.at_s, reading.identity, reading.nr_throttled) == (5.0, cgroup.inode, 0)
            assert reading.total_cpu_s >= 0.0
            assert cgroup.read_throttled() == 0
        assert count_descriptors() == before

    def test_one_made_again_has_another_identity(self, host):
        path = host.make("a")
        with host.open(path) as old:
            if host.real:
                host.remove("a")
            else:
                os.rename(host.directory("a"), host.directory("kept"))  # a file system may give the inode out again
            host.make("a")
            with host.open(path) as new:
                assert new.inode != old.inode

    def test_what_is_written_is_in_force(self, host):
        path = host.make("a")
        weights = (2, 100, 1024) if host.version == 1 else (1, 100, 10_000)
        after = [
            CpuSettings(150_000, 100_000, 0, weights[1]),
            CpuSettings(50_001, 33_333, 50_001, weights[0]),
            CpuSettings(1_000, 1_000_000, 1_000, weights[0]),
            CpuSettings(300_000, 100_000, 90_000, weights[2]),
            CpuSettings(None, 50_000, 77_777, weights[2]),
            CpuSettings(1_000, 1_000, 0, weights[1]),
            host.first,
        ]
        with host.open(path) as cgroup:
            before = host.first
            for settings in after:
                assert cgroup.write_settings(before, settings)
                assert cgroup.read_settings() == settings
                before = settings

    def test_nothing_is_written_where_nothing_differs(self, host):
        path = host.make("a")
        with host.open(path) as cgroup:
            watcher = Watcher()
            watcher.watch_limits("a", [*cgroup.watch_paths("quota"), *cgroup.watch_paths("weight")])
            assert cgroup.write_settings(host.first, host.first)
            assert watcher.drain() == (set(), set(), False)
            watcher.close()

    @pytest.mark.parametrize("parent", [(60_000, 100_000), (33_333, 100_000), (200_000, 1_000_000), (2_000, 1_000)])
    def test_every_way_below_a_quota_above_is_legal(self, host, parent):
        host.make("group")
        host.set_quota("group", *parent)
        path = host.make("group/a")
        limits = [0.9, 0.004, 5.0, 0.3333, 0.0001, 0.05, 5.0]
        for found in (CpuSettings(None, 1_000, 500), CpuSettings(None, 100_000, 90_000), CpuSettings(None, 33_333, 0)):
            original = CpuSettings(found.quota_us, found.period_us, found.burst_us, host.first.weight)
            with host.open(path) as cgroup:
                cap = cgroup.read_ancestor_cap()
                now = cgroup.read_settings()
                assert cgroup.write_settings(now, original)
                now = original
                for cores in limits:
                    target = compute_quota_target(cores, original, cap).settings
                    assert cgroup.write_settings(now, target)
                    now = target
                    assert cgroup.read_settings() == now
                assert cgroup.write_settings(now, original)
                assert cgroup.read_settings() == original

    def test_the_least_quota_above(self, host):
        for place in ("x", "x/y", "x/y/a"):
            host.make(place)
        with host.open(f"{host.top}/x/y/a") as cgroup:
            assert cgroup.read_ancestor_cap() == AncestorCap(math.inf)
            host.set_quota("x", 250_000)
            assert cgroup.read_ancestor_cap() == AncestorCap(2.5, f"{host.top}/x")
            host.set_quota("x/y", 30_000, 20_000)
            assert cgroup.read_ancestor_cap() == AncestorCap(1.5, f"{host.top}/x/y")
            host.set_quota("x/y/a", 10_000)
            assert cgroup.read_ancestor_cap() == AncestorCap(1.5, f"{host.top}/x/y")
            for place in ("x/y/a", "x/y", "x"):
                host.remove(place)
            assert cgroup.read_ancestor_cap() == AncestorCap(math.inf)

    def test_gone_is_a_normal_answer_at_every_step(self, host):
        before = count_descriptors()
        path = host.make("a")
        with host.open(path) as cgroup:
            host.remove("a")
            if host.real:
                assert cgroup.read(1.0) is None
                assert cgroup.read_throttled() is None
            assert cgroup.read_settings() is None
            for settings in (
                CpuSettings(50_000, 100_000, 0, host.first.weight),
                CpuSettings(None, 50_000, 0, host.first.weight),
                CpuSettings(None, 100_000, 10, host.first.weight),
                CpuSettings(None, 100_000, 0, 7),
            ):
                assert cgroup.write_settings(host.first, settings) is False
            assert cgroup.read_ancestor_cap() == AncestorCap(math.inf)
            assert read_mode_xattr(cgroup.directory) is None
            assert is_leaf(cgroup.directory)
            assert count_threads(cgroup.directory) == 0
            assert read_cpus(host.hierarchies, path) >= 1
            watcher = Watcher()
            assert watcher.watch_limits("a", cgroup.watch_paths("quota")) == []
            watcher.close()
        assert open_cgroup(host.hierarchies, path) is None
        assert count_descriptors() == before

    def test_a_leaf_has_no_child_cgroups(self, host):
        host.make("a")
        assert is_leaf(host.directory("a"))
        host.make("a/child")
        assert not is_leaf(host.directory("a"))
        host.remove("a/child")
        assert is_leaf(host.directory("a"))

    def test_the_cpus_it_may_use(self, host):
        path = host.make("a")
        cpus = read_cpus(host.hierarchies, path)
        assert 1 <= cpus <= (os.cpu_count() or 1) if host.real else cpus == 3

    def test_an_xattr_asks_for_a_mode(self, host):
        host.make("a")
        directory = host.directory("a")
        assert read_mode_xattr(directory) is None
        try:
            os.setxattr(directory, "user.cpumond.mode", b"shadow\n")
        except OSError as error:
            pytest.skip(f"needs xattrs on {directory}: {error}")
        assert read_mode_xattr(directory) == ("shadow", os.stat(directory).st_uid == 0)
        os.setxattr(directory, "user.cpumond.mode", b"\xff\x00")
        assert read_mode_xattr(directory) is not None
        os.removexattr(directory, "user.cpumond.mode")
        assert read_mode_xattr(directory) is None

    @pytest.mark.parametrize("actuator", ["quota", "weight"])
    def test_a_foreign_write_is_seen_at_once(self, host, actuator):
        path = host.make("a")
        host.make("b")
        with host.open(path) as cgroup:
            paths = cgroup.watch_paths(actuator)
            assert all(os.path.exists(place) for place in paths)
            watcher = Watcher()
            handles = watcher.watch_limits("a", paths)
            host.set_quota("b", 50_000)
            assert watcher.drain() == (set(), set(), False)
            if actuator == "weight":
                host.write("a", "cpu.shares" if host.version == 1 else "cpu.weight", "512\n")
            else:
                host.set_quota("a", 50_000)
            assert watcher.drain() == (set(), {"a"}, False)
            watcher.unwatch(handles)
            host.set_quota("a", 60_000)
            assert watcher.drain() == (set(), set(), False)
            watcher.close()

    def test_children_that_come_and_go_are_seen_at_once(self, host):
        host.make("group")
        watcher = Watcher()
        watcher.watch_directories({host.directory("group")})
        host.make("group/a")
        assert watcher.drain()[0]
        host.remove("group/a")
        assert watcher.drain()[0]
        assert watcher.drain() == (set(), set(), False)
        watcher.watch_directories(set())
        host.make("group/b")
        assert watcher.drain() == (set(), set(), False)
        watcher.close()

    def test_the_order_of_quota_and_burst(self, host):
        path = host.make("a")
        burst = "cpu.cfs_burst_us" if host.version == 1 else "cpu.max.burst"
        quota = "cpu.cfs_quota_us" if host.version == 1 else "cpu.max"
        high = CpuSettings(200_000, 100_000, 150_000, host.first.weight)
        low = CpuSettings(30_000, 100_000, 30_000, host.first.weight)
        with host.open(path) as cgroup, Inotify(sync_timeout=0) as inotify:
            assert cgroup.write_settings(host.first, high)
            for file in (quota, burst):
                inotify.add_watch(os.path.join(host.directory("a"), file), Mask.CLOSE_WRITE)
            written = []
            for before, after in ((high, low), (low, high)):
                assert cgroup.write_settings(before, after)
                written.append([os.path.basename(event.watch.path) for event in iter(inotify.sync_get, None)])
        assert written == [[burst, quota], [quota, burst]]


# ---- what only the real kernel answers


@pytest.mark.cgroup
def test_a_child_above_its_parent_is_refused_with_the_parents_value(cgroups):
    host = RealHost(cgroups)
    if host.version == 2:
        pytest.skip("v2 takes it")
    host.make("group")
    host.set_quota("group", 50_000)
    with host.open(host.make("group/a")) as cgroup:
        with pytest.raises(CgroupWriteError, match=r"group above it is 0.5 cores") as caught:
            cgroup.write_settings(host.first, CpuSettings(60_000, 100_000, 0, 1024))
        assert (caught.value.path, caught.value.value) == (f"{cgroup.directory}/cpu.cfs_quota_us", "60000")
        assert cgroup.read_settings() == host.first


@pytest.mark.cgroup
@pytest.mark.parametrize(
    "settings",
    [
        CpuSettings(999, 100_000, 0, 1024),
        CpuSettings(None, 999, 0, 1024),
        CpuSettings(None, 1_000_001, 0, 1024),
        CpuSettings(50_000, 100_000, 50_001, 1024),
    ],
)
def test_what_the_kernel_refuses_is_an_error_with_file_and_value(cgroups, settings):
    host = RealHost(cgroups)
    with host.open(host.make("a")) as cgroup, pytest.raises(CgroupWriteError, match="Invalid argument"):
        cgroup.write_settings(host.first, settings)


@pytest.mark.cgroup
def test_counters_follow_a_load_and_its_throttling(cgroups):
    path = cgroups.make("a")
    cgroups.write("a", "cpu.cfs_quota_us" if cgroups.hierarchies.cpu_version == 1 else "cpu.max", "20000")
    load = cgroups.start_load("a")
    cgroup = open_cgroup(cgroups.hierarchies, path)
    assert cgroup is not None
    moments = itertools.count()
    first = cgroup.read(float(next(moments)))
    load.burn(1.0)

    def throttled():
        reading = cgroup.read(float(next(moments)))
        return reading if reading.nr_throttled > first.nr_throttled + 2 else None

    wait_until(lambda: cgroup.read_throttled() > first.nr_throttled, "a look sees it")
    last = wait_until(throttled, "the load is throttled")
    assert cgroup.read_throttled() >= last.nr_throttled
    assert last.total_cpu_s > first.total_cpu_s
    assert last.throttled_s > first.throttled_s
    assert last.nr_periods >= last.nr_throttled
    assert last.identity == first.identity
    assert count_threads(cgroup.directory) >= 1
    cgroup.close()


# ---- what only a fake tree can show


def test_a_kernel_without_burst(tmp_path):
    host = make_v1(tmp_path, "v1-together")
    path = host.make("a")
    os.unlink(os.path.join(host.directory("a"), "cpu.cfs_burst_us"))
    with host.open(path) as cgroup:
        assert cgroup.read_settings() == CpuSettings(None, 100_000, None, 1024)
        target = compute_quota_target(0.5, cgroup.read_settings(), AncestorCap(math.inf), 1.0).settings
        assert cgroup.write_settings(cgroup.read_settings(), target)
        assert cgroup.read_settings().quota_us == 50_000
        assert not os.path.exists(os.path.join(host.directory("a"), "cpu.cfs_burst_us"))


def test_a_v2_cgroup_without_the_cpu_controller_says_what_to_do(tmp_path):
    host = make_v2(tmp_path)
    make_tree(host.directory("a"), {"cpu.stat": "usage_usec 0\n"})
    with host.open("top/a") as cgroup, pytest.raises(CgroupReadError, match=r"cgroup\.subtree_control"):
        cgroup.read_settings()


def test_cpu_time_of_a_hybrid_host_comes_from_the_unified_hierarchy(tmp_path):
    host = make_v1(tmp_path, "v1-hybrid")
    path = host.make("a")
    with host.open(path) as cgroup:
        cgroup.read(1.0)
        (tmp_path / "unified" / path / "cpu.stat").write_text("usage_usec 2500000\nuser_usec 0\n")
        host.write("a", "cpu.stat", "nr_periods 9\nnr_throttled 4\nthrottled_time 1500000000\n")
        reading = cgroup.read(2.0)
    assert (reading.total_cpu_s, reading.nr_throttled, reading.throttled_s) == (2.5, 4, 1.5)


def test_pressure_where_there_is_some(tmp_path):
    text = "some avg10=1.00 avg60=0.50 avg300=0.00 total={}\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=0\n"
    host = make_v2(tmp_path)
    path = host.make("a")
    host.write("a", "cpu.pressure", text.format(99))
    found = read_pressure(host.hierarchies, path)
    assert (found.some_10s_ratio, found.some_total_s) == (0.01, 99e-6)
    assert read_pressure_s(f"{host.directory('a')}/cpu.pressure") == pytest.approx(99e-6)
    with host.open(path) as cgroup:
        cgroup.follow_pressure(True)
        assert cgroup.read(1.0).pressure_s == pytest.approx(99e-6)
        host.write("a", "cpu.pressure", text.format(2_500_000))
        # The counters did not move meanwhile.
        assert cgroup.read(2.0).pressure_s == 2.5
        host.write("a", "cpu.pressure", "")
        assert cgroup.read(3.0).pressure_s is None
    assert (read_pressure(host.hierarchies, path), read_pressure_s(f"{host.directory('a')}/cpu.pressure")) == (
        None,
        None,
    )
    with host.open(path) as cgroup, pytest.raises(CgroupReadError, match="is not a pressure file: the line `some` is"):
        cgroup.follow_pressure(True)


def test_pressure_of_a_hybrid_host_comes_from_the_unified_hierarchy(tmp_path):
    host = make_v1(tmp_path, "v1-hybrid")
    path = host.make("a")
    (tmp_path / "unified" / path / "cpu.pressure").write_text("some avg10=0.00 avg60=0.00 avg300=0.00 total=1500000\n")
    with host.open(path) as cgroup:
        cgroup.follow_pressure(True)
        assert cgroup.read(1.0).pressure_s == 1.5


@pytest.mark.parametrize("layout", ["v1-together", "v2"])
def test_why_there_is_no_pressure(tmp_path, layout):
    host = make_v2(tmp_path) if layout == "v2" else make_v1(tmp_path, layout)
    path = host.make("a")
    reason = "cgroup.pressure is 0 there" if layout == "v2" else "cgroup2 is not mounted"
    with host.open(path) as cgroup, pytest.raises(CgroupReadError, match=reason):
        cgroup.follow_pressure(True)
    with pytest.raises(CgroupReadError, match="the cgroup does not exist in cgroup2"):
        open_pressure(str(tmp_path), "none")


@pytest.mark.parametrize("layout", ["v2", "v1-together", "v1-hybrid"])
def test_a_look_sees_what_the_kernel_counts_after_the_last_use(tmp_path, layout):
    host = make_v2(tmp_path) if layout == "v2" else make_v1(tmp_path, layout)
    with host.open(host.make("a")) as cgroup:
        for throttled in (0, 1, 1, 5):
            # The period is counted when it is over, without any more use.
            stat = f"nr_periods 7\nnr_throttled {throttled}\n"
            host.write("a", "cpu.stat", f"usage_usec 2000\n{stat}throttled_usec 900\n" if layout == "v2" else stat)
            assert cgroup.read_throttled() == throttled
            assert cgroup.read_throttled() == throttled
            reading = cgroup.read(1.0)
            assert reading is not None
            assert reading.nr_throttled == cgroup.read_throttled() == throttled


UNREADABLE = {
    "v2": {"cpu.stat": ("usage_usec x\n",), "cpu.max": ("", "many\n", "\0\0\0")},
    "v1-together": dict.fromkeys(("cpuacct.usage", "cpu.shares", "cpu.cfs_quota_us"), ("", "many\n", "\x00\x00\x00")),
}


@pytest.mark.parametrize("layout", UNREADABLE)
def test_what_cannot_be_understood_is_an_error_that_names_the_cgroup(tmp_path, layout):
    host = make_v2(tmp_path) if layout == "v2" else make_v1(tmp_path, layout)
    for number, (file, text) in enumerate((file, text) for file, texts in UNREADABLE[layout].items() for text in texts):
        with host.open(host.make(f"a{number}")) as cgroup:
            host.write(f"a{number}", file, text)
            with pytest.raises(CgroupReadError, match=f"top/a{number}"):
                cgroup.read(1.0) if file in ("cpu.stat", "cpuacct.usage") else cgroup.read_settings()
            host.write(f"a{number}", "cpu.stat", "nr_periods 1\nnr_throttled many\n")
            with pytest.raises(CgroupReadError, match=f"top/a{number}"):
                cgroup.read_throttled()


# ---- the agent over a fake unified hierarchy

FAST = """
[monitor]
check_period = "100ms"
mode = "reclaim"
smoothing_factor = 1.0
vote_window_size = 2
vote_decision_threshold = 1
decrease_coefficient = 0.5
min_cpu_limit = 0.5
"""


def describe_host(mountinfo: str) -> str:
    return (
        f'mountinfo = "{mountinfo}"\nmanaged_roots = ["jobs"]\n{FAST}'
        '[[source]]\nkind = "glob"\npattern = "jobs/*"\ncpu_limit = "from-cgroup"\n'
    )


def test_the_agent_runs_on_v2(tmp_path: Path, agent: AgentProcess):
    jobs = {"idle": v2_cgroup(quota="400000 100000", cpu_max_burst="90000\n"), "odd": v2_cgroup(quota="50001 33333")}
    mountinfo = make_v2_host(tmp_path, {"jobs": jobs, "other": v2_cgroup(quota="400000 100000")})
    place = tmp_path / "cgroup" / "jobs"

    def read() -> dict[str, str]:
        return {f"{path.parent.name}/{path.name}": path.read_text() for path in place.glob("*/cpu.[mw]*")}

    found = read()
    agent.start(describe_host(mountinfo))
    assert agent.get("/v1/status")["layout"] == "v2"
    wait_until(lambda: (place / "idle" / "cpu.max").read_text().split() == ["50000", "100000"], "the floor is reached")
    wait_until(lambda: (place / "odd" / "cpu.max").read_text().split() == ["16666", "33333"], "the floor is reached")
    assert (place / "idle" / "cpu.max.burst").read_text().strip() == "50000"
    agent.send_signal(signal.SIGKILL)
    agent.process.wait(100)
    assert read() != found
    assert agent.run("restore").returncode == 0
    assert {name: text.strip() for name, text in read().items()} == {name: text.strip() for name, text in found.items()}
    assert (tmp_path / "cgroup" / "other" / "cpu.max").read_text() == "400000 100000\n"
