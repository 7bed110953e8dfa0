"""``cpumond scheduler`` as a real process, nodes that are played over HTTP, and the unmodified ``yt`` command line."""

from __future__ import annotations

import base64
import hashlib
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import httpx2
import pytest
from waiting import wait_until

YT = Path(sys.executable).with_name("yt")
NO_BINDINGS = """raise ModuleNotFoundError("No module named 'yt_yson_bindings'")"""
GIB = 2**30
PARALLEL = 4
"""Command lines at the same time: most of a run is the start of Python."""

T = TypeVar("T")


class SchedulerProcess:
    """Configuration, process, log and address of one scheduler; its files are in ``directory``."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.config_path = directory / "scheduler.toml"
        self.log_path = directory / "scheduler.log"
        self.state_dir = directory / "state"
        self.address = ""
        self.process: subprocess.Popen[bytes] | None = None
        self.token = ""
        self._client: httpx2.Client | None = None
        self._log_offset = 0

    def __enter__(self) -> SchedulerProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- life

    def write_config(self, text: str = "", *, api: str = "", listen: str = "127.0.0.1:0", period: str = "50ms") -> None:
        """The configuration: ``text`` are further tables and keys, ``api`` further lines of that table."""
        self.config_path.write_text(
            f'state_dir = "{self.state_dir}"\nfair_share_update_period = "{period}"\n'
            f'{text}\n[api]\nlisten = "{listen}"\n{api}\n[log]\nformat = "json"\n',
            encoding="utf-8",
        )

    def write_tokens(self, role_of: Mapping[str, str]) -> str:
        """Tokens that are called as their users. Returns the line for the table ``api``."""
        path = self.directory / "tokens"
        path.touch(mode=0o600)
        lines = (f"{user}:{hashlib.sha256(user.encode()).hexdigest()}:{role}\n" for user, role in role_of.items())
        path.write_text("".join(lines))
        return f'tokens_file = "{path}"'

    def arguments(self, *more: str) -> list[str]:
        return [sys.executable, "-m", "cpumond", "scheduler", "--config", str(self.config_path), *more]

    def start(self, *more: str) -> SchedulerProcess:
        assert self.process is None, "it runs already"
        if not self.config_path.exists():
            self.write_config()
        self._log_offset = self.log_path.stat().st_size if self.log_path.exists() else 0
        with open(self.log_path, "ab") as log:
            self.process = subprocess.Popen(
                self.arguments(*more), stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=clean_environment()
            )
        self.address = wait_until(self._find_address, "the scheduler says that it listens", 30.0)
        return self

    def _find_address(self) -> str:
        assert self.process is not None
        assert self.process.poll() is None, f"the scheduler ended with {self.process.returncode}: {self.log()[-2000:]}"
        started = self.events("started", since=self._log_offset)
        return str(started[0]["listen"]) if started else ""

    def refuse(self, *more: str) -> tuple[int, str]:
        """Run it where it must not start: the exit code and what it said."""
        done = subprocess.run(
            self.arguments(*more), env=clean_environment(), capture_output=True, text=True, timeout=100, check=False
        )
        assert "Traceback" not in done.stderr, done.stderr
        return done.returncode, done.stderr

    @property
    def pid(self) -> int:
        """Of the running process."""
        assert self.process is not None
        return self.process.pid

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        assert self.process is not None
        self.process.send_signal(number)
        code = self.process.wait(100)
        self._forget()
        return code

    def kill(self) -> None:
        self.stop(signal.SIGKILL)

    def _forget(self) -> None:
        self.process = None
        self._close_client()

    def _close_client(self) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None

    def close(self) -> None:
        if self.process is not None:
            if self.process.poll() is None:
                self.process.kill()
            self.process.wait()
        self._forget()

    def log(self, since: int = 0) -> str:
        """What it wrote, of all of its runs, from a byte on."""
        if not self.log_path.exists():
            return ""
        return self.log_path.read_bytes()[since:].decode()

    def events(self, name: str, since: int = 0) -> list[dict[str, Any]]:
        """The log records of one event; a line that is not whole yet is left out."""
        lines = [line for line in self.log(since).splitlines(keepends=True) if line.endswith("}\n")]
        records = [json.loads(line) for line in lines if line.startswith("{")]
        return [record for record in records if record.get("event") == name]

    # --- requests

    @property
    def url(self) -> str:
        return f"http://{self.address}"

    def connect(self) -> socket.socket:
        host, _, port = self.address.rpartition(":")
        return socket.create_connection((host, int(port)), timeout=100)

    def new_client(self) -> httpx2.Client:
        headers = {"Authorization": f"Bearer {self.token}"} if self.token else {}
        return httpx2.Client(base_url=self.url, headers=headers, timeout=250, trust_env=False, verify=False)

    def use_token(self, token: str) -> None:
        """Show this token from now on; "" for none."""
        self.token = token
        self._close_client()

    @property
    def client(self) -> httpx2.Client:
        if self._client is None:
            self._client = self.new_client()
        return self._client

    def request(self, method: str, path: str, body: Any = None) -> httpx2.Response:
        """One request; paths without a leading slash are below ``/api/v1``."""
        return self.client.request(method, path if path.startswith("/") else f"/api/v1/{path}", json=body)

    def get(self, path: str) -> Any:
        return self._good(self.request("GET", path))

    def post(self, path: str, body: Any = None) -> Any:
        return self._good(self.request("POST", path, body))

    def patch(self, path: str, body: Any) -> Any:
        return self._good(self.request("PATCH", path, body))

    @staticmethod
    def _good(answer: httpx2.Response) -> Any:
        assert answer.status_code in (200, 201), f"{answer.request.method} {answer.request.url}: {answer.text}"
        return answer.json()

    def create_pool(self, name: str, parent: str = "<Root>", tree: str = "default", **attributes: Any) -> str:
        body = {"name": name, "parent": parent, "attributes": attributes}
        return str(self.post(f"trees/{tree}/pools", body)["id"])

    def start_operation(self, pool: str, job_count: int = 1, cpu: float = 1.0, **spec: Any) -> str:
        task = {"job_count": job_count, "cpu_limit": cpu, "memory_limit": GIB, "command": "true"}
        return str(self.post("operations", {"spec": {"pool": pool, "tasks": {"t": task}, **spec}})["id"])

    def state_of(self, operation_id: str) -> str:
        return str(self.get(f"operations/{operation_id}")["state"])

    def wait_updates(self, count: int = 2) -> None:
        before = self.get("status")["timings"]["updates"]
        wait_until(lambda: self.get("status")["timings"]["updates"] >= before + count, "fair-share updates")

    # --- the command line

    def yt_command(self, *arguments: str) -> list[str]:
        return [str(YT), *arguments]

    def yt_environment(self, bindings: bool) -> dict[str, str]:
        return yt_environment(self.address, self.directory, token=self.token, bindings=bindings)

    def yt(self, *arguments: str, bindings: bool = True, given: str = "") -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.yt_command(*arguments), env=self.yt_environment(bindings), input=given, capture_output=True,
            text=True, timeout=250, check=False, encoding="utf-8",
        )  # fmt: skip

    def yt_all(
        self, runs: Mapping[str, Iterable[str]], bindings: bool = True, given: Mapping[str, str] | None = None
    ) -> dict[str, subprocess.CompletedProcess[str]]:
        """Run independent command lines at the same time; by name."""
        inputs = given or {}
        self.yt_environment(bindings)  # its files are there before the first one runs

        def run(name: str) -> subprocess.CompletedProcess[str]:
            return self.yt(*runs[name], bindings=bindings, given=inputs.get(name, ""))

        with ThreadPoolExecutor(PARALLEL) as workers:
            return dict(zip(runs, workers.map(run, runs), strict=True))


def need_bindings() -> None:
    pytest.importorskip("yt_yson_bindings", reason="needs the Python package ytsaurus-yson: sh tests/venv.sh all")


def yt_environment(address: str, home: Path, *, token: str = "", bindings: bool = False) -> dict[str, str]:
    """What leads the client to a scheduler, with or without the C++ bindings of YSON; it does not try twice."""
    blocked = home / "no_bindings"
    stub = blocked / "yt_yson_bindings.py"
    if bindings:
        need_bindings()
    elif not stub.exists():
        blocked.mkdir()
        stub.write_text(NO_BINDINGS)
    return {
        **clean_environment(), "YT_PROXY": address, "HOME": str(home), "PYTHONPATH": "" if bindings else str(blocked),
        "YT_CONFIG_PATCHES": "{proxy={retries={enable=%false}}}", **({"YT_TOKEN": token} if token else {}),
    }  # fmt: skip


def clean_environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("YT_", "CPUMOND_"))}
    return {**kept, "NO_PROXY": "*", "PYTHONIOENCODING": "utf-8"}


def terminal_environment(url: str) -> dict[str, str]:
    """For commands on a terminal: COLUMNS, which processes of pytest set, would count more than its own width."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("CPUMOND", "COLUMNS", "LINES"))}
    return {**kept, "CPUMOND_SCHEDULER": url, "TERM": "xterm-256color", "LC_ALL": "C.UTF-8"}


class PlayedNode:
    """A node that runs no job: it tells the scheduler what it is told to tell."""

    _numbers = itertools.count(1)

    def __init__(
        self, scheduler: SchedulerProcess, node_id: str, cpu: float = 10.0, tags: Iterable[str] = (), **resources: Any
    ) -> None:
        self.scheduler = scheduler
        self.id = node_id
        self.cpu = cpu
        self.tags = list(tags)
        self.resources = {"cpu": cpu, "memory": 64 * GIB, "user_slots": 100, **resources}
        self.incarnation = f"{node_id}-{next(self._numbers)}"
        self.sequence = 0
        self.jobs: dict[str, dict[str, Any]] = {}
        """The reports of the jobs that live here, by id; tests change them."""
        self.finished: dict[str, dict[str, Any]] = {}
        """Ended jobs that were not acknowledged yet."""
        self.logs: dict[tuple[str, str], bytes] = {}
        """(job, stream) -> what it wrote."""
        self.replies: dict[str, dict[str, Any]] = {}
        """Kind of a request -> fields of its reply."""
        self.requests: list[dict[str, Any]] = []

    def register(self) -> dict[str, Any]:
        body = {"node_id": self.id, "incarnation": self.incarnation, "resources": self.resources, "tags": self.tags}
        answer: dict[str, Any] = self.scheduler.post("nodes", body)
        return answer

    def send(self) -> httpx2.Response:
        self.sequence += 1
        body = {
            "node_id": self.id, "incarnation": self.incarnation, "sequence": self.sequence, "sent_at": 0.0,
            "cpu_capacity": self.cpu, "jobs": [*self.jobs.values()], "finished_jobs": [*self.finished.values()],
        }  # fmt: skip
        return self.scheduler.request("POST", "heartbeats", body)

    def beat(self) -> dict[str, Any]:
        """A heartbeat that must be accepted; jobs are started and stopped as the answer says."""
        response = self.send()
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = response.json()
        assert answer["accepted"], answer
        for order in answer["start"]:
            told = {name: order[name] for name in ("job_id", "operation_id", "task", "cpu_limit")}
            limits = {"current_cpu_limit": order["cpu_limit"], "memory": order["memory_limit"]}
            self.jobs.setdefault(order["job_id"], {**told, **limits, "from_scheduler": True})
        for order in answer["stop"]:
            self.end(order["job_id"], "aborted", reason=order["why"])
        for job_id in answer["acknowledged"]:
            self.finished.pop(job_id, None)
        for request in answer["logs"]:
            self.send_log(request)
        for request in answer["requests"]:
            self.requests.append(request)
            reply = {"node_id": self.id, "request_id": request["request_id"], **self.replies[request["kind"]]}
            self.scheduler.post("replies", reply)
        return answer

    def send_log(self, request: dict[str, Any]) -> None:
        """The end of a log that somebody waits for, or what comes after the offset that is asked for."""
        body: dict[str, Any] = {"node_id": self.id, "request_id": request["request_id"]}
        written = self.logs.get((request["job_id"], request["stream"]))
        if written is None:
            body["error"] = f"node {self.id} has no log of it"
        else:
            size, offset = request["tail_bytes"], request.get("offset")
            part = written[-size:] if offset is None else written[offset:][:size]
            body |= {"content": base64.b64encode(part).decode(), "total_bytes": len(written)}
            body |= {} if offset is None else {"first_byte": min(offset, len(written))}
        self.scheduler.post("logs", body)

    def end(self, job_id: str, state: str = "completed", **facts: Any) -> None:
        job = self.jobs.pop(job_id, None)
        if job is not None:
            told = {name: job[name] for name in ("job_id", "operation_id", "task")}
            code = {"completed": 0, "failed": 1}.get(state)
            self.finished[job_id] = {**told, "state": state, "exit_code": code, **facts}

    def jobs_of(self, operation_id: str) -> list[str]:
        return [job_id for job_id, job in self.jobs.items() if job["operation_id"] == operation_id]

    def beat_until_done(self, work: Callable[[], T]) -> T:
        """What ``work`` gives, in a thread of its own, while heartbeats go on."""
        with ThreadPoolExecutor(1) as thread:
            done = thread.submit(work)
            self.beat_until(done.done, "the end of the work")
            return done.result()

    def beat_until(self, condition: Callable[[], Any], what: str) -> Any:
        """Send heartbeats until ``condition`` is true; its value."""

        def ask() -> Any:
            self.beat()
            return condition()

        return wait_until(ask, what)
