"""The output of jobs: written to the journal, and read from it with journalctl."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from typing import IO, Final

from cpumond.core.errors import describe
from cpumond.core.wire import LogStream
from cpumond.host.executor.model import ExecutorError
from cpumond.host.executor.systemd.unit import unit_name

PRIORITIES: Final[dict[LogStream, int]] = {"stdout": 6, "stderr": 5}
"""PRIORITY of each of a job's two streams in the journal (info, notice), by which they are told apart."""
JOURNAL_SOCKET = "/run/systemd/journal/stdout"
JOURNAL_TIMEOUT_S = 10.0
JOURNAL_SYNC_TIMEOUT_S = 1.0
"""Maximum seconds to wait for a sync, which journald does not finish while a job floods the journal."""
COUNT_S = 1.0
"""Maximum seconds for which a log is read on only to count its bytes."""
SPAWN_FAILED = "641257651c1b4ec9a8624d7a40a9e1e7"
"""The journal's MESSAGE_ID for systemd's failure to execute a unit's program (systemd.journal-fields(7))."""

_COMMAND: Final = ("journalctl", "--quiet", "--no-pager")
_LINE_ENDS: Final = {b"line-max": b"", b"eof": b"", b"pid-change": b"", b"nul": b"\0"}
"""Field ``_LINE_BREAK`` of an entry -> how the line ended; without this field, it ended with a line feed."""


def open_journal(unit: str, stream: LogStream) -> socket.socket:
    """Open a journal stream for stdout or stderr of a job, as systemd itself does, but with its own priority.

    journald assigns each line to the unit of the process that wrote it or, if that process has ended, to ``unit``. Only
    root may choose ``unit``. Raises OSError."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        # Without blocking, a full queue is also reported at once.
        connection.setblocking(False)
        connection.connect(JOURNAL_SOCKET)
        # Identifier, unit, priority; whether lines may begin with "<N>"; whether to use syslog, kernel log and console.
        header = [unit.removesuffix(".service"), unit, str(PRIORITIES[stream]), "0", "0", "0", "0"]
        connection.sendall("".join(f"{line}\n" for line in header).encode())
        connection.shutdown(socket.SHUT_RD)
        # The connection becomes a job's standard output, to which writing must block while the queue is full.
        connection.setblocking(True)
    except BaseException:
        connection.close()
        raise
    return connection


def read_log(job_id: str, stream: LogStream, tail_bytes: int) -> tuple[bytes, int]:
    """Return the last ``tail_bytes`` bytes of a job's output, and the total; see ``Executor.read_log``.

    The total is counted in the journal; for a log too long to count in 1 s, it covers only the log's last part. The
    journal keeps neither empty lines nor blanks at line ends, and drops lines of a job that writes too many at once
    (journald.conf(5), RateLimitBurst=)."""
    unit = unit_name(job_id)
    _sync()
    try:
        matches = [f"_SYSTEMD_UNIT={unit}", "_TRANSPORT=stdout", f"PRIORITY={PRIORITIES[stream]}"]
        content, total = _read_tail(matches, tail_bytes)
        # A job without output has an empty log: systemd's own messages about its unit show that the job was here.
        if not total and not _has_entry(f"UNIT={unit}"):
            raise ExecutorError(f"the journal has no entries about job {job_id}: it never ran here, or is too old")
    except OSError as error:
        raise ExecutorError(f"journalctl cannot be run: {describe(error)}; install systemd's programs") from error
    except subprocess.TimeoutExpired:
        raise ExecutorError(
            f"journalctl did not finish within {JOURNAL_TIMEOUT_S:g} s; a smaller journal is read faster "
            "(SystemMaxUse= in journald.conf)"
        ) from None
    return content, total


def has_spawn_failure(unit: str) -> bool:
    """Return whether systemd logged that it could not execute the unit's program; True if the log is unreadable."""
    _sync()
    try:
        return _has_entry(f"MESSAGE_ID={SPAWN_FAILED}", f"UNIT={unit}")
    except (OSError, subprocess.TimeoutExpired):
        return True


def _sync() -> None:
    """Ask journald to store what is still in its sockets; if it does not respond, the log may lack these lines."""
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        _run("--sync", timeout_s=JOURNAL_SYNC_TIMEOUT_S)


def _has_entry(*matches: str) -> bool:
    """Return whether the journal has such an entry. Raises OSError, subprocess.TimeoutExpired."""
    return bool(_run("--lines=1", "--output=cat", *matches, timeout_s=JOURNAL_TIMEOUT_S))


def _run(*arguments: str, timeout_s: float) -> bytes:
    return subprocess.run(  # noqa: S603 - the arguments are ours
        [*_COMMAND, *arguments], stdin=subprocess.DEVNULL, capture_output=True, timeout=timeout_s, check=False
    ).stdout


def _read_tail(matches: list[str], tail_bytes: int) -> tuple[bytes, int]:
    """Return the last bytes of the output in the matching entries, and the total; entries are read from the end.

    The export format is used, because JSON costs 1.5 times the CPU on both sides, and for binary data three times.
    Raises OSError, subprocess.TimeoutExpired."""
    options = ["--all", "--reverse", "--output=export", "--output-fields=MESSAGE,_LINE_BREAK"]
    command = [*_COMMAND, *options, *matches]
    pieces: list[bytes] = []
    total = 0
    enough_s = time.monotonic() + COUNT_S
    late = threading.Event()
    with subprocess.Popen(  # noqa: S603 - the arguments are ours
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as process:

        def end() -> None:
            late.set()
            process.kill()

        timer = threading.Timer(JOURNAL_TIMEOUT_S, end)
        timer.start()
        try:
            assert process.stdout is not None
            for entry in read_export(process.stdout):
                piece = entry.get(b"MESSAGE", b"") + _LINE_ENDS.get(entry.get(b"_LINE_BREAK", b""), b"\n")
                if total < tail_bytes:
                    pieces.append(piece)
                elif time.monotonic() > enough_s:
                    break
                total += len(piece)
        finally:
            timer.cancel()
            process.kill()
    if late.is_set():
        raise subprocess.TimeoutExpired(command, JOURNAL_TIMEOUT_S)
    content = b"".join(reversed(pieces))
    return content[max(len(content) - tail_bytes, 0) :], total


def read_export(stream: IO[bytes]) -> Iterator[dict[bytes, bytes]]:
    """Yield the entries in journalctl's export format: lines ``NAME=text``, or NAME, 8 bytes of length, the text."""
    entry: dict[bytes, bytes] = {}
    while line := stream.readline():
        name, is_text, value = line.rstrip(b"\n").partition(b"=")
        if not name:
            yield entry
            entry = {}
        elif is_text:
            entry[name] = value
        else:
            entry[name] = stream.read(int.from_bytes(stream.read(8), "little"))
            stream.read(1)
