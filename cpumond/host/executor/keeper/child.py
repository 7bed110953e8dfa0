"""A job's process between fork and exec: all steps by which the process becomes the job."""

from __future__ import annotations

import contextlib
import json
import os
import pwd
import resource
import signal
from collections.abc import Iterator
from typing import Any, Final, NoReturn

from cpumond.host.executor.keeper import RECLAIMED_OOM_SCORE, STREAMS

_SOFT_DESCRIPTORS: Final = 1024
_MAX_DESCRIPTORS: Final = 1 << 22
_MAX_PROBLEM: Final = 500
"""Maximum characters of a problem: as JSON it is less than a page, and so it is written to a pipe atomically."""
_PR_SET_NO_NEW_PRIVS: Final = 38
_PR_CAP_AMBIENT: Final = 47
_PR_CAP_AMBIENT_CLEAR_ALL: Final = 4


class StepError(Exception):
    """A step that failed: a sentence, and whether the node is to blame."""

    def __init__(self, problem: str, node_fault: bool) -> None:
        super().__init__(problem)
        self.problem = problem
        self.node_fault = node_fault


@contextlib.contextmanager
def step(what: str, node_fault: bool = False) -> Iterator[None]:
    """Convert an error in the block to a StepError; ``what`` says what could not be done."""
    try:
        yield
    except OSError as error:
        raise StepError(f"cannot {what}: {os.strerror(error.errno or 0)}", node_fault) from error
    except (ValueError, TypeError, OverflowError) as error:
        raise StepError(f"cannot {what}: {error}", node_fault) from error


def give_up_privileges() -> None:
    """Give up privileges that jobs would inherit: a job cannot gain rights that its account does not have, not by any
    program (sudo, file capabilities), nor by capabilities of an agent that is not root. Raises OSError."""
    import ctypes  # only the keeper needs it, but the agent imports this, too

    libc = ctypes.CDLL(None, use_errno=True)
    for what, arguments in (
        ("forbid new privileges", (_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)),
        ("give up ambient capabilities", (_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0)),
    ):
        if libc.prctl(*arguments):
            raise OSError(ctypes.get_errno(), f"cannot {what}")


def run_child(order: dict[str, Any], status: int, hard_descriptors: int) -> NoReturn:
    """Become the job, or report the failure through ``status``."""
    try:
        # Close the other jobs' descriptors before opening a file: their number may exceed the limit of a job.
        os.closerange(3, status)
        os.closerange(status + 1, min(hard_descriptors, _MAX_DESCRIPTORS))
        become_job(order, hard_descriptors)
    except StepError as error:
        report: dict[str, Any] = {"problem": error.problem, "node_fault": error.node_fault}
    except BaseException as error:
        report = {"problem": f"cannot start: {error!r}", "node_fault": True}
    report["problem"] = report["problem"][:_MAX_PROBLEM]
    with contextlib.suppress(OSError):
        os.write(status, json.dumps(report).encode())
    os._exit(127)


def become_job(order: dict[str, Any], hard_descriptors: int) -> NoReturn:
    """Perform all steps between the fork and the job's program. Raises StepError."""
    with step("prepare the process", node_fault=True):
        os.setsid()
        os.umask(0o022)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "wb", buffering=0) as file:
            file.write(b"%d" % (RECLAIMED_OOM_SCORE if order.get("reclaimed") else 0))
    user = order["user"]
    account = None
    if user:
        try:
            account = pwd.getpwnam(user)
        except (KeyError, ValueError):
            raise StepError(f"the user {user!r} does not exist on this host", node_fault=False) from None
        if account.pw_uid == os.geteuid():
            account = None
    with step("open its output", node_fault=True):
        os.dup2(os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC), 0)
        for number, name in enumerate(STREAMS, 1):
            fifo = os.open(os.path.join(order["directory"], f"{name}.fifo"), os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            if account is not None and os.geteuid() == 0:
                os.fchown(fifo, account.pw_uid, account.pw_gid)
            os.dup2(fifo, number)
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        with contextlib.suppress(OSError, ValueError):
            signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    pid = str(os.getpid()).encode()
    # Enter cgroups as late as rights allow, the one with the quota last, so that the job does not pay for these steps.
    for path in reversed(order["procs"]):
        with step(f"enter the cgroup of {path}", node_fault=True):
            # In a tree of plain files, create the file if it is missing; cgroup file systems refuse that.
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
            os.write(fd, pid)
            os.close(fd)
    if account is not None:
        with step(f"become the user {user!r}"):
            os.initgroups(account.pw_name, account.pw_gid)
            os.setresgid(account.pw_gid, account.pw_gid, account.pw_gid)
            os.setresuid(account.pw_uid, account.pw_uid, account.pw_uid)
    with step(f"change to the directory {order['working_directory']!r}"):
        os.chdir(order["working_directory"])
    with step("set its limits", node_fault=True):
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(_SOFT_DESCRIPTORS, hard_descriptors), hard_descriptors))
    argv = order["argv"]
    with step(f"run {argv[0]!r}"):
        os.execvpe(argv[0], argv, order["environment"])  # noqa: S606 - the job's own command, as its user
