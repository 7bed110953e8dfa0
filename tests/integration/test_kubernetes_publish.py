"""``cpumond kubernetes publish`` beside a real agent; a small server after the published API stands for Kubernetes."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from agent_process import AgentProcess
from answering import Asked, listen
from commands import run_command
from configs import lower, make
from kubelet_server import TOKEN
from real_cgroups import CgroupTree
from waiting import wait_until

RESOURCE = "cpumond.io/reclaimed-cpu"


class ApiServer:
    """Pods and nodes by name, two to a page; ``patches`` counts those that were taken."""

    def __init__(self) -> None:
        self.nodes: dict[str, dict[str, str]] = {}
        self.agents: dict[str, str] = {}
        self.patches = 0
        self.is_broken = False
        self.url = ""

    def answer(self, asked: Asked) -> None:
        if asked.command == "GET":
            status, content = self._list(urlsplit(asked.path), asked.headers)
        else:
            status, content = self._patch(asked.path, asked.headers, json.loads(asked.body))
        asked.reply(status, json.dumps(content).encode())

    def _list(self, url: Any, headers: Any) -> tuple[int, object]:
        if headers["Authorization"] != f"Bearer {TOKEN}" or self.is_broken:
            return 500 if self.is_broken else 401, {"kind": "Status"}
        query = {key: values[0] for key, values in parse_qs(url.query).items()}
        if url.path == "/api/v1/nodes":
            found: list[Any] = [
                {"metadata": {"name": name}, "status": {"capacity": {"cpu": "2", **more}}}
                for name, more in self.nodes.items()
            ]
        elif url.path == "/api/v1/namespaces/cpumond/pods":
            assert query["labelSelector"] == "app.kubernetes.io/component=agent"
            found = [
                {"metadata": {"name": f"cpumond-{name}"}, "spec": {"nodeName": name}, "status": {"podIP": address}}
                for name, address in self.agents.items()
            ]
            found.append({"metadata": {"name": "cpumond-new"}, "spec": {}, "status": {"phase": "Pending"}})
        else:
            return 404, {}
        begin = int(query.get("continue") or 0)
        end = begin + 2
        return 200, {"metadata": {"continue": str(end) if end < len(found) else ""}, "items": found[begin:end]}

    def _patch(self, path: str, headers: Any, body: Any) -> tuple[int, object]:
        assert headers["Content-Type"] == "application/json-patch+json"
        assert headers["Authorization"] == f"Bearer {TOKEN}"
        [change] = body
        assert (change["op"], change["path"]) == ("add", "/status/capacity/cpumond.io~1reclaimed-cpu")
        name = path.removeprefix("/api/v1/nodes/").removesuffix("/status")
        value = int(change["value"])
        # Quantities are kept in their canonical form.
        self.nodes[name][RESOURCE] = f"{value // 1000}k" if value and value % 1000 == 0 else str(value)
        self.patches += 1
        return 200, {}


@pytest.fixture
def api() -> Iterator[ApiServer]:
    server = ApiServer()
    with listen(server.answer) as server.url:
        yield server


def command(api: ApiServer, agent: AgentProcess, *more: str) -> list[str]:
    (agent.directory / "token").write_text(TOKEN)
    return [
        *(sys.executable, "-m", "cpumond", "kubernetes", "publish", "--api", api.url),
        *("--account", str(agent.directory), "--port", str(agent.port), "--period", "200ms", *more),
    ]


@pytest.mark.cgroup
def test_nodes_offer_what_their_agents_reclaimed_and_nothing_without_one(
    cgroups: CgroupTree, agent: AgentProcess, api: ApiServer, tmp_path: Path
):
    if cgroups.hierarchies.cpu_version != 1:
        pytest.skip("needs the cpu controller in a version 1 hierarchy")
    make(cgroups, "a")
    lower(agent, cgroups, "a", more="[resources]\ncpu = 4\n")
    api.nodes = {"with": {}, "without": {RESOURCE: "700"}, "never": {}, "away": {RESOURCE: "900"}}
    api.agents = {"with": "127.0.0.1", "away": "127.0.0.99"}
    output = tmp_path / "output"
    with open(output, "wb") as file:
        process = subprocess.Popen(
            command(api, agent), stdout=file, stderr=file, env={**os.environ, "PYTHONUNBUFFERED": "1"}
        )
    try:
        wait_until(lambda: api.nodes["with"].get(RESOURCE) == "1400", "the node offers what was reclaimed")
        wait_until(lambda: api.nodes["without"] == {RESOURCE: "0"}, "no agent, nothing to offer")
        wait_until(lambda: api.nodes["away"] == {RESOURCE: "0"}, "no answer, nothing to offer")
        assert api.nodes["never"] == {}, "a node that never had an agent is left alone"
        assert api.patches == 3, "only what has changed is written"
        api.is_broken = True
        wait_until(lambda: "the figures stay unchanged" in output.read_text(), "it is told once that nobody answers")
        api.is_broken = False
        agent.send_signal(signal.SIGSTOP)
        wait_until(lambda: api.nodes["with"][RESOURCE] == "0", "an agent that hangs offers nothing", 60)
        agent.send_signal(signal.SIGCONT)
        wait_until(lambda: api.nodes["with"][RESOURCE] == "1400", "it is there again")
        agent.stop(signal.SIGKILL)
        wait_until(lambda: api.nodes["with"][RESOURCE] == "0", "an agent that is gone offers nothing")
        agent.start()
        wait_until(lambda: api.nodes["with"][RESOURCE] == "1400", "it is there again")
        process.send_signal(signal.SIGTERM)
        assert process.wait(100) == 0
        assert api.nodes["with"][RESOURCE] == "0", "nothing stays behind"
    finally:
        process.kill()
        process.wait()
    said = output.read_text()
    assert said.count("the figures stay unchanged") == 1
    assert "with: cpumond.io/reclaimed-cpu none -> 1400\n" in said


def test_an_agent_whose_last_check_is_old_offers_nothing(agent: AgentProcess, api: ApiServer):
    """Its page of metrics still answers: in its place a server that says what such an agent does."""

    def answer(asked: Asked) -> None:
        asked.reply(200 if asked.path == "/metrics" else 503, b"cpumond_node_offered_cores 2.05\n")

    api.nodes, api.agents = {"old": {RESOURCE: "900"}}, {"old": "127.0.0.1"}
    with listen(answer, agent.port), subprocess.Popen(command(api, agent)) as process:
        try:
            wait_until(lambda: api.nodes["old"][RESOURCE] == "0", "an old figure is taken back")
        finally:
            process.terminate()


def test_withdrawing_takes_all_back_and_ends(agent: AgentProcess, api: ApiServer):
    api.nodes = {"a": {RESOURCE: "700"}, "b": {}, "c": {RESOURCE: "0"}}
    answer = run_command(command(api, agent, "--withdraw")[3:])
    assert (answer.returncode, answer.stderr) == (0, "")
    assert answer.stdout == "a: cpumond.io/reclaimed-cpu 700 -> 0\n"
    assert api.nodes == {"a": {RESOURCE: "0"}, "b": {}, "c": {RESOURCE: "0"}}


@pytest.mark.parametrize(
    ("address", "code", "sentence"),
    [
        ("", 64, "give it with --api https://HOST:6443"),
        ("https://127.0.0.1:1", 69, "ca.crt: No such file or directory"),
    ],
)
def test_what_is_missing_is_said_in_one_sentence(agent: AgentProcess, api: ApiServer, address, code, sentence):
    api.url = address
    environment = {key: text for key, text in os.environ.items() if not key.startswith("KUBERNETES_")}
    answer = run_command(command(api, agent, "--withdraw")[3:], environment)
    assert (answer.returncode, answer.stderr.count("\n")) == (code, 1)
    assert sentence in answer.stderr
