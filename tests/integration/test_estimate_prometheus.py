"""``cpumond estimate --prometheus`` against a real Prometheus with hours of history, and odd servers."""

import json
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
from agent_process import free_port
from answering import Asked, listen
from commands import run_command
from prometheus_server import Prometheus, find_program
from waiting import wait_until

WEB = "3f9ab1c2d4e5" + "0" * 52
POD = "kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod8f0d1234_0a1b_4c2d_9e3f_123456789abc.slice"
SCRAPE_S: Final = 15
LENGTH_S: Final = 2 * 3600
GAP: Final = (3600, 4080)
"""Seconds since the begin between which Prometheus was off."""

CADVISOR: Final = {
    # Labels -> (cores used, quota in us, None for none)
    f'instance="h1:8080",id="/docker/{WEB}",name="web",image="nginx:1"': (0.5, 200_000),
    f'instance="h1:8080",id="/{POD}/cri-containerd-{"a" * 64}.scope",namespace="shop",pod="cart-0",container="cart",'
    'image="cart:2",name="x"': (0.25, 400_000),
    f'instance="h1:8080",id="/{POD}/cri-containerd-{"b" * 64}.scope",image="registry.k8s.io/pause:3.9"': (0.0, None),
    f'instance="h1:8080",id="/{POD}"': (0.25, None),
    'instance="h1:8080",id="/system.slice/cron.service"': (0.01, None),
    'instance="h1:8080",id="/system.slice"': (0.01, None),
    'instance="h1:8080",id="/"': (0.8, None),
    'instance="h2:8080",id="/system.slice/cron.service"': (0.02, None),
}


def run(url: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run_command(["estimate", "--prometheus", url, *arguments])


def list_samples(begin: int) -> Iterator[str]:
    times = [at for at in range(0, LENGTH_S + 1, SCRAPE_S) if not GAP[0] < at < GAP[1]]
    yield "# TYPE container_cpu_usage_seconds counter"
    for labels, (cores, _) in CADVISOR.items():
        yield from (
            f'container_cpu_usage_seconds_total{{{labels},cpu="cpu0{cpu}"}} {cores / 2 * at} {begin + at}'
            for cpu in (0, 1)
            for at in times
        )
    for name, is_quota in (("container_spec_cpu_quota", 1), ("container_spec_cpu_period", 0)):
        yield f"# TYPE {name} gauge"
        for labels, (_, quota) in CADVISOR.items():
            if quota is not None:
                yield from (f"{name}{{{labels}}} {quota if is_quota else 100_000} {begin + at}" for at in times)
    yield "# TYPE machine_cpu_cores gauge"
    yield from (f'machine_cpu_cores{{instance="h1:8080"}} 8 {begin + at}' for at in times)
    yield "# EOF"


@pytest.fixture(scope="module")
def prometheus() -> Iterator[Prometheus]:
    with tempfile.TemporaryDirectory(prefix="cpumond-prometheus-") as directory:
        begin = int(time.time()) // SCRAPE_S * SCRAPE_S - LENGTH_S
        history = Path(directory, "history.om")
        history.write_text("\n".join(list_samples(begin)) + "\n")
        subprocess.run(
            [find_program("promtool"), "tsdb", "create-blocks-from", "openmetrics", str(history), f"{directory}/data"],
            check=True,
            capture_output=True,
            timeout=120,
        )
        server = Prometheus(Path(directory), "global: {}\n")
        try:
            wait_until(lambda: server.get("status/buildinfo"), "Prometheus answers", 60)
            yield server
        finally:
            server.stop()


@pytest.mark.prometheus
def test_history_of_containers(prometheus: Prometheus, tmp_path: Path) -> None:
    config = tmp_path / "jobs.toml"
    url = f"http://127.0.0.1:{prometheus.port}"
    result = run(url, "--since", "2h", "--step", "20s", "--json", "--write", str(config))
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    rows = {(row["host"], row["name"]): row for row in found["workloads"]}
    assert set(rows) == {
        ("h1:8080", "web"), ("h1:8080", "shop/cart-0/cart"), ("h1:8080", "cron.service"), ("h2:8080", "cron.service"),
    }  # fmt: skip
    web, cart = rows["h1:8080", "web"], rows["h1:8080", "shop/cart-0/cart"]
    assert (web["kind"], web["cgroup"], web["is_limited"]) == ("docker", f"docker/{WEB}", True)
    assert (cart["kind"], cart["detail"]) == ("kubernetes", "burstable")
    assert web["used_cores"] == pytest.approx(0.5, rel=0.01)
    assert web["used_cpu_s"] == pytest.approx(0.5 * web["watched_s"], rel=0.01)
    assert (web["ordered_cores"], cart["ordered_cores"]) == (2.0, 4.0)
    assert rows["h1:8080", "cron.service"]["ordered_cores"] == 8.0
    assert rows["h1:8080", "cron.service"]["is_limited"] is False
    assert rows["h2:8080", "cron.service"]["is_limited"] is None
    assert rows["h2:8080", "cron.service"]["used_cores"] == pytest.approx(0.02, rel=0.01)
    for rule in ("document", "peak"):
        assert web["rules"][rule]["reclaimable_cores"] == pytest.approx(1.0, rel=0.02)
        assert cart["rules"][rule]["reclaimable_cores"] == pytest.approx(3.0, rel=0.02)
    assert found["resolution_s"] == 30.0
    assert web["missing_s"] == pytest.approx(GAP[1] - GAP[0], abs=60)
    assert web["watched_s"] + web["missing_s"] == pytest.approx(LENGTH_S, abs=120)
    notes = " ".join(found["notes"])
    assert "scraped every 15s, so the step is 30s" in notes
    assert "4 workloads have gaps in the history; gaps are left out" in notes
    assert "1 workload has no limit, and no machine_cpu_cores says" in notes
    assert found["confidence"] == "medium"
    assert found["total_limited"]["ordered_cores"] == pytest.approx(6.0 * web["watched_s"] / found["watched_s"])
    checked = run_command(["check-config", "--config", str(config)])
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert 'pattern = "docker/[0-9a-f][0-9a-f]*"' in config.read_text()


@pytest.mark.prometheus
def test_what_is_not_there_is_said(prometheus: Prometheus) -> None:
    url = f"http://127.0.0.1:{prometheus.port}"
    for arguments, said in (
        (["--metrics", "cpumond"], "has no cpumond_job_cpu_seconds_total in the last 1 d"),
        (["--match", 'instance="h9"'], "has no container_cpu_usage_seconds_total nor cpumond_job_cpu_seconds_total"),
        (["--match", 'instance="h9'], "Prometheus answered with an error (HTTP status 400): "),
    ):
        result = run(url, *arguments)
        assert (result.returncode, result.stdout) == (69, "")
        assert said in result.stderr
        assert result.stderr.count("\n") == 1
    result = run(url, "--since", "2h", "--match", 'instance="h2:8080"')
    assert result.returncode == 0
    assert "unknown" in result.stdout


class OddServer:
    """Answers each request with ``status`` and ``body``, said to be packed as ``encoding``; keeps the headers."""

    def __init__(self) -> None:
        self.status, self.body, self.encoding = 200, b"", ""
        self.url = ""
        self.seen: list[Any] = []

    def answer(self, asked: Asked) -> None:
        self.seen.append(asked.headers)
        asked.reply(self.status, self.body, **({"content-encoding": self.encoding} if self.encoding else {}))


@pytest.fixture
def odd() -> Iterator[OddServer]:
    server = OddServer()
    with listen(server.answer) as server.url:
        yield server


def test_a_prometheus_that_is_away_is_said() -> None:
    url = f"http://127.0.0.1:{free_port()}"
    result = run(url)
    assert (result.returncode, result.stdout) == (69, "")
    assert result.stderr.startswith(f"cpumond: no Prometheus answers on {url} (")
    assert result.stderr.endswith("give --prometheus its address\n")


@pytest.mark.parametrize(
    ("status", "body", "code", "said"),
    [
        (401, b"Unauthorized", 77, "requires a token; give it one with --token-file (HTTP status 401)"),
        (403, b"", 77, "requires a token"),
        (302, b"", 69, "there is no Prometheus at this address (HTTP status 302); is a path missing?"),
        (404, b"404 page not found", 69, "there is no Prometheus at this address"),
        (503, b"Service Unavailable", 69, "Prometheus answered with an error (HTTP status 503)"),
        (422, b'{"status":"error","error":"too many\\nsamples"}', 69, "(HTTP status 422): too many samples"),
        (200, b'{"status":"error","error":"odd"}', 69, "Prometheus answered with an error (HTTP status 200): odd"),
        (200, b"<html>", 69, "the answer cannot be decoded: "),
        (200, b'{"status":"success"}', 69, "the answer cannot be decoded: it has no data"),
        (200, b'{"status":"success","data":{"result":[{"metric":{},"values":[[1,"x"]]}]}}', 69, "is no number"),
        (200, b'{"status":"success","data":{"result":[]}}', 69, "has no container_cpu_usage_seconds_total nor "),
        (200, b"[" * 100_000, 69, "the answer cannot be decoded: "),
    ],
)  # fmt: skip
def test_odd_answers_are_one_sentence(odd: OddServer, status: int, body: bytes, code: int, said: str) -> None:
    odd.status, odd.body = status, body
    result = run(odd.url)
    assert (result.returncode, result.stdout) == (code, "")
    assert said in result.stderr
    assert result.stderr.count("\n") == 1


def test_an_answer_that_is_not_packed_as_it_says_is_one_sentence(odd: OddServer) -> None:
    odd.body, odd.encoding = b"hello", "gzip"
    result = run(odd.url, "--match", f'instance=~"{"x" * 100_000}"')
    assert (result.returncode, result.stdout) == (69, "")
    assert result.stderr.startswith(f"cpumond: {odd.url}: the connection to Prometheus failed: ")
    assert odd.seen[-1]["content-type"] == "application/x-www-form-urlencoded", "too long for an address"
    assert result.stderr.count("\n") == 1


def test_the_token_is_sent_and_never_shown(odd: OddServer, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("s3cret-token\n")
    token.chmod(0o600)
    odd.status, odd.body = 401, b'{"status":"error","error":"s3cret-token is wrong"}'
    result = run(odd.url, "--token-file", str(token))
    assert result.returncode == 77
    assert "refuses the token of --token-file (HTTP status 401: ... is wrong)" in result.stderr
    assert "s3cret" not in result.stderr
    assert odd.seen[0]["authorization"] == "Bearer s3cret-token"
    token.chmod(0o644)
    result = run(odd.url, "--token-file", str(token))
    assert result.returncode == 78
    assert "others than its owner have rights to it" in result.stderr
