"""Runs inside the guest, before anything is installed: README's first lines in a checkout, as somebody types them in a
terminal of 80 columns. Wheels of what pip would fetch are in /in/wheels: a guest has no network. Standard library only.
"""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import shutil
import struct
import subprocess
import termios
import threading
import time
from typing import Any

COLUMNS = 80
INTERRUPT = b"\x03"
LIMIT_S = 150.0


class FirstMinutes:
    """The lines, in a copy of the checkout below ``home``; seconds are since the first of them."""

    def __init__(self, home: str, lines: list[str]) -> None:
        self._checkout = os.path.join(home, "checkout")
        self._demo, self._estimate = lines
        self._env = {**os.environ, "HOME": home, "TERM": "xterm", "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "/in/wheels"}
        self._began_s = 0.0
        self._estimated: dict[str, Any] = {}
        self._thread = threading.Thread(target=self._run_estimate, daemon=True)

    def seconds(self) -> float:
        return time.monotonic() - self._began_s

    def demo(self) -> dict[str, Any]:
        """Until render runs on the freed CPU; then Ctrl-C. The estimate begins, and goes on meanwhile."""
        shutil.copytree("/in/checkout", self._checkout)
        self._began_s = time.monotonic()
        seen = self._type(self._demo, ("simulation started", "render-1 started"))
        self._thread.start()
        size = subprocess.run(["du", "-sm", ".venv"], cwd=self._checkout, capture_output=True, text=True, check=True)
        return {**seen, "megabytes": int(size.stdout.split()[0])}

    def _run_estimate(self) -> None:
        self._estimated = self._type(self._estimate)

    def _type(self, line: str, words: tuple[str, ...] = ()) -> dict[str, Any]:
        """A line to its end, or to Ctrl-C once all words were seen; ``first_s``, ``word_s``: when anything was seen,
        and each of the words."""
        began_s = time.monotonic()
        pid, terminal = pty.fork()
        if pid == 0:
            os.chdir(self._checkout)
            os.execvpe("bash", ["bash", "-c", line], self._env)  # noqa: S606
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, COLUMNS, 0, 0))
        output, first_s, word_s = "", None, {}
        while time.monotonic() - began_s < LIMIT_S:
            if not select.select([terminal], [], [], 0.1)[0]:
                continue
            try:
                output += os.read(terminal, 65536).decode(errors="replace")
            except OSError:  # its end
                break
            now_s = time.monotonic() - began_s
            first_s = first_s or now_s
            for word in words:
                if word in output and word not in word_s:
                    word_s[word] = now_s
                    if len(word_s) == len(words):
                        os.write(terminal, INTERRUPT)
        os.close(terminal)
        return {
            "code": os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]),
            "output": re.sub(r"\x1b\[[0-9;?]*[A-Za-z]|\r(?=\n)", "", output),
            "first_s": first_s,
            "word_s": list(word_s.values()),
            "took_s": time.monotonic() - began_s,
        }

    def estimate(self) -> dict[str, Any]:
        """What it said; waits for its end."""
        self._thread.join(LIMIT_S)
        return self._estimated
