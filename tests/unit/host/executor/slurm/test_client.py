"""Slurm's commands in threads; plain programs stand for them."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator

import pytest

from cpumond.host.executor.slurm.client import Account, Answer, SlurmClient

WAIT_S = 60.0


class Woken:
    """A client, and whether it has woken its user."""

    def __init__(self) -> None:
        self.event = threading.Event()
        self.client = SlurmClient(self.event.set, 2)
        self.answers: list[Answer] = []

    def run(self, *argv: str, data: bytes = b"", account: Account | None = None) -> None:
        self.client.run(list(argv), self.answers.append, data, account)

    def take(self, count: int) -> list[Answer]:
        while len(self.answers) < count:
            assert self.event.wait(WAIT_S)
            self.event.clear()
            self.client.take()
        return self.answers


@pytest.fixture
def woken() -> Iterator[Woken]:
    made = Woken()
    with contextlib.closing(made.client):
        yield made


def test_an_answer_is_taken_in_by_the_thread_that_asks_for_it(woken):
    woken.run("sh", "-c", "cat; echo sbatch: error: why >&2; exit 3", data=b"script")
    assert woken.event.wait(WAIT_S)
    assert woken.answers == []
    (answer,) = woken.take(1)
    assert (answer.code, answer.out, answer.problem) == (3, "script", "why")


def test_one_that_hangs_holds_up_no_other(woken):
    woken.run("sleep", "1000")
    woken.run("echo", "here")
    assert woken.take(1)[0].out == "here\n"


def test_one_whose_answer_does_not_matter_waits_only_once(woken, tmp_path):
    runs, account = tmp_path / "runs", Account(os.geteuid(), os.getegid())
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    argv = ["sh", "-c", f"echo run >> {runs}; read line < {gate}"]
    for _ in range(10):
        woken.client.run_once(argv, account)
    woken.run("true")
    woken.take(1)
    gate.write_text("go\n")
    while woken.client._once:
        assert woken.event.wait(WAIT_S)
        woken.event.clear()
        woken.client.take()
    assert runs.read_text() == "run\n"
    woken.client.run_once(argv, account)
    gate.write_text("go\n")
    assert runs.read_text() == "run\nrun\n"


def test_the_environment_is_no_more_than_slurm_needs(woken, monkeypatch):
    monkeypatch.setenv("SLURM_CONF", "/there")
    monkeypatch.setenv("SBATCH_PARTITION", "other")
    woken.run("env")
    assert {line.partition("=")[0] for line in woken.take(1)[0].out.splitlines()} == {"PATH", "LANG", "SLURM_CONF"}


def test_a_command_is_run_as_the_user_with_the_users_groups(woken):
    if os.geteuid() != 0:
        pytest.skip("needs root to become another user")
    woken.run("id", account=Account(65534, 65534, "nobody"))
    assert woken.take(1)[0].out.count("(nogroup)") == 2
    assert "uid=65534" in woken.answers[0].out
    assert "(root)" not in woken.answers[0].out


def test_a_user_who_is_not_known_any_more_has_no_other_groups(woken):
    if os.geteuid() != 0:
        pytest.skip("needs root to become another user")
    woken.run("id", account=Account(54321, 54321))
    assert woken.take(1)[0].out == "uid=54321 gid=54321 groups=54321\n"


def test_what_cannot_be_run_is_an_answer(woken):
    woken.run("/nowhere/sbatch")
    (answer,) = woken.take(1)
    assert answer.code == 127
    assert "cannot run /nowhere/sbatch" in answer.problem


def test_an_answer_that_does_not_come_in_time(woken):
    assert woken.client.ask(["sleep", "1000"], 0.05) == Answer(None, "", "")


def test_close_ends_what_runs(woken, tmp_path):
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    woken.run("sh", "-c", f"exec >{fifo}; echo; exec sleep 1000")
    with open(fifo, "rb") as pipe:
        assert pipe.readline() == b"\n"
        woken.client.close()
        assert pipe.read() == b""
    assert woken.answers == []
