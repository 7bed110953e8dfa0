"""``cpumond top --cluster`` on a real terminal: each key, the ends, and the terminal as it was."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import select
import struct
import sys
import termios
from collections.abc import Iterator

import pytest
from scheduler_process import terminal_environment
from test_json_api import LiveScheduler, make_node
from waiting import wait_until

ALTERNATE, MAIN = "\x1b[?1049h", "\x1b[?1049l"


class Terminal:
    """The command on a terminal of its own that controls it, so that Ctrl-C is a signal."""

    def __init__(self, url: str, columns: int, *words: str) -> None:
        environment = terminal_environment(url)
        # Opened before the command so that it stays open after it: its settings are looked at then.
        self._main, self._own = pty.openpty()
        fcntl.ioctl(self._own, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        self.before = termios.tcgetattr(self._own)
        self.text = ""
        self._pid = os.fork()
        if not self._pid:
            with contextlib.suppress(BaseException):
                os.setsid()
                fcntl.ioctl(self._own, termios.TIOCSCTTY, 0)
                for number in range(3):
                    os.dup2(self._own, number)
                command = [sys.executable, "-m", "cpumond", "top", "--cluster", *words]
                os.execve(sys.executable, command, environment)  # noqa: S606 - a shell would not control the terminal
            os._exit(111)

    def press(self, keys: str) -> None:
        self.text = ""
        os.write(self._main, keys.encode())

    def read(self) -> str:
        """What it has shown since the last key, without colours and moves of the cursor."""
        while select.select([self._main], [], [], 0.0)[0]:
            self.text += os.read(self._main, 65_536).decode("utf-8", "replace")
        return " ".join(re.sub(r"\x1b\[[?0-9;]*[A-Za-z]", " ", self.text).split())

    def wait(self, text: str) -> str:
        return wait_until(lambda: shown if text in (shown := self.read()) else "", f"{text!r} is shown")

    def wait_end(self) -> int:
        """Its exit code; what it wrote is read meanwhile, or it could not end."""

        def has_ended() -> tuple[int, int] | None:
            self.read()
            found = os.waitpid(self._pid, os.WNOHANG)
            return found if found[0] else None

        status = wait_until(has_ended, "it ends")[1]
        self._pid = 0
        self.read()
        return os.waitstatus_to_exitcode(status)

    def settings(self) -> list[object]:
        return termios.tcgetattr(self._own)

    def resize(self, columns: int) -> None:
        fcntl.ioctl(self._own, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))

    def close(self) -> None:
        if self._pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, 9)
            os.waitpid(self._pid, 0)
        os.close(self._main)
        os.close(self._own)


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Pool big uses most, pool small wants most."""
    with LiveScheduler(tmp_path_factory.mktemp("site")) as server:
        for name, limits in (("big", {}), ("small", {"resource_limits": {"cpu": 1}})):
            server.post("/trees/default/pools", {"name": name, "attributes": limits}, 201)
        node = make_node(server, "host-1")
        node.register()
        server.wait_for_update()
        server.start("big", job_count=2, title="of big")
        server.start("small", job_count=90, title="of small")
        wait_until(lambda: node.beat() and len(node.jobs) >= 3, "jobs")
        node.beat()
        yield server.url


@pytest.fixture
def terminal(url: str) -> Iterator[Terminal]:
    made = Terminal(url, 100)
    yield made
    made.close()


def test_each_key_shows_another_table_or_order(terminal):
    first = terminal.wait("pools by allotted.")
    assert first.index("big") < first.index("small")
    assert terminal.settings() != terminal.before
    for key, title in (("d", "pools by demand."), ("o", "operations by demand."), ("n", "nodes by demand.")):
        terminal.press(key)
        shown = terminal.wait(title)
        if key == "d":
            assert shown.index("small") < shown.index("big")
    assert "host-1" in shown
    terminal.press("o")
    assert "of small" in terminal.wait("operations by demand.")
    for key, title in (("s", "operations by share."), ("a", "operations by name."), ("u", "operations by allotted.")):
        terminal.press(key)
        terminal.wait(title)
    terminal.press("\x1b[Ax?")  # an arrow and what has no meaning
    terminal.press("p")
    terminal.wait("pools by allotted.")
    terminal.press("q")
    assert terminal.wait_end() == 0
    assert MAIN in terminal.text
    assert terminal.settings() == terminal.before


@pytest.mark.parametrize("key", ["\x03", "\x04"], ids=["ctrl-c", "ctrl-d"])
def test_other_ends_leave_the_terminal_as_it_was(terminal, key):
    terminal.wait("pools by allotted.")
    terminal.press(key)
    assert terminal.wait_end() == 0
    assert MAIN in terminal.text
    assert "Traceback" not in terminal.text
    assert terminal.settings() == terminal.before


def test_a_narrower_terminal_is_filled_anew(terminal):
    terminal.wait("pools by allotted.")
    terminal.resize(40)
    terminal.press("n")
    terminal.wait("nodes by allotted.")
    terminal.press("p")  # what it had drawn before, and was not read yet, is behind it now
    terminal.wait("pools by allotted.")
    lines = re.sub(r"\x1b\[[?0-9;]*[A-Za-z]", "", terminal.text).replace("\r", "").split("\n")
    assert max(map(len, lines)) <= 40
