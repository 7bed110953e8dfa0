"""Sources of engines: which cgroups are their jobs, by what the engines said last."""

from pathlib import Path
from typing import Any

import pytest

from cpumond.agent.config import Source
from cpumond.agent.discovery import concerns, describe_source, engines, list_jobs
from cpumond.agent.discovery.engines import list_engines, list_places
from cpumond.host.engine.model import EngineJob, EngineView, Key

A, B = "4f" * 32, "ab" * 32


def source(kind: Any, **more: Any) -> Source:
    return Source(kind=kind, **more)


def job(kind: str, name: str, path: str, **more: Any) -> EngineJob:
    return EngineJob(kind, path.rpartition("/")[2], name, path, {"name": name}, **more)


def view(*jobs: EngineJob, socket: str = "") -> dict[Key, EngineView]:
    kind = jobs[0].kind
    return {(kind, socket or engines.SOCKETS[kind]): EngineView(kind, {each.path: each for each in jobs}, 0.0)}


@pytest.fixture
def root(tmp_path: Path) -> str:
    for path in (f"docker/{A}", f"docker/{B}", "docker/buildkit", f"pods/{A}"):
        (tmp_path / path).mkdir(parents=True)
    return str(tmp_path)


def named(root: str, sources: list[Source], views: dict[Key, EngineView]) -> dict[str, str]:
    """Path -> id of the jobs that are found."""
    return {each.path: each.job_id for each in list_jobs(sources, [], root, views).jobs}


def test_what_the_engine_names_and_what_only_has_a_cgroup(root):
    scan = list_jobs([source("docker")], [], root, view(job("docker", "web", f"docker/{A}", ordered_cores=1.5)))
    found = {each.path: (each.job_id, each.engine.is_named) for each in scan.jobs}
    assert found == {f"docker/{A}": ("web", True), f"docker/{B}": (B[:12], False)}
    assert scan.unnamed == {"docker"}
    assert {"", "docker"} <= scan.watched


def test_cgroups_that_are_no_jobs_are_not_shown_nor_asked_about_again(root):
    views = view(job("docker", "web", f"docker/{A}"), job("docker", "holder", f"docker/{B}", is_job=False))
    scan = list_jobs([source("docker")], [], root, views)
    assert [each.path for each in scan.jobs] == [f"docker/{A}"]
    assert scan.unnamed == set()


def test_where_pods_may_be_is_the_cgroup_that_has_the_limit(tmp_path):
    pod = "pod0f1e2d3c-4b5a-6978-8796-a5b4c3d2e1f0"
    slice_ = f"kubepods.slice/kubepods-burstable.slice/kubepods-burstable-{pod.replace('-', '_')}.slice"
    for path in (
        f"kubepods/burstable/{pod}/{A}/inner",
        f"kubepods/{pod}/{B}",
        f"{slice_}/crio-{A}.scope/container",
        f"{slice_}/cri-containerd-{B}.scope",
        f"docker/{A}",
    ):
        (tmp_path / path).mkdir(parents=True)
    assert sorted(list_places(str(tmp_path), "kubernetes")) == [
        f"{slice_}/cri-containerd-{B}.scope",
        f"{slice_}/crio-{A}.scope/container",
        f"kubepods/burstable/{pod}/{A}",
        f"kubepods/{pod}/{B}",
    ]


def test_one_without_a_cgroup_is_not_there(root):
    found = named(root, [source("docker")], view(job("docker", "web", "docker/none"), job("docker", "a", f"pods/{A}")))
    assert found == {f"docker/{B}": B[:12], f"docker/{A}": A[:12], f"pods/{A}": "a"}


@pytest.mark.parametrize(
    ("tells", "given", "cores"), [(True, "from-cgroup", 1.5), (False, "from-cgroup", None), (False, 2.0, 2.0)]
)
def test_the_order_is_the_engines_where_it_tells_each_new_one(root, tells, given, cores):
    views = view(job("docker", "web", f"docker/{A}", ordered_cores=1.5, reports_request=tells, group="shop"))
    found = list_jobs([source("docker", cpu_limit=given)], [], root, views).jobs
    web = next(each for each in found if each.job_id == "web")
    assert (web.cpu_limit_cores, web.operation_id) == (cores, "shop")


def test_the_first_source_whose_pattern_fits_the_name_has_the_job(root):
    views = view(job("docker", "web", f"docker/{A}"), job("docker", "db", f"docker/{B}"))
    first, second = source("docker", pattern="d*", operation="data"), source("docker", operation="rest")
    found = {each.job_id: each.operation_id for each in list_jobs([first, second], [], root, views).jobs}
    assert found == {"db": "data", "web": "rest"}
    assert named(root, [first], views) == {f"docker/{B}": "db"}


def test_of_two_engines_of_one_kind_each_has_a_source(root):
    """They share the place of their cgroups, so that each one's are without a name for the other."""
    first, second = source("docker", operation="1"), source("docker", socket="/2.sock", operation="2", mode="shadow")
    views = view(job("docker", "web", f"docker/{A}")) | view(job("docker", "db", f"docker/{B}"), socket="/2.sock")
    for sources in ([first, second], [second, first]):
        scan = list_jobs(sources, [], root, views)
        assert {each.job_id: each.operation_id for each in scan.jobs} == {"web": "1", "db": "2"}
        assert scan.unnamed == set()


def test_the_outer_engine_names_a_container_that_two_show(root):
    views = view(job("docker", "k8s_web", f"docker/{A}")) | view(job("kubernetes", "ns/pod/web", f"docker/{A}"))
    found = named(root, [source("docker"), source("kubernetes")], views)
    assert found == {f"docker/{A}": "ns/pod/web", f"docker/{B}": B[:12]}


def test_what_lies_in_a_job_of_an_engine_is_a_part_of_it(root, tmp_path):
    inner = f"docker/{A}/docker/{B}"
    (tmp_path / inner / "deep").mkdir(parents=True)
    views = view(job("docker", "outer", f"docker/{A}")) | view(job("podman", "inner", inner))
    scan = list_jobs([source("podman"), source("docker"), source("glob", pattern="docker/*/**")], [], root, views)
    of_engines = {each.path: each.job_id for each in scan.jobs if each.engine is not None}
    assert of_engines == {f"docker/{A}": "outer", f"docker/{B}": B[:12]}
    assert not any(each.path.startswith(f"docker/{A}/") for each in scan.jobs)
    assert "are inside jobs of engines" in scan.problems[0]


def test_what_an_engine_runs_in_a_job_that_is_whole_is_a_part_of_it(root):
    outer = Source(kind="static", pattern="docker", whole=True)
    scan = list_jobs([source("docker"), outer], [], root, view(job("docker", "inner", f"docker/{A}")))
    assert [(each.path, each.is_whole) for each in scan.jobs] == [("docker", True)]


def test_two_with_one_name_are_told_apart(root):
    views = view(job("docker", "web", f"docker/{A}")) | view(job("podman", "web", f"pods/{A}"))
    found = named(root, [source("docker"), source("podman")], views)
    assert (found[f"docker/{A}"], found[f"pods/{A}"]) == ("web", f"web-{A[:12]}")


def test_a_container_that_crun_has_made(tmp_path):
    scope = f"machine.slice/libpod-{A}.scope"
    (tmp_path / scope / "container").mkdir(parents=True)
    assert named(str(tmp_path), [source("podman")], {}) == {f"{scope}/container": A[:12]}
    views = view(job("podman", "web", f"{scope}/container"))
    assert named(str(tmp_path), [source("podman")], views) == {f"{scope}/container": "web"}


def test_a_job_of_slurm_is_one_whatever_steps_it_has(tmp_path):
    for step in ("step_batch/task_0", "step_0/task_0"):
        (tmp_path / "slurm_n1/uid_0/job_7" / step).mkdir(parents=True)
    assert named(str(tmp_path), [source("slurm")], {}) == {"slurm_n1/uid_0/job_7": "job_7"}


@pytest.mark.parametrize(("kind", "path", "expected"), [
    ("docker", f"docker/{A}", True),
    ("docker", f"system.slice/docker-{A}.scope", True),
    ("docker", "system.slice/ssh.service", False),
    ("podman", f"machine.slice/libpod-{A}.scope", True),
    ("slurm", "system.slice/n1_slurmstepd.scope/job_1", True),
    ("slurm", "hpc.slice/slurmstepd.scope/sEKNKTV3WPV500", True),
    ("slurm", "system.slice/slurmstepd.scope/system", False),
    ("slurm", "slurm_n1/uid_0", True),
    ("kubernetes", "kubepods/burstable/pod1/c", True),
    ("kubernetes", "user.slice", False),
])  # fmt: skip
def test_which_changes_concern_a_source(kind, path, expected):
    assert concerns(source(kind), path) is expected


def test_which_engines_a_source_asks(tmp_path, monkeypatch):
    root, user = tmp_path / "root.sock", tmp_path / "user-1.sock"
    monkeypatch.setitem(engines.SOCKETS, "podman", str(root))
    monkeypatch.setattr(engines, "USER_SOCKETS", str(tmp_path / "user-*.sock"))
    assert list_engines(source("docker")) == [("docker", "/run/docker.sock")]
    assert list_engines(source("podman", socket="/a")) == [("podman", "/a")]
    assert list_engines(source("podman")) == [("podman", str(root))]
    for made, found in ((user, [user]), (root, [root, user])):
        made.touch()
        assert list_engines(source("podman")) == [("podman", str(each)) for each in found]


def test_a_source_in_words():
    assert describe_source(source("docker")) == "docker"
    assert describe_source(source("docker", pattern="shop-*")) == "docker shop-*"
