"""``cpumond`` processes that start at once: forked from this one, which has imported the program already."""

import contextlib
import faulthandler
import fcntl
import gc
import os
import random
import runpy
import signal
import subprocess
import sys
import warnings
from collections.abc import Sequence
from typing import Any, NoReturn

from cpumond.cluster import LAUNCH_PROGRAM

HANGS_S = 50.0
"""After so long a command says where it is: less than tests wait for it."""


class QuickPopen(subprocess.Popen[Any]):
    """``Popen`` that forks this process for a ``cpumond`` instead of starting Python anew.

    Starting Python and importing the agent takes many seconds on an emulated processor; the fork has it all in memory.
    The rest is as in a process that was started by itself: descriptors, signals, session, environment, arguments.
    """

    def _execute_child(self, *arguments: Any) -> None:
        argv = arguments[0]
        start = find_start(argv)
        if start is None or arguments[2] is not None:
            super()._execute_child(*arguments)  # type: ignore[misc]
            return
        pipes = arguments[10:16]
        sys.stdout.flush()
        self.pid = os.fork()
        if self.pid == 0:
            become(start, arguments[5], arguments[6], (pipes[0], pipes[3], pipes[5]), arguments[21])
        self._child_created = True
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]


def find_start(argv: object) -> list[str] | None:
    """What comes behind ``python`` when this starts a ``cpumond``."""
    if not isinstance(argv, Sequence) or isinstance(argv, str) or not argv or argv[0] != sys.executable:
        return None
    words = [os.fspath(word) for word in argv[1:]]
    if words[2:3] in (["cluster"], ["demo"]):
        return None  # they start the other parts themselves, and these are to be started as they do it
    if words[:2] == ["-m", "cpumond"] or words[:3] == ["-P", "-c", LAUNCH_PROGRAM]:
        return words
    return None


def become(
    start: list[str], cwd: str | None, env: dict[str, str] | None, streams: tuple[int, ...], new_session: bool
) -> NoReturn:
    """In the child: the program that ``start`` names, as if it had been started by itself."""
    code = 70
    # What the tests before have left to the collector holds numbers of descriptors, which are this program's soon.
    gc.freeze()
    try:
        put_streams(streams)
        reset_signals()
        if new_session:
            os.setsid()
        if cwd is not None:
            os.chdir(cwd)
        if env is not None:
            os.environ.clear()
            os.environ.update(env)
        random.seed()
        warnings.resetwarnings()
        warnings.simplefilter("ignore")
        sys.excepthook = sys.__excepthook__
        if start[2:3] == ["operation"]:
            faulthandler.dump_traceback_later(HANGS_S, file=sys.stderr)
        sys.orig_argv[:] = [sys.executable, *start]
        code = run_program(start)
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        code = 1
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(code)


def put_streams(streams: tuple[int, ...]) -> None:
    """0, 1 and 2 where they are not inherited (-1), and no other descriptor."""
    for number, fd in enumerate(streams):
        if fd == number:
            fcntl.fcntl(fd, fcntl.F_SETFD, 0)
        elif fd != -1:
            os.dup2(fd, number)
    os.closerange(3, 65536)
    sys.stdin, sys.stdout = open(0, encoding="utf-8"), open(1, "w", encoding="utf-8")  # noqa: SIM115
    sys.stderr = open(2, "w", encoding="utf-8", buffering=1, errors="backslashreplace")  # noqa: SIM115
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr  # type: ignore[misc]


def reset_signals() -> None:
    """As Python starts."""
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)


def run_program(start: list[str]) -> int:
    try:
        if start[0] == "-m":
            sys.argv[:] = ["cpumond", *start[2:]]
            runpy.run_module("cpumond", run_name="__main__", alter_sys=True)
        else:
            sys.argv[:] = ["-c", *start[3:]]
            exec(start[2], {"__name__": "__main__"})  # noqa: S102 - a program of tests
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    return 0
