"""A real Prometheus server as a process of its own, asked over its query API."""

import shutil
import subprocess
from pathlib import Path
from typing import Any

import httpx2
import pytest
from agent_process import free_port
from waiting import wait_until


def find_program(name: str) -> str:
    """The path of ``prometheus`` or ``promtool``, else the test is skipped."""
    path = shutil.which(name)
    if path is None:
        pytest.skip(f"needs {name} (apt-get install --no-install-recommends prometheus)")
    return path


class Prometheus:
    """A server of our own on a free loopback port; its configuration and storage are in ``directory``."""

    def __init__(self, directory: Path, config: str) -> None:
        self.port = free_port()
        self.log_path = directory / "prometheus.log"
        config_path = directory / "prometheus.yml"
        config_path.write_text(config, encoding="utf-8")
        with open(self.log_path, "wb") as log:
            self._process = subprocess.Popen(
                [
                    find_program("prometheus"),
                    f"--config.file={config_path}",
                    f"--storage.tsdb.path={directory / 'data'}",
                    f"--web.listen-address=127.0.0.1:{self.port}",
                    "--log.level=warn",
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        self._client = httpx2.Client(
            base_url=f"http://127.0.0.1:{self.port}", trust_env=False, verify=False, timeout=250
        )

    def get(self, path: str, **params: str) -> Any:
        """The ``data`` of an answer of ``/api/v1``; None while the server starts."""
        assert self._process.poll() is None, f"prometheus ended: {self.log()}"
        try:
            answer = self._client.get(f"/api/v1/{path}", params=params)
        except httpx2.TransportError:
            return None
        if answer.status_code == 503:
            return None
        content: dict[str, Any] = answer.json()
        assert content["status"] == "success", (params, content)
        return content["data"]

    def query(self, expression: str) -> list[tuple[dict[str, str], float]]:
        """Labels and value of each series that an expression gives now; nothing while the server starts."""
        data = self.get("query", query=expression)
        return [] if data is None else [(row["metric"], float(row["value"][1])) for row in data["result"]]

    def wait_for(self, expression: str) -> float:
        """The one value of an expression, when there is one."""
        rows = wait_until(lambda: self.query(expression), f"Prometheus has a value for {expression}")
        ((_, value),) = rows
        return value

    def log(self) -> str:
        return self.log_path.read_text()

    def stop(self) -> None:
        self._client.close()
        self._process.terminate()
        try:
            self._process.wait(100)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
