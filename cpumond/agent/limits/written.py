"""Log of the agent's latest write into each cgroup, to distinguish the agent's limits from those of other programs.

The next process needs this log even if the agent was killed. So each change is appended to a file in ``runtime_dir``
before the cgroup is written. The file is not synced, since cgroups do not outlive a crash of the machine either. If the
log has no record of a cgroup, every limit below the original counts as the agent's: no job keeps a lowered limit."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Container

from cpumond.core.errors import from_os_error
from cpumond.host.cgroup.settings import CpuSettings, Written

WRITTEN_FILE = "limits.log"
MAX_BYTES = 1 << 20
LINE_BYTES = 100
"""An upper bound of the length of a line in bytes."""


class LimitLog:
    """The newest change of each cgroup, by the cgroup's inode, in ``records`` and in the file."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.records: dict[int, Written] = {}
        self._fd: int | None = None
        self._size = 0

    def load(self, known: Container[int]) -> None:
        """Load the records of an earlier run about the cgroups with inodes in ``known``, and rewrite the file."""
        self.records = {inode: written for inode, written in read_written(self.path).items() if inode in known}
        self.check(anew=True)

    def note(self, inode: int, before: CpuSettings, after: CpuSettings) -> None:
        """Log a cgroup's change before it is made. If that fails, remove the file; raise CreateError or AccessError."""
        self.records[inode] = written = Written(before, after)
        try:
            if self._fd is None or self._size > MAX_BYTES + 2 * LINE_BYTES * len(self.records):
                self._rewrite()
            else:
                self._append(self._fd, _format(inode, written))
        except OSError as error:
            self._discard()
            raise from_os_error(error, f"write {self.path}", "free space or fix the rights of runtime_dir") from error

    def forget(self, inode: int) -> None:
        self.records.pop(inode, None)

    def check(self, anew: bool = False) -> None:
        """Rewrite the file if ``anew``, or if the file was removed. The next ``note`` retries after a failure."""
        if anew or (self._fd is not None and not os.path.exists(self.path)):
            try:
                self._rewrite()
            except OSError:
                self._discard()

    def _append(self, fd: int, line: bytes) -> None:
        if os.write(fd, line) != len(line):
            raise OSError(28, os.strerror(28))
        self._size += len(line)

    def _rewrite(self) -> None:
        self.close()
        temporary = f"{self.path}.new"
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        self._fd, self._size = os.open(temporary, flags, 0o600), 0
        content = b"".join(_format(inode, written) for inode, written in self.records.items())
        if content:
            self._append(self._fd, content)
        os.rename(temporary, self.path)

    def _discard(self) -> None:
        """Remove the file: an incomplete one would make the agent's limit look like another program's."""
        with contextlib.suppress(OSError):
            os.truncate(self.path, 0)
        for path in (self.path, f"{self.path}.new"):
            with contextlib.suppress(OSError):
                os.unlink(path)
        self.close()

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def append_written(path: str, inode: int, before: CpuSettings, after: CpuSettings) -> None:
    """Append a change that is made by a process other than the agent. A missing file is not created."""
    with contextlib.suppress(OSError):
        fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            os.write(fd, _format(inode, Written(before, after)))
        finally:
            os.close(fd)


def read_written(path: str) -> dict[int, Written]:
    """Read the newest change of each cgroup by inode; return an empty dict if the file is missing or damaged.

    An incomplete last line belongs to a change that was not made."""
    found = {}
    try:
        with open(path, "rb") as file:
            *lines, _ = file.read().split(b"\n")
        for line in lines:
            inode, *numbers = (int(word) for word in line.split(b" "))
            before, after = ([None if number < 0 else number for number in half] for half in (numbers[:3], numbers[3:]))
            found[inode] = Written(_settings(*before), _settings(*after))
    except (OSError, ValueError, TypeError):
        return {}
    return found


def _settings(quota_us: int | None, period_us: int | None, weight: int | None) -> CpuSettings:
    return CpuSettings(quota_us, period_us or 0, None, weight)


def _format(inode: int, written: Written) -> bytes:
    numbers = [number for each in written for number in (each.quota_us, each.period_us, each.weight)]
    return " ".join(str(-1 if number is None else number) for number in (inode, *numbers)).encode() + b"\n"
