"""Files of ``state_dir``: original settings of every changed cgroup, registered jobs and pins, and ends of the service.

A file has a header line with version and SHA-256, then JSON. It is written under a temporary name, synced and renamed,
and the directory is synced; therefore a crash leaves either the old or the new content. The original settings of a
cgroup are stored before its first change, so ``cpumond restore`` can restore them whatever happens to the agent."""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
from typing import TypeVar

import msgspec

from cpumond.core.answers import RegisteredJob
from cpumond.core.decode import ContentError, decode_json
from cpumond.core.errors import CpumondError, StateFileError, from_os_error
from cpumond.host.cgroup.settings import CpuSettings

VERSION = 1
STATE_FILE = "originals.state"
REGISTRY_FILE = "registered.state"
ENDS_FILE = "service_ends.state"
KEY_FILE = "node_key.state"
BOOT_ID_PATH = "/proc/sys/kernel/random/boot_id"


class Original(msgspec.Struct, frozen=True):
    """The settings of a cgroup before the agent's first change. ``inode`` distinguishes the cgroup from a later one at
    the same path.

    ``actuators`` names the settings that the agent moved; only these are restored. ``unit``: the systemd unit of the
    cgroup, "" without one. A unit's limits were also sent to systemd, which keeps them after the cgroup's end."""

    inode: int
    settings: CpuSettings
    actuators: tuple[str, ...] = ("quota",)
    unit: str = ""


class Originals(msgspec.Struct, frozen=True):
    """Content of ``originals.state``: cgroup path (relative) -> original; valid for one boot of the machine.

    ``number`` grows with each save: of two copies, that with the larger number counts. ``root``: (st_dev, inode) of the
    root of the hierarchy, (0, 0) if unknown."""

    boot_id: str
    cgroups: dict[str, Original] = {}
    number: int = 0
    root: tuple[int, int] = (0, 0)


class Pin(msgspec.Struct, frozen=True):
    """A limit in cores that an operator fixed until ``until`` (seconds since 1970; None = until unpin)."""

    cpu_limit: float
    until: float | None = None


class Registry(msgspec.Struct, frozen=True):
    """Content of ``registered.state``: the jobs and pins that were given over the control socket."""

    jobs: dict[str, RegisteredJob] = {}
    pins: dict[str, Pin] = {}


SERVICE_RESULTS = (
    "success", "watchdog", "signal", "exit-code", "core-dump", "oom-kill", "timeout", "protocol", "resources", "other",
)  # fmt: skip
"""systemd's words for how a service ended (``$SERVICE_RESULT``, systemd.exec); "other" stands for any other word."""


class ServiceEnds(msgspec.Struct, frozen=True):
    """Content of ``service_ends.state``: how often the service ended with each result, since the file was created."""

    ends: dict[str, int] = {}


class NodeKey(msgspec.Struct, frozen=True):
    """Content of ``node_key.state``: the secret by which the scheduler recognises a new run of this agent."""

    key: str


Content = TypeVar("Content", bound=msgspec.Struct)


def read_boot_id() -> str:
    """Return the identity of this boot; "" if the kernel does not report it."""
    try:
        with open(BOOT_ID_PATH, encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        # Without the identity, a file of an earlier boot counts as one of this boot. Inodes still reveal new cgroups.
        return ""


def is_of_this_boot(content: Originals, copy_path: str, run: str = "/run") -> bool:
    """Return whether the cgroups of ``content`` may still exist; ``copy_path`` is its copy in ``runtime_dir``.

    If ``run`` is a file system in memory, a copy below it is of this boot. The boot's identity alone is not enough: if
    systemd runs in a container, the service's sandbox shows the host's identity, and a shell shows the container's."""
    with contextlib.suppress(OSError):
        in_run = os.path.realpath(copy_path).startswith(f"{run}/")
        if in_run and os.stat(copy_path).st_dev != os.stat("/").st_dev:
            return True
    return content.boot_id == read_boot_id()


Identity = tuple[int, int]
"""Device and inode of a file; they differ for a new file of the same name."""


def identify(path: str) -> Identity | None:
    """Return the identity of the file at ``path``; None if there is no file."""
    try:
        found = os.stat(path, follow_symlinks=False)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def save(path: str, content: msgspec.Struct, sync: bool = True) -> Identity:
    """Replace the file at ``path``. On return the content is on disk; if ``sync`` is False, it may be lost in a crash
    of the machine, but not of the agent. Raises CreateError or AccessError."""
    temporary = f"{path}.new"
    try:
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            _write_all(fd, _encode(content))
            found = os.fstat(fd)
            if sync:
                os.fsync(fd)
        finally:
            os.close(fd)
        os.rename(temporary, path)
        if sync:
            directory = os.open(os.path.dirname(path), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                os.fsync(directory)
            finally:
                os.close(directory)
    except OSError as error:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise from_os_error(error, f"write {path}", "free space or fix the rights of state_dir") from error
    return found.st_dev, found.st_ino


def overwrite(path: str, content: Originals) -> None:
    """Overwrite ``path``, whose content is longer, in place. For a disk without space for a second file.

    A crash during the write leaves a damaged file. Raises OSError."""
    data = _encode(content)
    fd = os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        _write_all(fd, data)
        os.ftruncate(fd, len(data))
        os.fsync(fd)
    finally:
        os.close(fd)


def _encode(content: msgspec.Struct) -> bytes:
    payload = msgspec.json.encode(content)
    return f"cpumond-state {VERSION} sha256={hashlib.sha256(payload).hexdigest()}\n".encode() + payload


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def load(path: str, kind: type[Content]) -> Content | None:
    """Return the content of ``path``; None if there is no such file. Raises StateFileError if it is damaged."""
    try:
        with open(path, "rb") as file:
            header, _, payload = file.read().partition(b"\n")
    except FileNotFoundError:
        return None
    except OSError as error:
        raise from_os_error(error, f"read {path}", "fix the rights of state_dir") from error
    fields = header.split(b" ")
    if len(fields) != 3 or fields[0] != b"cpumond-state" or fields[1] != str(VERSION).encode():
        raise StateFileError(f"{path}: not a state file of version {VERSION}")
    if fields[2] != b"sha256=" + hashlib.sha256(payload).hexdigest().encode():
        raise StateFileError(f"{path}: the checksum does not match its content")
    try:
        return decode_json(payload, kind)
    except ContentError as error:
        raise StateFileError(f"{path}: {error}") from None


def load_newest(paths: list[str], keep_damaged: bool = False) -> tuple[Originals | None, str]:
    """Return the newest of several copies (None if no copy is intact), and a sentence about a copy that is unreadable.

    The sentence is "" if all copies are readable. Damaged files are put aside unless ``keep_damaged``. If no copy is
    intact, raises AccessError or CreateError for a copy that cannot be opened but may be intact."""
    found: list[Originals] = []
    complaint, refusal = "", None
    for path in paths:
        try:
            content = load(path, Originals)
        except StateFileError as error:
            aside = "" if keep_damaged else f"; kept as {put_aside(path)}"
            complaint = complaint or f"{error}{aside}"
        except CpumondError as error:
            complaint, refusal = complaint or str(error), error
        else:
            found += [content] if content is not None else []
    if not found and refusal is not None:
        raise refusal
    return max(found, key=lambda content: content.number, default=None), complaint


def put_aside(path: str) -> str:
    """Rename a damaged file, so that it can be inspected later. Return the new name."""
    for number in range(1000):
        aside = f"{path}.damaged-{number}"
        if not os.path.exists(aside):
            with contextlib.suppress(OSError):
                os.rename(path, aside)
            return aside
    return path


def make_directory(path: str, mode: int, key: str) -> None:
    """Create a directory that the configuration names, if it is missing. Raises CreateError or AccessError."""
    try:
        os.makedirs(path, mode=mode, exist_ok=True)
    except OSError as error:
        raise from_os_error(error, f"create the directory {path}", f"set `{key}` or run as root") from error


def read_service_ends(state_dir: str) -> dict[str, int]:
    """Return how often the service ended with each of SERVICE_RESULTS; zeros if the file is missing or damaged."""
    found = ServiceEnds()
    with contextlib.suppress(CpumondError):
        found = load(os.path.join(state_dir, ENDS_FILE), ServiceEnds) or found
    return {result: max(found.ends.get(result, 0), 0) for result in SERVICE_RESULTS}


def count_service_end(state_dir: str, result: str) -> None:
    """Count an end of the service; ``result`` is systemd's word for how it ended. Raises CreateError or AccessError."""
    ends = read_service_ends(state_dir)
    ends[result if result in ends else "other"] += 1
    save(os.path.join(state_dir, ENDS_FILE), ServiceEnds(ends))


def read_node_key(state_dir: str) -> str:
    """Return the key of this host as a node. If it is missing or damaged, create a new one.

    If the new key cannot be stored, it is valid only for this run. Then the next run may have to wait until the
    scheduler declares the node of this run lost."""
    path = os.path.join(state_dir, KEY_FILE)
    with contextlib.suppress(CpumondError):
        found = load(path, NodeKey)
        if found is not None and found.key:
            return found.key
    key = secrets.token_hex(32)
    with contextlib.suppress(CpumondError):
        save(path, NodeKey(key))
    return key


def keep_node_key(state_dir: str, key: str) -> list[str]:
    """If the file of the key was removed, rewrite it and return its path. Raises CreateError or AccessError."""
    path = os.path.join(state_dir, KEY_FILE)
    if os.path.lexists(path):
        return []
    make_directory(state_dir, 0o700, "state_dir")
    save(path, NodeKey(key))
    return [path]
