"""The exceptions a user can cause, and the exit code of each.

::

    CpumondError                 69  unavailable; the base of all
    ├── UsageError               64  the command line is wrong
    ├── NoSuchError              67  what is named does not exist: an operation, a pool, a node, a job
    ├── NotYetError              75  what is waited for has not come in time; try again
    ├── UnavailableError         69  what is asked for is not there: a cgroup, a controller, the agent
    ├── ConfigError              78  a configuration or input file is wrong
    │   └── FairShareInputError      a pool tree that no fair-share update can be made of
    ├── CreateError              73  a file, socket or cgroup cannot be made
    ├── AccessError              77  the rights are missing
    ├── RefusedError             77  outside what the operator allowed (managed_roots, leaf cgroups only)
    ├── StateFileError           69  a file of state_dir is damaged
    ├── UnknownLimitsError       75  it cannot be seen which limits were lowered
    ├── scheduler.store.StoreError    69  the scheduler's database cannot be opened, read or written
    ├── scheduler.model.CommandError  69  a command that the scheduler refuses
    └── CgroupError              69
        ├── CgroupReadError
        └── CgroupWriteError

A cgroup that vanished is not an error, since jobs end at any moment: readers return None.
"""

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
"""The kernel's answers about a removed cgroup: ENODEV on a held descriptor, ENOENT on a path."""


class CpumondError(Exception):
    """Base of all errors that are shown as one sentence. ``exit_code`` is what the command line ends with.

    A path through a descriptor of this process (/proc/self/fd/N) is shown as the path that the descriptor is open on.
    """

    exit_code = EXIT_UNAVAILABLE
    is_told = False
    """Whether the scheduler's audit log has it already."""

    def __init__(self, *arguments: object) -> None:
        super().__init__(*(_resolve_descriptors(each) if isinstance(each, str) else each for each in arguments))


class UsageError(CpumondError):
    """The command line is wrong. ``details``: lines that are shown below the sentence."""

    exit_code = EXIT_USAGE

    def __init__(self, sentence: str, details: str = "") -> None:
        super().__init__(sentence)
        self.details = details


class NoSuchError(CpumondError):
    """What is named does not exist: an operation, a pool, a node, a job."""

    exit_code = EXIT_NO_SUCH


class NotYetError(CpumondError):
    """What is waited for has not come in time; try again."""

    exit_code = EXIT_TRY_AGAIN


class ConfigError(CpumondError):
    """A configuration or input file is wrong; the message names file, key and allowed range. ``others``: sentences
    about more mistakes, which do not depend on this one."""

    exit_code = EXIT_CONFIG
    others: tuple[str, ...] = ()


class Mistakes:
    """Gathers mistakes that do not depend on each other, to report all at once: a block in ``apart()`` ends at
    its first ConfigError, the whole then raises one with all of them."""

    MOST = 20
    """Further ones are not looked for: that many show a file of rubbish."""

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
    """What is asked for is not there: a cgroup, a controller, the running agent."""


class FairShareInputError(ConfigError):
    """A pool tree that no fair-share update can be made of; the message names the element and what is expected."""


class CreateError(CpumondError):
    """A file, socket or cgroup cannot be made."""

    exit_code = EXIT_CANNOT_CREATE


class AccessError(CpumondError):
    """The rights for a file or socket are missing."""

    exit_code = EXIT_PERMISSION


class RefusedError(CpumondError):
    """The request lies outside of what the operator allowed."""

    exit_code = EXIT_PERMISSION


class StateFileError(CpumondError):
    """A file of ``state_dir`` is damaged or of an unknown version."""


class UnknownLimitsError(CpumondError):
    """It cannot be seen which limits were lowered, or whether they are back."""

    exit_code = EXIT_TRY_AGAIN


class CgroupError(CpumondError):
    """A cgroup file answered with something an operator must look at."""


class CgroupReadError(CgroupError):
    """``path`` could not be read or understood."""

    def __init__(self, path: str, cause: object) -> None:
        super().__init__(f"cannot read {path}: {describe(cause)}")
        self.path = path


class CgroupWriteError(CgroupError):
    """The kernel refused ``value`` for ``path``; ``hint`` says which rule of the kernel is behind it."""

    def __init__(self, path: str, value: str, cause: OSError, hint: str = "") -> None:
        super().__init__(f"cannot write {value!r} to {path}: {describe(cause)}" + (f"; {hint}" if hint else ""))
        self.path = path
        self.value = value
        self.errno = cause.errno


def _resolve_descriptors(text: str) -> str:
    """``text`` with paths through this process's descriptors replaced by those that the descriptors are open on."""
    return re.sub(r"/proc/self/fd/[0-9]+", _read_link, text) if "/proc/self/fd/" in text else text


def _read_link(found: re.Match[str]) -> str:
    try:
        return os.readlink(found[0])
    except OSError:
        return found[0]


def describe(cause: object) -> str:
    """The short text of an error: the system's words for an OSError, else the message."""
    if isinstance(cause, OSError) and cause.errno is not None:
        return os.strerror(cause.errno)
    return str(cause)


def from_os_error(error: OSError, doing: str, advice: str) -> CpumondError:
    """The error of this package for a failed system call: AccessError for missing rights, else CreateError.

    ``doing`` names what failed and where, ``advice`` what to do about it.
    """
    kind = AccessError if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS) else CreateError
    return kind(f"cannot {doing}: {describe(error)}; {advice}")
