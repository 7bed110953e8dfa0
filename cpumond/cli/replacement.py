"""Files that commands replace atomically: a reader finds the earlier content or the complete text."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import time
from collections.abc import Iterator
from typing import Final

from cpumond.core.errors import from_os_error

READER_WAIT_S: Final = 2.0


class Replacement:
    """A file that replaces ``path`` atomically when its text is complete; until then ``path`` is unchanged.

    ``option`` is the command's option that names the file, for messages. An existing path that is no regular file, for
    example a pipe, is written to and not replaced. Entering the context raises AccessError or CreateError if the file
    cannot be created, before the command does any work for it; ``write`` may raise them, too."""

    def __init__(self, path: str, option: str) -> None:
        self._path = path
        self._option = option
        # A symbolic link stays; its target is replaced.
        self._target = os.path.realpath(path)
        self._temporary = f"{self._target}.{os.getpid()}.tmp"
        self._pipe: int | None = None
        self._is_direct = os.path.exists(path) and not os.path.isfile(path)

    def __enter__(self) -> Replacement:
        with self._explaining_errors():
            if os.path.isdir(self._path):
                raise IsADirectoryError(errno.EISDIR, "")
            if self._is_direct and stat.S_ISFIFO(os.stat(self._path).st_mode):
                self._pipe = self._open_pipe()
            if not self._is_direct:
                self._remove()  # one left by a killed process that had the same id
                with open(self._temporary, "x", encoding="utf-8"):
                    pass
        return self

    def write(self, text: str) -> None:
        with self._explaining_errors():
            place: str | int = self._path if self._is_direct else self._temporary
            if self._pipe is not None:
                place, self._pipe = self._pipe, None
            with open(place, "w", encoding="utf-8", newline="") as file:
                file.write(text)
            if not self._is_direct:
                os.replace(self._temporary, self._target)

    def _open_pipe(self) -> int:
        """Open the pipe now and keep it open until the text is written, because a reader leaves at end of file.

        Raises OSError if no reader comes within READER_WAIT_S; a plain open would wait forever."""
        until = time.monotonic() + READER_WAIT_S
        while True:
            try:
                pipe = os.open(self._path, os.O_WRONLY | os.O_NONBLOCK)
            except OSError as error:
                if error.errno != errno.ENXIO:
                    raise
                if time.monotonic() > until:
                    raise OSError("no program reads this pipe") from None
                time.sleep(0.02)
            else:
                os.set_blocking(pipe, True)
                return pipe

    def __exit__(self, *_: object) -> None:
        if self._pipe is not None:
            os.close(self._pipe)
        if not self._is_direct:
            self._remove()

    def _remove(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._temporary)

    @contextlib.contextmanager
    def _explaining_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise from_os_error(
                error, f"write {self._path}", f"give {self._option} a file that can be written"
            ) from error
