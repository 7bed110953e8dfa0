"""``cpumond init`` and ``doctor`` with real engines: what is found, what is written, and that the agent lives by it."""

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from agent_process import AgentProcess
from commands import run_command
from engines import Dockerd, Podman
from test_control_commands import run_as_nobody
from test_every_command import on_terminal
from waiting import wait_until

from cpumond.cli.agent.init_files import MARK, is_ours

pytestmark = pytest.mark.cgroup


class Host:
    def __init__(self, directory: Path, *sockets: str) -> None:
        self.directory = directory
        self.agent = AgentProcess(directory)
        self.config = self.agent.write_config("")
        self.sources = directory / "conf.d" / "engines.toml"
        self.drop_in = directory / "units" / "cpumond.service.d" / "engines.conf"
        self.options = ["--config", str(self.config), "--unit-dir", str(directory / "units")]
        for each in sockets:
            self.options += ["--socket", each]

    def init(self, *arguments: str, code: int = 0) -> str:
        done = run_command(["init", *self.options, *arguments])
        assert done.returncode == code, done.stdout + done.stderr
        self.errors = done.stderr
        return done.stdout

    def at_terminal(self, answer: str) -> str:
        shown, code = on_terminal(["init", *self.options], 80, dict(os.environ), typed=f"{answer}\n")
        assert code == 0, shown
        return shown

    def doctor(self) -> dict[str, list[dict[str, str]]]:
        done = self.agent.run("doctor", "--json")
        found: dict[str, list[dict[str, str]]] = {}
        for each in json.loads(done.stdout)["findings"]:
            found.setdefault(each["check"], []).append(each)
        return found


@pytest.fixture(scope="module")
def docker() -> Iterator[Dockerd]:
    engine = Dockerd()
    try:
        engine.start()
        engine.run("web", "--cpus=1.5")
        engine.run("batch")
        yield engine
    finally:
        engine.close()


@pytest.fixture
def host(tmp_path: Path, docker: Dockerd) -> Iterator[Host]:
    found = Host(tmp_path, f"docker={docker.socket_path}")
    yield found
    found.agent.close()


def test_says_what_it_found_and_writes_nothing_without_a_terminal(host: Host, docker: Dockerd) -> None:
    text = host.init()
    version = docker.get("/version").json()["Version"]
    assert f"  dockerd {version} with " in text
    assert "managed, in shadow mode at first: 1 container with a CPU limit (web)" in text
    assert "only observed: 1 container without a CPU limit (batch)" in text
    assert "Nothing is written: there is no terminal to ask at; `cpumond init --yes` writes it." in text
    assert f'  socket = "{docker.socket_path}"' in text
    assert f"  BindReadOnlyPaths=-{docker.socket_path}" in text
    assert not host.sources.parent.exists()
    assert not host.drop_in.exists()


OTHERS = "".join(f'[[source]]\nkind = "{kind}"\nmode = "shadow"\n' for kind in ("podman", "slurm", "kubernetes"))
"""Sources for what a neighbouring test may start between two runs: what is configured is not looked for."""


def test_writes_once_and_a_second_time_changes_nothing(host: Host) -> None:
    host.agent.write_config(OTHERS)
    text = host.init("--yes")
    assert "systemctl daemon-reload && systemctl restart cpumond" in text
    assert [is_ours(path.read_text()) for path in (host.sources, host.drop_in)] == [True, True]
    before = [(path.read_bytes(), path.stat().st_mtime_ns) for path in (host.sources, host.drop_in)]
    text = host.init("--yes")
    assert text.count("is up to date") == 2
    assert "systemctl" not in text.partition("already")[2]
    assert [(path.read_bytes(), path.stat().st_mtime_ns) for path in (host.sources, host.drop_in)] == before


def test_what_it_wrote_passes_and_the_agent_shows_containers_by_name(host: Host) -> None:
    host.init("--yes")
    checked = host.agent.run("check-config")
    assert checked.returncode == 0
    assert "Limits may be written of jobs of docker" in checked.stdout
    assert "no cgroup will ever be written" not in checked.stdout
    host.agent.start()

    def jobs() -> dict[str, Any]:
        return {job["job_id"]: job for job in host.agent.get("/v1/status")["jobs"]}

    wait_until(lambda: {"web", "batch"} <= jobs().keys(), "the agent knows both containers", 60)
    assert {jobs()[name]["mode"] for name in ("web", "batch")} == {"shadow"}
    assert (jobs()["web"]["cpu_limit"], jobs()["batch"]["unlimited"]) == (pytest.approx(1.5), True)
    findings = host.doctor()
    (engine,) = [each for each in findings["engine docker"] if each["level"] == "ok"]
    assert engine["text"].endswith("it answers")
    assert "web" in findings["source 1"][0]["text"]
    assert "1 container without a CPU limit (batch)" in findings["source 1"][0]["text"]
    assert findings["managed_roots"][0]["level"] == "ok"
    assert not [each for each in findings["other writers"] if "dockerd" in each["text"] and each["level"] != "ok"]
    # Its sandbox is none: nothing is hidden from an agent that was started by hand.
    assert not [each for each in findings["engine docker"] if "hidden" in each["text"]]


def test_asks_at_a_terminal(host: Host) -> None:
    host.at_terminal("n")
    assert not host.sources.exists()
    text = host.at_terminal("y")
    assert f"written: {host.sources}, {host.drop_in}" in " ".join(text.split())
    assert host.sources.read_text().startswith(MARK)


def test_a_file_of_somebody_else_stays(host: Host) -> None:
    host.sources.parent.mkdir()
    host.sources.write_text('[[source]]\nkind = "static"\npattern = "jobs/a"\n')
    text = host.init("--yes", code=73)
    assert host.sources.read_text() == '[[source]]\nkind = "static"\npattern = "jobs/a"\n'
    assert 'kind = "docker"' in text
    assert f"{host.sources}: was not written by `cpumond init`" in host.errors
    assert is_ours(host.drop_in.read_text())


def test_json_says_the_same_and_writes_with_yes_only(host: Host, docker: Dockerd) -> None:
    answer = json.loads(host.init("--json"))
    (engine,) = [each for each in answer["engines"] if each["kind"] == "docker"]
    assert (engine["jobs"]["managed"], engine["jobs"]["unlimited"]) == (["web"], ["batch"])
    assert engine["sockets"][str(docker.socket_path)]["problem"] == ""
    assert (answer["is_written"], host.sources.exists()) == (False, False)
    answer = json.loads(host.init("--json", "--yes"))
    assert (answer["is_written"], host.sources.exists()) == (True, True)
    assert {file["state"] for file in answer["files"]} == {"new"}


def test_an_ordinary_user_is_told_which_right_is_missing(host: Host, docker: Dockerd) -> None:
    docker.directory.chmod(0o711)
    docker.socket_path.chmod(0o660)
    options = ["--config", "/nonexistent/cpumond.toml", "--unit-dir", "/nonexistent/units", *host.options[4:]]
    done = run_as_nobody("init", *options)
    assert done.returncode == 0, done.stderr
    assert f"may not open {docker.socket_path} (of root:root, mode 0660)" in done.stdout
    assert "run this as root; the service has the right (CAP_DAC_OVERRIDE)" in done.stdout
    assert done.stderr == ""


def test_podman(tmp_path: Path) -> None:
    with Podman() as engine:
        engine.run("cache", "--cpus=0.5")
        engine.run("idle")
        host = Host(tmp_path, f"podman={engine.socket_path}")
        answer = json.loads(host.init("--json", "--yes"))
        (found,) = [each for each in answer["engines"] if each["kind"] == "podman"]
        assert "cache" in found["jobs"]["managed"]
        assert "idle" in found["jobs"]["unlimited"]
        engine.terminate(signal.SIGTERM)
        findings = host.doctor()["engine podman"]
        assert [each for each in findings if "no response from" in each["text"] and "podman.socket" in each["advice"]]
