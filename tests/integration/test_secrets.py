"""A secret from the unmodified `yt` to its job, by real processes: found nowhere else (semantics.md 12.6)."""

import base64
import contextlib
import hashlib
import json
import os
import secrets
import sqlite3
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import psutil
import pytest
from scheduler_process import YT, yt_environment

from cpumond.api.endpoints import ENDPOINTS
from cpumond.cluster import Cluster
from cpumond.host.cgroup.mounts import Hierarchies

pytestmark = pytest.mark.cgroup

TOKEN = "a-token"  # noqa: S105
KEY, VALUE = f"K{secrets.token_hex(8)}Q", f"hunter2-{secrets.token_hex(8)}"
QUERIES = {
    "list_trends": "pools=p", "read_history": "kind=pool&name=p", "can": "action=use&object=p",
    "find": "name=p&kind=pool", "get_job_log": "stream=stdout",
}  # fmt: skip
WAIT_S = 100.0


class Site(Cluster):
    """A scheduler that keeps secrets, and a node that runs one job at a time."""

    def __init__(self, directory: Path) -> None:
        self.keys, self.place = directory / "keys", directory
        self._clients: list[subprocess.Popen[str]] = []
        self.keys.touch(mode=0o600)
        self.keys.write_bytes(base64.b64encode(secrets.token_bytes(32)))
        config = f'secrets_key_file = "{self.keys}"\n'
        super().__init__(directory / "cluster", cpu=2.0, token=TOKEN, scheduler_config=config, web=True)

    def begin_yt(self, *arguments: str) -> subprocess.Popen[str]:
        environment = yt_environment(self.scheduler.listen, self.place, token=TOKEN)
        command = [str(YT), *arguments]
        made = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        self._clients.append(made)
        return made

    def yt(self, *arguments: str) -> str:
        said, _ = self.begin_yt(*arguments).communicate(timeout=WAIT_S)
        return said

    def close(self) -> None:
        for each in self._clients:
            each.kill()
            each.communicate()
        super().close()

    def client(self) -> httpx2.Client:
        headers = {"authorization": f"Bearer {TOKEN}"}
        return httpx2.Client(base_url=self.url, headers=headers, trust_env=False, timeout=250)

    def running(self, operation: str) -> list[dict[str, Any]]:
        jobs = self.get(f"/api/v1/operations/{operation}/jobs")["jobs"]
        return [job for job in jobs if job["state"] == "running" and job["cgroup"]]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory, hierarchies: Hierarchies) -> Iterator[Site]:
    with Site(tmp_path_factory.mktemp("secrets")) as made:
        with made.client() as client:
            assert client.post("/api/v1/trees/default/pools", json={"name": "p"}).is_success
        yield made
    assert made.leftovers() == []


def contains_secret(text: str | bytes) -> bool:
    content = text.encode() if isinstance(text, str) else text
    return any(each in content for each in (KEY.encode(), VALUE.encode(), base64.b64encode(VALUE.encode())[:-4]))


def find_files(site: Site) -> list[Path]:
    """Files of the scheduler, the agent and their jobs that hold a secret; databases with their logs are among them."""
    roots = [Path(site.directory), *(Path(node.runtime_dir) for node in site.nodes)]
    found = []
    for path in [path for root in roots for path in root.rglob("*") if path.is_file()]:
        with contextlib.suppress(FileNotFoundError):
            if contains_secret(path.read_bytes()):
                found.append(path)
    return found


def find_processes(name: str, but: set[int]) -> dict[int, str]:
    """Those whose file ``name`` in /proc holds a secret, and their command lines."""
    found = {}
    for pid in set(psutil.pids()) - but:
        with contextlib.suppress(OSError):
            if contains_secret(Path(f"/proc/{pid}/{name}").read_bytes()):
                found[pid] = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
    return found


def find_answers(site: Site, operation: str, job: str, has_ended: bool = False) -> list[str]:
    """The requests whose answer holds a secret: all of the scheduler that read, and those of the agent."""
    names = {"tree": "default", "pool": "p", "operation": operation, "job": job, "node": "node-1"}
    found = []
    with site.client() as client:
        for endpoint in ENDPOINTS:
            if endpoint.method != "GET":
                continue
            path = f"{endpoint.path.format_map(names)}?{QUERIES.get(endpoint.name, '')}"
            answer = client.get(path)
            # Of an operation that has ended there is less to ask for.
            assert answer.is_success or endpoint.name == "forecast_operation" or has_ended, (path, answer.text)
            if contains_secret(answer.content):
                found.append(path)
        found += [path for path in ("/", "/metrics") if contains_secret(client.get(path).content)]
    own = ("/v1/status", "/v1/registered", f"/v1/jobs/{job}/explain", "/metrics")
    return found + [path for path in own if contains_secret(_ask_agent(site, path))]


def _ask_agent(site: Site, path: str) -> str:
    transport = httpx2.HTTPTransport(uds=site.nodes[0].control_socket)
    with httpx2.Client(transport=transport, base_url="http://agent", trust_env=False) as client:
        return client.get(path).text


def count_vaults(site: Site) -> int:
    path = Path(site.scheduler.directory, "state", "scheduler.db")
    with contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as database:
        (number,) = database.execute("SELECT count(*) FROM records WHERE kind = 'vault'").fetchone()
    return int(number)


def test_a_secret_is_in_the_environment_of_its_job_and_nowhere_else(
    site: Site, hierarchies: Hierarchies, tmp_path: Path
) -> None:
    """VAULT-2, VAULT-3."""
    gates = [tmp_path / name for name in ("first", "second")]
    for gate in gates:
        os.mkfifo(gate)
    digests = tmp_path / "digests"
    script = (
        # The name is in no command line as it is.
        f"name=YT_SECURE_VAULT_{KEY[:-1]}''{KEY[-1]}; "
        f'printf %s "${{!name}}" | sha256sum >> {digests}; printf %s "$YT_SECURE_VAULT" | sha256sum'
        f' >> {digests}; if mkdir {tmp_path}/one; then read x < {gates[0]}; else read x < {gates[1]}; fi'
    )  # fmt: skip
    task = f"{{main={{command={json.dumps(script)};job_count=2;cpu_limit=1.5;memory_limit=16777216}}}}"
    spec = f'{{pool=p;secure_vault={{{KEY}="{VALUE}";N=5}}}}'
    tracked = site.begin_yt("vanilla", "--tasks", task, "--spec", spec)

    def find_operation() -> str:
        found = site.get("/api/v1/operations")["operations"]
        return str(found[0]["id"]) if found else ""

    operation = site.wait(find_operation, "the operation is there")
    (job,) = site.wait(lambda: site.running(operation), "its first job runs")
    site.wait(lambda: digests.exists() and len(digests.read_text().splitlines()) == 2, "it has read its secrets")

    mine = {tracked.pid}
    pids = set(map(int, Path(hierarchies.cpu_root, job["cgroup"], "cgroup.procs").read_text().split()))
    assert find_processes("environ", mine).keys() == pids
    assert find_processes("cmdline", mine) == {}
    assert find_answers(site, operation, job["id"]) == []
    assert find_files(site) == []
    for words in (
        ("get-operation", operation),
        ("get-operation", operation, *(word for name in ("spec", "provided_spec", "full_spec", "unrecognized_spec")
                                       for word in ("--attribute", name))),
        ("list-operations",), ("get", f"//sys/operations/{operation}/@"), ("get", "//sys/scheduler/orchid/scheduler"),
        ("get-job", job["id"], operation), ("list-jobs", operation),
    ):  # fmt: skip
        said = site.yt(*words, *(() if words[0] == "list-operations" else ("--format", "json")))
        assert said
        assert not contains_secret(said), words

    site.scheduler.kill()
    site.scheduler.start()
    gates[0].write_text("go\n")
    site.wait(lambda: len(digests.read_text().splitlines()) == 4, "the second job has read its secrets")
    lines = [line.split()[0] for line in digests.read_text().splitlines()]
    whole = f'{{"{KEY}"="{VALUE}";"N"=5;}}'
    assert lines == 2 * [hashlib.sha256(each.encode()).hexdigest() for each in (VALUE, whole)]
    assert count_vaults(site) == 1
    gates[1].write_text("go\n")
    said, _ = tracked.communicate(timeout=WAIT_S)
    assert (tracked.returncode, contains_secret(said)) == (0, False), said
    assert "completed" in said
    assert (count_vaults(site), find_files(site)) == (0, [])
    assert find_answers(site, operation, job["id"], has_ended=True) == []
