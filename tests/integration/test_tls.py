"""TLS of the scheduler: certificates that are trusted and others, new ones without a restart, agents and commands."""

import contextlib
import os
import signal
import socket
import ssl
import subprocess
import warnings
from pathlib import Path
from typing import Any

import httpx2
import psutil
import pytest
from agent_process import AgentProcess
from certificates import Authority, openssl
from commands import run_command
from scheduler_process import PlayedNode, SchedulerProcess, clean_environment
from test_token_command import run
from waiting import wait_until


class TlsScheduler(SchedulerProcess):
    """One whose certificate an authority of the test signed."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.authority = Authority(directory)
        certificate, key = self.authority.sign("first")
        self.certificate, self.key = directory / "server.crt", directory / "server.key"
        self.install(certificate, key)
        self.write_config(api=f'certificate = "{self.certificate}"\nkey = "{self.key}"')

    def install(self, certificate: Path, key: Path) -> None:
        """Let these be the files that the configuration names."""
        for source, target in ((key, self.key), (certificate, self.certificate)):
            os.replace(source, target)

    @property
    def url(self) -> str:
        return f"https://{self.address}"

    def new_client(self) -> httpx2.Client:
        context = ssl.create_default_context(cafile=self.authority.ca_file)
        return httpx2.Client(base_url=self.url, verify=context, timeout=250, trust_env=False)

    def subject(self) -> str:
        """The name in the certificate that a new connection is shown."""
        context = ssl.create_default_context(cafile=self.authority.ca_file)
        host, _, port = self.address.rpartition(":")
        with (
            socket.create_connection((host, int(port)), 30.0) as plain,
            context.wrap_socket(plain, server_hostname=host) as wrapped,
        ):
            peer: Any = wrapped.getpeercert()
            return str(dict(part[0] for part in peer["subject"])["commonName"])


@pytest.fixture
def tls(tmp_path: Path) -> Any:
    scheduler = TlsScheduler(tmp_path)
    yield scheduler
    scheduler.close()


def test_commands_and_nodes_over_tls(tls: TlsScheduler) -> None:
    tls.start()
    [started] = tls.events("started")
    assert started["tls"] is True
    assert tls.get("me")["user"] == "root"
    node = PlayedNode(tls, "n1")
    node.register()
    assert node.beat()["accepted"]
    ca_file = str(tls.authority.ca_file)
    assert "n1" in run(tls, "", "node", "list", "--ca-file", ca_file).stdout
    url, port = "https://localhost", tls.address.rpartition(":")[2]
    words = ["node", "list", "--scheduler", f"{url}:{port}"]
    done = run_command(words, {**clean_environment(), "CPUMOND_CA_FILE": ca_file})
    assert (done.returncode, "n1" in done.stdout) == (0, True), done.stderr


def test_yt_over_tls(tls: TlsScheduler) -> None:
    tls.start()
    tls.create_pool("research")
    trusted = {"YT_PROXY": f"https://localhost:{tls.address.rpartition(':')[2]}"}
    for more, code in (({"REQUESTS_CA_BUNDLE": str(tls.authority.ca_file)}, 0), ({}, 1)):
        done = subprocess.run(
            tls.yt_command("list", "//sys/pools"), env={**tls.yt_environment(bindings=False), **trusted, **more},
            capture_output=True, text=True, timeout=100, check=False,
        )  # fmt: skip
        assert (done.returncode, done.stdout.strip()) == (code, "" if code else "research"), done.stderr


def test_what_is_not_trusted_is_one_sentence(tls: TlsScheduler) -> None:
    tls.start()
    other = Authority(tls.directory, "stranger")
    garbage = tls.directory / "garbage.pem"
    garbage.write_text("nothing")
    for arguments, code, words in (
        ((), 69, "its certificate is not trusted: "),
        (("--ca-file", str(other.ca_file)), 69, "its certificate is not trusted: "),
        (("--ca-file", str(garbage)), 78, f"--ca-file: {garbage} holds no certificate in PEM"),
        (("--ca-file", "/none"), 78, "--ca-file: /none cannot be read: No such file or directory"),
        (("--scheduler", f"http://{tls.address}"), 69, "with a certificate its address begins with https://"),
    ):
        done = run(tls, "", "node", "list", *arguments, code=code)
        assert words in done.stderr
        assert done.stderr.count("\n") == 1
    tls.install(*tls.authority.sign("elsewhere", "DNS:elsewhere.example"))
    reload(tls)
    done = run(tls, "", "node", "list", "--ca-file", str(tls.authority.ca_file), code=69)
    assert "its certificate is not valid: " in done.stderr
    assert "127.0.0.1" in done.stderr


def test_https_to_a_scheduler_without_a_certificate(scheduler: SchedulerProcess) -> None:
    scheduler.start()
    done = run(scheduler, "", "node", "list", "--scheduler", f"https://{scheduler.address}", code=69)
    assert "it does not speak TLS; its address may have to begin with http://" in done.stderr


def reload(scheduler: SchedulerProcess, event: str = "reloaded") -> dict[str, Any]:
    """SIGHUP, and what the log says about it."""
    assert scheduler.process is not None
    known = len(scheduler.events(event))
    scheduler.process.send_signal(signal.SIGHUP)
    wait_until(lambda: len(scheduler.events(event)) > known, f"the log says {event}")
    return scheduler.events(event)[-1]


def test_a_certificate_is_renewed_without_a_restart_and_a_bad_one_refused(tls: TlsScheduler) -> None:
    tls.start()
    assert tls.subject() == "first"
    assert tls.get("me")["user"] == "root"
    tls.install(*tls.authority.sign("second"))
    assert reload(tls)["certificate"] is True
    assert tls.subject() == "second"
    assert tls.get("me")["user"] == "root", "over the connection that was there before"
    _, strange = tls.authority.sign("third")
    os.replace(strange, tls.key)
    refused = reload(tls, "reload_refused")
    assert f"{tls.key}: is not the key of the certificate in {tls.certificate}" in refused["error"]
    assert tls.subject() == "second"


@pytest.mark.parametrize(
    ("break_it", "words"),
    [
        (lambda tls: tls.key.chmod(0o644), "others than its owner have rights to it (mode 0644)"),
        (lambda tls: tls.key.unlink(), "server.key: cannot be read: No such file or directory"),
        (lambda tls: tls.certificate.write_text("nothing"), "no certificate with its key in PEM"),
        (
            lambda tls: openssl(
                "ec", "-aes128", "-passout", "pass:secret", "-in", str(tls.key), "-out", str(tls.key)
            ),
            "server.key: has a passphrase",
        ),
        (
            lambda tls: tls.write_config(api=f'certificate = "{tls.certificate}"'),
            "api.key: is missing; TLS needs both api.certificate and api.key",
        ),
    ],
)  # fmt: skip
def test_files_with_which_it_does_not_start(tls: TlsScheduler, break_it: Any, words: str) -> None:
    break_it(tls)
    code, told = tls.refuse()
    assert code in (77, 78)
    assert words in told
    assert told.count("\n") == 1


def test_old_versions_of_tls_are_refused(tls: TlsScheduler) -> None:
    tls.start()
    context = ssl.create_default_context(cafile=tls.authority.ca_file)
    context.set_ciphers("ALL:@SECLEVEL=0")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        context.minimum_version = ssl.TLSVersion.TLSv1
        context.maximum_version = ssl.TLSVersion.TLSv1_1
    host, _, port = tls.address.rpartition(":")
    with socket.create_connection((host, int(port)), 30.0) as plain, pytest.raises((ssl.SSLError, ConnectionError)):
        context.wrap_socket(plain, server_hostname=host)


def test_an_agent_that_verifies_its_scheduler(tls: TlsScheduler, tmp_path: Path) -> None:
    tls.start()
    directory = tmp_path / "agent"
    directory.mkdir()
    agent = AgentProcess(directory)
    link = f'[scheduler]\nurl = "{tls.url}"\nheartbeat_period = "100ms"\nretry_max = "100ms"\n'
    stranger = Authority(tmp_path, "stranger")
    try:
        for ca_file in ("", f'ca_file = "{stranger.ca_file}"\n'):
            agent.start(f"{link}{ca_file}[resources]\ncpu = 2\n")
            wait_until(
                lambda: "its certificate is not trusted" in " ".join(agent.get("/v1/status")["problems"]),
                "it says why it does not register",
            )
            assert tls.get("nodes")["nodes"] == []
            stop(agent)
        agent.start(f'{link}ca_file = "{tls.authority.ca_file}"\n[resources]\ncpu = 2\n')
        wait_until(lambda: [node["id"] for node in tls.get("nodes")["nodes"]] == ["test-node"], "it registers")
    finally:
        stop(agent)


def stop(agent: AgentProcess) -> None:
    if agent.process is not None:
        agent.process.terminate()
        agent.process.wait(60)
        agent.process = None


def test_answers_that_nobody_reads_are_bounded(tls: TlsScheduler) -> None:
    """Beneath the encryption, too: the next answer waits until the one before was taken."""
    tls.start()
    with tls.new_client() as client:
        answer_bytes = len(client.get("/api/v1/openapi.json").content)
    process = psutil.Process(tls.pid)
    before = process.memory_info().rss
    host, _, port = tls.address.rpartition(":")
    context = ssl.create_default_context(cafile=tls.authority.ca_file)
    request = b"GET /api/v1/openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with contextlib.ExitStack() as stack:
        for _ in range(80):
            plain = stack.enter_context(socket.socket())
            plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            plain.connect((host, int(port)))
            with contextlib.suppress(OSError):
                stack.enter_context(context.wrap_socket(plain, server_hostname=host)).sendall(request * 20)
        tls.wait_updates(10)
        assert process.memory_info().rss - before < 80 * 3 * answer_bytes  # plain and encrypted, of 20 of them


def test_a_connection_that_does_not_shake_hands_is_ended(tls: TlsScheduler) -> None:
    tls.start()
    host, _, port = tls.address.rpartition(":")
    with socket.create_connection((host, int(port)), 60.0) as silent:
        assert tls.get("me")["user"] == "root"
        assert silent.recv(1) == b""


LONG_HELLO = (
    b"\x16\x03\x01\x40\x00\x01\x01\xff\x00\x03\x03" + b"h" * (16_384 - 6) + b"\x16\x03\x01\x40\x00" + b"h" * 16_384
)
"""The first records of a hello that says that it is longer."""


@pytest.mark.parametrize(("count", "sent"), [(6000, b""), (900, LONG_HELLO)])
def test_connections_that_do_not_shake_hands_are_bounded(tls: TlsScheduler, count: int, sent: bytes) -> None:
    """Whoever does shake hands is answered all the time; the oldest of the others is ended for a new one."""
    tls.start()
    process = psutil.Process(tls.pid)
    before = process.memory_info().rss
    host, _, port = tls.address.rpartition(":")
    with contextlib.ExitStack() as stack:
        for number in range(count):
            silent = stack.enter_context(socket.create_connection((host, int(port)), 60.0))
            with contextlib.suppress(OSError):
                silent.sendall(sent)
            if number % 500 == 0:
                assert tls.subject() == "first"
        assert tls.subject() == "first"
        tls.wait_updates(3)
        assert process.memory_info().rss - before < 110 * 2**20
    if not sent:
        assert {each["bound"] for each in tls.events("connections_ended")} == {"handshakes"}
