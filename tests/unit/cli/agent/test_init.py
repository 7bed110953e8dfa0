"""What ``cpumond init`` plans on hosts made up of files, and how it says so."""

import json
import re
from pathlib import Path

import pytest

from cpumond.agent.config import AgentConfig, Source
from cpumond.agent.discovery import engines as places
from cpumond.cli import engines, run
from cpumond.cli.agent import init
from cpumond.cli.doctor import host as doctor_host
from cpumond.cli.engines import EngineSeen
from cpumond.host.cgroup import mounts
from cpumond.host.cgroup.mounts import open_hierarchies
from cpumond.host.engine.model import EngineView
from cpumond.testing import make_v2_host, v2_cgroup


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """The processes of the made-up host, on which no socket is."""
    names: list[str] = []
    monkeypatch.setattr(places, "SOCKETS", dict.fromkeys(places.SOCKETS, str(tmp_path / "no.sock")))
    monkeypatch.setattr(places, "USER_SOCKETS", str(tmp_path / "no-user-*.sock"))
    monkeypatch.setattr(doctor_host, "list_process_names", lambda: names)
    return names


@pytest.fixture
def config(tmp_path: Path) -> Path:
    populated = {**v2_cgroup(), "cgroup.threads": "1\n"}
    folders = {"system.slice": ("ssh.service", "cron.service"), "batch": ("one", "two")}
    tree = {folder: dict.fromkeys(names, populated) for folder, names in folders.items()}
    path = tmp_path / "cpumond.toml"
    path.write_text(f'mountinfo = "{make_v2_host(tmp_path, tree)}"\n')
    return path


def options(config: Path) -> list[str]:
    return ["init", "--config", str(config), "--unit-dir", str(config.parent / "units")]


def test_a_host_without_engines_gets_no_file(config, programs, capsys):
    assert run([*options(config), "--yes"]) == 0
    text = capsys.readouterr().out
    assert "No job engine was found on this host" in text
    assert "2 services and sessions of the system (cron.service, ssh.service): left alone" in text
    assert "2 other workloads (batch/one, batch/two): left alone; `cpumond estimate --write FILE`" in text
    assert not (config.parent / "conf.d").exists()


def test_an_engine_that_is_away_just_now_is_written_with_what_to_do(config, programs, capsys):
    programs.append("dockerd")
    assert run([*options(config), "--yes"]) == 0
    text = capsys.readouterr().out
    assert "the socket does not exist" in text
    assert 'kind = "docker"' in (config.parent / "conf.d" / "engines.toml").read_text()
    # It stays when nothing of it is here any more.
    programs.clear()
    assert run([*options(config), "--yes"]) == 0
    assert capsys.readouterr().out.count("is up to date") == 2


def test_without_systemd_there_is_no_drop_in(config, programs, capsys, monkeypatch):
    programs.append("dockerd")
    real = init.os.path.isdir
    monkeypatch.setattr(init.os.path, "isdir", lambda path: path != "/run/systemd/system" and real(path))
    assert run(["init", "--config", str(config), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert [Path(file["path"]).name for file in answer["files"]] == ["engines.toml"]
    assert "no drop-in is needed" in answer["notes"][0]
    assert (answer["is_written"], answer["next"]) == (False, [])


def test_a_missing_configuration_is_made(tmp_path, programs, capsys, monkeypatch):
    programs.append("dockerd")
    host = open_hierarchies(make_v2_host(tmp_path, {}))
    monkeypatch.setattr(mounts, "open_hierarchies", lambda _: host)  # this host may have no cgroups
    path = tmp_path / "etc" / "cpumond.toml"
    assert run([*options(path), "--yes"]) == 0
    assert path.read_text() == init.MAIN_FILE
    capsys.readouterr()
    assert run(["check-config", str(path)]) == 0
    text = capsys.readouterr().out
    assert re.search(r"\d sources?, mode shadow", text)  # engines of the host are found, too
    told = r"Limits may be written of jobs of docker\b.*, wherever they are, nowhere else: managed_roots is empty\."
    assert re.search(told, text)


@pytest.mark.parametrize("is_first", [True, False])
def test_what_somebody_writes_while_the_question_is_open_stays(config, programs, capsys, monkeypatch, is_first):
    programs.append("dockerd")
    if not is_first:
        assert run([*options(config), "--yes"]) == 0
        programs.append("slurmd")
    path = config.parent / "conf.d" / "engines.toml"

    def ask(plan: init.InitPlan) -> bool:
        assert plan.due[0].path == str(path)
        path.parent.mkdir(exist_ok=True)
        path.write_text("# mine\n")
        return True

    monkeypatch.setattr(init, "_ask", ask)
    assert run(options(config)) == 73
    assert "was created or changed in the meantime and is left alone; run this again" in capsys.readouterr().err
    assert path.read_text() == "# mine\n"
    assert sorted(each.name for each in path.parent.iterdir()) == ["engines.toml"]


def seen(kind: str, is_here: bool = True) -> EngineSeen:
    return EngineSeen(kind, False, {"": EngineView(kind, {}, 1.0 if is_here else None)})


@pytest.mark.parametrize("answers", [True, False])
def test_on_a_node_of_kubernetes_the_runtime_is_asked(config, programs, capsys, monkeypatch, answers):
    runtime = config.parent / "containerd.sock"
    programs += ["kubelet", "containerd"]
    monkeypatch.setattr(engines, "CRI_SOCKETS", ("/nonexistent", str(runtime)))
    if answers:
        runtime.touch()
        view = EngineView("kubernetes", {}, 1.0, "", "containerd v2.1.9")
        monkeypatch.setattr(engines, "ask_once", lambda *_: {("kubernetes", str(runtime)): view})
    assert run([*options(config), "--yes"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    sources = config.parent / "conf.d" / "engines.toml"
    assert sources.exists() == answers
    if answers:
        assert f'kind = "kubernetes"\nsocket = "{runtime}"\n' in sources.read_text()
        assert f"containerd v2.1.9 with 0 containers ({runtime})" in text
        assert str(runtime) in (config.parent / "units" / "cpumond.service.d" / "engines.conf").read_text()
    else:
        assert "no source is written for it, because it does not answer" in text
        assert "a Secret of type kubernetes.io/service-account-token" in text


def test_sources_of_other_files_are_not_written_again():
    own = [Source(kind="docker", mode="shadow")]
    theirs = Source(kind="podman", mode="reclaim")
    config = AgentConfig(source=[theirs, *own])
    found = [seen("docker"), seen("podman"), seen("slurm"), seen("kubernetes", is_here=False)]
    assert [each.kind for each in init.choose_sources(own, config, found, [])] == ["docker", "slurm"]
    more = [Source(kind="docker", socket="/run/2.sock", mode="shadow")]
    assert init.choose_sources(own, config, [], more) == [*own, *more]
    # The same engine in a file of somebody else's and in ours: ours stays as it was.
    assert init.choose_sources(own, AgentConfig(source=[*own, *own]), [seen("docker")], []) == own
