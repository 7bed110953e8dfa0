"""Runs inside the guest, before anything is installed: README's first lines in a checkout, typed in 80 columns."""

import fcntl
import hashlib
import json
import os
import pty
import re
import shutil
import struct
import subprocess
import termios
import threading
import time
from pathlib import Path
from typing import Any

from guest_tools import live_through

COLUMNS = 80
LIMIT_S = 250.0
ELSEWHERE = {"LC_ALL": "C", "TZ": "Asia/Tokyo", "DPKG_DEB_COMPRESSOR_LEVEL": "1"}
"""How the package's second build differs from the first, besides in place, rights and time; compressed as that."""


class FirstMinutes:
    """The lines, in a copy of the checkout below ``home``."""

    def __init__(self, home: str, demo: str, estimate: str, build: str) -> None:
        self._checkout = os.path.join(home, "checkout")
        self._build = build
        env = {**os.environ, "HOME": home, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "/in/wheels"}
        self._env = env
        words = ("simulation started", "render-1 started")
        self._demo = Line(demo, self._checkout, {**env, "COLUMNS": str(COLUMNS)}, False, words)
        self._estimate = Line(estimate, self._checkout, {**env, "TERM": "xterm"}, True)

    def demo(self) -> dict[str, Any]:
        """Without a terminal, until render runs on the freed CPU. It goes on, and the estimate begins."""
        shutil.copytree("/in/checkout", self._checkout)
        self._demo.start()
        self._demo.is_told.wait(LIMIT_S)
        self._estimate.start()
        size = subprocess.run(["du", "-sm", ".venv"], cwd=self._checkout, capture_output=True, text=True, check=True)
        return {**self._demo.seen, "megabytes": int(size.stdout.split()[0])}

    def build(self) -> dict[str, Any]:
        """The package, by somebody with other rights, locale and time zone than who built the first."""
        subprocess.run(["chmod", "-R", "go=", self._checkout], check=True)
        done = subprocess.run(
            ["bash", "-c", self._build],
            cwd=self._checkout,
            env={**self._env, **ELSEWHERE},
            umask=0o077,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
        built = [hashlib.sha256(path.read_bytes()).hexdigest() for path in Path(self._checkout, "dist").glob("*")]
        return {"code": done.returncode, "output": done.stdout + done.stderr, "sha256": built}

    def ends(self) -> dict[str, Any]:
        """What both lines said, to their end, which is waited for."""
        for line in (self._demo, self._estimate):
            line.join(LIMIT_S)
        return {"demo": self._demo.seen, "estimate": self._estimate.seen}


class Line(threading.Thread):
    """A line of shell; ``is_told``: it ended or said all words; ``seen``: output, and seconds until each."""

    def __init__(
        self, line: str, folder: str, env: dict[str, str], has_terminal: bool, words: tuple[str, ...] = ()
    ) -> None:
        super().__init__(daemon=True)
        self._line, self._folder, self._env = line, folder, env
        self._has_terminal, self._words = has_terminal, words
        self.is_told = threading.Event()
        self.seen: dict[str, Any] = {"output": "", "first_s": None, "word_s": {}}

    def run(self) -> None:
        began_s = time.monotonic()
        read_fd, write_fd = pty.openpty() if self._has_terminal else os.pipe()
        if self._has_terminal:
            fcntl.ioctl(write_fd, termios.TIOCSWINSZ, struct.pack("HHHH", 24, COLUMNS, 0, 0))
        with subprocess.Popen(
            ["bash", "-c", self._line],
            cwd=self._folder,
            env=self._env,
            stdin=write_fd if self._has_terminal else subprocess.DEVNULL,
            stdout=write_fd,
            stderr=write_fd,
            start_new_session=True,
        ) as process:
            os.close(write_fd)
            while text := read(read_fd):
                now_s = time.monotonic() - began_s
                self.seen["first_s"] = self.seen["first_s"] or now_s
                self.seen["output"] = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]|\r(?=\n)", "", self.seen["output"] + text)
                for word in self._words:
                    if word in self.seen["output"]:
                        self.seen["word_s"].setdefault(word, now_s)
                if len(self.seen["word_s"]) == len(self._words):
                    self.is_told.set()
        os.close(read_fd)
        self.seen.update(code=process.returncode, took_s=time.monotonic() - began_s)
        self.is_told.set()


def read(fd: int) -> str:
    """What comes next; nothing at the end, which a terminal tells by an error."""
    try:
        return os.read(fd, 65536).decode(errors="replace")
    except OSError:
        return ""


if __name__ == "__main__":
    first = FirstMinutes("/tmp/person", *json.loads(Path("/in/readme.json").read_text()))
    live_through((first.demo, first.build, first.ends))
