"""Steps of Slurm's jobs at the keeper's door: real sockets, and this process as the step."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cpumond.core.decode import decode_json
from cpumond.host.executor.keeper import CLAIM_NAME, KILLED_BEFORE, LOST
from cpumond.host.executor.keeper.guests import Guests
from cpumond.host.executor.keeper.job import Job
from cpumond.host.executor.keeper_link import KeptJob

END: dict[str, Any] = {
    "state": "ended", "pid": 7, "start_time": 3.0, "finish_time": 4.0, "exit_code": 3, "signal": None,
    "cpu_seconds": 0.5,
}  # fmt: skip
LEAVES_A_CHILD = """
import socket, subprocess, sys
step = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
step.connect("\\0" + sys.argv[1])
step.send(b'{"token": "t", "slurm_job": 5, "state": "starting"}')
step.recv(100)
subprocess.Popen(["sleep", "1000"], pass_fds=[step.fileno()], stdout=sys.stderr)
"""
"""A step that ends while a child of its own holds its end of the connection."""


class Door:
    """A keeper's guests, with one job that is expected."""

    def __init__(self, directory: Path, uid: int = -1) -> None:
        self.name = f"cpumond-test-{uuid.uuid4().hex}"
        self.handlers: dict[int, Callable[[], object]] = {}
        self.ended: list[Job] = []
        order = {
            "id": "j", "directory": str(directory), "max_log_bytes": 4096, "procs": [], "token": "t",
            "uid": os.geteuid() if uid < 0 else uid, "mounts": {}, "limits": [],
        }  # fmt: skip
        self.job = Job(order)
        for log in self.job.logs:
            log.open()
        self.guests = Guests({"j": self.job}, self._watch, self._unwatch, lambda _: None, self._end)
        self.guests.listen(self.name)
        self.guests.expect(self.job)

    def _watch(self, fd: int, handler: Callable[[], object]) -> None:
        self.handlers[fd] = handler

    def _unwatch(self, fd: int) -> None:
        self.handlers.pop(fd, None)

    def _end(self, job: Job) -> None:
        job.over = True
        self.ended.append(job)

    def close(self) -> None:
        self.guests.forget(self.job)
        for each in (self.guests._listener, *self.guests._strangers):
            assert each is not None
            each.close()
        for log in self.job.logs:
            log.close()

    def serve(self) -> None:
        """Do all that there is to do."""
        while True:
            poller = select.poll()
            for fd in self.handlers:
                poller.register(fd, select.POLLIN)
            ready = poller.poll(0)
            if not ready:
                return
            for fd, _ in ready:
                if fd in self.handlers:
                    self.handlers[fd]()

    def say(self, **report: Any) -> tuple[socket.socket, dict[str, str], int]:
        """Come as a step and say this: the connection, the answer, and how many descriptors came with it."""
        step = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        step.connect("\0" + self.name)
        step.send(json.dumps({"token": "t", "slurm_job": 5, "state": "starting", **report}).encode())
        self.serve()
        return step, *read(step)


def read(step: socket.socket) -> tuple[dict[str, str], int]:
    step.setblocking(False)
    data, fds, _, _ = socket.recv_fds(step, 4096, 4)
    for fd in fds:
        os.close(fd)
    return json.loads(data), len(fds)


@pytest.fixture
def door(tmp_path: Path) -> Iterator[Door]:
    with contextlib.closing(Door(tmp_path)) as made:
        yield made


def test_the_first_step_gets_the_word_and_the_output_of_the_job(door, tmp_path):
    step, answer, descriptors = door.say()
    with contextlib.closing(step):
        assert (answer, descriptors) == ({"answer": "go"}, 2)
        assert (tmp_path / CLAIM_NAME).read_text().split()[:2] == ["5", str(os.getpid())]
        assert door.job.slurm_job == 5


@pytest.mark.parametrize("why", ["no token", "another token", "another user", "claimed", "killed before it began"])
def test_a_step_that_may_not_begin_the_job_is_sent_away(tmp_path, why):
    with contextlib.closing(Door(tmp_path, uid=os.geteuid() + (why == "another user"))) as door:
        if why == "claimed":
            (tmp_path / CLAIM_NAME).write_text("4 1 0")
            door.guests.expect(door.job)
        if why == "killed before it began":
            door.guests.pass_on(door.job, "kill")
            assert (door.ended, door.job.problem) == ([door.job], KILLED_BEFORE)
        step, answer, _ = door.say(token={"no token": "", "another token": "other"}.get(why, "t"))
        step.close()
        assert answer == {"answer": "no"}
    claim = tmp_path / CLAIM_NAME
    assert (claim.read_text() if claim.exists() else "") == ("4 1 0" if why == "claimed" else "")


def test_an_order_for_a_step_that_is_away_is_told_when_it_comes_again(door):
    door.say()[0].close()
    door.serve()
    door.guests.pass_on(door.job, "interrupt")
    step, answer, _ = door.say(state="running", pid=os.getpid(), start_time=3.0)
    with contextlib.closing(step):
        assert answer == {"do": "interrupt"}
    assert (door.job.state, door.job.start_time) == ("running", 3.0)


def test_the_end_is_noted_as_often_as_it_is_told(door):
    door.say()[0].close()
    door.serve()
    for _ in range(2):
        step, answer, _ = door.say(**END)
        assert answer == {"answer": "noted"}
        step.close()
        door.serve()
    assert (door.ended, door.job.exit_code, door.job.cpu_seconds) == ([door.job], 3, 0.5)


@pytest.mark.parametrize("words", [b"", b"{", b"[]", b"{}", b'{"token": 1}'])
def test_what_is_no_guest_is_turned_away(door, words):
    step = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with contextlib.closing(step):
        step.connect("\0" + door.name)
        step.send(words)
        door.serve()
        watched = len(door.handlers)
        step.close()
        door.serve()
    assert watched - len(door.handlers) in (0, 1)
    assert len(door.handlers) == 1, "the listener"
    assert not door.ended


def test_a_step_is_seen_to_go_though_a_child_holds_its_connection(door):
    with subprocess.Popen([sys.executable, "-c", LEAVES_A_CHILD, door.name], process_group=0) as step:
        try:
            while not door.job.guest.is_claimed:
                door.serve()
            step.wait()
            door.serve()
        finally:
            os.killpg(step.pid, signal.SIGKILL)
    assert (door.ended, door.job.problem) == ([door.job], LOST)


@pytest.mark.parametrize(
    "odd",
    [
        {"exit_code": "3"}, {"exit_code": [3] * 1000}, {"exit_code": True}, {"signal": 10**30}, {"cpu_seconds": None},
        {"cpu_seconds": float("nan")}, {"start_time": float("inf")}, {"pid": 0}, {"slurm_job": -1}, {"state": "odd"},
    ],
)  # fmt: skip
def test_agents_are_told_nothing_that_they_cannot_read(door, odd):
    step = door.say()[0]
    step.send(json.dumps({"token": "t", "slurm_job": 5, **END, **odd}).encode())
    door.serve()
    with contextlib.closing(step):
        assert step.recv(100) == b"", "it is turned away"
    assert not door.ended
    assert decode_json(json.dumps(door.job.describe()).encode(), KeptJob).exit_code is None


def test_a_problem_of_a_job_can_be_read_by_agents(door):
    step, answer, _ = door.say(state="failed", problem="\ud800" * 1000, node_fault=False)
    step.close()
    assert answer == {"answer": "noted"}
    assert decode_json(json.dumps(door.job.describe()).encode(), KeptJob).problem == "?" * 500


def test_a_job_that_has_begun_does_not_get_its_first_limit_again(door):
    step = door.say()[0]
    for state in "running", "starting":
        step.send(json.dumps({"token": "t", "slurm_job": 5, **END, "state": state}).encode())
        door.serve()
    with contextlib.closing(step):
        assert step.recv(100) == b""
    assert door.job.state == "running"
