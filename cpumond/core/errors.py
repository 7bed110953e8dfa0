"""The exceptions a user can cause, and the exit code of each.

::

    CpumondError                 69  unavailable; the base of all
    ├── UsageError               64  the command line is wrong
    ├── NoSuchError              67  a named operation, pool, node or job does not exist
    ├── NotYetError              75  an awaited event has not happened in time; try again
    ├── UnavailableError         69  a requested cgroup, controller or agent is not available
    ├── ConfigError              78  a configuration or input file is wrong
    │   └── FairShareInputError      a pool tree for which no fair-share update is possible
    ├── CreateError              73  a file, socket or cgroup cannot be created
    ├── AccessError              77  rights are missing
    ├── RefusedError             77  outside the limits set by the operator (managed_roots, leaf cgroups only)
    ├── StateFileError           69  a file of state_dir is damaged
    ├── UnknownLimitsError       75  it is unknown which limits were lowered
    ├── scheduler.store.StoreError    69  the scheduler's database cannot be opened, read or written
    ├── scheduler.model.CommandError  69  a command that the scheduler refuses
    └── CgroupError              69
        ├── CgroupReadError
        └── CgroupWriteError

A cgroup that vanished is not an error, because jobs may end at any moment: readers return None."""

from __future__ import annotations

import contextlib
import errno
import os
import re
from collections.abc import Iterator
from typing import Self

EXIT_OK = 0
EXIT_USAGE = 64
EXIT_NO_SUCH = 67
EXIT_UNAVAILABLE = 69
EXIT_CANNOT_CREATE = 73
EXIT_TRY_AGAIN = 75
EXIT_PERMISSION = 77
EXIT_CONFIG = 78

GONE_ERRNOS = frozenset({errno.ENOENT, errno.ENODEV, errno.ENOTDIR})
"""Errors of the kernel about a removed cgroup: ENODEV on a held descriptor, ENOENT on a path."""


class CpumondError(Exception):
    """Base of all errors that are shown as one sentence. ``exit_code`` is the exit code of the command line.

    A path through a descriptor of this process (/proc/self/fd/N) is shown as the path of the file that is open there.
    """

    exit_code = EXIT_UNAVAILABLE
    is_recorded = False
    """Whether the error is in the scheduler's audit log already."""

    def __init__(self, *arguments: object) -> None:
        super().__init__(*(_resolve_descriptors(each) if isinstance(each, str) else each for each in arguments))


class UsageError(CpumondError):
    """The command line is wrong. ``details``: lines shown below the sentence."""

    exit_code = EXIT_USAGE

    def __init__(self, sentence: str, details: str = "") -> None:
        super().__init__(sentence)
        self.details = details


class NoSuchError(CpumondError):
    """A named operation, pool, node or job does not exist."""

    exit_code = EXIT_NO_SUCH


class NotYetError(CpumondError):
    """An awaited event has not happened in time; try again."""

    exit_code = EXIT_TRY_AGAIN


class ConfigError(CpumondError):
    """A configuration or input file is wrong; the message names file, key and allowed range. ``others``: sentences
    about further mistakes that are independent of this one."""

    exit_code = EXIT_CONFIG
    others: tuple[str, ...] = ()


class Mistakes:
    """Collects independent mistakes, to report all of them at once. A block in ``apart()`` ends at its first
    ConfigError. When the outer block (of this object) ends, it raises one error with all mistakes."""

    MOST = 20
    """Maximum number of mistakes before the search ends: a file with more is not meant as a configuration."""

    def __init__(self) -> None:
        self._sentences: dict[str, None] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, ConfigError):
            self._add(error)
        elif error is not None:
            return
        if self._sentences:
            first, *others = self._sentences
            told = ConfigError(first)
            told.others = tuple(others)
            raise told from None

    @contextlib.contextmanager
    def apart(self) -> Iterator[None]:
        try:
            yield
        except ConfigError as error:
            self._add(error)
            if len(self._sentences) >= self.MOST:
                raise

    def _add(self, error: ConfigError) -> None:
        self._sentences.update(dict.fromkeys((str(error), *error.others)))


class UnavailableError(CpumondError):
    """A requested cgroup, controller or running agent is not available."""


class FairShareInputError(ConfigError):
    """A pool tree for which no fair-share update is possible; the message names the element and the expected value."""


class CreateError(CpumondError):
    """A file, socket or cgroup cannot be created."""

    exit_code = EXIT_CANNOT_CREATE


class AccessError(CpumondError):
    """The rights for a file or socket are missing."""

    exit_code = EXIT_PERMISSION


class RefusedError(CpumondError):
    """The request is outside the limits set by the operator."""

    exit_code = EXIT_PERMISSION


class StateFileError(CpumondError):
    """A file of ``state_dir`` is damaged or of an unknown version."""


class UnknownLimitsError(CpumondError):
    """It is unknown which limits were lowered, or whether they are restored."""

    exit_code = EXIT_TRY_AGAIN


class CgroupError(CpumondError):
    """A cgroup file returned an error that an operator must examine."""


class CgroupReadError(CgroupError):
    """``path`` could not be read or understood."""

    def __init__(self, path: str, cause: object) -> None:
        super().__init__(f"cannot read {path}: {describe(cause)}")
        self.path = path


class CgroupWriteError(CgroupError):
    """The kernel refused ``value`` for ``path``; ``hint`` names the kernel's rule behind the refusal."""

    def __init__(self, path: str, value: str, cause: OSError, hint: str = "") -> None:
        super().__init__(f"cannot write {value!r} to {path}: {describe(cause)}" + (f"; {hint}" if hint else ""))
        self.path = path
        self.value = value
        self.errno = cause.errno


def _resolve_descriptors(text: str) -> str:
    """Replace paths through this process's descriptors by the paths of the files that are open there."""
    return re.sub(r"/proc/self/fd/[0-9]+", _read_link, text) if "/proc/self/fd/" in text else text


def _read_link(found: re.Match[str]) -> str:
    try:
        return os.readlink(found[0])
    except OSError:
        return found[0]


def describe(cause: object) -> str:
    """Return the short text of an error: the system's words for an OSError, otherwise the message."""
    return os.strerror(cause.errno) if isinstance(cause, OSError) and cause.errno is not None else str(cause)


def from_os_error(error: OSError, doing: str, advice: str) -> CpumondError:
    """Convert the error of a failed system call: AccessError for missing rights, else CreateError.

    ``doing`` names the failed action and its place, ``advice`` the remedy."""
    kind = AccessError if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS) else CreateError
    return kind(f"cannot {doing}: {describe(error)}; {advice}")
