"""Copies of the process: how they give way, also where a system call filter does not let them."""

import asyncio
import io
import os
import platform
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from cpumond.scheduler.trial import fork
from cpumond.scheduler.trial.fork import NICENESS, Child, ChildError, _find_pages, copy_pages

ASK = "lambda send: send(f'{os.getpriority(os.PRIO_PROCESS, 0)}'.encode())"
FILTERED = f"""
import ctypes, os, struct
setpriority = {{"x86_64": 141, "aarch64": 140}}[os.uname().machine]
steps = [(0x20, 0, 0, 0), (0x15, 1, 0, setpriority), (6, 0, 0, 0x7FFF0000), (6, 0, 0, 0x50001)]
code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
program = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(steps), ctypes.addressof(code)))
prctl = ctypes.CDLL(None).prctl
assert prctl(38, 1, 0, 0, 0) == 0 and prctl(22, 2, program, 0, 0) == 0
from cpumond.scheduler.trial.fork import Child
print(Child({ASK}).read_all())
"""


def test_a_copy_has_the_lowest_priority() -> None:
    told = Child(lambda send: send(f"{os.getpriority(os.PRIO_PROCESS, 0)}".encode()))
    assert told.read_all() == [f"{NICENESS}".encode()]
    assert told.cpu_s > 0.0


@pytest.mark.skipif(platform.machine() not in ("x86_64", "aarch64"), reason="numbers of system calls of other machines")
def test_a_copy_works_where_its_priority_is_not_its_own_to_lower() -> None:
    done = subprocess.run([sys.executable, "-c", FILTERED], capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"[b'{os.getpriority(os.PRIO_PROCESS, 0)}']\n"


def test_a_copy_that_fails_says_so(capfd: pytest.CaptureFixture[str]) -> None:
    def fail(_: object) -> None:
        raise ValueError("nothing ahead")

    with pytest.raises(ChildError, match="before it was done") as refused:
        Child(fail).read_all()
    assert refused.value.attributes == {"try_again": True}
    assert "nothing ahead" in capfd.readouterr().err


async def test_whoever_waits_for_a_silent_copy_hears_that_it_lives(tmp_path: Path) -> None:
    sign = tmp_path / "sign"
    os.mkfifo(sign)
    heard = []
    async for message in Child(lambda send: send(sign.read_bytes())).messages(0.01):
        heard.append(message)
        if len(heard) == 2:
            sign.write_bytes(b"x")
    assert heard[:2] == [b"", b""]
    assert [each for each in heard if each] == [b"x"]


@pytest.mark.parametrize("end", [OSError(24, "no room"), asyncio.CancelledError()], ids=["failed", "cancelled"])
async def test_a_copy_whose_pipe_cannot_be_read_leaves_neither_it_nor_a_process(
    monkeypatch: pytest.MonkeyPatch, end: BaseException
) -> None:
    async def connect_read_pipe(*_: object) -> None:
        raise end

    monkeypatch.setattr(asyncio.get_running_loop(), "connect_read_pipe", connect_read_pipe)
    child = Child(lambda _: signal.pause())
    with pytest.raises(type(end)):
        [_ async for _ in child.messages()]
    with pytest.raises(ChildProcessError):
        os.waitpid(child.pid, os.WNOHANG)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(child._reading)


async def test_a_copy_given_up_while_pages_are_copied_leaves_no_dead_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a browser goes away: the web server cancels again at each step of what ends the request."""
    begun, go_on, reaped = threading.Event(), threading.Event(), threading.Event()

    def copy() -> None:
        begun.set()
        go_on.wait(60)

    def reap(child: Child) -> None:
        reap_it(child)
        reaped.set()

    reap_it = Child._reap
    monkeypatch.setattr(fork, "copy_pages", copy)
    monkeypatch.setattr(Child, "_reap", reap)

    child = Child(lambda _: signal.pause())

    async def read() -> None:
        async for _ in child.messages():
            raise AssertionError("it sends nothing")

    reading = asyncio.create_task(read())
    assert await asyncio.to_thread(begun.wait, 60)
    while not reading.done():
        reading.cancel()
        await asyncio.sleep(0)
    go_on.set()
    assert await asyncio.to_thread(reaped.wait, 60)
    with pytest.raises(ChildProcessError):
        os.waitpid(child.pid, os.WNOHANG)


def test_pages_that_a_thread_has_copied_cost_the_others_nothing(tmp_path: Path) -> None:
    data, page = bytearray(2**26), os.sysconf("SC_PAGESIZE")

    def count_faults() -> int:
        begun = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
        for at in range(0, len(data), page):
            data[at] += 1
        return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - begun

    def write_after(prepare: Callable[[], object]) -> int:
        ended, end = os.pipe()
        if not (child := os.fork()):
            os.close(end)
            os.read(ended, 1)
            os._exit(0)
        prepare()
        faults = count_faults()
        for each in (end, ended):
            os.close(each)
        os.waitpid(child, 0)
        return faults

    done: list[int] = []
    copying = threading.Thread(target=lambda: done.append(copy_pages()))
    count_faults()
    assert write_after(lambda: None) >= len(data) // page // 2
    assert write_after(lambda: (copying.start(), copying.join())) < len(data) // page // 10
    assert done[0] >= len(data)


@pytest.mark.parametrize(
    ("there", "found"),
    [
        ("", []),
        ("0", []),
        ("1", [(0, 1)]),
        ("0110", [(1, 2)]),
        ("1011", [(0, 1), (2, 2)]),
        ("1" * 11, [(0, 8), (8, 3)]),
        ("1" * 8 + "0", [(0, 8)]),
    ],
)
def test_only_what_is_in_memory_is_copied_and_not_too_much_at_once(there, found):
    """In pieces of 256 KiB, of which one page is there or none; the last one is short."""
    page, piece = os.sysconf("SC_PAGESIZE"), 2**18
    one_page = (bytes(7) + b"\x80").ljust(piece // page * 8, b"\0")
    entries = b"".join(one_page if each == "1" else bytes(len(one_page)) for each in there)
    spans = list(_find_pages(io.BytesIO(entries), 0, max(len(there) * piece - page, 0)))
    last = len(there) * piece - page
    assert spans == [(at * piece, min((at + size) * piece, last) - at * piece) for at, size in found]
