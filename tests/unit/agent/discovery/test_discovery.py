"""Which cgroups are jobs, and what they are called."""

import os
from typing import get_args, get_type_hints

import pytest

from cpumond.agent.config import ENGINE_KINDS, Source
from cpumond.agent.discovery import SOURCES, FoundJob, list_jobs, name_job
from cpumond.agent.discovery.glob import list_glob, list_static, may_match
from cpumond.testing import make_tree

TREE = {
    "jobs": {"a": {"inner": {}}, "b": {}, "c.scope": {}, "cpu.max": "max 100000\n"},
    "kube": {"pod1": {"c1": {}, "c2": {}}, "pod2": {"c1": {}}},
    "slurm": {"uid_1": {"job_7": {"step_0": {}, "step_batch": {}}}, "uid_2": {"job_8": {"step_0": {}}}},
}


@pytest.fixture
def root(tmp_path):
    return make_tree(tmp_path / "cgroup", TREE)


def glob(pattern: str, **more: object) -> Source:
    return Source(kind="glob", pattern=pattern, **more)


def test_a_match_can_be_one_job_as_a_whole(root):
    """What is below it is no job of another source, in whatever order; the first source that names it decides."""
    inner, whole = glob("jobs/*/*"), glob("jobs/*", whole=True)
    for sources in ([inner, whole], [whole, inner], [whole, glob("jobs/a/**", whole=True), inner]):
        scan = list_jobs(sources, [], root)
        found = {job.path: job.is_whole for job in scan.jobs}
        assert found == {"jobs/a": True, "jobs/b": True, "jobs/c.scope": True}
        assert any("jobs/*/*: 1 of its cgroups are inside jobs" in each for each in scan.problems)
    scan = list_jobs([glob("jobs/*"), whole, inner], [], root)
    assert {job.path: job.is_whole for job in scan.jobs}["jobs/a"] is False
    assert "jobs/a/inner" in [job.path for job in scan.jobs]


@pytest.mark.parametrize(("pattern", "found"), [
    ("jobs/*", ["jobs/a", "jobs/b", "jobs/c.scope"]),
    ("/jobs/*/", ["jobs/a", "jobs/b", "jobs/c.scope"]),
    ("jobs/?", ["jobs/a", "jobs/b"]),
    ("jobs/[ab]", ["jobs/a", "jobs/b"]),
    ("jobs/[!a]*", ["jobs/b", "jobs/c.scope"]),
    ("jobs/*.scope", ["jobs/c.scope"]),
    ("*/pod*/c1", ["kube/pod1/c1", "kube/pod2/c1"]),
    ("kube/**/c1", ["kube/pod1/c1", "kube/pod2/c1"]),
    ("**/step_0", ["slurm/uid_1/job_7/step_0", "slurm/uid_2/job_8/step_0"]),
    ("**/**/step_0", ["slurm/uid_1/job_7/step_0", "slurm/uid_2/job_8/step_0"]),
    ("jobs/**", ["jobs", "jobs/a", "jobs/a/inner", "jobs/b", "jobs/c.scope"]),
    ("jobs", ["jobs"]),
    ("jobs/cpu.max", []),
    ("jobs/A", []),
    ("none/*", []),
    ("", []),
    ("/", []),
])  # fmt: skip
def test_what_a_pattern_matches(root, pattern, found):
    assert list_glob(root, pattern)[0] == found


def test_a_pattern_of_everything_is_everything_but_the_root(root):
    found, watched = list_glob(root, "**")
    assert "" not in found
    assert len(found) == sum(len(names) for _, names, _ in os.walk(root))
    assert set(watched) == {"", *found}


@pytest.mark.parametrize(
    ("pattern", "watched"),
    [("jobs/*", ["", "jobs"]), ("kube/pod*/c1", ["", "kube", "kube/pod1", "kube/pod2"]), ("none/*", [""]), ("*", [""])],
)
def test_the_directories_whose_children_decide_are_watched(root, pattern, watched):
    assert list_glob(root, pattern)[1] == watched


def test_symbolic_links_are_no_cgroups(root):
    os.symlink(os.path.join(root, "jobs"), os.path.join(root, "link"))
    assert list_glob(root, "*/a")[0] == ["jobs/a"]


def test_a_tree_deeper_than_any_hierarchy_ends(tmp_path):
    place = tmp_path
    for _ in range(60):
        place = place / "d"
    os.makedirs(place)
    assert 20 <= len(list_glob(str(tmp_path), "**")[0]) < 60


@pytest.mark.parametrize(("pattern", "found", "watched"), [
    ("jobs/a", ["jobs/a"], ["jobs"]),
    ("/jobs/a/", ["jobs/a"], ["jobs"]),
    ("jobs/none", [], ["jobs"]),
    ("none/below/deep", [], [""]),
    ("jobs/b/below/deep", [], ["jobs/b"]),
    ("jobs/cpu.max", [], ["jobs"]),
    ("jobs/[x]", ["jobs/[x]"], ["jobs"]),
])  # fmt: skip
def test_a_static_path_and_where_it_would_appear(root, pattern, found, watched):
    os.mkdir(os.path.join(root, "jobs", "[x]"))
    assert list_static(root, pattern) == (found, watched)


def test_every_kind_of_the_configuration_has_a_source():
    assert {*SOURCES, "systemd", *ENGINE_KINDS} == set(get_args(get_type_hints(Source)["kind"]))


@pytest.mark.parametrize(("source", "path", "job_id", "operation"), [
    (glob("jobs/*"), "jobs/a", "a", ""),
    (glob("kube/*/*"), "kube/pod1/c1", "kube/pod1/c1", ""),
    (glob("*/a"), "jobs/a", "jobs/a", ""),
    (Source(kind="static", pattern="jobs/a", id="mine", operation="op"), "jobs/a", "mine", "op"),
    (glob("kube/*/*", id_regex=r"kube/(?P<operation>[^/]+)/(?P<id>.+)"), "kube/pod1/c1", "c1", "pod1"),
    (glob("kube/*/*", id_regex=r"(?P<op>pod\d)/(?P<job>c\d)"), "kube/pod1/c1", "c1", "pod1"),
    (glob("kube/*/*", id_regex=r"(?P<operation_id>pod\d)/(?P<job_id>c\d)"), "kube/pod1/c1", "c1", "pod1"),
    (glob("slurm/**", id_regex=r"job_(\d+)/(step_\w+)"), "slurm/uid_1/job_7/step_0", "7", "step_0"),
    (glob("slurm/**", id_regex=r"job_(\d+)", operation="slurm"), "slurm/uid_1/job_7", "7", "slurm"),
    (glob("slurm/**", id_regex=r"job_\d+"), "slurm/uid_1/job_7", "job_7", ""),
    (glob("jobs/*", id_regex=r"jobs/(?:(x)|(a))"), "jobs/a", "a", ""),
    (glob("jobs/*", id_regex=r"(?P<operation>jobs)/.*", operation="other"), "jobs/a", "jobs/a", "jobs"),
    (glob("jobs/*", id_regex=r"(?P<operation>x)?jobs/(?P<id>.)", operation="other"), "jobs/a", "a", "other"),
])  # fmt: skip
def test_names(source, path, job_id, operation):
    named = name_job(source, path)
    assert (named.job_id, named.operation_id, named.path, named.source) == (job_id, operation, path, source)


@pytest.mark.parametrize("id_regex", ["nothing", "x*", "(?P<id>)jobs", "()"])
def test_a_regex_that_names_a_job_with_nothing_names_no_job(id_regex):
    named = name_job(glob("jobs/*", id_regex=id_regex), "jobs/a")
    assert named is None or named.job_id


def test_the_first_source_that_names_a_cgroup_keeps_it(root):
    registered = FoundJob("mine", "", "jobs/b", 7.0)
    sources = [glob("jobs/a", cpu_limit=1), glob("jobs/*", cpu_limit=2.0), glob("*/*")]
    scan = list_jobs(sources, [registered], root)
    assert scan.jobs[0] == registered, "before every source"
    found = {job.path: job.cpu_limit_cores for job in scan.jobs if job.path.startswith("jobs/")}
    assert found == {"jobs/a": 1.0, "jobs/b": 7.0, "jobs/c.scope": 2.0}
    assert {job.cpu_limit_cores for job in scan.jobs if job.path.startswith("kube/")} == {None}
    assert scan.problems == []


def test_two_cgroups_with_one_id_are_one_job_and_a_problem(root):
    scan = list_jobs([glob("kube/*/*", id_regex="[^/]+$")], [], root)
    assert [(job.job_id, job.path) for job in scan.jobs] == [("c1", "kube/pod1/c1"), ("c2", "kube/pod1/c2")]
    [problem] = scan.problems
    assert "kube/pod2/c1" in problem
    assert "kube/pod1/c1" in problem
    assert "id_regex" in problem


@pytest.mark.parametrize("id_regex", [None, r"^jobs/(a|b|c\.scope)$"], ids=["no text", "no name"])
def test_names_that_are_none_are_left_out_and_said(root, id_regex):
    for name in (b"\xff", b"new\nline") if id_regex is None else (b"d", b"e"):
        os.mkdir(os.fsencode(root) + b"/jobs/" + name)
    scan = list_jobs([glob("jobs/*", id_regex=id_regex)], [], root)
    assert [job.path for job in scan.jobs] == ["jobs/a", "jobs/b", "jobs/c.scope"]
    assert len(scan.problems) == 2
    assert all(problem.isprintable() for problem in scan.problems)


def test_what_is_watched_is_what_all_sources_watch(root):
    scan = list_jobs([glob("jobs/*"), Source(kind="static", pattern="kube/pod9/c1")], [], root)
    assert scan.watched == {"", "jobs", "kube"}


def test_no_hierarchy_is_no_job(tmp_path):
    scan = list_jobs([glob("**"), glob("jobs/*"), Source(kind="static", pattern="a/b")], [], str(tmp_path / "none"))
    assert (scan.jobs, scan.problems) == ([], [])


@pytest.mark.parametrize(("pattern", "path", "may"), [
    ("jobs/*", "jobs/a", True),
    ("jobs/*", "jobs", True),
    ("jobs/*", ".", True),
    ("jobs/*", "other", False),
    ("jobs/a*/x", "jobs/b", False),
    ("jobs/a*/x", "jobs/a1/y", False),
    ("jobs/**/x", "jobs/b/c", True),
    ("/jobs//one", "jobs/one", True),
    ("jobs/one", "jobs/two", False),
])  # fmt: skip
def test_only_a_change_on_the_way_to_a_match_is_looked_at(pattern: str, path: str, may: bool) -> None:
    assert may_match(pattern, path) == may
