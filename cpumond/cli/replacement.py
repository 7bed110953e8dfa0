"""Files that commands write as a whole: what was there before, or the complete text, never half of it."""

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
    """A file that takes the place of ``path`` in one moment, when its text is complete; until then nothing is changed.

    ``option`` is the one that named it, for messages. What is there but is not a file, such as a pipe that is read, is
    written to and not replaced. Entering raises AccessError or CreateError where a file cannot be made, before
    any work is done for it; so does ``write``.
    """

    def __init__(self, path: str, option: str) -> None:
        self._path = path
        self._option = option
        # A link stays a link.
        self._target = os.path.realpath(path)
        self._temporary = f"{self._target}.{os.getpid()}.tmp"
        self._pipe: int | None = None
        self._is_direct = os.path.exists(path) and not os.path.isfile(path)

    def __enter__(self) -> Replacement:
        with self._saying_why():
            if os.path.isdir(self._path):
                raise IsADirectoryError(errno.EISDIR, "")
            if self._is_direct and stat.S_ISFIFO(os.stat(self._path).st_mode):
                self._pipe = self._open_pipe()
            if not self._is_direct:
                self._remove()  # of one that was killed, with the same id
                with open(self._temporary, "x", encoding="utf-8"):
                    pass
        return self

    def write(self, text: str) -> None:
        with self._saying_why():
            place: str | int = self._path if self._is_direct else self._temporary
            if self._pipe is not None:
                place, self._pipe = self._pipe, None
            with open(place, "w", encoding="utf-8", newline="") as file:
                file.write(text)
            if not self._is_direct:
                os.replace(self._temporary, self._target)

    def _open_pipe(self) -> int:
        """The pipe, kept open until all is written: a reader that sees its end goes away.

        Raises OSError without a reader for READER_WAIT_S, where a plain open would wait for ever.
        """
        until = time.monotonic() + READER_WAIT_S
        while True:
            try:
                pipe = os.open(self._path, os.O_WRONLY | os.O_NONBLOCK)
            except OSError as error:
                if error.errno != errno.ENXIO:
                    raise
                if time.monotonic() > until:
                    raise OSError("nobody reads this pipe") from None
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
    def _saying_why(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise from_os_error(
                error, f"write {self._path}", f"give {self._option} a file that can be written"
            ) from error
