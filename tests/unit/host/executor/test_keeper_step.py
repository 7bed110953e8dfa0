"""The step of a job of Slurm and the keeper that it looks for; a socket stands for the keeper."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator
from typing import Any

import pytest

from cpumond.host.executor.keeper import step as module
from cpumond.host.executor.keeper.step import Step, end_like


class Keeper:
    """Listens under a name of its own; answers each report with the next of ``answers``, None = goes away."""

    def __init__(self) -> None:
        self.name = f"cpumond-test-{uuid.uuid4().hex}"
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.listener.bind("\0" + self.name)
        self.listener.listen()
        self.heard: list[dict[str, Any]] = []

    def order(self, **changes: Any) -> dict[str, Any]:
        return {"token": "t", "keeper": self.name, "keeper_uid": os.geteuid(), **changes}

    def answer(self, *answers: str | None) -> threading.Thread:
        def serve() -> None:
            for answer in answers:
                connection, _ = self.listener.accept()
                with connection:
                    self.heard.append(json.loads(connection.recv(4096)))
                    if answer is not None:
                        connection.send(json.dumps({"answer": answer}).encode())

        thread = threading.Thread(target=serve)
        thread.start()
        return thread


@pytest.fixture
def keeper() -> Iterator[Keeper]:
    made = Keeper()
    with contextlib.closing(made.listener):
        yield made


@pytest.mark.parametrize("answer", ["go", "no", "noted"])
def test_the_word_of_the_keeper(keeper, monkeypatch, answer):
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    thread = keeper.answer(answer)
    step = Step(keeper.order())
    assert step.ask() == (answer, [])
    thread.join()
    step._disconnect()
    assert keeper.heard == [{"token": "t", "slurm_job": 7, "state": "starting"}]


def test_a_keeper_that_goes_away_is_told_all_again(keeper):
    thread = keeper.answer(None, "noted")
    step = Step(keeper.order())
    step.tell(state="ended", exit_code=3)
    assert step.ask() == ("noted", [])
    thread.join()
    step._disconnect()
    assert [(report["state"], report["exit_code"]) for report in keeper.heard] == [("ended", 3)] * 2


@pytest.mark.parametrize("changes", [{"keeper_uid": os.geteuid() + 1}, {"keeper": "cpumond-test-nobody"}])
def test_without_a_keeper_or_with_somebody_else_in_its_place_it_gives_up(keeper, monkeypatch, changes):
    monkeypatch.setattr(module, "WAIT_S", 0.05)
    assert Step(keeper.order(**changes)).ask() == ("", [])


@pytest.mark.parametrize(("exit_code", "number"), [(0, None), (3, None), (None, 15), (None, 9)])
def test_it_ends_as_its_job_did(exit_code, number):
    pid = os.fork()
    if pid == 0:
        end_like(exit_code, number)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert status == (exit_code if number is None else -number)


def test_what_the_job_left_behind_is_found_below_it(tmp_path):
    code = (
        "import ctypes, signal, subprocess; from cpumond.host.executor.keeper.step import _signal_all\n"
        "ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)\n"
        "subprocess.run(['sh', '-c', 'setsid sleep 1000 >/dev/null & sleep 1000 >/dev/null & exit 0'])\n"
        "print(_signal_all(0))\n"
        "_signal_all(signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "2\n"
