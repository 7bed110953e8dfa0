"""The files of ``cpumond init``: their content, and whether they may be written.

A file of `cpumond init` begins with MARK and a checksum of the rest; a file that was changed since belongs to its user.
"""

from __future__ import annotations

import hashlib
import os
import re
import textwrap
from collections.abc import Iterable, Mapping
from typing import Any, Final, Literal

import msgspec

from cpumond.agent.config import ENGINE_KINDS, Source, finish_config, parse_config_text
from cpumond.cli.agent.estimate_findings import to_toml
from cpumond.cli.engines import FACTS
from cpumond.core.errors import AccessError, ConfigError, UsageError

MARK: Final = "# Written by `cpumond init`, checksum "
SOURCES_FILE: Final = "engines.toml"
DROP_IN_FILE: Final = "engines.conf"
_USER_PLACE: Final = re.compile(r"-(/run/user/[0-9]+/podman)(?=\s)")
PLAIN_PATH: Final = re.compile(r"/[A-Za-z0-9_@.,+=/-]+")
WIDTH: Final = 78
"""Width of comments, which leaves space on a terminal for the two blanks that `init` shows before each of them."""

OPTIONS: Final[Mapping[str, str | float]] = {"actuator": "guarantee", "limit_rule": "peak", "min_cpu_limit": 0.1}
"""Options of ``job-cpu-monitor`` in a new source, in the order of the file."""


class Planned(msgspec.Struct, frozen=True):
    """One file: its path, its new text, and the state of the existing one.

    States: no file ("new"), an earlier file of ours ("changed"), one that is equal or sufficient ("same"), or the
    user's own ("foreign"), which is left alone."""

    path: str
    text: str
    state: Literal["new", "changed", "same", "foreign"]

    @property
    def is_due(self) -> bool:
        return self.state in ("new", "changed")


def plan_file(path: str, body: str) -> Planned:
    """Plan the file with ``body``. Raises AccessError if the existing one cannot be read."""
    text = sign(body)
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            present = file.read()
    except FileNotFoundError:
        return Planned(path, text, "new")
    except OSError as error:
        raise AccessError(f"{path}: cannot be read: {error.strerror}; run as root") from error
    if present == text:
        return Planned(path, text, "same")
    if is_ours(present):
        return Planned(path, text, "changed")
    return Planned(path, text, "foreign" if list_missing(present, body) else "same")


def is_as_planned(file: Planned) -> bool:
    """Whether a file to be written is still in the state that was planned for: a user may have created or changed it
    while the question was open. Raises OSError."""
    try:
        with open(file.path, encoding="utf-8", errors="replace") as present:
            return file.state == "changed" and is_ours(present.read())
    except FileNotFoundError:
        return True


def list_missing(present: str, body: str) -> list[str]:
    """The settings of ``body`` that the existing text lacks."""
    there = set(present.splitlines())
    return [line for line in body.splitlines() if line and line[0] not in "#[" and line not in there]


def sign(body: str) -> str:
    """Return ``body`` with a first line that marks it as generated."""
    return f"{MARK}{_checksum(body)}\n{body}"


def is_ours(text: str) -> bool:
    """Whether a file is unchanged since ``sign`` made it."""
    first, _, body = text.partition("\n")
    return first == f"{MARK}{_checksum(body)}"


def _checksum(body: str) -> str:
    return hashlib.sha256(body.encode("utf-8", "surrogateescape")).hexdigest()[:16]


def read_own_sources(path: str) -> list[Source]:
    """The sources of an earlier generated file; none if there is no such file. Raises ConfigError."""
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read()
    except (OSError, UnicodeDecodeError):
        return []
    return finish_config(parse_config_text(text, path), path).source if is_ours(text) else []


def parse_sockets(given: Iterable[str]) -> list[Source]:
    """Parse the sources of ``--socket KIND=PATH``. Raises UsageError."""
    found = []
    for text in dict.fromkeys(given):
        kind, _, socket = text.partition("=")
        try:
            found.append(_parse_socket(kind, socket))
        except ConfigError as error:
            raise UsageError(f"--socket {text}: {error}; for example --socket docker=/run/docker-2.sock") from None
    return found


def _parse_socket(kind: str, socket: str) -> Source:
    if kind not in ENGINE_KINDS or not socket:
        raise ConfigError(f"expected KIND=PATH, where KIND is {', '.join(ENGINE_KINDS)}")
    return finish_config({"source": [make_source(kind, socket)]}, "this").source[0]


def make_source(kind: str, socket: str = "") -> dict[str, Any]:
    """The source of an engine that no file names yet, as a table of the configuration."""
    return {"kind": kind, "socket": socket, "mode": "shadow", "job_cpu_monitor": dict(OPTIONS)}


def render_sources(sources: Iterable[Source]) -> str:
    """The part of the configuration that names engines, in shadow mode; "" without engines."""
    lines = []
    for source in sources:
        lines += ["", "[[source]]", f"kind = {to_toml(source.kind)}"]
        lines += [f"socket = {to_toml(source.socket)}"] if source.socket else []
        lines += ['mode = "shadow"']
        options = ", ".join(
            f"{name} = {to_toml(value) if isinstance(value, str) else value}"
            for name, value in source.job_cpu_monitor.items()
        )
        lines += [f"job-cpu-monitor = {{ {options} }}"] if options else []
    if not lines:
        return ""
    head = [
        *_comment(
            "The engines whose jobs cpumond follows, under the names that they have there. Once you change anything "
            "here, the file is yours: `cpumond init` leaves it alone from then on."
        ),
        *_comment(
            "shadow: measured and decided, never written; `cpumond status` shows what each limit would be. Then set "
            'mode = "reclaim", one source at a time. Jobs without a CPU limit are only observed.'
        ),
        *_comment(
            "guarantee: even in mode reclaim no container is changed; a job's guarantee moves and is reported. For "
            'hard caps, actuator = "quota": CPU quotas move; servers get slower. With min_cpu_limit = 1, the default '
            "of YTsaurus' documents, nothing is reclaimed from jobs that request one core or less."
        ),
    ]
    return "\n".join([*head, *lines]) + "\n"


def render_drop_in(sockets: Mapping[str, Iterable[str]]) -> str:
    """The drop-in that lets the agent's unit reach engines (kind -> sockets); "" if no engine needs one."""
    kinds = [kind for kind in FACTS if kind in sockets]
    opened = {kind: list_opened(kind, sockets[kind]) for kind in kinds}
    service: list[str] = []
    if any(FACTS[kind].reports_processes for kind in kinds):
        service += [
            *_comment("An engine reports the first process of a container; /proc shows the cgroup of that process."),
            "ProtectProc=default",
        ]
    if any(path.startswith("/run/user/") for paths in opened.values() for path in paths):
        service += [*_comment("As closed as with `yes`, except that the paths below are visible."), "ProtectHome=tmpfs"]
    for kind in kinds:
        if opened[kind]:
            service += [
                *_comment(FACTS[kind].why),
                f"BindReadOnlyPaths={' '.join(f'-{path}' for path in opened[kind])}",
            ]
    if not service:
        return ""
    units = [unit for kind in kinds if opened[kind] for unit in FACTS[kind].units]
    order = [
        *_comment("A path that does not exist when the agent starts stays hidden until the agent is restarted."),
        f"After={' '.join(units)}",
        "",
    ]
    head = _comment(
        "The unit deliberately hides other services' sockets from the agent. This opens only those of the engines that "
        "it asks about jobs."
    )
    return "\n".join([*head, "", *(["[Unit]", *order] if units else []), "[Service]", *service]) + "\n"


def read_own_user_sockets(path: str) -> list[str]:
    """The users' sockets that an earlier generated drop-in opens: users who are not logged in have none at present."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            text = file.read()
    except OSError:
        return []
    return [f"{each}/podman.sock" for each in _USER_PLACE.findall(text)] if is_ours(text) else []


def list_opened(kind: str, sockets: Iterable[str]) -> list[str]:
    """The paths that a drop-in opens for one kind: Podman's directory, otherwise the sockets."""
    paths = [os.path.dirname(each) if os.path.dirname(each).endswith("/podman") else each for each in sockets]
    paths = [f"/run{path.removeprefix('/var/run')}" if path.startswith("/var/run/") else path for path in paths]
    return list(dict.fromkeys([*(path for path in paths if PLAIN_PATH.fullmatch(path)), *FACTS[kind].opened]))


def _comment(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent="# ", subsequent_indent="# ", break_on_hyphens=False)
