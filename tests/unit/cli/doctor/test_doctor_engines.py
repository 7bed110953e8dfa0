"""What ``cpumond doctor`` says about engines: sources, silence, names, and what the unit hides."""

import os
import socket

import pytest

from cpumond.agent.config import Source
from cpumond.agent.discovery import FoundJob
from cpumond.cli.doctor import cgroups as doctor_cgroups
from cpumond.cli.doctor import checks as doctor_checks
from cpumond.cli.doctor import engines as doctor_engines
from cpumond.cli.doctor import units as doctor_units
from cpumond.cli.engines import FACTS, EngineSeen, JobsSeen
from cpumond.host.engine.model import EngineJob, EngineView
from cpumond.testing import make_tree

PATH = "/run/docker.sock"
SOURCE = Source(kind="docker")
UP = EngineView("docker", {}, 1.0, "", "docker 20.10.24")
AWAY = EngineView("docker", problem="docker: no response from /run/docker.sock (the socket does not exist)")
UNIT = {
    "TemporaryFileSystem": "/run:ro",
    "BindPaths": "/run/cpumond:/run/cpumond:rbind",
    "BindReadOnlyPaths": "/run/systemd/notify:/run/systemd/notify:rbind -/run/dbus:/run/dbus:rbind",
    "ProtectHome": "yes",
}


def found(name: str, source: Source = SOURCE) -> FoundJob:
    path = f"docker/{name}"
    return FoundJob(name, "", path, 1.5, source, engine=EngineJob("docker", name, name, path, ordered_cores=1.5))


def seen(view: EngineView = UP, *names: str, configured: bool = True, **more: object) -> EngineSeen:
    jobs = tuple(found(name) for name in names)
    values: dict[str, object] = {"found": jobs, "jobs": JobsSeen(managed=names), **more}
    return EngineSeen("docker", configured, {PATH: view}, **values)  # type: ignore[arg-type]


@pytest.mark.parametrize(("engine", "reach", "level", "text", "advice"), [
    (seen(UP, "web", "batch"), "", "ok", "dockerd 20.10.24 with 2 containers (/run/docker.sock): it answers", ""),
    (seen(UP, "web", configured=False), "hidden", "warn",
     "dockerd 20.10.24 with 1 container: on this host, and no source names it",
     'write this source, as `cpumond init` does: [[source]] kind = "docker"'),
    (seen(AWAY), "", "warn", "a source names docker, but it is not on this host now: docker: no response from",
     "remove the source from this host's configuration, or: systemctl enable --now docker"),
    (seen(AWAY, programs=("dockerd",)), "", "warn", AWAY.problem, "cpumond init --socket docker=PATH"),
    (seen(UP, "web"), "hidden", "fail", "/run/docker.sock is hidden from the service by its unit", "docker.conf"),
    (seen(UP, "web"), "stale", "warn", "/run/docker.sock was recreated after the service started", "restart cpumond"),
    (seen(UP, "web", jobs=JobsSeen(unnamed=("docker/x",))), "", "warn",
     "1 cgroup that it does not know (docker/x)", "does a second dockerd own them?"),
], ids=["answers", "no source", "nowhere", "silent", "hidden", "stale", "unnamed"])  # fmt: skip
def test_what_is_said_of_an_engine(engine, reach, level, text, advice):
    *_, finding = doctor_engines.check_engine(engine, lambda _: reach)
    assert (finding.check, finding.level) == ("engine docker", level)
    assert text in finding.text
    assert advice in finding.advice
    assert bool(advice) == bool(finding.advice)


def test_an_engine_that_is_nowhere_is_no_finding_without_a_source():
    assert doctor_engines.check_engine(seen(AWAY, configured=False), lambda _: "") == []


@pytest.mark.parametrize("is_up", [True, False])
def test_a_node_of_kubernetes_without_a_source_is_told_of_one_that_works(is_up):
    place = "/run/containerd/containerd.sock" if is_up else "https://127.0.0.1:10250"
    view = EngineView("kubernetes", {}, 1.0) if is_up else EngineView("kubernetes", problem="kubernetes: status 401")
    node = EngineSeen("kubernetes", False, {place: view}, ("kubelet",))
    first, *more = doctor_engines.check_engine(node, lambda _: "")
    assert (f'[[source]] kind = "kubernetes" socket = "{place}"' in first.advice) == is_up
    assert ["kubernetes.io/service-account-token" in each.advice for each in more] == ([] if is_up else [True])


def test_what_a_source_finds():
    jobs = [found("web"), found("batch"), found("other", Source(kind="docker", pattern="o*"))]
    engine = seen(UP, "web", "batch", jobs=JobsSeen(managed=("web",), unlimited=("batch",)))
    (finding,) = doctor_engines.check_engine_source(2, SOURCE, jobs, engine)
    assert (finding.check, finding.level) == ("source 2", "ok")
    assert finding.text == (
        "'docker' finds 2 containers (web, batch); of all it has: managed: 1 container with a CPU limit (web); "
        "only observed: 1 container without a CPU limit (batch)"
    )


@pytest.mark.parametrize(("paths", "text"), [
    (["system.slice/slurmstepd.scope/job_7"], ", below system.slice/slurmstepd.scope, named by job_N"),
    (["hpc.slice/slurmstepd.scope/sEKNKTV3WPV500"], ", below hpc.slice/slurmstepd.scope, named by SLUID"),
    (["a.slice/slurmstepd.scope/job_7", "b.slice/slurmstepd.scope/sEKNKTV3WPV500"],
     ", below a.slice/slurmstepd.scope and 1 more, named by job_N and SLUID"),
])  # fmt: skip
def test_how_slurm_names_its_cgroups(paths, text):
    source = Source(kind="slurm")
    jobs = [FoundJob(path, "", path, 1.0, source, engine=EngineJob("slurm", "7", path, path)) for path in paths]
    engine = EngineSeen("slurm", True, {"": UP}, ("slurmd",), tuple(jobs), JobsSeen())
    (finding,) = doctor_engines.check_engine_source(1, source, jobs, engine)
    assert finding.text.endswith(text)


def test_a_source_that_finds_nothing():
    other = Source(kind="docker", pattern="x*")
    (idle,) = doctor_engines.check_engine_source(1, SOURCE, [], seen(UP))
    assert (idle.level, idle.text) == ("ok", "'docker': no container runs now")
    (wrong,) = doctor_engines.check_engine_source(1, other, [found("web")], seen(UP, "web"))
    assert (wrong.level, wrong.text.startswith("'docker x*' names none of 1 container")) == ("warn", True)


def test_jobs_outside_managed_roots():
    engine = seen(UP, "web", jobs=JobsSeen(refused={"it is outside managed_roots": ("web",)}))
    _, finding = doctor_engines.check_engine_source(1, SOURCE, [found("web")], engine)
    assert (finding.level, "will never be written (web)" in finding.text) == ("warn", True)


@pytest.mark.parametrize(("path", "more", "reach"), [
    (PATH, {}, "hidden"),
    (PATH, {"BindReadOnlyPaths": "-/run/docker.sock:/run/docker.sock:rbind"}, ""),
    ("/run/podman/podman.sock", {"BindReadOnlyPaths": "-/run/podman"}, ""),
    ("/run/podman/podman.sock", {"BindReadOnlyPaths": "-/run/pod"}, "hidden"),
    ("/run/user/1000/podman/podman.sock", {"BindReadOnlyPaths": "-/run/user/1000/podman"}, ""),
    ("/run/user/1000/podman/podman.sock", {}, "hidden"),
    ("/home/joe/docker.sock", {}, "hidden"),
    ("/home/joe/docker.sock", {"ProtectHome": "no"}, ""),
    ("/srv/docker.sock", {}, ""),
])  # fmt: skip
def test_what_the_unit_hides(path, more, reach):
    assert doctor_engines.find_unit_reach(path, {**UNIT, **more}) == reach


def test_a_unit_that_is_not_known_hides_nothing_that_is_known():
    assert doctor_engines.find_unit_reach(PATH, {}) is None
    assert doctor_engines.find_unit_reach(PATH, dict.fromkeys(UNIT, "")) is None


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may look into other processes")
def test_what_a_running_agent_sees(tmp_path):
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(path))
        assert doctor_engines.find_agent_reach(str(path), os.getpid()) == ""
    assert doctor_engines.find_agent_reach(str(path), None) is None
    assert doctor_engines.find_agent_reach(str(path), 2**22 + 1) is None


def test_programs_whose_orders_a_source_follows_are_no_concern():
    names = ["dockerd", "containerd", "slurmd", "koordlet"]
    found = doctor_checks.check_writers(names, {"docker"})
    assert [each.text.split()[0] for each in found] == ["koordlet", "slurmd"]
    assert [each.advice.partition(":")[0] for each in found] == [
        "keep its cgroups out of managed_roots, or let it set no CPU limits for the jobs that cpumond manages",
        "write this source, as `cpumond init` does",
    ]
    (quiet,) = doctor_checks.check_writers(["dockerd"], {"docker", "glob"})
    assert (quiet.level, quiet.text) == ("ok", "dockerd: a source follows its requests")


def test_cgroups_whose_manager_has_a_source_are_no_concern(tmp_path):
    tree = {"system.slice": {"docker-0a1b.scope": {}, "n_slurmstepd.scope": {}}, "lxc": {"a": {}}}
    root = make_tree(tmp_path, tree)
    found = doctor_units.check_foreign_managers([""], root, {"docker"})
    said = [(each.text.split(" of ")[1].split(",")[0], "narrow managed_roots" in each.advice) for each in found]
    assert said == [("LXC", True), ("Slurm", False)]
    assert 'kind = "slurm"' in found[1].advice


def test_no_managed_roots_with_sources_of_engines(tmp_path):
    (alone,) = doctor_cgroups.check_roots([], str(tmp_path), {"docker", "slurm"})
    text = "empty: jobs of docker and slurm are managed wherever their engine has them"
    assert (alone.level, alone.text) == ("ok", text)
    (mixed,) = doctor_cgroups.check_roots([], str(tmp_path), {"docker", "glob"})
    assert (mixed.level, mixed.text.endswith("no others will ever be written")) == ("warn", True)
    (none,) = doctor_cgroups.check_roots([], str(tmp_path), {"glob"})
    assert none.text == "empty: no cgroup will ever be written"


def test_which_kinds_the_managers_have():
    """Each names a kind of source that there is."""
    kinds = {kind for _, kind, _ in doctor_units.MANAGERS}
    assert kinds - {""} == {"docker", "podman", "slurm", "kubernetes"}
    assert {name for facts in FACTS.values() for name in facts.writes} <= doctor_checks.WRITERS.keys()
