"""Cgroups of jobs in trees of plain files: which files are made and written, in every layout."""

import os
import shutil
import signal
from pathlib import Path

import pytest

from cpumond.core.errors import CreateError
from cpumond.host.cgroup.job_tree import CgroupTotals, JobCgroupTree
from cpumond.host.cgroup.mounts import open_hierarchies
from cpumond.testing import make_tree, make_v2_host, write_mountinfo


def open_v2(directory: Path, root: str = "jobs", **files: object) -> JobCgroupTree:
    mountinfo = make_v2_host(directory, {"jobs": {name.replace("__", "."): text for name, text in files.items()}})
    return JobCgroupTree(open_hierarchies(mountinfo), root, mountinfo)


def open_v1(
    directory: Path, root: str = "jobs", names: tuple[str, ...] = ("cpu", "cpuacct", "memory")
) -> JobCgroupTree:
    mounts = {make_tree(directory / name, {}): name for name in names}
    if "unified" in names:
        mounts[str(directory / "unified")] = "cgroup2"
        make_tree(directory / "unified", {"cgroup.controllers": ""})
    mountinfo = write_mountinfo(directory / "mountinfo", mounts)
    return JobCgroupTree(open_hierarchies(mountinfo), root, mountinfo)


def read(directory: Path) -> dict[str, str]:
    return {path.name: path.read_text().strip() for path in directory.iterdir() if path.is_file()}


class TestVersion2:
    @pytest.mark.parametrize(("cores", "text", "weight"), [
        (1.0, "100000 100000", "100"),
        (0.25, "25000 100000", "25"),
        (0.005, "1000 200000", "1"),
        (0.0, "1000 1000000", "1"),
        (200.0, "20000000 100000", "10000"),
    ])  # fmt: skip
    def test_quota_and_weight(self, tmp_path, cores, text, weight):
        tree = open_v2(tmp_path)
        files = tree.create("a", cores, 0)
        place = tmp_path / "cgroup" / "jobs" / "cpumond-job-a"
        assert files == [str(place / "cgroup.procs")]
        assert tree.path("a") == "jobs/cpumond-job-a"
        assert read(place) == {"cpu.max": text, "cpu.weight": weight}

    def test_without_a_ceiling_there_is_a_weight_alone(self, tmp_path):
        tree = open_v2(tmp_path)
        tree.create("a", 1.5, 0, has_ceiling=False)
        assert read(tmp_path / "cgroup/jobs/cpumond-job-a") == {"cpu.weight": "150"}

    @pytest.mark.parametrize(("offered", "before", "after"), [
        ("cpuset cpu memory", "pids", "+memory"),  # the last of two writes
        ("cpu memory", "cpu memory", "cpu memory"),
    ], ids=["handed down", "handed down already"])  # fmt: skip
    def test_the_controllers_are_handed_down(self, tmp_path, offered, before, after):
        tree = open_v2(tmp_path, cgroup__controllers=f"{offered}\n", cgroup__subtree_control=f"{before}\n")
        tree.create("a", 1.0, 0)
        assert (tmp_path / "cgroup/jobs/cgroup.subtree_control").read_text().strip() == after

    def test_a_root_without_the_cpu_controller_is_refused_in_words(self, tmp_path):
        tree = open_v2(tmp_path, cgroup__controllers="memory\n", cgroup__subtree_control="\n")
        with pytest.raises(CreateError, match=r"jobs lacks the cpu controller.*Delegate"):
            tree.create("a", 1.0, 0)
        assert tree.list_job_ids() == []

    def test_a_root_that_is_missing_is_made_and_stays(self, tmp_path):
        tree = open_v2(tmp_path, "/x/y/")
        tree.create("a", 1.0, 0)
        assert tree.list_job_ids() == ["a"]
        assert tree.remove("a")
        assert os.listdir(tmp_path / "cgroup/x/y") == []

    def test_the_root_of_the_hierarchy_itself(self, tmp_path):
        tree = open_v2(tmp_path, "")
        tree.create("a", 1.0, 0)
        assert (tree.path("a"), tree.list_job_ids()) == ("cpumond-job-a", ["a"])

    def test_totals(self, tmp_path):
        tree = open_v2(tmp_path)
        tree.create("a", 1.0, 0)
        assert tree.read_totals("a") == CgroupTotals()
        memory = {"memory.peak": "4096\n", "memory.events": "low 0\nmax 7\noom 3\noom_kill 2\n"}
        files = {"cpu.stat": "usage_usec 2500000\nuser_usec 1\n", **memory}
        make_tree(tmp_path / "cgroup/jobs/cpumond-job-a", files)
        assert tree.read_totals("a") == CgroupTotals(2.5, 4096, 2)


class TestVersion1:
    def test_all_hierarchies(self, tmp_path, monkeypatch):
        monkeypatch.setattr(os, "geteuid", lambda: 0)  # another user may not move processes where this host has none
        tree = open_v1(tmp_path, names=("cpu", "cpuacct", "memory", "unified"))
        files = tree.create("a", 0.5, 1 << 20)
        places = [os.path.relpath(file, tmp_path) for file in files]
        assert places == [f"{name}/jobs/cpumond-job-a/cgroup.procs" for name in ("cpu", "cpuacct", "memory", "unified")]
        told = read(tmp_path / "cpu/jobs/cpumond-job-a")
        assert told == {"cpu.shares": "512", "cpu.cfs_period_us": "100000", "cpu.cfs_quota_us": "50000"}
        assert read(tmp_path / "memory/jobs/cpumond-job-a") == {"memory.limit_in_bytes": "1048576"}
        assert tree.join_files("a") == files

    def test_a_limit_on_tasks_is_written_where_the_controller_is(self, tmp_path):
        tree = open_v1(tmp_path, names=("cpu", "cpuacct", "pids"))
        tree.create("a", 0.5, 0, 20)
        assert read(tmp_path / "pids/jobs/cpumond-job-a") == {"pids.max": "20"}
        tree.create("b", 0.5, 0)
        assert read(tmp_path / "pids/jobs/cpumond-job-b") == {}

    def test_totals_add_up_the_kills_of_the_children(self, tmp_path):
        tree = open_v1(tmp_path)
        tree.create("a", 0.5, 0)
        make_tree(tmp_path / "cpuacct/jobs/cpumond-job-a", {"cpuacct.usage": "1500000000\n"})
        control = "oom_kill_disable 0\nunder_oom 0\noom_kill {}\n"
        child = {"memory.oom_control": control.format(2)}
        files = {"memory.max_usage_in_bytes": "8192\n", "memory.oom_control": control.format(1), "child": child}
        make_tree(tmp_path / "memory/jobs/cpumond-job-a", files)
        assert tree.read_totals("a") == CgroupTotals(1.5, 8192, 3)

    @pytest.mark.parametrize("text", ["", "many\n", "oom_kill x\n", "\0"])
    def test_counters_that_are_none_are_not_known(self, tmp_path, text):
        tree = open_v1(tmp_path)
        tree.create("a", 0.5, 0)
        make_tree(tmp_path / "cpuacct/jobs/cpumond-job-a", {"cpuacct.usage": text})
        make_tree(tmp_path / "memory/jobs/cpumond-job-a", {"memory.oom_control": text})
        assert tree.read_totals("a") == CgroupTotals()


V1_NAMES = ("cpu", "cpuacct", "memory", "unified")


class TestIdleClass:
    """Jobs on reclaimed CPU, in trees where each cgroup of a kernel with or without ``cpu.idle`` can be told."""

    @pytest.fixture(autouse=True)
    def be_root(self, monkeypatch):
        monkeypatch.setattr(os, "geteuid", lambda: 0)

    @pytest.mark.parametrize(("version", "files", "expected", "name"), [
        (1, {"cpu.shares": "1024\n", "cpu.idle": "0\n"}, {"cpu.idle": "1"}, "idle"),
        (1, {"cpu.shares": "1024\n"}, {"cpu.shares": "2"}, "lowest weight"),
        (2, {"other": {"cpu.weight": "100\n", "cpu.idle": "0\n"}}, {"cpu.idle": "1"}, "idle"),
        (2, {"other": {"cpu.weight": "100\n"}}, {"cpu.weight": "1"}, "lowest weight"),
    ], ids=["v1", "v1 before 5.15", "v2", "v2 before 5.15"])  # fmt: skip
    def test_the_parent_has_the_class_and_jobs_below_it_their_weights(self, tmp_path, version, files, expected, name):
        tree = open_v1(tmp_path, "cpumond-jobs") if version == 1 else open_v2(tmp_path, "cpumond-jobs")
        cpu = make_tree(tmp_path / ("cpu" if version == 1 else "cgroup"), files)
        assert tree.find_idle_class().name == name
        assert bool(tree.find_idle_class().note) == (name != "idle")
        tree.create("a", 0.5, 0, has_ceiling=False, reclaimed=True)
        assert read(Path(cpu, "cpumond-reclaimed")) == expected
        assert tree.path("a") == "cpumond-reclaimed/cpumond-job-a"
        weight = {"cpu.shares": "512"} if version == 1 else {"cpu.weight": "50"}
        assert read(Path(cpu, tree.path("a"))) == weight
        assert tree.find_idle_class().name == name

    @pytest.mark.parametrize(
        ("release", "name"), [("5.14.0-x", "lowest weight"), ("5.15.1", "idle"), ("odd", "lowest weight")]
    )
    def test_a_host_without_a_cgroup_with_a_weight_is_judged_by_its_kernel(self, tmp_path, monkeypatch, release, name):
        monkeypatch.setattr(os, "uname", lambda: os.uname_result(("Linux", "host", release, "", "")))
        assert open_v2(tmp_path).find_idle_class().name == name

    def test_one_taken_out_of_the_class_is_put_back_at_the_next_start(self, tmp_path):
        tree = open_v2(tmp_path, "cpumond-jobs")
        idle = make_tree(tmp_path / "cgroup", {"cpumond-reclaimed": {"cpu.weight": "100\n", "cpu.idle": "0\n"}})
        for job_id in ("a", "b"):
            tree.create(job_id, 1.0, 0, reclaimed=True)
            place = Path(idle, "cpumond-reclaimed/cpu.idle")
            assert place.read_text() == "1\n"
            place.write_text("0\n")

    def test_a_class_that_cannot_be_set_makes_no_job(self, tmp_path):
        tree = open_v2(tmp_path, "cpumond-jobs")
        make_tree(tmp_path / "cgroup", {"cpumond-reclaimed": {"cpu.weight": "100\n", "cpu.idle": {}}})
        with pytest.raises(CreateError, match=r"cannot write 1 to cpu.idle of .*cpumond-reclaimed, the cgroup of jobs"):
            tree.create("a", 1.0, 0, reclaimed=True)
        assert tree.list_job_ids() == []
        tree.create("a", 1.0, 0)
        assert tree.path("a") == "cpumond-jobs/cpumond-job-a"

    def test_a_later_run_finds_jobs_of_both_places(self, tmp_path):
        tree = open_v1(tmp_path, names=V1_NAMES)
        tree.create("a", 1.0, 0)
        tree.create("b", 1.0, 0, reclaimed=True)
        make_tree(tmp_path / "cpuacct/cpumond-reclaimed-jobs/cpumond-job-b", {"cpuacct.usage": "1500000000\n"})
        later = JobCgroupTree(open_hierarchies(str(tmp_path / "mountinfo")), "jobs", str(tmp_path / "mountinfo"))
        assert (later.list_job_ids(), later.read_totals("b").cpu_seconds) == (["a", "b"], 1.5)
        assert [later.remove(job_id) for job_id in ("a", "b")] == [True, True]
        assert later.list_job_ids() == []

    def test_what_is_left_in_one_hierarchy_is_found_there(self, tmp_path):
        tree = open_v1(tmp_path, names=V1_NAMES)
        tree.create("a", 1.0, 0, reclaimed=True)
        for name in ("cpu", "cpuacct", "unified"):
            shutil.rmtree(tmp_path / name / tree.path("a"))
        assert tree.list_job_ids() == ["a"]
        assert tree.remove("a")
        assert tree.list_job_ids() == []

    @pytest.mark.parametrize("was_reclaimed", [False, True])
    def test_one_that_lives_is_not_made_again_in_the_other_place(self, tmp_path, was_reclaimed):
        tree = open_v1(tmp_path)
        tree.create("a", 1.0, 0, reclaimed=was_reclaimed)
        with pytest.raises(CreateError, match="File exists"):
            tree.create("a", 1.0, 0, reclaimed=not was_reclaimed)
        assert tree.list_job_ids() == ["a"]

    @pytest.mark.parametrize("was_reclaimed", [False, True])
    def test_an_empty_one_in_the_other_place_goes(self, tmp_path, was_reclaimed):
        tree = open_v1(tmp_path)
        place = Path(tree.create("a", 1.0, 0, reclaimed=was_reclaimed)[0]).parent
        assert tree.remove("a")
        place.mkdir()
        tree.create("a", 1.0, 0, reclaimed=not was_reclaimed)
        assert not place.exists()
        assert tree.list_job_ids() == ["a"]

    def test_an_agent_confined_to_its_root_has_it_there_and_says_so(self, tmp_path, monkeypatch):
        tree = open_v1(tmp_path, "a/jobs")
        outside = {str(tmp_path / name) for name in V1_NAMES}
        make_tree(tmp_path, {name: {"a": {"jobs": {}}} for name in ("cpu", "cpuacct", "memory")})
        make_tree(tmp_path / "cpu", {"cpu.shares": "1024\n", "cpu.idle": "0\n"})
        monkeypatch.setattr(os, "access", lambda path, _: path not in outside)
        found = tree.find_idle_class()
        assert (found.name, "yield only to other jobs in a/jobs" in found.note) == ("", True)
        tree.create("b", 1.0, 0, reclaimed=True)
        assert tree.path("b") == "a/jobs/cpumond-reclaimed/cpumond-job-b"
        assert read(tmp_path / "cpu/a/jobs/cpumond-reclaimed") == {"cpu.idle": "1"}
        assert tree.list_job_ids() == ["b"]
        assert tree.remove("b")


@pytest.fixture(params=[open_v1, open_v2])
def tree(request, tmp_path):
    return request.param(tmp_path)


@pytest.mark.parametrize("job_id", ["", "a/b", "a\0b", "x" * 250])
def test_an_id_that_is_no_name_is_refused(tree, job_id):
    with pytest.raises(CreateError, match="id must be"):
        tree.create(job_id, 1.0, 0)
    assert tree.list_job_ids() == []


def test_one_that_is_gone_is_never_an_error(tree):
    assert (tree.list_job_ids(), tree.join_files("a"), tree.list_processes("a")) == ([], [], [])
    tree.signal("a", signal.SIGTERM)
    tree.kill("a")
    assert tree.read_totals("a") == CgroupTotals()
    assert tree.remove("a") is True


def test_a_place_where_a_file_lies_leaves_nothing(tree, tmp_path):
    first = Path(tree.create("a", 1.0, 0)[-1]).parent
    tree.remove("a")
    first.write_text("")
    with pytest.raises(CreateError, match="cannot create the cgroup"):
        tree.create("a", 1.0, 0)
    first.unlink()
    assert tree.list_job_ids() == []


def test_one_that_lives_is_not_made_again(tree):
    tree.create("a", 1.0, 0)
    with pytest.raises(CreateError, match="File exists"):
        tree.create("a", 2.0, 0)
    assert tree.list_job_ids() == ["a"]


def test_others_in_the_root_are_no_jobs(tree):
    tree.create("a", 1.0, 0)
    procs = tree.create("b.c", 1.0, 0)
    (Path(procs[0]).parent.parent / "cpumond-keeper").mkdir()
    assert tree.list_job_ids() == ["a", "b.c"]


def test_an_empty_one_of_an_earlier_life_is_made_anew(tree):
    place = Path(tree.create("a", 1.0, 0)[-1]).parent
    assert tree.remove("a")
    place.mkdir()
    tree.create("a", 1.0, 0)
    assert tree.list_job_ids() == ["a"]


def test_memory_and_swap_are_limited_where_the_kernel_makes_their_files(tmp_path, monkeypatch):
    tree, mkdir = open_v2(tmp_path), os.mkdir

    def make(path: str, mode: int) -> None:
        mkdir(path, mode)
        for name in ("memory.max", "memory.swap.max"):
            Path(path, name).touch()

    monkeypatch.setattr(os, "mkdir", make)
    tree.create("a", 1.0, 1 << 20)
    told = {"cpu.max": "100000 100000", "cpu.weight": "100", "memory.max": "1048576", "memory.swap.max": "0"}
    assert read(tmp_path / "cgroup/jobs/cpumond-job-a") == told


def test_the_memory_limit_of_any_cgroup_and_none(tmp_path):
    v2, v1 = open_v2(tmp_path / "2"), open_v1(tmp_path / "1", names=("cpu", "cpuacct", "memory"))
    unlimited = "9223372036854771712\n"
    for tree, root, file, none in (
        (v2, "2/cgroup", "memory.max", "max\n"),
        (v1, "1/memory", "memory.limit_in_bytes", unlimited),
    ):
        make_tree(tmp_path / root, {"some": {file: "4096\n"}, "any": {file: none}, "other": {}})
        assert [tree.read_memory_limit(path) for path in ("some", "any", "other", "gone")] == [4096, None, None, None]


def test_memory_is_held_where_the_kernel_can_and_small_changes_are_skipped(tmp_path):
    tree, file = open_v2(tmp_path), tmp_path / "cgroup/idle/memory.high"
    make_tree(tmp_path / "cgroup", {"idle": {"memory.high": "max\n"}, "without": {}})
    for high, written in ((1000, "1000"), (1009, "1000"), (1011, "1011"), (990, "990")):
        tree.hold_memory("idle", high)
        assert file.read_text().strip() == written
    tree.hold_memory("without", 1000)
    assert not (tmp_path / "cgroup/without/memory.high").exists()
    open_v1(tmp_path / "1", names=("cpu", "cpuacct")).hold_memory("idle", 1000)
