"""``cpumond agent`` as a real process, spoken to over its real sockets."""

from __future__ import annotations

import itertools
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx2
from commands import run_command
from waiting import wait_until

from cpumond.cluster.ports import find_range, is_free

_numbers = itertools.count(secrets.randbelow(2**16))


def free_port() -> int:
    """A TCP port of the loopback, in a part that is this process's own and that the kernel gives out to nobody."""
    first, last = find_range()
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    workers = max(int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")), worker + 1)
    part = (last - first + 1) // workers
    return next(port for number in _numbers if is_free(port := first + worker * part + number % part))


class AgentProcess:
    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.config_path = directory / "cpumond.toml"
        self.log_path = directory / "agent.log"
        self.socket_path = directory / "run" / "control.sock"
        self.port = free_port()
        self.process: subprocess.Popen[bytes] | None = None
        self.prefix: list[str] = []
        """A command that the agent is started through, for example in a mount namespace of its own."""

    def write_config(self, text: str) -> Path:
        self.config_path.write_text(
            f'node_id = "test-node"\nstate_dir = "{self.directory}/state"\nruntime_dir = "{self.directory}/run"\n'
            + text
            + ("" if "[metrics]" in text else f'\n[metrics]\nlisten = "127.0.0.1:{self.port}"\n')
        )
        return self.config_path

    def start(self, text: str | None = None, wait: bool = True) -> AgentProcess:
        if text is not None:
            self.write_config(text)
        with open(self.log_path, "ab") as log:
            self.process = subprocess.Popen(
                [*self.prefix, sys.executable, "-m", "cpumond", "agent", "--config", str(self.config_path)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        if wait:
            wait_until(self._ready, f"the agent is ready; its log: {self.log()[-2000:]}", 30)
        return self

    def _ready(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, f"the agent ended with {self.process.returncode}: {self.log()[-2000:]}"
        with socket.socket(socket.AF_UNIX) as probe:
            if probe.connect_ex(str(self.socket_path)):
                return False  # httpx2 would leave its socket to the garbage collector
        try:
            return self.get("/readyz").get("status") == "ok"
        except (httpx2.HTTPError, OSError):
            return False

    def request(self, method: str, path: str, body: Any = None) -> httpx2.Response:
        # Without `verify=False` each one would read all certificates there are, for 50 ms.
        with httpx2.Client(
            transport=httpx2.HTTPTransport(uds=str(self.socket_path), verify=False), timeout=250
        ) as client:
            return client.request(method, f"http://agent{path}", json=body)

    def get(self, path: str) -> dict[str, Any]:
        """The JSON answer of the control socket; asked again while a tick takes longer than the agent waits for it."""
        for _ in range(6):
            answer: dict[str, Any] = self.request("GET", path).json()
            if not str(answer.get("error", "")).endswith("see its log"):
                break
        return answer

    def job(self, name: str) -> dict[str, Any]:
        jobs = {job["job_id"]: job for job in self.get("/v1/status")["jobs"]}
        found: dict[str, Any] = jobs[name]
        return found

    def metrics(self) -> str:
        return httpx2.get(f"http://127.0.0.1:{self.port}/metrics", trust_env=False, verify=False, timeout=250).text

    def log(self) -> str:
        return self.log_path.read_text() if self.log_path.exists() else ""

    def events(self, name: str) -> list[dict[str, Any]]:
        """The log records of one event; a line that is not whole yet is left out."""
        lines = [line for line in self.log().splitlines(keepends=True) if line.endswith("}\n")]
        records = [json.loads(line) for line in lines if line.startswith("{")]
        return [record for record in records if record.get("event") == name]

    def send_signal(self, number: signal.Signals) -> None:
        assert self.process is not None
        os.kill(self.process.pid, number)

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        assert self.process is not None
        self.send_signal(number)
        return self.process.wait(100)

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Another command with this configuration, as in ``run("restore")``: in this process, unless it is an agent."""
        words = [*arguments, "--config", str(self.config_path)]
        if arguments[0] != "agent":
            return run_command(words)
        return subprocess.run(
            [sys.executable, "-m", "cpumond", *words], capture_output=True, text=True, timeout=250, check=False
        )

    def close(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()
