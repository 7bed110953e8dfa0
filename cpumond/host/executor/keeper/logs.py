"""Writing and reading the logs of the keeper's jobs."""

from __future__ import annotations

import contextlib
import os
from typing import Final

CHUNK_BYTES: Final = 65_536
_DRAIN_CHUNKS: Final = 32
_TOTAL_BYTES: Final = 64
_LOOKS: Final = 10


class StreamLog:
    """One stream of one job: moves bytes from a FIFO to files that take at most ``max_bytes`` on disk."""

    def __init__(self, directory: str, name: str, max_bytes: int) -> None:
        self.path = os.path.join(directory, name)
        self.fifo_path = f"{self.path}.fifo"
        self.fifo = -1
        self._half_bytes = max(max_bytes // 2, 1)
        self._file = self._total = -1
        self._size = self._before = 0

    def open(self) -> None:
        """Create the FIFO and the files, or open existing ones. Raises OSError."""
        with contextlib.suppress(FileExistsError):
            os.mkfifo(self.fifo_path, 0o600)
        # Opened for reading and writing, so that neither end ever sees that the other end was closed.
        self.fifo = os.open(self.fifo_path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW)
        self._total = os.open(f"{self.path}.total", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        text = os.read(self._total, _TOTAL_BYTES).strip()
        if text.isdigit():
            self._before = int(text)
        else:
            with contextlib.suppress(FileNotFoundError):
                self._before = os.stat(f"{self.path}.1").st_size
        self._write_total()
        self._open_file()

    def _open_file(self) -> None:
        self._file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._size = os.fstat(self._file).st_size

    def _write_total(self) -> None:
        with contextlib.suppress(OSError):
            os.pwrite(self._total, b"%020d\n" % self._before, 0)

    def pump(self) -> bool:
        """Move one chunk; return False if there was none. If the disk is full, data is lost, but the job continues."""
        try:
            data = memoryview(os.read(self.fifo, CHUNK_BYTES))
        except OSError:
            return False
        while data:
            try:
                written = self._write(data)
            except OSError:
                self._before += len(data)
                self._write_total()
                break
            data = data[written:]
        return True

    def _write(self, data: memoryview) -> int:
        if self._file < 0:
            self._open_file()
        if self._size >= self._half_bytes:
            self._rotate()
        written = os.write(self._file, data[: self._half_bytes - self._size])
        self._size += written
        return written

    def _rotate(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.rename(self.path, f"{self.path}.1")
        self._before += self._size
        self._write_total()
        os.close(self._file)
        self._file = -1
        self._open_file()

    def close(self, drain: bool = True) -> None:
        """Close the files and remove the FIFO; with ``drain``, read the rest of the FIFO before."""
        if self.fifo >= 0:
            for _ in range(_DRAIN_CHUNKS if drain else 0):
                if not self.pump():
                    break
        for fd in (self.fifo, self._file, self._total):
            if fd >= 0:
                os.close(fd)
        self.fifo = self._file = self._total = -1
        with contextlib.suppress(OSError):
            os.unlink(self.fifo_path)

    def remove(self) -> None:
        """Remove the log's files."""
        for suffix in ("", ".1", ".total"):
            with contextlib.suppress(OSError):
                os.unlink(self.path + suffix)


def read_log(directory: str, stream: str, tail_bytes: int) -> tuple[bytes, int] | None:
    """Return the last ``tail_bytes`` bytes of a log, and the number of bytes ever written; None if there is no log."""
    path = os.path.join(directory, stream)
    before, current, older = b"", (b"", -1), (b"", -1)
    for _ in range(_LOOKS):
        before = read_end(f"{path}.total", _TOTAL_BYTES)[0]
        current = read_end(path, tail_bytes)
        older = read_end(f"{path}.1", tail_bytes - len(current[0]))
        if current[1] >= 0 and read_end(f"{path}.total", _TOTAL_BYTES)[0] == before:
            # Otherwise the log was rotated between the two reads.
            break
    if current[1] < 0 and older[1] < 0:
        return None
    earlier = int(before) if before.strip().isdigit() else max(older[1], 0)
    return older[0] + current[0], earlier + max(current[1], 0)


def read_end(path: str, most_bytes: int) -> tuple[bytes, int]:
    """Return the last ``most_bytes`` bytes of a file, and its size; size -1 if the file does not exist."""
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            file.seek(max(size - most_bytes, 0))
            return file.read(min(size, max(most_bytes, 0))), size
    except OSError:
        return b"", -1
