"""A command on a terminal of its own: the keys that are pressed, what it shows, and how it leaves the terminal."""

import codecs
import contextlib
import fcntl
import os
import pty
import re
import select
import struct
import sys
import termios

from waiting import wait_until

ALTERNATE, MAIN = "\x1b[?1049h", "\x1b[?1049l"
"""The screen of a whole-screen program, and the one it gives back."""


class Terminal:
    """The command on a terminal of its own that controls it, so that Ctrl-C is a signal."""

    def __init__(self, environment: dict[str, str], columns: int, rows: int, *words: str) -> None:
        # Opened before the command so that it stays open after it: its settings are looked at then.
        self._main, self._own = pty.openpty()
        fcntl.ioctl(self._own, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        self.before = termios.tcgetattr(self._own)
        self.text = ""
        self._decoder = codecs.getincrementaldecoder("utf-8")()  # a piece may end within a character
        self._pid = os.fork()
        if not self._pid:
            with contextlib.suppress(BaseException):
                os.setsid()
                fcntl.ioctl(self._own, termios.TIOCSCTTY, 0)
                for number in range(3):
                    os.dup2(self._own, number)
                command = [sys.executable, "-m", "cpumond", *words]
                os.execve(sys.executable, command, environment)  # noqa: S606 - a shell would not control the terminal
            os._exit(111)

    def press(self, keys: str) -> None:
        self.text = ""
        os.write(self._main, keys.encode())

    def read(self) -> str:
        """What it has shown since the last key, without colours and moves of the cursor."""
        while select.select([self._main], [], [], 0.0)[0]:
            self.text += self._decoder.decode(os.read(self._main, 65_536))
        return " ".join(re.sub(r"\x1b\[[?0-9;]*[A-Za-z]", " ", self.text).split())

    def wait(self, text: str) -> str:
        return wait_until(lambda: shown if text in (shown := self.read()) else "", f"{text!r} is shown")

    def wait_end(self) -> int:
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
