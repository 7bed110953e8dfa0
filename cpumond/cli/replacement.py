"""Files that commands write as a whole: what was there before, or the complete text, never half of it."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator

from cpumond.errors import from_os_error


class Replacement:
    """A file that takes the place of ``path`` in one moment, when its text is complete; until then nothing is changed.

    ``option`` is the one that named it, for messages. What is there but is not a file, such as a pipe, is written to
    and not replaced. Entering raises AccessError or CreateError where a file cannot be made, so that nobody waits for
    nothing; so does ``write``.
    """

    def __init__(self, path: str, option: str) -> None:
        self._path = path
        self._option = option
        # A link stays a link.
        self._target = os.path.realpath(path)
        self._temporary = f"{self._target}.{os.getpid()}.tmp"
        self._is_direct = os.path.exists(path) and not os.path.isfile(path)

    def __enter__(self) -> Replacement:
        with self._saying_why():
            if os.path.isdir(self._path):
                raise IsADirectoryError(errno.EISDIR, "")
            if not self._is_direct:
                self._remove()  # of one that was killed, with the same id
                with open(self._temporary, "x", encoding="utf-8"):
                    pass
        return self

    def write(self, text: str) -> None:
        """Put the text in its place."""
        with self._saying_why():
            with open(self._path if self._is_direct else self._temporary, "w", encoding="utf-8", newline="") as file:
                file.write(text)
            if not self._is_direct:
                os.replace(self._temporary, self._target)

    def __exit__(self, *_: object) -> None:
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
