"""The client of Docker and Podman against answers that a good engine does not give.

What good ones answer is tested with real ones, in ``tests/integration/test_container_sources.py``. Here a small server
on a unix socket gives the answers.
"""

import asyncio
import contextlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from cpumond.host.engine import containers, http
from cpumond.host.engine.containers import Container, ContainerEngine, find_owner, read_order
from cpumond.host.engine.model import MAX_LABEL, EngineError, EngineReply

ID = "4f" * 32
OTHER = "ab" * 32


class Server:
    """Answers by path; what is not in it is answered with ``status``. ``None``: the request is never answered."""

    status = b"404 Not Found"

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        self.answers: dict[str, bytes | None] = {
            "/version": b'{"Version": "20.10"}',
            "/containers/json": json.dumps([{"Id": ID, "Names": ["/web"]}]).encode(),
            f"/containers/{ID}/json": describe(),
        }
        self.events: asyncio.Queue[bytes] = asyncio.Queue()
        self.asked: list[str] = []
        self._serving: set[asyncio.Task[Any]] = set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._serving.add(task)
        # One that is accepted after ``close`` ends with its loop, and must not be awaited in the next one.
        task.add_done_callback(self._serving.discard)
        ends = (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError)
        with contextlib.suppress(*ends), contextlib.closing(writer):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                path = head.split(b" ")[1].decode().partition("?")[0]
                self.asked.append(path)
                if path == "/events":
                    writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
                    while event := await self.events.get():
                        writer.write(b"%x\r\n%s\r\n" % (len(event), event))
                    break
                body = self.answers.get(path, b"")
                if body is None:
                    await asyncio.sleep(1000)
                status = b"200 OK" if path in self.answers else self.status
                writer.write(b"HTTP/1.1 %s\r\nContent-Length: %d\r\n\r\n%s" % (status, len(body or b""), body or b""))

    async def close(self) -> None:
        for task in self._serving:
            task.cancel()
        await asyncio.gather(*self._serving, return_exceptions=True)


def describe(**more: Any) -> bytes:
    """An answer about one container, whose first process is this one."""
    known: dict[str, Any] = {
        "Id": ID, "Name": "/web", "State": {"Running": True, "Pid": os.getpid()},
        "Config": {"Image": "nginx:1", "Labels": {}}, "HostConfig": {"NanoCpus": 1500000000},
    }  # fmt: skip
    return json.dumps({**known, **more}).encode()


@pytest.fixture
def server(tmp_path: Path) -> Server:
    return Server(tmp_path / "engine.sock")


@pytest.fixture(autouse=True)
def cgroup(monkeypatch: pytest.MonkeyPatch) -> dict[int, str]:
    """Process -> the cgroup that the kernel says it is in."""
    known = {os.getpid(): f"docker/{ID}"}
    monkeypatch.setattr(
        containers,
        "find_engine_cgroup",
        lambda pid, job_id, _: path if job_id in (path := known.get(pid, "")) else None,
    )
    # As if root ran the engine: that of another user may name containers below user.slice alone.
    is_root = os.geteuid() == 0
    monkeypatch.setattr(containers, "find_owner", lambda path: find_owner(path) if is_root else 0)
    return known


def watch(
    server: Server,
    script: Callable[[list[EngineReply]], bool],
    kind: str = "docker",
    owner: int | None = None,
    engine: ContainerEngine | None = None,
) -> str:
    """Have a client watch until ``script`` says of its answers that it is enough; why it ended, "" then."""

    async def run() -> str:
        server.events = asyncio.Queue()
        listening = await asyncio.start_unix_server(server.serve, server.path)
        if owner is not None:
            os.chown(server.path, owner, -1)
        answers: list[EngineReply] = []
        enough, nudged = asyncio.Event(), asyncio.Event()

        def publish(answer: EngineReply) -> None:
            answers.append(answer)
            if script(answers):
                enough.set()

        client = engine or ContainerEngine(kind, server.path, 1)
        task = asyncio.create_task(client.watch(publish, nudged))
        waiting = asyncio.create_task(enough.wait())
        async with asyncio.timeout(30):
            await asyncio.wait({task, waiting}, return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        listening.close()
        why = ""
        task.cancel()
        try:
            await task
        except asyncio.CancelledError:
            pass
        except EngineError as error:
            why = str(error)
        await server.close()
        await listening.wait_closed()
        return why

    return asyncio.run(run())


def watch_once(server: Server, **options: Any) -> EngineReply:
    found: list[EngineReply] = []
    assert watch(server, lambda answers: bool(found.append(answers[-1]) or True), **options) == ""
    return found[-1]


def test_a_container_as_a_job(server):
    labels = {"com.docker.compose.project": "shop", "com.docker.compose.service": "web", "other": "x"}
    server.answers[f"/containers/{ID}/json"] = describe(Config={"Image": "nginx:1", "Labels": labels})
    answer = watch_once(server)
    assert (answer.title, answer.notes) == ("docker 20.10", ())
    job = answer.jobs[0]
    assert (job.job_id, job.name, job.path, job.group) == (ID, "web", f"docker/{ID}", "shop")
    assert (job.ordered_cores, job.reports_request) == (1.5, True)
    assert job.labels == {"name": "web", "image": "nginx:1", "project": "shop", "service": "web"}


@pytest.mark.parametrize(("given", "cores"), [
    ({"NanoCpus": 500000000}, 0.5),
    ({"NanoCpus": 10**9, "CpuQuota": 5, "CpuPeriod": 10}, 1.0),
    ({"CpuQuota": 25000, "CpuPeriod": 50000}, 0.5),
    ({"CpuQuota": 25000}, 0.25),
    ({"CpuQuota": -1, "CpuPeriod": 50000}, None),
    ({"NanoCpus": 0}, None),
    ({}, None),
    ({"NanoCpus": -5, "CpuQuota": -5}, None),
])  # fmt: skip
def test_what_it_ordered(given, cores):
    assert read_order(msgspec.convert(given, containers._HostConfig)) == cores


def test_texts_of_users_are_cut_and_printable(server):
    labels = {"com.docker.compose.project": "a\nb\x1b[31m", "com.docker.compose.service": "s" * 5000}
    server.answers[f"/containers/{ID}/json"] = describe(Name="/w\x00eb", Config={"Image": "i" * 500, "Labels": labels})
    job = watch_once(server).jobs[0]
    assert job.name == "w eb"
    assert job.group == job.labels["project"] == "a b [31m"
    assert len(job.labels["service"]) == len(job.labels["image"]) == MAX_LABEL


def test_what_is_not_used_of_an_answer_is_not_kept(server, monkeypatch):
    kept: list[Container] = []
    find = containers.shorten
    monkeypatch.setattr(containers, "shorten", lambda found: kept.append(find(found)) or kept[-1])
    large = {f"label{number}": "x" * 1000 for number in range(1000)}
    config = {"Image": "i" * 10**6, "Labels": {**large, "com.docker.compose.project": "p" * 10**6}}
    host_config = {"CpusetCpus": "0," * 10**6}
    server.answers[f"/containers/{ID}/json"] = describe(Name="n" * 10**6, Config=config, HostConfig=host_config)
    assert watch_once(server).jobs[0].group == "p" * MAX_LABEL
    assert len(msgspec.json.encode(kept[0])) < 10 * MAX_LABEL


def test_nor_are_pods_of_others_and_long_names_of_pods(server):
    pods = [{"Id": ID, "PodName": "p\n" * 10**6}, *({"Id": f"{number}", "PodName": "x"} for number in range(1000))]
    server.answers["/v4.0.0/libpod/containers/json"] = json.dumps(pods).encode()
    engine = ContainerEngine("podman", server.path, 1)
    assert watch_once(server, engine=engine).jobs[0].group == "p " * (MAX_LABEL // 2)
    assert engine._pods == {ID: "p " * (MAX_LABEL // 2)}


def test_a_container_whose_process_is_another_ones_is_not_named(server, cgroup):
    cgroup[os.getpid()] = f"docker/{OTHER}"
    answer = watch_once(server)
    assert answer.jobs == ()
    assert answer.notes == ("docker: container 'web' is reported in a cgroup without its id in the path; ignored",)


def test_the_service_of_a_user_speaks_for_the_users_own_cgroups_only(server, cgroup):
    if os.geteuid() != 0:
        pytest.skip("only root can give a socket to another user")
    server.answers["/v4.0.0/libpod/containers/json"] = b"[]"
    assert watch_once(server, kind="podman", owner=1000).jobs == ()
    cgroup[os.getpid()] = own = f"user.slice/user-1000.slice/user@1000.service/user.slice/libpod-{ID}.scope"
    assert [job.path for job in watch_once(server, kind="podman", owner=1000).jobs] == [own]


@pytest.mark.parametrize(
    "given",
    [{"State": {"Running": False, "Pid": 0}}, {"State": {"Running": True, "Pid": -1}}, {"Id": OTHER}, None],
    ids=["ended", "no process", "another one", "ended since it was listed"],
)
def test_one_that_does_not_run_is_left_out(server, given):
    if given is None:
        del server.answers[f"/containers/{ID}/json"]
    else:
        server.answers[f"/containers/{ID}/json"] = describe(**given)
    answer = watch_once(server)
    assert (answer.jobs, answer.notes) == ((), ())


def list_two(server: Server) -> None:
    server.answers["/containers/json"] = json.dumps([{"Id": OTHER}, {"Id": ID}]).encode()


@pytest.mark.parametrize("status", [b"500 Error", b"403 Forbidden", b"204 No", b"301 Moved\r\nLocation: http://x/"])
def test_one_that_the_engine_cannot_describe_leaves_the_others_their_names(server, monkeypatch, status):
    list_two(server)
    monkeypatch.setattr(Server, "status", status)
    answer = watch_once(server)
    assert [job.name for job in answer.jobs] == ["web"]
    told = f"was answered with status {status[:3].decode()}; ignored"
    assert answer.notes == (f"docker: {server.path}: /containers/{OTHER}/json {told}",)


@pytest.mark.parametrize("body", [b'{"Id": "a", "State": {"Pid": "1"}}', b" " * (2 << 20)])
def test_one_with_an_unknown_description_leaves_the_others_their_names(server, monkeypatch, body):
    monkeypatch.setattr(http, "MAX_ANSWER_BYTES", 1 << 20)
    list_two(server)
    server.answers[f"/containers/{OTHER}/json"] = body
    found: list[EngineReply] = []

    def script(answers: list[EngineReply]) -> bool:
        found.append(answers[-1])
        server.events.put_nowait(json.dumps({"Action": "update", "Actor": {"ID": ID}}).encode() + b"\n")
        return len(answers) > 2

    assert watch(server, script) == ""
    assert [job.name for job in found[-1].jobs] == ["web"]
    assert len(found[-1].notes) == 1
    assert f"/containers/{OTHER}/json is " in found[-1].notes[0]
    assert server.asked.count(f"/containers/{OTHER}/json") == 1, "it is left alone for a time"


@pytest.mark.parametrize("given", [
    {"CpuQuota": 100000, "CpuPeriod": -5}, {"NanoCpus": 1}, {"CpuQuota": 5, "CpuPeriod": 10**6},
    {"NanoCpus": 10**400}, {"CpuQuota": 10**18},
])  # fmt: skip
def test_an_order_that_cannot_be_is_none(server, given):
    server.answers[f"/containers/{ID}/json"] = describe(HostConfig=given)
    answer = watch_once(server)
    assert answer.jobs == ()
    (note,) = answer.notes
    assert note.startswith("docker: container 'web': its CPU limit of ")
    assert note.endswith(" cores is impossible; ignored")


def test_one_that_hangs_leaves_the_others_their_names(server, monkeypatch):
    list_two(server)
    server.answers[f"/containers/{OTHER}/json"] = None
    monkeypatch.setattr(http, "ANSWER_TIMEOUT_S", 0.5)
    engine, found = ContainerEngine("docker", server.path, 1), []
    for _ in range(2):
        assert "no response from" in watch(server, lambda _: True, engine=engine)
    assert watch(server, lambda answers: bool(found.append(answers[-1]) or True), engine=engine) == ""
    assert [job.name for job in found[-1].jobs] == ["web"]
    assert f"no response about container {OTHER[:12]}" in found[-1].notes[0]
    # It is asked about again as soon as something happens to it.
    server.answers[f"/containers/{OTHER}/json"] = describe(Id=OTHER, State={"Running": False})

    def script(answers: list[EngineReply]) -> bool:
        if len(answers) == 1:
            server.events.put_nowait(json.dumps({"Action": "die", "Actor": {"ID": OTHER}}).encode() + b"\n")
        return not answers[-1].notes

    assert watch(server, script, engine=engine) == ""


def test_events_without_end_are_the_end_of_the_watch(server, monkeypatch):
    monkeypatch.setattr(containers, "MAX_CONTAINERS", 3)

    def list_events(*names: str) -> bytes:
        return b"".join(json.dumps({"Action": "die", "Actor": {"ID": name}}).encode() + b"\n" for name in names)

    odd = list_events(*(f"no id {number}" for number in range(9)), ID)
    many = list_events(*(f"{number:064x}" for number in range(9)))

    def script(answers: list[EngineReply]) -> bool:
        server.events.put_nowait(odd if len(answers) == 1 else many)
        return len(answers) > 9

    assert "it reports events of more containers" in watch(server, script)


def test_whose_a_socket_is(tmp_path):
    (tmp_path / "a.sock").touch()
    assert find_owner(f"{tmp_path}/a.sock") == os.geteuid()
    # A link in a user's folder may lead to the socket of root.
    assert find_owner("/run/user/1000/podman/podman.sock") == 1000


def test_an_id_that_is_none_is_never_asked_about(server):
    server.answers["/containers/json"] = json.dumps([{"Id": "../../images"}, {"Id": ID}]).encode()
    assert len(watch_once(server).jobs) == 1
    assert not any("images" in path for path in server.asked)


@pytest.mark.parametrize(("path", "body", "words"), [
    ("/containers/json", b'[{"Id": 1}]', "/containers/json is invalid: Expected `str`"),
    ("/version", b" " * 200, "/version is invalid"),
    ("/version", b"\xff", "/version is invalid"),
    ("/version", b"[" * 100_000, "/version is invalid"),
    ("/version", None, "/version was answered with status 404"),
])  # fmt: skip
def test_an_answer_that_is_none_ends_the_watch(server, path, body, words):
    if body is None:
        del server.answers[path]
    else:
        server.answers[path] = body
    assert watch(server, lambda _: False).startswith(f"docker: {server.path}: {words}")


def test_an_engine_that_does_not_answer_is_away_after_a_time(server, monkeypatch):
    monkeypatch.setattr(containers, "ANSWER_TIMEOUT_S", 0.05)
    server.answers["/containers/json"] = None
    assert watch(server, lambda _: False) == f"docker: no response from {server.path} (none within 0.05 s)"


def test_an_event_has_the_container_looked_at_again(server):
    def script(answers: list[EngineReply]) -> bool:
        if len(answers) == 1:
            server.answers[f"/containers/{ID}/json"] = describe(HostConfig={"NanoCpus": 700000000})
            for event in (
                b"",
                b"nonsense",
                b'{"Actor": {"ID": ' + b"[" * 100_000,
                json.dumps({"Action": "exec_create: sh", "Actor": {"ID": ID}}).encode(),
                json.dumps({"Action": ["odd"], "Actor": 7}).encode(),
                json.dumps({"Action": "update", "Actor": {"ID": ID}}).encode(),
            ):
                server.events.put_nowait(event + b"\n")
        return answers[-1].jobs[0].ordered_cores == 0.7

    assert watch(server, script) == ""


def test_the_end_of_events_is_the_end_of_the_engine(server):
    assert "closed the connection" in watch(server, lambda _: bool(server.events.put_nowait(b"")))
