"""What ``init`` and ``doctor`` see of engines: which are here, what becomes of their jobs, which right is missing."""

import os
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from cpumond.agent.config import AgentConfig, Source
from cpumond.agent.discovery import FoundJob
from cpumond.agent.discovery import engines as places
from cpumond.agent.engines import ENGINES
from cpumond.cli import engines
from cpumond.cli.engines import EngineSeen, JobsSeen
from cpumond.host.cgroup.mounts import Hierarchies
from cpumond.host.engine.model import EngineJob, EngineView
from cpumond.testing import make_tree, v2_cgroup

ID = "3f9ab1c2d4e5" + "0" * 52


@pytest.fixture(autouse=True)
def nowhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Engines of this machine are not looked at."""
    monkeypatch.setattr(places, "SOCKETS", dict.fromkeys(places.SOCKETS, str(tmp_path / "no.sock")))
    monkeypatch.setattr(places, "USER_SOCKETS", str(tmp_path / "no-user-*.sock"))


def unified(root: Path | str) -> Hierarchies:
    return Hierarchies(2, str(root), str(root), None, str(root))


def job(name: str, path: str, **more: object) -> EngineJob:
    return EngineJob("docker", name, name, path, **more)  # type: ignore[arg-type]


def test_nothing_is_seen_where_nothing_is(tmp_path):
    root = make_tree(tmp_path / "c", {"system.slice": {"ssh.service": v2_cgroup()}})
    assert engines.see_engines(AgentConfig(), unified(root), ["bash"]) == []


def test_a_service_that_runs_is_a_sign_and_so_is_a_cgroup(tmp_path):
    root = make_tree(tmp_path / "c", {"machine.slice": {f"libpod-{ID}.scope": v2_cgroup()}})
    seen = {each.kind: each for each in engines.see_engines(AgentConfig(), unified(root), ["dockerd"])}
    assert seen.keys() == {"docker", "podman"}
    docker = seen["docker"]
    assert (docker.programs, docker.is_here, docker.is_configured) == (("dockerd",), True, False)
    assert seen["podman"].jobs.unnamed == (f"machine.slice/libpod-{ID}.scope",)
    assert all("the socket does not exist" in view.problem for each in seen.values() for view in each.views.values())


def test_a_kind_of_the_configuration_is_asked_where_it_says(tmp_path):
    root = make_tree(tmp_path / "c", {})
    config = AgentConfig(source=[Source(kind="docker", socket="/nonexistent/docker.sock")])
    (seen,) = engines.see_engines(config, unified(root), [])
    assert (seen.is_configured, seen.is_here, list(seen.views)) == (True, False, ["/nonexistent/docker.sock"])
    assert engines.collect_views([seen]).keys() == {("docker", "/nonexistent/docker.sock")}


def test_every_kind_with_a_client_has_its_words():
    assert engines.FACTS.keys() >= ENGINES.keys()


def test_what_becomes_of_jobs(tmp_path):
    cgroups = {name: v2_cgroup() for name in ("a", "b", "d", "x")} | {"c": v2_cgroup(quota="50000 100000")}
    root = make_tree(tmp_path, {"docker": cgroups})
    source, host = Source(kind="docker"), Source(kind="docker", unlimited="host")
    jobs = [
        job("limited", "docker/a", ordered_cores=1.5, reports_request=True),
        job("free", "docker/b"),
        job("by-cgroup", "docker/c"),
        job("reserved", "docker/d", ordered_cores=2.0, left_out="its CPUs are its own"),
        job("strange", "docker/x", is_named=False),
    ]
    found = [FoundJob(each.name, "", each.path, each.ordered_cores, source, engine=each) for each in jobs]
    told = {"gone/e": job("lost", "gone/e"), "gone/p": job("", "gone/p", is_job=False), "docker/a": jobs[0]}
    sorted_jobs = engines.sort_jobs(found, {"": EngineView("docker", told, 1.0)}, AgentConfig(), unified(root))
    assert sorted_jobs == JobsSeen(
        ("limited", "by-cgroup"), ("free",), ("docker/x",), {"its CPUs are its own": ("reserved",)}, ("lost",)
    )
    said = engines.describe_fates("docker", sorted_jobs)
    assert said == [
        "managed, in shadow mode at first: 2 containers with a CPU limit (limited, by-cgroup)",
        "only observed: 1 container without a CPU limit (free)",
        "only observed: 1 container (reserved): its CPUs are its own",
        "only observed: 1 cgroup that it does not know (docker/x)",
        (
            "not observed: 1 container without a cgroup in the hierarchy of the cpu controller, where a limit could "
            "be (lost)"
        ),
    ]
    unlimited = [FoundJob("free", "", "docker/b", None, host, engine=jobs[1])]
    assert engines.sort_jobs(unlimited, {}, AgentConfig(), unified(root)).managed == ("free",)
    outside = engines.sort_jobs(found[:1], {}, AgentConfig(managed_roots=["jobs"]), unified(root))
    assert outside.refused == {"it is outside managed_roots": ("limited",)}


def test_few_names_are_shown():
    assert engines.format_some(["a", "b", "c", "d", "e"]) == " (a, b, c and 2 more)"
    assert engines.format_some(["a\x1b[2J"]) == " (a\\x1b[2J)"
    assert engines.format_some(["a" * 100 + "b"]) == f" ({'a' * 31}…{'a' * 31}b)"


@pytest.mark.parametrize(("kind", "title", "group", "text"), [
    ("docker", "docker 20.10.24", "", "dockerd 20.10.24 with 1 container"),
    ("slurm", "slurmd 22.05.8", "", "slurmd 22.05.8 with 1 job"),
    ("kubernetes", "kubernetes v1.29.3", "pod-1", "kubelet v1.29.3 with 1 container in 1 pod"),
    ("kubernetes", "containerd v2.1.9", "pod-1", "containerd v2.1.9 with 1 container in 1 pod"),
    ("podman", "", "", "podman with 1 container"),
])  # fmt: skip
def test_an_engine_in_a_few_words(kind, title, group, text):
    found = FoundJob("a", group, "x/a", None, engine=EngineJob(kind, "a", "a", "x/a", group=group))
    seen = EngineSeen(kind, True, {"": EngineView(kind, {}, 1.0, "", title)}, (), (found,))
    assert seen.describe() == text


@pytest.fixture
def closed() -> Iterator[Path]:
    """A socket of root's in a directory that everybody may look into."""
    with tempfile.TemporaryDirectory() as name, socket.socket(socket.AF_UNIX) as listening:
        Path(name).chmod(0o755)
        path = Path(name) / "deep" / "docker.sock"
        path.parent.mkdir(mode=0o755)
        listening.bind(str(path))
        path.chmod(0o600)
        yield path


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become somebody else")
def test_which_right_is_missing(closed, no_rights):
    assert engines.find_closed(str(closed)) == ""
    seen = EngineSeen("docker", False, {str(closed): EngineView("docker", problem="docker: no answer")})
    with no_rights():
        assert engines.find_closed(str(closed)) == f"nobody may not open {closed} (of root:root, mode 0600)"
        text, advice = engines.explain_silence(seen, str(closed), seen.views[str(closed)])
        assert seen.is_here
    assert text == f"dockerd: nobody may not open {closed} (of root:root, mode 0600)"
    assert advice.startswith("run this as root")
    closed.parent.chmod(0o700)
    with no_rights():
        assert engines.find_closed(str(closed)) == f"nobody may not open {closed.parent} (of root:root, mode 0700)"


def test_nothing_is_missing_for_what_is_no_file():
    assert (engines.find_closed("https://127.0.0.1:10250"), engines.find_closed("")) == ("", "")
    assert engines.find_closed("/nonexistent/docker.sock") == ""


def test_what_to_do_where_an_engine_is_silent(monkeypatch):
    def explain(kind: str, path: str, *programs: str) -> tuple[str, str]:
        view = EngineView(kind, problem=f"{kind}: no response from {path}")
        return engines.explain_silence(EngineSeen(kind, True, {path: view}, programs), path, view)

    assert explain("podman", "/run/podman/podman.sock")[1].startswith("systemctl enable --now podman.socket; if it")
    assert "enable --now docker" in explain("docker", "/run/docker.sock")[1]
    # It runs: starting it is no advice.
    assert "enable" not in explain("docker", "/run/docker.sock", "dockerd")[1]
    assert "loginctl enable-linger 1000" in explain("podman", "/run/user/1000/podman/podman.sock")[1]
    monkeypatch.setenv("PATH", "/nonexistent")
    told = explain("slurm", "")
    assert told == ("slurm: `squeue` is not installed here", "install Slurm's client commands (Debian: slurm-client)")
