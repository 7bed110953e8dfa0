"""Settings of agent and scheduler: layered TOML files, access rights of secrets, addresses, ``[log]``."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import re
import stat
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from typing import Any, Literal, TypeVar

import msgspec

from cpumond.core.decode import ContentError, decode_text
from cpumond.core.errors import AccessError, ConfigError, Mistakes, describe

Kind = TypeVar("Kind")


class Log(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``[log]``: ``format`` auto = journald fields under systemd, console on a terminal, else JSON."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    format: Literal["auto", "json", "console", "journald"] = "auto"


def read_layers(
    path: str, folder: str, parse: Callable[[str, str], dict[str, Any]], finish: Callable[[dict[str, Any], str], Kind]
) -> Kind:
    """Read ``path`` and the ``*.toml`` of ``folder`` (if it exists) in order of names; parse, merge and finish them.

    ``parse`` takes a file's text and name; ``finish`` takes the merged table and ``path``. Raises ConfigError, with
    file and line of the setting, or AccessError."""
    texts: dict[str, str] = {}
    names = sorted(os.listdir(folder)) if os.path.isdir(folder) else []
    drop_ins = [name for name in names if is_drop_in(folder, name)]
    merged: dict[str, Any] = {}
    with Mistakes() as mistakes:
        for name in [path, *(os.path.join(folder, drop_in) for drop_in in drop_ins)]:
            with mistakes.apart():
                text, status = _read_text(name)
                with _naming_lines(name, {name: text}):
                    table = parse(text, name)
                texts[name] = text
                problem = find_rights_of_others(name, status) if table.get("scheduler", {}).get("token") else ""
                if problem:
                    raise ConfigError(
                        f"{name}: scheduler.token: {problem}, or put the token into a separate file (token_file)"
                    )
                merged = _merge(merged, table)
    with _naming_lines(path, texts):
        return finish(merged, path)


@contextlib.contextmanager
def _naming_lines(path: str, texts: Mapping[str, str]) -> Iterator[None]:
    """Add file and line to an error about ``path``. ``texts``: file -> text; a later file overrides earlier ones."""
    try:
        yield
    except ConfigError as error:
        named = ConfigError(_name_place(str(error), path, texts))
        named.others = tuple(_name_place(sentence, path, texts) for sentence in error.others)
        raise named from None


def _name_place(sentence: str, path: str, texts: Mapping[str, str]) -> str:
    told = sentence.removeprefix(f"{path}: ")
    return sentence if told == sentence else f"{_find_place(told, texts) or path}: {told}"


def _find_place(told: str, texts: Mapping[str, str]) -> str:
    """Return ``file:line`` of the key that a sentence begins with, or of its table; "" if neither is found."""
    from cpumond.core.toml_text import list_lines  # only where something is wrong

    found = re.match(r"(source \d+)(?: \([^)]*\))?(?:: |\.)(?:([\w-]+)[:.])?", told)
    key = ".".join(filter(None, found.groups())) if found else told.partition(": ")[0]
    keys = tuple(key.replace("-", "_").split("."))
    places: dict[tuple[str, ...], str] = {}
    before = 0
    for name, text in texts.items():
        sources = 0
        for path, line in list_lines(text).items():
            parts = [part.replace("-", "_") for part in path]
            if number := re.fullmatch(r"source (\d+)", parts[0]):
                sources = max(sources, int(number[1]))
                parts[0] = f"source {before + int(number[1])}"
            places[tuple(parts)] = f"{name}:{line}"
        before += sources
    return next((places[keys[:depth]] for depth in range(len(keys), 0, -1) if keys[:depth] in places), "")


def find_ignored(folder: str) -> list[str]:
    """Return files in ``conf.d`` that are ignored because of their ending, except those that look like copies."""
    names = sorted(os.listdir(folder)) if os.path.isdir(folder) else []
    copies = re.compile(r"[.].*|.*~|README.*|.*[.](bak|orig|old|disabled|example|dpkg-\w+|rpm\w+)")
    places = [os.path.join(folder, name) for name in names if not name.endswith(".toml") and not copies.fullmatch(name)]
    return [place for place in places if os.path.isfile(place)]


def is_drop_in(folder: str, name: str) -> bool:
    """Return whether a file in ``conf.d`` is read: not if it begins with a dot, as leftovers of other programs do."""
    place = os.path.join(folder, name)
    # A missing or unreadable file counts as well, because the user named it; reading it then fails.
    return name.endswith(".toml") and not name.startswith(".") and (os.path.isfile(place) or not os.path.exists(place))


def _read_text(path: str) -> tuple[str, os.stat_result]:
    try:
        with open(path, "rb") as file:
            return decode_text(file.read()), os.fstat(file.fileno())
    except PermissionError as error:
        raise AccessError(f"{path}: cannot be read: {describe(error)}; run as root or fix its rights") from error
    except ContentError as error:
        raise ConfigError(f"{path}: {error}") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {describe(error)}; give --config the path of a TOML file") from None


def find_rights_of_others(path: str, status: os.stat_result) -> str:
    """Return why a file with secrets may not be used (users other than its owner have rights to it); "" if it may be.

    ``status`` must be that of the open file, so that the file cannot be replaced between this check and the reading."""
    mode = stat.S_IMODE(status.st_mode)
    # systemd's copy of a credential belongs to root. Its group bits are the mask of an access control list that names
    # the service's user.
    allowed = 0o040 if os.path.dirname(os.path.abspath(path)) == os.environ.get("CREDENTIALS_DIRECTORY") else 0
    if not mode & 0o077 & ~allowed:
        return ""
    return f"others than its owner have rights to it (mode {mode:04o}); run `chmod 600 {path}`"


def parse_listen(text: str, where: str) -> tuple[str, int]:
    """Parse ``host:port`` or ``[v6]:port``. Raises ConfigError."""
    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise ConfigError(f'{where}: must be "host:port" with a port in [0, 65535], got {text!r}')
    return host.strip("[]"), int(port)


@lru_cache(1024)
def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach ``host``: a loopback address without brackets, or "localhost"."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host.lower() == "localhost"
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback


def _merge(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    merged = dict(below)
    for key, value in above.items():
        if isinstance(value, dict) and isinstance(merged.get(key), dict):
            merged[key] = _merge(merged[key], value)
        elif key == "source" and isinstance(value, list):
            merged[key] = [*merged.get(key, []), *value]
        else:
            merged[key] = value
    return merged
